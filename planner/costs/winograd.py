"""Convolutions by fewer multiplications: Winograd's minimal filtering over tiles (Lavin and Gray, CVPR 2016).

A 3 x 3 convolution of stride 1 needs 36 multiplications for 4 x 4 results of a channel pair where the plain sum takes
144: F(4x4, 3x3). Tiles of 6 x 6 inputs are transformed, 36 matrix products sum over the channels, and the products are
transformed back; the gradient towards the input is the same on the results' gradient, that towards the weights is
F(3x3, 4x4) on both. The libraries of GPUs run the three steps one after the other through memory ("non-fused"), for
which each product pays (1 + t) of its input and result for the transforms and t of them for the matrix products, with
t = 36 / 16 transformed elements for each of a channel, more where the last tiles stick out. (In profiles of cuDNN these
are the kernels `winograd_nonfused::winogradForwardData4x4`, a plain matrix product, and `winogradForwardOutput4x4`.)

It pays where products cost as much as sums do: on vector units, which is where fp32 without matrix units runs. Matrix
units multiply faster than memory can carry the transformed tiles, and their libraries do without. The scratch memory
for transformed tiles is not charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.graph import DType, Graph, Node

_TILE = 4
"""Results of a tile, each way."""
_TRANSFORMED = (_TILE + 2) ** 2
"""Elements of a transformed tile, and multiplications for it and a pair of channels."""


@dataclass(frozen=True)
class FastConvolutions:
    """Where the method applies, and what it costs; float64 arrays of shape [nodes].

    Attributes:
        multiplied: multiplications over those of the plain sum; 1 where the method does not apply.
        transform_bytes: traffic of the transforms of one product (forward, or one of both gradients).
        product_bytes: traffic of its matrix products.
    """

    multiplied: np.ndarray
    transform_bytes: np.ndarray
    product_bytes: np.ndarray

    @property
    def applies(self) -> np.ndarray:
        """bool [nodes]."""
        return np.asarray(self.product_bytes > 0)


def fast_convolutions(graph: Graph, sizes: Mapping[DType, float]) -> FastConvolutions:
    """The convolutions of a graph that have the method, with the bytes an element takes in training. O(nodes)."""
    rows = np.tile([1.0, 0.0, 0.0], (len(graph.nodes), 1))
    for i, node in enumerate(graph.nodes):
        if _eligible(graph, node):
            rows[i] = _costs(graph, node, sizes)
    return FastConvolutions(*rows.T)


def _eligible(graph: Graph, node: Node) -> bool:
    """A 3 x 3 convolution of stride 1, undilated, all input channels to all results."""
    if node.op not in ("Conv", "com.microsoft.FusedConv"):
        return False
    weight = graph.tensors[node.inputs[1]]
    plain = all(v == 1 for key in ("strides", "dilations") for v in _ints(node, key))
    return weight.shape[2:] == (3, 3) and plain and node.attributes.get("group", 1) == 1


def _ints(node: Node, key: str) -> tuple[int, ...]:
    value = node.attributes.get(key, ())
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()


def _costs(graph: Graph, node: Node, sizes: Mapping[DType, float]) -> tuple[float, float, float]:
    data, weight, result = (graph.tensors[n] for n in (node.inputs[0], node.inputs[1], node.outputs[0]))
    rows, columns = result.shape[2:]
    width = sizes[result.dtype]
    tiles = result.shape[0] * -(-rows // _TILE) * -(-columns // _TILE)
    channels = weight.shape[1] + weight.shape[0]
    transformed = _TRANSFORMED * tiles * channels
    multiplied = _TRANSFORMED * tiles / (9 * result.shape[0] * rows * columns)
    product = transformed + _TRANSFORMED * weight.shape[1] * weight.shape[0]
    return multiplied, (data.elements + result.elements + transformed) * width, product * width

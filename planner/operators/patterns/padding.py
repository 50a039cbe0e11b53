"""Padding before a convolution: a copy in training, which exporters merge into the convolution or leave as a node.

Frameworks' convolutions pad both sides alike. A convolution that does not was a padding and a convolution before an
exporter merged them, and so, in the same file, was every other convolution that pads. Padding by nothing is left out.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph import DType, Graph, Node, Tensor, TensorKind, per_graph
from planner.operators.rewriting import PATTERNS, Pattern, Rewrite


def _pads(node: Node) -> tuple[int, ...]:
    given = node.attributes.get("pads", ())
    return tuple(int(pad) for pad in given) if isinstance(given, tuple) else ()


@per_graph
def _were_merged(graph: Graph) -> bool:
    """Whether some convolution pads its two sides differently."""
    all_pads = (_pads(node) for node in graph.nodes if node.op == "Conv")
    return any(pads[: len(pads) // 2] != pads[len(pads) // 2 :] for pads in all_pads)


def _padded(graph: Graph, index: int) -> Rewrite | None:
    node = graph.nodes[index]
    at = graph.producer.get(node.inputs[0], -1)
    if at >= 0 and graph.nodes[at].op == "Pad" and len(graph.nodes[at].inputs) > 1:
        pad = graph.nodes[at]
        amounts = graph.constants.get(pad.inputs[1], (1,))
        unpadded = replace(node, inputs=(pad.inputs[0], *node.inputs[1:]))
        return None if any(amounts) else Rewrite(frozenset({at, index}), (unpadded,))
    pads = _pads(node)
    if not any(pads) or not _were_merged(graph):
        return None
    source = graph.tensors[node.inputs[0]]
    half = len(pads) // 2
    grown = (size + pads[d] + pads[half + d] for d, size in enumerate(source.shape[2:]))
    made = Tensor(f"{node.key}@padded", (*source.shape[:2], *grown), source.dtype, TensorKind.ACTIVATION)
    sizes = Tensor(f"{node.key}@pads", (2 * len(source.shape),), DType.INT64, TensorKind.CONSTANT)
    pad = Node(made.name, "Pad", (source.name, sizes.name), (made.name,), {}, node.module, "", node.repeat)
    attributes = {**node.attributes, "pads": (0,) * len(pads)}
    convolution = replace(node, inputs=(made.name, *node.inputs[1:]), attributes=attributes)
    amounts = (0, 0, *pads[:half], 0, 0, *pads[half:])
    return Rewrite(frozenset({index}), (pad, convolution), (made, sizes), {sizes.name: amounts})


PATTERNS.register("padding", Pattern(frozenset({"Conv"}), _padded))

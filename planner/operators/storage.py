"""Which tensors share memory: views resolved to the tensor that owns the storage, with strides.

Follows the eager semantics of training frameworks: transposing, slicing and splitting give views; reshaping gives a
view where the strides allow it and copies otherwise; element-wise results keep the layout of their operand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner.graph import Graph, Node, Tensor
from planner.operators.entry import OpCall, rule_of
from planner.operators.specs import nodes_where
from planner.operators.types import SavedBytes


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a storage without gaps whose dimensions lie in `order`, outermost first; row-major by default."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a view with another shape, None where only a copy can have it; in elements, as numpy finds them."""
    if math.prod(shape) in (0, 1):
        return dense_strides(target)
    source = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), shape, strides, writeable=False)
    try:
        return source.reshape(tuple(target), copy=False).strides
    except ValueError:
        return None


def _arranges(node: Node) -> bool:
    """Whether results may lie otherwise than row-major in a storage of their own."""
    rule = rule_of(node.op)
    return rule.keeps_layout or rule.strides is not None


class Storages:
    """Layout of every tensor of a graph.

    Args:
        graph: the graph.
        identity: nodes that hand their first input through unchanged (dropout that is switched off).
        aliases: results that are never made: reading them reads another tensor (weights gathered for each token).
        dense: nodes whose results are row-major, although their operator may keep its operand's layout.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        identity: frozenset[int] = frozenset(),
        aliases: Mapping[str, str] | None = None,
        dense: frozenset[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._roots: dict[str, str] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        aliased = aliases or {}
        arranged = nodes_where(graph, lambda i: _arranges(graph.nodes[i]))
        for i in sorted({*arranged, *identity, *(graph.producer[name] for name in aliased)}):
            node = graph.nodes[i]
            for tensor in (graph.tensors[name] for name in node.outputs if name in graph.tensors):
                if tensor.name in aliased:
                    self._roots[tensor.name] = aliased[tensor.name]
                    self._strides[tensor.name] = dense_strides(tensor.shape)
                    continue
                view, self._strides[tensor.name] = self._lay(node, tensor, i in identity, i in dense)
                if view:
                    self._roots[tensor.name] = self.root(node.inputs[0])

    def _lay(self, node: Node, tensor: Tensor, identity: bool, dense: bool) -> tuple[bool, tuple[int, ...]]:
        """Whether a result is a view of the node's first input, and its strides."""
        rule = rule_of(node.op)
        source = self._graph.tensors.get(node.inputs[0]) if node.inputs else None
        strides = self.strides(source.name) if source is not None else None
        if strides is not None and not identity:
            same_type = source is not None and source.dtype == tensor.dtype
            view = rule.strides if same_type else None
            strides = view(OpCall.of(self._graph, node), strides) if view is not None else None
        if strides is not None:
            return True, strides
        return False, self._fresh_strides(node, tensor, rule.keeps_layout and not dense)

    def strides(self, name: str) -> tuple[int, ...]:
        """Elements between neighbours along each dimension of a tensor, 0 for a broadcast one.

        Tensors that no node writes, and results that no rule lays out, own their storage and are row-major.
        """
        known = self._strides.get(name)
        return dense_strides(self._graph.tensors[name].shape) if known is None else known

    def root(self, name: str) -> str:
        """Name of the tensor that owns a tensor's storage."""
        return self._roots.get(name, name)

    def _fresh_strides(self, node: Node, tensor: Tensor, keeps_layout: bool) -> tuple[int, ...]:
        """Strides of a new storage, which may keep the order in memory of the first full operand."""
        if keeps_layout:
            for name in node.inputs:
                operand = self._graph.tensors.get(name) if name else None
                if operand is not None and operand.shape == tensor.shape:
                    strides = self.strides(name)
                    if 0 not in strides:
                        order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
                        return dense_strides(tensor.shape, order)
        return dense_strides(tensor.shape)


def kept_pairs(saved: Sequence[tuple[SavedBytes, ...]], nodes: Iterable[int]) -> list[tuple[str, int]]:
    """Names and bytes of all storages that some nodes keep, in order; one that several keep comes several times."""
    return [(s.storage, s.byte_count) for i in nodes for s in saved[i]]

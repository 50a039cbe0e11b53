"""What blocks compute, without the names of anything: hashes by which two versions of a model are matched.

The hash of a block covers its operators with their attributes, how they read each other, and the sizes and types of
tensors. Sizes that follow the batch are written per sample, so that a block has one hash at every micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.costs.imported import GIVEN_SECONDS
from planner.errors import ModelError
from planner.graph import Chain, Graph, TensorKind, structural_hash
from planner.graph.types import per_graph
from planner.operators.batching import BatchFlow, batch_flow


@per_graph
def block_structures(chain: Chain) -> tuple[str, ...]:
    """By block, a hash (16 hex digits) that is equal for blocks that differ only in names and values of weights.

    Blocks of one signature are alike at the graph's batch, so that one of each is worked out. O(nodes).
    """
    described = _described(chain.graph)
    known: dict[str, str] = {}
    for block in chain.blocks:
        if block.signature not in known:
            nodes = (*block.side, *block.nodes)
            known[block.signature] = structural_hash(chain.graph, nodes, described, without=GIVEN_SECONDS)
    return tuple(known[block.signature] for block in chain.blocks)


def _described(graph: Graph) -> Callable[[int, int, str], str]:
    """The function that describes the operand of a node, given their numbers and the tensor's name, per sample."""
    try:
        flow = batch_flow(graph)
    except ModelError:  # nothing follows the batch: sizes are as they are
        flow = BatchFlow(0, 0, {}, {}, {})

    def described(node: int, position: int, name: str) -> str:
        tensor = graph.tensors.get(name)
        if tensor is None:
            return "?"
        marks = flow.marks.get(name, (None,) * len(tensor.shape))
        shape = ",".join(
            _size(size, flow.batch, mark is not None) for size, mark in zip(tensor.shape, marks, strict=True)
        )
        value = graph.constants.get(name) if tensor.kind is TensorKind.CONSTANT and name not in flow.marks else None
        flags = flow.edits.get((node, position), ())
        if value is not None and flags:
            value = tuple(_size(int(v), flow.batch, flag) for v, flag in zip(value, flags, strict=True))  # type: ignore[assignment]
        return f"{tensor.kind}{tensor.dtype}({shape}){'' if value is None else repr(value)}"

    return described


def _size(size: int, batch: int, follows: bool) -> str:
    """A size of a tensor; one that follows the batch per sample, marked."""
    return f"{size // batch}b" if follows and batch else str(size)

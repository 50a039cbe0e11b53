"""When two blocks are the same problem, and how the names of one translate to those of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.graph import Chain, Graph
from planner.sharding.inner_points import InnerPoint
from planner.sharding.problem import Facts, Setting

_BITS = 20
"""Leading bits to which the prices of equal blocks agree: six decimal digits."""


@dataclass(frozen=True)
class BlockView:
    """A block as the inner search sees it.

    Attributes:
        members: its nodes, side nodes first.
        inputs: tensors it reads that other blocks write.
        outputs: tensors it writes that later blocks read.
        names: names of its tensors and kept storages in order of first use.
        key: equal for blocks that are the same problem but for the seconds of their operators (`PriceMarks`).
    """

    members: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    names: tuple[str, ...]
    key: tuple[object, ...]

    @staticmethod
    def of(chain: Chain, graph: Graph, b: int, facts: Facts) -> BlockView:
        """The view of block b; O(its nodes)."""
        block = chain.blocks[b]
        members = (*block.side, *block.nodes)
        used = dict.fromkeys(n for i in members for n in (*graph.nodes[i].inputs, *graph.nodes[i].outputs) if n)
        made = {n for i in members for n in graph.nodes[i].outputs}
        inputs = tuple(n for n in chain.crossing[b] if n in used and n not in made)
        outputs = tuple(n for n in chain.crossing[b + 1] if n in made)
        kept = [s for i in members for s in facts.saved[i]]
        names = tuple(dict.fromkeys([*used, *(s.storage for s in kept)]))
        number = {name: k for k, name in enumerate(names)}
        places = {graph.nodes[i].key: k for k, i in enumerate(members)}

        def mark(storage: str) -> object:
            owner, _, what = storage.rpartition("#")
            return (places[owner], what) if owner in places else number[storage]

        key = (
            block.signature,
            len(block.side),
            tuple(number[n] for n in inputs),
            tuple(number[n] for n in outputs),
            tuple(n in facts.carrying for n in used),
            tuple(graph.tensors[n].shape for n in used),
            tuple((mark(s.storage), s.byte_count) for s in kept),
            tuple(map(facts.forbids, members)),
        )
        return BlockView(members, inputs, outputs, names, key)


class PriceMarks:
    """Seconds of a setting's nodes at some shares, rounded so that equal ones compare equal."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rounded: dict[float, np.ndarray] = {}

    def of(self, members: Sequence[int], shares: Iterable[float]) -> bytes:
        """Equal for nodes that take equally long, one by one and forward and backward, at each of the shares."""
        nodes = list(members)
        return b"".join(self._at(share)[nodes].tobytes() for share in shares)

    def _at(self, share: float) -> np.ndarray:
        """[nodes, 2, 2] mantissa and exponent, forward and backward."""
        if share not in self._rounded:
            mantissa, exponent = np.frexp(np.stack(self._setting.nodes_s(share), axis=1))
            rounded = np.round(mantissa * 2**_BITS).astype(np.int32)
            self._rounded[share] = np.stack([rounded, exponent.astype(np.int32)], axis=2)
        return self._rounded[share]


def renamed(point: InnerPoint, names: Mapping[str, str]) -> InnerPoint:
    """A point with its tensors, operators and storages under other names; the point itself without names."""
    if not names:
        return point

    def new(name: str) -> str:
        if name.startswith("op:"):
            return f"op:{names[name[3:]]}"
        return names[name]

    return replace(
        point,
        decision={new(name): choice for name, choice in point.decision.items()},
        communication=tuple(replace(c, tensor=new(c.tensor)) for c in point.communication),
        saved=tuple((new(storage), size) for storage, size in point.saved),
        checkpoints=tuple((new(name), size) for name, size in point.checkpoints),
        weights=tuple((new(name), fraction) for name, fraction in point.weights),
    )

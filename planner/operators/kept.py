"""The storages that the nodes of a graph keep for backward, in arrays."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import overload

import numpy as np

from planner.operators.types import SavedBytes


class SavedStorages(Sequence[tuple[SavedBytes, ...]]):
    """By node, the storages that it keeps; made from arrays on demand, since most are only summed.

    Args:
        starts: [nodes + 1] where the entries of each node start.
        names: [entries] names of the storages.
        sizes: [entries] their bytes.
    """

    def __init__(self, starts: array[int], names: Sequence[str], sizes: array[int]) -> None:
        self._starts, self._names, self._sizes = starts, names, sizes
        self._made: dict[int, tuple[SavedBytes, ...]] = {}

    @staticmethod
    def of(count: int, nodes: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> SavedStorages:
        """Of so many nodes, from entries in any order: the node that keeps, the name of the storage, and its bytes."""
        at = np.array(nodes, dtype=np.int64)
        order = np.argsort(at, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=count))]).astype(np.int64)
        ordered = np.array(sizes, dtype=np.int64)[order]
        return SavedStorages(
            array("q", starts.tobytes()), list(map(names.__getitem__, order.tolist())), array("q", ordered.tobytes())
        )

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[SavedBytes, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[SavedBytes, ...]]: ...

    def __getitem__(self, index: int | slice) -> tuple[SavedBytes, ...] | Sequence[tuple[SavedBytes, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        made = self._made.get(index)
        if made is None:
            made = tuple([SavedBytes(name, size) for name, size in self.pairs((range(len(self))[index],))])
            self._made[index] = made
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(tuple.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def pairs(self, nodes: Iterable[int]) -> list[tuple[str, int]]:
        """Names and bytes of all entries of some nodes, in order."""
        starts, names, sizes = self._starts, self._names, self._sizes
        return [(names[k], sizes[k]) for i in nodes for k in range(starts[i], starts[i + 1])]

    def without(self, nodes: Collection[int]) -> SavedStorages:
        """The same, but that some nodes keep nothing."""
        gone = frozenset(nodes)
        starts, names, sizes = array("q", [0]), list[str](), array("q")
        for i in range(len(self)):
            own = slice(self._starts[i], self._starts[i + 1] if i not in gone else self._starts[i])
            names += self._names[own]
            sizes += self._sizes[own]
            starts.append(len(names))
        return SavedStorages(starts, names, sizes)


def kept_pairs(saved: Sequence[tuple[SavedBytes, ...]], nodes: Iterable[int]) -> list[tuple[str, int]]:
    """Names and bytes of all storages that some nodes keep, in order; one that several keep comes several times."""
    if isinstance(saved, SavedStorages):
        return saved.pairs(nodes)
    return [(s.storage, s.byte_count) for i in nodes for s in saved[i]]


def keeping_nothing(
    saved: Sequence[tuple[SavedBytes, ...]], nodes: Collection[int]
) -> Sequence[tuple[SavedBytes, ...]]:
    """What each node keeps, but that some keep nothing."""
    if not nodes:
        return saved
    if isinstance(saved, SavedStorages):
        return saved.without(nodes)
    gone = frozenset(nodes)
    return tuple([() if i in gone else kept for i, kept in enumerate(saved)])

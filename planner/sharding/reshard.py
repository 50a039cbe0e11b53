"""Changes of layout as sequences of collectives, the quickest sequence for each pair of layouts.

One step changes what happens along one axis: gather a cut (all-gather), move a cut to another dimension (all-to-all),
sum partial results (all-reduce), sum and keep a piece (reduce-scatter), keep a piece of what is whole (free), keep the
whole on one rank (free). Two kinds of steps join axes: one all-reduce over all of them, and a permutation that moves a
cut from one axis to another of the same size. Steps are the edges of a graph of layouts; sequences are its shortest
paths, by seconds. The same tables price the backward pass, where the gradient changes layout the other way.

Dispatch of a mixture of experts turns tokens cut along their groups into tokens cut along their experts: a cut moves
from one dimension of the dispatched tensor `[groups, experts, capacity, width]` to another, which is an all-to-all
(Lepikhin et al., ICLR 2021).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import UsageError
from planner.hardware import Collective, moved_bytes
from planner.sharding.layout import (
    PARTIAL,
    REPLICATED,
    Part,
    TensorLayout,
    is_innermost,
    layout_text,
    layouts,
    shard_elements,
)
from planner.sharding.mesh import Mesh

_ROUNDING = 1e-15
"""Fraction by which a sequence of steps must be quicker than another to count as quicker."""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One step of a change of layout.

    Attributes:
        collective: the collective; None where each rank keeps a piece of a replicated tensor, or one rank keeps it all
            (free).
        axes: indices of the mesh axes along which it runs.
        before: layout before it.
        after: layout after it.
        payload_bytes: bytes that a rank contributes (receives, for a gather), as `planner.hardware.collectives` counts
            them.
        sent_bytes: bytes that a rank sends in a ring, or to its peers.
        seconds: its duration.
    """

    collective: Collective | None
    axes: tuple[int, ...]
    before: TensorLayout
    after: TensorLayout
    payload_bytes: float
    sent_bytes: float
    seconds: float

    @property
    def what(self) -> str:
        """Name of the step: a collective, "permute" for a send, "slice" or "mask" for a free step."""
        if self.collective is None:
            return "slice" if self.after[self.axes[0]].cuts else "mask"
        return "permute" if self.collective is Collective.SEND else self.collective.replace("_", "-")

    def __str__(self) -> str:
        return f"{self.what} {layout_text(self.before)}>{layout_text(self.after)}"


def _replace(layout: TensorLayout, axis: int, part: Part) -> TensorLayout:
    return (*layout[:axis], part, *layout[axis + 1 :])


def _axis_moves(
    layout: TensorLayout, axis: int, choices: Sequence[Part]
) -> Iterator[tuple[Collective | None, TensorLayout]]:
    """Steps along one axis, for a tensor of any shape."""
    now = layout[axis]
    if now.cuts and not is_innermost(layout, axis, now.dim):
        return
    for part in choices:
        if part == now or (part.cuts and not is_innermost(layout, axis, part.dim)):
            continue
        move = None
        if now.cuts:
            move = Collective.ALL_GATHER if part == REPLICATED else Collective.ALL_TO_ALL if part.cuts else None
        elif now == PARTIAL:
            move = Collective.ALL_REDUCE if part == REPLICATED else Collective.REDUCE_SCATTER
        else:
            yield None, _replace(layout, axis, part)
        if move is not None:
            yield move, _replace(layout, axis, part)


def _joint_moves(
    layout: TensorLayout, sizes: Sequence[int]
) -> Iterator[tuple[Collective, tuple[int, ...], TensorLayout]]:
    """Steps along several axes at once."""
    partial = [a for a, part in enumerate(layout) if part == PARTIAL]
    for count in range(2, len(partial) + 1):
        for axes in itertools.combinations(partial, count):
            yield Collective.ALL_REDUCE, axes, tuple(REPLICATED if a in axes else p for a, p in enumerate(layout))
    for a, b in itertools.permutations(range(len(layout)), 2):
        movable = layout[a].cuts and layout[b] == REPLICATED and sizes[a] == sizes[b]
        if movable and is_innermost(layout, a, layout[a].dim):
            after = _replace(_replace(layout, a, REPLICATED), b, layout[a])
            if is_innermost(after, b, layout[a].dim):
                yield Collective.SEND, (min(a, b), max(a, b)), after


_Moves = tuple[tuple[Collective | None, tuple[int, ...], np.ndarray, np.ndarray], ...]
"""Direct steps by collective and axes, with the indices of the layouts before and after."""


@functools.lru_cache(maxsize=1024)
def _moves(all_layouts: tuple[TensorLayout, ...], sizes: tuple[int, ...]) -> _Moves:
    """All direct steps between some layouts, the same for tensors of any shape."""
    index = {layout: i for i, layout in enumerate(all_layouts)}
    choices = sorted({part for layout in all_layouts for part in layout})
    batches: dict[tuple[Collective | None, tuple[int, ...]], list[tuple[int, int]]] = {}
    for i, layout in enumerate(all_layouts):
        one_axis = [(m, (a,), after) for a in range(len(layout)) for m, after in _axis_moves(layout, a, choices)]
        for move, axes, after in [*one_axis, *_joint_moves(layout, sizes)]:
            k = index.get(after)
            if k is not None:
                batches.setdefault((move, axes), []).append((i, k))
    return tuple((move, axes, *np.asarray(pairs, dtype=np.int64).T) for (move, axes), pairs in batches.items())


_Changes = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Fastest changes between layouts, from row to column, [layouts, layouts] each: seconds, bytes that a rank sends, the
number of the direct step among `_moves`, and the layout after the first step."""


class ReshardTable:
    """Fastest changes between all layouts of one shape on one mesh.

    Attributes:
        mesh: the mesh.
        shape: shape of the full tensor.
        item_bytes: bytes of an element.
        layouts: all layouts, in a fixed order.
        index: position of each layout.
        elements: int64 [layouts], elements of the largest piece that a rank holds.
    """

    def __init__(
        self, mesh: Mesh, shape: Sequence[int], item_bytes: float, all_layouts: Sequence[TensorLayout]
    ) -> None:
        self.mesh, self.shape, self.item_bytes = mesh, tuple(shape), item_bytes
        self.layouts = tuple(all_layouts)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        held = [shard_elements(self.shape, layout, mesh.sizes) for layout in self.layouts]
        self.elements = np.asarray(held, dtype=np.int64)

    @functools.cached_property
    def _changes(self) -> _Changes:
        """Worked out when a change is asked for: of most tensors under a floor only the pieces are."""
        return _changes(self.mesh, self.layouts, self.item_bytes, tuple(self.elements.tolist()))

    @property
    def seconds(self) -> np.ndarray:
        """float64 [layouts, layouts], from row to column; inf where no sequence leads there."""
        return self._changes[0]

    @property
    def sent_bytes(self) -> np.ndarray:
        """Bytes that a rank sends during each change, [layouts, layouts]."""
        return self._changes[1]

    def position(self, layout: TensorLayout) -> int:
        """Index of a layout.

        Raises:
            UsageError: the tensor cannot have the layout.
        """
        if layout not in self.index:
            raise UsageError(
                f"a tensor of shape {list(self.shape)} cannot lie as {layout_text(layout)} on a mesh of "
                f"{' x '.join(map(str, self.mesh.sizes))}",
                hint="choose dimensions that the axes divide, or allow padding",
            )
        return self.index[layout]

    def steps(self, before: TensorLayout, after: TensorLayout) -> tuple[ReshardStep, ...]:
        """The steps of the fastest change; empty when the layouts are equal.

        Raises:
            UsageError: the tensor cannot have one of the layouts, or no sequence of steps leads there.
        """
        i, j = self.position(before), self.position(after)
        if not math.isfinite(self.seconds[i, j]):
            raise UsageError(
                f"no change leads from {layout_text(before)} to {layout_text(after)}", hint="replicate first"
            )
        result, moves, (_, _, direct, following) = [], _moves(self.layouts, self.mesh.sizes), self._changes
        while i != j:
            k = int(following[i, j])
            kind, axes = moves[direct[i, k]][:2]
            result.append(self._step(kind, axes, i, k))
            i = k
        return tuple(result)

    def _step(self, kind: Collective | None, axes: tuple[int, ...], i: int, k: int) -> ReshardStep:
        payload = 0.0
        if kind is not None:
            held = self.item_bytes * self.elements[[i, k]]
            payload = float(_payload(kind, self.mesh.ranks_along(axes), held[0], held[1]))
        costs = payload, float(self.sent_bytes[i, k]), float(self.seconds[i, k])
        return ReshardStep(kind, axes, self.layouts[i], self.layouts[k], *costs)


def _payload(kind: Collective, ranks: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Bytes that a rank contributes to steps, by the bytes it holds; under uneven cuts those of the largest piece."""
    if kind is Collective.ALL_GATHER:
        return after
    if kind is Collective.REDUCE_SCATTER:
        return np.asarray(after * ranks)
    return np.maximum(before, after) if kind is Collective.ALL_TO_ALL else before


@functools.lru_cache(maxsize=4096)
def _changes(
    mesh: Mesh, all_layouts: tuple[TensorLayout, ...], item_bytes: float, elements: tuple[int, ...]
) -> _Changes:
    """The fastest changes between layouts with so many elements a rank, the same for all shapes with these."""
    count, held = len(elements), item_bytes * np.asarray(elements)
    direct, following = np.zeros((count, count), dtype=np.int64), np.tile(np.arange(count), (count, 1))
    fastest_s, sent_bytes = np.full((count, count), math.inf), np.zeros((count, count))
    np.fill_diagonal(fastest_s, 0.0)
    for number, (kind, axes, rows, columns) in enumerate(_moves(all_layouts, mesh.sizes)):
        seconds = sent = np.zeros(len(rows))
        if kind is not None:
            ranks = mesh.ranks_along(axes)
            payload = _payload(kind, ranks, held[rows], held[columns])
            seconds, sent = mesh.seconds(kind, axes, payload), moved_bytes(kind, payload, ranks)
        better = seconds < fastest_s[rows, columns]
        at = rows[better], columns[better]
        fastest_s[at], sent_bytes[at], direct[at] = seconds[better], sent[better], number
    _join(fastest_s, sent_bytes, following)
    return fastest_s, sent_bytes, direct, following


_AT_ONCE = 1 << 18
"""Entries of the tables that `_join` works on at once, so that they stay in a processor's cache."""


def _join(seconds: np.ndarray, sent: np.ndarray, following: np.ndarray) -> None:
    """Shortest paths between layouts by Bellman and Ford, many at a time, until none gets nearer to another.

    A layout has few direct steps, and few steps lead anywhere: O(layouts^2) for each step of a layout and of a path.

    Args:
        seconds: [layouts, layouts] of direct steps before, of the fastest sequences afterwards.
        sent: bytes that a rank sends in them.
        following: the next layout on the way.
    """
    count, direct = len(seconds), np.isfinite(seconds)
    np.fill_diagonal(direct, False)
    degree = int(direct.sum(axis=1).max())
    after = np.argsort(~direct, axis=1, kind="stable")[:, :degree]
    rows = np.arange(count)[:, None]
    first_s, first_bytes = np.where(direct[rows, after], seconds[rows, after], math.inf), sent[rows, after]
    size, changed = max(1, _AT_ONCE // max(1, degree * count)), np.full(count, degree > 0)
    while changed.any():
        before, changed = changed, np.zeros(count, dtype=bool)
        for start in range(0, count, size):
            part = slice(start, start + size)
            if not before[after[part]].any():
                continue
            through = seconds[after[part]]
            through += first_s[part, :, None]
            least = through.min(axis=1)
            i, j = np.nonzero(least < seconds[part] * (1 - _ROUNDING))
            step, shorter = through[i, :, j].argmin(axis=1), least[i, j]
            i += start
            seconds[i, j], following[i, j] = shorter, after[i, step]
            sent[i, j] = first_bytes[i, step] + sent[after[i, step], j]
            changed[i] = True


@functools.lru_cache(maxsize=4096)
def reshard_table(
    mesh: Mesh,
    shape: tuple[int, ...],
    item_bytes: float,
    *,
    padded: bool = False,
    interleaved: tuple[Part, ...] = (),
) -> ReshardTable:
    """The cached table of a shape.

    Args:
        mesh: the mesh.
        shape: shape of the full tensor.
        item_bytes: bytes of an element.
        padded: whether uneven cuts are allowed.
        interleaved: interleaved cuts to consider besides the plain ones.
    """
    all_layouts = layouts(shape, mesh.sizes, padded=padded, interleaved=interleaved)
    return ReshardTable(mesh, shape, item_bytes, all_layouts)


@functools.lru_cache(maxsize=65536)
def reshard(
    mesh: Mesh,
    shape: tuple[int, ...],
    item_bytes: float,
    before: TensorLayout,
    after: TensorLayout,
    *,
    padded: bool = False,
) -> tuple[ReshardStep, ...]:
    """The steps that change the layout of a tensor, in order; uneven cuts only where padding is allowed.

    >>> from planner.sharding import ideal_mesh, parse_layout, reshard
    >>> mesh = ideal_mesh({"data": 2, "model": 4})
    >>> [str(step) for step in reshard(mesh, (8, 8), 2.0, parse_layout("S0P", 2), parse_layout("S0S1", 2))]
    ['reduce-scatter S0P>S0S1']

    Raises:
        UsageError: the tensor cannot have one of the layouts.
    """
    tags = tuple(sorted({part for part in (*before, *after) if part.blocks > 1}))
    return reshard_table(mesh, shape, item_bytes, padded=padded, interleaved=tags).steps(before, after)

"""A simulated mesh: arrays scattered by layout, local programs run in lockstep, what they exchange written down."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.sharding import PARTIAL, REPLICATED, Part, ReshardStep, TensorLayout

Coordinate = tuple[int, ...]
Pieces = dict[Coordinate, np.ndarray]


def coordinates(sizes: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*(range(n) for n in sizes)))


def held(extent: int, dim: int, layout: TensorLayout, sizes: Sequence[int], at: Coordinate) -> np.ndarray:
    """Global indices along one dimension that a rank holds; beyond an uneven end -1."""
    index = np.arange(extent)
    for part, ranks, rank in zip(layout, sizes, at, strict=True):
        if part.dim != dim:
            continue
        blocks = np.split(index, part.blocks)
        each = -(-len(blocks[0]) // ranks)
        padded = [np.pad(b, (0, each * ranks - len(b)), constant_values=-1) for b in blocks]
        index = np.concatenate([b[rank * each : (rank + 1) * each] for b in padded])
    return index


def _piece(array: np.ndarray, layout: TensorLayout, sizes: Sequence[int], at: Coordinate) -> np.ndarray:
    for dim in range(array.ndim):
        index = held(array.shape[dim], dim, layout, sizes, at)
        array = np.take(array, np.maximum(index, 0), axis=dim)
        if (index < 0).any():
            shape = [1] * array.ndim
            shape[dim] = len(index)
            array = np.where(index.reshape(shape) >= 0, array, 0)
    return array


def scatter(array: np.ndarray, layout: TensorLayout, sizes: Sequence[int]) -> Pieces:
    """Every rank's piece; partial sums are random numbers that add up."""
    assert len(layout) == len(sizes)
    random = np.random.default_rng(11)
    terms: dict[Coordinate, np.ndarray] = {}
    partial = [a for a, part in enumerate(layout) if part == PARTIAL]
    groups = list(itertools.product(*(range(sizes[a]) for a in partial)))
    left = array.astype(np.float64) if partial else array
    for key in groups[:-1]:
        terms[key] = random.normal(size=array.shape)
        left = left - terms[key]
    terms[groups[-1]] = left
    return {at: _piece(terms[tuple(at[a] for a in partial)], layout, sizes, at) for at in coordinates(sizes)}


def join(pieces: Pieces, layout: TensorLayout, sizes: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The array that the pieces mean; whole copies must agree, uneven ends are dropped."""
    result = np.zeros(tuple(shape), dtype=np.float64)
    replicated = [a for a, part in enumerate(layout) if part == REPLICATED]
    for at, piece in pieces.items():
        first = tuple(0 if a in replicated else r for a, r in enumerate(at))
        np.testing.assert_allclose(piece, pieces[first], rtol=1e-6, atol=1e-6, err_msg="copies differ")
        if first != at:
            continue
        index = [held(shape[d], d, layout, sizes, at) for d in range(len(shape))]
        keep = [i >= 0 for i in index]
        part = piece[np.ix_(*keep)] if len(shape) else piece
        result[np.ix_(*(i[k] for i, k in zip(index, keep, strict=True)))] += part
    return result


@dataclass
class Reduce:
    """All-reduce over the axes along which the operator exchanges."""

    value: np.ndarray
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.add


@dataclass
class Shift:
    """Send to the next rank along an axis, receive from the previous one."""

    axis: int
    values: tuple[np.ndarray, ...]


@dataclass
class Halo:
    """Widen a piece by its neighbours' borders along a dimension, zeros beyond the ends."""

    axis: int
    value: np.ndarray
    dim: int
    width: int


@dataclass
class HaloBack:
    """Hand the borders' gradients back to their owners."""

    axis: int
    value: np.ndarray
    dim: int
    width: int


@dataclass
class AllToAll:
    """Rows for every rank along an axis, with labels that count for nothing; answered by what each rank sent here."""

    axis: int
    rows: list[np.ndarray]
    labels: list[Any]


Event = Reduce | Shift | Halo | HaloBack | AllToAll
Program = Generator[Event, Any, tuple[np.ndarray, ...]]


@dataclass
class Context:
    """What a local program may know: where it stands, and which global indices its operands are."""

    sizes: tuple[int, ...]
    at: Coordinate
    splits: tuple[str, ...]
    axes: tuple[int, ...]
    reads: Mapping[int, TensorLayout]
    writes: Mapping[int, TensorLayout]
    shapes: Mapping[int, tuple[int, ...]]

    def held(self, position: int, dim: int) -> np.ndarray:
        return held(self.shapes[position][dim], dim, self.reads[position], self.sizes, self.at)

    def held_result(self, position: int, dim: int, extent: int) -> np.ndarray:
        return held(extent, dim, self.writes[position], self.sizes, self.at)

    def result_shape(self, position: int, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(len(self.held_result(position, d, n)) for d, n in enumerate(shape))


@dataclass
class Log:
    """Elements that a rank contributed: (axis, elements) of each exchange."""

    seen: list[tuple[int, int]] = field(default_factory=list)


def _along(at: Coordinate, axis: int, sizes: Sequence[int]) -> list[Coordinate]:
    return [(*at[:axis], r, *at[axis + 1 :]) for r in range(sizes[axis])]


def run(programs: Mapping[Coordinate, Program], sizes: Sequence[int], axes: Sequence[int]) -> tuple[dict, Log]:
    """Run all ranks' programs in lockstep; every rank must ask for the same kinds of exchange."""
    log, results, waiting = Log(), {}, {}
    origin = (0,) * len(sizes)
    answers: dict[Coordinate, Any] = dict.fromkeys(programs)
    while len(results) < len(programs):
        for at, program in programs.items():
            try:
                waiting[at] = program.send(answers[at])
            except StopIteration as end:
                results[at] = end.value
        if results:
            assert len(results) == len(programs), "ranks disagree on how often they exchange"
            break
        kinds = {type(event) for event in waiting.values()}
        assert len(kinds) == 1, "ranks ask for different exchanges"
        answers = _answer(waiting, sizes, axes, log, origin)
    return results, log


def _answer(
    waiting: dict[Coordinate, Event], sizes: Sequence[int], axes: Sequence[int], log: Log, origin: Coordinate
) -> dict[Coordinate, Any]:
    event = waiting[origin]
    if isinstance(event, Reduce):
        values = {at: e.value for at, e in waiting.items()}
        for axis in axes:
            log.seen.append((axis, values[origin].size))
            total = {}
            for at in values:
                group = [values[g] for g in _along(at, axis, sizes)]
                combined = group[0]
                for other in group[1:]:
                    combined = waiting[at].combine(combined, other)
                total[at] = combined
            values = total
        return values
    axis = event.axis
    if isinstance(event, AllToAll):
        log.seen.append((axis, sum(rows.size for rows in event.rows)))
        return {
            at: [(waiting[o].rows[at[axis]], waiting[o].labels[at[axis]]) for o in _along(at, axis, sizes)]
            for at in waiting
        }
    if isinstance(event, Shift):
        log.seen.append((axis, sum(v.size for v in event.values)))
        return {at: waiting[_along(at, axis, sizes)[at[axis] - 1]].values for at in waiting}
    log.seen.append((axis, event.width * event.value.size // event.value.shape[event.dim]
                     if isinstance(event, Halo) else _border(event)))  # fmt: skip
    return {at: _halo(waiting, at, axis, sizes) for at in waiting}


def _border(event: HaloBack) -> int:
    return event.width * event.value.size // event.value.shape[event.dim]


def _slice(array: np.ndarray, dim: int, start: int, stop: int) -> np.ndarray:
    index = [slice(None)] * array.ndim
    index[dim] = slice(start, stop)
    return array[tuple(index)]


def _halo(waiting: dict[Coordinate, Event], at: Coordinate, axis: int, sizes: Sequence[int]) -> np.ndarray:
    event, row, rank = waiting[at], _along(at, axis, sizes), at[axis]
    dim, width = event.dim, event.width
    if isinstance(event, Halo):
        size = event.value.shape[dim]
        zero = np.zeros_like(_slice(event.value, dim, 0, width))
        before = _slice(waiting[row[rank - 1]].value, dim, size - width, size) if rank else zero
        after = _slice(waiting[row[rank + 1]].value, dim, 0, width) if rank + 1 < sizes[axis] else zero
        return np.concatenate([before, event.value, after], axis=dim)
    size = event.value.shape[dim] - 2 * width
    own = _slice(event.value, dim, width, width + size).copy()
    if rank:
        _slice(own, dim, 0, width)[...] += _slice(waiting[row[rank - 1]].value, dim, width + size, 2 * width + size)
    if rank + 1 < sizes[axis]:
        _slice(own, dim, size - width, size)[...] += _slice(waiting[row[rank + 1]].value, dim, 0, width)
    return own


def local_program(function: Callable[..., tuple[np.ndarray, ...]], *arguments: Any) -> Program:
    """A program that exchanges nothing."""
    return function(*arguments)
    yield


def pullback(
    function: Callable[..., tuple[np.ndarray, ...]],
    inputs: Sequence[np.ndarray | None],
    wanted: Sequence[int],
    gradients: Sequence[np.ndarray],
) -> dict[int, np.ndarray]:
    """Gradients of sum(output * gradient) for the wanted inputs, by central differences."""
    step, found = 1e-5, {}
    values = list(inputs)
    for position in wanted:
        base = np.asarray(inputs[position], dtype=np.float64)
        gradient = np.zeros(base.shape)
        for index in np.ndindex(base.shape):
            ends = []
            for sign in (1, -1):
                moved = base.copy()
                moved[index] += sign * step
                values[position] = moved
                results = function(*values)
                ends.append(sum(float((y * g).sum()) for y, g in zip(results, gradients, strict=True)))
            gradient[index] = (ends[0] - ends[1]) / (2 * step)
        values[position] = inputs[position]
        found[position] = gradient
    return found


def _cut(array: np.ndarray, part: Part, ranks: int, rank: int) -> np.ndarray:
    blocks = np.split(array, part.blocks, axis=part.dim)
    return np.concatenate([np.split(b, ranks, axis=part.dim)[rank] for b in blocks], axis=part.dim)


def _uncut(pieces: Sequence[np.ndarray], part: Part) -> np.ndarray:
    blocks = [np.split(p, part.blocks, axis=part.dim) for p in pieces]
    return np.concatenate([b[k] for k in range(part.blocks) for b in blocks], axis=part.dim)


def apply_step(pieces: Pieces, step: ReshardStep, sizes: Sequence[int]) -> Pieces:
    """What a step of a change of layout does to the ranks' pieces."""
    result = {}
    if step.what == "permute":
        a, b = step.axes
        for at in pieces:
            source = list(at)
            source[a], source[b] = at[b], at[a]
            result[at] = pieces[tuple(source)]
        return result
    if len(step.axes) > 1:
        assert step.what == "all-reduce"
        for at in pieces:
            others = [o for o in pieces if all(o[i] == at[i] for i in range(len(at)) if i not in step.axes)]
            result[at] = sum(pieces[o] for o in others)
        return result
    (axis,) = step.axes
    before, after = step.before[axis], step.after[axis]
    for at, own in pieces.items():
        group, rank = [pieces[o] for o in _along(at, axis, sizes)], at[axis]
        if step.what == "mask":
            result[at] = own if rank == 0 else np.zeros_like(own)
            continue
        whole = _uncut(group, before) if before.cuts else sum(group) if before == PARTIAL else own
        result[at] = _cut(whole, after, sizes[axis], rank) if after.cuts else whole
    return result

"""The points of one block under all boundary layouts, by one elimination with all prices of memory at once.

The boundary tensors are one variable, the boundary layout, so the inside of the block is eliminated once for all of
them. A second variable stands for the prices of memory. If tables would be too large, as for mixtures of experts on
three axes, axes are tied: layouts that treat them differently are given up. If tables are still too large, the block is
not cut: every rank runs all of it. A block that cannot be left uncut then has no points.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from planner.errors import InfeasibleError
from planner.sharding.elimination import Factor, Minima, factor, minima, table_entries
from planner.sharding.inner_points import BlockProblem, InnerPoint, point, undominated
from planner.sharding.layout import REPLICATED
from planner.sharding.problem import Choice, ShardingProblem
from planner.sharding.resting import Boundaries, WeightChoice
from planner.sharding.strategies import Strategy

WORTH = (0.03, 0.3, 1000.0)
"""Prices of memory: the bytes of the fastest point cost this many times its seconds."""
LEAN = 1e-9
"""A price that only decides between points of equal time."""
PAIRS = (
    (LEAN, LEAN), *((w, LEAN) for w in WORTH), *((LEAN, w) for w in WORTH), *((w, w) for w in WORTH)
)  # fmt: skip
"""Prices of activations and of weights that are tried."""
_Found = TypeVar("_Found")

LIMIT = 16_000_000
"""Largest table, in entries, that the search of a block may make (128 MB)."""


class BlockPoints(Mapping[Boundaries, tuple[InnerPoint, ...]]):
    """The points of a block by boundary layout, fastest first; none where no sharding is legal.

    They are computed once, on demand: the least seconds take one elimination for all boundary layouts, the points
    another one with all prices of memory.

    Args:
        block: the block.
        boundaries: the boundary layouts.
    """

    def __init__(self, block: BlockProblem, boundaries: Sequence[Boundaries]) -> None:
        self.block, self._boundaries = block, tuple(boundaries)
        self._points_by_boundary: dict[Boundaries, tuple[InnerPoint, ...]] = {}

    @functools.cached_property
    def _joint(self) -> _Joint | None:
        """The problem, with as few axes tied as its tables need, or with all operators uncut.

        None where tables would be too large even then, or an operator must not be left uncut.
        """
        axes = len(self.block.setting.mesh.axes)
        pairs = [(a, a + 1) for a in range(axes - 1)] if axes > 2 else []
        for tied in ((), *pairs, tuple(range(axes))):
            keeps = functools.partial(_same_on, tied) if tied else None
            joint = _Joint.of(self.block, self._boundaries, keeps, tied)
            if joint.is_small:
                return joint
        joint = _Joint.of(self.block, self._boundaries, _uncut, uncut=True)
        return joint if joint.is_small else None

    @property
    def unsolved(self) -> bool:
        """Whether the block has no points because tables would be too large even with all axes tied."""
        return self._joint is None

    @property
    def tied(self) -> tuple[int, ...]:
        """Mesh axes, by index, that are tied because tables would be too large; empty if all layouts are searched."""
        return self._joint.tied if self._joint else ()

    @property
    def uncut(self) -> bool:
        """Whether every rank runs all of the block, because tables would be too large for anything else."""
        return self._joint is not None and self._joint.uncut

    @functools.cached_property
    def _first(self) -> Minima:
        """The fastest choices under each boundary layout: memory is free."""
        return _required(self._joint).solved(np.zeros((1, 2)))

    def least_s(self, boundary: Boundaries) -> float:
        """Least seconds of forward, backward and a micro-batch's part of the update; infinite without any point."""
        return math.inf if self.unsolved else float(self._first.totals[self._boundaries.index(boundary), 0])

    def __getitem__(self, boundary: Boundaries) -> tuple[InnerPoint, ...]:
        if boundary not in self._boundaries:
            raise KeyError(boundary)
        if boundary not in self._points_by_boundary:
            self._points_by_boundary[boundary] = self._points(boundary)
        return self._points_by_boundary[boundary]

    @functools.cached_property
    def _priced_choices(self) -> np.ndarray:
        """[boundary layouts, prices, variables] the best choices."""
        joint = _required(self._joint)
        priced = joint.solved(joint.prices(self._first))
        rows = priced.choices_of(np.indices(priced.totals.shape).reshape(2, -1).T)[:, : joint.count]
        return rows.reshape(*priced.totals.shape, -1)

    def _points(self, boundary: Boundaries) -> tuple[InnerPoint, ...]:
        if not math.isfinite(self.least_s(boundary)):
            return ()
        b = self._boundaries.index(boundary)
        choices = dict.fromkeys(map(tuple, self._priced_choices[b].tolist()))
        decisions = [_required(self._joint).decision(at, b) for at in choices]
        points = undominated([point(self.block, boundary, decision) for decision in decisions])
        return tuple(sorted(points, key=lambda p: (p.forward_s + p.backward_s, p.figures)))

    def __iter__(self) -> Iterator[Boundaries]:
        return iter(self._boundaries)

    def __len__(self) -> int:
        return len(self._boundaries)


def _required(found: _Found | None) -> _Found:
    """What was found. Raises InfeasibleError without it."""
    if found is None:
        raise InfeasibleError("a block's operators hang together too closely", hint="use fewer mesh axes")
    return found


def _same_on(axes: Sequence[int], choices: Sequence[Choice]) -> np.ndarray:
    """Which choices are the same on all of some axes, bool [choices]."""

    def rows(choice: Choice) -> Sequence[Sequence[object]]:
        if isinstance(choice, Strategy):
            return [choice.splits, *(layout for _, layout in (*choice.reads, *choice.writes))]
        return choice.layouts

    return np.asarray([all(row[a] == row[axes[0]] for row in rows(choice) for a in axes) for choice in choices])


def _uncut(choices: Sequence[Choice]) -> np.ndarray:
    """Which choices cut no operator and no activation, bool [choices]; weights may have any resting layout."""

    def uncut(choice: Choice) -> bool:
        if isinstance(choice, Strategy):
            return not any(choice.splits)
        return isinstance(choice, WeightChoice) or all(part == REPLICATED for row in choice.layouts for part in row)

    return np.asarray([uncut(choice) for choice in choices])


@dataclass(frozen=True)
class _Joint:
    """The problem of a block in which the boundary tensors are one variable, the last.

    Attributes:
        block: the block.
        problem: its choices; of those of boundary tensors only some are used.
        tied: axes on which only choices that are the same count.
        uncut: whether only choices that cut nothing count.
        ends: by variable of a boundary tensor, its choice under each boundary layout.
        treatments: number of boundary layouts.
    """

    block: BlockProblem
    problem: ShardingProblem
    tied: tuple[int, ...]
    uncut: bool
    ends: dict[int, np.ndarray]
    treatments: int

    @staticmethod
    def of(
        block: BlockProblem,
        boundaries: Sequence[Boundaries],
        keeps: Callable[[Sequence[Choice]], np.ndarray] | None,
        tied: tuple[int, ...] = (),
        *,
        uncut: bool = False,
    ) -> _Joint:
        """The block with its boundary layout as one variable, and only the choices that `keeps` accepts (None: all)."""
        problem, ends = block.free, block.ends_under(boundaries)
        if keeps is not None:
            distinct = {id(choices): choices for choices in problem.choices}
            which = {key: np.flatnonzero(keeps(choices)) for key, choices in distinct.items()}
            free = [v for v in range(len(problem.names)) if v not in ends]
            problem = problem.restricted({v: which[id(problem.choices[v])] for v in free})
        return _Joint(block, problem, tied, uncut, ends, len(boundaries))

    @functools.cached_property
    def links(self) -> tuple[Factor, ...]:
        """Tables over two variables, those of boundary tensors over the boundary layouts."""
        return tuple(map(self._joined, self.problem.links))

    def _joined(self, link: Factor) -> Factor:
        if self.ends.keys().isdisjoint(link.variables):
            return link
        table = link.table
        for axis, v in enumerate(link.variables):
            table = np.take(table, self.ends[v], axis=axis) if v in self.ends else table
        return factor([self._merged(v) for v in link.variables], table)

    def _merged(self, v: int) -> int:
        """The boundary layout in place of a boundary tensor."""
        return self.count if v in self.ends else v

    @property
    def count(self) -> int:
        """Number of variables without the boundary layout."""
        return len(self.problem.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Choices of each variable; a boundary tensor has none of its own."""
        return (*(1 if v in self.ends else n for v, n in enumerate(self.problem.sizes)), self.treatments)

    def _is_weight(self, v: int) -> bool:
        return isinstance(self.problem.choices[v][0], WeightChoice)

    @property
    def is_small(self) -> bool:
        """Whether all variables have choices, and no table of elimination with all prices is wider than `LIMIT`."""
        linked = [sorted({self._merged(v) for v in pair}) for pair in self.problem.linked]
        return all(self.problem.sizes) and len(PAIRS) * table_entries(self.sizes, linked, (self.count,)) <= LIMIT

    def solved(self, prices: np.ndarray) -> Minima:
        """The best choices under each boundary layout and pair of prices.

        Args:
            prices: float64 [pairs, 2] seconds a byte of activations and of weights.
        """
        problem, last = self.problem, self.count
        tables: dict[tuple[int, int, bool], np.ndarray] = {}
        own_tables = []
        for v, (time, kept) in enumerate(zip(problem.seconds, problem.bytes, strict=True)):
            weight = self._is_weight(v)
            key = (id(time), id(kept), weight)
            if key not in tables:
                tables[key] = time[:, None] + kept[:, None] * prices[:, int(weight)]
            end = v in self.ends
            own_tables.append(Factor((last if end else v, last + 1), tables[key][self.ends[v]] if end else tables[key]))
        return _required(minima((*self.sizes, len(prices)), [*own_tables, *self.links], (last, last + 1)))

    def prices(self, first: Minima) -> np.ndarray:
        """Prices in seconds a byte of activations and of weights, float64 [pairs, 2], in the order of `PAIRS`.

        Args:
            first: the fastest choices; the time and memory of the fastest of all are the units.
        """
        at, held = int(first.totals.argmin()), [0.0, 0.0]
        for v, c in enumerate(self.full(first.choices((at, 0)), at)):
            held[self._is_weight(v)] += float(self.problem.bytes[v][c])
        units = [float(first.totals.min()) / max(1.0, held_bytes) for held_bytes in held]
        return np.asarray([[a * units[0], w * units[1]] for a, w in PAIRS])

    def full(self, choices: Sequence[int], at: int) -> list[int]:
        """Choices of all variables of the block under a boundary layout."""
        return [int(self.ends[v][at]) if v in self.ends else c for v, c in enumerate(choices[: self.count])]

    def decision(self, choices: Sequence[int], at: int) -> dict[str, Choice]:
        """The choices of all variables by name."""
        return self.problem.decision(self.full(choices, at))

"""The points of one block under all treatments of its boundaries: one elimination with all prices of memory at once.

The boundary tensors are one variable: which treatment, so what lies between the boundaries is minimised out once for
all of them. A second variable stands for the prices of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InfeasibleError
from planner.sharding.boundary import Boundaries
from planner.sharding.elimination import Factor, Minima, factor, minima
from planner.sharding.inner_points import BlockProblem, InnerPoint, point, undominated
from planner.sharding.problem import Choice
from planner.sharding.resting import WeightChoice

WORTH = (0.03, 0.3, 1000.0)
"""Prices of memory: holding all that the fastest point holds costs this many times its seconds."""
LEAN = 1e-9
"""The price that only decides between points of equal time."""


class BlockPoints(Mapping[Boundaries, tuple[InnerPoint, ...]]):
    """The points of a block by treatment of its boundaries, fastest first; none where nothing is legal.

    Worked out when they are asked for, once: the least seconds take one elimination for all boundaries, the points
    another one with all prices of memory.

    Args:
        block: the block.
        boundaries: treatments of its boundaries.
    """

    def __init__(self, block: BlockProblem, boundaries: Sequence[Boundaries]) -> None:
        self._block, self._boundaries = block, tuple(boundaries)
        self._found: dict[Boundaries, tuple[InnerPoint, ...]] = {}

    @functools.cached_property
    def _joint(self) -> _Joint:
        return _Joint.of(self._block, self._boundaries)

    @functools.cached_property
    def _first(self) -> Minima | None:
        return self._joint.fastest()

    @functools.cached_property
    def _alone(self) -> dict[Boundaries, BlockPoints]:
        """Each treatment by itself, where all of them at once need too large a table.

        Raises:
            InfeasibleError: there is only one.
        """
        if len(self._boundaries) == 1:
            raise InfeasibleError("a block's operators hang together too closely", hint="use fewer mesh axes")
        return {each: BlockPoints(self._block, (each,)) for each in self._boundaries}

    @functools.cached_property
    def _priced(self) -> Minima | None:
        first = self._first
        if first is None or not np.isfinite(first.totals).any():
            return None
        return self._joint.priced(first, int(np.where(np.isfinite(first.totals), first.totals, np.inf).argmin()))

    def least_s(self, boundary: Boundaries) -> float:
        """Least seconds, forward and backward and a share of the step; infinite where nothing is legal.

        Raises:
            InfeasibleError: exact elimination would need too large a table.
        """
        if self._first is None:
            return self._alone[boundary].least_s(boundary)
        return float(self._first.totals[self._boundaries.index(boundary)])

    def __getitem__(self, boundary: Boundaries) -> tuple[InnerPoint, ...]:
        if boundary not in self._boundaries:
            raise KeyError(boundary)
        if boundary not in self._found:
            self._found[boundary] = self._points(boundary)
        return self._found[boundary]

    def _points(self, boundary: Boundaries) -> tuple[InnerPoint, ...]:
        first, b = self._first, self._boundaries.index(boundary)
        if first is None:
            return self._alone[boundary][boundary]
        if not np.isfinite(first.totals[b]):
            return ()
        chosen = [first.choices((b,))]
        if self._priced is not None:
            chosen = [self._priced.choices((b, p)) for p in range(self._priced.totals.shape[1])]
        decisions = [self._joint.decision(at, b) for at in dict.fromkeys(c[: self._joint.count] for c in chosen)]
        made = undominated([point(self._block, boundary, decision) for decision in decisions])
        return tuple(sorted(made, key=lambda p: (p.forward_s + p.backward_s, p.figures)))

    def __iter__(self) -> Iterator[Boundaries]:
        return iter(self._boundaries)

    def __len__(self) -> int:
        return len(self._boundaries)


@dataclass(frozen=True)
class _Joint:
    """A block's problem in which the boundary tensors are one variable, the last.

    Attributes:
        block: the block.
        ends: by boundary tensor's variable, its choice under each treatment.
        links: tables over two variables, those of boundary tensors over the treatments.
        treatments: how many.
    """

    block: BlockProblem
    ends: dict[int, np.ndarray]
    links: tuple[Factor, ...]
    treatments: int

    @staticmethod
    def of(block: BlockProblem, boundaries: Sequence[Boundaries]) -> _Joint:
        """The block with its boundaries tied together."""
        problem, ends = block.free, block.ends_under(boundaries)
        last = len(problem.names)

        def tied(link: Factor) -> Factor:
            if ends.keys().isdisjoint(link.variables):
                return link
            table = link.table
            for axis, v in enumerate(link.variables):
                table = np.take(table, ends[v], axis=axis) if v in ends else table
            return factor([last if v in ends else v for v in link.variables], table)

        return _Joint(block, ends, tuple(map(tied, problem.links)), len(boundaries))

    @property
    def count(self) -> int:
        """Number of variables, the treatment left out."""
        return len(self.block.free.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Choices of each variable; a boundary tensor has none of its own."""
        return (*(1 if v in self.ends else n for v, n in enumerate(self.block.free.sizes)), self.treatments)

    def _is_weight(self, v: int) -> bool:
        return isinstance(self.block.free.choices[v][0], WeightChoice)

    def fastest(self) -> Minima | None:
        """The fastest choices under each treatment; None where a table would be too large."""
        problem, last = self.block.free, self.count
        owns = [
            Factor((last,), time[self.ends[v]]) if v in self.ends else Factor((v,), time)
            for v, time in enumerate(problem.seconds)
        ]
        return minima(self.sizes, [*owns, *self.links], (last,))

    def priced(self, first: Minima, at: int) -> Minima | None:
        """The best choices under each treatment and pair of prices; None where a table would be too large.

        Args:
            first: the fastest choices.
            at: the treatment whose time and memory are the units of the prices.
        """
        problem, last = self.block.free, self.count
        prices = self._prices(first, at)
        tables: dict[tuple[int, int, bool], np.ndarray] = {}
        owns = []
        for v, (time, kept) in enumerate(zip(problem.seconds, problem.bytes, strict=True)):
            weight = self._is_weight(v)
            key = (id(time), id(kept), weight)
            if key not in tables:
                tables[key] = time[:, None] + kept[:, None] * prices[:, int(weight)]
            end = v in self.ends
            owns.append(Factor((last if end else v, last + 1), tables[key][self.ends[v]] if end else tables[key]))
        return minima((*self.sizes, len(prices)), [*owns, *self.links], (last, last + 1))

    def _prices(self, first: Minima, at: int) -> np.ndarray:
        """[prices, 2] seconds a byte of activations and of weights: every pair of prices, none on either first."""
        held = [0.0, 0.0]
        for v, c in enumerate(self.full(first.choices((at,)), at)):
            held[self._is_weight(v)] += float(self.block.free.bytes[v][c])
        units = [float(first.totals[at]) / max(1.0, each) for each in held]
        pairs = [(LEAN, LEAN), *((w, LEAN) for w in WORTH), *((LEAN, w) for w in WORTH), *((w, w) for w in WORTH)]
        return np.asarray([[a * units[0], w * units[1]] for a, w in pairs])

    def full(self, chosen: Sequence[int], at: int) -> list[int]:
        """Choices of all variables of the block under a treatment."""
        return [int(self.ends[v][at]) if v in self.ends else c for v, c in enumerate(chosen[: self.count])]

    def decision(self, chosen: Sequence[int], at: int) -> dict[str, Choice]:
        """The same by name."""
        return self.block.free.decision(self.full(chosen, at))

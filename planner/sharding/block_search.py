"""The points of one block under all treatments of its boundaries: one elimination with all prices of memory at once.

The boundary tensors are one variable: which treatment, so what lies between the boundaries is minimised out once for
all of them. A second variable stands for the prices of memory. Where tables would be too large, as for mixtures of
experts on three axes, axes are tied: layouts that treat them differently are given up. Where they still are, the block
is left whole: every rank runs all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InfeasibleError
from planner.sharding.elimination import Factor, Minima, factor, minima, table_entries
from planner.sharding.inner_points import BlockProblem, InnerPoint, point, undominated
from planner.sharding.layout import REPLICATED
from planner.sharding.problem import Choice, ShardingProblem
from planner.sharding.resting import Boundaries, WeightChoice
from planner.sharding.strategies import Strategy

WORTH = (0.03, 0.3, 1000.0)
"""Prices of memory: holding all that the fastest point holds costs this many times its seconds."""
LEAN = 1e-9
"""The price that only decides between points of equal time."""
PAIRS = (
    (LEAN, LEAN), *((w, LEAN) for w in WORTH), *((LEAN, w) for w in WORTH), *((w, w) for w in WORTH)
)  # fmt: skip
"""Prices of activations and of weights that are tried."""
LIMIT = 16_000_000
"""Largest table, in entries, that the search of a block may make: some 128 MB."""


class BlockPoints(Mapping[Boundaries, tuple[InnerPoint, ...]]):
    """The points of a block by treatment of its boundaries, fastest first; none where nothing is legal.

    Worked out when they are asked for, once: the least seconds take one elimination for all boundaries, the points
    another one with all prices of memory.

    Args:
        block: the block.
        boundaries: treatments of its boundaries.
    """

    def __init__(self, block: BlockProblem, boundaries: Sequence[Boundaries]) -> None:
        self.block, self._boundaries = block, tuple(boundaries)
        self._found: dict[Boundaries, tuple[InnerPoint, ...]] = {}

    @functools.cached_property
    def _joint(self) -> _Joint:
        """The problem, with as few axes tied as its tables need, or with all operators whole.

        Raises:
            InfeasibleError: tables would be too large even then, or an operator may not be left whole.
        """
        axes = len(self.block.setting.mesh.axes)
        pairs = [(a, a + 1) for a in range(axes - 1)] if axes > 2 else []
        for tied in ((), *pairs, tuple(range(axes))):
            keeps = functools.partial(_alike, axes=tied) if tied else None
            joint = _Joint.of(self.block, self._boundaries, keeps, tied)
            if all(joint.problem.sizes) and joint.entries <= LIMIT:
                return joint
        joint = _Joint.of(self.block, self._boundaries, _whole, whole=True)
        if not all(joint.problem.sizes) or joint.entries > LIMIT:
            raise InfeasibleError(
                "a block's operators hang together too closely", hint="use fewer mesh axes, or forbid some splits"
            )
        return joint

    @functools.cached_property
    def tied(self) -> tuple[int, ...]:
        """Mesh axes, by index, that are treated alike since tables would be too large; empty where all is searched."""
        return self._joint.tied

    @functools.cached_property
    def whole(self) -> bool:
        """Whether every rank runs the whole block, since tables would be too large for anything else."""
        return self._joint.whole

    @functools.cached_property
    def _first(self) -> Minima:
        return self._joint.fastest()

    @functools.cached_property
    def _priced(self) -> Minima | None:
        first = self._first
        if not np.isfinite(first.totals).any():
            return None
        priced = self._joint.priced(first, int(first.totals.argmin()))
        first.forget_choices()
        return priced

    def least_s(self, boundary: Boundaries) -> float:
        """Least seconds, forward and backward and a share of the step; infinite where nothing is legal.

        Raises:
            InfeasibleError: tables would be too large even with all axes tied.
        """
        return float(self._first.totals[self._boundaries.index(boundary)])

    def __getitem__(self, boundary: Boundaries) -> tuple[InnerPoint, ...]:
        if boundary not in self._boundaries:
            raise KeyError(boundary)
        if boundary not in self._found:
            self._found[boundary] = self._points(boundary)
            if len(self._found) == len(self._boundaries):
                self._forget_tables()
        return self._found[boundary]

    def _forget_tables(self) -> None:
        """Free the memory of what only further points would need."""
        _ = self._first, self.tied, self.whole
        self.__dict__.pop("_priced", None)
        self.__dict__.pop("_joint", None)
        self.block.forget_tables()

    def _points(self, boundary: Boundaries) -> tuple[InnerPoint, ...]:
        b = self._boundaries.index(boundary)
        if not np.isfinite(self._first.totals[b]) or self._priced is None:
            return ()
        chosen = self._priced.choices_of(np.asarray([(b, p) for p in range(self._priced.totals.shape[1])]))
        decisions = [self._joint.decision(at, b) for at in dict.fromkeys(c[: self._joint.count] for c in chosen)]
        made = undominated([point(self.block, boundary, decision) for decision in decisions])
        return tuple(sorted(made, key=lambda p: (p.forward_s + p.backward_s, p.figures)))

    def __iter__(self) -> Iterator[Boundaries]:
        return iter(self._boundaries)

    def __len__(self) -> int:
        return len(self._boundaries)


def _made(found: Minima | None) -> Minima:
    if found is None:
        raise InfeasibleError("a block's operators hang together too closely", hint="use fewer mesh axes")
    return found


def _alike(choice: Choice, axes: Sequence[int]) -> bool:
    """Whether a choice does the same on some axes."""
    rows: Sequence[Sequence[object]]
    if isinstance(choice, Strategy):
        rows = [choice.splits, *(layout for _, layout in (*choice.reads, *choice.writes))]
    else:
        rows = choice.layouts
    return all(len({row[a] for a in axes}) <= 1 for row in rows)


def _whole(choice: Choice) -> bool:
    """Whether every rank runs all of an operator, or holds all of an activation; weights may rest as they like."""
    if isinstance(choice, Strategy):
        return not any(choice.splits)
    return isinstance(choice, WeightChoice) or all(part == REPLICATED for row in choice.layouts for part in row)


@dataclass(frozen=True)
class _Joint:
    """A block's problem in which the boundary tensors are one variable, the last.

    Attributes:
        block: the block.
        problem: its choices; of those of boundary tensors only some are used.
        tied: axes on which only choices that do the same count.
        whole: only choices that cut nothing count.
        ends: by boundary tensor's variable, its choice under each treatment.
        links: tables over two variables, those of boundary tensors over the treatments.
        treatments: how many.
    """

    block: BlockProblem
    problem: ShardingProblem
    tied: tuple[int, ...]
    whole: bool
    ends: dict[int, np.ndarray]
    links: tuple[Factor, ...]
    treatments: int

    @staticmethod
    def of(
        block: BlockProblem,
        boundaries: Sequence[Boundaries],
        keeps: Callable[[Choice], bool] | None,
        tied: tuple[int, ...] = (),
        *,
        whole: bool = False,
    ) -> _Joint:
        """The block with its boundaries as one variable, and only the choices that `keeps` says, all where it is
        None."""
        problem, ends = block.free, block.ends_under(boundaries)
        if keeps is not None:
            which = {
                id(choices): np.asarray([c for c, choice in enumerate(choices) if keeps(choice)], dtype=np.int64)
                for choices in problem.choices
            }
            free = [v for v in range(len(problem.names)) if v not in ends]
            problem = problem.restricted({v: which[id(problem.choices[v])] for v in free})
        last = len(problem.names)

        def joined(link: Factor) -> Factor:
            if ends.keys().isdisjoint(link.variables):
                return link
            table = link.table
            for axis, v in enumerate(link.variables):
                table = np.take(table, ends[v], axis=axis) if v in ends else table
            return factor([last if v in ends else v for v in link.variables], table)

        return _Joint(block, problem, tied, whole, ends, tuple(map(joined, problem.links)), len(boundaries))

    @property
    def count(self) -> int:
        """Number of variables, the treatment left out."""
        return len(self.problem.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Choices of each variable; a boundary tensor has none of its own."""
        return (*(1 if v in self.ends else n for v, n in enumerate(self.problem.sizes)), self.treatments)

    def _is_weight(self, v: int) -> bool:
        return isinstance(self.problem.choices[v][0], WeightChoice)

    @property
    def entries(self) -> int:
        """Entries of the widest table that all prices together need."""
        return len(PAIRS) * table_entries(self.sizes, self.links, (self.count,))

    def fastest(self) -> Minima:
        """The fastest choices under each treatment."""
        problem, last = self.problem, self.count
        owns = [
            Factor((last,), time[self.ends[v]]) if v in self.ends else Factor((v,), time)
            for v, time in enumerate(problem.seconds)
        ]
        return _made(minima(self.sizes, [*owns, *self.links], (last,)))

    def priced(self, first: Minima, at: int) -> Minima:
        """The best choices under each treatment and pair of prices.

        Args:
            first: the fastest choices.
            at: the treatment whose time and memory are the units of the prices.
        """
        problem, last = self.problem, self.count
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
        return _made(minima((*self.sizes, len(prices)), [*owns, *self.links], (last, last + 1)))

    def _prices(self, first: Minima, at: int) -> np.ndarray:
        """[prices, 2] seconds a byte of activations and of weights: every pair of prices, none on either first."""
        held = [0.0, 0.0]
        for v, c in enumerate(self.full(first.choices((at,)), at)):
            held[self._is_weight(v)] += float(self.problem.bytes[v][c])
        units = [float(first.totals[at]) / max(1.0, each) for each in held]
        return np.asarray([[a * units[0], w * units[1]] for a, w in PAIRS])

    def full(self, chosen: Sequence[int], at: int) -> list[int]:
        """Choices of all variables of the block under a treatment."""
        return [int(self.ends[v][at]) if v in self.ends else c for v, c in enumerate(chosen[: self.count])]

    def decision(self, chosen: Sequence[int], at: int) -> dict[str, Choice]:
        """The same by name."""
        return self.problem.decision(self.full(chosen, at))

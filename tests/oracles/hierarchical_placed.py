"""Tries every plan of a small `PlacedPipelineProblem`: the oracle of the exact solver."""

from __future__ import annotations

from collections.abc import Iterator

from planner.solvers.partition import Progress, Result
from planner.space.partition import PlacedPipelineProblem, PlacedStage
from tests.oracles.every_cut import Cut, every_cut
from tests.oracles.every_plan import best_of

NAME = "hierarchical-brute-placed"
Plan = tuple[PlacedStage, ...]


def try_everything(
    problem: PlacedPipelineProblem,
    *,
    time_limit_s: float = 60.0,
    start: Plan | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans; exponential in layers and devices."""
    plans = _plans(problem, every_cut(problem.layers))
    every = [start, *plans] if start else plans
    return best_of(problem, every, solver=NAME, time_limit_s=time_limit_s, progress=progress)


def _plans(problem: PlacedPipelineProblem, cuts: list[Cut]) -> Iterator[Plan]:
    """Every way to take the devices from the left, with every way to cut; what is not allowed is left to the judge."""
    strides = [problem.unit_devices(level) for level in range(1, len(problem.fanout))]

    def places(free: int, offset: int, copies: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
        """(first, width, copies, stride) of the next stage."""
        if offset:
            yield from ((free + offset, width, copies, stride) for width in range(1, stride - offset + 1))
            return
        yield from ((free, width, 1, 0) for width in range(1, problem.devices - free + 1))
        for unit in strides:
            most = (problem.devices - free) // unit
            if free % unit == 0:
                for count in range(2, most + 1):
                    yield from ((free, width, count, unit) for width in range(1, unit + 1))

    def rest(before: Cut, free: int, offset: int, copies: int, stride: int) -> Iterator[Plan]:
        if before == cuts[-1]:
            if offset == 0:
                yield ()
            return
        for place in places(free, offset, copies, stride):
            first, width, count, unit = place
            if count == 1:
                after = (first + width, 0, 1, 0)
            elif offset + width == unit:
                after = (free + count * unit, 0, 1, 0)
            else:
                after = (free, offset + width, count, unit)
            for cut in cuts:
                if before < cut:
                    stage = PlacedStage(tuple(sorted(cut - before)), *place)
                    for later in rest(cut, *after):
                        yield (stage, *later)

    return rest(cuts[0], 0, 0, 1, 0)

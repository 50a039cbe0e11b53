"""The decision of a problem with the shortest critical path, which no simulation of any of its decisions is below.

The closed form that `chain_dp` minimises can be longer than what is simulated, so it bounds nothing. The longest chain
of waits (`Schedule.critical_s`) never is: its least over all decisions is a bound of the simulated time of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner import schedules
from planner.errors import ShardplanError
from planner.schedules import Pipeline
from planner.solvers._objectives import LongestChain
from planner.solvers._relaxation import Relaxation, relax
from planner.solvers._stages import StageTables, split, stage_tables
from planner.solvers.chain_dp import AGREEMENT, minimised
from planner.solvers.types import Judge, Solution
from planner.space.problem import StageProblem
from planner.space.types import Configuration, Evaluation, StageChoice


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a problem that is its own only part.

    Attributes:
        problem: the part.
        path: the place of the part among those of the problem (`split`), its place among those of that part, and so on.
        tables: its stages.
        relaxation: what they cost before each cut at the least.
    """

    problem: StageProblem
    path: tuple[int, ...]
    tables: StageTables
    relaxation: Relaxation


@dataclass(frozen=True, eq=False)
class Bounded:
    """A problem and a first bound of its critical paths.

    Attributes:
        problem: the problem.
        parts: those of its parts (`split`) that may hold a decision below the cutoff.
        cutoff_s: only decisions below it matter.
    """

    problem: StageProblem
    parts: tuple[Part, ...]
    cutoff_s: float

    @property
    def bound_s(self) -> float:
        """No critical path below the cutoff is shorter; infinite where nothing fits."""
        return min([self.cutoff_s, *(part.relaxation.bound_s for part in self.parts)])

    def ordered(self, problem: StageProblem) -> Bounded:
        """What this says of the same problem in another order of work, in which no stage keeps fewer micro-batches or
        has more forwards left to run while it waits for the first gradient."""
        parts = tuple(replace(part, problem=_part_at(problem, part.path)) for part in self.parts)
        return Bounded(problem, parts, self.cutoff_s)


def bounded(problem: StageProblem, cutoff_s: float) -> Bounded:
    """Bound a problem without solving it; O(R n^2 W) for each part that may be below the cutoff, at most."""
    return Bounded(problem, tuple(_parts(problem, cutoff_s)), cutoff_s)


def _parts(problem: StageProblem, cutoff_s: float, path: tuple[int, ...] = ()) -> Iterator[Part]:
    """The parts of a problem that may hold a decision below a cutoff; those that it cannot hold itself are left out
    together."""
    tables = stage_tables(problem)
    relaxation = relax(problem, tables, LongestChain(), cutoff_s)
    if relaxation.bound_s >= cutoff_s:
        return
    parts = split(problem)
    for number, part in enumerate(parts):
        yield from _parts(part, cutoff_s, (*path, number))
    if not parts:
        yield Part(problem, path, tables, relaxation)


def _part_at(problem: StageProblem, path: tuple[int, ...]) -> StageProblem:
    for number in path:
        problem = split(problem)[number]
    return problem


def settle(known: Bounded, judge: Judge, *, keep: int, cutoff_s: float = math.inf) -> Solution:
    """The decisions with the shortest critical paths; `solve` of a problem that has been looked at."""
    cutoff_s = min(cutoff_s, known.cutoff_s)
    found: list[tuple[tuple[Configuration, Evaluation], float]] = []
    bound_s = known.cutoff_s
    for part in sorted(known.parts, key=lambda part: part.relaxation.bound_s):
        least = minimised(part.problem, part.tables, LongestChain(), cutoff_s, keep, part.relaxation)
        found += [(_judged(part.problem, judge, stages, seconds), seconds) for seconds, stages in least.found]
        found = sorted(found, key=lambda entry: entry[1])[:keep]
        bound_s = min(bound_s, least.bound_s)
        cutoff_s = min(cutoff_s, found[-1][1]) if len(found) == keep else cutoff_s
    return Solution(tuple(entry for entry, _ in found), bound_s)


def solve(problem: StageProblem, judge: Judge, *, cutoff_s: float = math.inf, keep: int = 8) -> Solution:
    """The feasible decisions with the shortest critical paths below a cutoff, and a bound of all of them.

    The first is the shortest up to rounding where all stages have one direction's slowest stage in common, as 1F1B's
    have by definition; what the judge charges for weights shared by other blocks than the first and the last is not in
    the bound.

    Raises:
        ShardplanError: the judge contradicts the solver, which is a defect of one of them.
    """
    return settle(bounded(problem, cutoff_s), judge, keep=keep)


def critical_s(decision: Configuration, evaluation: Evaluation) -> float:
    """Seconds that no simulation of a judged decision is shorter than; O(stages^2)."""
    terms = evaluation.stages
    return schedules.get(decision.schedule).critical_s(
        Pipeline(tuple(stage.replicas for stage in decision.stages), decision.micro_batches),
        [t.forward_s + t.receive_s for t in terms],
        [t.backward_s + t.return_s for t in terms],
        [t.exposed_sync_s + t.update_s for t in terms],
    )


def _judged(
    problem: StageProblem, judge: Judge, stages: tuple[StageChoice, ...], seconds: float
) -> tuple[Configuration, Evaluation]:
    """The judge's verdict, whose critical path must not be shorter than what was found."""
    decision = problem.decision(stages)
    evaluation = judge(decision)
    if not evaluation.feasible or critical_s(decision, evaluation) < seconds * (1 - AGREEMENT):
        verdict = "; ".join(v.message for v in evaluation.violations) or f"{critical_s(decision, evaluation)!r} s"
        raise ShardplanError(
            f"the search found that {decision} takes {seconds!r} s at the least, but the judge says: {verdict}",
            hint="this is a defect in the planner; please report it with the model and the hardware profile",
        )
    return decision, evaluation

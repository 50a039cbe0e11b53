"""Find the decisions of a problem with the shortest critical path, which bounds the simulated time of all decisions.

The closed form that `chain_dp` minimises may exceed the simulated time, so its minimum is no bound. The longest chain
of waits (`Schedule.critical_s`) never does: its minimum over all decisions is a lower bound on every simulated time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from planner import schedules
from planner.schedules import Pipeline
from planner.solvers._objectives import LongestChain
from planner.solvers._relaxation import Relaxation, relax
from planner.solvers._stages import StagePrices, split, stage_prices
from planner.solvers.chain_dp import AGREEMENT, judged, minimise
from planner.solvers.types import Judge, Solution
from planner.space.problem import StageProblem
from planner.space.types import Configuration, Evaluation


@dataclass(frozen=True, eq=False)
class ProblemPart:
    """A part of a problem (`split`), at some level of splitting.

    Attributes:
        problem: the part.
        path: index of the part at each level of splitting, outermost first.
        prices: stage prices of the part.
        relaxation: lower bounds on the stages before each cut.
    """

    problem: StageProblem
    path: tuple[int, ...]
    prices: StagePrices
    relaxation: Relaxation

    @staticmethod
    def below(cutoff_s: float, problem: StageProblem, path: tuple[int, ...] = ()) -> list[ProblemPart]:
        """The part with its relaxation, alone in a list; empty if none of its decisions is below a cutoff."""
        prices = stage_prices(problem)
        relaxation = relax(problem, prices, LongestChain(), cutoff_s)
        return [ProblemPart(problem, path, prices, relaxation)] if relaxation.bound_s < cutoff_s else []

    @functools.cached_property
    def parts(self) -> tuple[StageProblem, ...]:
        """What the part is split into; empty if it is not divided further."""
        return split(self.problem)


@dataclass(eq=False)
class BoundedProblem:
    """A problem with a lower bound on its critical paths, which rises as the parts that it depends on are split.

    Attributes:
        problem: the problem.
        parts: its parts that may have a decision below the cutoff.
        cutoff_s: decisions at or above it are ignored, in seconds.
    """

    problem: StageProblem
    parts: list[ProblemPart]
    cutoff_s: float

    @property
    def bound_s(self) -> float:
        """Lower bound on the critical path of any decision, at most the cutoff, in seconds."""
        return min([self.cutoff_s, *(part.relaxation.bound_s for part in self.parts)])

    def ordered(self, problem: StageProblem) -> BoundedProblem:
        """Transfer the bound to the same problem with another schedule.

        The bound stays valid if, under that schedule, no stage keeps fewer micro-batches or has more forwards left to
        run while it waits for the first gradient.
        """
        parts = [ProblemPart(_part_at(problem, p.path), p.path, p.prices, p.relaxation) for p in self.parts]
        return BoundedProblem(problem, parts, self.cutoff_s)

    def lowest(self, cutoff_s: float, enough_s: float = math.inf) -> ProblemPart | None:
        """The part with the lowest bound, after others were split until it is one that `split` does not divide.

        Args:
            cutoff_s: decisions at or above it are ignored, in seconds.
            enough_s: nothing is split once the lowest bound is above it.

        Returns: None if no part may have a decision below the cutoff, or all are above `enough_s`.
        """
        self.cutoff_s = min(self.cutoff_s, cutoff_s)
        while self.parts and self.bound_s < self.cutoff_s and self.bound_s <= enough_s:
            part = min(self.parts, key=lambda part: part.relaxation.bound_s)
            if not part.parts:
                return part
            self.parts.remove(part)
            for number, inner in enumerate(part.parts):
                self.parts += ProblemPart.below(self.cutoff_s, inner, (*part.path, number))
        return None


def bounded(problem: StageProblem, cutoff_s: float) -> BoundedProblem:
    """Bound a problem without solving or splitting it; at most O(R n^2 W)."""
    return BoundedProblem(problem, ProblemPart.below(cutoff_s, problem), cutoff_s)


def _part_at(problem: StageProblem, path: tuple[int, ...]) -> StageProblem:
    """The part of a problem at `ProblemPart.path`."""
    for number in path:
        problem = split(problem)[number]
    return problem


def solve_bounded(bounded_problem: BoundedProblem, judge: Judge, *, keep: int, cutoff_s: float = math.inf) -> Solution:
    """The feasible decisions with the shortest critical paths below a cutoff, with a lower bound for all.

    The first decision is the shortest up to rounding if the slowest stage is the same in both directions. The bound
    leaves out what the judge charges for weights shared by blocks other than the first and the last.

    Args:
        bounded_problem: the problem.
        judge: evaluates decisions.
        keep: most decisions to return.
        cutoff_s: decisions at or above it are ignored, in seconds.

    Raises:
        ShardplanError: the judge contradicts the solver, which is a defect of one of them.
    """
    left = BoundedProblem(bounded_problem.problem, [*bounded_problem.parts], bounded_problem.cutoff_s)
    decisions: list[tuple[tuple[Configuration, Evaluation], float]] = []
    bound_s = cutoff_s = min(cutoff_s, bounded_problem.cutoff_s)
    while (part := left.lowest(cutoff_s)) is not None:
        left.parts.remove(part)
        found, least_s, _ = minimise(part.problem, part.prices, LongestChain(), cutoff_s, keep, part.relaxation)
        for seconds, stages in found:
            entry = judged(part.problem, judge, stages, critical_s, seconds * (1 - AGREEMENT), math.inf)
            if entry is not None:
                decisions.append((entry, critical_s(*entry) if part.problem.same_layers else seconds))
        decisions = sorted(decisions, key=lambda entry: entry[1])[:keep]
        bound_s = min(bound_s, least_s)
        cutoff_s = min(cutoff_s, decisions[-1][1]) if len(decisions) == keep else cutoff_s
    return Solution(tuple(entry for entry, _ in decisions), min(bound_s, cutoff_s))


def critical_s(decision: Configuration, evaluation: Evaluation) -> float:
    """Critical path of an evaluated decision, a lower bound on its simulated time, in seconds; O(stages^2)."""
    terms = evaluation.stages
    return schedules.get(decision.schedule).critical_s(
        Pipeline(tuple(stage.replicas for stage in decision.stages), decision.micro_batches),
        [t.forward_s + t.receive_s for t in terms],
        [t.backward_s + t.return_s for t in terms],
        [t.exposed_sync_s + t.update_s for t in terms],
    )

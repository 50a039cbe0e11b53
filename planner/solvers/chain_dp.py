"""Exact dynamic programming over a chain: position, devices used by the suffix, and a Pareto front of costs.

A relaxation bounds every partial decision from below; the search for labels then looks only below a ceiling that
starts just above the problem's bound and rises until a decision is found. What is found first is the optimum, since
nothing below the ceiling was left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import ShardplanError
from planner.solvers._labels import LabelSearch, Stages
from planner.solvers._objectives import ClosedForm, Objective
from planner.solvers._relaxation import Relaxation, relax
from planner.solvers._stages import StageTables, split, stage_tables
from planner.solvers.types import Judge, Solution
from planner.space.problem import StageProblem
from planner.space.types import Configuration, Evaluation

CUTOFFS = (1.15, 1.5, 2.5, 6.0, math.inf)
"""Cutoffs of the relaxation, as multiples of what compute alone takes."""

CEILINGS = (1.02, 1.04, 1.08, 1.16, 1.4, 2.0, 4.0, math.inf)
"""Ceilings of the label search, as multiples of the relaxation's bound."""

LABEL_LIMIT = 500_000
"""Labels kept in one run before it is repeated with coarser fronts; the bound then says what that may have cost."""

TOLERANCES = (1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
"""Differences that fronts tell apart, relative to the bound: rounding alone at first, coarser when fronts outgrow the
limit."""

AGREEMENT = 1e-9
"""Relative difference that rounding may make between the judge's time and the solver's."""


def solve(problem: StageProblem, judge: Judge, *, cutoff_s: float = math.inf, keep: int = 8) -> Solution:
    """The fastest feasible decision of a problem, proven.

    Objective: `planner.space.evaluate`. Exact up to rounding; what the judge charges for weights shared by other blocks
    than the first and the last is not in the bound. Where the fronts outgrow `LABEL_LIMIT` the bound says
    how far the answer may be off. The runners-up are complete decisions of the final front, not an exhaustive list.

    Worst case exponential in theory (fronts of three numbers); in practice O(R n^2 W) times a front of a few labels.

    Raises:
        ShardplanError: the judge contradicts the solver, which is a defect of one of them.
    """
    parts = split(problem)
    if parts:
        return _best_of(problem, parts, judge, cutoff_s, keep)
    least = minimised(problem, stage_tables(problem), ClosedForm(), cutoff_s, keep)
    judged = sorted(
        (_judged(problem, judge, stages, seconds, least.bound_s) for seconds, stages in least.found),
        key=lambda entry: entry[1].iteration_s,
    )
    bound_s = least.bound_s
    if judged and not problem.tied_elsewhere:
        bound_s = max(bound_s, judged[0][1].iteration_s - least.slack_s)
    return Solution(tuple(judged), bound_s)


@dataclass(frozen=True, slots=True)
class Least:
    """What a search for the least of an objective found.

    Attributes:
        found: times and stages of complete decisions, the best first; empty when none is below the cutoff.
        bound_s: no decision of the problem has less.
        slack_s: how far the first may be above the least.
    """

    found: tuple[tuple[float, Stages], ...]
    bound_s: float
    slack_s: float


def minimised(
    problem: StageProblem,
    tables: StageTables,
    objective: Objective,
    cutoff_s: float,
    keep: int,
    relaxed: Relaxation | None = None,
) -> Least:
    """The decisions of one case of a problem that have the least of an objective below a cutoff.

    Args:
        problem: a problem that is its own only case.
        tables: its stages.
        objective: what is minimised.
        cutoff_s: only decisions below it matter.
        keep: most decisions to return.
        relaxed: a relaxation under a cutoff that is no lower, where it is known.

    Raises:
        ShardplanError: the fronts outgrow memory.
    """
    bound_s = problem.micro_batches * float(tables.least_s[-1]) / problem.slice_devices
    for upper_s in (cutoff_s,) if relaxed is not None else _rising(bound_s, CUTOFFS, cutoff_s):
        relaxation = relaxed or relax(problem, tables, objective, upper_s)
        if not relaxation.bound_s < upper_s:
            bound_s = max(bound_s, min(upper_s, relaxation.bound_s))
            continue
        bound_s = max(bound_s, relaxation.bound_s)
        for ceiling_s in _rising(relaxation.bound_s, CEILINGS, upper_s):
            found, slack_s = _search(problem, tables, relaxation, ceiling_s, keep)
            if found:
                return Least(tuple(found), max(bound_s, found[0][0] - slack_s), slack_s)
            bound_s = max(bound_s, ceiling_s - slack_s)
    return Least((), bound_s, 0.0)


def _best_of(
    problem: StageProblem, parts: Sequence[StageProblem], judge: Judge, cutoff_s: float, keep: int
) -> Solution:
    """What is known of a problem from its parts, of which those with the least work go first."""
    if math.isfinite(cutoff_s) and relax(problem, stage_tables(problem), ClosedForm(), cutoff_s).bound_s >= cutoff_s:
        return Solution((), cutoff_s)
    found: list[tuple[Configuration, Evaluation]] = []
    bound_s = math.inf
    for part in sorted(parts, key=lambda part: float(part.least_s[-1])):
        solution = solve(part, judge, cutoff_s=cutoff_s, keep=keep)
        found = sorted([*found, *solution.found], key=lambda entry: entry[1].iteration_s)[:keep]
        bound_s = min(bound_s, solution.bound_s)
        cutoff_s = min(cutoff_s, found[-1][1].iteration_s) if len(found) == keep else cutoff_s
    return Solution(tuple(found), bound_s)


def _rising(base_s: float, factors: tuple[float, ...], most_s: float) -> Iterator[float]:
    """base * factor for each factor, up to and including `most_s`."""
    for factor in factors:
        value = math.inf if math.isinf(factor) else base_s * factor
        if value >= most_s:
            break
        yield value
    yield most_s


def _search(
    problem: StageProblem, tables: StageTables, relaxation: Relaxation, ceiling_s: float, keep: int
) -> tuple[list[tuple[float, Stages]], float]:
    """Decisions below the ceiling, and how much faster than these (or the ceiling) another one may be."""
    for tolerance in TOLERANCES:
        tolerance_s = tolerance * relaxation.bound_s
        run = LabelSearch(problem, tables, relaxation, ceiling_s, tolerance_s)
        last = tolerance == TOLERANCES[-1]
        found = run.run(keep, limit=100 * LABEL_LIMIT if last else LABEL_LIMIT)
        if found is not None:
            slack_s = 0.0 if tolerance == TOLERANCES[0] else 2 * problem.blocks * tolerance_s
            return found, slack_s
    raise ShardplanError(
        f"the search over {problem.blocks} blocks and {problem.slice_devices} devices outgrows memory",
        hint="allow fewer micro-batch sizes, or limit stages with max_stages",
    )


def _judged(
    problem: StageProblem, judge: Judge, stages: Stages, seconds: float, bound_s: float
) -> tuple[Configuration, Evaluation]:
    """The judge's verdict, which must be no slower than promised (but for ties that the problem leaves out) and no
    faster than what was proven."""
    decision = problem.decision(stages)
    evaluation = judge(decision)
    rounding = AGREEMENT * seconds
    most_s = math.inf if problem.tied_elsewhere else seconds + rounding
    if not evaluation.feasible or not bound_s - rounding <= evaluation.iteration_s <= most_s:
        verdict = "; ".join(v.message for v in evaluation.violations) or f"{evaluation.iteration_s!r} s"
        raise ShardplanError(
            f"the search promised {bound_s!r} to {seconds!r} s for {decision}, but the judge says: {verdict}",
            hint="this is a defect in the planner; please report it with the model and the hardware profile",
        )
    return decision, evaluation

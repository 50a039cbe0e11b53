"""Exact dynamic programming over a chain of blocks, with a Pareto front of labels per block and number of devices.

A relaxation bounds every partial decision from below. The label search keeps only labels below a ceiling, which starts
just above the problem's bound and rises until a decision is found. The first decision found is optimal, because no
label below the ceiling was dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.errors import ShardplanError
from planner.solvers._labels import LabelSearch, Stages
from planner.solvers._objectives import ClosedForm, TimeObjective
from planner.solvers._relaxation import Relaxation, relax
from planner.solvers._stages import StagePrices, split, stage_prices
from planner.solvers.types import Judge, Measure, Solution
from planner.space.problem import StageProblem
from planner.space.types import Configuration, Evaluation

CUTOFFS = (1.15, 1.5, 2.5, 6.0, math.inf)
"""Cutoffs of the relaxation, as multiples of the compute time spread over all devices."""

CEILINGS = (1.02, 1.04, 1.08, 1.16, 1.4, 2.0, 4.0, math.inf)
"""Ceilings of the label search, as multiples of the relaxation's bound."""

LABEL_LIMIT = 500_000
"""Labels kept in one run before it is repeated with coarser fronts; the bound then includes their tolerance."""

TOLERANCES = (1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
"""Relative differences below which labels count as equal: rounding at first, then coarser if `LABEL_LIMIT` is exceeded.
"""

AGREEMENT = 1e-9
"""Relative difference allowed for rounding between the judge's time and the solver's."""


def solve(problem: StageProblem, judge: Judge, *, cutoff_s: float = math.inf, keep: int = 8) -> Solution:
    """Find the fastest feasible decisions of a problem by the closed form, with a proven bound.

    Minimises the time of `planner.space.evaluate`, exactly up to rounding. The bound leaves out what the judge charges
    for weights shared by blocks other than the first and the last. If the fronts outgrow `LABEL_LIMIT`, the bound says
    how far the answer may be off. The further decisions come from the final front; they are not exhaustive.

    Exponential in the worst case (fronts of three numbers), in practice O(R n^2 W) times a few labels per front.

    Raises:
        ShardplanError: the judge contradicts the solver, which is a defect of one of them.
    """
    parts = split(problem)
    if parts:
        return _best_of(problem, parts, judge, cutoff_s, keep)
    found, bound_s, slack_s = minimise(problem, stage_prices(problem), ClosedForm(), cutoff_s, keep)
    no_more = not problem.tied_elsewhere and not problem.same_layers
    entries = [
        judged(problem, judge, stages, _judged_s, bound_s - AGREEMENT * s, s * (1 + AGREEMENT) if no_more else math.inf)
        for s, stages in found
    ]
    decisions = sorted(filter(None, entries), key=lambda entry: entry[1].iteration_s)
    if decisions and no_more:
        bound_s = max(bound_s, decisions[0][1].iteration_s - slack_s)
    return Solution(tuple(decisions), bound_s)


def _judged_s(_: Configuration, evaluation: Evaluation) -> float:
    return evaluation.iteration_s


Minimum = tuple[Sequence[tuple[float, Stages]], float, float]
"""(seconds, stages) of complete decisions below the cutoff, best first; lower bound on the objective of any decision;
most by which the first decision may exceed the minimum."""


def minimise(
    problem: StageProblem,
    prices: StagePrices,
    objective: TimeObjective,
    cutoff_s: float,
    keep: int,
    relaxed: Relaxation | None = None,
) -> Minimum:
    """Minimise an objective over the decisions of a problem below a cutoff.

    Args:
        problem: a problem that `split` does not divide.
        prices: its stage prices.
        objective: what to minimise.
        cutoff_s: decisions at or above it are ignored, in seconds.
        keep: most decisions to return.
        relaxed: a known relaxation, made with a cutoff no lower than this one.

    Raises:
        ShardplanError: the fronts outgrow memory.
    """
    bound_s = problem.micro_batches * float(problem.least_s[-1]) / problem.slice_devices
    for upper_s in (cutoff_s,) if relaxed is not None else _rising(bound_s, CUTOFFS, cutoff_s):
        relaxation = relaxed or relax(problem, prices, objective, upper_s)
        if not relaxation.bound_s < upper_s:
            bound_s = max(bound_s, min(upper_s, relaxation.bound_s))
            continue
        bound_s = max(bound_s, relaxation.bound_s)
        for ceiling_s in _rising(relaxation.bound_s, CEILINGS, upper_s):
            decisions, slack_s = _search(problem, prices, relaxation, ceiling_s, keep)
            if decisions:
                return decisions, max(bound_s, decisions[0][0] - slack_s), slack_s
            bound_s = max(bound_s, ceiling_s - slack_s)
    return (), bound_s, 0.0


def _best_of(
    problem: StageProblem, parts: Sequence[StageProblem], judge: Judge, cutoff_s: float, keep: int
) -> Solution:
    """Solve a problem by solving its parts, those with the least work first."""
    if math.isfinite(cutoff_s) and relax(problem, stage_prices(problem), ClosedForm(), cutoff_s).bound_s >= cutoff_s:
        return Solution((), cutoff_s)
    decisions: list[tuple[Configuration, Evaluation]] = []
    bound_s = math.inf
    for part in sorted(parts, key=lambda part: float(part.least_s[-1])):
        solution = solve(part, judge, cutoff_s=cutoff_s, keep=keep)
        decisions = sorted([*decisions, *solution.decisions], key=lambda entry: entry[1].iteration_s)[:keep]
        bound_s = min(bound_s, solution.bound_s)
        cutoff_s = min(cutoff_s, decisions[-1][1].iteration_s) if len(decisions) == keep else cutoff_s
    return Solution(tuple(decisions), bound_s)


def _rising(base_s: float, factors: tuple[float, ...], most_s: float) -> Iterator[float]:
    """Yield base * factor for each factor below `most_s`, then `most_s`."""
    for factor in factors:
        value = math.inf if math.isinf(factor) else base_s * factor
        if value >= most_s:
            break
        yield value
    yield most_s


def _search(
    problem: StageProblem, prices: StagePrices, relaxation: Relaxation, ceiling_s: float, keep: int
) -> tuple[list[tuple[float, Stages]], float]:
    """(decisions below the ceiling, most by which another decision may be faster than these or the ceiling)."""
    for tolerance in TOLERANCES:
        tolerance_s = tolerance * relaxation.bound_s
        run = LabelSearch(problem, prices, relaxation, ceiling_s, tolerance_s)
        last = tolerance == TOLERANCES[-1]
        decisions = run.run(keep, limit=100 * LABEL_LIMIT if last else LABEL_LIMIT)
        if decisions is not None:
            slack_s = 0.0 if tolerance == TOLERANCES[0] else 2 * problem.blocks * tolerance_s
            return decisions, slack_s
    raise ShardplanError(
        f"the search over {problem.blocks} blocks and {problem.slice_devices} devices outgrows memory",
        hint="allow fewer micro-batch sizes, or limit stages with max_stages",
    )


def judged(
    problem: StageProblem, judge: Judge, stages: Stages, time_of: Measure, least_s: float, most_s: float
) -> tuple[Configuration, Evaluation] | None:
    """The judge's evaluation of what a solver found, checked against what it promised.

    None if it does not fit with as many layers recomputed in all stages as one needs (`StageProblem.same_layers`).

    Args:
        problem: the problem.
        judge: evaluates decisions.
        stages: of the decision.
        time_of: the time that was promised, of a feasible decision.
        least_s: shortest time that agrees.
        most_s: longest one; infinite where the judge charges for what the problem leaves out.

    Raises:
        ShardplanError: the decision does not fit, or takes another time, which is a defect of either.
    """
    decision = problem.decision(stages)
    evaluation = judge(decision)
    if problem.same_layers and not evaluation.feasible:
        return None
    seconds = time_of(decision, evaluation) if evaluation.feasible else math.nan
    if not least_s <= seconds <= most_s:
        verdict = "; ".join(v.message for v in evaluation.violations) or f"{seconds!r} s"
        raise ShardplanError(
            f"the search promised {least_s!r} to {most_s!r} s for {decision}, but the judge says: {verdict}",
            hint="this is a defect in the planner; please report it with the model and the hardware profile",
        )
    return decision, evaluation

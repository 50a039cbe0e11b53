"""Exact choice of a strategy or layout for each operator, tensor and weight: by elimination, or an integer program.

Without a binding memory limit the sum of tables is minimised exactly by variable elimination. With one, memory gets a
price: each price gives a bound, and a price that is high enough a plan that fits. The gap is closed by an integer
program over the choices that no price has ruled out: one binary variable a choice, one continuous variable a pair of
linked choices, with equal marginals on both sides (the local polytope, whose relaxation is tight on trees).

`fastest` serves the searches that restrict choices: the fastest of what is left, within memory where it is limited.
`leanest` finds the layouts with the fewest bytes on a rank: the least memory that any plan needs.
"""

from __future__ import annotations

import math

import numpy as np

from planner.errors import InfeasibleError
from planner.memory import fits
from planner.sharding.elimination import (
    CLOSE,
    DEFAULT_LIMIT,
    Factor,
    LimitedSolution,
    least_within,
    minima,
    minimise,
    table_entries,
    value,
)
from planner.sharding.formulate import formulate
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.units import format_bytes

MOST_VARIABLES = 300
"""Largest number of variables for which the integer program closes the gap that prices leave."""
SOLVER_S = 20.0
"""Time limit of the integer program, in seconds."""


def _fastest(problem: ShardingProblem) -> LimitedSolution:
    """The fastest choice; of equally fast ones one with little memory."""
    total, choices = minimise(problem.sizes, problem.factors())
    held = problem.memory(choices)
    if held:
        _, lean = minimise(problem.sizes, problem.factors(1e-9 * total / held))
        if value(problem.factors(), lean) <= total * (1 + 1e-12):
            choices = lean
    return LimitedSolution(total, choices, total)


def by_prices(problem: ShardingProblem, limit: float, close: float = CLOSE) -> LimitedSolution:
    """The fastest choice within memory that some price on memory finds, to a relative gap, and a bound.

    Raises:
        InfeasibleError: exact elimination would need too large a table.
    """
    held = [Factor((v,), kept) for v, kept in enumerate(problem.bytes)]
    return least_within(problem.sizes, problem.factors(), held, limit, close)


def _reduced(problem: ShardingProblem, limit: float, best: LimitedSolution) -> tuple[ShardingProblem, list[np.ndarray]]:
    """The problem without the choices that the price of the best bound rules out, and which choices it keeps."""
    factors = problem.factors(best.price)
    cutoff = best.seconds + best.price * limit
    keep = []
    for v in range(len(problem.names)):
        minimum = minima(problem.sizes, factors, (v,))
        all_choices = np.arange(problem.sizes[v])
        keep.append(all_choices if minimum is None else np.flatnonzero(minimum.totals <= cutoff * (1 + 1e-12)))
    return problem.restricted(dict(enumerate(keep))), keep


def integer_program(problem: ShardingProblem, limit: float) -> tuple[float, float, tuple[int, ...]]:
    """The least time within memory by an integer program.

    Args:
        problem: what to choose.
        limit: bytes that a rank may hold.

    Returns:
        Seconds of the decision (inf when none was found), proven bound, choice of each variable.
    """
    import datetime

    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    choice_vars = [[model.add_binary_variable() for _ in range(n)] for n in problem.sizes]
    for variables in choice_vars:
        model.add_linear_constraint(mathopt.fast_sum(variables) == 1.0)
    terms = [
        t * x for v, xs in enumerate(choice_vars) for t, x in zip(problem.seconds[v].tolist(), xs, strict=True) if t
    ]
    held = [
        b * x for v, xs in enumerate(choice_vars) for b, x in zip((problem.bytes[v] / limit).tolist(), xs, strict=True)
    ]
    model.add_linear_constraint(mathopt.fast_sum(held) <= 1.0)
    for link in problem.links:
        a, b = link.variables
        pairs = [[model.add_variable(lb=0.0, ub=1.0 if math.isfinite(c) else 0.0) for c in row] for row in link.table]
        for x, row in zip(choice_vars[a], pairs, strict=True):
            model.add_linear_constraint(mathopt.fast_sum(row) == x)
        for j, x in enumerate(choice_vars[b]):
            model.add_linear_constraint(mathopt.fast_sum(row[j] for row in pairs) == x)
        terms += [c * z for costs, row in zip(link.table.tolist(), pairs, strict=True)
                  for c, z in zip(costs, row, strict=True) if c and math.isfinite(c)]  # fmt: skip
    model.minimize(mathopt.fast_sum(terms))
    limits = mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=SOLVER_S), relative_gap_tolerance=CLOSE)
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=limits)
    bound = result.dual_bound() if math.isfinite(result.dual_bound()) else 0.0
    if not result.has_primal_feasible_solution():
        return math.inf, bound, ()
    values = result.variable_values()
    picked = tuple(max(range(len(xs)), key=lambda c: values[xs[c]]) for xs in choice_vars)
    return value(problem.factors(), picked), bound, picked


def _close(problem: ShardingProblem, limit: float, best: LimitedSolution) -> str:
    """Close the gap by an integer program over the choices that are left; returns the name of the method."""
    left, keep = _reduced(problem, limit, best)
    seconds, bound, picked = integer_program(left, limit)
    if picked and seconds < best.seconds and fits(left.memory(picked), limit):
        best.seconds = seconds
        best.choices = tuple(int(k[c]) for k, c in zip(keep, picked, strict=True))
    best.bound_s = max(best.bound_s, min(bound, best.seconds))
    return "integer program"


@SEARCHES.entry("ilp")
def ilp(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The fastest choice of layouts within memory, proven optimal, or with a gap for large graphs.

    Raises:
        InfeasibleError: no choice fits; the message says how much memory is needed at least.
    """
    problem = formulate(setting)
    states = table_entries(problem.sizes, problem.factors())
    if states > DEFAULT_LIMIT:
        raise InfeasibleError(
            f"exact elimination needs a table of {states} entries",
            hint="use fewer mesh axes, or shard a block instead of the whole model",
        )
    if memory_bytes is None:
        best, method = _fastest(problem), "elimination"
    else:
        minimum = float(sum(kept.min() for kept in problem.bytes))
        if not fits(minimum, memory_bytes):
            raise InfeasibleError(
                f"every layout needs at least {format_bytes(minimum)} a device, {format_bytes(memory_bytes)} are there",
                hint="use a larger mesh, more recomputation or a smaller micro-batch",
            )
        best, method = by_prices(problem, memory_bytes), "prices"
        if not best.choices:
            raise InfeasibleError(
                f"no layout was found that fits {format_bytes(memory_bytes)} a device",
                hint="use a larger mesh, more recomputation or a smaller micro-batch",
            )
        if not best.closed() and len(problem.names) <= MOST_VARIABLES:
            method = _close(problem, memory_bytes, best)
    decision = problem.decision(best.choices)
    return ShardingAnswer.of(setting, decision, memory_bytes, method, bound_s=best.bound_s, states=states)


NEAR = 0.02
"""Relative gap at which `fastest` ends its search within memory."""


def fastest(
    setting: Setting, problem: ShardingProblem, memory_bytes: float | None, *, method: str, what: str, hint: str
) -> ShardingAnswer:
    """The fastest choice of a problem; the bound holds for its choices.

    Args:
        setting: what is sharded.
        problem: the choices that the search allows.
        memory_bytes: bytes that a rank may hold; None for no limit.
        method: name of the method, for the answer.
        what: name of a choice, for the error: "completion of the annotations".
        hint: remedy, for the error.

    Raises:
        InfeasibleError: no choice was found that fits, or the problem is too large for elimination.
    """
    if memory_bytes is None:
        bound_s, choices = minimise(problem.sizes, problem.factors())
    else:
        solution = by_prices(problem, memory_bytes, NEAR)
        if not solution.choices:
            raise InfeasibleError(f"no {what} was found that fits {format_bytes(memory_bytes)} a device", hint=hint)
        bound_s, choices = solution.bound_s, solution.choices
    return ShardingAnswer.of(setting, problem.decision(choices), memory_bytes, method, bound_s=bound_s)


DEAR = 1e6
"""Price of memory: the bytes of the fastest layouts cost this many times their seconds."""


@SEARCHES.entry("leanest")
def leanest(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The layouts with the least memory: the best choice at a price at which only memory counts.

    Raises:
        InfeasibleError: even those do not fit, or exact elimination would need too large a table.
    """
    problem = formulate(setting)
    seconds, choices = minimise(problem.sizes, problem.factors())
    price = DEAR * max(seconds, 1e-12) / max(1.0, problem.memory(choices))
    _, choices = minimise(problem.sizes, problem.factors(price))
    held = problem.memory(choices)
    if memory_bytes is not None and not fits(held, memory_bytes):
        raise InfeasibleError(
            f"every layout needs about {format_bytes(held)} a device, {format_bytes(memory_bytes)} are there",
            hint="use a larger mesh, more recomputation or a smaller micro-batch",
        )
    return ShardingAnswer.of(setting, problem.decision(choices), memory_bytes, "a price on memory")

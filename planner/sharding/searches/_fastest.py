"""The end of a search that narrows choices down: the fastest of what is left, within memory where it is limited."""

from __future__ import annotations

from planner.errors import InfeasibleError
from planner.sharding.elimination import minimise
from planner.sharding.judge import evaluate
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.searches import ShardingAnswer
from planner.sharding.searches.ilp import by_prices
from planner.units import format_bytes

CLOSE = 0.02
"""Relative gap at which the search within memory ends."""


def fastest(
    setting: Setting, problem: ShardingProblem, memory_bytes: float | None, *, method: str, what: str, hint: str
) -> ShardingAnswer:
    """The fastest choice of a problem; the bound holds for its choices.

    Args:
        setting: whose problem it is.
        problem: the choices that the search allows.
        memory_bytes: what a rank may hold; None for any.
        method: what the answer says of how it was found.
        what: what a choice is, for the error: "completion of the annotations".
        hint: what to do where none fits.

    Raises:
        InfeasibleError: no choice was found that fits, or the problem is too large for elimination.
    """
    if memory_bytes is None:
        found = minimise(problem.sizes, problem.factors())
        if found is None:
            raise InfeasibleError("the graph's operators hang together too closely", hint="shard a block of the model")
        bound_s, chosen = found
    else:
        within = by_prices(problem, memory_bytes, CLOSE)
        if not within.chosen:
            raise InfeasibleError(f"no {what} was found that fits {format_bytes(memory_bytes)} a device", hint=hint)
        bound_s, chosen = within.bound_s, within.chosen
    decision = problem.decision(chosen)
    return ShardingAnswer(decision, evaluate(setting, decision, memory_bytes=memory_bytes), bound_s, method)

"""The layouts of which a rank holds the fewest bytes, and among those the fastest: what any plan needs at least."""

from __future__ import annotations

from planner.errors import InfeasibleError
from planner.memory import fits
from planner.sharding.elimination import minimise
from planner.sharding.formulate import formulate
from planner.sharding.judge import evaluate
from planner.sharding.problem import Setting
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.units import format_bytes

DEAR = 1e6
"""Price of memory: holding what the fastest layouts hold costs this many times their seconds."""


@SEARCHES.entry("leanest")
def leanest(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Layouts at a price at which memory is all that counts.

    Raises:
        InfeasibleError: even those do not fit, or exact elimination would need too large a table.
    """
    problem = formulate(setting)
    fastest = minimise(problem.sizes, problem.factors())
    least = None
    if fastest is not None:
        price = DEAR * max(fastest[0], 1e-12) / max(1.0, problem.memory(fastest[1]))
        least = minimise(problem.sizes, problem.factors(price))
    if least is None:
        raise InfeasibleError("the graph's operators hang together too closely", hint="use fewer mesh axes")
    held = problem.memory(least[1])
    if memory_bytes is not None and not fits(held, memory_bytes):
        raise InfeasibleError(
            f"every layout needs about {format_bytes(held)} a device, {format_bytes(memory_bytes)} are there",
            hint="use a larger mesh, more recomputation or a smaller micro-batch",
        )
    decision = problem.decision(least[1])
    return ShardingAnswer(decision, evaluate(setting, decision, memory_bytes=memory_bytes), 0.0, "a price on memory")

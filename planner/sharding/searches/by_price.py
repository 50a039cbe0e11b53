"""The fastest layouts within memory, and the leanest: elimination with a price on memory.

If the fastest choice exceeds the memory, memory gets a price: each price gives a bound, and a price that is high enough
a plan that fits.
"""

from __future__ import annotations

from planner.errors import InfeasibleError
from planner.memory import fits
from planner.sharding.elimination import Factor, least_within, minimise
from planner.sharding.formulate import formulate
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.units import format_bytes

NEAR = 0.02
"""Relative gap at which the search within memory ends."""


def fastest(setting: Setting, problem: ShardingProblem, memory_bytes: float | None) -> ShardingAnswer:
    """The fastest choice of a problem, proven; within memory the fastest that a price finds.

    Raises:
        InfeasibleError: no choice was found that fits, or the problem is too large for elimination.
    """
    if memory_bytes is None:
        _, choices = minimise(problem.sizes, problem.factors())
    else:
        held = [Factor((v,), kept) for v, kept in enumerate(problem.bytes)]
        choices = least_within(problem.sizes, problem.factors(), held, memory_bytes, NEAR).choices
        if not choices:
            raise InfeasibleError(
                f"no completion of layouts was found that fits {format_bytes(memory_bytes)} a device",
                hint="use a larger mesh, more recomputation or a smaller micro-batch",
            )
    return ShardingAnswer.of(setting, problem.decision(choices), memory_bytes)


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
    return ShardingAnswer.of(setting, problem.decision(choices), memory_bytes)

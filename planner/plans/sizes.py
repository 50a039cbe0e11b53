"""Sizes that a plan file may claim: refused before anything is written out to them, and lists that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.errors import PlanError, Problem
from planner.hardware.types import MOST_DEVICES
from planner.plans.types import Plan

MOST_MICRO_BATCHES = 1 << 24
"""Micro-batches of an iteration at the most."""
MOST_ITERATIONS = 1 << 16
"""Iterations that orders span at the most."""
MOST_PARTS = 1 << 12
"""Parts of a micro-batch at the most."""


def require_sizes(plan: Plan, name: str) -> None:
    """Refuse a plan that claims more ranks, micro-batches or iterations than can be, or lists that do not match.

    O(stages + orders + alternatives).

    Raises:
        PlanError: with every such finding.
    """
    problems = [Problem(message, f"{name}: {path}", hint) for path, message, hint in _findings(plan)]
    if problems:
        first = problems[0]
        raise PlanError(first.message, where=first.where, hint=first.hint, problems=problems)


def _findings(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Places, messages and hints."""
    limits = (
        ("world_size", plan.world_size, 1, MOST_DEVICES),
        ("hardware.device_count", plan.hardware.device_count, 1, MOST_DEVICES),
        ("copies", plan.copies, 0, MOST_DEVICES),
        ("micro_batches.count", plan.micro_batches.count, 0, MOST_MICRO_BATCHES),
        ("schedule.iterations", plan.schedule.iterations, 1, MOST_ITERATIONS),
        ("schedule.parts", plan.schedule.parts, 1, MOST_PARTS),
    )
    for path, value, least, most in limits:
        if not least <= value <= most:
            yield path, f"is {value}", f"from {least} to {most:,} can be read"
    for i, order in enumerate(plan.schedule.orders):
        yield from _same_length(f"schedule.orders[{i}]", "first", order.first, "ranks", order.ranks)
    for i, other in enumerate(plan.alternatives):
        yield from _same_length(f"alternatives[{i}]", "replicas", other.replicas, "starts", other.starts)
        if not other.starts:
            yield f"alternatives[{i}].starts", "is empty", "a plan has at least one stage"


def _same_length(
    path: str, name: str, values: Sequence[int], other: str, others: Sequence[int]
) -> Iterator[tuple[str, str, str]]:
    if len(values) != len(others):
        yield f"{path}.{name}", f"has {len(values)} entries, {other} has {len(others)}", "each belongs to one of these"

"""Several ways to share operators as one problem, in which every stage picks its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.space.problem import StageProblem
from planner.space.repeats import LeastRepeats
from planner.space.types import BlockCosts

_LEAST = (
    "forward_s",
    "backward_s",
    "update_s",
    "parameter_elements",
    "saved_bytes",
    "checkpoint_bytes",
    "boundary_bytes",
    "gradient_boundary_bytes",
    "workspace_bytes",
    "kept_bytes",
    "step_s",
    "gather_s",
    "gradient_gather_s",
    "shard_elements",
)


def alike(costs: Sequence[BlockCosts]) -> list[tuple[BlockCosts, ...]]:
    """Costs between which every stage of a plan can choose by itself, in the order of the first of each.

    They are of one micro-batch size, ranks, mesh and boundaries, and hold the same part of weights that blocks share:
    how many bytes the gradients of these are does not depend on which stages they are summed over.
    """
    found: dict[tuple[object, ...], list[BlockCosts]] = {}
    for each in costs:
        found.setdefault((each.micro_batch, each.ranks, each.label, each.ties), []).append(each)
    return [tuple(group) for group in found.values()]


def least_of(costs: Sequence[BlockCosts]) -> BlockCosts:
    """What none of several costs that are `alike` is below, in any figure."""
    first = costs[0]
    if len(costs) == 1:
        return first
    values = {name: [getattr(c, name) for c in costs] for name in _LEAST}
    least: dict[str, Any] = {n: None if each[0] is None else np.minimum.reduce(each) for n, each in values.items()}
    inner = tuple(
        replace(own, elements=np.minimum.reduce([c.inner_replicas[k].elements for c in costs]))
        for k, own in enumerate(first.inner_replicas)
    )
    selective = [c.selective for c in costs if c.selective is not None]
    known = LeastRepeats(tuple(selective)) if len(selective) == len(costs) else None
    return replace(first, **least, inner_replicas=inner, selective=known)


def joined(problems: Sequence[StageProblem]) -> StageProblem:
    """One problem with the options of several, which differ in costs that are `alike` alone.

    Options, places and kinds of the second follow those of the first, and so on.
    """
    first, count = problems[0], len(problems)
    if count == 1:
        return first
    places, kinds = len(first.place_kind), len(first.capacity_bytes)

    def after(name: str, step: int) -> np.ndarray:
        shifted = [np.where(getattr(p, name) < 0, -1, getattr(p, name) + k * step) for k, p in enumerate(problems)]
        return np.concatenate(shifted)

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in problems])

    by_option = ("replicas", "in_flight", "passing", "filling", "tied_class", "shardings")
    by_place = ("sync_s", "exchange_forward_s", "exchange_backward_s", "update_s", "resident_bytes")
    by_kind = ("forward_s", "backward_s", "capacity_bytes")
    stacked: dict[str, Any] = {name: all_of(name) for name in (*by_option, *by_place, *by_kind)}
    by_way = ("repeat_s", "saved_bytes", "working_bytes")
    stacked |= {name: np.concatenate([getattr(p, name) for p in problems], axis=1) for name in by_way}
    return replace(
        first,
        **stacked,
        place=after("place", places),
        place_kind=after("place_kind", kinds),
        least_s=np.concatenate([[0.0], np.cumsum(np.min([np.diff(p.least_s) for p in problems], axis=0))]),
        link=np.tile(first.link, (count, count, 1)),
        tied_s=np.tile(first.tied_s, (1, count, 1)),
    )

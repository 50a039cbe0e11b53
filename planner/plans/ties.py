"""Stages with weights in common: their exchanges are one, to which every rank must come in the same order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from planner.plans.orders import RankOrder
from planner.plans.records import SharedParameter

_RUN = re.compile(r"S[0-9]+(?: S[0-9]+)+(?=\s|$)")
"""Exchanges that follow each other."""


def tied_groups(stages: Iterable[int], shared: Iterable[SharedParameter]) -> dict[int, int]:
    """For each stage the lowest of those that synchronise with it, because they sum gradients of the same parameters.

    Args:
        stages: numbers of all stages.
        shared: parameters that several stages hold.
    """
    group = {stage: stage for stage in stages}
    for each in shared:
        if each.reduction == "sum":
            joined = {group[stage] for stage in each.stages}
            group = {stage: min(joined) if home in joined else home for stage, home in group.items()}
    return group


def met_in_order(orders: Iterable[RankOrder], group: Mapping[int, int]) -> tuple[RankOrder, ...]:
    """The orders with exchanges that follow each other sorted by group: ranks of several stages meet, none is missed.

    A rank with stages 1 and 3 and one with stages 0 and 1 would wait for each other for ever where 0 and 3 share
    weights and each took its own stages as they are numbered.

    Args:
        orders: of all ranks.
        group: by stage, as `tied_groups` has it.
    """

    def place(word: str) -> tuple[int, int]:
        return group[int(word[1:])], int(word[1:])

    def sorted_run(found: re.Match[str]) -> str:
        return " ".join(sorted(found[0].split(), key=place))

    return tuple(dataclasses.replace(order, actions=_RUN.sub(sorted_run, order.actions)) for order in orders)

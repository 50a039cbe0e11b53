"""Plan files of version 1 say their configuration in many places; here it is put together from them.

Version 2 carries it whole, as `configuration`. Nothing else differs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.errors import PlanError, UsageError
from planner.plans.check_configuration import placed_groups
from planner.plans.types import SCHEMA_VERSION, Plan
from planner.play import Transfers
from planner.space.configuration import Configuration, StageChoice

VERSION = 1

_NOTHING: dict[str, object] = {"stages": [], "copies": 1, "micro_batch": 1, "micro_batches": 1, "schedule": ""}
"""Stands for the configuration until the rest of the file is read."""


def raised(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The document of a file of version 1 as one of version 2 whose configuration says nothing yet.

    Raises:
        PlanError: it has a configuration already.
    """
    if "configuration" in document:
        raise PlanError(
            "unknown key 'configuration'", where=name, hint=f"a file that has it is not of version {VERSION}"
        )
    return {**document, "version": SCHEMA_VERSION, "configuration": _NOTHING}


def configuration_of(plan: Plan) -> Configuration:
    """The configuration that the parts of a plan say: its stages, groups of ranks, micro-batches and orders.

    Workers whose ranks follow no rule get them one by one; where a rank has several stages, or the orders are the
    user's own, copies are taken to stand in line.
    """
    copies, width = max(1, plan.copies), plan.world_size // max(1, plan.copies)
    numbers = {sharding.name: number for number, sharding in enumerate(plan.shardings, 1)}
    alone = all(len(plan.stages_of(rank)) < 2 for rank in range(plan.world_size))
    stages = tuple(
        StageChoice(
            *stage.blocks,
            max(1, len(stage.replicas) // copies) if alone else 1,
            stage.recompute,
            stage.group_ranks,
            numbers.get(stage.sharding, 0),
        )
        for stage in plan.stages
    )
    found = Configuration(
        stages,
        copies,
        plan.micro_batches.size,
        plan.micro_batches.count // copies,
        plan.schedule.name,
        max((stage.zero for stage in plan.stages), default=0),
        slice_devices=width if plan.idle_ranks else 0,
        whole_stages=plan.options.whole_stages,
        transfers=Transfers(plan.schedule.transfers),
        exchange=plan.exchange.scheme if plan.exchange else "",
    )
    said = [frozenset(stage.replicas) for stage in plan.stages]
    one_by_one = tuple(
        rank
        for copy in range(copies)
        for stage in plan.stages
        for group in stage.replicas[copy::copies]
        for rank in group
    )
    others = [dataclasses.replace(found, adjacent=True)]
    others += [dataclasses.replace(found, slice_devices=0, devices=one_by_one)] if alone else []
    return next((each for each in (found, *others) if _places(each) == said), found)


def _places(configuration: Configuration) -> list[frozenset[tuple[int, ...]]]:
    """Where stages stand, as far as a registered schedule says."""
    try:
        return placed_groups(configuration)
    except (UsageError, PlanError):
        return []

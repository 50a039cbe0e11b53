"""A plan's configuration against the rest of the file: whatever both say, they say alike."""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import PlanError, UsageError
from planner.exchange import get as scheme
from planner.plans.findings import Fault, Finding
from planner.plans.types import Plan
from planner.schedules import get
from planner.space.configuration import Configuration
from planner.space.workers import lay_workers, pipeline_of

_AGAIN = "plan again instead of editing the file"
_Pair = tuple[str, object, str, object]


def check_configuration(plan: Plan) -> list[Finding]:
    """Findings about values that the configuration and another part of the file say differently; O(stages + ranks)."""
    own = plan.configuration
    if len(own.stages) != len(plan.stages):
        return [_finding(("configuration.stages", len(own.stages), "stages", len(plan.stages)), "entries")]
    found = [_finding(pair) for pair in (*_whole(plan), *_stages(plan)) if pair[1] != pair[3]]
    return found or [*_placed(plan)]


def _finding(pair: _Pair, unit: str = "") -> Finding:
    path, own, other, said = (str(part) for part in pair)
    has = f" has {unit}" if unit else ""
    return Finding(Fault.CONFIGURATION, f"{path}{has} is {own}, {other}{has} is {said}", _AGAIN)


def _whole(plan: Plan) -> Iterator[_Pair]:
    """What is said once of all stages."""
    own, batches = plan.configuration, plan.micro_batches
    yield "configuration.copies", own.copies, "copies", plan.copies
    yield "configuration.micro_batch", own.micro_batch, "micro_batches.size", batches.size
    count = own.copies * own.micro_batches
    yield "configuration.copies * micro_batches", count, "micro_batches.count", batches.count
    yield "configuration.schedule", own.schedule, "schedule.name", plan.schedule.name
    yield "configuration.transfers", own.transfers.value, "schedule.transfers", plan.schedule.transfers
    if own.exchange and scheme(own.exchange).zero is None:  # what a ZeRO stage exchanges stands with the stages
        yield "configuration.exchange", own.exchange, "exchange.scheme", plan.exchange.scheme if plan.exchange else ""


def _stages(plan: Plan) -> Iterator[_Pair]:
    """What is said of each stage."""
    names = ("", *(sharding.name for sharding in plan.shardings))
    alone = all(len(plan.stages_of(rank)) < 2 for rank in range(plan.world_size))
    for at, (choice, stage) in enumerate(zip(plan.configuration.stages, plan.stages, strict=True)):
        own, other = f"configuration.stages[{at}]", f"stages[{at}]"
        yield f"{own}.start", choice.start, f"{other}.blocks[0]", stage.blocks[0]
        yield f"{own}.stop", choice.stop, f"{other}.blocks[1]", stage.blocks[1]
        yield f"{own}.recompute", choice.recompute, f"{other}.recompute", stage.recompute
        yield "configuration.zero", plan.configuration.zero, f"{other}.zero", stage.zero
        yield f"{own}.ranks", choice.ranks, f"{other}.replicas: ranks of a group", stage.group_ranks
        named = names[choice.sharding] if 0 <= choice.sharding < len(names) else choice.sharding
        yield f"{own}.sharding", named, f"{other}.sharding", stage.sharding
        if alone:
            groups = plan.copies * choice.replicas
            yield f"{own}.replicas * copies", groups, f"{other}.replicas: groups", len(stage.replicas)


def placed_groups(configuration: Configuration) -> list[frozenset[tuple[int, ...]]]:
    """By stage, the groups of ranks that a configuration puts it on; O(ranks).

    Raises:
        UsageError: no schedule has its name.
        PlanError: the schedule cannot serve it, or its devices are no ranks of all workers.
    """
    schedule = get(configuration.schedule)
    reason = schedule.supports(pipeline_of(configuration))
    if reason:
        raise PlanError(reason, hint=_AGAIN)
    try:
        workers = lay_workers(configuration, schedule)
        laid = [workers.groups(stage).tolist() for stage in range(len(configuration.stages))]
    except (ValueError, OverflowError) as error:
        raise PlanError(f"its devices are not those of all workers: {error}", hint=_AGAIN) from error
    return [frozenset(tuple(group) for copy in groups for group in copy) for groups in laid]


def _placed(plan: Plan) -> Iterator[Finding]:
    """The groups of ranks are those on which the configuration puts every stage; orders of one's own may put it
    elsewhere."""
    if plan.schedule.given == "orders":
        return
    try:
        placed = placed_groups(plan.configuration)
    except (UsageError, PlanError) as error:
        yield Finding(Fault.CONFIGURATION, f"configuration: {error.problem.message}", error.problem.hint)
        return
    for at, groups in enumerate(placed):
        strange = groups.symmetric_difference(plan.stages[at].replicas)
        if strange:
            listed = ", ".join(f"{group[0]}-{group[-1]}" for group in sorted(strange)[:4])
            message = f"stages[{at}].replicas is not where configuration puts the stage: ranks {listed} are in one only"
            yield Finding(Fault.CONFIGURATION, message, _AGAIN, at)

"""A schedule laid on ranks: which group is which replica of a stage, and what every rank does in which order.

Workers of a schedule become groups of ranks, copy after copy. The holders of a stage in a copy are numbered by the
first micro-batch that each runs; replica j of a stage with H holders in each of D copies is holder j // D of copy
j % D, and micro-batch m of the plan is micro-batch m // D of copy m % D.

A schedule that never drains is written out until it repeats; the repeating iteration is marked. Stages with weights in
common have one exchange, to which every rank must come in the same order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner import schedules
from planner.errors import PlanError
from planner.plans.orders import Line, RankOrder, Row, Steady, Steps, encode_line, group_lines, row_of
from planner.plans.records import ScheduleSection, SharedParameter
from planner.schedules import Action, ActionKind, Pipeline, Schedule, Work
from planner.space.types import Configuration
from planner.space.workers import lay_workers

Routing = Literal["round_robin", "by_order"]
_AGAIN = "plan again instead of editing the file"
_MOST_ITERATIONS = 8
"""Iterations beyond those that fill the pipeline until an order must repeat."""


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """A schedule on ranks.

    Attributes:
        groups: for each stage its replicas, each a group of ranks.
        routing: "round_robin" where micro-batch m runs on replica `m % len(replicas)`, else "by_order".
        section: the orders.
        world_size: ranks that are taken up, idle ones included.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    routing: Routing
    section: ScheduleSection
    world_size: int


@dataclass(frozen=True, slots=True)
class _Written:
    """Orders that say it all: of one iteration, or of as many as show what repeats."""

    work: Work
    iterations: int
    steady: tuple[Steady, ...] = ()


def lay_out(decision: Configuration, *, schedule: Schedule | None = None) -> RankSchedule:
    """Lay a configuration's schedule on ranks.

    Args:
        decision: stages, copies, micro-batches, devices and the name of the schedule.
        schedule: the schedule itself where it has no name.

    Raises:
        UsageError: no schedule has that name.
        PlanError: the schedule cannot serve the stages and micro-batches, or the devices are no ranks of all workers.

    O(actions).
    """
    chosen = schedule or schedules.get(decision.schedule)
    pipeline = Pipeline(tuple(stage.replicas for stage in decision.stages), decision.micro_batches)
    reason = chosen.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")
    written = _written(chosen, pipeline)
    try:
        workers = lay_workers(decision, chosen)
    except (ValueError, OverflowError) as error:
        raise PlanError(f"its devices are not those of all workers: {error}", hint=_AGAIN) from error
    members = [[tuple(own[copy].tolist()) for own in workers.ranks] for copy in range(decision.copies)]
    holders = _holders(written.work, pipeline.stages)
    if decision.copies > 1 and not chosen.weight_policy.synchronous:
        written = _exchanged(written)
    section = _section(chosen, pipeline, decision, written, members)
    copies = range(decision.copies)
    groups = tuple(tuple(members[copy][worker] for worker in own for copy in copies) for own in holders)
    even = all(pipeline.micro_batches % len(own) == 0 for own in holders)
    return RankSchedule(groups, _routing(written.work, holders) if even else "by_order", section, workers.world_size)


def _written(chosen: Schedule, pipeline: Pipeline) -> _Written:
    if chosen.drains:
        return _Written(chosen.work(pipeline), 1)
    depth = max(chosen.in_flight(pipeline)) * max(pipeline.replicas)
    window = max(1, -(-depth // pipeline.micro_batches))
    runs = [chosen.work(pipeline, window + more) for more in range(2)]
    for iterations in range(window + 1, window + _MOST_ITERATIONS):
        runs = [*runs[-2:], chosen.work(pipeline, iterations + 1)]
        lanes = zip(*(work.lanes for work in runs), strict=True)
        found = [_repeating(once, twice, thrice, pipeline.micro_batches) for once, twice, thrice in lanes]
        if all(part is not None for part in found):
            return _Written(runs[1], iterations, tuple(part for part in found if part is not None))
    raise PlanError(f"{chosen.name} does not repeat after {window + _MOST_ITERATIONS} iterations", hint="use another")


def _repeating(
    once: Sequence[Action], twice: Sequence[Action], thrice: Sequence[Action], micro_batches: int
) -> Steady | None:
    """What orders of one iteration more have more, when it is the same with higher numbers; None when it is not.

    Args:
        once: the order of a lane over some iterations.
        twice, thrice: over one and two more.
        micro_batches: of an iteration.
    """
    at = next((i for i, (a, b) in enumerate(zip(once, twice, strict=False)) if a != b), len(once))
    more = len(twice) - len(once)
    body = [row_of(a, 0) for a in twice[at : at + more]]
    later = [row_of(a, 0) for a in thrice[at + more : at + 2 * more]]
    steps = _steps(body, later, micro_batches)
    ends = [[row_of(a, 0) for a in lane[at + k * more :]] for k, lane in enumerate((once, twice, thrice))]
    if len(thrice) != len(twice) + more or thrice[: at + more] != twice[: at + more]:
        return None
    if not _raised(body, steps, 1, later) or any(not _raised(ends[0], steps, k, ends[k]) for k in (1, 2)):
        return None
    return Steady(at, at + more, steps)


def _raised(rows: Sequence[Row], steps: Steps, times: int, others: Sequence[Row]) -> bool:
    return len(rows) == len(others) and all(r.raised(steps, times) == o for r, o in zip(rows, others, strict=True))


def _steps(body: Sequence[Row], later: Sequence[Row], micro_batches: int) -> Steps:
    """By how much numbers differ between rows an iteration apart."""
    pairs = list(zip(body, later, strict=False))

    def step(*kinds: ActionKind) -> int:
        return next((b.number - a.number for a, b in pairs if a.kind in kinds and a.number >= 0), 1)

    version = next((b.version - a.version for a, b in pairs if a.version >= 0), 0)
    return Steps(micro_batches, step(ActionKind.SYNC, ActionKind.LAUNCH_SYNC), step(ActionKind.UPDATE), version)


def _holders(work: Work, stages: int) -> list[list[int]]:
    """For each stage the workers that run it, by the first micro-batch that each runs."""
    first: list[dict[int, int]] = [{} for _ in range(stages)]
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        for action in lane:
            if action.kind is ActionKind.FORWARD:
                lowest = first[action.stage].get(worker, action.micro_batch)
                first[action.stage][worker] = min(lowest, action.micro_batch)
    return [sorted(own, key=lambda worker, own=own: (own[worker], worker)) for own in first]  # type: ignore[misc]


def _routing(work: Work, holders: Sequence[Sequence[int]]) -> Routing:
    place = [{worker: h for h, worker in enumerate(own)} for own in holders]
    forwards = (
        (action, worker)
        for worker, lane in zip(work.lane_workers, work.lanes, strict=True)
        for action in lane
        if action.kind is ActionKind.FORWARD
    )
    in_turn = all(a.micro_batch % len(place[a.stage]) == place[a.stage][worker] for a, worker in forwards)
    return "round_robin" if in_turn else "by_order"


def _exchanged(written: _Written) -> _Written:
    """With a SYNC before each UPDATE where replicas alone need none but copies do."""
    lanes, steady = [], []
    for at, lane in enumerate(written.work.lanes):
        alone = not any(a.kind in (ActionKind.SYNC, ActionKind.LAUNCH_SYNC) for a in lane)
        spread = [list(_with_sync(action)) if alone else [action] for action in lane]
        lanes.append(tuple(action for own in spread for action in own))
        if written.steady:
            part = written.steady[at]
            start, stop = (sum(len(own) for own in spread[:end]) for end in part[:2])
            exchange = part.steps.update if alone else part.steps.exchange
            steady.append(Steady(start, stop, part.steps._replace(exchange=exchange)))
    return _Written(replace(written.work, lanes=tuple(lanes)), written.iterations, tuple(steady))


def _with_sync(action: Action) -> Iterator[Action]:
    if action.kind is ActionKind.UPDATE:
        yield action._replace(kind=ActionKind.SYNC)
    yield action


def _section(
    chosen: Schedule,
    pipeline: Pipeline,
    decision: Configuration,
    written: _Written,
    members: Sequence[Sequence[tuple[int, ...]]],
) -> ScheduleSection:
    work, synchronous = written.work, chosen.weight_policy.synchronous
    samples = decision.micro_batch * decision.copies
    optimizer = chosen.optimizer_scaling(samples * decision.micro_batches, samples * pipeline.replicas[0])
    versions = () if synchronous else chosen.weight_versions(pipeline)
    staleness = () if synchronous else chosen.staleness(pipeline)
    return ScheduleSection(
        name=chosen.name,
        weight_policy=str(chosen.weight_policy),
        orders=_orders(written, decision.copies, members),
        iterations=written.iterations,
        parts=work.parts,
        causal=work.causal,
        side_by_side=work.shared,
        streaming=work.streaming,
        spans=chosen.spans,
        versions=versions if max(versions, default=1) > 1 else (),
        limits=work.limits,
        staleness=staleness if any(staleness) else (),
        averaged=() if synchronous else _averaged(written, pipeline, decision.copies),
        clock_distance=chosen.clock_distance,
        transfers=decision.transfers.value,
        corrections=chosen.corrections(pipeline, optimizer),
        optimizer=optimizer,
    )


def _averaged(written: _Written, pipeline: Pipeline, copies: int) -> tuple[int, ...]:
    """By stage, micro-batches of all that take part in an update; () where it is those of an iteration."""
    found = [pipeline.micro_batches * copies] * pipeline.stages
    for at, lane in enumerate(written.work.lanes):
        body = lane[slice(*written.steady[at][:2])] if written.steady else lane
        for stage in {action.stage for action in body}:
            kinds = [action.kind for action in body if action.stage == stage]
            together = pipeline.replicas[stage] * copies if ActionKind.LAUNCH_SYNC not in kinds else 1
            if ActionKind.UPDATE in kinds:
                found[stage] = kinds.count(ActionKind.FORWARD) * together // kinds.count(ActionKind.UPDATE)
    return tuple(found) if min(found) < pipeline.micro_batches * copies else ()


def _orders(written: _Written, copies: int, members: Sequence[Sequence[tuple[int, ...]]]) -> tuple[RankOrder, ...]:
    """The lines of all ranks, lane by lane of a worker; a worker's line is made once for all copies that are alike."""
    work = written.work
    seen: dict[int, int] = {}
    by_lane: dict[int, dict[int, Line]] = {}
    for at, (worker, lane) in enumerate(zip(work.lane_workers, work.lanes, strict=True)):
        number = seen[worker] = seen.get(worker, -1) + 1
        steady = written.steady[at] if written.steady else None
        guests = sorted({action.peer for action in lane if action.peer >= 0})
        known: dict[tuple[int, ...], Line] = {}
        for copy in range(copies):
            for place, rank in enumerate(members[copy][worker]):
                hosts = ((guest, members[copy][guest]) for guest in guests)
                peers = {guest: group[min(place, len(group) - 1)] for guest, group in hosts}
                key = tuple(peer - rank for peer in peers.values())
                if key not in known:
                    placed = [a._replace(peer=peers[a.peer]) if a.peer >= 0 else a for a in lane] if guests else lane
                    known[key] = encode_line(placed, rank=rank, steady=steady)
                by_lane.setdefault(number, {})[rank] = known[key].dealt(copies, copy)
    return tuple(line for number, lines in sorted(by_lane.items()) for line in group_lines(lines, number))


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

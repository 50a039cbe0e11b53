"""Lay a schedule out on ranks: the groups of each stage, and the order of actions of every rank.

Workers of a schedule become groups of ranks, copy after copy. The holders of a stage in a copy are numbered by the
first micro-batch that each runs; replica j of a stage with H holders in each of D copies is holder j // D of copy
j % D, and micro-batch m of the plan is micro-batch m // D of copy m % D.

A schedule that never drains is written out until it repeats; the repeating iteration is marked. Stages with weights in
common have one exchange, to which every rank must come in the same order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner import schedules
from planner.errors import PlanError
from planner.plans.orders import Line, RankOrder, Steady, Steps, encode_line, group_lines, raised, steps_between
from planner.plans.records import WORK_FIELDS, ScheduleSection, SharedParameter
from planner.schedules import Action, ActionKind, Pipeline, Schedule, Work
from planner.space.types import Configuration
from planner.space.workers import lay_workers

Routing = Literal["round_robin", "by_order"]
_AGAIN = "plan again instead of editing the file"
_MOST_ITERATIONS = 8
"""Iterations beyond those that fill the pipeline within which an order must repeat."""


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """A schedule laid out on ranks.

    Attributes:
        groups: for each stage its replicas, each a group of ranks.
        routing: "round_robin" where micro-batch m runs on replica `m % len(replicas)`, else "by_order".
        section: the orders.
        world_size: number of ranks, idle ones included.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    routing: Routing
    section: ScheduleSection
    world_size: int


@dataclass(frozen=True, slots=True)
class _WrittenOrders:
    """Orders of workers over one iteration, or over as many as it takes until a schedule that never drains repeats.

    Attributes:
        work: the orders.
        iterations: that they span.
        steady: by lane the part that repeats; () where the schedule drains.
    """

    work: Work
    iterations: int
    steady: tuple[Steady, ...] = ()


def lay_out(decision: Configuration, *, schedule: Schedule | None = None) -> RankSchedule:
    """Lay a configuration's schedule out on ranks.

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
    exchanged = decision.copies > 1 and not chosen.weight_policy.synchronous
    written = _written(chosen, pipeline, exchanged=exchanged)
    try:
        workers = lay_workers(decision, chosen)
    except (ValueError, OverflowError) as error:
        raise PlanError(f"its devices are not those of all workers: {error}", hint=_AGAIN) from error
    members = [[tuple(own[copy].tolist()) for own in workers.ranks] for copy in range(decision.copies)]
    holders = _holders(written.work, pipeline.stages)
    section = _section(chosen, pipeline, decision, written, members)
    copies = range(decision.copies)
    groups = tuple(tuple(members[copy][worker] for worker in own for copy in copies) for own in holders)
    even = all(pipeline.micro_batches % len(own) == 0 for own in holders)
    return RankSchedule(groups, _routing(written.work, holders) if even else "by_order", section, workers.world_size)


def _written(schedule: Schedule, pipeline: Pipeline, *, exchanged: bool) -> _WrittenOrders:
    """A schedule's orders for a pipeline.

    Args:
        schedule: the schedule.
        pipeline: one copy of the pipeline.
        exchanged: whether copies exchange gradients before every update.

    Raises:
        PlanError: a schedule that never drains does not repeat.
    """

    def work(iterations: int) -> Work:
        orders = schedule.work(pipeline, iterations)
        return _with_syncs(orders) if exchanged else orders

    if schedule.drains:
        return _WrittenOrders(work(1), 1)
    depth = max(schedule.in_flight(pipeline)) * max(pipeline.replicas)
    window = max(1, -(-depth // pipeline.micro_batches))
    runs = [work(window + more) for more in range(2)]
    for iterations in range(window + 1, window + _MOST_ITERATIONS):
        runs = [*runs[-2:], work(iterations + 1)]
        lanes = zip(*(run.lanes for run in runs), strict=True)
        repeating_parts = [_repeating(once, twice, thrice, pipeline.micro_batches) for once, twice, thrice in lanes]
        if all(part is not None for part in repeating_parts):
            return _WrittenOrders(runs[1], iterations, tuple(part for part in repeating_parts if part is not None))
    raise PlanError(f"{schedule.name} does not repeat after {window + _MOST_ITERATIONS} iterations", hint="use another")


def _repeating(
    once: Sequence[Action], twice: Sequence[Action], thrice: Sequence[Action], micro_batches: int
) -> Steady | None:
    """The part by which a lane grows with each iteration, if it repeats with raised numbers; None if it does not.

    Args:
        once: the order of a lane over some iterations.
        twice, thrice: over one and two more.
        micro_batches: of an iteration.
    """
    at = next((i for i, (a, b) in enumerate(zip(once, twice, strict=False)) if a != b), len(once))
    growth = len(twice) - len(once)
    body, next_body = twice[at : at + growth], thrice[at + growth : at + 2 * growth]
    steps = steps_between(body, next_body)._replace(micro_batch=micro_batches)
    ends = [lane[at + k * growth :] for k, lane in enumerate((once, twice, thrice))]
    if len(thrice) != len(twice) + growth or thrice[: at + growth] != twice[: at + growth]:
        return None
    if not _raised(body, steps, 1, next_body) or any(not _raised(ends[0], steps, k, ends[k]) for k in (1, 2)):
        return None
    return Steady(at, at + growth, steps)


def _raised(actions: Sequence[Action], steps: Steps, times: int, others: Sequence[Action]) -> bool:
    pairs = zip(actions, others, strict=False)
    return len(actions) == len(others) and all(raised(action, steps, times) == other for action, other in pairs)


def _forwards(work: Work) -> Iterator[tuple[Action, int]]:
    """Every forward, and the worker that runs it."""
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        yield from ((action, worker) for action in lane if action.kind is ActionKind.FORWARD)


def _holders(work: Work, stages: int) -> list[list[int]]:
    """By stage the workers that run it, sorted by the first micro-batch that each runs."""
    first: list[dict[int, int]] = [{} for _ in range(stages)]
    for action, worker in _forwards(work):
        lowest = first[action.stage].get(worker, action.micro_batch)
        first[action.stage][worker] = min(lowest, action.micro_batch)
    return [sorted(own, key=lambda worker, own=own: (own[worker], worker)) for own in first]  # type: ignore[misc]


def _routing(work: Work, holders: Sequence[Sequence[int]]) -> Routing:
    place = [{worker: h for h, worker in enumerate(own)} for own in holders]
    in_turn = all(a.micro_batch % len(place[a.stage]) == place[a.stage][worker] for a, worker in _forwards(work))
    return "round_robin" if in_turn else "by_order"


def _with_syncs(work: Work) -> Work:
    """Add a SYNC before each UPDATE of lanes that have none, since copies must exchange gradients."""
    lanes = []
    for lane in work.lanes:
        kinds = {action.kind for action in lane}
        exchanged = ActionKind.SYNC in kinds or ActionKind.LAUNCH_SYNC in kinds
        lanes.append(lane if exchanged else tuple(a for action in lane for a in _with_sync(action)))
    return replace(work, lanes=tuple(lanes))


def _with_sync(action: Action) -> Iterator[Action]:
    if action.kind is ActionKind.UPDATE:
        yield action._replace(kind=ActionKind.SYNC)
    yield action


def _section(
    schedule: Schedule,
    pipeline: Pipeline,
    decision: Configuration,
    written: _WrittenOrders,
    members: Sequence[Sequence[tuple[int, ...]]],
) -> ScheduleSection:
    work, synchronous = written.work, schedule.weight_policy.synchronous
    samples = decision.micro_batch * decision.copies
    optimizer = schedule.optimizer_scaling(samples * decision.micro_batches, samples * pipeline.replicas[0])
    versions = () if synchronous else schedule.weight_versions(pipeline)
    staleness = () if synchronous else schedule.staleness(pipeline)
    return ScheduleSection(
        name=schedule.name,
        weight_policy=str(schedule.weight_policy),
        orders=_orders(written, decision.copies, members),
        iterations=written.iterations,
        **{name: getattr(work, name) for name in WORK_FIELDS},
        side_by_side=work.shared,
        spans=schedule.spans,
        versions=versions if max(versions, default=1) > 1 else (),
        staleness=staleness if any(staleness) else (),
        averaged=() if synchronous else _averaged(written, pipeline, decision.copies),
        clock_distance=schedule.clock_distance,
        transfers=decision.transfers.value,
        corrections=schedule.corrections(pipeline, optimizer),
        optimizer=optimizer,
    )


def _averaged(written: _WrittenOrders, pipeline: Pipeline, copies: int) -> tuple[int, ...]:
    """By stage, micro-batches that make one update; () where all updates take a whole iteration's."""
    averaged = [pipeline.micro_batches * copies] * pipeline.stages
    for at, lane in enumerate(written.work.lanes):
        body = lane[slice(*written.steady[at][:2])] if written.steady else lane
        for stage in {action.stage for action in body}:
            kinds = [action.kind for action in body if action.stage == stage]
            replicas = pipeline.replicas[stage] * copies if ActionKind.LAUNCH_SYNC not in kinds else 1
            if ActionKind.UPDATE in kinds:
                averaged[stage] = kinds.count(ActionKind.FORWARD) * replicas // kinds.count(ActionKind.UPDATE)
    return tuple(averaged) if min(averaged) < pipeline.micro_batches * copies else ()


def _orders(
    written: _WrittenOrders, copies: int, members: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[RankOrder, ...]:
    """The lines of all ranks, sorted by lane; copies of a worker with equal peers share the encoding."""
    work = written.work
    lanes_seen: dict[int, int] = {}
    by_lane: dict[int, dict[int, Line]] = {}
    for at, (worker, lane) in enumerate(zip(work.lane_workers, work.lanes, strict=True)):
        number = lanes_seen[worker] = lanes_seen.get(worker, -1) + 1
        steady = written.steady[at] if written.steady else None
        peer_workers = sorted({action.peer for action in lane if action.peer >= 0})
        line_by_peers: dict[tuple[int, ...], Line] = {}
        for copy in range(copies):
            for position, rank in enumerate(members[copy][worker]):
                peer_groups = ((guest, members[copy][guest]) for guest in peer_workers)
                peers = {guest: group[min(position, len(group) - 1)] for guest, group in peer_groups}
                key = tuple(peer - rank for peer in peers.values())
                if key not in line_by_peers:
                    placed = [a._replace(peer=peers[a.peer]) if a.peer >= 0 else a for a in lane] if peers else lane
                    line_by_peers[key] = encode_line(placed, rank=rank, steady=steady)
                by_lane.setdefault(number, {})[rank] = line_by_peers[key].dealt(copies, copy)
    return tuple(line for number, lines in sorted(by_lane.items()) for line in group_lines(lines, number))


_RUN = re.compile(r"S[0-9]+(?: S[0-9]+)+(?=\s|$)")
"""Consecutive exchanges."""


def tied_groups(stages: Iterable[int], shared: Iterable[SharedParameter]) -> dict[int, int]:
    """By stage the lowest stage that it synchronises with, because they sum gradients of the same parameters.

    Args:
        stages: numbers of all stages.
        shared: parameters that several stages hold.
    """
    group = {stage: stage for stage in stages}
    for parameter in shared:
        if parameter.reduction == "sum":
            joined = {group[stage] for stage in parameter.stages}
            group = {stage: min(joined) if lowest in joined else lowest for stage, lowest in group.items()}
    return group


def meeting(section: ScheduleSection, stages: int, shared: Iterable[SharedParameter]) -> ScheduleSection:
    """The section with consecutive exchanges sorted by group, so that ranks with several stages do not deadlock.

    If stages 0 and 3 share weights, a rank with stages 1 and 3 and a rank with stages 0 and 1 would wait for each other
    for ever if each took its stages in the order of their numbers.

    Args:
        section: the schedule.
        stages: number of stages.
        shared: parameters that several of them hold.
    """
    group = tied_groups(range(stages), shared)

    def place(word: str) -> tuple[int, int]:
        return group[int(word[1:])], int(word[1:])

    def sorted_run(run: re.Match[str]) -> str:
        return " ".join(sorted(run[0].split(), key=place))

    orders = (dataclasses.replace(order, actions=_RUN.sub(sorted_run, order.actions)) for order in section.orders)
    return dataclasses.replace(section, orders=tuple(orders))

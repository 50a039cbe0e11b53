"""Simulate a plan: step time, bubble, the actions of each rank and memory over time; also as plain data for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.memory import fits
from planner.plans.figures import BUBBLE_CONVENTION
from planner.plans.files import plain
from planner.plans.readings import counterparts, has_closed_form, leaders, malformed, schedule_of, words_in, work_of
from planner.plans.step import exposed_seconds
from planner.plans.types import Plan
from planner.plans.validate import require_sound
from planner.play import Conditions, Cost, StageTimes, Trace, Transfers, run, weight_part_s
from planner.play.measure import PlayedSchedule, find_period
from planner.play.memory import MemoryCurve, StageBytes, held_units, memory_curve
from planner.schedules import ActionKind, Pipeline
from planner.schedules.compiling import compile_orders
from planner.schedules.evictions import slowest_moves_s
from planner.schedules.program import KINDS, Code
from planner.simulate.comparison import TimeComparison, compare, measured
from planner.sums import float_sum


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One simulated worker with all ranks that run identically: its group's ranks, and those of other copies.

    Attributes:
        worker: number of the worker in `Timeline.trace`.
        ranks: ascending.
        stages: the stages that it runs.
        compute_s: forward, backward and update of one iteration.
        communication_s: exposed transfers and synchronisation of one iteration.
        idle_s: waiting time of one iteration, up to its end.
        in_flight: most micro-batches (chunks of them, where the worker runs several stages) kept at the same time,
            those that other workers move to it included.
        memory: memory of one device over time.
        capacity_bytes: usable memory of the device.
    """

    worker: int
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    compute_s: float
    communication_s: float
    idle_s: float
    in_flight: int
    memory: MemoryCurve
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """True if the peak memory fits the device."""
        return fits(self.memory.peak_bytes, self.capacity_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A simulated plan: one iteration, or enough to be periodic. Copies are identical, so only one is simulated.

    Attributes:
        name: name of the model.
        schedule: name of the schedule.
        transfers: what a transfer between stages occupies.
        copies: number of copies of the pipeline.
        micro_batches: micro-batches of one copy.
        step_s: time of one iteration.
        samples_per_s: global batch over step time.
        bubble_fraction: see `bubble_convention`.
        bubble_convention: how the bubble is defined.
        lanes: one per worker.
        recompute_s: by stage, the part of a backward that recomputes the forward.
        inside_s: float64 [kinds of actions, stages], the part of an action in which the ranks of a group communicate.
        comparison: comparison with the plan's own prediction.
        trace: times of all actions of one copy.
        cost: definition of `step_s`.
        iterations: number of simulated iterations.
    """

    name: str
    schedule: str
    transfers: Transfers
    copies: int
    micro_batches: int
    step_s: float
    samples_per_s: float
    bubble_fraction: float
    bubble_convention: str
    lanes: tuple[Lane, ...]
    recompute_s: tuple[float, ...]
    inside_s: np.ndarray
    comparison: TimeComparison
    trace: Trace
    cost: Cost = Cost.MAKESPAN
    iterations: int = 1

    @property
    def played_s(self) -> float:
        """Length of the whole simulation in seconds."""
        return self.trace.makespan_s


def simulate(plan: Plan, *, transfers: Transfers | str | None = None) -> Timeline:
    """Simulate a plan's actions in time and memory; O(actions of one copy).

    Each rank runs the actions that the plan lists for it, with the plan's own times by stage. Synchronisation takes the
    time that the plan says backward work does not hide. A pipeline that never drains is simulated until it repeats, and
    its step is the time between iterations, or the time of overlapped gradient exchanges if that is longer.

    Args:
        plan: the plan.
        transfers: "blocking" (a transfer occupies the worker of the stage after the boundary, as the search charges) or
            "overlapped" (only the link); by default as the plan says.

    Raises:
        PlanError: stages, ranks or predictions contradict each other; actions are missing, repeated, read weights that
            are not held, or wait for each other in a cycle (the message shows it).
    """
    require_sound(plan)
    defects = malformed(plan)
    if defects:
        raise PlanError(defects[0], where="schedule", hint="plan again")
    transfers = Transfers(plan.schedule.transfers if transfers is None else transfers)
    ranks, copies = leaders(plan)
    times = times_of(plan)
    played = (_steady if plan.schedule.continuous else _drained)(plan, ranks, copies, times, transfers)
    trace, iterations = played.trace, round(played.played)
    idle = np.flatnonzero(np.bincount(trace.program.worker, minlength=len(ranks)) == 0)
    if len(idle):
        raise PlanError(f"rank {ranks[idle[0]]} has no actions", where="schedule", hint="plan again")
    step_s = _step_s(plan, played)
    micro_batches = plan.micro_batches.count // copies
    lanes = _lanes(plan, ranks, copies, trace, iterations, step_s)
    return Timeline(
        name=plan.model.name,
        schedule=plan.schedule.name,
        transfers=transfers,
        copies=copies,
        micro_batches=micro_batches,
        step_s=step_s,
        samples_per_s=plan.micro_batches.global_batch / step_s if step_s > 0 else 0.0,
        bubble_fraction=_bubble(lanes, step_s) if len(plan.stages) > 1 else 0.0,
        bubble_convention=BUBBLE_CONVENTION,
        lanes=lanes,
        recompute_s=_recompute_s(plan),
        inside_s=_inside_s(plan),
        comparison=_compared(plan, copies, trace, times, transfers, step_s),
        trace=trace,
        cost=Cost.PERIOD if plan.schedule.continuous else Cost.SPAN if plan.schedule.spans else Cost.MAKESPAN,
        iterations=iterations,
    )


def _bubble(lanes: Sequence[Lane], step_s: float) -> float:
    """Share of the workers' time in which they wait."""
    return float_sum(lane.idle_s for lane in lanes) / (len(lanes) * step_s) if step_s > 0 else 0.0


def _drained(plan: Plan, ranks: Sequence[int], _: int, times: StageTimes, transfers: Transfers) -> PlayedSchedule:
    """One iteration, from an empty pipeline to an empty one."""
    program = compile_orders(work_of(plan, ranks))
    if program.stages != len(plan.stages):
        raise PlanError(f"the actions name {program.stages} stages, the plan has {len(plan.stages)}", hint="plan again")
    trace = run(program, times, Conditions(transfers))
    return PlayedSchedule(trace.span_s() if plan.schedule.spans else trace.makespan_s, 0, 1.0, trace)


def _steady(plan: Plan, ranks: Sequence[int], copies: int, times: StageTimes, transfers: Transfers) -> PlayedSchedule:
    """Simulate iterations of a pipeline that never drains until they repeat."""
    least = plan.schedule.iterations
    depth = max(p.in_flight * len(s.replicas) for p, s in zip(plan.predictions.stages, plan.stages, strict=True))
    if plan.schedule.clock_distance is not None:
        waves = (plan.schedule.clock_distance + 2) * max(plan.schedule.versions, default=1)
        depth += waves * max(len(stage.replicas) for stage in plan.stages)
    return find_period(
        lambda iterations: compile_orders(work_of(plan, ranks, 1 + iterations - least, copies)),
        plan.micro_batches.count // copies,
        -(-depth // copies),
        lambda program: run(program, times, Conditions(transfers)),
        least,
    )


def _step_s(plan: Plan, played: PlayedSchedule) -> float:
    """Iteration time by the schedule's convention; no less than the exchanges of pipelines that never drain."""
    if not plan.schedule.continuous:
        return played.iteration_s
    program = played.trace.program
    launches = program.of(Code.LAUNCH_SYNC)
    exchanges = launches if launches.any() else program.of(Code.SYNC)
    counts = np.zeros((program.workers, program.stages))
    np.add.at(counts, (program.worker[exchanges], program.stage[exchanges]), 1 / round(played.played))
    hidden_s = [stage.sync_s if stage.exposed_sync_s == 0 else 0.0 for stage in plan.predictions.stages]
    return max(played.iteration_s, float((np.rint(counts) * hidden_s).max()))


def _compared(
    plan: Plan, copies: int, trace: Trace, times: StageTimes, transfers: Transfers, step_s: float
) -> TimeComparison:
    """Compare with the closed form if the plan's time is one, else with its simulated time."""
    predicted_s = plan.predictions.iteration_s
    if not has_closed_form(plan):
        return measured(predicted_s, step_s)
    replicas = tuple(len(stage.replicas) // copies for stage in plan.stages)
    pipeline = Pipeline(replicas, plan.micro_batches.count // copies)
    return compare(predicted_s, schedule_of(plan), pipeline, trace.program, times, transfers)


def fullest_lanes(timeline: Timeline) -> tuple[Lane, ...]:
    """For each stage (or set of stages on one worker), the lane with the highest peak memory."""
    best: dict[tuple[int, ...], Lane] = {}
    for lane in timeline.lanes:
        if lane.stages not in best or lane.memory.peak_bytes > best[lane.stages].memory.peak_bytes:
            best[lane.stages] = lane
    return tuple(best.values())


def _repeats(plan: Plan) -> bool:
    """True if the orders have RECOMPUTE actions."""
    return ActionKind.RECOMPUTE in words_in(plan.schedule)


def _recompute_s(plan: Plan) -> tuple[float, ...]:
    """By stage, the part of a backward that recomputes the forward, without the communication in it."""
    stages = plan.predictions.stages
    if _repeats(plan):
        return (0.0,) * len(stages)
    repeated_s = (exposed_seconds(plan, index).recompute_group_s for index in range(len(stages)))
    return tuple(max(0.0, t.recompute_s - group_s) for t, group_s in zip(stages, repeated_s, strict=True))


def _inside_s(plan: Plan) -> np.ndarray:
    """float64 [kinds of actions, stages], the part of an action in which the ranks of a group communicate."""
    inside_s = np.zeros((len(KINDS), len(plan.stages)))
    repeats = _repeats(plan)
    for stage in plan.stages:
        exposed = exposed_seconds(plan, stage.index)
        inside_s[Code.FORWARD, stage.index] = exposed.forward_group_s
        inside_s[Code.RECOMPUTE, stage.index] = exposed.recompute_group_s
        backward_s = exposed.backward_group_s + (0.0 if repeats else exposed.recompute_group_s)
        inside_s[[Code.BACKWARD, Code.INPUT_GRAD], stage.index] = backward_s
    return inside_s / plan.schedule.parts


def times_of(plan: Plan) -> StageTimes:
    """Durations of actions by stage."""
    stages = plan.predictions.stages
    recompute = [s.recompute_s for s in stages]
    backward = [s.backward_s - (s.recompute_s if _repeats(plan) else 0.0) for s in stages]
    return StageTimes.of(
        [s.forward_s for s in stages],
        backward,
        [s.receive_s for s in stages],
        [s.exposed_sync_s for s in stages],
        [s.update_s for s in stages],
        [weight_part_s(s.backward_s, s.recompute_s, s.weight_grad_s) for s in stages],
        return_s=[s.return_s for s in stages],
        recompute_s=recompute,
        evict_s=_moves_s(plan),
    )


def _moves_s(plan: Plan) -> list[float]:
    """By stage, seconds of the slowest move of a micro-batch's activations; 0 without any."""
    moves = {
        (action.stage, rank, action.peer)
        for order in plan.schedule.orders
        for rank in (order.ranks if ">" in order.actions else ())
        for action in order.expand(rank)
        if action.peer >= 0
    }
    return slowest_moves_s(moves, plan.hardware.levels, [s.unit_bytes for s in plan.predictions.stages])


def bytes_of(plan: Plan) -> StageBytes:
    """Memory by stage; activations beyond those of the micro-batches in flight count as working memory.

    Weight versions count from when they are made until they are dropped.
    """
    stages, section = plan.predictions.stages, plan.schedule
    memory = [stage.memory for stage in stages]
    versions = np.array(section.versions or (1,) * len(stages), float)
    weights = np.array([m.weights_bytes for m in memory], float) / versions
    unit = np.array([s.unit_bytes for s in stages], float) * section.parts
    turning, waiting = np.array([s.halves_bytes or (s.unit_bytes, s.unit_bytes) for s in stages], float).T
    over = [0 if s.halves_bytes else max(0, s.memory.activations_bytes - s.in_flight * s.unit_bytes) for s in stages]
    working = np.array(over, float)
    workspace = np.array([m.workspace_bytes for m in memory], float)
    repeats = _repeats(plan)
    return StageBytes(
        weights + np.array([m.gradients_bytes + m.optimizer_bytes for m in memory], float),
        working if repeats else unit,
        workspace if repeats else workspace + working,
        np.array([m.reserve_bytes for m in memory], float),
        unit if repeats else np.zeros(0),
        weights if section.versions else np.zeros(0),
        *(() if repeats else (turning * section.parts, waiting * section.parts)),
    )


def _lanes(
    plan: Plan, ranks: Sequence[int], copies: int, trace: Trace, iterations: int, step_s: float
) -> tuple[Lane, ...]:
    sizes = bytes_of(plan)
    held = held_units(trace)
    compute, communication = trace.compute_s() / iterations, trace.communication_s() / iterations
    idle = np.maximum(step_s - compute - communication, 0.0)
    groups = counterparts(plan, ranks, copies)
    return tuple(
        Lane(
            worker=worker,
            ranks=tuple(sorted(itertools.chain(*groups[worker]))),
            stages=plan.stages_of(rank),
            compute_s=float(compute[worker]),
            communication_s=float(communication[worker]),
            idle_s=float(idle[worker]),
            in_flight=int(held[worker]),
            memory=memory_curve(trace, worker, sizes),
            capacity_bytes=min(plan.predictions.stages[s].capacity_bytes for s in plan.stages_of(rank)),
        )
        for worker, rank in enumerate(ranks)
    )


_FORMAT = "shardplan-timeline"


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """A timeline as dicts and lists of plain numbers, in seconds and bytes. O(actions of one lane per stage)."""
    return {
        "format": _FORMAT,
        "version": 1,
        "model": timeline.name,
        "schedule": timeline.schedule,
        "transfers": timeline.transfers.value,
        "copies": timeline.copies,
        "micro_batches_per_copy": timeline.micro_batches,
        "step_s": timeline.step_s,
        "step_is": timeline.cost.value,
        "iterations_played": timeline.iterations,
        "samples_per_s": timeline.samples_per_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_convention": timeline.bubble_convention,
        "fits": all(lane.fits for lane in timeline.lanes),
        "comparison": {**plain(timeline.comparison), "difference": timeline.comparison.difference},
        "lanes": [_lane_document(lane) for lane in timeline.lanes],
        "memory": [_memory_document(lane.stages, lane.ranks[0], lane.memory) for lane in fullest_lanes(timeline)],
    }


_LANE_FIELDS = ("ranks", "stages", "compute_s", "communication_s", "idle_s", "in_flight", "capacity_bytes", "fits")


def _lane_document(lane: Lane) -> dict[str, Any]:
    """One lane as plain data."""
    return {**{name: plain(getattr(lane, name)) for name in _LANE_FIELDS}, "peak_bytes": round(lane.memory.peak_bytes)}


def _memory_document(stages: tuple[int, ...], rank: int, curve: MemoryCurve) -> dict[str, Any]:
    """One memory curve as plain data."""
    return {
        "stages": list(stages),
        "rank": rank,
        "time_s": curve.time_s.tolist(),
        "held_bytes": [round(held) for held in curve.held_bytes.tolist()],
    }

"""A plan played out: step time, bubble, what each rank does when, memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import PlanError
from planner.plan.figures import BUBBLE_CONVENTION
from planner.plan.types import Plan
from planner.schedules.program import compile_orders
from planner.schedules.types import Pipeline
from planner.simulate.comparison import Comparison, compare
from planner.simulate.engine import StageTimes, Trace, Transfers, run
from planner.simulate.memory import MemoryCurve, StageBytes, memory_curve, peak_in_flight
from planner.simulate.play import bubble_fraction


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One simulated worker, and all ranks that do the same at the same time: its replica's group and its copies.

    Attributes:
        worker: its row in `Timeline.trace`.
        ranks: ascending.
        stages: the stages that it runs.
        compute_s: forward, backward and update.
        communication_s: transfers and synchronisation that nothing hides.
        idle_s: waiting, up to the end of the iteration.
        in_flight: most micro-batches kept at the same time.
        memory: over time, of one device.
        capacity_bytes: memory of the device.
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
        """Whether the memory never exceeds the device's."""
        return self.memory.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One iteration of a plan, event by event. Copies of the pipeline are alike: one is played.

    Attributes:
        name: of the model.
        schedule: name of the schedule.
        transfers: what a transfer between stages was taken to occupy.
        copies: copies of the pipeline that run side by side.
        micro_batches: micro-batches of one copy.
        step_s: time of one iteration.
        samples_per_s: global batch over that.
        bubble_fraction: see `bubble_convention`.
        bubble_convention: how the bubble is defined.
        lanes: by worker.
        recompute_s: by stage, the part of a backward that repeats the forward.
        comparison: with the plan's own prediction.
        trace: when every action of one copy ran.
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
    comparison: Comparison
    trace: Trace


def simulate(plan: Plan, *, transfers: Transfers | str = Transfers.BLOCKING) -> Timeline:
    """Play a plan's actions out in time and memory; O(actions of one copy).

    Each rank runs the actions that the plan lists for it, with the plan's own times by stage. Transfers either occupy
    the worker of the stage that the boundary belongs to ("blocking", what the search charges) or only the link
    ("overlapped"). Synchronisation takes what the plan says is not hidden behind backward work.

    Raises:
        PlanError: actions are missing, repeated, or wait for each other in a cycle (the message shows it).
    """
    transfers = Transfers(transfers)
    leaders, copies = _leaders(plan)
    program = compile_orders([plan.actions(rank) for rank in leaders])
    if program.stages != len(plan.stages):
        raise PlanError(f"the actions name {program.stages} stages, the plan has {len(plan.stages)}", hint="plan again")
    times = _times(plan)
    trace = run(program, times, transfers=transfers)
    replicas = tuple(len(stage.replicas) // copies for stage in plan.stages)
    pipeline = Pipeline(replicas, plan.micro_batches.count // copies)
    step = trace.makespan_s
    predictions = plan.predictions
    return Timeline(
        name=plan.model.name,
        schedule=plan.schedule.name,
        transfers=transfers,
        copies=copies,
        micro_batches=pipeline.micro_batches,
        step_s=step,
        samples_per_s=plan.micro_batches.global_batch / step if step > 0 else 0.0,
        bubble_fraction=bubble_fraction(trace),
        bubble_convention=BUBBLE_CONVENTION,
        lanes=_lanes(plan, leaders, copies, trace),
        recompute_s=tuple(stage.recompute_s for stage in predictions.stages),
        comparison=compare(predictions.iteration_s, plan.schedule.name, pipeline, program, times, transfers),
        trace=trace,
    )


def fullest_lanes(timeline: Timeline) -> tuple[Lane, ...]:
    """For each stage (or set of stages on one worker) the lane whose memory peaks highest."""
    best: dict[tuple[int, ...], Lane] = {}
    for lane in timeline.lanes:
        if lane.stages not in best or lane.memory.peak_bytes > best[lane.stages].memory.peak_bytes:
            best[lane.stages] = lane
    return tuple(best.values())


def _leaders(plan: Plan) -> tuple[list[int], int]:
    """One rank of each replica of one copy, and the number of copies; of all copies (1) when these are not alike."""
    leaders = sorted({group[0] for stage in plan.stages for group in stage.replicas})
    if plan.copies > 1 and plan.world_size % plan.copies == 0 and _alike(plan, leaders):
        return [rank for rank in leaders if rank < plan.world_size // plan.copies], plan.copies
    return leaders, 1


def _alike(plan: Plan, leaders: Sequence[int]) -> bool:
    """Whether each copy does what copy 0 does, on micro-batches that lie a constant further on."""
    width = plan.world_size // plan.copies
    line: dict[int, tuple[str, int, int]] = {
        rank: (order.actions, order.step, first)
        for order in plan.schedule.orders
        for rank, first in zip(order.ranks, order.first, strict=True)
    }
    first_copy = [rank for rank in leaders if rank < width]
    if len(leaders) != len(first_copy) * plan.copies or any(rank not in line for rank in leaders):
        return False
    for copy in range(1, plan.copies):
        shifts = set()
        for rank in first_copy:
            mine, other = line[rank], line.get(rank + copy * width, ("", 0, 0))
            if mine[:2] != other[:2] or plan.stages_of(rank) != plan.stages_of(rank + copy * width):
                return False
            shifts.add(other[2] - mine[2])
        if len(shifts) > 1:
            return False
    return True


def _times(plan: Plan) -> StageTimes:
    stages = plan.predictions.stages
    return StageTimes.of(
        [s.forward_s for s in stages],
        [s.backward_s for s in stages],
        [s.receive_s for s in stages],
        [s.exposed_sync_s for s in stages],
        [s.update_s for s in stages],
        return_s=[s.return_s for s in stages],
    )


def _stage_bytes(plan: Plan) -> StageBytes:
    """Fixed and per-micro-batch memory; activations beyond those of the micro-batches in flight are working memory."""
    stages = plan.predictions.stages
    memory = [stage.memory for stage in stages]
    working = [max(0, s.memory.activations_bytes - s.in_flight * s.unit_bytes) for s in stages]
    return StageBytes(
        np.array([m.weights_bytes + m.gradients_bytes + m.optimizer_bytes for m in memory], float),
        np.array([s.unit_bytes for s in stages], float),
        np.array([m.workspace_bytes + w for m, w in zip(memory, working, strict=True)], float),
        np.array([m.reserve_bytes for m in memory], float),
    )


def _lanes(plan: Plan, leaders: Sequence[int], copies: int, trace: Trace) -> tuple[Lane, ...]:
    sizes = _stage_bytes(plan)
    held = peak_in_flight(trace.program).max(axis=1)
    compute, communication, idle = trace.compute_s(), trace.communication_s(), trace.idle_s()
    group_of = {group[0]: group for stage in plan.stages for group in stage.replicas}
    width = plan.world_size // copies
    return tuple(
        Lane(
            worker=worker,
            ranks=tuple(sorted(r + copy * width for copy in range(copies) for r in group_of[rank])),
            stages=plan.stages_of(rank),
            compute_s=float(compute[worker]),
            communication_s=float(communication[worker]),
            idle_s=float(idle[worker]),
            in_flight=int(held[worker]),
            memory=memory_curve(trace, worker, sizes),
            capacity_bytes=min(plan.predictions.stages[s].capacity_bytes for s in plan.stages_of(rank)),
        )
        for worker, rank in enumerate(leaders)
    )

"""A point played in the simulator: time by its schedule's convention, memory, bubble, versions and staleness."""

from __future__ import annotations

import numpy as np

from planner import schedules
from planner.errors import PlanError
from planner.memory import fits
from planner.play import Conditions, Measurement, StageBytes, Transfers, measure_schedule
from planner.schedules.types import Pipeline, Schedule
from planner.space.types import MemoryBytes
from planner.systems._bench import Bench
from planner.systems._found import Played
from planner.systems._price import Figures, price, sent_bytes
from planner.systems.types import Point
from planner.units import format_bytes


def play(bench: Bench, point: Point, transfers: Transfers, *, states: int = 0) -> Played:
    """Play a point.

    Args:
        bench: model, cluster and job.
        point: what was decided.
        transfers: what a transfer between stages occupies.
        states: further buffers as large as the weights that the system keeps (PipeMare's and predicted weights).
    """
    chosen = schedules.get(point.schedule)
    pipeline = Pipeline(tuple(s.replicas for s in point.stages), point.played or point.micro_batches)
    reason = chosen.supports(pipeline)
    if reason:
        return Played(point, reason=reason)
    figures = price(bench, point)
    sizes = _sizes(figures, states)
    try:
        found = measure_schedule(
            chosen,
            len(point.stages),
            pipeline.micro_batches,
            forward_s=figures.forward_s.tolist(),
            backward_s=figures.backward_s.tolist(),
            receive_s=((figures.receive_s + figures.return_s) / 2).tolist(),
            sync_s=[0.0] * len(point.stages) if beside(point) else figures.sync_s.tolist(),
            update_s=figures.update_s.tolist(),
            replicas=pipeline.replicas,
            conditions=Conditions(transfers=transfers),
            sizes=sizes,
        )
    except PlanError as error:
        return Played(point, reason=str(error))
    return _result(bench, point, chosen, pipeline, figures, sizes, found)


def delays(played: Played) -> str:
    """How many updates old the gradients of each stage are, for a backend."""
    pipeline = Pipeline(tuple(s.replicas for s in played.point.stages), played.point.played)
    return "updates by stage: " + ", ".join(str(d) for d in schedules.get(played.point.schedule).staleness(pipeline))


def beside(point: Point) -> bool:
    """Whether gradients travel beside the work, so that the slower of the two counts: where nothing waits for them.

    So it is in the published cost models of asynchronous pipelines; a single stage has nothing else to work on.
    """
    return len(point.stages) > 1 and not schedules.get(point.schedule).weight_policy.synchronous


def _sizes(figures: Figures, states: int) -> StageBytes:
    return StageBytes(
        fixed_bytes=figures.weight_bytes * (1 + states) + figures.gradient_bytes + figures.optimizer_bytes,
        unit_bytes=figures.unit_bytes,
        working_bytes=figures.working_bytes,
        reserve_bytes=figures.reserve_bytes,
        version_bytes=figures.weight_bytes,
    )


def _result(
    bench: Bench,
    point: Point,
    chosen: Schedule,
    pipeline: Pipeline,
    figures: Figures,
    sizes: StageBytes,
    found: Measurement,
) -> Played:
    times = point.micro_batches / pipeline.micro_batches
    synchronous = chosen.weight_policy.synchronous
    iteration_s = found.iteration_s * (1.0 if synchronous else times)
    exchanges = np.asarray(chosen.exchanges(pipeline), float)
    if not synchronous:
        exchanges = exchanges * point.micro_batches / pipeline.micro_batches
    if not synchronous and beside(point):
        iteration_s = max(iteration_s, float((figures.sync_s * exchanges).max()))
    worker, memory = _fullest(figures, sizes, found)
    capacity = min(float(figures.capacity_bytes[s]) for s, own in enumerate(figures.holders) if worker in own)
    reason = ""
    if not fits(memory.total, capacity):
        stage = next(s for s, own in enumerate(figures.holders) if worker in own)
        reason = f"stage {stage} needs {format_bytes(memory.total)} of {format_bytes(capacity)}"
    return Played(
        point=point,
        iteration_s=iteration_s,
        bubble=max(0.0, 1 - (1 - found.bubble) * found.iteration_s * (1.0 if synchronous else times) / iteration_s),
        memory=memory,
        capacity_bytes=capacity,
        sent_bytes=sent_bytes(point, figures, exchanges),
        weight_versions=max(found.weight_versions),
        staleness=max(found.staleness),
        devices=point.copies * found.workers,
        reason=reason,
        exchanges=tuple(exchanges.tolist()),
    )


def _fullest(figures: Figures, sizes: StageBytes, found: Measurement) -> tuple[int, MemoryBytes]:
    """The worker nearest to its capacity, and its memory by kind."""
    room = [min(float(figures.capacity_bytes[s]) for s, own in enumerate(figures.holders) if w in own)
            for w in range(found.workers)]  # fmt: skip
    worker = int(np.argmax(np.asarray(found.peak_bytes) / np.asarray(room)))
    own = [s for s, workers in enumerate(figures.holders) if worker in workers]
    versions = sum(float(figures.weight_bytes[s]) * (found.weight_versions[s] - 1) for s in own)
    weights = float(sizes.fixed_bytes[own].sum()) - float((figures.gradient_bytes + figures.optimizer_bytes)[own].sum())
    gradients, optimizer = float(figures.gradient_bytes[own].sum()), float(figures.optimizer_bytes[own].sum())
    workspace, reserve = float(figures.working_bytes[own].max()), float(figures.reserve_bytes[own].max())
    weights += versions
    rest = found.peak_bytes[worker] - weights - gradients - optimizer - workspace - reserve
    return worker, MemoryBytes(weights, gradients, optimizer, max(0.0, rest), workspace, reserve)

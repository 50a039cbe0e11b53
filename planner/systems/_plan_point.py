"""A decision, or a point of the space, as a plan file: what each stage costs and keeps, and what bounds the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType

import numpy as np

from planner.plan import Plan, Provenance, assemble
from planner.plan.files import seal
from planner.plan.schedule_section import Given
from planner.plan.scheduled import Scheduled, lay_out
from planner.plan.words import significant
from planner.play import Transfers
from planner.schedules.types import Pipeline, Schedule
from planner.sharding import StageSharding
from planner.space.types import Certificate, Configuration, Evaluation, MemoryBytes, StageTerms
from planner.systems._bench import Bench
from planner.systems._boundaries import Cut
from planner.systems._point import Point
from planner.systems._price import Figures, price, rank_table

_NONE: Mapping[int, StageSharding] = MappingProxyType({})
_SPACE = "the plan's own stages in any order of work: the busiest device computes as long"


def _provenance(bench: Bench) -> Provenance:
    return Provenance("shardplan", version("shardplan"), (), bench.prices.chain.graph.name, bench.cluster.name)


def plan_point(
    bench: Bench,
    point: Point,
    schedule: Schedule,
    iteration_s: float,
    transfers: Transfers,
    *,
    states: int = 0,
    holders: tuple[tuple[int, ...], ...] = (),
    provenance: Provenance | None = None,
) -> Plan:
    """A point of the space as a plan.

    Args:
        bench: model, cluster and job.
        point: stages, copies, micro-batches.
        schedule: the order of work.
        iteration_s: what playing the point found.
        transfers: what a transfer was taken to occupy.
        states: further buffers as large as the weights that are kept.
        holders: workers of one copy that have each stage, where the schedule's name does not say it.
        provenance: how the plan came to be.
    """
    decision = Configuration(
        point.stages, point.copies, point.micro_batch, point.micro_batches, schedule.name, point.zero,
        point.slice_devices, devices=point.ranks, transfers=transfers,
    )  # fmt: skip
    laid = lay_out(decision, schedule=schedule)
    figures = price(bench, point, holders)
    terms = _terms(bench, point, schedule, figures, states, laid.section.parts)
    pace = [t.total_s / len(own) for t, own in zip(terms, figures.holders, strict=True)]
    evaluation = Evaluation(iteration_s, terms, (), pace.index(max(pace)))
    plan = assembled(bench, decision, evaluation, _busiest_s(point, figures), laid, provenance)
    workers = max(worker for own in figures.holders for worker in own) + 1
    work_s = sum(
        (t.forward_s + t.backward_s) * point.micro_batches + t.update_s * len(own)
        for t, own in zip(terms, figures.holders, strict=True)
    )
    bubble = significant(max(0.0, 1.0 - work_s / (workers * iteration_s)))
    predictions = dataclasses.replace(plan.predictions, bubble_fraction=bubble)
    stages = plan.stages
    if point.whole:
        stages = tuple(dataclasses.replace(stage, kept_blocks=()) for stage in stages)
    return seal(dataclasses.replace(plan, predictions=predictions, stages=stages))


def plan_cut(bench: Bench, cut: Cut, transfers: Transfers, given: Given, provenance: Provenance | None = None) -> Plan:
    """The stages of a given schedule as they were played, as a plan.

    Args:
        bench: model, cluster and job.
        cut: the stages, and what playing them found.
        transfers: what a transfer was taken to occupy.
        given: how the user gave the schedule.
        provenance: how the plan came to be.
    """
    schedule = cut.shape.schedule
    plan = plan_point(
        bench, cut.point, schedule, cut.seconds, transfers, holders=cut.shape.holders,
        states=schedule.weight_buffers, provenance=provenance,
    )  # fmt: skip
    return seal(dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, given=given)))


def assembled(
    bench: Bench,
    decision: Configuration,
    evaluation: Evaluation,
    busiest_s: float,
    laid: Scheduled,
    provenance: Provenance | None,
    shardings: Mapping[int, StageSharding] = _NONE,
) -> Plan:
    size, iteration_s = decision.micro_batch, evaluation.iteration_s
    bound_s = min(busiest_s, iteration_s)
    return assemble(
        bench.prices.graph_at(size),
        bench.prices.chain,
        bench.cluster,
        bench.job,
        decision,
        evaluation,
        Certificate(bound_s, 1.0 - bound_s / iteration_s, _SPACE, False),
        origins=bench.prices.profiles(size)[0].origin,
        provenance=provenance or _provenance(bench),
        shardings=shardings,
        scheduled=laid,
    )


def _terms(
    bench: Bench, point: Point, schedule: Schedule, figures: Figures, states: int, parts: int
) -> tuple[StageTerms, ...]:
    """What each stage costs and keeps, on one of the devices that hold it."""
    pipeline = Pipeline(tuple(s.replicas for s in point.stages), point.micro_batches)
    kept, versions = schedule.in_flight(pipeline), schedule.weight_versions(pipeline)
    hidden = len(point.stages) > 1 and not schedule.weight_policy.synchronous
    found = []
    for at, choice in enumerate(point.stages):
        workspace = float(bench.tables(point.micro_batch).workspace[choice.start, choice.stop])
        unit, weights = float(figures.unit_bytes[at]) / parts, float(figures.weight_bytes[at])
        memory = MemoryBytes(
            weights=weights * versions[at],
            gradients=float(figures.gradient_bytes[at]),
            optimizer=float(figures.optimizer_bytes[at]) + states * weights,
            activations=kept[at] * unit + float(figures.working_bytes[at]) - workspace,
            workspace=workspace,
            reserve=float(figures.reserve_bytes[at]),
        )
        sync_s = float(figures.sync_s[at])
        found.append(
            StageTerms(
                forward_s=float(figures.forward_s[at]),
                backward_s=float(figures.backward_s[at]),
                recompute_s=_recompute_s(bench, point, figures, at),
                receive_s=float(figures.receive_s[at]),
                sync_s=sync_s,
                exposed_sync_s=0.0 if hidden else sync_s,
                update_s=float(figures.update_s[at]),
                in_flight=kept[at],
                memory=memory,
                capacity_bytes=float(figures.capacity_bytes[at]),
                return_s=float(figures.return_s[at]),
                unit_bytes=unit,
            )
        )
    return tuple(found)


def _recompute_s(bench: Bench, point: Point, figures: Figures, at: int) -> float:
    """The part of the backward that repeats the forward."""
    choice, costs = point.stages[at], bench.costs(point.micro_batch)
    if not choice.recompute:
        return 0.0
    if point.whole:
        return float(figures.forward_s[at])
    repeated = np.ones(bench.blocks, bool) if costs.repeated is None else costs.repeated
    types = np.unique(bench.cluster.device_types[rank_table(point)[:, list(figures.holders[at])]]).tolist()
    return max(float((costs.forward_s[t] * repeated)[choice.start : choice.stop].sum()) for t in types)


def _busiest_s(point: Point, figures: Figures) -> float:
    """Computation of the device that has most of it, in an iteration."""
    work_s = [0.0] * (max(worker for own in figures.holders for worker in own) + 1)
    for at, own in enumerate(figures.holders):
        each = float(figures.forward_s[at] + figures.backward_s[at]) * point.micro_batches / len(own)
        for worker in own:
            work_s[worker] += each
    return max(work_s)

"""Systems whose planner tries depths, widths and micro-batch sizes with balanced stages: GPipe, 1F1B, 2BW, Chimera.

Candidates are looked at best bound first; the promising ones are simulated, and the fastest that fits is taken.
PipeMare and pipelined backpropagation are the same with one pipeline, as deep as there are devices and blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner import schedules
from planner.hardware.collectives import collective_s
from planner.hardware.types import Collective
from planner.memory import fits
from planner.schedules.types import Pipeline
from planner.space.cuts import balanced, least_need
from planner.systems._bench import Bench, StageRule
from planner.systems._found import Found, Played
from planner.systems._least import least_s
from planner.systems._play import play
from planner.systems._price import price
from planner.systems._search import found_of, search, stages_of
from planner.systems.types import Point, Semantics, System
from planner.units import format_bytes

MOST_PLAYED = 60
"""Candidates of one system that are simulated at the most."""

FAR = 0.4
"""Shapes whose estimate is slower than the best by more than this are left out."""

MOST_IN_ALL, ITERATIONS = 1_200_000, 8
"""Actions of all simulations of one system, and iterations that an asynchronous one takes to find its pace."""

MOST_ACTIONS = 400_000
"""Larger orders are not simulated: there is always a candidate with larger micro-batches or fewer stages."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape to be tried.

    Attributes:
        estimate_s: with the schedule's bubble and the exchange of gradients; the order in which shapes are tried.
        bound_s: no pipeline of this shape is faster.
        depth: stages.
        copies: pipelines.
        micro_batch, micro_batches: in one pipeline.
        recompute: of all stages.
        schedule: with its options.
        whole: recomputation repeats whole stages from what enters them.
        adjacent: the replicas of a stage are neighbouring devices, instead of the stages of a pipeline.
    """

    estimate_s: float
    bound_s: float
    depth: int
    copies: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    schedule: str
    whole: bool = False
    adjacent: bool = False


@functools.lru_cache(maxsize=1024)
def stage_rules(schedule: str, depth: int, micro_batches: int) -> tuple[StageRule, ...]:
    """What each stage keeps under a schedule: its own units, and as much state for each further stage of its worker.

    A worker of several stages keeps more, as much as it finds when it is played.
    """
    chosen, pipeline = schedules.get(schedule), Pipeline((1,) * depth, micro_batches)
    kept, versions, placement = chosen.in_flight(pipeline), chosen.weight_versions(pipeline), chosen.placement(pipeline)
    return tuple(
        StageRule(kept[stage], versions[stage], max(len(placement[worker]) for worker in workers))
        for stage, workers in enumerate(chosen.holders(pipeline))
    )


def depths(bench: Bench, least: int = 2) -> list[int]:
    """Depths worth trying: all up to 16, multiples of 8, divisors of the device count, the deepest and its even one."""
    most = min(bench.devices, bench.blocks)
    divisors = [d for d in range(1, most + 1) if bench.devices % d == 0]
    tried = (*range(1, 17), *range(24, most + 1, 8), *divisors, most, most - most % 2)
    return sorted({d for d in tried if least <= d <= most})


@functools.lru_cache(maxsize=1024)
def _variants(schedule: str, depth: int, micro_batches: int, *, recompute: bool) -> tuple[str, ...]:
    """The schedule with each of its options that suits the shape."""
    found = schedules.get(schedule).variants(depth, micro_batches, recompute=recompute)
    return tuple(variant.name for variant in found)


def _shapes(bench: Bench, system: System) -> Iterator[tuple[int, int, int, int]]:
    """(depth, micro-batch, copies, micro-batches of a copy) that the devices, the blocks and the global batch allow."""
    fixed = system.options.get("depth") == "devices"
    sizes = bench.sizes[:1] if system.options.get("micro_batch") == "1" else bench.sizes
    for depth in [min(bench.devices, bench.blocks)] if fixed else depths(bench):
        for size in sizes:
            copies = _copies(bench, depth, size) if system.copies else 1
            count, rest = divmod(bench.job.global_batch, size * copies)
            if count and not rest:
                yield depth, size, copies, count


def _candidates(bench: Bench, system: System, *, whole: bool = False) -> list[Candidate]:
    """All shapes, the most promising first; with `whole` those whose stages are recomputed from what enters them."""
    found = []
    for depth, size, copies, count in _shapes(bench, system):
        for recompute in (True,) if whole else system.recompute:
            slot = float(bench.tables(size).stage_s(recompute=recompute, whole=whole)[0, -1] / depth)
            for schedule in _variants(system.schedule, depth, count, recompute=recompute):
                busy_s = slot * (count + idle_slots(schedule, depth, count))
                for adjacent in (False, True)[: min(copies, 2)]:
                    estimate_s = busy_s + _exchange_s(bench, schedule, depth, count, copies, adjacent=adjacent)
                    shape = (depth, copies, size, count, recompute, schedule, whole, adjacent)
                    found.append(Candidate(estimate_s, slot * count, *shape))
    return sorted(found, key=lambda c: (c.estimate_s, c.depth, c.recompute, c.adjacent))


def _unserved(bench: Bench, system: System) -> str:
    """Why the schedule serves none of the shapes, said of the first."""
    chosen = schedules.get(system.schedule)
    for depth, _, _, count in _shapes(bench, system):
        return chosen.supports(Pipeline((1,) * depth, count))
    return "no depth, width and micro-batch divide the devices and the global batch"


def idle_slots(schedule: str, depth: int, micro_batches: int) -> float:
    """Idle time of equal stages with B = 2F, in times of a stage for one micro-batch."""
    return schedules.get(schedule).idle_s(Pipeline((1,) * depth, micro_batches), 1.0, 2.0) / 3


def _exchange_s(bench: Bench, schedule: str, depth: int, count: int, copies: int, *, adjacent: bool) -> float:
    """The all-reduce of an even share of the parameters among the copies of a stage."""
    states = stage_rules(schedule, depth, count)[0].states
    if copies * states < 2:
        return 0.0
    payload = float(bench.tables(bench.sizes[0]).elements[0, -1]) / depth * bench.precision.gradient_bytes
    ranks = _placed(depth, copies, adjacent=adjacent)[:, : min(states, depth)].ravel()
    return states * collective_s(bench.cluster, Collective.ALL_REDUCE, ranks, payload, max(1, depth // states))


def _placed(depth: int, copies: int, *, adjacent: bool) -> np.ndarray:
    """[copies, depth] the device of each worker."""
    line = np.arange(copies * depth)
    return line.reshape(depth, copies).T if adjacent else line.reshape(copies, depth)


def _copies(bench: Bench, depth: int, size: int) -> int:
    """The most copies of a pipeline that the devices hold and whose micro-batches divide the global batch."""
    most = bench.devices // depth
    return next(w for w in range(most, 0, -1) if bench.job.global_batch % (w * size) == 0 or w == 1)


def cut(bench: Bench, candidate: Candidate, states: int = 0) -> tuple[int, ...] | None:
    """Balanced stages that fit, by the rule of the schedule."""
    tables, room = bench.tables(candidate.micro_batch), min(d.usable_bytes for d in bench.cluster.devices)
    stage_s = tables.stage_s(recompute=candidate.recompute, whole=candidate.whole)
    return balanced(stage_s, [fits(need, room) for need in _needs(bench, candidate, states)])


def _needs(bench: Bench, candidate: Candidate, states: int) -> list[np.ndarray]:
    tables, extra = bench.tables(candidate.micro_batch), states * bench.precision.weight_bytes
    found, known = [], {}
    for rule in stage_rules(candidate.schedule, candidate.depth, candidate.micro_batches):
        if rule not in known:
            need = tables.needed(rule, recompute=candidate.recompute, whole=candidate.whole)
            known[rule] = need + extra * tables.elements
        found.append(known[rule])
    return found


def point_of(candidate: Candidate, marks: tuple[int, ...], played: int = 0) -> Point:
    """The point of a candidate with these stages."""
    ranks = _placed(candidate.depth, candidate.copies, adjacent=candidate.adjacent)
    return Point(
        stages_of(marks, recompute=candidate.recompute),
        candidate.copies,
        candidate.micro_batch,
        candidate.micro_batches,
        candidate.schedule,
        ranks=tuple(ranks.ravel().tolist()) if candidate.adjacent else (),
        played=played,
        whole=candidate.whole,
    )


def sweep(bench: Bench, system: System, candidates: list[Candidate], states: int = 0) -> tuple[Played | None, str]:
    """The fastest candidate that fits, and otherwise what is in the way."""
    best: Played | None = None
    tightest: tuple[float, Candidate] | None = None
    refused, plays, actions = "", 0, 0
    often = 1 if system.semantics is Semantics.SYNC else ITERATIONS
    room = min(d.usable_bytes for d in bench.cluster.devices)
    for candidate in candidates:
        limit = best.iteration_s if best else math.inf
        if plays >= MOST_PLAYED or actions > MOST_IN_ALL or candidate.estimate_s * (1 - FAR) > limit:
            break
        if candidate.bound_s >= limit:
            continue
        if candidate.depth * candidate.micro_batches * 2 > MOST_ACTIONS and "played" not in system.options:
            continue
        tables = bench.tables(candidate.micro_batch)
        if not fits(share := _even_share(bench, candidate), room):
            tightest = min(tightest or (math.inf, candidate), (share, candidate), key=lambda e: e[0])
            continue
        marks = cut(bench, candidate, states)
        if marks is None:
            need = math.inf if best else least_need(_needs(bench, candidate, states), tables.real)
            tightest = min(tightest or (math.inf, candidate), (need, candidate), key=lambda e: e[0])
            continue
        point = point_of(candidate, marks, _shorter(system, candidate))
        drains = schedules.get(point.schedule).weight_policy.synchronous
        if least_s(price(bench, point), point.micro_batches, system.transfers, drains=drains) >= limit * (1 - 1e-9):
            continue
        played = play(bench, point, system.transfers, states=states)
        plays, actions = plays + 1, actions + often * candidate.depth * candidate.micro_batches * 2
        if played.feasible and played.iteration_s < limit:
            best = played
        elif not played.feasible:
            refused = played.reason
    return best, "" if best else _why(bench, tightest, refused)


def _even_share(bench: Bench, candidate: Candidate) -> float:
    """Bytes of an even share of the model's state: no cut has a fullest device that needs less."""
    rules = stage_rules(candidate.schedule, candidate.depth, candidate.micro_batches)
    chosen = bench.precision
    least = min(
        r.states * (chosen.weight_bytes * r.versions + chosen.gradient_bytes + bench.state_bytes) for r in rules
    )
    return least * float(bench.tables(candidate.micro_batch).elements[0, -1]) / candidate.depth


def _shorter(system: System, candidate: Candidate) -> int:
    """Micro-batches that are enough to find the pace of a pipeline that updates after each of them."""
    if system.options.get("played") != "pace":
        return 0
    return min(candidate.micro_batches, 4 * candidate.depth)


def _why(bench: Bench, tightest: tuple[float, Candidate] | None, refused: str) -> str:
    if tightest is None or math.isinf(tightest[0]):
        return refused or "no depth, width and micro-batch divide the devices and the global batch"
    need, shape = tightest
    device = min(bench.cluster.devices, key=lambda d: d.usable_bytes)
    need, have = need + device.reserve_bytes, device.memory_bytes
    return (
        f"does not fit: the fullest device needs {format_bytes(need)} of {format_bytes(have)} at the least "
        f"({shape.depth} stages, micro-batch {shape.micro_batch}{', recompute' if shape.recompute else ''})"
    )


@search("sweep")
def by_sweep(bench: Bench, system: System) -> Found:
    """Depth, width, micro-batch and recomputation."""
    states = int(system.options.get("states", "0"))
    if bench.devices < 2 or bench.blocks < 2:
        return Found(reason="a pipeline needs two devices and a model of two blocks")
    candidates = _candidates(bench, system)
    if not candidates:
        return Found(reason=_unserved(bench, system))
    best, reason = sweep(bench, system, candidates, states)
    if best is None and system.options.get("recompute") == "stage":
        best, reason = sweep(bench, system, _candidates(bench, system, whole=True), states)
    if best is None:
        return Found(reason=reason)
    name = schedules.get(best.point.schedule).name
    notes = (f"schedule {name}",) if name != system.schedule else ()
    return found_of(best, notes=notes)

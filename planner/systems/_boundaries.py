"""Boundaries of stages, moved as long as the simulated iteration gets shorter."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.memory import fits, room_bytes
from planner.play import StageBytes, StageTimes, Trace, Transfers, run
from planner.play.memory import memory_curve
from planner.play.steady import find_pace, reach_of
from planner.schedules.compiling import compile_orders
from planner.schedules.lending import lent_bytes, own_bytes
from planner.schedules.program import Program
from planner.schedules.types import ActionKind
from planner.space.cuts import balanced, least_need
from planner.systems._bench import Bench, StageRule
from planner.systems._point import Point
from planner.systems._price import Figures, price, rank_table
from planner.systems._shapes import Marks, Shape
from planner.units import format_bytes

MOST_ACTIONS = 600_000
"""Actions that moving the boundaries of one shape may simulate."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Boundaries tried: by how much memory is exceeded, the simulated time, and where memory is short."""

    shape: Shape
    marks: Marks
    over_bytes: float
    seconds: float
    reason: str = ""

    @property
    def key(self) -> tuple[float, float]:
        """What is better is smaller."""
        return self.over_bytes, self.seconds

    @property
    def point(self) -> Point:
        """The point that this is."""
        return self.shape.point(self.marks)


class Search:
    """Moves the boundaries of one shape."""

    def __init__(self, bench: Bench, shape: Shape, transfers: Transfers) -> None:
        work = shape.schedule.work(shape.pipeline)
        shape = replace(shape, holders=shape.schedule.holders(shape.pipeline))
        self._bench, self._shape, self._transfers = bench, shape, transfers
        drains = shape.schedule.drains
        self._parts, self._exchanges = work.parts, np.asarray(shape.schedule.exchanges(shape.pipeline), float)
        evicts = any(action.kind is ActionKind.EVICT for lane in work.lanes for action in lane)
        self._lending = work if evicts else None
        self._evicted = {
            (action.stage, worker, action.peer)
            for lane, worker in zip(work.lanes, work.lane_workers, strict=True)
            for action in (lane if evicts else ())
            if action.peer >= 0
        }
        self._program: Program | None = compile_orders(work) if drains else None
        self._tried: dict[Marks, Cut] = {}
        self._rhythm = shape.schedule.rhythm(shape.pipeline)
        few = replace(shape.pipeline, micro_batches=self._rhythm)
        self._depth = 0 if drains else reach_of(shape.schedule, few)
        self._orders = functools.cache(lambda iterations: compile_orders(shape.schedule.work(few, iterations)))
        actions = sum(len(lane) for lane in work.lanes) * (1 if drains else 8)
        self._most = max(4, MOST_ACTIONS // max(actions, 1))
        self._versions = shape.schedule.weight_versions(shape.pipeline)
        self._buffers = shape.schedule.weight_buffers

    def begin(self) -> Cut:
        """The best of the balanced cuts."""
        return min((self.at(marks) for marks in sorted(self._starts())), key=lambda cut: cut.key)

    def at(self, marks: Marks) -> Cut:
        """One cut, played once."""
        if marks not in self._tried:
            self._tried[marks] = self._play(marks)
        return self._tried[marks]

    def improve(self, best: Cut) -> Cut:
        """A cut that no move of a boundary improves, or the best of as many as may be simulated."""
        step = max(1, self._bench.blocks // (2 * self._shape.stages))
        while step:
            moved = min((self.at(m) for m in self._moves(best.marks, step)), key=lambda cut: cut.key, default=best)
            if moved.key < best.key:
                best = moved
            else:
                step //= 2
        return best

    def _starts(self) -> set[Marks]:
        """Balanced within memory, balanced, fullest stage as empty as can be, and even in blocks."""
        bench, shape = self._bench, self._shape
        tables, n = bench.tables(shape.micro_batch), bench.blocks
        stage_s = tables.stage_s(recompute=shape.recompute, whole=shape.whole)
        room = min(d.usable_bytes for d in bench.cluster.devices)
        kept = shape.schedule.in_flight(shape.pipeline)
        each = max(1.0, sum(len(own) for own in shape.holders) / shape.workers)
        needs = [
            tables.needed(StageRule(k / self._parts, v + self._buffers), recompute=shape.recompute, whole=shape.whole)
            * each
            for k, v in zip(kept, self._versions, strict=True)
        ]
        least = least_need(needs, tables.real)
        found = {
            balanced(stage_s, [fits(need, room) for need in needs]),
            balanced(stage_s, [tables.real] * shape.stages),
            balanced(stage_s, [fits(need, least) for need in needs]),
            tuple(round(i * n / shape.stages) for i in range(shape.stages + 1)),
        }
        return {marks for marks in found if marks is not None}

    def _moves(self, marks: Marks, step: int) -> Iterator[Marks]:
        """Each boundary so many blocks up or down, as far as its neighbours allow."""
        for at in range(1, len(marks) - 1):
            for by in (step, -step):
                place = marks[at] + by
                if marks[at - 1] < place < marks[at + 1] and len(self._tried) < self._most:
                    yield (*marks[:at], place, *marks[at + 1 :])

    def _play(self, marks: Marks) -> Cut:
        shape = self._shape
        point = shape.point(marks)
        figures = price(self._bench, point, shape.holders)
        again = np.where([choice.recompute for choice in point.stages], figures.forward_s, 0.0)
        hidden = shape.stages > 1 and not shape.schedule.weight_policy.synchronous
        times = StageTimes.of(
            figures.forward_s,
            figures.backward_s - again if shape.repeats else figures.backward_s,
            figures.receive_s,
            np.zeros(shape.stages) if hidden else figures.sync_s,
            figures.update_s,
            return_s=figures.return_s,
            recompute_s=again,
            evict_s=self._evict_s(figures, point),
        )
        trace, seconds = self._run(times)
        if hidden:
            seconds = max(seconds, float((figures.sync_s * self._exchanges).max()))
        over, reason = self._over(trace, figures, point)
        return Cut(shape, marks, over, seconds, reason)

    def _evict_s(self, figures: Figures, point: Point) -> np.ndarray:
        """[stages] the slowest move of a micro-batch's activations to the worker that keeps them."""
        found = np.zeros(self._shape.stages)
        for stage, worker, peer in self._evicted:
            for ranks in rank_table(point)[:, [worker, peer]].tolist():
                found[stage] = max(found[stage], self._move_s(ranks, float(figures.unit_bytes[stage]) / self._parts))
        return found

    def _move_s(self, ranks: list[int], payload: float) -> float:
        """Seconds to move bytes between two ranks, alone on the lowest level that joins them, as a plan is played."""
        cluster = self._bench.cluster
        for level, size in zip(cluster.levels, cluster.group_sizes(), strict=True):
            if ranks[0] // size == ranks[1] // size:
                return level.latency_s + payload / level.device_byte_per_s
        return 0.0

    def _run(self, times: StageTimes) -> tuple[Trace, float]:
        if self._program is not None:
            trace = run(self._program, times, transfers=self._transfers)
            return trace, trace.span_s() if self._shape.schedule.spans else trace.makespan_s
        count = self._shape.micro_batches
        steady = find_pace(self._orders, self._rhythm, self._depth, lambda p: run(p, times, transfers=self._transfers))
        return steady.trace, steady.iteration_s * count / self._rhythm

    def _over(self, trace: Trace, figures: Figures, point: Point) -> tuple[float, str]:
        """Bytes by which the fullest worker exceeds its device, and the words for it."""
        sizes = StageBytes(
            figures.weight_bytes * (1 + self._buffers) + figures.gradient_bytes + figures.optimizer_bytes,
            figures.unit_bytes,
            figures.working_bytes,
            figures.reserve_bytes,
            version_bytes=figures.weight_bytes,
        )
        if self._shape.repeats:
            # a repeated stage keeps what entered it from its forward on; the rest comes back with its recomputation
            spare = self._bench.tables(self._shape.micro_batch).workspace
            space = np.array([spare[choice.start, choice.stop] for choice in point.stages])
            sizes = replace(
                sizes,
                unit_bytes=np.where(
                    [c.recompute for c in point.stages], figures.working_bytes - space, figures.unit_bytes
                ),
                working_bytes=space,
                checkpoint_bytes=figures.unit_bytes,
            )
        worst, reason = -math.inf, ""
        lent = lent_bytes(self._lending.lanes, (figures.unit_bytes / self._parts).tolist()) if self._lending else {}
        for worker in range(self._shape.workers):
            own = [stage for stage, workers in enumerate(figures.holders) if worker in workers]
            have = room_bytes(float(figures.capacity_bytes[own].min()))
            curve = memory_curve(trace, worker, sizes)
            need = curve.peak_bytes
            if worker in lent and (least := self._with_guests(worker, own, figures, lent[worker])) > max(need, have):
                if least - have > worst:
                    worst = least - have
                    reason = f"worker {worker} holds {format_bytes(least)} of {format_bytes(have)}, "
                    reason += f"{format_bytes(lent[worker])} of it evicted from others"
                continue
            if need - have > worst:
                action = int(curve.action[int(np.argmax(curve.held_bytes > min(have, need - 1)))])
                moment = f"when {trace.program.label(action)} runs" if action >= 0 else "from the start"
                worst = need - have
                reason = f"worker {worker} holds {format_bytes(need)} of {format_bytes(have)}, too much {moment}"
        return max(0.0, worst), reason

    def _with_guests(self, worker: int, own: list[int], figures: Figures, lent: float) -> float:
        """What a worker holds at the most whatever the times, with what others evict to it; as the plan is checked."""
        work = self._lending
        lanes = [lane for lane, w in zip(work.lanes, work.lane_workers, strict=True) if w == worker] if work else []
        resting = figures.weight_bytes + figures.gradient_bytes + figures.optimizer_bytes
        beside = float(figures.reserve_bytes[own].max() + figures.working_bytes[own].max())
        kept = sum(own_bytes(lane, (figures.unit_bytes / self._parts).tolist())[0] for lane in lanes)
        return float(resting[own].sum()) + beside + kept + lent

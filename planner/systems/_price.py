"""A point priced on the cluster: times, bytes and memory of each stage on the devices that it takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner import schedules
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Collective
from planner.schedules.types import Pipeline
from planner.space.types import Configuration
from planner.space.workers import lay_workers
from planner.sync import Group, Phase, kept_bytes, parts_of, phase_s, recipe_of
from planner.sync import sent_bytes as sent_bytes_of
from planner.systems._bench import Bench
from planner.systems._point import Point


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What the stages of a point cost; float64 [stages] each, times and bytes of one micro-batch on one replica.

    Attributes:
        forward_s, backward_s: computation, recomputation in the backward.
        receive_s, return_s: the transfers over the boundary before the stage.
        sync_s: exchange of a stage's gradients, once.
        update_s: optimizer step, once.
        unit_bytes: activations of a micro-batch in flight.
        working_bytes: what a backward needs on top.
        weight_bytes, gradient_bytes, optimizer_bytes: what a device keeps of one copy of the stage.
        reserve_bytes: the runtime's.
        capacity_bytes: the device's memory, the smallest of the stage's.
        moved_bytes: what crosses the boundary before the stage, both ways.
        exchanged_bytes: what all replicas together send to exchange the stage's gradients, and weights in passes, once.
        holders: workers of one copy that have the stage.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    receive_s: np.ndarray
    return_s: np.ndarray
    sync_s: np.ndarray
    update_s: np.ndarray
    unit_bytes: np.ndarray
    working_bytes: np.ndarray
    weight_bytes: np.ndarray
    gradient_bytes: np.ndarray
    optimizer_bytes: np.ndarray
    reserve_bytes: np.ndarray
    capacity_bytes: np.ndarray
    moved_bytes: np.ndarray
    exchanged_bytes: np.ndarray
    holders: tuple[tuple[int, ...], ...]


def holders_of(point: Point) -> tuple[tuple[int, ...], ...]:
    """Workers of one copy that have each stage: its replicas, or several where pipelines run in two directions."""
    replicas = tuple(stage.replicas for stage in point.stages)
    return schedules.get(point.schedule).holders(Pipeline(replicas, point.played or point.micro_batches))


def rank_table(point: Point) -> np.ndarray:
    """[copies, workers of a copy] the device of each worker."""
    if point.ranks:
        return np.asarray(point.ranks, dtype=np.int64).reshape(point.copies, -1)
    turns = math.lcm(*(stage.replicas for stage in point.stages))  # devices do not depend on how replicas share them
    decision = Configuration(
        point.stages, point.copies, point.micro_batch, turns, "1f1b", slice_devices=point.slice_devices
    )
    workers = lay_workers(decision, schedules.get("1f1b"))
    return np.concatenate(workers.ranks, axis=1)


def price(bench: Bench, point: Point, holders: tuple[tuple[int, ...], ...] = ()) -> Figures:
    """Price a point; O(stages * (blocks + ranks)).

    Args:
        bench: model, cluster and job.
        point: stages, copies, micro-batches.
        holders: workers of one copy that have each stage, where the schedule's name does not say it.
    """
    return _Pricing(bench, point, holders or holders_of(point)).figures()


class _Pricing:
    def __init__(self, bench: Bench, point: Point, holders: tuple[tuple[int, ...], ...]) -> None:
        self.bench, self.point = bench, point
        self.tables, self.costs = bench.tables(point.micro_batch), bench.costs(point.micro_batch)
        self.ranks, self.holders, self.recipe = rank_table(point), holders, recipe_of(point.zero)
        held = [float(self.tables.elements[s.start, s.stop]) for s in point.stages]
        alone = [len(np.unique(self.ranks[:, list(own)])) < 2 for own in holders]
        self.exchanged = np.where(alone, 0.0, held)

    def figures(self) -> Figures:
        columns = [self._stage(i) for i in range(len(self.point.stages))]
        sync_s = np.array([c[4] for c in columns]) + self._tied()
        rows = list(np.array(columns, dtype=np.float64).T)
        rows[4] = sync_s
        return Figures(*rows, self.holders)  # type: ignore[call-arg]

    def _stage(self, index: int) -> tuple[float, ...]:
        choice, bench, costs = self.point.stages[index], self.bench, self.costs
        ranks = self.ranks[:, list(self.holders[index])]
        blocks = slice(choice.start, choice.stop)
        types = np.unique(bench.cluster.device_types[ranks]).tolist()
        repeated = np.ones(bench.blocks, bool) if costs.repeated is None else costs.repeated
        if self.point.whole:
            repeated = np.ones(bench.blocks, bool)
        again = [float((costs.forward_s[t] * repeated)[blocks].sum()) if choice.recompute else 0.0 for t in types]
        forward_s = max(float(costs.forward_s[t, blocks].sum()) for t in types)
        backward_s = max(float(costs.backward_s[t, blocks].sum()) + a for t, a in zip(types, again, strict=True))
        group = np.unique(ranks)
        forward_s += self._pass_s(index, group, Phase.FORWARD, forward_s)
        backward_s += self._pass_s(index, group, Phase.BACKWARD, backward_s)
        held = float(self.tables.elements[choice.start, choice.stop])
        largest = float(costs.parameter_elements[blocks].max())
        kept = kept_bytes(self.recipe, bench.precision, bench.state_bytes, self._parts(group), held, largest)
        charged = float(costs.parameter_elements[blocks].sum())
        shards = self._parts(group)(self.recipe.optimizer)
        update_s = max(float(costs.update_s[t, blocks].sum()) for t in types) * (held / charged if charged else 0.0)
        receive_s = return_s = moved = 0.0
        if index:
            out, back = float(costs.boundary_bytes[choice.start]), float(costs.gradient_boundary_bytes[choice.start])
            receive_s, return_s, moved = self._send_s(index, out), self._send_s(index, back), out + back
        device = min((bench.cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
        table, extra = self.tables.saved, np.zeros_like(self.tables.saved)
        if choice.recompute:
            table, extra = self.tables.again(whole=self.point.whole)
        working = float(extra[choice.start, choice.stop]) + float(self.tables.workspace[choice.start, choice.stop])
        working += float(kept.gathered + kept.transient)
        sync_s, exchanged = self._exchange(index, group)
        return (
            forward_s, backward_s, receive_s, return_s, sync_s, update_s / shards,
            float(table[choice.start, choice.stop]), working,
            float(kept.weights), float(kept.gradients), float(kept.optimizer),
            float(device.reserve_bytes), float(device.memory_bytes),
            moved, exchanged,
        )  # fmt: skip

    def _exchange(self, index: int, group: np.ndarray) -> tuple[float, float]:
        """Seconds of a stage's exchange, all stages exchanging at once, and the bytes that its ranks send.

        Links that stages share are shared in time: of another stage's elements those count that travel before this
        one's have all arrived, min(p, own p).
        """
        elements = float(self.exchanged[index])
        if not elements:
            return 0.0, 0.0
        passes = self.point.micro_batches * self.point.copies / len(group)
        sent = len(group) * sent_bytes_of(self.recipe, self.bench.precision, self._parts(group), elements, passes)
        alone_s, at_once = self._phase_s(Phase.END, group, elements, 1), self._at_once(index)
        if at_once < 2:
            return alone_s, sent
        others = float(np.minimum(self.exchanged, elements).sum()) / elements - 1
        share = min(1.0, others / (at_once - 1))
        equal_s = self._phase_s(Phase.END, group, elements, at_once)
        return alone_s + share * (equal_s - alone_s), sent

    def _at_once(self, index: int) -> int:
        """Stages that exchange at the same time on the same links."""
        return int(max(1, self.ranks.shape[1] // len(self.holders[index])))

    def _pass_s(self, index: int, group: np.ndarray, phase: Phase, work_s: float) -> float:
        """What the exchanges of a pass, block by block, add to its work."""
        choice, at_once = self.point.stages[index], self._at_once(index)
        blocks = self.costs.parameter_elements[choice.start : choice.stop].tolist()
        exchange_s = sum(self._phase_s(phase, group, elements, at_once) for elements in blocks)
        return max(0.0, exchange_s - self.bench.job.overlap * work_s)

    def _phase_s(self, phase: Phase, group: np.ndarray, elements: float, concurrent: int) -> float:
        bench = self.bench
        return phase_s(bench.cluster, self.recipe, phase, group, bench.precision, elements, concurrent)

    def _parts(self, group: np.ndarray) -> Callable[[Group | None], int]:
        return functools.partial(parts_of, self.bench.cluster, group)

    def _send_s(self, index: int, payload: float) -> float:
        """Slowest transfer over the boundary before a stage."""
        if not payload:
            return 0.0
        before, here = self.holders[index - 1], self.holders[index]
        standard = len(before) == self.point.stages[index - 1].replicas
        if standard:
            turns = np.arange(math.lcm(len(before), len(here)))
            pairs = (
                self.ranks[:, np.asarray(before)[turns % len(before)]],
                self.ranks[:, np.asarray(here)[turns % len(here)]],
            )
            terms = send_terms(self.bench.cluster, *pairs, concurrent=min(len(before), len(here)))
            return float(terms.seconds(payload).max())
        sources, targets = self.ranks[:, list(before)], self.ranks[:, list(here)]
        terms = send_terms(self.bench.cluster, sources[:, :, None], targets[:, None, :])
        return float(terms.seconds(payload).min(axis=2).max())

    def _tied(self) -> np.ndarray:
        """[stages] time to sum gradients of weights that several stages hold, charged to the first of them.

        None where the schedule by its name never drains: each stage then trains a copy of its own.
        """
        found = np.zeros(len(self.point.stages))
        key = self.point.schedule.partition(":")[0]
        if key in schedules.names() and not schedules.get(self.point.schedule).weight_policy.synchronous:
            return found
        for tie in self.costs.ties:
            own = [k for k, s in enumerate(self.point.stages) if any(s.start <= b < s.stop for b in tie.blocks)]
            if len(own) < 2 or not tie.elements:
                continue
            workers = sorted({w for k in own for w in self.holders[k]})
            payload = tie.elements * self.bench.precision.gradient_bytes
            ranks = self.ranks[0, workers]
            found[own[0]] += collective_s(self.bench.cluster, Collective.ALL_REDUCE, ranks, payload, self.point.copies)
        return found


def sent_bytes(point: Point, figures: Figures, exchanges: np.ndarray) -> float:
    """What all devices together send in an iteration.

    Args:
        point: the point.
        figures: its prices.
        exchanges: by stage, how often its gradients are exchanged in an iteration.
    """
    passed = float(figures.moved_bytes.sum()) * point.micro_batches * point.copies
    return passed + float((figures.exchanged_bytes * exchanges).sum())

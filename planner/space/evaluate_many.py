"""Judge many configurations of one model at once: the figures of `evaluate`, as arrays.

Configurations with one stage a worker (1F1B, GPipe), one micro-batch size and one sharding are priced together: costs
of stages are sums over ranges of blocks (`planner.space.ranges`), and what depends only on the devices of a stage is
priced once for each layout (`planner.space.device_layouts`). All others go through the judge one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.errors import ShardplanError
from planner.exchange import Phase, RankGroup, Recipe, kept_bytes, recipe_of
from planner.hardware.types import Cluster, neighbours
from planner.memory import fits
from planner.play import Transfers
from planner.schedules import get
from planner.space.blocks import range_sums
from planner.space.configuration import Configuration
from planner.space.device_layouts import DeviceLayouts
from planner.space.evaluate import Timed, evaluate
from planner.space.job_options import allowing
from planner.space.jobs import overlap_of, precision_of
from planner.space.ranges import Ranges, first_layers_bytes, range_maxima
from planner.space.steps import fullest_of
from planner.space.types import BlockCosts, Evaluation, Job
from planner.space.workers import pipeline_of


@dataclass(slots=True, eq=False)
class Evaluations:
    """Figures of configurations, in their order.

    Attributes:
        iteration_s: float64 [n] as `evaluate` has them; infinite where a configuration makes no sense.
        peak_bytes: float64 [n] memory of the fullest worker: nearest to its capacity, or furthest above it.
        capacity_bytes: float64 [n] of that worker's smallest device.
        fits: bool [n], whether the configuration can run.
        reasons: why a configuration makes no sense; "" where it does.
    """

    iteration_s: np.ndarray
    peak_bytes: np.ndarray
    capacity_bytes: np.ndarray
    fits: np.ndarray
    reasons: tuple[str, ...]

    @classmethod
    def empty(cls, count: int) -> Evaluations:
        """Arrays for `count` configurations of which none is judged yet."""
        unknown = np.full(count, math.nan)
        return cls(np.full(count, math.inf), unknown, unknown.copy(), np.zeros(count, dtype=bool), ())

    def put(self, index: int, evaluation: Evaluation) -> None:
        """Enter the judge's verdict on one configuration."""
        fullest = fullest_of(evaluation.workers)
        self.iteration_s[index], self.fits[index] = evaluation.iteration_s, evaluation.feasible
        self.peak_bytes[index], self.capacity_bytes[index] = fullest.memory.total, fullest.capacity_bytes


def evaluate_many(
    shardings: Sequence[BlockCosts],
    cluster: Cluster,
    job: Job,
    configurations: Sequence[Configuration],
    *,
    layouts: dict[tuple[int, int], DeviceLayouts] | None = None,
) -> list[Evaluations]:
    """Judge configurations under each of some shardings, whichever one their stages name.

    Args:
        shardings: the chain's costs under each sharding, all with as many ranks and the same micro-batch size.
        cluster: the machine.
        job: what is to be trained; what a configuration decides is allowed.
        configurations: all with that micro-batch size.
        layouts: layouts of earlier calls for the same cluster and job, by ranks of a replica and number of stages;
            new ones are added.

    O(configurations * (stages + shardings) + layouts * ranks) for paced lines.
    """
    layouts, ranks = {} if layouts is None else layouts, shardings[0].ranks
    in_line: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    others = list[int]()
    for index, configuration in enumerate(configurations):
        stages = len(configuration.stages)
        if (ranks, stages) not in layouts:
            layouts[ranks, stages] = DeviceLayouts(cluster, job, ranks)
        entry = layouts[ranks, stages].entry(configuration, shardings[0])
        if entry is None:
            others.append(index)
        else:
            in_line.setdefault(stages, []).append((index, *entry))
    lines = list[tuple[np.ndarray, _Lines]]()
    for stages, entries in in_line.items():
        rows, numbers, in_flight = zip(*entries, strict=True)
        members = [configurations[row] for row in rows]
        lines.append((np.array(rows), _Lines(members, layouts[ranks, stages], np.array(numbers), np.array(in_flight))))
    return [_under(costs, cluster, job, configurations, lines, others) for costs in shardings]


def _under(
    costs: BlockCosts,
    cluster: Cluster,
    job: Job,
    configurations: Sequence[Configuration],
    lines: Sequence[tuple[np.ndarray, _Lines]],
    others: Sequence[int],
) -> Evaluations:
    """Judge configurations under one sharding: those in lines by arrays, the others one by one."""
    evaluations, reasons = Evaluations.empty(len(configurations)), [""] * len(configurations)
    for index in others:
        stages = tuple(dataclasses.replace(s, sharding=costs.sharding) for s in configurations[index].stages)
        meant = dataclasses.replace(configurations[index], stages=stages)
        reasons[index] = _judge(evaluations, index, costs, cluster, job, meant)
    ranges = Ranges(costs)
    for rows, line in lines:
        batch = _Batch(costs, ranges, cluster, job, line)
        evaluations.iteration_s[rows] = batch.iteration_s()
        evaluations.peak_bytes[rows], evaluations.capacity_bytes[rows], evaluations.fits[rows] = batch.memory()
    evaluations.reasons = tuple(reasons)
    return evaluations


def _judge(
    evaluations: Evaluations, index: int, costs: BlockCosts, cluster: Cluster, job: Job, configuration: Configuration
) -> str:
    """Enter the judge's verdict on one configuration, and return why it makes no sense (empty if it does).

    Where the schedule's critical path is exact it gives the time, since playing the orders takes longer.
    """
    try:
        schedule = get(configuration.schedule)
        blocking = configuration.transfers is Transfers.BLOCKING
        exact = not schedule.closed_form and blocking and schedule.exact(pipeline_of(configuration))
        timed = Timed.BOUND if exact else Timed.CLOSED_FORM
        evaluation = evaluate(costs, cluster, allowing(job, configuration), configuration, timed=timed)
    except ShardplanError as error:
        return error.problem.message
    if not evaluation.stages:
        return "; ".join(violation.message for violation in evaluation.violations)
    evaluations.put(index, evaluation)
    return ""


def _prefix(values: np.ndarray) -> np.ndarray:
    """Sums of the first k values along the last axis, k from 0 on."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


class _Lines:
    """Configurations with the same number of stages, whatever the costs of these: arrays [configurations, stages].

    Args:
        members: the configurations.
        layouts: the devices of their stages, and prices of what these exchange.
        layout: int64 [configurations], numbers of their layouts.
        in_flight: int64 [configurations, stages], most micro-batches that a replica of a stage keeps at a time.
    """

    def __init__(
        self, members: Sequence[Configuration], layouts: DeviceLayouts, layout: np.ndarray, in_flight: np.ndarray
    ) -> None:
        self.layouts, self.layout, self.in_flight = layouts, layout, in_flight
        table = np.array(
            [[(s.start, s.stop, s.replicas, s.recompute, s.layers) for s in c.stages] for c in members], np.int64
        )
        self.start, self.stop, self.replicas, recompute, self.layers = np.moveaxis(table, 2, 0)
        self.recompute, self.span = recompute.astype(bool), (self.start, self.stop - 1)
        self.place = layouts.places(self.layout, self.start.shape[1])
        self.types = layouts.types()[:, self.place]
        self.zero, self.copies, self.micro_batches = (
            np.array([getattr(c, name) for c in members]) for name in ("zero", "copies", "micro_batches")
        )
        self.whole_stages = np.array([c.whole_stages for c in members])[:, None] & self.recompute


class _Batch:
    """Figures of configurations under one sharding: arrays [configurations, stages].

    Args:
        costs: the chain's costs.
        ranges: their sums over ranges of blocks.
        cluster: the machine.
        job: what is to be trained.
        lines: the configurations.
    """

    def __init__(self, costs: BlockCosts, ranges: Ranges, cluster: Cluster, job: Job, lines: _Lines) -> None:
        self.costs, self.ranges, self.cluster, self.job, self.lines = costs, ranges, cluster, job, lines
        self.layouts, self.span, self.precision = lines.layouts, lines.span, precision_of(job, cluster)
        self.by_layers, self.by_stages = (ranges.ways("always", whole_stages=w)[0] for w in (False, True))
        self.elements, self.shard_elements = ranges.elements[self.span], ranges.shard_elements[self.span]
        self.kept_from = costs.layers.kept_from(lines.start, lines.stop, lines.layers)
        self.inner_shards = np.broadcast_to(ranges.inner_shards, ranges.elements.shape)[self.span]
        self._times()

    def _slowest_s(self, seconds: np.ndarray, span: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """Seconds of each stage on its slowest device type, from a table [types, n, n] over blocks i..j.

        `span` has the blocks of each stage that count; all of them by default.
        """
        by_type = seconds[(slice(None), *(span or self.span))]
        return np.asarray(np.where(self.lines.types[: len(seconds)], by_type, -math.inf).max(axis=0))

    def _parts(self, group: RankGroup | None, place: np.ndarray, members: np.ndarray) -> np.ndarray:
        """Number of shards into which a group cuts its state, by stage of some configurations."""
        parts = self.layouts.parts(group)[place]
        return np.asarray(parts if group is None else parts * self.inner_shards[members])

    def _times(self) -> None:
        costs, ranges, overlap = self.costs, self.ranges, overlap_of(self.job, self.cluster)
        forward_s = self._slowest_s(ranges.forward_s)
        repeated = self.span[0], self.kept_from - 1
        by_layers_s, by_stages_s = (self._slowest_s(way.repeat_s, repeated) for way in (self.by_layers, self.by_stages))
        backward_s = (
            self._slowest_s(ranges.backward_s)
            + np.where(self.lines.whole_stages, by_stages_s, by_layers_s) * self.lines.recompute
        )
        pass_f, pass_b, sync_s, shards = self._exchanges()
        hidden = np.maximum(0.0, overlap * backward_s - pass_b)
        self.exposed_s = np.maximum(0.0, sync_s - hidden) + self._tied_s()
        self.update_s = self._slowest_s(ranges.update_s) / shards + ranges.step_s[self.span]
        self.forward_s = forward_s + np.maximum(0.0, pass_f - overlap * forward_s)
        self.backward_s = backward_s + np.maximum(0.0, pass_b - overlap * backward_s)
        self.receive_s = self._transfer_s(costs.boundary_bytes, costs.gather_s)
        self.return_s = self._transfer_s(costs.gradient_boundary_bytes, costs.gradient_gather_s)

    def _exchanges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of exchanges in a forward pass, a backward pass and at the end; shards of the optimizer's state."""
        table = np.zeros((4, *self.lines.start.shape))
        for zero in np.unique(self.lines.zero).tolist():
            members = self.lines.zero == zero
            recipe, place = recipe_of(zero), self.lines.place[members]
            for row, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.END)):
                for step in recipe.during(phase):
                    terms, size = self.layouts.exchange_rows(step), step.payload(self.precision)
                    if phase is Phase.END:
                        table[row, members] += self.layouts.slowest_s(
                            terms[:, place], self.shard_elements[members] * size
                        )
                    else:
                        prefix = _prefix(
                            self.layouts.slowest_s(terms[:, :, None], self.costs.exchanged_elements * size)
                        )
                        table[row, members] += (
                            prefix[place, self.lines.stop[members]] - prefix[place, self.lines.start[members]]
                        )
                table[row, members] += self._inner_s(recipe, phase)[members]
            table[3, members] = self._parts(recipe.optimizer, place, members)
        return table[0], table[1], table[2], table[3]

    def _inner_s(self, recipe: Recipe, phase: Phase) -> np.ndarray:
        """Seconds of a phase's exchanges among the ranks of a replica that hold the same weights."""
        total_s = np.zeros(self.lines.start.shape)
        for inner, stage_elements in zip(self.costs.inner_replicas, self.ranges.inner, strict=True):
            for step in recipe.among_inner:
                if step.phase is phase:
                    elements = stage_elements[self.span] if phase is Phase.END else inner.elements
                    payload_bytes = elements * step.payload(self.precision)
                    seconds = np.where(elements > 0, inner.terms[step.collective].seconds(payload_bytes), 0.0)
                    total_s += seconds if phase is Phase.END else range_sums(seconds)[self.span]
        return total_s

    def _transfer_s(self, sizes: np.ndarray, gather_s: np.ndarray | None) -> np.ndarray:
        """Seconds to send what crosses the boundary before each stage; zero for the first stage."""
        seconds = self.layouts.slowest_s(self.layouts.send_rows()[:, self.lines.place], sizes[self.lines.start])
        seconds = seconds + (0.0 if gather_s is None else gather_s[self.lines.start])
        seconds[:, 0] = 0.0
        return np.asarray(seconds)

    def _tied_s(self) -> np.ndarray:
        """Seconds to sum gradients of weights that several stages hold, at the first stage that holds them."""
        tied_s = np.zeros(self.lines.start.shape)
        for tie in self.costs.ties:
            payload_bytes = tie.shard_elements * self.precision.gradient_bytes
            holds_block = [(self.lines.start <= b) & (b < self.lines.stop) for b in tie.blocks]
            holding = np.asarray(np.stack(holds_block).any(axis=0))
            rows = np.flatnonzero((holding.sum(axis=1) > 1) & (tie.elements > 0))
            cases = np.column_stack([self.lines.layout[rows], holding[rows]])
            distinct, case_of = np.unique(cases, axis=0, return_inverse=True)
            for case, (layout, *flags) in enumerate(distinct.tolist()):
                holders = [stage for stage, holds in enumerate(flags) if holds]
                tied_s[rows[case_of.ravel() == case], holders[0]] += self.layouts.tied_s(layout, holders, payload_bytes)
        return tied_s

    def iteration_s(self) -> np.ndarray:
        """The closed form of `planner.space.evaluate`."""
        total_s = self.forward_s + self.backward_s + self.receive_s + self.return_s
        before = np.minimum.accumulate(self.lines.replicas, axis=1)[:, :-1]
        late = np.zeros(total_s.shape)
        late[:, 1:] = 1 - np.minimum(1.0, before / self.lines.replicas[:, 1:])
        micro_batches = self.lines.micro_batches[:, None]
        steady_s = np.maximum(0.0, ((micro_batches // self.lines.replicas - 1 + late) * total_s).max(axis=1))
        lead_s = _prefix(self.backward_s + self.return_s)[:, :-1]
        tail_s = np.maximum(0.0, (self.exposed_s + self.update_s - lead_s).max(axis=1))
        return np.asarray(total_s.sum(axis=1) + steady_s + tail_s)

    def memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Peak bytes and capacity of the fullest worker, and whether every worker fits."""
        state_bytes = optimizer_state_bytes(self.job.optimizer, self.precision)
        largest = range_maxima(self.costs.parameter_elements)[self.span]
        total = self._activations() + self.ranges.workspace_bytes[self.span]
        for zero in np.unique(self.lines.zero).tolist():
            members = self.lines.zero == zero
            place = self.lines.place[members]
            recipe = recipe_of(zero)
            parts = {group: self._parts(group, place, members) for group in recipe.held}
            kept = kept_bytes(
                recipe, self.precision, state_bytes, parts.__getitem__, self.elements[members], largest[members],
                self.precision.spare_bytes, self.precision.copy_bytes,
            )  # fmt: skip
            total[members] += kept.weights + kept.gradients + kept.optimizer + kept.transient
        reserve, capacity = self._devices()
        all_fit = fits(total, capacity - reserve).all(axis=1)
        fullest = ((total + reserve) / capacity).argmax(axis=1)
        rows = np.arange(len(total))
        return (total + reserve)[rows, fullest], capacity[rows, fullest], all_fit

    def _devices(self) -> tuple[np.ndarray, np.ndarray]:
        """Reserve and capacity of the device with the least usable memory that each stage uses."""
        devices = self.cluster.devices
        usable = np.where(self.lines.types.T, [device.usable_bytes for device in devices], math.inf).T
        smallest = usable.argmin(axis=0)
        reserve, peer_bytes, capacity = (
            np.array([float(getattr(d, name)) for d in devices])[smallest]
            for name in ("reserve_bytes", "neighbour_bytes", "capacity_bytes")
        )
        copies = self.lines.copies[:, None]
        peers = neighbours(self.costs.ranks, copies * self.lines.replicas, self.lines.replicas.shape[1] > 1)
        return reserve + peer_bytes * peers, capacity

    def _activations(self) -> np.ndarray:
        """Activation bytes of all micro-batches in flight, and of the one whose forward is being repeated."""
        nothing, all_layers = (self.ranges.saved_bytes[self.span], 0.0), self.by_layers
        tables = all_layers.saved_bytes, all_layers.working_bytes
        some_layers = first_layers_bytes(tables, self.ranges.saved_bytes, (), self.span, self.kept_from)
        unit, working = (
            np.where(
                self.lines.whole_stages,
                by_stages[self.span],
                np.where(self.lines.recompute, by_layers, plain),
            )
            for plain, by_layers, by_stages in zip(
                nothing,
                some_layers,
                (self.by_stages.saved_bytes, self.by_stages.working_bytes),
                strict=True,
            )
        )
        return np.asarray(self.lines.in_flight * unit + working)

"""Time and memory of each stage of a configuration, for the judge: plain loops over blocks and ranks.

Exchanges among equal ranks, and what each rank holds, are read off the recipe of the ZeRO stage
(`planner.exchange.recipe_of`). Steps in a pass run block by block, hidden behind the fraction `overlap` of that pass.
State is sharded over the replicas of the stage, and over the ranks of a replica that hold the same elements
(`InnerReplicas`). Activations that are offloaded go over the device's link to its host in the forward pass and come
back in the backward pass, hidden behind the same fraction of it; both links are used at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.costs.precision import Precision, optimizer_state_bytes
from planner.exchange import ExchangeStep, Phase, RankGroup, Recipe, kept_bytes, parts_of, recipe_of, step_s
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective, reserve_bytes
from planner.schedules import Pipeline, Schedule
from planner.schedules.evictions import slowest_moves_s
from planner.schedules.held import HeldUnits, UnitSizes
from planner.space.activations import activations, repeated_blocks, split_activations
from planner.space.configuration import Configuration
from planner.space.jobs import overlap_of, precision_of
from planner.space.repeats import selective_costs
from planner.space.schemes import SchemeExchange, with_scheme
from planner.space.steps import ExposedSeconds, MemoryBytes, StageTerms
from planner.space.types import BlockCosts, Job, Tie
from planner.space.workers import Workers, exchanging_at_once, in_turn, sending_at_once, sums_together
from planner.sums import float_sum


@dataclass(frozen=True)
class Replicas:
    """All replicas of one stage.

    Attributes:
        cluster: the machine.
        groups: int64 [copies, replicas, ranks] their ranks. Equal ranks exchange among themselves, all at once.
        concurrent: groups that exchange at the same time on the same links.
        precision: number formats.
        zero: ZeRO stage.
        shard_over: `Configuration.shard_over`.
        inner_shards: shards into which the ranks of a replica split weights that they all hold, averaged over the
            stage's elements.
    """

    cluster: Cluster
    groups: np.ndarray
    concurrent: int
    precision: Precision
    zero: int
    shard_over: int = 0
    inner_shards: float = 1.0

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The exchanges and shards of the ZeRO stage."""
        return recipe_of(self.zero, self.shard_over)

    @property
    def shards(self) -> float:
        """Number of shards of the optimizer state and its update."""
        return self._parts(self.recipe.optimizer)

    def end_s(self, elements: float) -> float:
        """Seconds of a stage's exchanges at the end of an iteration."""
        return self._phase_s(Phase.END, [elements])

    def pass_s(self, elements: Sequence[float]) -> tuple[float, float]:
        """Seconds of exchanges in one forward and in one backward pass through blocks of so many elements."""
        return self._phase_s(Phase.FORWARD, elements), self._phase_s(Phase.BACKWARD, elements)

    def memory(
        self,
        elements: float,
        largest: float,
        optimizer: str,
        activations: float,
        others: tuple[float, float],
        *,
        versions: int = 1,
        buffers: int = 0,
    ) -> MemoryBytes:
        """Bytes of one rank.

        Args:
            elements: trainable elements of the stage.
            largest: trainable elements of its largest block.
            optimizer: name of the optimizer.
            activations: bytes of activations.
            others: workspace and reserve, in bytes.
            versions: number of weight versions.
            buffers: number of buffers as large as the weights, beside the optimizer's state.
        """
        state_bytes = optimizer_state_bytes(optimizer, self.precision)
        beside = self.precision.spare_bytes, self.precision.copy_bytes
        kept = kept_bytes(self.recipe, self.precision, state_bytes, self._parts, elements, largest, *beside)
        return MemoryBytes(
            weights=versions * float(kept.weights),
            gradients=float(kept.gradients),
            optimizer=float(kept.optimizer) + buffers * elements * self.precision.weight_bytes,
            activations=activations,
            workspace=others[0] + float(kept.transient),
            reserve=others[1],
        )

    def _parts(self, group: RankGroup | None) -> float:
        parts = parts_of(self.cluster, self.groups[..., 0].ravel(), group)
        return parts if group is None else parts * self.inner_shards

    def _phase_s(self, phase: Phase, elements: Sequence[float]) -> float:
        return float_sum(
            (float_sum(self._step_s(step, n) for n in elements) for step in self.recipe.during(phase)), 0.0
        )

    def _step_s(self, step: ExchangeStep, elements: float) -> float:
        """Ranks of a replica are neighbours, so the first and the last of them say how far apart equal ranks lie."""
        payload_bytes = elements * step.payload(self.precision)
        ends = {0, self.groups.shape[-1] - 1}
        return max(
            step_s(self.cluster, step, self.groups[..., e].ravel(), payload_bytes, self.concurrent) for e in ends
        )


@dataclass(frozen=True, slots=True)
class TermCache:
    """Times and terms already worked out for one cluster, job and micro-batch size, to be used again.

    Attributes:
        seconds: seconds of transfers and exchanges, by devices and bytes.
        terms: terms of stages, by all that they depend on.
    """

    seconds: dict[object, tuple[float, float, float]] = field(default_factory=dict)
    terms: dict[object, StageTerms] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TermInputs:
    """The inputs of a configuration's stage terms.

    Attributes:
        costs_by_sharding: the chain's costs at the micro-batch size, by number of the sharding.
        cluster: the machine.
        job: what is to be trained.
        configuration: the configuration.
        schedule: its schedule.
        pipeline: replicas of its stages and micro-batches, as the schedule sees them.
        workers: devices of its workers.
        exchange: what its exchange scheme costs, None where it names none.
        cache: results of earlier calls; new ones are added.
    """

    costs_by_sharding: Mapping[int, BlockCosts]
    cluster: Cluster
    job: Job
    configuration: Configuration
    schedule: Schedule
    pipeline: Pipeline
    workers: Workers
    exchange: SchemeExchange | None = None
    cache: TermCache = field(default_factory=TermCache)

    def costs(self, stage: int) -> BlockCosts:
        """Costs of the blocks under the sharding of a stage."""
        return self.costs_by_sharding[self.configuration.stages[stage].sharding]


def stage_terms(setting: TermInputs) -> tuple[StageTerms, ...]:
    """Terms of all stages; O(stages * (blocks + ranks))."""
    configuration, schedule, pipeline = setting.configuration, setting.schedule, setting.pipeline
    count = len(configuration.stages)
    groups = [setting.workers.groups(stage) for stage in range(count)]
    asynchronous = count > 1 and not schedule.weight_policy.synchronous
    tied_s = [0.0] * count if asynchronous else _tied_s(setting, groups)
    in_flight, versions = schedule.in_flight(pipeline), schedule.weight_versions(pipeline)
    halves = _halves(setting)
    terms = tuple(
        _cached_terms(setting, groups, stage, in_flight[stage], versions[stage], tied_s[stage], halves.get(stage))
        for stage in range(count)
    )
    if setting.exchange is not None:
        return tuple(with_scheme(t, setting.exchange) for t in terms)
    if not any(held.guests for held in schedule.peaks(pipeline)):
        return terms
    moved_s = _moves_s(setting, [t.unit_bytes for t in terms])
    return tuple(dataclasses.replace(t, evict_s=s) for t, s in zip(terms, moved_s, strict=True))


def _halves(setting: TermInputs) -> dict[int, HeldUnits]:
    """By stage whose backward is split, the units of it that a worker keeps at the same time."""
    peaks = setting.schedule.peaks(setting.pipeline)
    return {
        stage: peaks[worker].of_stage(stage)
        for worker, hosted in enumerate(setting.workers.hosted)
        for stage in hosted
        if peaks[worker].splits
    }


def _cached_terms(
    setting: TermInputs,
    groups: Sequence[np.ndarray],
    index: int,
    in_flight: int,
    versions: int,
    tied_s: float,
    halves: HeldUnits | None,
) -> StageTerms:
    """Terms of a stage, from the cache where a stage alike was priced.

    They depend on the devices of the stage and of the one before it, but on no other stage's choice.
    """
    configuration, holders = setting.configuration, setting.workers.holders
    no_transfer = not index or holders[index - 1] == holders[index]
    devices = [(ranks.shape, ranks.tobytes()) for ranks in groups[index if no_transfer else index - 1 : index + 1]]
    key = (
        *(configuration.stages[index], configuration.schedule, configuration.whole_stages),
        *(configuration.zero, configuration.shard_over),
        *(len(groups) > 1, _concurrent(setting, index), setting.workers.in_line),
        *(in_flight, versions, tied_s, *devices),
        *(() if halves is None else (table.tobytes() for table in (halves.units, halves.waiting, halves.turning))),
    )
    if key not in setting.cache.terms:
        setting.cache.terms[key] = _terms(setting, groups, index, in_flight, versions, tied_s, halves)
    return setting.cache.terms[key]


def _terms(
    setting: TermInputs,
    groups: Sequence[np.ndarray],
    index: int,
    in_flight: int,
    versions: int,
    tied_s: float,
    halves: HeldUnits | None,
) -> StageTerms:
    configuration, cluster, job, costs = setting.configuration, setting.cluster, setting.job, setting.costs(index)
    choice, number_formats = configuration.stages[index], precision_of(job, cluster)
    blocks = range(choice.start, choice.stop)
    types = np.unique(cluster.device_types[groups[index]]).tolist()
    whole = configuration.whole_stages
    repeated = repeated_blocks(costs, choice, whole_stages=whole)
    modules = selective_costs(costs, choice.repeats, choice.offload) if choice.repeats else None

    def slowest_s(seconds: np.ndarray, of_blocks: Sequence[int] = blocks) -> float:
        return max(float_sum(float(seconds[t, b]) for b in of_blocks) for t in types)

    recompute_s = slowest_s(modules.repeat_s) if modules else slowest_s(costs.forward_s, repeated)
    forward_s, backward_s = slowest_s(costs.forward_s), slowest_s(costs.backward_s) + recompute_s
    elements, charged_elements = elements_of(costs, blocks)
    shard_elements = shard_elements_of(costs, blocks)
    inner_shards = elements / shard_elements if shard_elements else 1.0
    replicas = Replicas(
        cluster,
        groups[index],
        _concurrent(setting, index),
        number_formats,
        configuration.zero,
        configuration.shard_over,
        inner_shards,
    )
    *pass_s, sync_s = _exchanges_s(setting, replicas, costs, blocks)
    asynchronous = len(configuration.stages) > 1 and not setting.schedule.weight_policy.synchronous
    overlap = overlap_of(job, cluster)
    exposed_s = 0.0 if asynchronous else max(0.0, sync_s - max(0.0, overlap * backward_s - pass_s[1]))
    receive_s, return_s = _transfers_s(setting, costs, groups, index)
    device = min((cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
    reserve = reserve_bytes(
        device, choice.ranks, groups[index].shape[0] * groups[index].shape[1], len(configuration.stages) > 1
    )
    unit_bytes, working_bytes, host_bytes = activations(costs, choice, repeated, whole_stages=whole)
    move_s = host_bytes / min(cluster.devices[t].host_byte_per_s for t in types)
    workspace = float(costs.workspace_bytes[choice.start : choice.stop].max())
    activation_bytes, waiting_bytes, turning_bytes = in_flight * unit_bytes + working_bytes, 0.0, 0.0
    if halves is not None:
        waiting_bytes, turning_bytes = split_activations(costs, choice, unit_bytes, working_bytes, whole_stages=whole)
        sizes = ({index: size} for size in (unit_bytes, turning_bytes, waiting_bytes))
        activation_bytes = halves.most_of(UnitSizes(*sizes))
    updated_fraction = elements / charged_elements if charged_elements else 0.0
    beside = _beside_s(pass_s, move_s, overlap * forward_s, overlap * backward_s)
    step_s = _sum_over(costs.step_s, blocks)
    return StageTerms(
        forward_s=forward_s + beside[0] + beside[2],
        backward_s=backward_s + beside[1] + beside[3],
        recompute_s=recompute_s,
        receive_s=receive_s,
        sync_s=sync_s,
        exposed_sync_s=exposed_s + tied_s,
        update_s=slowest_s(costs.update_s) / replicas.shards * updated_fraction + step_s,
        in_flight=in_flight,
        memory=replicas.memory(
            elements,
            max(float(costs.parameter_elements[b]) for b in blocks),
            job.optimizer,
            activation_bytes,
            (workspace, reserve),
            versions=versions,
            buffers=setting.schedule.weight_buffers,
        ),
        capacity_bytes=float(device.capacity_bytes),
        return_s=return_s,
        tied_sync_s=tied_s,
        unit_bytes=unit_bytes,
        host_bytes=host_bytes,
        move_s=move_s,
        weight_grad_s=None if costs.weight_grad_s is None else slowest_s(costs.weight_grad_s),
        waiting_bytes=waiting_bytes,
        turning_bytes=turning_bytes,
        exposed=ExposedSeconds(*_group_s(costs, blocks, repeated), step_s, *beside),
    )


def _beside_s(
    pass_s: Sequence[float], move_s: float, forward_hidden_s: float, backward_hidden_s: float
) -> tuple[float, float, float, float]:
    """Seconds of a forward and a backward that exchanges beside it take longer than what hides them, and of copies to
    and from the host what is left beyond both."""
    hidden = forward_hidden_s, backward_hidden_s
    exchange = [max(0.0, seconds - most) for seconds, most in zip(pass_s, hidden, strict=True)]
    both = [max(0.0, max(seconds, move_s) - most) for seconds, most in zip(pass_s, hidden, strict=True)]
    return exchange[0], exchange[1], both[0] - exchange[0], both[1] - exchange[1]


def _group_s(costs: BlockCosts, blocks: range, repeated: Sequence[int]) -> tuple[float, float, float]:
    """Seconds of communication inside a replica: in a forward, in a backward, in the forward of repeated blocks."""
    if costs.group_s is None:
        return 0.0, 0.0, 0.0
    forward_s, both_s = (_sum_over(seconds, blocks) for seconds in costs.group_s)
    return forward_s, both_s - forward_s, _sum_over(costs.group_s[0], repeated)


def _moves_s(setting: TermInputs, unit_bytes: Sequence[float]) -> list[float]:
    """By stage, seconds of the slowest move of a micro-batch's activations to another worker; O(actions)."""
    work = setting.schedule.work(setting.pipeline)
    moves = {
        (action.stage, worker, action.peer)
        for lane, worker in zip(work.lanes, work.lane_workers, strict=True)
        for action in lane
        if action.peer >= 0
    }
    leader = setting.workers.ranks
    of_ranks = ((stage, int(leader[worker][0, 0]), int(leader[peer][0, 0])) for stage, worker, peer in moves)
    return slowest_moves_s(of_ranks, setting.cluster.levels, unit_bytes)


def _exchanges_s(
    setting: TermInputs, replicas: Replicas, costs: BlockCosts, blocks: range
) -> tuple[float, float, float]:
    """Seconds of a stage's exchanges in a forward pass, in a backward pass, and at the end.

    They run among the ranks of a replica that hold the same elements, then, of each rank's shard, among equal ranks of
    the replicas.
    """
    block_elements, stage_elements = (
        [float(costs.exchanged_elements[b]) for b in blocks],
        shard_elements_of(costs, blocks),
    )
    recipe = replicas.zero, replicas.shard_over, replicas.groups.shape, replicas.concurrent
    key = (replicas.groups.tobytes(), *recipe, tuple(block_elements), stage_elements)
    if key not in setting.cache.seconds:
        setting.cache.seconds[key] = (*replicas.pass_s(block_elements), replicas.end_s(stage_elements))
    forward_s, backward_s, end_s = setting.cache.seconds[key]
    inner_s = _inner_s(replicas, costs, blocks)
    return forward_s + inner_s[Phase.FORWARD], backward_s + inner_s[Phase.BACKWARD], end_s + inner_s[Phase.END]


def _inner_s(replicas: Replicas, costs: BlockCosts, blocks: range) -> dict[Phase, float]:
    """By phase, seconds of exchanges among the ranks of a replica that hold the same elements."""
    seconds = dict.fromkeys(Phase, 0.0)
    for inner in costs.inner_replicas:
        block_elements = [float(inner.elements[b]) for b in blocks]
        for step in replicas.recipe.among_inner:
            sizes = (
                [float_sum(block_elements) - _repeated_elements(_elements_and_blocks(inner.ties), blocks)]
                if step.phase is Phase.END
                else block_elements
            )
            payloads = [size * step.payload(replicas.precision) for size in sizes if size]
            seconds[step.phase] += float_sum(
                float(inner.terms[step.collective].seconds(payload)) for payload in payloads
            )
    return seconds


def _concurrent(setting: TermInputs, index: int) -> int:
    """Number of groups that exchange at the same time as those of a stage."""
    ranks, workers = setting.configuration.stages[index].ranks, setting.workers
    return exchanging_at_once(setting.configuration, ranks, len(workers.hosted), len(workers.holders[index]))


def _sum_over(seconds: np.ndarray | None, blocks: Sequence[int]) -> float:
    return 0.0 if seconds is None else float_sum(float(seconds[b]) for b in blocks)


def elements_of(costs: BlockCosts, blocks: range) -> tuple[float, float]:
    """Trainable elements of a stage: tied ones counted once, and the sum over its blocks."""
    charged = float_sum(float(costs.parameter_elements[b]) for b in blocks)
    return charged - _repeated_elements(_elements_and_blocks(costs.ties), blocks), charged


def shard_elements_of(costs: BlockCosts, blocks: range) -> float:
    """Elements of a rank's shard of a stage, where ranks of a replica hold the same elements and split them."""
    if costs.shard_elements is None:
        return elements_of(costs, blocks)[0]
    shared = ((tie.shard_elements, tie.blocks) for tie in costs.ties)
    return float_sum(float(costs.shard_elements[b]) for b in blocks) - _repeated_elements(shared, blocks)


def _elements_and_blocks(ties: Sequence[Tie]) -> Iterable[tuple[float, tuple[int, ...]]]:
    return ((tie.elements, tie.blocks) for tie in ties)


def _repeated_elements(tied: Iterable[tuple[float, tuple[int, ...]]], blocks: range) -> float:
    """Tied elements that the sum over a stage's blocks counts more than once."""
    return float_sum(elements * max(0, sum(b in blocks for b in users) - 1) for elements, users in tied)


def _transfers_s(
    setting: TermInputs, costs: BlockCosts, groups: Sequence[np.ndarray], index: int
) -> tuple[float, float]:
    """Seconds to receive a stage's input, and to return its gradient; zero within a worker."""
    holders, boundary = setting.workers.holders, setting.configuration.stages[index].start
    if not index or holders[index - 1] == holders[index]:
        return 0.0, 0.0
    pair, at_boundary = (groups[index - 1], groups[index]), (boundary,)
    sizes = float(costs.boundary_bytes[boundary]), float(costs.gradient_boundary_bytes[boundary])
    key = (*(group.tobytes() for group in pair), *sizes)
    if key not in setting.cache.seconds:
        in_line = setting.workers.in_line
        forward_s, backward_s = (_transfer_s(setting.cluster, *pair, size, in_line) for size in sizes)
        setting.cache.seconds[key] = forward_s, backward_s, 0.0
    receive_s, return_s, _ = setting.cache.seconds[key]
    return receive_s + _sum_over(costs.gather_s, at_boundary), return_s + _sum_over(
        costs.gradient_gather_s, at_boundary
    )


def _tied_s(setting: TermInputs, groups: Sequence[np.ndarray]) -> list[float]:
    """By stage, seconds to sum the gradients of its weights that later stages hold too.

    Of the ranks that sum together (`sums_together`) the slowest count, at the first holder: its backward ends last.
    Holders on one worker sum without a transfer.
    """
    configuration, tied_s = setting.configuration, [0.0] * len(groups)
    payload_bytes = precision_of(setting.job, setting.cluster).gradient_bytes
    stages = configuration.stages
    for number, tie in enumerate(setting.costs(0).ties):
        holders = [k for k, s in enumerate(stages) if any(s.start <= b < s.stop for b in tie.blocks)]
        elements = max((setting.costs(k).ties[number].shard_elements for k in holders), default=0.0)
        if len({setting.workers.holders[k] for k in holders}) < 2 or not elements:
            continue
        rank_sets = sums_together([groups[k] for k in holders])
        concurrent = len(rank_sets) * stages[holders[0]].ranks
        tied_s[holders[0]] += max(
            collective_s(setting.cluster, Collective.ALL_REDUCE, ranks, elements * payload_bytes, concurrent)
            for ranks in rank_sets
        )
    return tied_s


def _transfer_s(
    cluster: Cluster, senders_at: np.ndarray, receivers_at: np.ndarray, payload_bytes: float, in_line: bool
) -> float:
    """Slowest transfer among the pairs of workers that some micro-batch connects, with all pairs sending at once.

    Every rank of a worker sends its part to the equal rank of the next stage. With one stage a worker, replicas take
    micro-batches in turn; in a bidirectional pipeline each holder sends to the nearest holder of the next stage.
    """
    if not payload_bytes:
        return 0.0
    (_, senders, ranks), receivers = senders_at.shape, receivers_at.shape[1]
    ends = sorted({0, ranks - 1})
    if not in_line and max(senders, receivers) > 1:
        sources, targets = senders_at[:, :, None, ends], receivers_at[:, None, :, ends]
        concurrent = sending_at_once(senders_at[:, :1], receivers_at)
        return float(send_terms(cluster, sources, targets, concurrent).seconds(payload_bytes).min(axis=2).max())
    sources, targets = (side[..., ends] for side in in_turn(senders_at, receivers_at))
    terms = send_terms(cluster, sources, targets, sending_at_once(senders_at, receivers_at))
    return float(terms.seconds(payload_bytes).max())

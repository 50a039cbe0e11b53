"""What each stage of a configuration costs, worked out from the inputs alone: the judge's plain loops.

What the ranks of a stage exchange with their likes, and what each of them holds, are read off the recipe of the ZeRO
stage (`planner.exchange.recipe_of`): what it runs in a pass is run for each block, and hidden behind the fraction
`overlap` of that pass; what it shards is sharded over replicas of the stage, and over the ranks of each that hold the
same (`InnerReplicas`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.costs.precision import Precision, optimizer_state_bytes
from planner.exchange import ExchangeStep, Group, Phase, Recipe, kept_bytes, parts_of, recipe_of, step_s
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective, reserve_bytes
from planner.schedules import Pipeline, Schedule
from planner.space.configuration import Configuration, StageChoice
from planner.space.jobs import overlap_of, precision_of
from planner.space.repeats import selective_costs
from planner.space.schemes import SchemeExchange, with_scheme
from planner.space.types import BlockCosts, Job, MemoryBytes, StageTerms, Tie
from planner.space.workers import Workers


@dataclass(frozen=True)
class Replicas:
    """All replicas of one stage.

    Attributes:
        cluster: the machine.
        groups: int64 [copies, replicas, ranks] their ranks. Equal ranks exchange among themselves, all at once.
        concurrent: groups of replicas at work at the same time on the same links.
        precision: number formats.
        zero: ZeRO stage.
        alike: ranks of a replica that share out a weight which they all hold, on the mean of the stage's elements.
    """

    cluster: Cluster
    groups: np.ndarray
    concurrent: int
    precision: Precision
    zero: int
    inner_shards: float = 1.0

    @functools.cached_property
    def recipe(self) -> Recipe:
        """What is exchanged and held in shards."""
        return recipe_of(self.zero)

    @property
    def shards(self) -> float:
        """Parts into which the optimizer state and its update are cut."""
        return self._parts(self.recipe.optimizer)

    def end_s(self, elements: float) -> float:
        """Seconds to synchronise a stage's gradients, or weights, at the end of an iteration."""
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
            largest: of one of its blocks.
            optimizer: its name.
            activations: bytes.
            others: workspace and reserve, in bytes.
            versions: of the weights.
            buffers: as large as the weights, beside the optimizer's state.
        """
        state_bytes = optimizer_state_bytes(optimizer, self.precision)
        beside = self.precision.spare_bytes, self.precision.copy_bytes
        kept = kept_bytes(self.recipe, self.precision, state_bytes, self._parts, elements, largest, *beside)
        return MemoryBytes(
            weights=versions * float(kept.weights),
            gradients=float(kept.gradients),
            optimizer=float(kept.optimizer) + buffers * elements * self.precision.weight_bytes,
            activations=activations,
            workspace=others[0] + float(kept.gathered + kept.transient),
            reserve=others[1],
        )

    def _parts(self, group: Group | None) -> float:
        parts = parts_of(self.cluster, self.groups[..., 0].ravel(), group)
        return parts if group is None else parts * self.inner_shards

    def _phase_s(self, phase: Phase, elements: Sequence[float]) -> float:
        return sum((sum(self._step_s(step, n) for n in elements) for step in self.recipe.during(phase)), 0.0)

    def _step_s(self, step: ExchangeStep, elements: float) -> float:
        """Ranks of a replica are neighbours, so the first and the last of them say how far apart equal ranks lie."""
        payload_bytes = elements * step.payload(self.precision)
        ends = {0, self.groups.shape[-1] - 1}
        return max(
            step_s(self.cluster, step, self.groups[..., e].ravel(), payload_bytes, self.concurrent) for e in ends
        )


@dataclass(frozen=True, slots=True)
class Known:
    """What was worked out for one cluster and job at one micro-batch size, so that what is alike in several
    configurations, or in several stages of one, is worked out once.

    Attributes:
        seconds: of transfers and exchanges, by devices and bytes.
        terms: of stages, by all that they depend on.
    """

    seconds: dict[object, tuple[float, float, float]] = field(default_factory=dict)
    terms: dict[object, StageTerms] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What the terms of a configuration's stages are worked out from.

    Attributes:
        shelf: the chain's costs at the micro-batch size, by number of the sharding.
        cluster: the machine.
        job: what is to be trained.
        configuration: the point of the space.
        schedule: its schedule.
        pipeline: what the schedule orders.
        workers: where the workers are.
        exchange: what the configuration's exchange scheme costs, None where it names none.
        known: what was worked out before.
    """

    shelf: Mapping[int, BlockCosts]
    cluster: Cluster
    job: Job
    configuration: Configuration
    schedule: Schedule
    pipeline: Pipeline
    workers: Workers
    exchange: SchemeExchange | None = None
    known: Known = field(default_factory=Known)

    def costs(self, stage: int) -> BlockCosts:
        """Costs of the blocks in the way in which a stage shares them."""
        return self.shelf[self.configuration.stages[stage].sharding]


def stage_terms(setting: Setting) -> tuple[StageTerms, ...]:
    """Terms of all stages; O(stages * (blocks + ranks))."""
    configuration, schedule, pipeline = setting.configuration, setting.schedule, setting.pipeline
    count = len(configuration.stages)
    groups = [setting.workers.groups(stage) for stage in range(count)]
    beside = count > 1 and not schedule.weight_policy.synchronous
    tied_s = [0.0] * count if beside else _tied_s(setting, groups)
    in_flight, versions = schedule.in_flight(pipeline), schedule.weight_versions(pipeline)
    terms = tuple(
        _remembered(setting, groups, stage, in_flight[stage], versions[stage], tied_s[stage]) for stage in range(count)
    )
    if setting.exchange is not None:
        return tuple(with_scheme(t, setting.exchange) for t in terms)
    if not any(held.guests for held in schedule.peaks(pipeline)):
        return terms
    moved_s = _evict_s(setting, [t.unit_bytes for t in terms])
    return tuple(dataclasses.replace(t, evict_s=s) for t, s in zip(terms, moved_s, strict=True))


def _remembered(
    setting: Setting, groups: Sequence[np.ndarray], index: int, in_flight: int, versions: int, tied_s: float
) -> StageTerms:
    """Terms of a stage, which depend on where it and the one before it lie, but on no other stage's choice."""
    configuration, holders = setting.configuration, setting.workers.holders
    alone = not index or holders[index - 1] == holders[index]
    lies = [(own.shape, own.tobytes()) for own in groups[index if alone else index - 1 : index + 1]]
    key = (
        *(configuration.stages[index], configuration.schedule, configuration.zero, configuration.whole_stages),
        *(len(groups) > 1, _concurrent(setting, index), setting.workers.in_line),
        *(in_flight, versions, tied_s, *lies),
    )
    if key not in setting.known.terms:
        setting.known.terms[key] = _terms(setting, groups, index, in_flight, versions, tied_s)
    return setting.known.terms[key]


def _terms(
    setting: Setting, groups: Sequence[np.ndarray], index: int, in_flight: int, versions: int, tied_s: float
) -> StageTerms:
    configuration, cluster, job, costs = setting.configuration, setting.cluster, setting.job, setting.costs(index)
    choice, chosen = configuration.stages[index], precision_of(job, cluster)
    blocks = range(choice.start, choice.stop)
    types = np.unique(cluster.device_types[groups[index]]).tolist()
    repeated = _repeated(setting, costs, choice)
    modules = selective_costs(costs, choice.repeats) if choice.repeats else None

    def slowest_s(seconds: np.ndarray, which: Sequence[int] = blocks) -> float:
        return max(sum(float(seconds[t, b]) for b in which) for t in types)

    recompute_s = slowest_s(modules.repeat_s) if modules else slowest_s(costs.forward_s, repeated)
    forward_s, backward_s = slowest_s(costs.forward_s), slowest_s(costs.backward_s) + recompute_s
    held, charged = elements_of(costs, blocks)
    left = shard_elements_of(costs, blocks)
    alike = held / left if left else 1.0
    replicas = Replicas(cluster, groups[index], _concurrent(setting, index), chosen, configuration.zero, alike)
    *pass_s, sync_s = _exchanges_s(setting, replicas, costs, blocks)
    beside = len(configuration.stages) > 1 and not setting.schedule.weight_policy.synchronous
    overlap = overlap_of(job, cluster)
    exposed_s = 0.0 if beside else max(0.0, sync_s - max(0.0, overlap * backward_s - pass_s[1]))
    receive_s, return_s = _transfers_s(setting, costs, groups, index)
    device = min((cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
    reserve = reserve_bytes(
        device, choice.ranks, groups[index].shape[0] * groups[index].shape[1], len(configuration.stages) > 1
    )
    unit_bytes, working_bytes = _activations(setting, costs, choice, repeated)
    workspace = float(costs.workspace_bytes[choice.start : choice.stop].max())
    kept = in_flight * unit_bytes + working_bytes
    updated = held / charged if charged else 0.0
    return StageTerms(
        forward_s=forward_s + max(0.0, pass_s[0] - overlap * forward_s),
        backward_s=backward_s + max(0.0, pass_s[1] - overlap * backward_s),
        recompute_s=recompute_s,
        receive_s=receive_s,
        sync_s=sync_s,
        exposed_sync_s=exposed_s + tied_s,
        update_s=slowest_s(costs.update_s) / replicas.shards * updated + _sum(costs.step_s, blocks),
        in_flight=in_flight,
        memory=replicas.memory(
            held,
            max(float(costs.parameter_elements[b]) for b in blocks),
            job.optimizer,
            kept,
            (workspace, reserve),
            versions=versions,
            buffers=setting.schedule.weight_buffers,
        ),
        capacity_bytes=float(device.capacity_bytes),
        return_s=return_s,
        tied_sync_s=tied_s,
        unit_bytes=unit_bytes,
    )


def _evict_s(setting: Setting, unit_bytes: Sequence[float]) -> list[float]:
    """By stage, the slowest move of a unit's activations to the worker that keeps them, over the link that joins both;
    O(actions)."""
    found, work = [0.0] * len(unit_bytes), setting.schedule.work(setting.pipeline)
    moves = {
        (action.stage, worker, action.peer)
        for lane, worker in zip(work.lanes, work.lane_workers, strict=True)
        for action in lane
        if action.peer >= 0
    }
    for stage, worker, peer in moves:
        here, there = (int(setting.workers.ranks[w][0, 0]) for w in (worker, peer))
        sizes = zip(setting.cluster.levels, setting.cluster.group_sizes(), strict=True)
        level = next(level for level, size in sizes if here // size == there // size)
        found[stage] = max(found[stage], level.latency_s + unit_bytes[stage] / level.device_byte_per_s)
    return found


def _exchanges_s(setting: Setting, replicas: Replicas, costs: BlockCosts, blocks: range) -> tuple[float, float, float]:
    """Seconds of a stage's exchanges in a forward pass, in a backward pass, and at the end.

    They run among the ranks of a replica that hold the same, then, of what is left to each, among equal ranks of the
    replicas.
    """
    own, held = [float(costs.exchanged_elements[b]) for b in blocks], shard_elements_of(costs, blocks)
    key = (replicas.groups.tobytes(), replicas.groups.shape, replicas.concurrent, tuple(own), held)
    if key not in setting.known.seconds:
        setting.known.seconds[key] = (*replicas.pass_s(own), replicas.end_s(held))
    forward_s, backward_s, end_s = setting.known.seconds[key]
    inner_s = _inner_s(replicas, costs, blocks)
    return forward_s + inner_s[Phase.FORWARD], backward_s + inner_s[Phase.BACKWARD], end_s + inner_s[Phase.END]


def _inner_s(replicas: Replicas, costs: BlockCosts, blocks: range) -> dict[Phase, float]:
    """By phase, seconds of the recipe's steps among the ranks of a replica that hold the same."""
    found = dict.fromkeys(Phase, 0.0)
    for inner in costs.inner_replicas:
        own = [float(inner.elements[b]) for b in blocks]
        for step in replicas.recipe.among_inner:
            sizes = [sum(own) - _repeated_elements(_tied(inner.ties), blocks)] if step.phase is Phase.END else own
            payloads = [size * step.payload(replicas.precision) for size in sizes if size]
            found[step.phase] += sum(float(inner.terms[step.collective].seconds(each)) for each in payloads)
    return found


def _repeated(setting: Setting, costs: BlockCosts, choice: StageChoice) -> list[int]:
    """Blocks whose forward the stage repeats."""
    if not choice.recompute:
        return []
    every = setting.configuration.whole_stages or costs.repeated is None
    return [b for b in range(choice.start, choice.stop) if every or costs.repeated[b]]  # type: ignore[index]


def _concurrent(setting: Setting, index: int) -> int:
    """Devices whose equals exchange at the same time on the same links: as many groups as hold other stages."""
    configuration, ranks = setting.configuration, setting.configuration.stages[index].ranks
    workers, holders = len(setting.workers.hosted), len(setting.workers.holders[index])
    width = configuration.slice_devices // ranks if configuration.slice_devices else workers
    return max(1, width // holders) * ranks


def _sum(seconds: np.ndarray | None, blocks: Sequence[int]) -> float:
    return 0.0 if seconds is None else sum(float(seconds[b]) for b in blocks)


def elements_of(costs: BlockCosts, blocks: range) -> tuple[float, float]:
    """Trainable elements that a stage holds, shared ones once, and what its blocks are charged for one by one."""
    charged = sum(float(costs.parameter_elements[b]) for b in blocks)
    return charged - _repeated_elements(_tied(costs.ties), blocks), charged


def shard_elements_of(costs: BlockCosts, blocks: range) -> float:
    """What is left of a stage's elements to a rank, where ranks of a group that hold the same share them out."""
    if costs.shard_elements is None:
        return elements_of(costs, blocks)[0]
    shared = ((tie.shard_elements, tie.blocks) for tie in costs.ties)
    return sum(float(costs.shard_elements[b]) for b in blocks) - _repeated_elements(shared, blocks)


def _tied(ties: Sequence[Tie]) -> Iterable[tuple[float, tuple[int, ...]]]:
    return ((tie.elements, tie.blocks) for tie in ties)


def _repeated_elements(tied: Iterable[tuple[float, tuple[int, ...]]], blocks: range) -> float:
    """Elements that a stage's blocks are charged for more than once."""
    return sum(elements * max(0, sum(b in blocks for b in users) - 1) for elements, users in tied)


def _transfers_s(setting: Setting, costs: BlockCosts, groups: Sequence[np.ndarray], index: int) -> tuple[float, float]:
    """Seconds to receive a stage's input, and to return its gradient; nothing within a worker."""
    holders, boundary = setting.workers.holders, setting.configuration.stages[index].start
    if not index or holders[index - 1] == holders[index]:
        return 0.0, 0.0
    pair, here = (groups[index - 1], groups[index]), (boundary,)
    sizes = float(costs.boundary_bytes[boundary]), float(costs.gradient_boundary_bytes[boundary])
    key = (*(group.tobytes() for group in pair), *sizes)
    if key not in setting.known.seconds:
        in_turn = setting.workers.in_line
        there_s, back_s = (_transfer_s(setting.cluster, *pair, size, in_turn) for size in sizes)
        setting.known.seconds[key] = there_s, back_s, 0.0
    receive_s, return_s, _ = setting.known.seconds[key]
    return receive_s + _sum(costs.gather_s, here), return_s + _sum(costs.gradient_gather_s, here)


def _activations(
    setting: Setting, costs: BlockCosts, choice: StageChoice, repeated: Sequence[int]
) -> tuple[float, float]:
    """What a worker keeps of each micro-batch in flight, and beside it of the one it is working on.

    A stage that repeats modules keeps what these do not make again, and brings back the results of one at a time.
    A recomputed stage keeps the inputs of its layers and all of the blocks that it does not repeat. By the time it
    repeats a layer, the micro-batch in work has freed the latter: these come last. Where whole stages are repeated it
    keeps what enters it, and the micro-batch in work needs all activations at once.
    """
    first, last = choice.start, choice.stop - 1
    kept = 0.0 if costs.kept_bytes is None else sum(float(b) for b in costs.kept_bytes[first : last + 1])
    if choice.repeats:
        modules = selective_costs(costs, choice.repeats)
        largest = max(float(size) for size in modules.working_bytes[first : last + 1])
        return float(modules.saved_bytes[first, last]), max(0.0, largest - kept)
    if not choice.recompute:
        return float(costs.saved_bytes[first, last]), 0.0
    if setting.configuration.whole_stages:
        return float(costs.boundary_bytes[first]), float(costs.saved_bytes[first, last])
    starts = range(len(costs.parameter_elements)) if costs.layer_starts is None else costs.layer_starts
    largest = max((float(costs.saved_bytes[max(first, int(starts[b])), b]) for b in repeated), default=0.0)
    return float(costs.checkpoint_bytes[first, last]) + kept, max(0.0, largest - kept)


def _tied_s(setting: Setting, groups: Sequence[np.ndarray]) -> list[float]:
    """By stage, the time to sum the gradients of its weights that later stages hold too.

    With g the greatest common divisor of the holders' replicas, replica q of each exchanges with all replicas of the
    others whose number is q modulo g: these see the same micro-batches. All g groups of all copies work at once, and
    the slowest counts, at the first holder: its backward ends last. Holders on one worker sum without a transfer.
    """
    configuration, found = setting.configuration, [0.0] * len(groups)
    payload_bytes = precision_of(setting.job, setting.cluster).gradient_bytes
    stages = configuration.stages
    for number, tie in enumerate(setting.costs(0).ties):
        own = [k for k, s in enumerate(stages) if any(s.start <= b < s.stop for b in tie.blocks)]
        elements = max((setting.costs(k).ties[number].shard_elements for k in own), default=0.0)
        if len({setting.workers.holders[k] for k in own}) < 2 or not elements:
            continue
        shared = math.gcd(*(groups[k].shape[1] for k in own))
        working = configuration.copies * shared * stages[own[0]].ranks
        members = (
            np.unique(np.concatenate([groups[k][copy, q::shared, 0] for k in own]))
            for copy in range(configuration.copies)
            for q in range(shared)
        )
        found[own[0]] += max(
            collective_s(setting.cluster, Collective.ALL_REDUCE, m, elements * payload_bytes, working) for m in members
        )
    return found


def _transfer_s(cluster: Cluster, before: np.ndarray, here: np.ndarray, payload_bytes: float, in_turn: bool) -> float:
    """Slowest transfer among the pairs of workers that some micro-batch connects, with all pairs sending at once.

    Every rank of a worker sends its part to its like in the next stage. Replicas in line take micro-batches in turn; in
    a bidirectional pipeline each holder sends to the nearest of the next stage's.
    """
    if not payload_bytes:
        return 0.0
    (_, senders, ranks), receivers = before.shape, here.shape[1]
    ends = sorted({0, ranks - 1})
    if not in_turn and max(senders, receivers) > 1:
        sources, targets = before[:, :, None, ends], here[:, None, :, ends]
        return float(send_terms(cluster, sources, targets).seconds(payload_bytes).min(axis=2).max())
    turns = np.arange(int(np.lcm(senders, receivers)))
    sources, targets = before[:, turns % senders][..., ends], here[:, turns % receivers][..., ends]
    terms = send_terms(cluster, sources, targets, concurrent=min(senders, receivers) * ranks)
    return float(terms.seconds(payload_bytes).max())

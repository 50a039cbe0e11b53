"""What one configuration of the user's own would take: priced, judged, played and written out as a plan.

>>> import planner
>>> graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")
>>> found = planner.predict(graph, cluster, planner.Job(64), planner.Degrees(pipeline=4, schedule="zb-h1"))
>>> found.fits
True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner import schedules
from planner.api import default_provenance, plan
from planner.collection import uncollected
from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import JobError, ModelError, UsageError
from planner.graph import Graph
from planner.hardware.types import HEADROOM, STEP_BYTES, Cluster, shown_bytes
from planner.memory import room_bytes
from planner.plans import Plan, Provenance, assemble, priced_configuration, with_simulation
from planner.space import Configuration, WorkerMemory, evaluate, lay_workers, play_terms
from planner.space.asked import LIMITS, allowing, without
from planner.space.device_layouts import DeviceLayouts
from planner.space.evaluate import Timed
from planner.space.evaluate_many import Evaluations, evaluate_many
from planner.space.jobs import check_dealt, mesh_problem, settled
from planner.space.named import Degrees, configuration_of
from planner.space.pricer import Pricer
from planner.space.terms import Known
from planner.space.timing import MOST_MICRO_BATCHES, certificate_alone, played_s
from planner.space.types import BlockCosts, Evaluation, Job, MemoryBytes
from planner.space.workers import pipeline_of

Asked = Degrees | Configuration | Plan
"""A configuration by its degrees, in full, or as a plan has it with its shardings."""

Shelf = Mapping[int, BlockCosts]
"""Costs by the number of the sharding."""

FEW = 1.01
"""Times the fewest weights on a rank that still count as the fewest: norms and biases may be whole or cut."""

_FOLLOWED = ("devices", "forbid")
"""Limits that say what there is, not what is decided."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one configuration would take.

    Attributes:
        plan: the configuration as a plan, with its predictions; it may exceed memory.
        workers: memory of each worker, all its stages together; workers that hold the same stages count once.
        problems: what the configuration breaks, in words; empty when it can run. Devices count with all their memory.
        headroom: part of a device's memory that a search would leave free.
        allocator_cache: what the stack's allocator holds, over the tensors.
    """

    plan: Plan
    workers: tuple[WorkerMemory, ...]
    problems: tuple[str, ...]
    headroom: float = HEADROOM
    allocator_cache: float = 1.0

    @property
    def configuration(self) -> Configuration:
        """The configuration in full."""
        return self.plan.configuration

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration when it is played."""
        return self.plan.predictions.reached_s

    @property
    def fits(self) -> bool:
        """Whether the configuration can run, with nothing left free."""
        return not self.problems

    @property
    def fits_with_headroom(self) -> bool:
        """Whether it can run and leaves the headroom free, as a plan that is searched does."""
        return self.fits and self.fullest.memory.total <= room_bytes((1 - self.headroom) * self.fullest.capacity_bytes)

    @property
    def driver_bytes(self) -> float:
        """Estimate of what the driver (nvidia-smi) shows on the fullest device (`planner.hardware.types`)."""
        options = self.plan.options
        return driver_bytes(self.fullest.memory, options.precision, options.optimizer, self.allocator_cache)

    @property
    def fullest(self) -> WorkerMemory:
        """The worker nearest to its capacity, or furthest above it."""
        return max(self.workers, key=lambda worker: worker.memory.total / worker.capacity_bytes)


def driver_bytes(memory: MemoryBytes, precision_name: str, optimizer: str, cache: float) -> float:
    """Estimate of what the driver (nvidia-smi) shows of a device with that need, in bytes.

    Args:
        memory: the need.
        precision_name, optimizer: of the job.
        cache: what the allocator holds, over the tensors (`Stack.allocator_cache`).

    Raises:
        UsageError: there is no such precision or optimizer.
    """
    chosen = precision(precision_name)
    casts = chosen.master_bytes > 0 and chosen.gradient_bytes < STEP_BYTES
    stepped = memory.optimizer / optimizer_state_bytes(optimizer, chosen) if casts else 0.0
    return shown_bytes(memory.total - memory.reserve, memory.reserve, cache, stepped)


@uncollected()
def predict(
    graph: Graph,
    cluster: Cluster,
    job: Job,
    configuration: Asked,
    *,
    fewest_weights: bool = False,
    strict_ops: bool = False,
    provenance: Provenance | None = None,
) -> Prediction:
    """Price exactly one configuration; nothing else is searched.

    Where ranks share operators and it is not said how, the fastest way that fits to share them on a mesh of one axis is
    taken. A configuration that breaks limits or does not fit is priced all the same.

    Args:
        graph: the model (`load_graph`).
        cluster: the hardware (`load_cluster`).
        job: global batch, precision, optimizer and memory options, devices that may be used, splits that are forbidden;
            its other limits are not read. Its headroom is reported, and nothing is refused for it.
        configuration: by its degrees, in full, or of a plan. A plan's shardings are taken where it is for this model;
            of a configuration without them, `sharding` must be 0.
        fewest_weights: take the fastest of the ways to share operators that leave the fewest weights on a rank
            (`FEW`), as frameworks do that cut every matrix, whether or not it fits.
        strict_ops: refuse operators that no rule describes.
        provenance: how the plan came to be, for its file.

    Raises:
        JobError: devices, samples, blocks or chunks do not come out; says which.
        UsageError: no schedule has the name.
        ModelError: the model's batch cannot be set to the micro-batch.
    """
    headroom = settled(job, cluster).headroom
    job = dataclasses.replace(_assumed(without_limits(job, cluster), configuration, cluster), headroom=0.0)
    pricer = Pricer(graph, cluster, job, strict_ops=strict_ops)
    ways = list(ways_to_share(pricer, job, configuration))
    chosen, evaluation = _best_way(pricer, job, ways, Known(), fewest_weights=fewest_weights)
    if chosen.micro_batches > MOST_MICRO_BATCHES:
        raise JobError(
            f"{chosen.micro_batches:,} micro-batches in a pipeline: a plan can have {MOST_MICRO_BATCHES:,}",
            hint="use a smaller global batch, larger micro-batches or more copies",
        )
    schedule = schedules.get(chosen.schedule)
    played_s = play_terms(chosen, schedule, evaluation.stages).iteration_s
    found = assemble(
        pricer.graph_at(chosen.micro_batch),
        pricer.chain,
        cluster,
        allowing(job, chosen),
        chosen,
        evaluation,
        certificate_alone(chosen, evaluation.stages, played_s),
        prices=pricer.profiles(chosen.micro_batch)[0],
        provenance=provenance or default_provenance(graph.name, cluster.name),
        shardings=pricer.stage_shardings(chosen),
    )
    found = dataclasses.replace(found, schedule=dataclasses.replace(found.schedule, given="configuration"))
    problems = tuple(violation.message for violation in evaluation.violations)
    return Prediction(
        with_simulation(found, played_s), evaluation.workers, problems, headroom, cluster.stack.allocator_cache
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A prediction held against the best plan.

    Attributes:
        plan: the best plan that the search found.
        lacks_s: seconds that an iteration of the prediction takes longer; negative where it is faster.
        ratio: how many times as long it takes.
    """

    plan: Plan
    lacks_s: float
    ratio: float


def compare_to_best(prediction: Prediction, graph: Graph, cluster: Cluster, job: Job) -> Held:
    """What a prediction lacks to the best plan of the same job without limits, both as they are played.

    Raises:
        InfeasibleError: no plan fits.
    """
    best = plan(graph, cluster, without_limits(job, cluster))
    best_s = best.predictions.reached_s
    return Held(best, prediction.iteration_s - best_s, prediction.iteration_s / best_s)


def without_limits(job: Job, cluster: Cluster) -> Job:
    """The job as a configuration of the user's own is priced under: settled, and with no limit on what is decided.

    Raises:
        JobError: a field of the job makes no sense.
    """
    return settled(without(job, LIMITS.keys() - set(_FOLLOWED)), cluster)


def _assumed(job: Job, asked: Asked, cluster: Cluster) -> Job:
    """The job with the number formats and the overlap that a configuration in full decides.

    Raises:
        JobError, UsageError: there is no such precision or overlap, or a device does not compute in it.
    """
    chosen = asked.configuration if isinstance(asked, Plan) else asked
    if isinstance(chosen, Degrees) or (not chosen.precision and chosen.overlap is None):
        return job
    found = allowing(job, chosen)
    return settled(dataclasses.replace(job, precision=found.precision, overlap=found.overlap), cluster)


@uncollected()
def predict_many(
    graph: Graph,
    cluster: Cluster,
    job: Job,
    configurations: Sequence[Degrees | Configuration],
    *,
    fewest_weights: bool = False,
) -> Evaluations:
    """Price many configurations of one model, each as `predict` prices it; nothing is written out or played twice.

    Args:
        graph: the model (`load_graph`).
        cluster: the hardware (`load_cluster`).
        job: as of `predict`.
        configurations: by degrees or in full.
        fewest_weights: share operators in the fastest way that fits of those that leave the fewest weights on a rank.

    Returns:
        Arrays in their order: seconds of an iteration by the closed form where the schedule has one (1F1B, GPipe) and
        as it is played otherwise, memory of the fullest worker and its capacity, whether it fits. A configuration that
        makes no sense takes infinite time, and `reasons` says why.

    Raises:
        JobError: a field of the job makes no sense.
    """
    job = without_limits(job, cluster)
    shelves: dict[tuple[Job, int, int], list[tuple[int, Configuration]]] = {}
    costs: dict[tuple[Job, int, int], BlockCosts] = {}
    pricers: dict[Job, Pricer] = {}
    seconds: dict[tuple[Job, int], Known] = {}
    found = Evaluations.empty(len(configurations))
    reasons = [""] * len(configurations)
    for at, asked in enumerate(configurations):
        try:
            own_job = _assumed(job, asked, cluster)
            if own_job not in pricers:
                pricers[own_job] = Pricer(graph, cluster, own_job)
            ways = list(ways_to_share(pricers[own_job], own_job, asked))
            if not schedules.get(ways[0][0].schedule).closed_form:
                known = Known(seconds.setdefault((own_job, ways[0][0].micro_batch), Known()).seconds)
                _, one = _best_way(pricers[own_job], own_job, ways, known, fewest_weights=fewest_weights)
                found.put(at, one)
                continue
            for own, shelf in _with_fewest_weights(ways) if fewest_weights else ways:
                for number in shelf:
                    key = own_job, own.micro_batch, number
                    costs[key] = shelf[number]
                    shelves.setdefault(key, []).append((at, own))
        except (JobError, UsageError, ModelError) as error:
            reasons[at] = error.problem.message
    layouts: dict[Job, dict[tuple[int, int], DeviceLayouts]] = {own: {} for own in pricers}
    judged = [
        (
            np.array([at for at, _ in own]),
            evaluate_many(costs[key], cluster, key[0], [c for _, c in own], layouts=layouts[key[0]]),
        )
        for key, own in shelves.items()
    ]
    return _fastest(found, judged, reasons)


def _best_way(
    pricer: Pricer,
    job: Job,
    ways: Sequence[tuple[Configuration, Shelf]],
    known: Known,
    *,
    fewest_weights: bool,
) -> tuple[Configuration, Evaluation]:
    """Of all ways to share operators the fastest of those that fit, or that lack least; or of the fewest weights.

    What has no closed form is played only where its longest chain of waits is below the time of one that was played.

    Raises:
        JobError: the configuration makes no sense.
    """
    schedule = schedules.get(ways[0][0].schedule)
    timed = Timed.CLOSED_FORM if schedule.closed_form else Timed.BOUND
    tried = _with_fewest_weights(ways) if fewest_weights else ways
    judged = [(own, judge(pricer, job, own, shelf, known, timed)) for own, shelf in tried]
    if not fewest_weights:
        least = min(excess(evaluation) for _, evaluation in judged)
        judged = [each for each in judged if excess(each[1]) == least]
    judged.sort(key=lambda each: each[1].iteration_s)
    best = judged[0]
    if schedule.closed_form or schedule.exact(pipeline_of(best[0])):
        return best
    best_s = math.inf
    for own, evaluation in judged:
        if evaluation.iteration_s >= best_s:
            break
        own_s = played_s(own, evaluation)
        if own_s < best_s:
            best, best_s = (own, dataclasses.replace(evaluation, iteration_s=own_s)), own_s
    return best


def _fastest(found: Evaluations, judged: Sequence[tuple[np.ndarray, Evaluations]], reasons: list[str]) -> Evaluations:
    """Of all ways to share operators of each configuration the one that `predict` takes, put among those found."""
    excess_of = np.full(len(reasons), math.inf)
    for at, own in judged:
        over = np.where(own.fits, 0.0, np.nan_to_num(own.peak_bytes / own.capacity_bytes - 1, nan=math.inf))
        less = (over < excess_of[at]) | ((over == excess_of[at]) & (own.iteration_s < found.iteration_s[at]))
        excess_of[at[less]] = over[less]
        for name in ("iteration_s", "peak_bytes", "capacity_bytes", "fits"):
            getattr(found, name)[at[less]] = getattr(own, name)[less]
        for place, reason in zip(at.tolist(), own.reasons, strict=True):
            reasons[place] = reasons[place] or reason
    said = tuple("" if math.isfinite(s) else reason for s, reason in zip(found.iteration_s, reasons, strict=True))
    return dataclasses.replace(found, reasons=said)


def ways_to_share(pricer: Pricer, job: Job, asked: Asked) -> Iterator[tuple[Configuration, Shelf]]:
    """The configuration once for each way worth trying to share its operators, with the costs of that way.

    Raises:
        JobError: its ranks cannot share operators, or are not as many for every stage.
    """
    if isinstance(asked, Plan):
        if asked.shardings and asked.model.fingerprint == pricer.graph.fingerprint:
            yield priced_configuration(asked, pricer)
            return
        stages = tuple(dataclasses.replace(stage, sharding=0) for stage in asked.configuration.stages)
        asked = dataclasses.replace(asked.configuration, stages=stages)
    if isinstance(asked, Degrees):
        size = asked.micro_batch * max(1, asked.expert)
        for costs in _shardings(pricer, job, size, asked.tensor, asked.context, asked.expert):
            yield configuration_of(asked, pricer.chain, costs, pricer.cluster, job), {costs.sharding: costs}
        return
    _check_devices(asked, pricer.cluster, job)
    widths = {(stage.ranks, stage.context, stage.expert) for stage in asked.stages}
    if len(widths) != 1:
        said = ", ".join(map(str, sorted({each[0] for each in widths}))) or "no"
        raise JobError(f"stages of {said} ranks", hint="give all stages as many ranks, CP and EP alike")
    if any(stage.sharding for stage in asked.stages):
        raise JobError(
            "a stage names a sharding, and a configuration by itself has none",
            hint="give the plan file that has it, or leave it out for the fastest way to share operators",
        )
    ranks, context, expert = widths.pop()
    if ranks % (context * expert):
        raise JobError(f"CP {context} x EP {expert} does not divide {ranks} ranks", hint="give ranks as TP x CP x EP")
    for costs in _shardings(pricer, job, asked.micro_batch, ranks // (context * expert), context, expert):
        stages = tuple(dataclasses.replace(stage, sharding=costs.sharding) for stage in asked.stages)
        yield dataclasses.replace(asked, stages=stages), {costs.sharding: costs}


def _with_fewest_weights(ways: Sequence[tuple[Configuration, Shelf]]) -> list[tuple[Configuration, Shelf]]:
    """The ways to share operators that leave the fewest weights on a rank (`FEW`)."""
    weights = [sum(float(costs.parameter_elements.sum()) for costs in shelf.values()) for _, shelf in ways]
    return [way for way, held in zip(ways, weights, strict=True) if held <= FEW * min(weights)]


def _check_devices(asked: Configuration, cluster: Cluster, job: Job) -> None:
    """Refuse what cannot be laid on devices at all, before anything is made as large as it says.

    Raises:
        JobError: more devices side by side than there are, or devices that are not one for each rank of all workers.
    """
    available = min(job.devices or cluster.device_count, cluster.device_count)
    widest = max(asked.copies, *(stage.replicas * stage.ranks for stage in asked.stages), len(asked.devices), 0)
    if widest > available:
        raise JobError(f"{widest} devices side by side, but there are {available}", hint="use fewer copies or replicas")
    if not asked.devices:
        return
    line = dataclasses.replace(asked, devices=())
    workers = lay_workers(line, schedules.get(asked.schedule))
    taken = asked.copies * sum(own.shape[1] for own in workers.ranks)
    if len(asked.devices) != taken or len(set(asked.devices) & set(range(available))) != taken:
        message = f"{len(asked.devices)} devices are given for {taken} ranks of all workers"
        raise JobError(message, hint=f"give each rank one of the devices 0 to {available - 1}, copy by copy")


def _shardings(
    pricer: Pricer, job: Job, micro_batch: int, tensor: int, context: int = 1, expert: int = 1
) -> list[BlockCosts]:
    ranks = tensor * context * expert
    if micro_batch < 1 or min(tensor, context, expert) < 1:
        raise JobError(f"micro-batches of {micro_batch} on {ranks} ranks", hint="give numbers of at least 1")
    check_dealt(pricer.graph, dataclasses.replace(job, context_parallel=(context,), expert_parallel=(expert,)))
    degrees = "tensor parallel degree" if ranks == tensor else "TP, CP or EP"
    if reason := mesh_problem(pricer.cluster, job, (ranks,)):
        raise JobError(reason, hint=f"use another {degrees}")
    found = pricer.shardings_of(micro_batch, tensor, context, expert)
    if not found:
        raise JobError(f"no block of the model can be shared by {ranks} ranks", hint=f"use another {degrees}")
    return found


def judge(
    pricer: Pricer,
    job: Job,
    configuration: Configuration,
    shelf: Shelf,
    known: Known | None = None,
    timed: Timed = Timed.CLOSED_FORM,
) -> Evaluation:
    """The judge's verdict on a configuration that its job allows (`evaluate`).

    Raises:
        JobError: it makes no sense: blocks, devices or samples do not come out, or its schedule cannot serve it.
    """
    evaluation = evaluate(shelf, pricer.cluster, allowing(job, configuration), configuration, known=known, timed=timed)
    if not evaluation.stages:
        broken = "; ".join(violation.message for violation in evaluation.violations)
        raise JobError(broken, hint="use another configuration or schedule")
    return evaluation


def excess(evaluation: Evaluation) -> float:
    """How far the fullest worker is above its memory, as a fraction of it; infinite where something else is broken."""
    if not evaluation.violations:
        return 0.0
    if any(violation.kind != "memory" for violation in evaluation.violations):
        return math.inf
    return max(w.memory.total / w.capacity_bytes - 1 for w in evaluation.workers)

"""Predict time and memory of configurations that the user names, and write them out as plans.

>>> import planner
>>> graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")
>>> found = planner.predict(graph, cluster, planner.Job(64), planner.Degrees(pipeline=4, schedule="zb-h1"))
>>> found.fits
True
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import schedules
from planner.api import plan
from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import JobError, ModelError, UsageError
from planner.graph import Graph
from planner.hardware.types import HEADROOM, STEP_BYTES, Cluster, shown_bytes
from planner.interpreter import uncollected
from planner.memory import room_bytes
from planner.named_shardings import (
    CostsBySharding,
    NamedConfiguration,
    ShardingsOf,
    alike,
    each_sharding,
    shardings_at,
    ways_to_share,
    with_fewest_weights,
)
from planner.plans import Plan, Provenance, assemble
from planner.space import Configuration, WorkerMemory, evaluate, play_terms
from planner.space.configuration import UNRESTRICTED, Structure
from planner.space.device_layouts import DeviceLayouts
from planner.space.evaluate import Timed
from planner.space.evaluate_many import Evaluations, evaluate_many
from planner.space.job_options import LIMITS, allowing, without
from planner.space.jobs import settled
from planner.space.named import Degrees
from planner.space.pricer import Pricer
from planner.space.steps import fullest_of
from planner.space.terms import TermCache
from planner.space.timing import MOST_MICRO_BATCHES, played_s
from planner.space.types import BlockCosts, Evaluation, Job, MemoryBytes
from planner.space.workers import pipeline_of
from planner.systems.backends import backends_of, settled_for, structure_of

_FOLLOWED = ("devices", "forbid")
"""Limits that say what there is, not what is decided."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time and memory of one configuration.

    Attributes:
        plan: the configuration as a plan, with its predictions; it may exceed memory.
        workers: memory of each worker, all its stages together; workers that hold the same stages count once.
        problems: limits that the configuration breaks, in words; empty when it can run. Devices count with all their
            memory, without headroom.
        headroom: fraction of a device's memory that a search would leave free.
        allocator_cache: memory that the stack's allocator holds, as a multiple of the tensors' bytes.
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
        """Simulated seconds of an iteration."""
        return self.plan.predictions.reached_s

    @property
    def fits(self) -> bool:
        """True if the configuration can run, using all memory of a device."""
        return not self.problems

    @property
    def fits_with_headroom(self) -> bool:
        """True if it can run and leaves the headroom free, as plans of the search do."""
        return self.fits and self.fullest.memory.total <= room_bytes((1 - self.headroom) * self.fullest.capacity_bytes)

    @property
    def driver_bytes(self) -> float:
        """Estimate of what the driver (nvidia-smi) shows on the fullest device (`planner.hardware.types`)."""
        options = self.plan.options
        worker, formats = self.fullest, (options.precision, options.optimizer)
        return driver_bytes(worker.memory, *formats, self.allocator_cache, worker.capacity_bytes)

    @property
    def fullest(self) -> WorkerMemory:
        """The worker nearest to its capacity, or furthest above it."""
        return fullest_of(self.workers)


DEGREE_NAMES = {
    "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data", "interleave": "chunks",
    "micro-batch": "micro_batch", "zero": "zero", "schedule": "schedule", "recompute": "recompute",
}  # fmt: skip
"""Fields of `Degrees` by the names that users write, those of the options of `shardplan predict`."""
MOST_ZERO = 3


def read_degrees(texts: Mapping[str, str], where: str = "") -> Degrees:
    """Degrees from texts by the names of `DEGREE_NAMES`, with the defaults of `Degrees` for the others.

    `recompute` is never, always, or modules joined by `+`.

    Raises:
        UsageError: a text is no number of its kind; says where.
    """
    fields: dict[str, Any] = {}
    for name, text in texts.items():
        if name == "recompute":
            is_word = text in ("never", "always")
            fields |= {"recompute": text == "always", "repeats": () if is_word else tuple(text.split("+"))}
        elif name == "schedule":
            fields[name] = text
        else:
            least, most = (0, MOST_ZERO) if name == "zero" else (1, 10**9)
            if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
                raise UsageError(f"{text!r} is no number for {name}", where=where, hint="write a whole number, as tp=4")
            fields[DEGREE_NAMES[name]] = int(text)
    return Degrees(**fields)


def driver_bytes(
    memory: MemoryBytes, precision_name: str, optimizer: str, cache: float, device_bytes: float = math.inf
) -> float:
    """Estimate of what the driver (nvidia-smi) shows of a device with that need, in bytes.

    Args:
        memory: the need.
        precision_name, optimizer: of the job.
        cache: what the allocator holds, over the tensors (`Stack.allocator_cache`).
        device_bytes: memory of the device, beyond which caches do not grow.

    Raises:
        UsageError: there is no such precision or optimizer.
    """
    chosen = precision(precision_name)
    casts = chosen.master_bytes > 0 and chosen.gradient_bytes < STEP_BYTES
    stepped = memory.optimizer / optimizer_state_bytes(optimizer, chosen) if casts else 0.0
    return shown_bytes(memory.total - memory.reserve, memory.reserve, cache, stepped, device_bytes)


@uncollected()
def predict(
    graph: Graph,
    cluster: Cluster,
    job: Job,
    configuration: NamedConfiguration,
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
        job: global batch, precision (else that of its frameworks), optimizer and memory options, devices that may be
            used, splits that are forbidden, frameworks as whose layers operators are shared (`backends`), how tensors
            lie between layers (`structure.between_layers`); its other limits are not read. Its headroom is reported,
            and nothing is refused for it.
        configuration: by its degrees, in full, or of a plan. A plan's shardings are taken where it is for this model;
            of a configuration without them, `sharding` must be 0.
        fewest_weights: take the fastest of the ways to share operators that leave the fewest weights on a rank
            (`FEWEST_WEIGHTS_MARGIN`), as frameworks do that cut every matrix, whether or not it fits.
        strict_ops: refuse operators that no rule describes.
        provenance: how the plan came to be, for its file.

    Raises:
        JobError: devices, samples, blocks or chunks do not come out; says which.
        UsageError: no schedule has the name.
        ModelError: the model's batch cannot be set to the micro-batch.
    """
    backends = backends_of(job) if job.backends else ()
    job = settled_for(job, backends, cluster)
    headroom, shared = job.headroom, structure_of(backends) if backends else UNRESTRICTED
    between = job.structure.between_layers or shared.between_layers
    job = dataclasses.replace(
        _with_decided_formats(without_limits(job, cluster), configuration, cluster),
        headroom=0.0,
        structure=Structure(axes=shared.axes, between_layers=between),
    )
    pricer = Pricer(graph, cluster, job, strict_ops=strict_ops)
    shardings = list(ways_to_share(pricer, job, configuration))
    chosen, evaluation = _best_sharding(
        pricer, job, shardings, TermCache(), fewest_weights=fewest_weights, fitting=not fewest_weights
    )
    if chosen.micro_batches > MOST_MICRO_BATCHES:
        raise JobError(
            f"{chosen.micro_batches:,} micro-batches in a pipeline: a plan can have {MOST_MICRO_BATCHES:,}",
            hint="use a smaller global batch, larger micro-batches or more copies",
        )
    schedule = schedules.get(chosen.schedule)
    played_s = play_terms(chosen, schedule, evaluation.stages).iteration_s
    predicted = assemble(
        pricer,
        cluster,
        allowing(job, chosen),
        chosen,
        evaluation,
        played_s,
        provenance=provenance,
        given="configuration",
    )
    problems = tuple(violation.message for violation in evaluation.violations)
    return Prediction(predicted, evaluation.workers, problems, headroom, cluster.stack.allocator_cache)


def compare_to_best(prediction: Prediction, graph: Graph, cluster: Cluster, job: Job) -> tuple[Plan, float, float]:
    """Compare a prediction with the best plan of the same job without limits, by simulated times.

    Returns:
        The best plan that the search found; seconds an iteration by which the prediction is slower, negative where it
        is faster; and its iteration time over that of the plan.

    Raises:
        InfeasibleError: no plan fits.
    """
    best = plan(graph, cluster, without_limits(job, cluster))
    best_s = best.predictions.reached_s
    return best, prediction.iteration_s - best_s, prediction.iteration_s / best_s


def without_limits(job: Job, cluster: Cluster) -> Job:
    """The job under which a named configuration is priced: settled, and without limits on what it decides.

    Raises:
        JobError: a field of the job makes no sense.
    """
    return settled(without(job, LIMITS.keys() - set(_FOLLOWED)), cluster)


def _with_decided_formats(job: Job, asked: NamedConfiguration, cluster: Cluster) -> Job:
    """The job with the precision and the overlap of a configuration that decides them.

    Raises:
        JobError, UsageError: there is no such precision or overlap, or a device does not compute in it.
    """
    configuration = asked.configuration if isinstance(asked, Plan) else asked
    if isinstance(configuration, Degrees) or (not configuration.precision and configuration.overlap is None):
        return job
    allowed = allowing(job, configuration)
    return settled(dataclasses.replace(job, precision=allowed.precision, overlap=allowed.overlap), cluster)


@uncollected()
def predict_many(
    graph: Graph,
    cluster: Cluster,
    job: Job,
    configurations: Sequence[Degrees | Configuration],
    *,
    fewest_weights: bool = False,
) -> Evaluations:
    """Price many configurations of one model, each as `predict` does, without writing plans.

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
    members: dict[tuple[Job, int, tuple[int, ...]], list[tuple[int, Configuration]]] = {}
    costs: dict[tuple[Job, int, tuple[int, ...]], list[BlockCosts]] = {}
    trials: dict[Job, _Trial] = {}
    evaluations = Evaluations.empty(len(configurations))
    reasons = [""] * len(configurations)
    for at, asked in enumerate(configurations):
        try:
            settled_job = _with_decided_formats(job, asked, cluster)
            if settled_job not in trials:
                trials[settled_job] = _Trial(Pricer(graph, cluster, settled_job), settled_job)
            trial = trials[settled_job]
            found = list(alike(trial.pricer, settled_job, asked, trial.shardings, fewest_weights=fewest_weights))
            if not schedules.get(found[0][0].schedule).closed_form:
                evaluations.put(at, trial.best(found))
                continue
            for configuration, shardings in found:
                key = settled_job, configuration.micro_batch, tuple(each.sharding for each in shardings)
                costs[key] = shardings
                members.setdefault(key, []).append((at, configuration))
        except (JobError, UsageError, ModelError) as error:
            reasons[at] = error.problem.message
    judged = [
        (np.array([at for at, _ in entries]), each)
        for key, entries in members.items()
        for each in evaluate_many(costs[key], cluster, key[0], [c for _, c in entries], layouts=trials[key[0]].layouts)
    ]
    return _merge_best(evaluations, judged, reasons)


class _Trial:
    """What many predictions for one job share: prices, shardings, devices of stages.

    Args:
        pricer: prices the job's blocks.
        job: settled.
    """

    def __init__(self, pricer: Pricer, job: Job) -> None:
        self.pricer, self.job = pricer, job
        self.shardings: ShardingsOf = functools.cache(functools.partial(shardings_at, pricer, job))
        self.layouts: dict[tuple[int, int], DeviceLayouts] = {}
        self._seconds_by_size: dict[int, TermCache] = {}

    def best(self, alike: Sequence[tuple[Configuration, Sequence[BlockCosts]]]) -> Evaluation:
        """The judge's verdict on a configuration whose schedule is played, under its fastest sharding that fits.

        Raises:
            JobError: the configuration makes no sense.
        """
        ways = [each for configuration, shardings in alike for each in each_sharding(configuration, shardings)]
        seconds = self._seconds_by_size.setdefault(ways[0][0].micro_batch, TermCache()).seconds
        cache = TermCache(seconds)
        return _best_sharding(self.pricer, self.job, ways, cache, fewest_weights=False, fitting=True)[1]


def _best_sharding(
    pricer: Pricer,
    job: Job,
    ways: Sequence[tuple[Configuration, CostsBySharding]],
    cache: TermCache,
    *,
    fewest_weights: bool,
    fitting: bool,
) -> tuple[Configuration, Evaluation]:
    """The configuration under its fastest sharding.

    With `fewest_weights` only shardings that leave the fewest weights on a rank are looked at; with `fitting` those
    that fit, or that exceed memory least if none fits.

    Schedules without a closed form are played, but only where the lower bound is below the best played time.

    Raises:
        JobError: the configuration makes no sense.
    """
    schedule = schedules.get(ways[0][0].schedule)
    timed = Timed.CLOSED_FORM if schedule.closed_form else Timed.BOUND
    candidates = with_fewest_weights(ways, [used.values() for _, used in ways]) if fewest_weights else ways
    judged = [
        (configuration, judge(pricer, job, configuration, costs_by_sharding, cache, timed))
        for configuration, costs_by_sharding in candidates
    ]
    if fitting:
        least_excess = min(excess(evaluation) for _, evaluation in judged)
        judged = [judgement for judgement in judged if excess(judgement[1]) == least_excess]
    judged.sort(key=lambda judgement: judgement[1].iteration_s)
    best = judged[0]
    if schedule.closed_form or schedule.exact(pipeline_of(best[0])):
        return best
    best_s = math.inf
    for configuration, evaluation in judged:
        if evaluation.iteration_s >= best_s:
            break
        seconds = played_s(configuration, evaluation)
        if seconds < best_s:
            best, best_s = (configuration, dataclasses.replace(evaluation, iteration_s=seconds)), seconds
    return best


def _merge_best(best: Evaluations, judged: Sequence[tuple[np.ndarray, Evaluations]], reasons: list[str]) -> Evaluations:
    """Keep for each configuration the figures of the sharding that `predict` would take."""
    excess_of = np.full(len(reasons), math.inf)
    for at, evaluations in judged:
        excess_here = np.where(
            evaluations.fits, 0.0, np.nan_to_num(evaluations.peak_bytes / evaluations.capacity_bytes - 1, nan=math.inf)
        )
        better = (excess_here < excess_of[at]) | (
            (excess_here == excess_of[at]) & (evaluations.iteration_s < best.iteration_s[at])
        )
        excess_of[at[better]] = excess_here[better]
        for name in ("iteration_s", "peak_bytes", "capacity_bytes", "fits"):
            getattr(best, name)[at[better]] = getattr(evaluations, name)[better]
        for place, reason in zip(at.tolist(), evaluations.reasons, strict=True):
            reasons[place] = reasons[place] or reason
    shown_reasons = tuple(
        "" if math.isfinite(s) else reason for s, reason in zip(best.iteration_s, reasons, strict=True)
    )
    return dataclasses.replace(best, reasons=shown_reasons)


def judge(
    pricer: Pricer,
    job: Job,
    configuration: Configuration,
    costs_by_sharding: CostsBySharding,
    cache: TermCache | None = None,
    timed: Timed = Timed.CLOSED_FORM,
) -> Evaluation:
    """The judge's verdict on a configuration that its job allows (`evaluate`).

    Raises:
        JobError: it makes no sense: blocks, devices or samples do not come out, or its schedule cannot serve it.
    """
    evaluation = evaluate(
        costs_by_sharding, pricer.cluster, allowing(job, configuration), configuration, cache=cache, timed=timed
    )
    if not evaluation.stages:
        broken = "; ".join(violation.message for violation in evaluation.violations)
        raise JobError(broken, hint="use another configuration or schedule")
    return evaluation


def excess(evaluation: Evaluation) -> float:
    """Fraction by which the fullest worker exceeds its memory; infinite where another limit is broken."""
    if not evaluation.violations:
        return 0.0
    if any(violation.kind != "memory" for violation in evaluation.violations):
        return math.inf
    return max(w.memory.total / w.capacity_bytes - 1 for w in evaluation.workers)

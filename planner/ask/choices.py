"""Configurations of the user's own: why a plan does not use one, what makes one fit, what a change is worth.

`planner.prediction` prices a configuration as the search does. To find out what more memory, faster links, another node
or one limit less are worth, the job is planned again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.api import plan as plan_job
from planner.check import asked_job, limits_set
from planner.errors import InfeasibleError, JobError, ShardplanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster, Level, with_headroom
from planner.named_shardings import NamedConfiguration, with_sharding
from planner.operators.modules import MODULE_KINDS, module_nodes
from planner.plans import Plan
from planner.plans.explain import plan_shape
from planner.plans.figures import Headline
from planner.plans.step import plan_step
from planner.prediction import DEGREE_NAMES, MOST_ZERO, Prediction, predict, predict_many, read_degrees
from planner.registry import did_you_mean
from planner.space.configuration import Configuration, StageChoice
from planner.space.evaluate_many import Evaluations
from planner.space.job_options import as_written, without
from planner.space.named import Degrees
from planner.space.types import Job

OPEN: Mapping[str, tuple[str, ...]] = {
    "micro-batch": ("1", "2", "4", "8", "16"), "zero": ("0", "1"), "recompute": ("never", "core_attn", "always"),
}  # fmt: skip
"""Values that are tried where a choice leaves them open."""
MOST_FIXES = 8


Changeable = Degrees | Configuration
"""What fixes change: a configuration by its degrees, or in full."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that saves memory, and its price.

    Attributes:
        words: the change.
        bytes: change of the fullest device's memory, negative where it holds less.
        time: change of the step time, as a fraction of it.
        fits: true if the configuration fits with the change.
        missing_bytes: memory that a device still lacks.
    """

    words: str
    bytes: float
    time: float
    fits: bool
    missing_bytes: float


@dataclass(frozen=True, slots=True)
class ComparedPart:
    """A part of the step time or memory, in seconds or bytes: `own` of the plan, `other` of the choice."""

    name: str
    own: float
    other: float


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Time and memory of a choice, compared with those of the plan.

    Attributes:
        asked: the choice, as it was written.
        shape: the choice in full, with the best values for what it leaves open.
        plan_shape: the plan's configuration in a line.
        headline: headline of the choice; None if there is none.
        iteration_s: simulated step time of the choice.
        plan_s: simulated step time of the plan.
        problems: why it cannot run; empty where it can.
        times: parts of a step, the mean over all devices.
        memory: memory of the fullest device, by kind.
        capacity_bytes: capacity of the choice's fullest device.
        tried: number of configurations that were priced to fill in what was left open.
    """

    asked: str
    shape: str
    plan_shape: str
    headline: Headline | None
    iteration_s: float
    plan_s: float
    problems: tuple[str, ...]
    times: tuple[ComparedPart, ...]
    memory: tuple[ComparedPart, ...]
    capacity_bytes: float
    tried: int


def read_choice(text: str) -> dict[str, str]:
    """Read `tp=4,pp=8,recompute=mlp` into texts by names of `DEGREE_NAMES`; several modules are joined by `+`.

    Raises:
        UsageError: a name is unknown or repeated, or has no value.
    """
    choice: dict[str, str] = {}
    for piece in text.split(","):
        name, sign, value = (part.strip() for part in piece.partition("="))
        if name not in DEGREE_NAMES:
            raise UsageError(f"no choice {name!r}", where=text, hint=did_you_mean(name, DEGREE_NAMES))
        if not sign or not value or name in choice:
            raise UsageError(f"{piece.strip()!r} is no choice", where=text, hint="write each name once: tp=4,pp=8")
        choice[name] = value
    return choice


def find_fixes(graph: Graph, cluster: Cluster, job: Job, asked: NamedConfiguration) -> tuple[Fix, ...]:
    """Changes that reduce a configuration's memory; those that make it fit come first, then by the time that they cost.

    Tried are higher ZeRO stages, recomputation of single modules and of all layers, half the micro-batch, twice the TP,
    PP or CP (of degrees), and pairs of these. Pairs are listed only if neither change alone is enough.

    Args:
        graph: the model.
        cluster: the hardware.
        job: what is trained, as of `predict`.
        asked: the configuration, by degrees, in full, or of a plan; its operators are sharded in the fastest way.
    """
    base: Changeable
    if isinstance(asked, Degrees):
        base = asked
    else:
        base = with_sharding(asked.configuration if isinstance(asked, Plan) else asked, 0)
    single, combinable = _changes(graph, base)
    first = predict_many(graph, cluster, job, [base, *single.values()])
    fitting = dict(zip(single, first.fits[1:].tolist(), strict=True))
    pairs = {
        f"{one}, {other}": _joined(base, single[one], single[other])
        for one, other in combinable
        if not fitting[one] and not fitting[other]
    }
    second = predict_many(graph, cluster, job, list(pairs.values()))
    before = float(first.iteration_s[0]), float(first.peak_bytes[0])
    fixes = [*_useful(["", *single], first, *before), *_useful(pairs, second, *before)]
    fixes.sort(key=lambda fix: (not fix.fits, fix.time if fix.fits else fix.missing_bytes))
    return tuple(fixes[:MOST_FIXES])


def _useful(changes: Iterable[str], priced: Evaluations, base_s: float, base_bytes: float) -> Iterator[Fix]:
    """The possible changes after which the fullest device holds less."""
    figures = (priced.iteration_s, priced.peak_bytes, priced.capacity_bytes, priced.fits)
    for words, seconds, peak, capacity, fits in zip(changes, *(each.tolist() for each in figures), strict=True):
        if peak < base_bytes and math.isfinite(seconds):
            missing_bytes = 0.0 if fits else max(0.0, peak - capacity)
            yield Fix(words, peak - base_bytes, seconds / base_s - 1, fits, missing_bytes)


def _changes(graph: Graph, asked: Changeable) -> tuple[dict[str, Changeable], list[tuple[str, str]]]:
    """Single changes by their words, and the pairs of changes that can be combined."""
    zero: dict[str, Changeable] = {}
    for stage in range(asked.zero + 1, MOST_ZERO + 1):
        zero[f"ZeRO-{stage}"] = dataclasses.replace(asked, zero=stage)
    modules = {f"recompute {name}": name for name in MODULE_KINDS if module_nodes(graph, name)}
    recomputing = {words: _repeating(asked, name) for words, name in {**modules, "recompute all layers": ""}.items()}
    recomputing = {words: changed for words, changed in recomputing.items() if changed != asked}
    wider = {**_narrower(asked), **(_wider(asked) if isinstance(asked, Degrees) else {})}
    pairs = [*itertools.product(zero, (*recomputing, *wider)), *itertools.product(recomputing, wider)]
    return {**zero, **recomputing, **wider}, pairs


def _repeating(asked: Changeable, module: str) -> Changeable:
    """The configuration that also recomputes a module ("" for all layers)."""
    if isinstance(asked, Degrees):
        return dataclasses.replace(asked, **_repeated(asked, module))
    stages = tuple(dataclasses.replace(stage, **_repeated(stage, module)) for stage in asked.stages)
    return dataclasses.replace(asked, stages=stages)


def _repeated(stage: Degrees | StageChoice, module: str) -> dict[str, Any]:
    """Fields that change if a module is recomputed as well; none if it already is."""
    if stage.recompute or module in stage.repeats:
        return {}
    repeats = (*stage.repeats, module) if module else ()
    return {"recompute": not module, "repeats": repeats, "offload": stage.offload if module else ()}


def _narrower(asked: Changeable) -> dict[str, Changeable]:
    """The configuration with half the micro-batch size and twice as many micro-batches; empty for odd sizes."""
    size = asked.micro_batch // 2
    if not size or asked.micro_batch % 2:
        return {}
    twice: dict[str, Any] = {"micro_batches": 2 * asked.micro_batches} if isinstance(asked, Configuration) else {}
    return {f"micro-batch {size}": dataclasses.replace(asked, micro_batch=size, **twice)}


def _wider(degrees: Degrees) -> dict[str, Changeable]:
    """The degrees with twice the TP, PP or CP and half the DP."""
    wider: dict[str, Changeable] = {}
    for word, name in (("TP", "tensor"), ("PP", "pipeline"), ("CP", "context")):
        twice = {name: 2 * getattr(degrees, name), "data": degrees.data // 2}
        wider[f"{word} {twice[name]}"] = dataclasses.replace(degrees, **twice)
    return wider


def _joined(base: Changeable, first: Changeable, second: Changeable) -> Changeable:
    """The configuration with both changes."""
    names = [
        field.name for field in dataclasses.fields(base) if getattr(second, field.name) != getattr(base, field.name)
    ]
    return dataclasses.replace(first, **{name: getattr(second, name) for name in names})


def explain_why_not(plan: Plan, graph: Graph, cluster: Cluster, asked: str) -> WhyNot:
    """Explain why a plan does not use a choice: price the choice like the plan and compare them part by part.

    What the choice leaves open (micro-batch, ZeRO stage, recomputation) gets the best of a few values; the
    data-parallel degree follows from the number of devices.

    Args:
        plan: the plan.
        graph: its model.
        cluster: its hardware.
        asked: the choice, `tp=4,pp=8`.

    Raises:
        UsageError: the choice cannot be read.
        JobError: the choice is not possible for this model, cluster and batch; the message says why.
    """
    candidates = list(_filled(asked))
    job, cluster = plan.options, with_headroom(cluster, plan.hardware.headroom)
    priced = predict_many(graph, cluster, job, candidates)
    possible = np.flatnonzero(np.isfinite(priced.iteration_s))
    if not len(possible):
        predict(graph, cluster, job, candidates[0])  # raises, and says why
        raise InfeasibleError(f"nothing has {asked}", hint="leave a part of it open")
    exceeds = np.where(priced.fits, 0.0, priced.peak_bytes / priced.capacity_bytes)
    best = min(possible.tolist(), key=lambda at: (exceeds[at], priced.iteration_s[at]))  # those that fit first
    prediction = predict(graph, cluster, job, candidates[best])
    return _compared(plan, prediction, asked, len(candidates))


def _filled(asked: str) -> Iterator[Degrees]:
    """The choice completed by each combination of values for what it leaves open."""
    given = read_choice(asked)
    left = {name: values for name, values in OPEN.items() if name not in given}
    for values in itertools.product(*left.values()):
        yield read_degrees({**given, **dict(zip(left, values, strict=True))}, asked)


def _compared(plan: Plan, prediction: Prediction, asked: str, tried: int) -> WhyNot:
    """The choice compared with the plan, part by part."""
    plans = plan, prediction.plan
    steps = [plan_step(each) for each in plans]
    times = [{str(part): seconds for part, seconds in step.seconds.items()} for step in steps]
    memory = [dataclasses.asdict(step.fullest.memory) for step in steps]
    return WhyNot(
        asked=asked,
        shape=plan_shape(prediction.plan),
        plan_shape=plan_shape(plan),
        headline=prediction.plan.headline,
        iteration_s=prediction.iteration_s,
        plan_s=plan.predictions.reached_s,
        problems=prediction.problems,
        times=_parts(*times),
        memory=_parts(*memory),
        capacity_bytes=prediction.fullest.capacity_bytes,
        tried=tried,
    )


def _parts(own: Mapping[str, float], other: Mapping[str, float]) -> tuple[ComparedPart, ...]:
    names = dict.fromkeys((*own, *other))
    return tuple(ComparedPart(name, own.get(name, 0.0), other.get(name, 0.0)) for name in names)


MORE_BYTES = 1 << 30
"""Memory that is added to each device, in bytes."""
TIMES = 2.0
"""Factor by which the bandwidth of links is raised."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Gain of one change of hardware or limits.

    Attributes:
        words: the change.
        iteration_s: step time of the best plan with the change; None if there is no plan.
        gain: fraction of the step time that the change saves, negative if it costs time; None if there is no plan.
        bound_s: lower bound on the step time with the change; None if there is no plan.
        shape: that plan in a line, or why there is none.
    """

    words: str
    iteration_s: float | None
    gain: float | None
    bound_s: float | None
    shape: str


def find_worth(
    plan: Plan, graph: Graph, cluster: Cluster, larger: Callable[[], Cluster] | None = None
) -> tuple[Worth, ...]:
    """Plan the job anew for each of some changes of hardware and limits; the largest gain comes first.

    Args:
        plan: the plan of a search; gains are relative to its step time.
        graph: its model.
        cluster: its hardware.
        larger: gives the cluster with one more node; None to leave this change out.

    Raises:
        UsageError: the plan is not the result of a search, so that gains would not be those of a change.
    """
    if plan.system is not None or plan.schedule.given:
        raise UsageError("the plan is not of a search", hint="plan the job with `shardplan plan`")
    job = asked_job(plan)
    base_s = plan.predictions.reached_s
    gains = [_planned(words, graph, other, job, base_s) for words, other in _clusters(cluster)]
    if larger is not None:
        gains += _with_node(graph, larger, job, base_s)
    limits = limits_set(plan.options)
    gains += [
        _planned(f"without {as_written(plan.options, name)}", graph, cluster, without(job, [name]), base_s)
        for name in limits
    ]
    return tuple(sorted(gains, key=lambda worth: -(worth.gain if worth.gain is not None else -1.0)))


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """(change, cluster): more memory on each device, and each level of links faster."""
    more = tuple(dataclasses.replace(d, memory_bytes=d.memory_bytes + MORE_BYTES) for d in cluster.devices)
    yield "1 GiB more on each device", dataclasses.replace(cluster, devices=more)
    for at, level in enumerate(cluster.levels):
        faster = (*cluster.levels[:at], _faster(level), *cluster.levels[at + 1 :])
        unlike = tuple((*levels[:at], _faster(levels[at]), *levels[at + 1 :]) for levels in cluster.unlike)
        yield f"twice the bandwidth of {level.name}", dataclasses.replace(cluster, levels=faster, unlike=unlike)


def _faster(level: Level) -> Level:
    """The level with more bandwidth, without the measured collectives of the slower one."""
    return dataclasses.replace(
        level,
        byte_per_s=TIMES * level.byte_per_s,
        device_byte_per_s=TIMES * level.device_byte_per_s,
        peer_byte_per_s=None if level.peer_byte_per_s is None else TIMES * level.peer_byte_per_s,
        fits=(),
    )


def _with_node(graph: Graph, larger: Callable[[], Cluster], job: Job, base_s: float) -> list[Worth]:
    """The gain of one more node; the reason if the profile has no more."""
    try:
        cluster = larger()
    except ShardplanError as error:
        return [Worth("one more node", None, None, None, error.problem.message)]
    return [_planned("one more node", graph, cluster, dataclasses.replace(job, devices=0), base_s)]


def _planned(words: str, graph: Graph, cluster: Cluster, job: Job, base_s: float) -> Worth:
    """The gain of a change: plans the job on the given cluster."""
    try:
        plan = plan_job(graph, cluster, job)
    except (InfeasibleError, JobError) as error:
        return Worth(words, None, None, None, error.problem.message)
    step_s = plan.predictions.reached_s
    return Worth(words, step_s, 1 - step_s / base_s, plan.predictions.bound_s, plan_shape(plan))

"""Choices of one's own beside each other: why a plan does not make one, what makes one fit, and what a change is worth.

A choice is priced by `planner.prediction`, whose judge is that of the search; for what more memory, faster links, one
more node or one limit less are worth, the job is planned again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from planner.api import plan as plan_job
from planner.errors import InfeasibleError, JobError, ShardplanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster, Level, with_headroom
from planner.operators.modules import MODULE_KINDS, module_nodes
from planner.plans import Plan, explain
from planner.plans.explain import plan_shape
from planner.plans.figures import Headline
from planner.prediction import Asked, Prediction, predict, predict_many
from planner.registry import did_you_mean
from planner.space.asked import LIMITS, as_written, given, without
from planner.space.configuration import Configuration, StageChoice
from planner.space.named import Degrees
from planner.space.types import Job
from planner.systems.backends import ANY

NAMES = {
    "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data", "interleave": "chunks",
    "micro-batch": "micro_batch", "zero": "zero", "schedule": "schedule", "recompute": "recompute",
}  # fmt: skip
"""Fields of `Degrees` by what people write; those of the options of `shardplan predict`."""
MICRO_BATCHES, ZERO_STAGES = (1, 2, 4, 8, 16), (0, 1)
"""Tried where a choice leaves them open."""
MOST_FIXES = 8
MOST_ZERO = 3


C = TypeVar("C", Degrees, Configuration)
R = TypeVar("R", Degrees, StageChoice)


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice as it is written, and what it comes to.

    Attributes:
        words: what differs, `ZeRO-1, recompute mlp`.
        degrees: the configuration.
        iteration_s: closed form of a step, infinite where it makes no sense.
        peak_bytes: of the fullest worker.
        capacity_bytes: of that worker's smallest device.
        fits: whether it can run.
    """

    words: str
    degrees: Degrees | Configuration
    iteration_s: float
    peak_bytes: float
    capacity_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that saves memory, and its price.

    Attributes:
        words: the change.
        bytes: by which the fullest device holds less (negative) or more.
        time: by which a step takes longer, as a fraction of it.
        fits: whether the configuration fits with it.
        missing_bytes: what is still lacking on a device.
    """

    words: str
    bytes: float
    time: float
    fits: bool
    missing_bytes: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time or memory of a plan, and of the choice that it did not make; seconds or bytes."""

    name: str
    own: float
    other: float


@dataclass(frozen=True, slots=True)
class WhyNot:
    """What a choice would take that a plan does not make.

    Attributes:
        asked: the choice, as it was written.
        shape: in full: what was left open is as suits it best.
        plan_shape: the plan's.
        headline: of the choice; None where it makes no sense.
        iteration_s: of the choice, and of the plan, as they are played.
        plan_s: of the plan.
        problems: why it cannot run; empty where it can.
        times: where a step goes, on a device of the stage that sets the pace.
        memory: of the fullest device, by kind.
        capacity_bytes: of that device, in the choice.
        tried: configurations that were priced to fill in what was left open.
    """

    asked: str
    shape: str
    plan_shape: str
    headline: Headline | None
    iteration_s: float
    plan_s: float
    problems: tuple[str, ...]
    times: tuple[Part, ...]
    memory: tuple[Part, ...]
    capacity_bytes: float
    tried: int


def read_choice(text: str) -> dict[str, int | str]:
    """`tp=4,pp=8,recompute=mlp` as names of `NAMES` with their values; several modules are joined by `+`.

    Raises:
        UsageError: a name that is none, a value that is none, or a name twice.
    """
    found: dict[str, int | str] = {}
    for piece in text.split(","):
        name, sign, value = (part.strip() for part in piece.partition("="))
        if name not in NAMES:
            raise UsageError(f"no choice {name!r}", where=text, hint=did_you_mean(name, NAMES))
        if not sign or not value or name in found:
            raise UsageError(f"{piece.strip()!r} is no choice", where=text, hint="write each name once: tp=4,pp=8")
        if name not in ("schedule", "recompute"):
            if (
                not value.isdecimal()
                or (name != "zero" and int(value) < 1)
                or (name == "zero" and int(value) > MOST_ZERO)
            ):
                raise UsageError(f"{value!r} is no number for {name}", where=text, hint="write tp=4,pp=8")
            found[name] = int(value)
        else:
            found[name] = value
    return found


def degrees_of(asked: Mapping[str, int | str]) -> Degrees:
    """The configuration of a choice; what it leaves open is as in `Degrees`."""
    fields = {NAMES[name]: value for name, value in asked.items() if name != "recompute"}
    word = str(asked.get("recompute", "never"))
    modules = () if word in ("never", "always") else tuple(word.split("+"))
    return Degrees(**fields, recompute=word == "always", repeats=modules)  # type: ignore[arg-type]


def price_choices(
    graph: Graph, cluster: Cluster, job: Job, choices: Sequence[tuple[str, Degrees | Configuration]]
) -> tuple[Choice, ...]:
    """Choices with their time and memory, in their order."""
    found = predict_many(graph, cluster, job, [degrees for _, degrees in choices])
    figures = (found.iteration_s, found.peak_bytes, found.capacity_bytes)
    return tuple(
        Choice(words, degrees, float(seconds), float(peak), float(capacity), bool(fits))
        for (words, degrees), seconds, peak, capacity, fits in zip(choices, *figures, found.fits, strict=True)
    )


def find_fixes(graph: Graph, cluster: Cluster, job: Job, asked: Asked) -> tuple[Fix, ...]:
    """Changes that save memory of a configuration, the ones that make it fit first, then by the time that they take.

    Tried are higher ZeRO stages, recomputation of the modules that the model has and of all layers, smaller
    micro-batches, of degrees twice the TP, PP or CP, and a ZeRO stage with each of the others. Of two changes together
    only those are told of which neither is enough.

    Args:
        graph: the model.
        cluster: the hardware.
        job: what is trained, as of `predict`.
        asked: the configuration, by degrees or in full; of a plan its operators are shared in the fastest way.
    """
    if isinstance(asked, Degrees):
        return _fixes(graph, cluster, job, asked)
    return _fixes(graph, cluster, job, _unshared(asked))


def _fixes(graph: Graph, cluster: Cluster, job: Job, asked: C) -> tuple[Fix, ...]:
    changes: tuple[dict[str, C], list[tuple[str, str]]] = _changes(graph, asked)
    single: dict[str, C] = changes[0]
    first: tuple[Choice, ...] = price_choices(graph, cluster, job, [("", asked), *single.items()])
    base, priced = first[0], list(first[1:])
    known = {choice.words: choice for choice in priced}
    both = [
        ((one, other), _joined(asked, single[one], single[other]))
        for one, other in changes[1]
        if not known[one].fits and not known[other].fits
    ]
    priced += price_choices(graph, cluster, job, [(", ".join(words), found) for words, found in both])
    useful = [choice for choice in priced if choice.peak_bytes < base.peak_bytes and math.isfinite(choice.iteration_s)]
    fixes = [
        Fix(
            choice.words,
            choice.peak_bytes - base.peak_bytes,
            choice.iteration_s / base.iteration_s - 1,
            choice.fits,
            0.0 if choice.fits else max(0.0, choice.peak_bytes - choice.capacity_bytes),
        )
        for choice in useful
    ]
    fixes.sort(key=lambda fix: (not fix.fits, fix.time if fix.fits else fix.missing_bytes))
    return tuple(fixes[:MOST_FIXES])


def _unshared(asked: Plan | Configuration) -> Configuration:
    """A configuration that names no way to share operators."""
    chosen = asked.configuration if isinstance(asked, Plan) else asked
    return dataclasses.replace(chosen, stages=tuple(dataclasses.replace(s, sharding=0) for s in chosen.stages))


def _changes(graph: Graph, asked: C) -> tuple[dict[str, C], list[tuple[str, str]]]:
    """Single changes by their words, and the pairs of them that go together."""
    zero: dict[str, C] = {f"ZeRO-{n}": dataclasses.replace(asked, zero=n) for n in range(asked.zero + 1, MOST_ZERO + 1)}
    present = [name for name in MODULE_KINDS if module_nodes(graph, name)]
    again: dict[str, C] = {
        f"recompute {name}": changed for name in present if (changed := _repeating(asked, name)) is not None
    }
    if (everything := _repeating(asked, "")) is not None:
        again["recompute all layers"] = everything
    wider: dict[str, C] = {**_narrower(asked), **(_wider(asked) if isinstance(asked, Degrees) else {})}
    pairs = [*itertools.product(zero, (*again, *wider)), *itertools.product(again, wider)]
    return {**zero, **again, **wider}, pairs


def _repeating(asked: C, module: str) -> C | None:
    """The forward of a module, or of all layers, is repeated where it is not; None where it is everywhere."""
    if isinstance(asked, Configuration):
        stages = tuple(_repeating_stage(stage, module) for stage in asked.stages)
        return dataclasses.replace(asked, stages=stages) if stages != asked.stages else None
    found = _repeating_stage(asked, module)
    return found if found != asked else None


def _repeating_stage(stage: R, module: str) -> R:
    if stage.recompute or module in stage.repeats:
        return stage
    again = (*stage.repeats, module) if module else ()
    return dataclasses.replace(stage, recompute=not module, repeats=again)


def _narrower(asked: C) -> dict[str, C]:
    """Half the micro-batch, of which there are then twice as many."""
    size = asked.micro_batch // 2
    if not size or asked.micro_batch % 2:
        return {}
    if isinstance(asked, Configuration):
        changed = dataclasses.replace(asked, micro_batch=size, micro_batches=2 * asked.micro_batches)
        return {f"micro-batch {size}": changed}
    return {f"micro-batch {size}": dataclasses.replace(asked, micro_batch=size)}


def _wider(degrees: Degrees) -> dict[str, Degrees]:
    """More ranks a replica or more stages, half as many replicas."""
    wider: dict[str, Degrees] = {}
    put, data = dataclasses.replace, degrees.data // 2
    for word, name in (("TP", "tensor"), ("PP", "pipeline"), ("CP", "context")):
        twice = 2 * getattr(degrees, name)
        wider[f"{word} {twice}"] = put(degrees, **{name: twice, "data": data})
    return wider


def _joined(base: C, one: C, other: C) -> C:
    """The configuration with both changes."""
    names = [field.name for field in dataclasses.fields(base)]
    changed = {
        name: getattr(each, name)
        for each in (one, other)
        for name in names
        if getattr(each, name) != getattr(base, name)
    }
    return dataclasses.replace(base, **changed)


def explain_why_not(plan: Plan, graph: Graph, cluster: Cluster, asked: str) -> WhyNot:
    """Why a plan does not make a choice: the choice priced as the plan is, and where it loses.

    What the choice leaves open (micro-batch, ZeRO stage, recomputation) is taken as suits it best, of the few values
    that are tried; the data parallel degree follows from the devices.

    Args:
        plan: the plan.
        graph: its model.
        cluster: its hardware.
        asked: the choice, `tp=4,pp=8`.

    Raises:
        UsageError: the choice cannot be read.
        JobError: it makes no sense for this model, cluster and batch; says why.
    """
    given = read_choice(asked)
    candidates = list(_filled(given))
    job, cluster = plan.options, with_headroom(cluster, plan.hardware.headroom)
    choices = price_choices(graph, cluster, job, [("", degrees) for degrees in candidates])
    possible = [choice for choice in choices if math.isfinite(choice.iteration_s)]
    if not possible:
        predict(graph, cluster, job, candidates[0])  # raises, and says why
        raise InfeasibleError(f"nothing has {asked}", hint="leave a part of it open")
    best = min(possible, key=_preference)
    found = predict(graph, cluster, job, best.degrees)
    return _held(plan, found, asked, len(candidates))


def _preference(choice: Choice) -> tuple[float, float]:
    """What fits before what does not, then what is fastest."""
    over = 0.0 if choice.fits else choice.peak_bytes / choice.capacity_bytes
    return over, choice.iteration_s


def _filled(given: Mapping[str, int | str]) -> Iterator[Degrees]:
    """The choice with every value that is tried for what it leaves open."""
    open_values: dict[str, tuple[int | str, ...]] = {
        "micro-batch": MICRO_BATCHES, "zero": ZERO_STAGES, "recompute": ("never", "core_attn", "always"),
    }  # fmt: skip
    left = {name: values for name, values in open_values.items() if name not in given}
    for values in itertools.product(*left.values()):
        yield degrees_of({**given, **dict(zip(left, values, strict=True))})


def _held(plan: Plan, found: Prediction, asked: str, tried: int) -> WhyNot:
    """The choice held against the plan, part by part."""
    own, other = explain(plan), explain(found.plan)
    times = [{share.name: share.seconds for share in each.shares} for each in (own, other)]
    stages = [max(each.stages, key=lambda s: s.memory_bytes / s.capacity_bytes) for each in (own, other)]
    memory = [dict(stage.memory) for stage in stages]
    return WhyNot(
        asked=asked,
        shape=plan_shape(found.plan),
        plan_shape=plan_shape(plan),
        headline=found.plan.headline,
        iteration_s=found.iteration_s,
        plan_s=plan.predictions.reached_s,
        problems=found.problems,
        times=_parts(*times),
        memory=_parts(*memory),
        capacity_bytes=found.fullest.capacity_bytes,
        tried=tried,
    )


def _parts(own: Mapping[str, float], other: Mapping[str, float]) -> tuple[Part, ...]:
    names = dict.fromkeys((*own, *other))
    return tuple(Part(name, own.get(name, 0.0), other.get(name, 0.0)) for name in names)


MORE_BYTES = 1 << 30
"""Memory that is added to each device."""
TIMES = 2.0
"""By which a link is made faster."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What one change is worth.

    Attributes:
        words: the change.
        iteration_s: step of the best plan with it; None where there is none.
        gain: the part of a step that it saves, negative where it costs some; None where there is no plan.
        bound_s: no plan with the change is faster; None where there is no plan.
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
    """What changes of the hardware and of the user's limits are worth, each planned anew; the best first.

    Args:
        plan: of a search; its own step is what gains are counted from.
        graph: its model.
        cluster: its hardware.
        larger: the same with one node more, where there is such.

    Raises:
        UsageError: no search found the plan, so that nothing better need be due to a change.
    """
    if plan.system is not None or plan.schedule.given:
        raise UsageError("the plan is not of a search", hint="plan the job with `shardplan plan`")
    job = plan.options if plan.runs_on or plan.free_choice else dataclasses.replace(plan.options, backends=(ANY,))
    base_s = plan.predictions.reached_s
    found = [_planned(words, graph, other, job, base_s) for words, other in _clusters(cluster)]
    if larger is not None:
        found += _with_node(graph, larger, job, base_s)
    limits = [name for name in given(plan.options, LIMITS) if name not in ("devices", "backends")]
    found += [
        _planned(f"without {as_written(plan.options, name)}", graph, cluster, without(job, [name]), base_s)
        for name in limits
    ]
    return tuple(sorted(found, key=lambda each: -(each.gain if each.gain is not None else -1.0)))


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with more memory, and with each tier of links faster."""
    more = tuple(dataclasses.replace(d, memory_bytes=d.memory_bytes + MORE_BYTES) for d in cluster.devices)
    yield "1 GiB more on each device", dataclasses.replace(cluster, devices=more)
    for at, level in enumerate(cluster.levels):
        faster = (*cluster.levels[:at], _faster(level), *cluster.levels[at + 1 :])
        unlike = tuple((*own[:at], _faster(own[at]), *own[at + 1 :]) for own in cluster.unlike)
        yield f"twice the bandwidth of {level.name}", dataclasses.replace(cluster, levels=faster, unlike=unlike)


def _faster(level: Level) -> Level:
    """The tier with more bandwidth; collectives that were measured on the slower one are left out."""
    return dataclasses.replace(
        level,
        byte_per_s=TIMES * level.byte_per_s,
        device_byte_per_s=TIMES * level.device_byte_per_s,
        peer_byte_per_s=None if level.peer_byte_per_s is None else TIMES * level.peer_byte_per_s,
        fits=(),
    )


def _with_node(graph: Graph, larger: Callable[[], Cluster], job: Job, base_s: float) -> list[Worth]:
    """One node more, where the profile has one more."""
    try:
        cluster = larger()
    except ShardplanError as error:
        return [Worth("one more node", None, None, None, error.problem.message)]
    return [_planned("one more node", graph, cluster, dataclasses.replace(job, devices=0), base_s)]


def _planned(words: str, graph: Graph, cluster: Cluster, job: Job, base_s: float) -> Worth:
    """The job planned with a change."""
    try:
        found = plan_job(graph, cluster, job)
    except (InfeasibleError, JobError) as error:
        return Worth(words, None, None, None, error.problem.message)
    step_s = found.predictions.reached_s
    return Worth(words, step_s, 1 - step_s / base_s, found.predictions.bound_s, plan_shape(found))

"""Do a plan's figures agree with each other, without the model and the hardware: sums, parts, times played anew?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from planner import schedules
from planner.check.reevaluate import is_searched
from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import PlanError, UsageError
from planner.hardware.types import neighbours
from planner.plans import Fault, Finding, Plan
from planner.plans.documents import KeyPath, readable
from planner.plans.figures import Alternative, StagePrediction, gap_to
from planner.plans.files import ROUNDED, to_document
from planner.plans.findings import AGAIN
from planner.plans.readings import schedule_of
from planner.plans.rebuild import alternative_configuration
from planner.plans.records import Stage
from planner.plans.sections import bubble_fraction, stage_collectives
from planner.plans.words import module_ranges, summary
from planner.play.memory import peak_in_flight
from planner.simulate import Timeline, closed_form_s, simulate
from planner.simulate.timeline import times_of
from planner.space.limits import forbidden_choices
from planner.space.workers import lay_workers
from planner.units import format_bytes, format_seconds, plural

_MAY_BE_NEGATIVE = (("options", "keep"), ("predictions", "bubble_fraction"), ("model", "rebatch"))


def check_figures(plan: Plan) -> list[Finding]:
    """Findings about figures that contradict each other; O(size of the file)."""
    found = [*_negative((), to_document(plan)), *_hardware(plan)]
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        found += [*_device(plan, stage, terms), *_terms(stage, terms)]
    return [*found, *_whole(plan), *_alternatives(plan)]


def _negative(path: KeyPath, value: object) -> Iterator[Finding]:
    """Numbers below zero that count, measure or number something."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _negative((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _negative((*path, index), item)
    elif isinstance(value, (int, float)) and value < 0 and path[:2] not in _MAY_BE_NEGATIVE:
        yield Finding(Fault.NEGATIVE, f"{readable(path)} is {value}", AGAIN, stage_in(path))


def stage_in(path: KeyPath) -> int:
    """The stage that a path of the file is about, -1 for none."""
    places = (b for a, b in itertools.pairwise(path) if a == "stages" and isinstance(b, int))
    return next(places, -1)


def _hardware(plan: Plan) -> Iterator[Finding]:
    """Devices stand in line, and as many as the levels of links join."""
    hardware = plan.hardware
    starts = [run.first_rank for run in hardware.devices]
    ends = list(itertools.accumulate((run.count for run in hardware.devices), initial=0))
    if starts != ends[:-1]:
        yield Finding(Fault.HARDWARE, f"device types begin at ranks {starts}, expected {ends[:-1]}", AGAIN)
    joined = math.prod(level.size for level in hardware.levels)
    for count, what in ((ends[-1], "listed"), (joined, "joined by the levels of links")):
        if count != hardware.device_count:
            message = f"{plural(count, 'device')} are {what}, the cluster has {hardware.device_count}"
            yield Finding(Fault.HARDWARE, message, AGAIN)
    if plan.world_size > hardware.device_count:
        message = f"the world has {plan.world_size} ranks, the cluster {plural(hardware.device_count, 'device')}"
        yield Finding(Fault.RANK_RANGE, message, AGAIN)


def _device(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """What a stage says of its devices is what the hardware section says of them."""
    runs = [
        run
        for run in plan.hardware.devices
        if any(run.first_rank <= rank < run.first_rank + run.count for rank in stage.ranks)
    ]
    filled = 1 - plan.hardware.headroom
    peers = neighbours(stage.group_ranks, len(stage.replicas), len(plan.stages) > 1)
    for what, said, known in (
        ("capacity_bytes", terms.capacity_bytes, {math.floor(run.memory_bytes * filled) for run in runs}),
        ("memory.reserve_bytes", terms.memory.reserve_bytes,
         {run.reserve_bytes + peers * run.neighbour_bytes for run in runs}),
    ):  # fmt: skip
        if known and said not in known:
            devices = ", ".join(format_bytes(size) for size in sorted(known))
            message = f"{what} of stage {stage.index} is {format_bytes(said)}, its devices have {devices}"
            yield Finding(Fault.HARDWARE, message, AGAIN, stage.index)


def _terms(stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """Parts of a stage's times and memory do not exceed the whole."""
    parts = [
        ("recompute_s", terms.recompute_s, "backward_s", terms.backward_s),
        ("tied_sync_s", terms.tied_sync_s, "exposed_sync_s", terms.exposed_sync_s),
        ("exposed_sync_s", terms.exposed_sync_s, "sync_s + tied_sync_s", terms.sync_s + terms.tied_sync_s),
    ]
    for part, own, whole, total in parts:
        if own > total * (1 + TOLERANCE):
            message = f"stage {stage.index}: {part} is {format_seconds(own)}, {whole} {format_seconds(total)}"
            yield Finding(Fault.PREDICTIONS, message, AGAIN, stage.index)
    again = stage.recompute or (bool(stage.repeats) and terms.recompute_s > 0)
    if again != (terms.recompute_s > 0) and stage.kept_blocks != tuple(range(*stage.blocks)):
        said = "recomputes" if stage.recompute else "does not recompute"
        message = f"stage {stage.index} {said}, but its backward repeats {format_seconds(terms.recompute_s)} of forward"
        yield Finding(Fault.PREDICTIONS, message, AGAIN, stage.index)


def _slowest(plan: Plan, pace: Sequence[float]) -> int:
    """The slowest stage of the rank whose stages take most time together."""
    hosted: dict[int, list[int]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            hosted.setdefault(replica[0], []).append(stage.index)
    busiest = max(hosted.values(), key=lambda own: sum(pace[index] for index in own))
    return max(busiest, key=lambda index: (pace[index], -index))


def _whole(plan: Plan) -> Iterator[Finding]:
    """Bubble, bottleneck, gap and proof follow from the other figures."""
    said = plan.predictions
    pace = [
        (t.forward_s + t.backward_s + t.receive_s + t.return_s) / max(1, len(stage.replicas))
        for t, stage in zip(said.stages, plan.stages, strict=True)
    ]
    slowest = _slowest(plan, pace)
    if pace[said.bottleneck] < pace[slowest] * (1 - TOLERANCE):
        message = f"stage {said.bottleneck} is called the bottleneck, stage {slowest} is slower"
        yield Finding(Fault.PREDICTIONS, message, AGAIN, said.bottleneck)
    timed = zip(plan.stages, said.stages, strict=True)
    bubble = bubble_fraction(timed, plan.micro_batches.count, said.iteration_s)
    if not math.isclose(bubble, said.bubble_fraction, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        message = f"the stages' times make a bubble of {bubble:.6g}, the plan says {said.bubble_fraction:.6g}"
        yield Finding(Fault.PREDICTIONS, message, AGAIN)
    gap = gap_to(said.bound_s, said.reached_s)
    if not math.isclose(gap, said.gap, rel_tol=TOLERANCE, abs_tol=ROUNDED):
        message = f"the gap is {said.gap:.6g}, bound and iteration time make {gap:.6g}"
        yield Finding(Fault.BOUND, message, AGAIN)
    if said.tried_bound_s is not None and not said.bound_s <= said.tried_bound_s <= said.reached_s * (1 + TOLERANCE):
        message = f"the bound of what was tried, {said.tried_bound_s} s, does not lie between bound and iteration time"
        yield Finding(Fault.BOUND, message, AGAIN)
    if said.line_bound_s is not None and said.line_bound_s < said.bound_s:
        message = f"the bound of one stage a worker, {said.line_bound_s} s, is below that of all, {said.bound_s} s"
        yield Finding(Fault.BOUND, message, AGAIN)
    if said.proven_optimal and gap > ROUNDED:
        message = f"the plan is called proven optimal at {format_seconds(gap * said.reached_s)} above its bound"
        yield Finding(Fault.BOUND, message, AGAIN)


def _alternatives(plan: Plan) -> Iterator[Finding]:
    """Other plans do the same job in the way that their line says, and none is faster than the bound."""
    for number, other in enumerate(plan.alternatives):
        for problem in _problems(plan, other):
            yield Finding(Fault.ALTERNATIVES, f"alternatives[{number}] ({other.label}): {problem}", AGAIN)


def _problems(plan: Plan, other: Alternative) -> Iterator[str]:
    stages = len(other.starts)
    lengths = (len(other.replicas), len(other.ranks) or stages)
    if not stages or any(length != stages for length in lengths) or other.starts[0] != 0:
        yield f"{stages} starts, {lengths[0]} replicas and {lengths[1]} ranks of stages that begin at block 0"
        return
    batch = other.copies * other.micro_batch * other.micro_batches
    if batch != plan.micro_batches.global_batch:
        yield f"its micro-batches are {plural(batch, 'sample')}, not {plan.micro_batches.global_batch}"
    if other.summary != summary(alternative_configuration(other, len(plan.block_table))):
        yield f"it is not {other.summary!r}"
    seconds = other.simulated_iteration_s
    if seconds is not None and not other.infeasible and seconds < plan.predictions.bound_s * (1 - TOLERANCE):
        yield f"it takes {format_seconds(seconds)}, less than the bound for all plans"


def check_sums(plan: Plan) -> list[Finding]:
    """Findings about what stages hold, exchange and are called, and about the limits of the job; O(parameters)."""
    names = tuple(block.name for block in plan.block_table)
    found = list(_model(plan))
    try:
        schedule = schedule_of(plan)
        for name in plan.options.schedules if plan.schedule.given != "orders" else ():
            schedules.get(name)
        workers = lay_workers(plan.configuration, schedule)
        for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
            found += [*_held(plan, stage, terms, schedule.weight_buffers), *_exchanged(plan, stage, terms)]
            right = module_ranges(names[slice(*stage.blocks)])
            if stage.modules != right:
                message = f"stage {stage.index} is called {', '.join(stage.modules)}; its blocks are {', '.join(right)}"
                found.append(Finding(Fault.PARAMETERS, message, AGAIN, stage.index))
        broken = forbidden_choices(plan.options, plan.configuration, names, workers) if is_searched(plan) else []
    except UsageError as error:
        return [*found, Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    return [*found, *(Finding(Fault.OPTIONS, each.message, AGAIN, each.stage) for each in broken)]


def _model(plan: Plan) -> Iterator[Finding]:
    """The blocks hold as many trained parameters as the model is said to have."""
    owners = {p.owner: p.elements for block in plan.block_table for p in block.parameters if p.trainable}
    if sum(owners.values()) != plan.model.parameters:
        message = f"the blocks hold {sum(owners.values())} trained parameters, the model is said to have "
        yield Finding(Fault.MODEL, f"{message}{plan.model.parameters}", AGAIN)


def _held(plan: Plan, stage: Stage, terms: StagePrediction, buffers: int) -> Iterator[Finding]:
    """Bytes of weights, gradients and optimizer state are those of the stage's parameters; systems may hold otherwise.

    With the optimizer's state stand the buffers, as large as the weights, that the schedule keeps.
    """
    if plan.system is not None:
        return
    chosen, memory, shards = precision(plan.options.precision), terms.memory, len(stage.replicas)
    versions = plan.schedule.versions[stage.index] if plan.schedule.versions else 1
    elements, left = stage.held_parameters, stage.shard_parameters
    state = optimizer_state_bytes(plan.options.optimizer, chosen)
    copies = chosen.copy_bytes * elements * (stage.zero < 3 or shards == 1)
    more = buffers * elements * chosen.weight_bytes
    sums = [
        ("weights_bytes", memory.weights_bytes, chosen.weight_bytes * versions, 3, copies * versions),
        ("gradients_bytes", memory.gradients_bytes, chosen.gradient_bytes, 2, chosen.spare_bytes * elements),
        ("optimizer_bytes", memory.optimizer_bytes, state, 1, more),
    ]
    for what, said, each, zero, beside in sums:
        right = math.ceil((left / shards if stage.zero >= zero else elements) * each + beside)
        if not math.isclose(said, right, rel_tol=1e-9, abs_tol=1.0):
            message = (
                f"stage {stage.index} holds {format_bytes(right)} of {what.removesuffix('_bytes')}, the plan says "
            )
            yield Finding(Fault.MEMORY, f"{message}{said} bytes", AGAIN, stage.index)


def _exchanged(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """A stage's replicas sum the gradients of its parameters."""
    listed = tuple(c for c in terms.collectives if c.of != "tied gradients")
    if plan.exchange is None and listed != stage_collectives(stage, precision(plan.options.precision)):
        message = f"stage {stage.index} does not list what its {len(stage.replicas)} replicas exchange"
        yield Finding(Fault.COLLECTIVE, message, AGAIN, stage.index)


TOLERANCE = 1e-6


def check_played(plan: Plan, *, closed: bool) -> list[Finding]:
    """Findings about the plan's times and the micro-batches that its stages keep, played anew; O(actions).

    Args:
        plan: a plan whose orders run.
        closed: the iteration time is the closed form of the search.
    """
    try:
        timeline = simulate(plan)
        times = times_of(plan)
    except PlanError as error:
        return [Finding(Fault.PREDICTIONS, f"cannot be simulated: {error.problem.message}", error.problem.hint)]
    found = list(_simulated(plan, timeline))
    if closed:
        copies = plan.copies
        replicas = [len(stage.replicas) // copies for stage in plan.stages]
        expected_s = closed_form_s(replicas, plan.micro_batches.count // copies, times)
        found += _compared("iteration_s", plan.predictions.iteration_s, expected_s, "the closed form of its terms")
    elif plan.schedule.given:
        found += _compared("iteration_s", plan.predictions.iteration_s, timeline.step_s, "its simulation")
    return [*found, *_kept(plan, timeline)]


def _simulated(plan: Plan, timeline: Timeline) -> Iterator[Finding]:
    said = plan.predictions.simulated_iteration_s
    if said is not None:
        yield from _compared("simulated_iteration_s", said, timeline.step_s, "the simulation of its own terms")


def _compared(what: str, said_s: float, right_s: float, by: str) -> Iterator[Finding]:
    if not math.isclose(said_s, right_s, rel_tol=TOLERANCE):
        message = f"{what} is {format_seconds(said_s)} in the file, {format_seconds(right_s)} by {by}"
        yield Finding(Fault.PREDICTIONS, message, AGAIN)


def _kept(plan: Plan, timeline: Timeline) -> Iterator[Finding]:
    """The most micro-batches of a stage that a rank keeps along its order, or may keep, are what the plan says."""
    peaks = plan.schedule.limits or peak_in_flight(timeline.trace.program).max(axis=0).tolist()
    for stage, (terms, peak) in enumerate(zip(plan.predictions.stages, peaks, strict=True)):
        if terms.in_flight != peak:
            message = f"the orders keep {peak} micro-batches of stage {stage}, the plan says {terms.in_flight}"
            yield Finding(Fault.PREDICTIONS, message, AGAIN, stage)

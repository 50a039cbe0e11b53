"""Reports of a plan on one screen: configuration, times, stages, alternatives, remarks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.graph import NO_RULE, Note
from planner.operators.modules import MODULE_KINDS
from planner.plans import Plan, has_closed_form
from planner.plans.figures import MFU_CONVENTION, StagePrediction, gap_to
from planner.plans.readings import expert_ranks
from planner.plans.rebuild import alternative_configuration
from planner.plans.records import Stage
from planner.plans.shardings import Sharding
from planner.plans.step import chunked, plan_step, shares_in_words, stages_in_words
from planner.plans.words import degree_words, stage_keeping, why_not, words_of
from planner.report.tables import Cell, Form, Report, Section, Table, table
from planner.simulate import rank_ranges
from planner.space import steps
from planner.space.configuration import LAYER_INPUT
from planner.units import format_bytes, format_number, format_seconds, is_visible, plural, short_count

LIES = {
    "replicated": "whole on every rank",
    "sequence": "cut by the sequence",
    "batch": "cut by the batch",
    "free": "each in a layout of its own",
}
OPTIMAL = 1e-9
"""Gap below which a plan counts as the best."""
MOST_STAGES = 24
MOST_ALTERNATIVES = 8
MOST_NOTES = 5


def plan_report(plan: Plan, *, batch_given: bool = True, remark: str = "") -> Report:
    """The summary of a plan.

    Args:
        plan: the plan.
        batch_given: false if the global batch is an assumption, which the report then says.
        remark: why the precision was chosen, if the user gave none.
    """
    model, hardware = plan.model, plan.hardware
    title = (
        f"{model.name} ({short_count(model.parameters, 4)} parameters) on {hardware.name} "
        f"({hardware.device_count} devices), {plan.options.precision}{f' ({remark})' if remark else ''}, "
        f"{plan.options.optimizer}{f', stack {hardware.stack}' if hardware.stack else ''}"
    )
    about = () if plan.headline is None else (title,)
    doubts = [_warning(note) for note in plan.notes if note.code == NO_RULE]
    step = plan_step(plan)
    counted = [MFU_CONVENTION] if plan.headline is not None and plan.headline.sequence and plan.headline.mfu else []
    told = (_origin(plan), _sharing(plan), _times(plan, step), counted, _runs_on(plan), _headroom(plan), _placed(plan))
    facts = (text for lines in told for text in lines)
    sections = [Section(lines=(*about, *doubts, _shape(plan, batch_given), *facts))]
    sections += _stages(plan, chunks=chunked(step))
    sections += _devices(step) if chunked(step) else []
    if plan.alternatives:
        sections.append(Section(table=_alternatives(plan)))
    sections.append(Section(lines=tuple(_remarks(plan))))
    return Report(str(plan.headline or title), tuple(sections))


def _runs_on(plan: Plan) -> Iterator[str]:
    """Frameworks that run the plan as it is, and the gain of the plan without their limits."""
    free, plan_s = plan.free_choice, plan.predictions.reached_s
    if plan.runs_on:
        yield f"runs as it is on {_listed(plan.runs_on)}"
    elif free is not None:
        yield f"runs on no usual framework as it is: {free.reason}"
    if free is not None and free.iteration_s is not None:
        gain = plan_s / free.iteration_s - 1
        bound = "" if free.bound_s is None else f" (bound {format_seconds(free.bound_s)})"
        fastest = f"{format_seconds(free.iteration_s)}{bound}"
        proven = free.bound_s is not None and not is_visible(gap_to(free.bound_s, plan_s))
        none = f"no faster{bound}" if proven else f"none faster was found{bound}"
        comparison = f"{fastest}, {gain:.2%} faster: {_short(free.needs)}" if gain > 0 and is_visible(gain) else none
        yield f"free choice (`--for any`): {comparison}"
    elif free is not None and plan.runs_on:
        yield f"free choice (`--for any`): {free.reason}"


def _short(needs: tuple[str, ...]) -> str:
    """Needs of a plan without their details in parentheses, but for modules: a framework may do the same for others."""
    words = (need if _names_modules(need) else need.partition(" (")[0] for need in needs)
    return ", ".join(words) or "taken as it is, too"


def _names_modules(need: str) -> bool:
    """True if the details of a need are kinds of modules."""
    return {*need.partition(" (")[2].removesuffix(")").split(", ")} <= {*MODULE_KINDS, LAYER_INPUT}


def _listed(names: tuple[str, ...]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


def _headroom(plan: Plan) -> Iterator[str]:
    """The headroom of memory, if the plan has one."""
    if plan.hardware.headroom:
        capacities = " or ".join(dict.fromkeys(format_bytes(run.memory_bytes) for run in plan.hardware.devices))
        yield f"memory: a headroom of {plan.hardware.headroom:.1%} of {capacities} a device is left free"


def _placed(plan: Plan) -> Iterator[str]:
    """The devices of a machine's ranks, where they are not in the driver's order."""
    if plan.hardware.device_order:
        yield f"ranks of a node on its devices {plan.hardware.device_words}"


def _shape(plan: Plan, batch_given: bool) -> str:
    batch = plan.micro_batches
    assumed = "" if batch_given else " (assumed: none was given)"
    return (
        f"global batch {batch.global_batch}{assumed} = {batch.count} micro-batch{'es' if batch.count > 1 else ''} of "
        f"{batch.size}; {degree_words(plan.configuration, expert_ranks(plan))}; schedule {plan.schedule.name}"
        + (f"; exchange {plan.exchange.scheme}" if plan.exchange else "")
    )


def _origin(plan: Plan) -> list[str]:
    """The published system that chose the plan, and whether training is asynchronous."""
    lines = [] if plan.system is None else [f"by the rules of {plan.system.title} ({plan.system.source})"]
    if plan.schedule.weight_policy != "sync":
        updates, versions = max(plan.schedule.staleness, default=0), max(plan.schedule.versions, default=1)
        lines.append(
            f"asynchronous: gradients are up to {plural(updates, 'update')} old, up to {plural(versions, 'version')} "
            "of the weights are kept; the pipeline never drains"
        )
    return lines


def _sharing(plan: Plan) -> list[str]:
    """How the ranks of a group share the work, each distinct sentence once."""
    return list(dict.fromkeys(_shared(sharding) for sharding in plan.shardings))


def _shared(sharding: Sharding) -> str:
    layouts = dict.fromkeys(LIES.get(how, how) for how in sharding.boundaries)
    return (
        f"every operator shared by groups of {sharding.ranks} ranks: mesh {sharding.mesh}; "
        f"tensors between blocks {' and '.join(layouts)}"
    )


def _times(plan: Plan, step: steps.StepView) -> list[str]:
    """Iteration time, its measured error, and what is proven."""
    predictions = plan.predictions
    seconds = predictions.simulated_iteration_s or predictions.iteration_s
    rate = format_number(plan.micro_batches.global_batch / seconds)
    pace = ", ".join(filter(None, (f"{rate} samples/s", shares_in_words(plan, step))))
    lines = [f"{format_seconds(seconds)} an iteration (simulated), {pace}"]
    if predictions.measured_error is not None:
        lines.append(predictions.measured_error.in_words(seconds))
    bound, closed_form = format_seconds(predictions.bound_s), format_seconds(predictions.iteration_s)
    if plan.system is not None:
        return [*lines, f"predicted {closed_form}; its busiest device computes for {bound}"]
    closed = f"; closed form {closed_form}" if has_closed_form(plan) else ""
    if plan.schedule.given == "configuration":
        return [*lines, f"priced as it was given: nothing was searched{closed}"]
    proof = "proven optimal" if predictions.proven_optimal else f"best found, within {predictions.gap:.2%} of the bound"
    lines.append(f"bound {bound}: {proof}{closed}")
    if predictions.tried_bound_s is not None:
        gap = 1 - predictions.tried_bound_s / predictions.reached_s
        nearness = "the best" if gap <= OPTIMAL else f"within {gap:.2%} of the best"
        lines.append(f"of the ways to share operators that were tried: {nearness}")
    if predictions.line_bound_s is not None:
        gap = 1 - predictions.line_bound_s / predictions.reached_s
        bound_words = f"none is faster than {format_seconds(predictions.line_bound_s)}"
        lines.append(
            f"of pipelines with one stage a worker: {'this is the best' if abs(gap) <= OPTIMAL else bound_words}"
        )
    return lines


def _stages(plan: Plan, *, chunks: bool) -> list[Section]:
    """The table of stages, and notes on its times; without memory where a device holds several of them."""
    groups, several = bool(plan.shardings), len(plan.stages) > 1
    figures = ["forward", "backward", *(["inside"] if groups else []), "transfer", "sync"]
    width = {"TP" if _tensor_alone(plan) else "group": Form.NUMBER} if groups else {}
    columns = {
        "stage": Form.NAME, "modules": Form.TEXT, "ranks": Form.NAME, **width,
        **dict.fromkeys(figures, Form.SECONDS), **({} if chunks else dict.fromkeys(("memory", "of"), Form.BYTES)),
        "options": Form.NAME,
    }  # fmt: skip
    rows = [
        _stage(plan, *of, chunks=chunks) for of in zip(plan.stages[:MOST_STAGES], plan.predictions.stages, strict=False)
    ]
    notes = [plural(len(plan.stages) - MOST_STAGES, "more stage")] if len(plan.stages) > MOST_STAGES else []
    inside = "; inside, communication among the ranks of a group, is part of forward and backward" if groups else ""
    notes.append(f"times of a step, all micro-batches of a replica{inside}{'; < sets the pace' if several else ''}")
    return [Section(table=table(columns, rows)), Section(lines=tuple(notes))]


def _devices(step: steps.StepView) -> list[Section]:
    """The table of devices that hold several stages: a step in parts, and memory; and notes on it."""
    times = ("forward", "backward", "update", "exposed", "waiting")
    columns = {
        "device of stages": Form.NAME, "devices": Form.NUMBER, **dict.fromkeys(times, Form.SECONDS),
        "memory": Form.BYTES, "of": Form.BYTES,
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for worker in step.workers[:MOST_STAGES]:
        sums = (worker.sum_of(*parts) for parts in _PARTS)
        memory = (round(worker.memory.total), round(worker.capacity_bytes))
        rows.append((stages_in_words(worker.stages), worker.devices, *sums, *memory))
    more = (plural(len(step.workers) - MOST_STAGES, "more device"),) if len(step.workers) > MOST_STAGES else ()
    note = "a step of a device, all its stages together; exposed, it communicates and computes nothing"
    return [Section(table=table(columns, rows)), Section(lines=(*more, note))]


_PARTS = (
    (steps.Part.FORWARD,),
    (steps.Part.BACKWARD, steps.Part.RECOMPUTE),
    (steps.Part.UPDATE,),
    steps.COMMUNICATION,
    (steps.Part.WAITING,),
)
"""Parts of a step in the columns of the table of devices."""


def _stage(plan: Plan, stage: Stage, figures: StagePrediction, *, chunks: bool) -> tuple[Cell, ...]:
    over = f" over {stage.shard_over}" if stage.shard_over else ""
    options = [*stage_keeping(plan.configuration.stages[stage.index]), *[f"ZeRO-{stage.zero}{over}"] * (stage.zero > 0)]
    pace = " <" if stage.index == plan.predictions.bottleneck and len(plan.stages) > 1 else ""
    ranks = rank_ranges(stage.ranks) if stage.group_ranks == 1 else _groups(stage.replicas)
    width, inside_s = ((stage.group_ranks,), (_inside_s(plan, stage),)) if plan.shardings else ((), ())
    count = plan.micro_batches.count // len(stage.replicas)
    pass_times = (figures.forward_s, figures.backward_s, figures.receive_s + figures.return_s)
    forward_s, backward_s, transfer_s = (count * seconds for seconds in pass_times)
    times = (forward_s, backward_s, *inside_s, transfer_s)
    memory = () if chunks else (figures.memory.total_bytes, figures.capacity_bytes)
    rest = (figures.exposed_sync_s, *memory, ", ".join(options))
    return f"{stage.index}{pace}", ", ".join(stage.modules), ranks, *width, *times, *rest


def _inside_s(plan: Plan, stage: Stage) -> float:
    """Seconds of communication inside a group in an iteration, including recomputation."""
    inside_s, _, repeated_s = plan.inside_s(stage.index)
    return plan.micro_batches.count // len(stage.replicas) * (inside_s + repeated_s)


def _tensor_alone(plan: Plan) -> bool:
    """True if the ranks of a replica have tensor parallelism only, no context or expert parallelism."""
    return all(stage.context * stage.expert == 1 for stage in plan.configuration.stages)


def _groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """Groups of ranks as `0-7 8-15`; long lists without their middle."""
    shown = [rank_ranges(group) for group in groups]
    return " ".join(shown if len(shown) <= 2 else [shown[0], "..", shown[-1]])


def _alternatives(plan: Plan) -> Table:
    """The fastest alternatives, then those that cannot run, with the reason."""
    columns = {
        "also priced": Form.NAME, "shape": Form.TEXT, "iteration": Form.SECONDS, "slower": Form.CHANGE,
        "memory": Form.BYTES,
    }  # fmt: skip
    order = sorted(plan.alternatives, key=lambda a: (bool(a.infeasible), plan.compared_s(a)[1] or math.inf))
    rows: list[tuple[Cell, ...]] = []
    for other in order[:MOST_ALTERNATIVES]:
        plan_s, other_s = plan.compared_s(other)
        price: tuple[Cell, Cell] = (other_s, None if other_s is None else other_s / plan_s - 1)
        if other.infeasible:
            price = (why_not(other.infeasible), None)
        configuration = alternative_configuration(other, len(plan.block_names))
        shape = words_of(configuration, other.schedule, other.experts)
        rows.append((other.label, shape, *price, other.memory_bytes))
    return table(columns, rows)


def _remarks(plan: Plan) -> list[str]:
    """How operators were priced, and warnings of the import."""
    coverage = plan.coverage
    text = (
        f"{coverage.total} operators: {coverage.by_rule} priced by rule, {coverage.by_fallback} by fallback, "
        f"{coverage.plumbing} plumbing, {coverage.folded} folded, {coverage.dead} dead"
    )
    if coverage.fallback_ops:
        text += f" (fallback: {', '.join(f'{op} x{n}' for op, n in coverage.fallback_ops.items())})"
    notes = [note for note in plan.notes if note.code != NO_RULE]
    warnings = [note for note in notes if note.level == "warning"][:MOST_NOTES]
    lines, further_notes = [text, *map(_warning, warnings)], len(notes) - len(warnings)
    more = f"{plural(further_notes, 'more import note')} in the plan (`shardplan explain`)"
    return [*lines, more] if further_notes else lines


def _warning(note: Note) -> str:
    return f"warning: {note.where + ': ' if note.where else ''}{note.message}"

"""Reports that explain a plan: time, memory, alternatives, proof, and how groups of ranks share the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.plans import Plan
from planner.plans.explain import Explanation, Rival, plan_shape
from planner.plans.explain_shardings import SplitReason, SplitRival
from planner.plans.figures import BUBBLE_CONVENTION
from planner.plans.shardings import BlockFigures, GroupCollective, Holding, Sharding
from planner.plans.step import chunked, shares_in_words, stages_in_words
from planner.plans.words import module_list, module_ranges
from planner.report.plans import LIES
from planner.report.tables import Cell, Form, Report, Section, Table, table
from planner.space.steps import MemoryBytes, StepView, WorkerView
from planner.units import format_bytes, format_number, format_seconds, is_visible, plural

MOST_EXCHANGES = 8
"""Collectives that are shown of a sharding, the costliest ones."""
_MANY_TIMES = 3.0
_SAME = 1e-9
_SHORT_KINDS = ("weights", "grads", "optim", "activ", "work", "reserve")


def explanation_report(e: Explanation) -> Report:
    """The explanation as a report, the most important sections first."""
    plan = e.plan
    title = f"{plan.model.name} on {plan.hardware.name}: {plan_shape(plan)}"
    sections = [] if plan.headline is None else [Section(lines=(title,))]
    sections += [
        _verdict(e),
        _time(e),
        _stages(plan),
        memory_section(plan, e.step),
        *group_sections(plan, e.reasons),
        _why(e),
        _proof(e),
    ]
    sections.append(Section("Assumptions", items=e.assumptions))
    sections.append(Section("Not modelled", items=plan.not_modelled))
    sections.append(_coverage(plan))
    if plan.notes:
        sections.append(Section("Notes on the model", items=_notes(plan)))
    return Report(str(plan.headline or title), tuple(sections))


def _verdict(e: Explanation) -> Section:
    predictions = e.plan.predictions
    first = f"{format_seconds(predictions.iteration_s)} an iteration on {plural(_devices(e.plan), 'device')}"
    first += f", {format_number(predictions.samples_per_s)} samples/s"
    if predictions.simulated_iteration_s is not None:
        difference = predictions.simulated_iteration_s / predictions.iteration_s - 1
        first += f"; {format_seconds(predictions.simulated_iteration_s)} when simulated ({difference:+.1%})"
    proven = (
        "no plan of the searched space is faster"
        if predictions.proven_optimal
        else f"the best that was found, at most {predictions.gap:.1%} above the bound"
        if _searched(e.plan)
        else "priced as it was given: nothing was searched"
    )
    measured = predictions.measured_error
    error = () if measured is None else (f"{measured.in_words(predictions.reached_s)}.",)
    advice = (f"{e.advice}.",) if e.advice else ()
    return Section(lines=(f"{first}; {proven}.", *error, *advice))


def _devices(plan: Plan) -> int:
    """Devices that work."""
    return plan.world_size - len(plan.idle_ranks)


def _searched(plan: Plan) -> bool:
    """False for a configuration that was priced as it was given."""
    return plan.schedule.given != "configuration"


def _time(e: Explanation) -> Section:
    plan, step_s = e.plan, e.step.iteration_s
    stage = plan.stages[plan.predictions.bottleneck]
    slowest = e.step.worker_of(stage.index)
    lines = [f"{shares_in_words(plan, e.step).capitalize()} of all devices' time."] if e.step.devices > 1 else []
    columns = {"part": Form.TEXT, "time": Form.SECONDS, "share": Form.SHARE, "": Form.BAR}
    if len(e.step.workers) > 1:
        chunks = f", with stages {stages_in_words(slowest.stages)} on it" if len(slowest.stages) > 1 else ""
        lines.append(
            f"A device spends a step on the following, as a mean over all {e.step.devices}; behind it, one of stage "
            f"{stage.index} ({module_list(stage.modules)}){chunks}, which sets the pace:"
        )
        columns |= {f"stage {stage.index}": Form.SECONDS, "its share": Form.SHARE}
    else:
        lines.append("A device spends a step on:")
    rows: list[tuple[Cell, ...]] = []
    for part in dict.fromkeys((*e.step.seconds, *slowest.seconds)):
        seconds, own_s = (view.seconds.get(part, 0.0) for view in (e.step, slowest))
        own = (own_s, own_s / step_s) if len(e.step.workers) > 1 else ()
        rows.append((str(part), seconds, seconds / step_s, seconds / step_s, *own))
    return Section("Where the time goes", tuple(lines), table=table(columns, rows))


def _stages(plan: Plan) -> Section:
    columns = {
        "stage": Form.NAME, "modules": Form.TEXT, "DP": Form.NUMBER, "micro-batches each": Form.NUMBER,
        "compute": Form.SECONDS, "transfer": Form.SECONDS, "busy": Form.SHARE,
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for stage in plan.stages:
        mark = " *" if stage.index == plan.predictions.bottleneck else ""
        rows.append((f"{stage.index}{mark}", module_list(stage.modules), *_pace(plan, stage.index).values()))
    return Section("Stages (times of one micro-batch; * sets the pace)", table=table(columns, rows))


def _pace(plan: Plan, index: int) -> dict[str, float]:
    """Replicas of a stage, micro-batches of each, work and transfers of one, share of the time in which it works."""
    replicas, terms = len(plan.stages[index].replicas), plan.predictions.stages[index]
    count = plan.micro_batches.count // replicas
    compute_s = terms.forward_s + terms.backward_s
    return {
        "replicas": replicas,
        "micro_batches": count,
        "compute_s": compute_s,
        "transfer_s": terms.receive_s + terms.return_s,
        "busy_fraction": (count * compute_s + terms.update_s) / plan.predictions.iteration_s,
    }


def memory_section(plan: Plan, step: StepView) -> Section:
    """Memory of the devices of a plan by kind, all stages of a device together."""
    kinds_of_memory = dict.fromkeys((*_SHORT_KINDS, "total"), Form.BYTES)
    columns = {"stages" if chunked(step) else "stage": Form.NAME, **kinds_of_memory, "used": Form.SHARE, "": Form.BAR}
    rows: list[tuple[Cell, ...]] = []
    for stages, worker in _by_stages(step):
        total_bytes = worker.memory.total
        used = total_bytes / worker.capacity_bytes if worker.capacity_bytes else None
        sizes = (*(round(size) for size in dataclasses.astuple(worker.memory)), round(total_bytes))
        rows.append((stages_in_words(stages), *sizes, used, "" if used is None else used))
    capacity = {worker.capacity_bytes for worker in step.workers}
    kinds = ", ".join(field.name for field in dataclasses.fields(MemoryBytes))
    headroom = plan.hardware.headroom
    free = f" to fill, a headroom of {headroom:.1%} left free" if headroom else ""
    line = f"A device has {' or '.join(format_bytes(c) for c in sorted(capacity))}{free}. Kinds: {kinds}."
    return Section("Memory of a device", (line,), table=table(columns, rows))


def _by_stages(step: StepView) -> list[tuple[tuple[int, ...], WorkerView]]:
    """The workers, those that hold the same stages once, in the order of their stages."""
    return sorted({worker.stages: worker for worker in reversed(step.workers)}.items())


def _why(e: Explanation) -> Section:
    if not e.rivals:
        return Section("What else was priced", ("Nothing: the plan names no alternatives.",))
    columns = {
        "plan": Form.TEXT, "shape": Form.TEXT, "iteration": Form.SECONDS, "against this": Form.FIGURE,
        "what differs, or why not": Form.TEXT,
    }  # fmt: skip
    rows = ((r.label, r.summary, r.iteration_s, _against(r), _differs(r)) for r in e.rivals)
    return Section("What else was priced", table=table(columns, rows))


def _against(rival: Rival) -> str:
    if rival.infeasible:
        return "cannot run"
    if rival.ratio is None:
        return "-"
    return f"{rival.ratio - 1:+.1%}" if rival.ratio < _MANY_TIMES else f"{rival.ratio:.1f} times"


def _differs(rival: Rival) -> str:
    return "; ".join(rival.infeasible or rival.differs) or "same shape, numbered otherwise"


def _proof(e: Explanation) -> Section:
    predictions = e.plan.predictions
    bound = format_seconds(predictions.bound_s)
    if not _searched(e.plan):
        line = f"Nothing was searched; in any order of its work this configuration takes {bound} or more."
        return Section("What is proven", (line,))
    if predictions.proven_optimal:
        line = f"No plan of the searched space is faster than {bound}, which this one reaches."
    else:
        line = (
            f"No plan of the searched space takes less than {bound}; this one, the best that was found, takes "
            f"{format_seconds(predictions.reached_s)}, so at most {predictions.gap:.1%} could be gained."
        )
    meaning = "Times are simulated ones: the bound is the shortest chain of work and waits that any plan has."
    lines = [line, meaning]
    if e.tried_gap is not None:
        rounded = "none is faster" if e.tried_gap <= _SAME else "none is noticeably faster"
        finding = f"none is more than {e.tried_gap:.1%} faster" if is_visible(e.tried_gap, 1) else rounded
        lines.insert(1, f"Of the plans that share operators in one of the ways that were tried, {finding}.")
    if predictions.line_bound_s is not None:
        bound = format_seconds(predictions.line_bound_s)
        lines.append(f"Of the pipelines with one stage on each worker (1F1B, GPipe) none takes less than {bound}.")
    return Section("What is proven", (*lines, f"Searched: {predictions.space}."))


def _coverage(plan: Plan) -> Section:
    line = f"{_by_rule(plan):.1%} of the priced operators have a pricing rule of their own."
    items = tuple(f"{op}: {plural(count, 'operator')} priced by a generic estimate" for op, count in _fallbacks(plan))
    return Section("Operators", (line,), items)


def _by_rule(plan: Plan) -> float:
    """Share of the model's priced operators with a rule of their own."""
    priced = plan.coverage.by_rule + plan.coverage.by_fallback
    return plan.coverage.by_rule / priced if priced else 1.0


def _fallbacks(plan: Plan) -> list[tuple[str, int]]:
    """Types of the operators that are priced by a generic estimate and their numbers, the most first."""
    return sorted(plan.coverage.fallback_ops.items(), key=lambda entry: (-entry[1], entry[0]))


def _notes(plan: Plan) -> tuple[str, ...]:
    """What was assumed while reading the model."""
    return tuple(f"{n.where}: {n.message}" if n.where else n.message for n in plan.notes)


_SHOWN_RIVALS = 3
_MANY_TIMES_A_BLOCK = 10.0


def group_sections(plan: Plan, reasons: Sequence[SplitReason]) -> Iterator[Section]:
    """Sections on groups of ranks; none if every replica is one rank."""
    for sharding in plan.shardings:
        yield Section(f"Inside a group: {sharding.name}", _words(plan, sharding), table=_blocks(plan, sharding))
        yield _exchanges(sharding)
    if reasons:
        yield _reasons(reasons)
    elif plan.shardings:
        yield Section(lines=("Name the model and the hardware to see what other splits of the operators cost.",))


def _stages_of(plan: Plan, sharding: Sharding) -> tuple[int, ...]:
    """Numbers of the stages that have a sharding."""
    return tuple(stage.index for stage in plan.stages if stage.sharding == sharding.name)


def _words(plan: Plan, sharding: Sharding) -> tuple[str, ...]:
    stages = plural(len(_stages_of(plan, sharding)), "stage")
    pairs = zip(sharding.boundaries, sharding.axes, strict=True)
    layouts = ", ".join(f"{LIES[how]} along {axis.name}" for how, axis in pairs)
    if "free" in sharding.boundaries:
        layouts = LIES["free"]
    shared = f"{sharding.ranks} ranks share every operator of a replica ({stages}): mesh {sharding.mesh}"
    lines = [f"{shared}; tensors between blocks are {layouts}."]
    lines += [_dealt_words(holding, weights) for holding, weights in _dealt(sharding)]
    lines.append("Times and bytes are of one block, one rank and micro-batch; nothing is assumed to overlap.")
    return tuple(lines)


def _dealt(sharding: Sharding) -> list[tuple[Holding, int]]:
    """Experts, rows or columns of weights that are dealt alike: of the first weight, and the number of weights."""
    first: dict[tuple[object, ...], Holding] = {}
    weights: dict[tuple[object, ...], int] = {}
    for entry in sharding.blocks:
        for holding in entry.holdings:
            key = holding.what, holding.count, holding.each, holding.axes
            first.setdefault(key, holding)
            weights[key] = weights.get(key, 0) + len(entry.members())
    return [(holding, weights[key]) for key, holding in first.items()]


def _dealt_words(dealt: Holding, weights: int) -> str:
    where = dealt.weight + (f" and {plural(weights - 1, 'weight')} like it" if weights > 1 else "")
    return (
        f"Of {dealt.count:,} {dealt.what} of {where} a rank holds {dealt.each:,}, dealt along {', '.join(dealt.axes)}."
    )


def _kinds(plan: Plan, sharding: Sharding) -> Iterator[tuple[list[str], BlockFigures]]:
    """Names of the blocks that are sharded alike, and the figures of one of them."""
    for entry in sharding.blocks:
        yield [plan.block_table[block].name for block, _ in entry.members()], entry.figures


def _compute_s(figures: BlockFigures) -> float:
    """Forward and backward work."""
    return figures.forward_s + figures.backward_s - figures.communication_s


def _blocks(plan: Plan, sharding: Sharding) -> Table:
    columns = {
        "blocks": Form.TEXT, "number": Form.NUMBER, "work": Form.SECONDS, "communication": Form.SECONDS,
        "share": Form.SHARE, "sent": Form.BYTES, "parameters": Form.NUMBER, "kept": Form.BYTES,
    }  # fmt: skip
    rows = []
    for names, figures in _kinds(plan, sharding):
        total_s = _compute_s(figures) + figures.communication_s
        share = figures.communication_s / total_s if total_s else None
        times = (_compute_s(figures), figures.communication_s, share)
        sizes = (figures.sent_bytes, round(figures.parameters), figures.saved_bytes)
        rows.append((module_list(module_ranges(names)), len(names), *times, *sizes))
    return table(columns, rows)


def _costliest(sharding: Sharding) -> list[tuple[GroupCollective, int]]:
    """Collectives of all entries and the number of blocks that run each, the longest over all blocks first."""
    pairs = [(collective, len(entry.members())) for entry in sharding.blocks for collective in entry.collectives]
    return sorted(pairs, key=lambda pair: (-pair[0].seconds * pair[1], pair[0].of, pair[0].phase))


def _exchanges(sharding: Sharding) -> Section:
    heading = f"Costliest collectives of {sharding.name}"
    pairs = _costliest(sharding)
    if not pairs:
        return Section(heading, ("None: every rank does the same work, or none of it depends on another's.",))
    columns = {
        "of": Form.TEXT, "blocks": Form.NUMBER, "phase": Form.NAME, "collective": Form.TEXT, "along": Form.TEXT,
        "links": Form.NAME, "payload": Form.FIGURE, "takes": Form.SECONDS,
    }  # fmt: skip
    left_out = len(pairs) - MOST_EXCHANGES
    more = (f"{left_out} more are in the plan.",) if left_out > 0 else ()
    return Section(heading, more, table=table(columns, (_exchange(*pair) for pair in pairs[:MOST_EXCHANGES])))


def _exchange(c: GroupCollective, blocks: int) -> tuple[Cell, ...]:
    kind = c.kind.replace("_", "-")
    times = f" x {c.times:g}" if c.times != 1 else ""
    reason = "" if c.reason == "layout" else f" ({c.reason})"
    along, payload = ", ".join(c.axes), format_bytes(c.payload_bytes)
    return c.of, blocks, c.phase, f"{kind}{reason}", along, c.level, payload + times, c.seconds


def _reasons(reasons: Sequence[SplitReason]) -> Section:
    lines = (
        "For each kind of block the operators with most work: how they are split, and what the best answer of the "
        "block costs in which that operator is split otherwise (a micro-batch and its part of an update). Splits name "
        "the dimension of the operator's loop nest that each mesh axis cuts, - for none; layouts are those of its "
        "operands and results: R whole on every rank, S1 cut along dimension 1, P partial sums.",
    )
    rows = []
    for reason in reasons:
        first = (
            f"{reason.operator} ({reason.op})" + (f" x {reason.blocks}" if reason.blocks > 1 else ""),
            _splits(reason.splits),
            f"{' '.join(reason.reads)} -> {' '.join(reason.writes)}",
        )
        if not reason.rivals:
            rows.append((*first, "", "", "no other split is legal"))
        for number, rival in enumerate(reason.rivals[:_SHOWN_RIVALS]):
            leading_cells = first if not number else ("", "", "")
            rows.append((*leading_cells, _splits(rival.splits), *_costs(reason, rival)))
    words = dict.fromkeys(("operator", "split", "layouts", "instead"), Form.TEXT)
    columns = {**words, "costs": Form.FIGURE, "because": Form.TEXT}
    return Section("Why operators are split as they are", lines, table=table(columns, rows))


def _splits(splits: Sequence[str]) -> str:
    return " ".join(dim or "-" for dim in splits)


def _costs(reason: SplitReason, rival: SplitRival) -> tuple[str, str]:
    """The additional cost of another split, and its parts."""
    fraction = rival.more_s / reason.block_s if reason.block_s else 0.0
    parts = [
        f"{_signed(format_seconds, amount)} {kind}"
        for amount, kind in ((rival.more_work_s, "work"), (rival.more_communication_s, "communication"))
        if abs(amount) >= 1e-3 * abs(rival.more_s) and amount
    ]
    parts += [
        f"{_signed(format_bytes, amount)} {kind}"
        for amount, kind in ((rival.more_weight_bytes, "of weights"), (rival.more_kept_bytes, "kept"))
        if abs(amount) >= 1e6
    ]
    relative = f"{fraction:+.1%}" if fraction < _MANY_TIMES_A_BLOCK else f"x {1 + fraction:,.0f}"
    return f"{_signed(format_seconds, rival.more_s)} ({relative})", ", ".join(parts) or "the same"


def _signed(text: Callable[[float], str], amount: float) -> str:
    return f"{'-' if amount < 0 else '+'}{text(abs(amount))}"


_PREDICTED = (
    "iteration_s", "simulated_iteration_s", "measured_error", "samples_per_s", "bottleneck",
)  # fmt: skip
_PROVEN = ("bound_s", "gap", "proven_optimal")
"""Fields of the plan's predictions that the document has, too."""


def explanation_document(e: Explanation) -> dict[str, Any]:
    """The explanation as JSON data."""
    plan, predictions = e.plan, e.plan.predictions
    shares = e.time_parts.items()
    return {
        "model": plan.model.name,
        "hardware": plan.hardware.name,
        "devices": _devices(plan),
        "shape": plan_shape(plan),
        **_fields(predictions, *_PREDICTED),
        "bubble_fraction": e.step.bubble,
        "bubble_convention": BUBBLE_CONVENTION,
        "exposed_fraction": e.step.exposed,
        "shares": [{"name": n, "seconds": s, "fraction": s / e.step.iteration_s} for n, s in shares],
        "workers": [_worker_document(e.step, worker) for worker in e.step.workers],
        "stages": [_stage_document(plan, stage.index) for stage in plan.stages],
        "rivals": e.rivals,
        **_fields(predictions, *_PROVEN),
        "tried_gap": e.tried_gap,
        **_fields(predictions, "line_bound_s", "space"),
        "assumptions": e.assumptions,
        "not_modelled": plan.not_modelled,
        "priced_by_rule": _by_rule(plan),
        "fallback_ops": _fallbacks(plan),
        "notes": _notes(plan),
        "groups": [_group_document(plan, sharding) for sharding in plan.shardings],
        "reasons": e.reasons,
        "headroom": plan.hardware.headroom,
        "advice": e.advice,
        "headline": plan.headline,
        "searched": _searched(plan),
    }


def _fields(value: object, *names: str) -> dict[str, Any]:
    """Some fields by name."""
    return {name: getattr(value, name) for name in names}


def _stage_document(plan: Plan, index: int) -> Mapping[str, Any]:
    return {**_fields(plan.stages[index], "index", "modules"), **_pace(plan, index)}


def _worker_document(step: StepView, worker: WorkerView) -> Mapping[str, Any]:
    """A device with all its stages: its step by part, its memory by kind."""
    parts = worker.seconds.items()
    return {
        **_fields(worker, "stages", "devices"),
        "shares": [{"name": str(n), "seconds": s, "fraction": s / step.iteration_s} for n, s in parts],
        "memory": [(kind, round(size)) for kind, size in dataclasses.asdict(worker.memory).items()],
        "memory_bytes": round(worker.memory.total),
        "capacity_bytes": round(worker.capacity_bytes),
    }


def _group_document(plan: Plan, sharding: Sharding) -> Mapping[str, Any]:
    exchanges = _costliest(sharding)
    further = "reason", "phase", "kind", "axes", "level", "payload_bytes", "times", "seconds"
    return {
        **_fields(sharding, "name", "ranks"),
        "axes": [(axis.name, axis.size) for axis in sharding.axes],
        "boundaries": sharding.boundaries,
        "stages": _stages_of(plan, sharding),
        "blocks": [
            {
                "modules": module_ranges(names),
                "blocks": len(names),
                "compute_s": _compute_s(figures),
                **_fields(figures, "communication_s", "step_s", "sent_bytes", "parameters"),
                "kept_bytes": figures.saved_bytes,
            }
            for names, figures in _kinds(plan, sharding)
        ],
        "exchanges": [{"of": c.of, "blocks": count, **_fields(c, *further)} for c, count in exchanges[:MOST_EXCHANGES]],
        "more_exchanges": max(0, len(exchanges) - MOST_EXCHANGES),
        "dealt": [
            {**_fields(dealt, "what", "weight"), "weights": count, **_fields(dealt, "count", "each", "axes")}
            for dealt, count in _dealt(sharding)
        ],
    }

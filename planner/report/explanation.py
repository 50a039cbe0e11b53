"""Reports that explain a plan: time, memory, alternatives, proof, and how groups of ranks share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planner.plans.explain import Explanation, Rival
from planner.plans.explain_shardings import DealtView, ExchangeView, GroupView, SplitReason, SplitRival
from planner.plans.words import module_list
from planner.report.plans import LIES
from planner.report.tables import Cell, Form, Report, Section, Table, table
from planner.units import format_bytes, format_number, format_seconds, plural

_MANY_TIMES = 3.0
_SAME = 1e-9
_SHORT_KINDS = ("weights", "grads", "optim", "activ", "work", "reserve")


def explanation_report(e: Explanation) -> Report:
    """The explanation as a report, the most important sections first."""
    title = f"{e.model} on {e.hardware}: {e.shape}"
    sections = [] if e.headline is None else [Section(lines=(title,))]
    sections += [
        _verdict(e),
        _time(e),
        _stages(e),
        memory_section(e),
        *group_sections(e.groups, e.reasons),
        _why(e),
        _proof(e),
    ]
    sections.append(Section("Assumptions", items=e.assumptions))
    sections.append(Section("Not modelled", items=e.not_modelled))
    sections.append(_coverage(e))
    if e.notes:
        sections.append(Section("Notes on the model", items=e.notes))
    return Report(str(e.headline or title), tuple(sections))


def percent(fraction: float) -> str:
    """`12.3%`."""
    return f"{fraction:.1%}"


def _verdict(e: Explanation) -> Section:
    first = f"{format_seconds(e.iteration_s)} an iteration on {plural(e.devices, 'device')}"
    first += f", {format_number(e.samples_per_s)} samples/s"
    if e.simulated_iteration_s is not None:
        difference = e.simulated_iteration_s / e.iteration_s - 1
        first += f"; {format_seconds(e.simulated_iteration_s)} when simulated ({difference:+.1%})"
    proven = (
        "no plan of the searched space is faster"
        if e.proven_optimal
        else f"the best that was found, at most {percent(e.gap)} above the bound"
    )
    reached_s = e.iteration_s if e.simulated_iteration_s is None else e.simulated_iteration_s
    error = () if e.measured_error is None else (f"{e.measured_error.in_words(reached_s)}.",)
    advice = (f"{e.advice}.",) if e.advice else ()
    return Section(lines=(f"{first}; {proven}.", *error, *advice))


def _time(e: Explanation) -> Section:
    stage = e.stages[e.bottleneck]
    subject = (
        f"Stage {stage.index} ({module_list(stage.modules)}) sets the pace"
        if len(e.stages) > 1
        else "There is one stage"
    )
    lines = (
        f"Idle over all devices: {percent(e.bubble_fraction)}, as {e.bubble_convention}.",
        f"{subject}; a device of it spends the iteration on:",
    )
    columns = {"part": Form.TEXT, "time": Form.SECONDS, "share": Form.SHARE, "": Form.BAR}
    rows = ((s.name, s.seconds, s.fraction, s.fraction) for s in e.shares)
    return Section("Where the time goes", lines, table=table(columns, rows))


def _stages(e: Explanation) -> Section:
    columns = {
        "stage": Form.NAME, "modules": Form.TEXT, "DP": Form.NUMBER, "micro-batches each": Form.NUMBER,
        "compute": Form.SECONDS, "transfer": Form.SECONDS, "busy": Form.SHARE,
    }  # fmt: skip
    rows = (
        (
            f"{s.index}{' *' if s.index == e.bottleneck else ''}",
            module_list(s.modules),
            s.replicas,
            s.micro_batches,
            s.compute_s,
            s.transfer_s,
            s.busy_fraction,
        )
        for s in e.stages
    )
    return Section("Stages (times of one micro-batch; * sets the pace)", table=table(columns, rows))


def memory_section(e: Explanation) -> Section:
    """Memory of a device of each stage, by kind."""
    kinds_of_memory = dict.fromkeys((*_SHORT_KINDS, "total"), Form.BYTES)
    columns = {"stage": Form.NAME, **kinds_of_memory, "used": Form.SHARE, "": Form.BAR}
    rows = []
    for s in e.stages:
        used = s.memory_bytes / s.capacity_bytes if s.capacity_bytes else None
        sizes = (*(size for _, size in s.memory), s.memory_bytes)
        rows.append((str(s.index), *sizes, used, "" if used is None else used))
    capacity = {s.capacity_bytes for s in e.stages}
    kinds = ", ".join(kind for kind, _ in e.stages[0].memory)
    free = f" to fill, a headroom of {e.headroom:.1%} left free" if e.headroom else ""
    line = f"A device has {' or '.join(format_bytes(c) for c in sorted(capacity))}{free}. Kinds: {kinds}."
    return Section("Memory of a device", (line,), table=table(columns, rows))


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
    reached_s = e.iteration_s if e.simulated_iteration_s is None else e.simulated_iteration_s
    if e.proven_optimal:
        line = f"No plan of the searched space is faster than {format_seconds(e.bound_s)}, which this one reaches."
    else:
        line = (
            f"No plan of the searched space takes less than {format_seconds(e.bound_s)}; this one, the best that was "
            f"found, takes {format_seconds(reached_s)}, so at most {percent(e.gap)} could be gained."
        )
    meaning = "Times are simulated ones: the bound is the shortest chain of work and waits that any plan has."
    lines = [line, meaning]
    if e.tried_gap is not None:
        finding = "none is faster" if e.tried_gap <= _SAME else f"none is more than {percent(e.tried_gap)} faster"
        lines.insert(1, f"Of the plans that share operators in one of the ways that were tried, {finding}.")
    if e.line_bound_s is not None:
        bound = format_seconds(e.line_bound_s)
        lines.append(f"Of the pipelines with one stage on each worker (1F1B, GPipe) none takes less than {bound}.")
    return Section("What is proven", (*lines, f"Searched: {e.space}."))


def _coverage(e: Explanation) -> Section:
    line = f"{percent(e.priced_by_rule)} of the priced operators have a pricing rule of their own."
    items = tuple(f"{op}: {plural(count, 'operator')} priced by a generic estimate" for op, count in e.fallback_ops)
    return Section("Operators", (line,), items)


_SHOWN_RIVALS = 3
_MANY_TIMES_A_BLOCK = 10.0


def group_sections(groups: Sequence[GroupView], reasons: Sequence[SplitReason]) -> Iterator[Section]:
    """Sections on groups of ranks; none if every replica is one rank."""
    for group in groups:
        yield Section(f"Inside a group: {group.name}", _words(group), table=_blocks(group))
        yield _exchanges(group)
    if reasons:
        yield _reasons(reasons)
    elif groups:
        yield Section(lines=("Name the model and the hardware to see what other splits of the operators cost.",))


def _words(group: GroupView) -> tuple[str, ...]:
    mesh = " x ".join(f"{name} {size}" for name, size in group.axes)
    stages = plural(len(group.stages), "stage")
    pairs = zip(group.boundaries, group.axes, strict=True)
    layouts = ", ".join(f"{LIES[how]} along {name}" for how, (name, _) in pairs)
    if "free" in group.boundaries:
        layouts = LIES["free"]
    shared = f"{group.ranks} ranks share every operator of a replica ({stages}): mesh {mesh}"
    lines = [f"{shared}; tensors between blocks are {layouts}."]
    lines += [_dealt(dealt) for dealt in group.dealt]
    lines.append("Times and bytes are of one block, one rank and micro-batch; nothing is assumed to overlap.")
    return tuple(lines)


def _dealt(dealt: DealtView) -> str:
    where = dealt.weight + (f" and {plural(dealt.weights - 1, 'weight')} like it" if dealt.weights > 1 else "")
    return (
        f"Of {dealt.count:,} {dealt.what} of {where} a rank holds {dealt.each:,}, dealt along {', '.join(dealt.axes)}."
    )


def _blocks(group: GroupView) -> Table:
    columns = {
        "blocks": Form.TEXT, "number": Form.NUMBER, "work": Form.SECONDS, "communication": Form.SECONDS,
        "share": Form.SHARE, "sent": Form.BYTES, "parameters": Form.NUMBER, "kept": Form.BYTES,
    }  # fmt: skip
    rows = []
    for b in group.blocks:
        total_s = b.compute_s + b.communication_s
        share = b.communication_s / total_s if total_s else None
        times = (b.compute_s, b.communication_s, share)
        rows.append((module_list(b.modules), b.blocks, *times, b.sent_bytes, round(b.parameters), b.kept_bytes))
    return table(columns, rows)


def _exchanges(group: GroupView) -> Section:
    heading = f"Costliest collectives of {group.name}"
    if not group.exchanges:
        return Section(heading, ("None: every rank does the same work, or none of it depends on another's.",))
    columns = {
        "of": Form.TEXT, "blocks": Form.NUMBER, "phase": Form.NAME, "collective": Form.TEXT, "along": Form.TEXT,
        "links": Form.NAME, "payload": Form.FIGURE, "takes": Form.SECONDS,
    }  # fmt: skip
    more = (f"{group.more_exchanges} more are in the plan.",) if group.more_exchanges else ()
    return Section(heading, more, table=table(columns, map(_exchange, group.exchanges)))


def _exchange(e: ExchangeView) -> tuple[Cell, ...]:
    kind = e.kind.replace("_", "-")
    times = f" x {e.times:g}" if e.times != 1 else ""
    reason = "" if e.reason == "layout" else f" ({e.reason})"
    along, payload = ", ".join(e.axes), format_bytes(e.payload_bytes)
    return e.of, e.blocks, e.phase, f"{kind}{reason}", along, e.level, payload + times, e.seconds


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

"""Groups of ranks in words and tables: what they share, what they exchange, why operators are split as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planner.plans.explain_shardings import DealtView, ExchangeView, GroupView, SplitReason, SplitRival
from planner.plans.words import module_list
from planner.report.tables import Cell, Form, Section, Table, table
from planner.units import format_bytes, format_seconds, plural

_SHOWN_RIVALS = 3
_MANY_TIMES = 10.0


def group_sections(groups: Sequence[GroupView], reasons: Sequence[SplitReason]) -> Iterator[Section]:
    """Sections of a plan's groups; none where every replica is one rank."""
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
    lies = ", ".join(
        f"{how} along {name}" for how, (name, _) in zip(map(_boundary, group.boundaries), group.axes, strict=True)
    )
    if "free" in group.boundaries:
        lies = "each in a layout of its own"
    shared = f"{group.ranks} ranks share every operator of a replica ({stages}): mesh {mesh}"
    lines = [f"{shared}; tensors between blocks are {lies}."]
    lines += [_dealt(dealt) for dealt in group.dealt]
    lines.append("Times and bytes are of one block, one rank and micro-batch; nothing is assumed to overlap.")
    return tuple(lines)


def _boundary(how: str) -> str:
    return {"sequence": "cut by the sequence", "batch": "cut by the batch"}.get(how, "whole on every rank")


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
    why = "" if e.reason == "layout" else f" ({e.reason})"
    along, payload = ", ".join(e.axes), format_bytes(e.payload_bytes)
    return e.of, e.blocks, e.phase, f"{kind}{why}", along, e.level, payload + times, e.seconds


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
            own = first if not number else ("", "", "")
            rows.append((*own, _splits(rival.splits), *_costs(reason, rival)))
    words = dict.fromkeys(("operator", "split", "layouts", "instead"), Form.TEXT)
    columns = {**words, "costs": Form.FIGURE, "because": Form.TEXT}
    return Section("Why operators are split as they are", lines, table=table(columns, rows))


def _splits(splits: Sequence[str]) -> str:
    return " ".join(each or "-" for each in splits)


def _costs(reason: SplitReason, rival: SplitRival) -> tuple[str, str]:
    """What a rival costs more, and where that comes from."""
    fraction = rival.more_s / reason.block_s if reason.block_s else 0.0
    parts = [
        f"{_signed(format_seconds, amount)} {what}"
        for amount, what in ((rival.more_work_s, "work"), (rival.more_communication_s, "communication"))
        if abs(amount) >= 1e-3 * abs(rival.more_s) and amount
    ]
    parts += [
        f"{_signed(format_bytes, amount)} {what}"
        for amount, what in ((rival.more_weight_bytes, "of weights"), (rival.more_kept_bytes, "kept"))
        if abs(amount) >= 1e6
    ]
    relative = f"{fraction:+.1%}" if fraction < _MANY_TIMES else f"x {1 + fraction:,.0f}"
    return f"{_signed(format_seconds, rival.more_s)} ({relative})", ", ".join(parts) or "the same"


def _signed(text: Callable[[float], str], amount: float) -> str:
    return f"{'-' if amount < 0 else '+'}{text(abs(amount))}"

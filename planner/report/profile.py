"""What a model costs on a device: totals, costliest layers and operators, coverage; every node as rows for tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.costs import CostReport, Profile, cost_report
from planner.costs.report import Group
from planner.graph import NO_RULE, Graph
from planner.report.tables import Cell, Form, Report, Section, Table, data_table, table
from planner.units import format_bytes, format_flop_rate, format_flops, format_seconds

MOST_ROWS = 12
"""Rows of a table where nothing else is asked for."""

DATA = (
    "key", "op", "module", "forward_s", "backward_s", "weight_grad_s", "forward_flops", "backward_flops",
    "moved_bytes", "output_bytes", "saved_bytes", "origin", "format",
)  # fmt: skip


def profile_report(graph: Graph, profile: Profile, *, most_rows: int = MOST_ROWS, remark: str = "") -> Report:
    """A profile summed up; its rows for tools are all nodes.

    Args:
        graph: the model.
        profile: its prices.
        most_rows: rows of the tables of layers and operators.
        remark: why the precision was chosen, where nobody asked for one.
    """
    costs = cost_report(graph, profile)
    precision = f"{costs.precision} ({remark})" if remark else costs.precision
    sections = (
        Section(lines=tuple(_totals(costs))),
        Section(table=_groups("layer", costs.layers, most_rows, costs.whole.total_s)),
        Section(table=_groups("operator", costs.operators, most_rows, costs.whole.total_s)),
        _coverage(costs),
    )
    title = f"{costs.model} on {costs.device}, {precision}, micro-batch {costs.micro_batch} ({costs.source})"
    return Report(title, sections, data_table(_nodes(graph, profile), DATA))


def _totals(costs: CostReport) -> list[str]:
    whole = costs.whole
    rate = f" = {format_flop_rate(costs.flop_per_s)}" if costs.flop_per_s else ""
    doubts = [f"warning: {note.where}: {note.message}" for note in costs.notes if note.code == NO_RULE]
    return [
        *doubts,
        f"parameters  {whole.parameters:,}",
        f"work        {format_flops(whole.forward_flops)} forward, {format_flops(whole.backward_flops)} backward",
        f"time        {format_seconds(whole.forward_s)} forward, {format_seconds(whole.backward_s)} backward{rate}",
        f"kept        {format_bytes(whole.saved_bytes)} of activations for backward",
    ]


def _groups(what: str, groups: Sequence[Group], most_rows: int, whole_s: float) -> Table:
    """The costliest groups, and the share of what is left out."""
    columns = {
        what: Form.TEXT, "": Form.FIGURE, "share": Form.SHARE, "forward": Form.SECONDS, "backward": Form.SECONDS,
        "work": Form.FLOPS, "kept": Form.BYTES, "parameters": Form.COUNT,
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for group in groups[:most_rows]:
        count = group.nodes if what == "operator" else group.count
        named = f"{group.name}{' (fallback)' if group.fallback_nodes else ''}", f"x{count}" if count > 1 else ""
        times = (group.total_s / whole_s if whole_s else "", group.forward_s, group.backward_s)
        work = group.forward_flops + group.backward_flops
        rows.append((*named, *times, work or None, group.saved_bytes or None, group.parameters or None))
    rest = groups[most_rows:]
    if rest:
        share = sum(g.total_s for g in rest) / whole_s if whole_s else 0.0
        rows.append((f"{len(rest)} more", "", share, *[""] * 5))
    return table(columns, rows)


def _coverage(costs: CostReport) -> Section:
    found = costs.coverage
    priced = f"{found.rule} by rule"
    if found.fallback:
        names = ", ".join(f"{op} x{count}" for op, count in found.fallback.items())
        priced += f", {sum(found.fallback.values())} by fallback ({names})"
    line = (
        f"coverage  {found.total} nodes: {priced}, {found.plumbing} plumbing, {found.folded} folded, {found.dead} dead"
    )
    notes = (
        f"{note.level.value}: {note.message}" + (f" ({note.where})" if note.where else "")
        for note in costs.notes
        if note.code != NO_RULE
    )
    return Section(lines=(line,), items=tuple(notes))


def _nodes(graph: Graph, profile: Profile) -> Iterator[Mapping[str, Cell]]:
    """Every node with its figures, of a product its number format; saved bytes are its own, shared ones included."""
    for i, node in enumerate(graph.nodes):
        figures = {name: f"{float(getattr(profile, name)[i]):.9g}" for name in DATA[3:10]}
        saved = sum(item.byte_count for item in profile.saved[i])
        named: dict[str, Cell] = {"key": node.key, "op": node.op, "module": node.module}
        form = profile.formats[i] if profile.formats and profile.forward_flops[i] else ""
        yield {**named, **figures, "saved_bytes": saved, "origin": profile.origin[i].value, "format": form}

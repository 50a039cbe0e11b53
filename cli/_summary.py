"""A finished plan on one screen: what it is, its stages, what else was priced, what was assumed."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 132
"""Columns when the output is not a terminal."""
LIES = {
    "replicated": "whole on every rank",
    "sequence": "cut by the sequence",
    "batch": "cut by the batch",
    "free": "each in a layout of its own",
}
MOST_STAGES = 24
OPTIMAL = 1e-9
"""Gap below which a plan is called the best."""
MOST_ALTERNATIVES = 8
MOST_NOTES = 5


def print_summary(plan: Any, *, batch_given: bool, output: str | None, remark: str = "") -> None:  # noqa: ANN401
    """Render a plan for people, with a remark on its precision."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    _headline(console, plan, batch_given, remark)
    _stages(console, plan)
    _alternatives(console, plan)
    _remarks(console, plan)
    where = f"plan written to {escape(output)}" if output else "nothing written; add -o FILE to keep the plan"
    console.print(f"\n[dim]{where}[/dim]", soft_wrap=True)


def _headline(console: Console, plan: Any, batch_given: bool, remark: str) -> None:  # noqa: ANN401
    from rich.markup import escape

    from planner import format_seconds, has_closed_form

    predictions, batch = plan.predictions, plan.micro_batches
    seconds = predictions.simulated_iteration_s or predictions.iteration_s
    console.print(
        f"[bold]{escape(plan.model.name)}[/bold] ({_count(plan.model.parameters)} parameters) on "
        f"[bold]{escape(plan.hardware.name)}[/bold] ({plan.hardware.device_count} devices), "
        f"{plan.options.precision}{f' ({escape(remark)})' if remark else ''}, {plan.options.optimizer}"
    )
    assumed = "" if batch_given else " (assumed: none was given)"
    several = "es" if batch.count > 1 else ""
    console.print(
        f"global batch {batch.global_batch}{assumed} = {batch.count} micro-batch{several} of {batch.size}; "
        f"schedule {plan.schedule.name}; {_plural(len(plan.stages), 'stage')}, {_plural(plan.copies, 'copy')}"
    )
    _origin(console, plan)
    for line in dict.fromkeys(_shared(sharding) for sharding in plan.shardings):
        console.print(line, markup=False)
    console.print(
        f"[bold]{format_seconds(seconds)}[/bold] an iteration (simulated), "
        f"[bold]{batch.global_batch / seconds:,.4g} samples/s[/bold], bubble {predictions.bubble_fraction:.1%}"
    )
    bound, form = format_seconds(predictions.bound_s), format_seconds(predictions.iteration_s)
    if plan.system is not None:
        console.print(f"predicted {form}; its busiest device computes for {bound}\n")
        return
    proof = "proven optimal" if predictions.proven_optimal else f"best found, within {predictions.gap:.2%} of the bound"
    console.print(f"bound {bound}: {proof}" + (f"; closed form {form}" if has_closed_form(plan) else ""))
    if predictions.tried_bound_s is not None:
        gap = 1 - predictions.tried_bound_s / predictions.reached_s
        tried = "the best" if gap <= OPTIMAL else f"within {gap:.2%} of the best"
        console.print(f"of the ways to share operators that were tried: {tried}")
    if predictions.line_bound_s is not None:
        gap = 1 - predictions.line_bound_s / predictions.reached_s
        line = format_seconds(predictions.line_bound_s)
        known = "this is the best" if abs(gap) <= OPTIMAL else f"none is faster than {line}"
        console.print(f"of pipelines with one stage a worker: {known}")
    console.print()


def _shared(sharding: Any) -> str:  # noqa: ANN401
    """How the ranks of a group share the work; stages that do it alike may still place some tensors differently."""
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in sharding.axes)
    lies = dict.fromkeys(LIES.get(how, how) for how in sharding.boundaries)
    return (
        f"every operator shared by groups of {sharding.ranks} ranks: mesh {mesh}; "
        f"tensors between blocks {' and '.join(lies)}"
    )


def _origin(console: Console, plan: Any) -> None:  # noqa: ANN401
    """Whose rules chose the plan, and whether it changes what training means."""
    if plan.system is not None:
        console.print(f"by the rules of {plan.system.title} ({plan.system.source})")
    if plan.schedule.weight_policy != "sync":
        old, kept = max(plan.schedule.staleness, default=0), max(plan.schedule.versions, default=1)
        console.print(
            f"[bold]asynchronous[/bold]: gradients are up to {_plural(old, 'update')} old, "
            f"up to {_plural(kept, 'version')} of the weights are kept; the pipeline never drains"
        )


def _stages(console: Console, plan: Any) -> None:  # noqa: ANN401
    from rich.markup import escape
    from rich.table import Table

    from planner import format_bytes, format_seconds

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("modules", overflow="fold", min_width=18)
    table.add_column("ranks", no_wrap=True)
    shared = bool(plan.shardings)
    for name in (*(("tp",) if shared else ()), "forward", "backward", *(("inside",) if shared else ()), "transfer",
                 "sync", "memory", "of"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("options")
    for stage, figures in list(zip(plan.stages, plan.predictions.stages, strict=True))[:MOST_STAGES]:
        options = [*(["recompute"] if stage.recompute else []), *([f"ZeRO-{stage.zero}"] if stage.zero else [])]
        mark = " <" if stage.index == plan.predictions.bottleneck and len(plan.stages) > 1 else ""
        table.add_row(
            f"{stage.index}{mark}",
            escape(", ".join(stage.modules)),
            _ranks(stage.ranks) if stage.group_ranks == 1 else _groups(stage.replicas),
            *((str(stage.group_ranks),) if shared else ()),
            format_seconds(figures.forward_s),
            format_seconds(figures.backward_s),
            *((format_seconds(_inside_s(plan, stage)),) if shared else ()),
            format_seconds(figures.receive_s + figures.return_s),
            format_seconds(figures.exposed_sync_s),
            format_bytes(figures.memory.total_bytes),
            format_bytes(figures.capacity_bytes),
            ", ".join(options),
        )
    console.print(table)
    if len(plan.stages) > MOST_STAGES:
        console.print(f"[dim]... and {len(plan.stages) - MOST_STAGES} more stages[/dim]")
    if len(plan.stages) > 1 or shared:
        once = "sync" + (" and inside, communication among the tp ranks of a group," if shared else ":")
        pace = "; < sets the pace" if len(plan.stages) > 1 else ""
        console.print(f"[dim]times a micro-batch ({once} an iteration){pace}[/dim]")


def _alternatives(console: Console, plan: Any) -> None:  # noqa: ANN401
    from rich.table import Table

    from planner import format_bytes, format_seconds, why_not

    if not plan.alternatives:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("also priced", no_wrap=True)
    table.add_column("shape")
    for name in ("iteration", "slower", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(plan.alternatives, key=lambda a: (bool(a.infeasible), plan.compared_s(a)[1] or math.inf))
    for other in order[:MOST_ALTERNATIVES]:
        own_s, other_s = plan.compared_s(other)
        slower = "-" if other_s is None else f"{other_s / own_s - 1:+.1%}"
        price = "-" if other_s is None else format_seconds(other_s)
        if other.infeasible:
            price, slower = why_not(other.infeasible), "-"
        table.add_row(other.label, other.summary, price, slower, format_bytes(other.memory_bytes))
    console.print()
    console.print(table)


def _remarks(console: Console, plan: Any) -> None:  # noqa: ANN401
    coverage = plan.coverage
    text = (
        f"{coverage.total} operators: {coverage.by_rule} priced by rule, {coverage.by_fallback} by fallback, "
        f"{coverage.plumbing} plumbing, {coverage.folded} folded, {coverage.dead} dead"
    )
    if coverage.fallback_ops:
        names = ", ".join(f"{op} x{n}" for op, n in coverage.fallback_ops.items())
        text += f" (fallback: {names})"
    console.print(f"\n{text}", markup=False)
    warnings = [n for n in plan.notes if n.level == "warning"]
    for note in warnings[:MOST_NOTES]:
        console.print(f"warning: {note.where + ': ' if note.where else ''}{note.message}", markup=False, style="yellow")
    left = len(plan.notes) - min(len(warnings), MOST_NOTES)
    if left:
        console.print(f"[dim]{_plural(left, 'more import note')} in the plan (`shardplan explain`)[/dim]")


def _inside_s(plan: Any, stage: Any) -> float:  # noqa: ANN401
    """Seconds of communication inside a group in an iteration, recomputation's included."""
    once, again = plan.inside_s(stage.index)
    count: int = plan.micro_batches.count // len(stage.replicas)
    return count * float(once + again)


def _groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """`0-7 8-15`, or the ends of a long list of groups."""
    shown = [_ranks(group) for group in groups]
    return " ".join(shown if len(shown) <= 2 else [shown[0], "..", shown[-1]])


def _ranks(ranks: tuple[int, ...]) -> str:
    """`0-7`, `0 8 16 24`, or the ends of a long list."""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(r) for r in ranks]
    return " ".join(shown if len(shown) <= 4 else [*shown[:3], "..", shown[-1]])


def _count(number: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{suffix}"
    return f"{number:,.0f}"


def _plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"

"""Write a plan as one self-contained HTML page: headline, charts, tables of the explanation. It loads nothing."""

from __future__ import annotations

import pkgutil
import re
import zipfile
from io import BytesIO

from planner.escaping import html, script_json
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan
from planner.plans.explain import explain
from planner.report import page_charts
from planner.report.explanation import explanation_report
from planner.report.tables import Form, Section, Table
from planner.report.timeline import MOST_ROWS
from planner.simulate import simulate
from planner.simulate.segments import fewer_rows, rows, segments, windows
from planner.simulate.timeline import fullest_lanes
from planner.space.pricer import Pricer

FOCUSED_FORWARDS = 40
"""Number of typical forwards in the timeline's first view; a step of up to twice as many is shown in full."""
BUTTONS = {
    "s": "Steady state", "0": "Whole step", "Home": "Start", "End": "End", "ArrowLeft": "←", "ArrowRight": "→",
    "+": "+", "-": "−",
}  # fmt: skip
"""Labels of the buttons that move the timeline, by the key with the same effect."""
HINT = "Drag to move, Ctrl or Alt with the wheel to zoom; with the chart in focus the keys ← → + − 0 s do the same."


def plan_page(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, *, lacking: str = "") -> str:
    """The page as HTML text; the same plan gives the same bytes.

    Args:
        plan: the plan.
        graph: its model; with graph and cluster the page has a roofline of the costliest operators.
        cluster: its hardware.
        lacking: why graph and cluster are missing, shown in place of the roofline.

    Raises:
        PlanError: the plan's parts contradict each other.
        UsageError: the plan is for another model or cluster.
    """
    pricer = None if graph is None or cluster is None else Pricer(graph, cluster, plan.options)
    size = plan.micro_batches.size
    explanation = explain(plan) if pricer is None else explain(plan, pricer.graph_at(size), cluster)
    timeline = simulate(plan)
    parts = segments(timeline)
    grouped = fewer_rows(rows(timeline, parts), MOST_ROWS)
    spans = windows(timeline, 2 * FOCUSED_FORWARDS, int(FOCUSED_FORWARDS / 0.4))
    focus, lanes = spans[len(spans) // 2], fullest_lanes(timeline)
    charts = [
        page_charts.model_chart(plan),
        page_charts.timeline_chart(timeline, grouped, parts, focus),
        page_charts.memory_chart(timeline, lanes, focus),
        page_charts.time_chart(explanation.step),
        page_charts.kinds_chart(explanation.step),
        page_charts.alternatives_chart(plan, explanation.rivals, explanation.step),
    ]
    if pricer is not None:
        ranks = max(stage.group_ranks for stage in plan.stages)
        charts.append(
            page_charts.roofline_chart(
                pricer.graph_at(size), pricer.profiles(size)[0], pricer.cluster.devices[0], ranks
            )
        )
    shown = [*map(_figure, charts), *([_missing(lacking)] if pricer is None else [])]
    specs = {chart.name: chart.spec for chart in charts}
    first, *others = explanation_report(explanation).sections
    about, details = ((*first.lines, *others[0].lines), others[1:]) if plan.headline else ((), others)
    contents = {
        "title": html(plan.headline.subject if plan.headline else f"{plan.model.name} on {plan.hardware.name}"),
        "about": "".join(f'<p class="quiet">{html(line)}</p>' for line in about),
        "tiles": "".join(map(_tile, plan.headline.figures if plan.headline else ())),
        "figures": "\n".join(shown),
        "details": "\n".join(map(_details, details)),
        "specs": script_json({**specs, "zoom": {"focus": focus, "end": timeline.played_s}}),
        "library": _library(),
    }
    page = (pkgutil.get_data(__name__, "page.html") or b"").decode()
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: contents[mark[1]], page)


def _tile(figure: str) -> str:
    """A figure, its number large: `39.9 of 79.2 GiB`."""
    large, _, rest = figure.partition(" ")
    unit = re.match(r"(s|ms|us|min|h|d)\b", rest)
    if unit:
        large, rest = f"{large} {unit[0]}", f"a step {rest[unit.end() :]}"
    return f"<div><b>{html(large)}</b>{html(rest)}</div>"


def _figure(chart: page_charts.Chart) -> str:
    """A chart under its heading, with the buttons that move the timeline."""
    buttons = "".join(f'<button value="{key}">{html(word)}</button>' for key, word in BUTTONS.items())
    bar = f'<div id="zoom">{buttons}</div><p class="quiet">{HINT}</p>' if chart.name == "timeline" else ""
    zoom = ' data-zoom tabindex="0"' if chart.zoom else ""
    return (
        f"<figure{' class=half' if chart.half else ''}><h2>{html(chart.heading)}</h2>"
        f"<figcaption>{html(chart.caption)}</figcaption>{bar}"
        f'<div class="chart" id="{chart.name}" role="img" aria-label="{html(chart.caption)}"{zoom}></div></figure>'
    )


def _missing(reason: str) -> str:
    """The figure in place of the roofline if that cannot be drawn."""
    hint = "The roofline of the operators needs the model and the hardware: add --model and --hardware."
    named = f" Those that the plan names were not taken: {reason}" if reason else ""
    return f'<figure class="half"><h2>Roofline</h2><figcaption>{html(hint + named)}</figcaption></figure>'


def _details(section: Section) -> str:
    """A section of the explanation, with its table."""
    told = "".join(f"<p>{html(line)}</p>" for line in section.lines)
    items = "".join(f"<li>{html(item)}</li>" for item in section.items)
    shown = _table(section.table) if section.table else ""
    opened = " open" if section.heading in ("Assumptions", "Not modelled") else ""
    heading = f"<summary><h2>{html(section.heading)}</h2></summary>"
    return f"<details{opened}>{heading}{told}{f'<ul>{items}</ul>' if items else ''}{shown}</details>"


def _table(table: Table) -> str:
    """A table without its bars, since the column beside them has the figure."""
    kept = [(at, name, form) for at, (name, form) in enumerate(table.columns.items()) if form is not Form.BAR]
    classes = [' class="figure"' if form.to_the_right else "" for _, _, form in kept]
    head = "".join(f"<th{look}>{html(name)}</th>" for look, (_, name, _) in zip(classes, kept, strict=True))
    rows = (
        "".join(f"<td{look}>{html(texts[at])}</td>" for look, (at, _, _) in zip(classes, kept, strict=True))
        for texts in table.texts()
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _library() -> str:
    """Script elements with Vega, Vega-Lite and Vega-Embed, and their licence."""
    with zipfile.ZipFile(BytesIO(pkgutil.get_data(__name__, "vega.zip") or b"")) as bundle:
        files = {name: bundle.read(name).decode() for name in bundle.namelist()}
    scripts = (text.partition("//# sourceMappingURL")[0] for name, text in files.items() if name.endswith(".js"))
    return "\n".join([f"<!--\n{files['LICENSE']}-->", *(f"<script>{text}</script>" for text in scripts)])

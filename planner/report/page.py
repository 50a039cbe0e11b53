"""A plan as one page of HTML that stands alone: headline, charts, and the explanation's tables; nothing is fetched."""

from __future__ import annotations

import json
import pkgutil
import re
import zipfile
from collections.abc import Iterator
from html import escape
from io import BytesIO

from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan
from planner.plans.explain import Explanation, explain
from planner.report.explanation import explanation_report
from planner.report.page_charts import Chart, alternatives_chart, model_chart, roofline_chart
from planner.report.page_timeline import kinds_chart, memory_chart, time_chart, timeline_chart
from planner.report.tables import Form, Section, Table
from planner.report.timeline_svg import MOST_ROWS
from planner.simulate import simulate
from planner.simulate.segments import fewer_rows, rows, segments, windows
from planner.simulate.timeline import fullest_lanes
from planner.space.pricer import Pricer

FOCUSED_FORWARDS = 40
"""Typical forwards that the timeline shows at first; a step of up to twice as many is shown as a whole."""
BUTTONS = {
    "s": "Steady state", "0": "Whole step", "Home": "Start", "End": "End", "ArrowLeft": "←", "ArrowRight": "→",
    "+": "+", "-": "−",
}  # fmt: skip
"""What moves the timeline: a button, and the key that does the same."""
HINT = "Drag to move, Ctrl or Alt with the wheel to zoom; with the chart in focus the keys ← → + − 0 s do the same."


def plan_page(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, *, lacking: str = "") -> str:
    """The page as text; the same plan gives the same bytes.

    Args:
        plan: what is shown.
        graph: its model; with the cluster the page has the roofline of the costliest operators.
        cluster: its hardware.
        lacking: why graph and cluster are not given, said in the roofline's place.

    Raises:
        PlanError: the plan's parts contradict each other.
        UsageError: the plan is for another model or cluster.
    """
    explanation = explain(plan)
    timeline = simulate(plan)
    parts = segments(timeline)
    grouped = fewer_rows(rows(timeline, parts), MOST_ROWS)
    spans = windows(timeline, 2 * FOCUSED_FORWARDS, int(FOCUSED_FORWARDS / 0.4))
    focus, lanes = spans[len(spans) // 2], fullest_lanes(timeline)
    charts = [
        model_chart(plan),
        timeline_chart(timeline, grouped, parts, focus),
        memory_chart(timeline, lanes, focus),
        time_chart(timeline, grouped, parts),
        kinds_chart(plan, lanes),
        alternatives_chart(plan, explanation.rivals),
    ]
    if graph is not None and cluster is not None:
        pricer, size = Pricer(graph, cluster, plan.options), plan.micro_batches.size
        ranks = max(stage.group_ranks for stage in plan.stages)
        explanation = explain(plan, pricer.graph_at(size), cluster)
        charts.append(roofline_chart(pricer.graph_at(size), pricer.profiles(size)[0], cluster.devices[0], ranks))
    shown = [*map(_figure, charts), *([_missing(lacking)] if graph is None or cluster is None else [])]
    specs = {chart.name: chart.spec for chart in charts}
    page = (pkgutil.get_data(__name__, "page.html") or b"").decode()
    for mark, content in {
        "title": escape(plan.headline.subject if plan.headline else f"{plan.model.name} on {plan.hardware.name}"),
        "about": _about(explanation),
        "tiles": "".join(map(_tile, plan.headline.figures if plan.headline else ())),
        "figures": "\n".join(shown),
        "details": "\n".join(_details(explanation)),
        "specs": json.dumps({**specs, "zoom": {"focus": focus, "end": timeline.played_s}}).replace("<", "\\u003c"),
        "library": _library(),
    }.items():
        page = page.replace(f"{{{{{mark}}}}}", content)
    return page


def _about(explanation: Explanation) -> str:
    """The plan's shape, and what is proven of it."""
    first, verdict = explanation_report(explanation).sections[:2] if explanation.headline else (Section(), Section())
    return "".join(f'<p class="quiet">{escape(line)}</p>' for line in (*first.lines, *verdict.lines))


def _tile(figure: str) -> str:
    """A figure, its number large: `39.9 of 79.2 GiB`."""
    large, _, rest = figure.partition(" ")
    unit = re.match(r"(s|ms|us|min|h|d)\b", rest)
    if unit:
        large, rest = f"{large} {unit[0]}", f"a step {rest[unit.end() :]}"
    return f"<div><b>{escape(large)}</b>{escape(rest)}</div>"


def _figure(chart: Chart) -> str:
    """A chart under its heading, with the buttons that move the timeline."""
    buttons = "".join(f'<button value="{key}">{escape(word)}</button>' for key, word in BUTTONS.items())
    bar = f'<div id="zoom">{buttons}</div><p class="quiet">{HINT}</p>' if chart.name == "timeline" else ""
    zoom = ' data-zoom tabindex="0"' if chart.zoom else ""
    return (
        f"<figure{' class=half' if chart.half else ''}><h2>{escape(chart.heading)}</h2>"
        f"<figcaption>{escape(chart.caption)}</figcaption>{bar}"
        f'<div class="chart" id="{chart.name}" role="img" aria-label="{escape(chart.caption)}"{zoom}></div></figure>'
    )


def _missing(reason: str) -> str:
    """What stands in the place of the roofline where it cannot be drawn."""
    hint = "The roofline of the operators needs the model and the hardware: add --model and --hardware."
    named = f" Those that the plan names were not taken: {reason}" if reason else ""
    return f'<figure class="half"><h2>Roofline</h2><figcaption>{escape(hint + named)}</figcaption></figure>'


def _details(explanation: Explanation) -> Iterator[str]:
    """All figures as tables, and what was assumed: the explanation, section by section."""
    for section in explanation_report(explanation).sections[2 if explanation.headline else 1 :]:
        told = "".join(f"<p>{escape(line)}</p>" for line in section.lines)
        items = "".join(f"<li>{escape(item)}</li>" for item in section.items)
        shown = _table(section.table) if section.table else ""
        opened = " open" if section.heading in ("Assumptions", "Not modelled") else ""
        heading = f"<summary><h2>{escape(section.heading)}</h2></summary>"
        yield f"<details{opened}>{heading}{told}{f'<ul>{items}</ul>' if items else ''}{shown}</details>"


def _table(table: Table) -> str:
    """A table; its bars are left out, since a column beside them has the figure."""
    kept = [(at, name, form) for at, (name, form) in enumerate(table.columns.items()) if form is not Form.BAR]
    classes = [' class="figure"' if form.to_the_right else "" for _, _, form in kept]
    head = "".join(f"<th{look}>{escape(name)}</th>" for look, (_, name, _) in zip(classes, kept, strict=True))
    rows = (
        "".join(f"<td{look}>{escape(texts[at])}</td>" for look, (at, _, _) in zip(classes, kept, strict=True))
        for texts in table.texts()
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as scripts of the page, under their licence."""
    with zipfile.ZipFile(BytesIO(pkgutil.get_data(__name__, "vega.zip") or b"")) as bundle:
        files = {name: bundle.read(name).decode() for name in bundle.namelist()}
    scripts = (text.partition("//# sourceMappingURL")[0] for name, text in files.items() if name.endswith(".js"))
    return "\n".join([f"<!--\n{files['LICENSE']}-->", *(f"<script>{text}</script>" for text in scripts)])

"""Charts of a plan as Vega-Lite specifications: its blocks, what else was priced, the roofline of its operators.

Every figure is read off the plan or the prices of its operators. A chart is as wide as the place that it stands in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.costs import Profile
from planner.graph import Graph
from planner.hardware.types import Device
from planner.plans import Plan
from planner.plans.explain import Rival
from planner.report.scales import time_ticks
from planner.simulate import rank_ranges
from planner.units import format_seconds, plural

Spec = dict[str, Any]

GIB = 1 << 30
LIMIT, POINT = "#dd3333", "#4477aa"
STAGE_COLOURS = {"domain": list(range(20)), "scheme": "tableau20"}
LETTERS = 170
"""Letters that stand beside each other over a row of blocks on a wide screen."""
MOST_OPERATORS = 40


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the page: its name there, heading, what it shows in words, its specification, and how it lies.

    `half` lets two charts stand beside each other; `zoom` says that it shows a part of the time of a step.
    """

    name: str
    heading: str
    caption: str
    spec: Spec
    half: bool = False
    zoom: bool = False


def number(field: str, **more: Any) -> Spec:  # noqa: ANN401
    """A channel for a field of numbers, without a title where none is given."""
    return {"field": field, "type": "quantitative", "title": None, **more}


def word(field: str, **more: Any) -> Spec:  # noqa: ANN401
    """A channel for a field of words, in the order of the rows."""
    return {"field": field, "type": "nominal", "title": None, "sort": None, **more}


def tips(*fields: str) -> list[Spec]:
    """What is shown when a mark is pointed at."""
    return [{"field": field, "type": "nominal"} for field in fields]


def layer(mark: str, encoding: Spec, /, *, rows: Iterable[Spec] | None = None, **looks: Any) -> Spec:  # noqa: ANN401
    """One layer of a chart, over rows of its own where they are given."""
    own = {} if rows is None else {"data": {"values": list(rows)}}
    return {**own, "mark": {"type": mark, "tooltip": None, **looks}, "encoding": encoding}


def sized(spec: Spec, height: int) -> Spec:
    """A specification as wide as its place."""
    return {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}, **spec}


def limits(capacities_bytes: Iterable[int]) -> list[Spec]:
    """Broken lines at what devices may hold."""
    return [
        layer("rule", {"y": {"datum": size / GIB}}, rows=[{}], color=LIMIT, strokeDash=[5, 4])
        for size in sorted(set(capacities_bytes))
    ]


def row_axis(names: Iterable[str], **more: Any) -> Spec:  # noqa: ANN401
    """An axis as wide as the longest of some names of rows, so that charts below each other begin at one place."""
    wide = 14 + 6 * max(map(len, names))
    return {"labelPadding": 6, "ticks": False, "minExtent": wide, "maxExtent": wide, **more}


def row_label(stages: Sequence[int]) -> str:
    """`stage 2`, or the first of many: `stage 0 (+15)`."""
    return f"stage {stages[0]}{f' (+{len(stages) - 1})' if len(stages) > 1 else ''}"


def model_chart(plan: Plan) -> Chart:
    """The model's blocks in order, a row for each worker of a pipeline, coloured by stage."""
    cells: list[Spec] = []
    runs: list[Spec] = []
    filled: dict[str, int] = {}
    for stage in plan.stages:
        row = row_label(plan.stages_of(stage.ranks[0]))
        name = ", ".join(map(_short_name, stage.modules))
        runs.append({"row": row, "at": filled.get(row, 0), "cells": stage.blocks[1] - stage.blocks[0], "name": name})
        for block in plan.block_table[slice(*stage.blocks)]:
            at = filled[row] = filled.get(row, 0) + 1
            elements = sum(p.elements for p in block.parameters if p.trainable and not p.tied_to)
            cell = {"row": row, "at": at - 1, "to": at, "block": block.name, "stage": stage.index}
            cell |= {"parameters": f"{elements:,}", "operators": len(block.nodes), "ranks": rank_ranges(stage.ranks)}
            cells.append({**cell, "colour": stage.index % 20})
    most = max(filled.values())
    for run in runs:
        run["name"] = _shortened(run["name"], LETTERS * run["cells"] // most)
    y = word("row", axis=row_axis(filled), scale={"paddingInner": 0.45, "paddingOuter": 0.4})
    x = number("at", axis=None, scale={"domain": [0, most], "nice": False})
    colour = {"field": "colour", "type": "ordinal", "scale": STAGE_COLOURS, "legend": None}
    tip = tips("block", "stage", "ranks", "parameters", "operators")
    blocks = {"y": y, "x": x, "x2": {"field": "to"}, "color": colour, "tooltip": tip}
    narrow = {"condition": {"test": "width < 640", "value": 0}, "value": 1}
    names = {"y": y, "x": x, "text": {"field": "name"}, "opacity": narrow}
    height = 40 if len(filled) <= 12 else 28
    layers = [
        layer("rect", blocks, rows=cells, stroke="#8888", strokeWidth=0.5, cornerRadius=2),
        layer("text", names, rows=runs, align="left", dx=1, dy=-6 - 0.27 * height, fontSize=10),
    ]
    caption = f"{plural(len(cells), 'block')} in {plural(len(plan.stages), 'stage')}, coloured by stage."
    caption += " Point at a block for its weights and ranks."
    return Chart("model", "The model", caption, sized({"layer": layers}, height * len(filled)))


def alternatives_chart(plan: Plan, rivals: Sequence[Rival]) -> Chart:
    """Time against memory of the plan and of what else was priced."""
    predictions = plan.predictions
    held = plan.headline.memory_bytes if plan.headline else max(s.memory.total_bytes for s in predictions.stages)
    rows = [_priced("this plan", "this plan", predictions.reached_s, held)]
    for rival, other in zip(rivals, plan.alternatives, strict=True):
        if rival.iteration_s is not None:
            kind = "cannot run" if rival.infeasible else "other plans"
            told = {"shape": rival.summary, "differs": "; ".join(rival.infeasible or rival.differs)}
            rows.append(_priced(rival.label, kind, rival.iteration_s, other.memory_bytes) | told)
    _name_apart(rows, "seconds", "memory")
    times = [row["seconds"] for row in rows]
    span = max(max(times) / min(times), 1.2) ** 0.12
    low, high = min(times) / span, max(times) * span**3
    ticks = {f"{tick:g}": format_seconds(tick).removesuffix(" 0 s") for tick in time_ticks(low, high)}
    axis = {"values": [float(tick) for tick in ticks], "labelExpr": "ticks[datum.value]", "labelOverlap": True}
    log = {"type": "log", "nice": False}
    x = number("seconds", title="time of a step", axis=axis, scale={**log, "domain": [low, high]})
    y = number("memory", title="GiB of the fullest device", axis={"format": "~s", "tickCount": 4}, scale=log)
    colours = {"domain": ["this plan", "other plans", "cannot run"], "range": ["#2563eb", "#8a94a3", LIMIT]}
    tip = tips("name", "shape", "time", "holds", "differs")
    layers = [
        *limits(stage.capacity_bytes for stage in predictions.stages),
        layer("point", {"x": x, "y": y, "color": word("kind", scale=colours), "tooltip": tip}, filled=True, size=110),
        layer("text", {"x": x, "y": y, "text": {"field": "label"}}, align="left", dx=9, fontSize=10),
    ]
    left = sum(rival.iteration_s is None for rival in rivals)
    unpriced = f" {plural(left, 'more')} cannot run, and have no time; the table below says why." if left else ""
    caption = f"Time of a step against memory, both logarithmic; the red line is what a plan may fill.{unpriced}"
    spec = {"data": {"values": rows}, "params": [{"name": "ticks", "value": ticks}], "layer": layers}
    return Chart("alternatives", "What else was priced", caption, sized(spec, 260), half=True)


def _priced(name: str, kind: str, seconds: float, memory_bytes: int) -> Spec:
    """A point of the chart of alternatives, whose scales have no zero."""
    memory_bytes = max(memory_bytes, 1)
    figures = {"seconds": seconds, "memory": memory_bytes / GIB}
    told = {"time": format_seconds(seconds), "holds": f"{memory_bytes / GIB:.3g} GiB"}
    return {"name": name, "kind": kind, **figures, **told}


def roofline_chart(graph: Graph, prices: Profile, device: Device, ranks: int) -> Chart:
    """Work a second of the costliest operators' forward against their work a byte, under the device's roofs.

    Args:
        graph: the model at the micro-batch of the prices.
        prices: of its operators on one device.
        device: the device.
        ranks: ranks that share an operator: each does an equal part of its work and traffic.
    """
    rows = sorted(_operators(graph, prices, ranks), key=lambda row: -row["share"])[:MOST_OPERATORS]
    _name_apart(rows, "intensity", "rate")
    byte_per_s = device.memory_byte_per_s
    used = {form: device.matrix_flop_per_s.get(form, 0.0) for form in dict.fromkeys(prices.formats)}
    peaks = {form: peak for form, peak in used.items() if peak}
    ends = [*(row["intensity"] for row in rows), *(peak / byte_per_s for peak in peaks.values())] or [1.0]
    low, high = min(ends) / 5, max(ends) * 3
    roofs = [
        {"format": form, "intensity": at, "rate": min(peak, at * byte_per_s)}
        for form, peak in peaks.items()
        for at in (low, peak / byte_per_s, high)
    ]
    looks = {"axis": {"format": "~s", "tickCount": 4, "labelOverlap": True}}
    log = {"type": "log", "nice": False}
    x = number("intensity", title="flop a byte of device memory", scale={**log, "domain": [low, high]}, **looks)
    y = number("rate", title="flop/s", scale=log, **looks)
    size = number("share", legend=None, scale={"range": [30, 900]})
    tip = tips("operator", "module", "alike", "part", "does", "lasts")
    layers = [
        layer("line", {"x": x, "y": y, "detail": {"field": "format"}}, rows=roofs, strokeDash=[5, 4], color=LIMIT),
        layer("point", {"x": x, "y": y, "size": size, "tooltip": tip}, filled=True, opacity=0.75, color=POINT),
        layer("text", {"x": x, "y": y, "text": {"field": "label"}}, align="left", dx=11, fontSize=10),
    ]
    split = f", of which each of {ranks} ranks does a part" if ranks > 1 else ""
    heights = ", ".join(f"{peak / 1e12:,.4g} Tflop/s in {form}" for form, peak in peaks.items())
    top = max(peaks.values(), default=math.inf)
    above = any(row["rate"] > min(top, row["intensity"] * byte_per_s) for row in rows)
    caption = (
        f"The costliest operators' forward{split}, larger where more of the time goes; those shown have "
        f"products of matrices and take {sum(row['share'] for row in rows):.0%} of it. The roofs: "
        f"{byte_per_s / 1e12:.3g} TB/s, {heights}."
        + " Masked attention counts in full, and may lie above a roof."
        * above
    )
    return Chart("roofline", "Roofline", caption, sized({"data": {"values": rows}, "layer": layers}, 260), half=True)


def _operators(graph: Graph, prices: Profile, ranks: int) -> Iterator[Spec]:
    """Operators with products of matrices on one of some ranks, those of the same figures as one."""
    forward_s, backward_s = prices.at(1 / ranks)
    both_s = forward_s + backward_s
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if prices.forward_flops[i] > 0 and prices.moved_bytes[i] > 0 and forward_s[i] > 0:
            figures = (prices.forward_flops[i], prices.moved_bytes[i], f"{forward_s[i]:.6e}")
            alike.setdefault((_short_name(node.module) or node.op, node.op, *figures), []).append(i)
    for (name, operator, *_), members in alike.items():
        first, module = members[0], graph.nodes[members[0]].module
        rate = float(prices.forward_flops[first] / ranks / forward_s[first])
        share = float(both_s[members].sum() / both_s.sum())
        intensity = float(prices.forward_flops[first] / prices.moved_bytes[first])
        told = {"part": f"{share:.1%}", "does": f"{rate / 1e12:.4g} Tflop/s", "lasts": format_seconds(forward_s[first])}
        named = {"name": name, "operator": operator, "module": module}
        yield {**named, "alike": len(members), "share": share, "intensity": intensity, "rate": rate, **told}


def _name_apart(rows: Sequence[Spec], x: str, y: str) -> None:
    """Write names beside points, but not where the name of a point before would be covered.

    Both scales are logarithmic; a name takes a fourth of the points' span to the right, and a twentieth upwards.
    """
    places = [(math.log(row[x]), math.log(row[y])) for row in rows]
    spans = [max(each) - min(each) for each in zip(*places, strict=True)]
    named: list[tuple[float, float]] = []
    for row, (right, up) in zip(rows, places, strict=True):
        wide, high = spans[0] / 4 + 0.05, spans[1] / 20 + 0.05
        free = all(abs(right - other) > wide or abs(up - above) > high for other, above in named)
        named += [(right, up)] if free else []
        row["label"] = row["name"] if free else ""


def _short_name(module: str) -> str:
    """The last part of a path, with the one before where it is only a number: `q_proj`, `layers.0-17`."""
    return ".".join(module.split(".")[-2 if module[-1:].isdigit() else -1 :])


def _shortened(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…" if letters > 2 else ""

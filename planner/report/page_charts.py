"""Charts of a plan as Vega-Lite specifications: blocks by stage, alternatives, roofline of operators.

Every figure comes from the plan or from the costs of its operators. A chart fills the width of its container.
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
from planner.report.svg import time_ticks
from planner.simulate import rank_ranges
from planner.units import format_number, format_seconds, plural

Spec = dict[str, Any]

GIB = 1 << 30
LIMIT, POINT = "#dd3333", "#4477aa"
STAGE_COLOURS = {"domain": list(range(20)), "scheme": "tableau20"}
LETTERS = 170
"""Letters that fit above a row of blocks on a wide screen."""
MOST_OPERATORS = 40


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the page.

    Attributes:
        name: identifier of its element.
        heading: its heading.
        caption: what it shows, in words.
        spec: the Vega-Lite specification.
        half: true to place two charts side by side.
        zoom: true if the chart shows a window of the time of a step.
    """

    name: str
    heading: str
    caption: str
    spec: Spec
    half: bool = False
    zoom: bool = False


def number(field: str, **more: Any) -> Spec:  # noqa: ANN401
    """An encoding channel for numbers, by default without a title."""
    return {"field": field, "type": "quantitative", "title": None, **more}


def word(field: str, **more: Any) -> Spec:  # noqa: ANN401
    """An encoding channel for words, in the order of the rows."""
    return {"field": field, "type": "nominal", "title": None, "sort": None, **more}


def tips(*fields: str) -> list[Spec]:
    """Tooltip channels for some fields."""
    return [{"field": field, "type": "nominal"} for field in fields]


def layer(mark: str, encoding: Spec, /, *, rows: Iterable[Spec] | None = None, **looks: Any) -> Spec:  # noqa: ANN401
    """One layer of a chart, with its own data if `rows` are given."""
    data = {} if rows is None else {"data": {"values": list(rows)}}
    return {**data, "mark": {"type": mark, "tooltip": None, **looks}, "encoding": encoding}


def sized(spec: Spec, height: int) -> Spec:
    """A specification that fills the width of its container."""
    return {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}, **spec}


def limits(capacities_bytes: Iterable[int]) -> list[Spec]:
    """Dashed lines at the capacities of devices."""
    return [
        layer("rule", {"y": {"datum": size / GIB}}, rows=[{}], color=LIMIT, strokeDash=[5, 4])
        for size in sorted(set(capacities_bytes))
    ]


def row_axis(names: Iterable[str], **more: Any) -> Spec:  # noqa: ANN401
    """An axis as wide as the longest row name, so that charts below each other are aligned."""
    width = 14 + 6 * max(map(len, names))
    return {"labelPadding": 6, "ticks": False, "minExtent": width, "maxExtent": width, **more}


def row_label(stages: Sequence[int]) -> str:
    """Label of a row: `stage 2`, or for several stages `stage 0 (+15)`."""
    return f"stage {stages[0]}{f' (+{len(stages) - 1})' if len(stages) > 1 else ''}"


def model_chart(plan: Plan) -> Chart:
    """The model's blocks in order, coloured by stage, with a row for each worker of a pipeline."""
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
    longest_row = max(filled.values())
    for run in runs:
        run["name"] = _shortened(run["name"], LETTERS * run["cells"] // longest_row)
    y = word("row", axis=row_axis(filled), scale={"paddingInner": 0.45, "paddingOuter": 0.4})
    x = number("at", axis=None, scale={"domain": [0, longest_row], "nice": False})
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
    """Step time against memory of the plan and its alternatives."""
    predictions = plan.predictions
    plan_bytes = plan.headline.memory_bytes if plan.headline else max(s.memory.total_bytes for s in predictions.stages)
    rows = [_priced("this plan", "this plan", predictions.reached_s, plan_bytes)]
    for rival, other in zip(rivals, plan.alternatives, strict=True):
        if rival.iteration_s is not None:
            kind = "cannot run" if rival.infeasible else "other plans"
            texts = {"shape": rival.summary, "differs": "; ".join(rival.infeasible or rival.differs)}
            rows.append(_priced(rival.label, kind, rival.iteration_s, other.memory_bytes) | texts)
    _name_apart(rows, "seconds", "memory")
    low, high = _padded([row["seconds"] for row in rows], 0.12, 0.36)
    capacities = [stage.capacity_bytes for stage in predictions.stages]
    held = _padded([*(row["memory"] for row in rows), *(capacity / GIB for capacity in capacities)], 0.06, 0.06)
    ticks = {f"{tick:g}": format_seconds(tick).removesuffix(" 0 s") for tick in time_ticks(low, high)}
    axis = {"values": [float(tick) for tick in ticks], "labelExpr": "ticks[datum.value]", "labelOverlap": True}
    log = {"type": "log", "nice": False}
    x = number("seconds", title="time of a step", axis=axis, scale={**log, "domain": [low, high]})
    height = {**log, "domain": list(held)}
    y = number("memory", title="GiB of the fullest device", axis={"format": "~s", "tickCount": 4}, scale=height)
    colours = {"domain": ["this plan", "other plans", "cannot run"], "range": ["#2563eb", "#8a94a3", LIMIT]}
    tip = tips("name", "shape", "time", "holds", "differs")
    layers = [
        *limits(capacities),
        layer("point", {"x": x, "y": y, "color": word("kind", scale=colours), "tooltip": tip}, filled=True, size=110),
        layer("text", {"x": x, "y": y, "text": {"field": "label"}}, align="left", dx=9, fontSize=10),
    ]
    unpriced = sum(rival.iteration_s is None for rival in rivals)
    caption = "Time of a step against memory, both logarithmic; the red line is what a plan may fill."
    if unpriced:
        caption += f" {plural(unpriced, 'more')} cannot run, and have no time; the table below says why."
    spec = {"data": {"values": rows}, "params": [{"name": "ticks", "value": ticks}], "layer": layers}
    return Chart("alternatives", "What else was priced", caption, sized(spec, 260), half=True)


def _padded(values: Sequence[float], below: float, above: float) -> tuple[float, float]:
    """Ends of a logarithmic axis, beyond the values by shares of their span."""
    span = max(max(values) / min(values), 1.2)
    return min(values) / span**below, max(values) * span**above


def _priced(name: str, kind: str, seconds: float, memory_bytes: int) -> Spec:
    """A point of the chart of alternatives; memory is at least one byte, since the scale is logarithmic."""
    memory_bytes = max(memory_bytes, 1)
    figures = {"seconds": seconds, "memory": memory_bytes / GIB}
    texts = {"time": format_seconds(seconds), "holds": f"{memory_bytes / GIB:.3g} GiB"}
    return {"name": name, "kind": kind, **figures, **texts}


def roofline_chart(graph: Graph, prices: Profile, device: Device, ranks: int) -> Chart:
    """Roofline: FLOP/s of the costliest operators' forward against their FLOP per byte, under the device's peaks.

    Args:
        graph: the model at the micro-batch of the prices.
        prices: costs of its operators on one device.
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
    heights = ", ".join(f"{format_number(peak / 1e12)} Tflop/s in {form}" for form, peak in peaks.items())
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
    """Operators with matrix products on one of the ranks; operators with equal figures share a row."""
    forward_s, backward_s = prices.at(1 / ranks)
    operator_s = forward_s + backward_s
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if prices.forward_flops[i] > 0 and prices.moved_bytes[i] > 0 and forward_s[i] > 0:
            figures = (prices.forward_flops[i], prices.moved_bytes[i], f"{forward_s[i]:.6e}")
            groups.setdefault((_short_name(node.module) or node.op, node.op, *figures), []).append(i)
    for (name, operator, *_), members in groups.items():
        first, module = members[0], graph.nodes[members[0]].module
        rate = float(prices.forward_flops[first] / ranks / forward_s[first])
        share = float(operator_s[members].sum() / operator_s.sum())
        intensity = float(prices.forward_flops[first] / prices.moved_bytes[first])
        texts = {
            "part": f"{share:.1%}",
            "does": f"{rate / 1e12:.4g} Tflop/s",
            "lasts": format_seconds(forward_s[first]),
        }
        named = {"name": name, "operator": operator, "module": module}
        yield {**named, "alike": len(members), "share": share, "intensity": intensity, "rate": rate, **texts}


def _name_apart(rows: Sequence[Spec], x: str, y: str) -> None:
    """Set the label of each row to its name, or to "" where it would cover the label of an earlier row.

    Both scales are logarithmic; a label takes a fourth of the points' span in width and a twentieth in height.
    """
    places = [(math.log(row[x]), math.log(row[y])) for row in rows]
    spans = [max(each) - min(each) for each in zip(*places, strict=True)]
    labelled: list[tuple[float, float]] = []
    for row, (right, up) in zip(rows, places, strict=True):
        label_width, label_height = spans[0] / 4 + 0.05, spans[1] / 20 + 0.05
        is_free = all(abs(right - other) > label_width or abs(up - above) > label_height for other, above in labelled)
        labelled += [(right, up)] if is_free else []
        row["label"] = row["name"] if is_free else ""


def _short_name(module: str) -> str:
    """Last part of a module path, with the one before it if it ends in a digit: `q_proj`, `layers.0-17`."""
    return ".".join(module.split(".")[-2 if module[-1:].isdigit() else -1 :])


def _shortened(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…" if letters > 2 else ""

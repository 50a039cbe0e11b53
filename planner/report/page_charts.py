"""Charts of a plan as Vega-Lite specifications: blocks by stage, alternatives, roofline of operators; of its
simulation: timeline of workers, memory over time, time and memory by kind.

Every figure comes from the plan, its simulation or the costs of its operators. A chart fills the width of its
container. Charts over the time of a step show the window between their parameters `begin` and `end`, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.costs import Profile
from planner.graph import Graph
from planner.hardware.types import Device
from planner.plans import Plan
from planner.plans.explain import Rival
from planner.plans.figures import GIB
from planner.play.memory import MemoryCurve
from planner.report.svg import time_ticks
from planner.report.timeline import COLOURS, busiest
from planner.schedules.program import KINDS
from planner.simulate import rank_ranges
from planner.simulate.segments import ACTIVITIES, WORK, Activity, Row, Segments, lanes_label
from planner.simulate.timeline import Lane, Timeline
from planner.space.steps import Part, StepView, WorkerView
from planner.sums import float_sum
from planner.units import format_bytes, format_number, format_seconds, plural

Spec = dict[str, Any]

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


def alternatives_chart(plan: Plan, rivals: Sequence[Rival], step: StepView) -> Chart:
    """Step time against memory of the plan and its alternatives."""
    predictions = plan.predictions
    rows = [_priced("this plan", "this plan", predictions.reached_s, round(step.fullest.memory.total))]
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
    caption = (
        f"The costliest operators' forward{split}, larger where more of the time goes; those shown have "
        f"products of matrices and take {float_sum(row['share'] for row in rows):.0%} of it. The roofs: "
        f"{byte_per_s / 1e12:.3g} TB/s, {heights}."
    )
    return Chart("roofline", "Roofline", caption, sized({"data": {"values": rows}, "layer": layers}, 260), half=True)


def _operators(graph: Graph, prices: Profile, ranks: int) -> Iterator[Spec]:
    """Operators with matrix products on one of the ranks; operators with equal figures share a row."""
    forward_s, backward_s = prices.at(1 / ranks)
    operator_s, executed_flops = forward_s + backward_s, prices.executed_flops()[0]
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if prices.forward_flops[i] > 0 and prices.moved_bytes[i] > 0 and forward_s[i] > 0:
            figures = (prices.forward_flops[i], prices.moved_bytes[i], f"{forward_s[i]:.6e}")
            groups.setdefault((_short_name(node.module) or node.op, node.op, *figures), []).append(i)
    for (name, operator, *_), members in groups.items():
        first, module = members[0], graph.nodes[members[0]].module
        rate = float(executed_flops[first] / ranks / forward_s[first])
        share = float(operator_s[members].sum() / operator_s.sum())
        intensity = float(executed_flops[first] / prices.moved_bytes[first])
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


MOST_STRETCHES, MOST_STEPS = 16_000, 12_000
"""Limits on the segments of a timeline and the steps of memory curves; beyond them a chart is drawn coarser."""
CELLS = 400
"""Cells of a timeline row and of a memory curve that are drawn coarser."""
IDLE = "#9aa3b044"
KINDS_OF_MEMORY = {
    "weights": "#4477aa", "gradients": "#66ccee", "optimizer": "#aa3377", "activations": "#228833",
    "workspace": "#ccbb44", "reserve": "#999999",
}  # fmt: skip
PART_COLOURS = {
    str(part).partition(" (")[0].removesuffix(", not hidden").removesuffix(" not hidden"): colour
    for part, colour in {
        Part.FORWARD: COLOURS[Activity.FORWARD],
        Part.BACKWARD: COLOURS[Activity.BACKWARD],
        Part.RECOMPUTE: COLOURS[Activity.RECOMPUTE],
        Part.UPDATE: COLOURS[Activity.UPDATE],
        Part.GROUP: COLOURS[Activity.INSIDE],
        Part.GROUP_SUM: "#332288",
        Part.TRANSFER: COLOURS[Activity.COMMUNICATION],
        Part.PASS_EXCHANGE: "#882255",
        Part.HOST: "#999933",
        Part.SYNC: COLOURS[Activity.SYNC],
        Part.TIED: "#aa4499",
        Part.WAITING: IDLE,
    }.items()
}
"""Colours by short names of the parts of a step, in their order; those of the timeline where it shows them."""


def timeline_chart(timeline: Timeline, grouped: Sequence[Row], parts: Segments, focus: tuple[float, float]) -> Chart:
    """Activities of the workers of one pipeline over time; with many segments, coarser outside the focus.

    Args:
        timeline: the simulated plan.
        grouped: the rows to draw.
        parts: the timeline's segments.
        focus: first and last second of the initial view.
    """
    segments_by_row = [parts.of(row[0].worker) for row in grouped]
    many = sum(len(row_segments.worker) for row_segments in segments_by_row) > MOST_STRETCHES
    exact = focus if many else (0.0, timeline.played_s)
    lines = ["row,code,begin,end,kind,stage,number"]
    for at, mine in enumerate(segments_by_row):
        lines += [*_stretches(timeline, at, mine, exact), *(_cells(timeline, at, mine, exact) if many else ())]
    used = [ACTIVITIES[code] for code in np.unique(parts.activity)]
    lasts = "datum.end - datum.begin"
    action = "datum.kind ? datum.kind + ' of micro-batch ' + datum.number + ' in stage ' + datum.stage : 'mostly'"
    computed = {"activity": "activities[datum.code]", "ranks": "names[datum.row]", "action": action}
    computed |= {"starts": _seconds("datum.begin"), "lasts": _seconds(lasts)}
    labels = [row_label(row[0].stages) for row in grouped]
    y = word("row", axis=row_axis(labels, labelExpr="labels[datum.value]"))
    colour = word("activity", scale={"domain": used, "range": [COLOURS[row_segments] for row_segments in used]})
    tip = tips("activity", "action", "starts", "lasts", "ranks")
    bars = {"y": y, "x": _time("begin"), "x2": {"field": "end"}, "color": colour, "tooltip": tip}
    has_room = f"datum.code < {len(WORK)} && ({lasts}) / (end - begin) * width > 18"
    middle = {"calculate": "(datum.begin + datum.end) / 2", "as": "middle"}
    numbers = layer("text", {"y": y, "x": _time("middle"), "text": {"field": "number"}}, clip=True, fontSize=10)
    numbers["mark"]["color"] = "#fff"
    spec = _over_time(lines, "row,code,begin,end", focus)
    spec["params"] += [
        {"name": "activities", "value": list(ACTIVITIES)},
        {"name": "names", "value": [lanes_label(row) for row in grouped]},
        {"name": "labels", "value": labels},
    ]
    spec["transform"] = [{"filter": "datum.end > begin && datum.begin < end"}, *_calculated(computed)]
    spec["layer"] = [layer("rect", bars, clip=True), {**numbers, "transform": [{"filter": has_room}, middle]}]
    caption = _caption(timeline, grouped, many)
    return Chart("timeline", "The timeline", caption, sized(spec, _height(len(grouped))), zoom=True)


def _caption(timeline: Timeline, grouped: Sequence[Row], many: bool) -> str:
    """The caption: what the timeline shows and leaves out."""
    replicas, count = len(grouped[0]), timeline.micro_batches
    words = [f"{timeline.schedule}, {count} micro-batch{'es' if count > 1 else ''}; a step takes"]
    words.append(f"{format_seconds(timeline.step_s)}.")
    words += [f"One of {timeline.copies} copies is shown."] * (timeline.copies > 1)
    words += [f"A row stands for {plural(replicas, 'replica')} that do the same."] * (replicas > 1)
    shown = sum(len(row) for row in grouped)
    words += ["Of replicas that take turns the first is shown."] * (len(timeline.lanes) > shown)
    inside = "Communication inside a group goes on all through an action and is drawn at its end."
    words += [inside] * bool(timeline.inside_s.any())
    words += ["Outside the steady state only what fills most of a cell is drawn."] * many
    return " ".join(words)


def memory_chart(timeline: Timeline, lanes: Sequence[Lane], focus: tuple[float, float]) -> Chart:
    """Memory of a device of each stage over time, with its capacity."""
    many = sum(len(lane.memory.time_s) for lane in lanes) > MOST_STEPS
    lines = ["lane,time,held"]
    for at, lane in enumerate(lanes):
        steps = _steps(lane.memory, timeline.played_s, focus if many else (0.0, timeline.played_s))
        lines += [f"{at},{t:.7g},{b / GIB:.5g}" for t, b in zip(*(each.tolist() for each in steps), strict=True)]
    fullest = max(lanes, key=lambda lane: lane.memory.peak_bytes - lane.capacity_bytes)
    top = max(max(lane.capacity_bytes, lane.memory.peak_bytes) for lane in lanes) / GIB
    names = [row_label(lane.stages) for lane in lanes]
    axis = row_axis(names, labelExpr="datum.label + ' GiB'", tickCount=5)
    colour = {"field": "colour", "type": "ordinal", "scale": STAGE_COLOURS, "legend": None}
    curve: Spec = {
        "x": _time("time"),
        "y": number("held", axis=axis, scale={"domain": [0, top * 1.05]}),
        "color": colour,
    }
    curve |= {"detail": {"field": "lane"}, "tooltip": tips("stage", "since", "holds")}
    computed = {"colour": "datum.lane % 20", "stage": "names[datum.lane]", "since": _seconds("datum.time")}
    computed["holds"] = "format(datum.held, '.3~f') + ' GiB'"
    drawn = layer("line", curve, interpolate="step-after", clip=True, strokeWidth=1.5)
    spec = _over_time(lines, "lane,time,held", focus)
    spec["params"].append({"name": "names", "value": names})
    spec["layer"] = [{**drawn, "transform": _calculated(computed)}, *limits(lane.capacity_bytes for lane in lanes)]
    caption = (
        f"The fullest device of each stage over the same time. The fullest, in {row_label(fullest.stages)}, holds "
        f"{format_bytes(fullest.memory.peak_bytes)} of the {format_bytes(fullest.capacity_bytes)} that a plan may fill."
    )
    return Chart("memory", "Memory over time", caption, sized(spec, 190), zoom=True)


def time_chart(step: StepView) -> Chart:
    """Time of a step of each device by part, all its stages together."""
    rows = {
        _device_label(step, worker): dict(zip(PART_COLOURS, map(worker.sum_of, Part), strict=True))
        for worker in step.workers
    }
    caption = f"A step of a device, in parts: they add up to {format_seconds(step.iteration_s)}."
    return Chart("time", "Where the time goes", caption, _bars(rows, PART_COLOURS, "s"), half=True)


def kinds_chart(step: StepView) -> Chart:
    """Memory of each device by kind, all its stages together."""
    rows = {
        _device_label(step, worker): {kind: getattr(worker.memory, kind) / GIB for kind in KINDS_OF_MEMORY}
        for worker in step.workers
    }
    spec = _bars(rows, KINDS_OF_MEMORY, "GiB")
    capacities = [{"row": _device_label(step, w), "capacity": w.capacity_bytes / GIB} for w in step.workers]
    ticks = {"y": spec["layer"][0]["encoding"]["y"], "x": number("capacity", title="GiB")}
    spec["layer"].append(layer("tick", ticks, rows=capacities, color=LIMIT, thickness=2))
    caption = "The fullest device of each stage at its highest; the red line is what a plan may fill."
    return Chart("kinds", "What fills memory", caption, spec, half=True)


def _device_label(step: StepView, worker: WorkerView) -> str:
    """Label of a device's row; of several with the same stages and other work, with their number."""
    alike = [other for other in step.workers if other.stages == worker.stages]
    number = f" #{alike.index(worker) + 1}" if len(alike) > 1 else ""
    return row_label(worker.stages) + number


def _stretches(timeline: Timeline, row: int, mine: Segments, span: tuple[float, float]) -> Iterable[str]:
    """CSV lines of the segments inside a window, with kind, stage and micro-batch of their action."""
    program = timeline.trace.program
    for at in np.flatnonzero((mine.end_s > span[0]) & (mine.begin_s < span[1])).tolist():
        action = int(mine.action[at])
        what = f"{KINDS[program.kind[action]]},{program.stage[action]},{program.micro_batch[action]}"
        yield f"{row},{mine.activity[at]},{mine.begin_s[at]:.7g},{mine.end_s[at]:.7g},{what}"


def _cells(timeline: Timeline, row: int, mine: Segments, exact: tuple[float, float]) -> Iterable[str]:
    """CSV lines of coarse cells before and after a window; neighbouring cells of one activity are merged."""
    for begin, end in ((0.0, exact[0]), (exact[1], timeline.played_s)):
        edges = np.linspace(begin, end, CELLS // 2 + 1)
        codes = busiest(mine, edges)
        starts = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
        for first, last in zip(starts, [*starts[1:], len(codes)], strict=True):
            if ACTIVITIES[codes[first]] is not Activity.IDLE:
                yield f"{row},{codes[first]},{edges[first]:.7g},{edges[last]:.7g},,,"


def _steps(curve: MemoryCurve, played_s: float, exact: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Times and bytes of a curve: all steps inside a window, the maximum of each cell outside it."""
    inside = (curve.time_s >= exact[0]) & (curve.time_s <= exact[1])
    cell = np.where(inside, CELLS + np.cumsum(inside), (curve.time_s / played_s * CELLS).astype(int))
    order = np.lexsort((-curve.held_bytes, cell))
    kept = np.sort(order[np.flatnonzero(np.diff(cell[order], prepend=-1))])
    time_s, held = curve.time_s[kept], curve.held_bytes[kept]
    return np.append(time_s, played_s), np.append(held, held[-1])


def _bars(rows: Mapping[str, dict[str, float]], colours: dict[str, str], unit: str) -> Spec:
    """A stacked bar for each row."""
    values = [
        {"row": row, "kind": kind, "size": size, "order": order}
        for row, sizes in rows.items()
        for order, (kind, size) in enumerate(sizes.items())
    ]
    kinds_present = {value["kind"] for value in values if value["size"]}
    scale = {
        "domain": [k for k in colours if k in kinds_present],
        "range": [c for k, c in colours.items() if k in kinds_present],
    }
    bars: Spec = {"y": word("row", axis=row_axis(rows)), "x": number("size", title=unit, stack="zero")}
    bars |= {"color": word("kind", scale=scale), "order": {"field": "order"}, "tooltip": tips("row", "kind", "part")}
    part = _calculated({"part": f"format(datum.size, '.4~g') + ' {unit}'"})
    return sized({"data": {"values": values}, "layer": [{**layer("bar", bars), "transform": part}]}, _height(len(rows)))


def _over_time(lines: Sequence[str], numeric: str, focus: tuple[float, float]) -> Spec:
    """A specification with CSV data over the time of a step and the window in view as parameters."""
    form = {"type": "csv", "parse": dict.fromkeys(numeric.split(","), "number")}
    window = [{"name": "begin", "value": focus[0]}, {"name": "end", "value": focus[1]}]
    return {"data": {"values": "\n".join(lines), "format": form}, "params": window}


def _time(field: str) -> Spec:
    """A horizontal channel for the time inside the window in view."""
    scale = {"domain": [{"expr": "begin"}, {"expr": "end"}], "nice": False, "zero": False}
    axis = {"labelExpr": "format(datum.value, '~s') + 's'", "labelOverlap": True, "grid": False, "tickCount": 8}
    return number(field, scale=scale, axis=axis)


def _calculated(fields: Mapping[str, str]) -> list[Spec]:
    return [{"calculate": expression, "as": field} for field, expression in fields.items()]


def _seconds(expression: str) -> str:
    """A Vega expression that formats seconds: `12.34ms`."""
    return f"format({expression}, '.4s') + 's'"


def _height(rows: int) -> int:
    return rows * (24 if rows <= 20 else 16)

"""Charts of a simulated plan: timeline of workers, memory over time, time and memory by kind.

Charts over the time of a step show the window between their parameters `begin` and `end`, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner.plans import Plan
from planner.play.memory import MemoryCurve
from planner.report.page_charts import (
    GIB,
    LIMIT,
    STAGE_COLOURS,
    Chart,
    Spec,
    layer,
    limits,
    number,
    row_axis,
    row_label,
    sized,
    tips,
    word,
)
from planner.report.timeline import COLOURS, busiest
from planner.schedules.program import KINDS
from planner.simulate.segments import ACTIVITIES, WORK, Activity, Row, Segments
from planner.simulate.timeline import Lane, Timeline
from planner.units import format_bytes, format_seconds, plural

MOST_STRETCHES, MOST_STEPS = 16_000, 12_000
"""Limits on the segments of a timeline and the steps of memory curves; beyond them a chart is drawn coarser."""
CELLS = 400
"""Cells of a timeline row and of a memory curve that are drawn coarser."""
IDLE = "#9aa3b044"
KINDS_OF_MEMORY = {
    "weights": "#4477aa", "gradients": "#66ccee", "optimizer": "#aa3377", "reserve": "#999999",
    "activations and work space": "#228833",
}  # fmt: skip


def timeline_chart(timeline: Timeline, grouped: Sequence[Row], parts: Segments, focus: tuple[float, float]) -> Chart:
    """Activities of the workers of one pipeline over time; with many segments, coarser outside the focus.

    Args:
        timeline: the simulated plan.
        grouped: the rows to draw.
        parts: the timeline's segments.
        focus: first and last second of the initial view.
    """
    segments_by_row = [parts.of(row.lanes[0].worker) for row in grouped]
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
    labels = [row_label(row.lanes[0].stages) for row in grouped]
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
        {"name": "names", "value": [row.label for row in grouped]},
        {"name": "labels", "value": labels},
    ]
    spec["transform"] = [{"filter": "datum.end > begin && datum.begin < end"}, *_calculated(computed)]
    spec["layer"] = [layer("rect", bars, clip=True), {**numbers, "transform": [{"filter": has_room}, middle]}]
    caption = _caption(timeline, grouped, many)
    return Chart("timeline", "The timeline", caption, sized(spec, _height(len(grouped))), zoom=True)


def _caption(timeline: Timeline, grouped: Sequence[Row], many: bool) -> str:
    """The caption: what the timeline shows and leaves out."""
    replicas, count = len(grouped[0].lanes), timeline.micro_batches
    words = [f"{timeline.schedule}, {count} micro-batch{'es' if count > 1 else ''}; a step takes"]
    words.append(f"{format_seconds(timeline.step_s)}.")
    words += [f"One of {timeline.copies} copies is shown."] * (timeline.copies > 1)
    words += [f"A row stands for {plural(replicas, 'replica')} that do the same."] * (replicas > 1)
    shown = sum(len(row.lanes) for row in grouped)
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


def time_chart(timeline: Timeline, grouped: Sequence[Row], parts: Segments) -> Chart:
    """Time of a step by worker and activity."""
    rows = {row_label(row.lanes[0].stages): seconds_by_activity(timeline, row.lanes[0], parts) for row in grouped}
    caption = f"A step of a device, in parts: they add up to {format_seconds(timeline.step_s)}."
    spec = _bars(rows, {str(activity): colour for activity, colour in {**COLOURS, Activity.IDLE: IDLE}.items()}, "s")
    return Chart("time", "Where the time goes", caption, spec, half=True)


def seconds_by_activity(timeline: Timeline, lane: Lane, parts: Segments) -> dict[str, float]:
    """Seconds of a step that a worker spends on each activity; of paired actions only the first counts."""
    program, mine = timeline.trace.program, parts.of(lane.worker)
    lasts = np.where(program.paired[mine.action], 0.0, mine.end_s - mine.begin_s)
    share = timeline.iterations * (2 if program.work.shared else 1)
    sums = np.bincount(mine.activity, lasts, len(ACTIVITIES)) / share
    seconds_of = {
        str(activity): float(seconds) for activity, seconds in zip(ACTIVITIES, sums, strict=True) if seconds > 0
    }
    return {**seconds_of, Activity.IDLE: max(0.0, timeline.step_s - sum(seconds_of.values()))}


def kinds_chart(plan: Plan, lanes: Sequence[Lane]) -> Chart:
    """Peak memory of the fullest device of each stage, by kind."""
    rows = {row_label(lane.stages): dict(zip(KINDS_OF_MEMORY, _held(plan, lane), strict=True)) for lane in lanes}
    spec = _bars(rows, KINDS_OF_MEMORY, "GiB")
    capacities = [{"row": row_label(lane.stages), "capacity": lane.capacity_bytes / GIB} for lane in lanes]
    ticks = {"y": spec["layer"][0]["encoding"]["y"], "x": number("capacity", title="GiB")}
    spec["layer"].append(layer("tick", ticks, rows=capacities, color=LIMIT, thickness=2))
    caption = "The fullest device of each stage at its highest; the red line is what a plan may fill."
    return Chart("kinds", "What fills memory", caption, spec, half=True)


def _held(plan: Plan, lane: Lane) -> tuple[float, ...]:
    """GiB by kind; weights are the rest of what is held at the start, activations what is added at the peak."""
    stage_memory = [plan.predictions.stages[stage].memory for stage in lane.stages]
    gradients, optimizer = sum(m.gradients_bytes for m in stage_memory), sum(m.optimizer_bytes for m in stage_memory)
    reserve, start = max(m.reserve_bytes for m in stage_memory), float(lane.memory.held_bytes[0])
    weights, activations = start - gradients - optimizer - reserve, lane.memory.peak_bytes - start
    return tuple(size / GIB for size in (weights, gradients, optimizer, reserve, activations))


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

"""Elements of timeline pictures and traces: segments of one activity, rows of identical workers, windows of time.

Traces are Trace Event JSON, which chrome://tracing and ui.perfetto.dev open. A process is a stage (or the stages of one
worker), a thread is a rank, and memory is a counter of its process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from planner.schedules import ActionKind
from planner.schedules.program import KINDS, Code
from planner.simulate.timeline import Lane, Timeline

WINDOWS = ("start", "steady state", "end")
WINDOW_SHARES = (0.3, 0.4, 0.3)
"""Parts of an iteration that a clipped picture shows, and the fraction of its width for each."""


class Activity(StrEnum):
    """Activity of a worker; the value is its label."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WEIGHT_GRAD = "weight gradient"
    INSIDE = "communication inside a group"
    COMMUNICATION = "communication"
    SYNC = "synchronisation"
    UPDATE = "update"
    IDLE = "idle"


ACTIVITIES = tuple(Activity)
"""Activities by code: `Segments.activity` holds indices into this."""

WORK = ACTIVITIES[: ACTIVITIES.index(Activity.INSIDE)]
"""Activities of one micro-batch, which come first in `ACTIVITIES`."""

_OF_KIND = {
    ActionKind.FORWARD: Activity.FORWARD,
    ActionKind.BACKWARD: Activity.BACKWARD,
    ActionKind.INPUT_GRAD: Activity.BACKWARD,
    ActionKind.WEIGHT_GRAD: Activity.WEIGHT_GRAD,
    ActionKind.SYNC: Activity.SYNC,
    ActionKind.UPDATE: Activity.UPDATE,
    ActionKind.RECOMPUTE: Activity.RECOMPUTE,
    ActionKind.LAUNCH_SYNC: Activity.SYNC,
}
"""Activity by kind of action; kinds left out move tensors, which is communication."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of time in which a worker does one activity, sorted by worker and time; it waits between them.

    Attributes:
        worker: int64 [segments], ascending.
        begin_s, end_s: float64 [segments].
        activity: int8 [segments], index into `ACTIVITIES`.
        action: int64 [segments], the action of the trace that the segment belongs to.
    """

    worker: np.ndarray
    begin_s: np.ndarray
    end_s: np.ndarray
    activity: np.ndarray
    action: np.ndarray

    def of(self, worker: int) -> Segments:
        """The segments of one worker."""
        low, high = np.searchsorted(self.worker, [worker, worker + 1])
        return self.pick(slice(int(low), int(high)))

    def pick(self, chosen: slice | np.ndarray) -> Segments:
        """Some of the segments."""
        columns = (self.worker, self.begin_s, self.end_s, self.activity, self.action)
        return Segments(*(column[chosen] for column in columns))


def segments(timeline: Timeline) -> Segments:
    """Split each action into communication, recomputation and work; O(actions).

    Communication inside a group happens between the operators of an action; it is drawn at the action's end.
    """
    trace, program = timeline.trace, timeline.trace.program
    codes = np.array([ACTIVITIES.index(_OF_KIND.get(kind, Activity.COMMUNICATION)) for kind in KINDS], np.int8)
    work = codes[program.kind]
    repeats = (program.kind == Code.BACKWARD) | (program.kind == Code.INPUT_GRAD)
    recompute_s = np.where(repeats, np.asarray(timeline.recompute_s)[program.stage], 0.0)
    worked = np.maximum(trace.compute_end_s - timeline.inside_s[program.kind, program.stage], trace.compute_start_s)
    repeated = np.minimum(trace.compute_start_s + recompute_s, worked)
    edges = (trace.start_s, trace.compute_start_s, repeated, worked, trace.compute_end_s, trace.end_s)
    communication, recompute, inside = (
        np.full_like(work, ACTIVITIES.index(activity_kind))
        for activity_kind in (Activity.COMMUNICATION, Activity.RECOMPUTE, Activity.INSIDE)
    )
    begin = np.stack(edges[:-1], axis=1).ravel()
    end = np.stack(edges[1:], axis=1).ravel()
    activity = np.stack([communication, recompute, work, inside, communication], axis=1).ravel()
    action = np.repeat(np.arange(len(work)), 5)
    all_segments = Segments(np.repeat(program.worker, 5), begin, end, activity, action)
    return all_segments.pick(np.flatnonzero(end > begin))


Row = tuple[Lane, ...]
"""Lanes with identical segments, drawn once."""


def lanes_label(row: Row) -> str:
    """`stage 2  ranks 4-7`."""
    ranks = sorted({rank for lane in row for rank in lane.ranks})
    return f"stage {rank_ranges(row[0].stages)}  {'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"


def rows(timeline: Timeline, parts: Segments) -> tuple[Row, ...]:
    """Lanes grouped by stage and equal times, in order of their first worker; O(segments)."""
    groups: dict[tuple[tuple[int, ...], bytes, bytes], list[Lane]] = {}
    scale = 1e9 / timeline.played_s if timeline.played_s > 0 else 1.0
    for lane in timeline.lanes:
        lane_parts = parts.of(lane.worker)
        when = np.rint(np.concatenate([lane_parts.begin_s, lane_parts.end_s]) * scale).astype(np.int64)
        groups.setdefault((lane.stages, when.tobytes(), lane_parts.activity.tobytes()), []).append(lane)
    return tuple(map(tuple, groups.values()))


def fewer_rows(grouped: Sequence[Row], most: int) -> Sequence[Row]:
    """All rows; if there are more than `most`, only the first of each stage, since its replicas only differ in time."""
    if len(grouped) <= most:
        return grouped
    first_of_stage: dict[tuple[int, ...], Row] = {}
    for row in grouped:
        first_of_stage.setdefault(row[0].stages, row)
    return tuple(first_of_stage.values())


def windows(timeline: Timeline, most: int, clipped: int) -> tuple[tuple[float, float], ...]:
    """Windows (begin, end) in seconds to draw: the whole simulation, or its start, middle and end.

    A simulation longer than `most` typical forwards is clipped to the length of `clipped` forwards.
    """
    trace, step = timeline.trace, timeline.played_s
    durations = (trace.compute_end_s - trace.start_s)[trace.program.kind == Code.FORWARD]
    typical = float(np.median(durations)) if len(durations) else 0.0
    shown = max(clipped, 1) * typical
    if shown <= 0 or step <= max(shown, most * typical):
        return ((0.0, step),)
    first, middle, last = (share * shown for share in WINDOW_SHARES)
    return (0.0, first), ((step - middle) / 2, (step + middle) / 2), (step - last, step)


def rank_ranges(ranks: Iterable[int], most: int = 4) -> str:
    """`0-3,8-11`; of more than `most` ranges only the first, followed by the number of ranks."""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ordered), lambda at: at[1] - at[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ",".join(words) if len(words) <= most else ",".join([*words[:most], f"... ({len(ordered)})"])


_TRANSFERS = 1_000_000
"""Offset of a thread's number for the link into its worker."""


def trace_json(timeline: Timeline) -> str:
    """Trace Event JSON of one copy, times in microseconds; O(actions)."""
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(timeline))
    about = {
        "model": timeline.name,
        "schedule": timeline.schedule,
        "transfers": timeline.transfers.value,
        "step_s": timeline.step_s,
        "copies": timeline.copies,
    }
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{events}\n]}}\n'


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Trace events of all lanes: names, segments, transfers and memory."""
    trace, program = timeline.trace, timeline.trace.program
    parts = segments(timeline)
    transfers = np.flatnonzero(trace.transfer_end_s > trace.transfer_start_s)
    for lane in timeline.lanes:
        pid, tid = lane.stages[0], lane.ranks[0]
        yield from _names(lane, pid, tid)
        lane_parts = parts.of(lane.worker)
        for begin, end, code, action in zip(
            lane_parts.begin_s.tolist(),
            lane_parts.end_s.tolist(),
            lane_parts.activity.tolist(),
            lane_parts.action.tolist(),
            strict=True,
        ):
            activity = ACTIVITIES[code]
            yield _span(f"{program.label(action)} {activity}", activity.value, begin, end, pid, tid)
        incoming = transfers[program.worker[transfers] == lane.worker]
        if len(incoming):
            link = tid + _TRANSFERS
            yield _name("thread_name", pid, link, f"link into rank {tid}")
            for action in incoming.tolist():
                begin, end = float(trace.transfer_start_s[action]), float(trace.transfer_end_s[action])
                yield _span(f"to {program.label(action)}", "transfer", begin, end, pid, link)
        for time_s, held in zip(lane.memory.time_s.tolist(), lane.memory.held_bytes.tolist(), strict=True):
            yield {
                "name": f"memory of rank {tid}",
                "ph": "C",
                "ts": time_s * 1e6,
                "pid": pid,
                "args": {"bytes": round(held)},
            }


def _names(lane: Lane, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """Events that name a lane's process and thread."""
    stages = ", ".join(f"stage {stage}" for stage in lane.stages)
    copies = f" (also {rank_ranges(lane.ranks[1:])})" if len(lane.ranks) > 1 else ""
    yield _name("process_name", pid, tid, stages)
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": pid}}
    yield _name("thread_name", pid, tid, f"rank {tid}{copies}")


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """A metadata event."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, category: str, begin_s: float, end_s: float, pid: int, tid: int) -> dict[str, Any]:
    """A complete event with a duration."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": begin_s * 1e6,
        "dur": (end_s - begin_s) * 1e6,
        "pid": pid,
        "tid": tid,
    }

"""The timeline as Trace Event JSON, which chrome://tracing and ui.perfetto.dev open.

A process is a stage (or the stages of one worker), a thread a rank; memory is a counter of its process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.simulate.segments import ACTIVITIES, rank_ranges, segments
from planner.simulate.timeline import Lane, Timeline

_TRANSFERS = 1_000_000
"""Added to a thread's number for the link into its worker."""


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
    trace, program = timeline.trace, timeline.trace.program
    parts = segments(timeline)
    transfers = np.flatnonzero(trace.transfer_end_s > trace.transfer_start_s)
    for lane in timeline.lanes:
        pid, tid = lane.stages[0], lane.ranks[0]
        yield from _names(lane, pid, tid)
        mine = parts.of(lane.worker)
        for begin, end, code, action in zip(
            mine.begin_s.tolist(), mine.end_s.tolist(), mine.activity.tolist(), mine.action.tolist(), strict=True
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
    stages = ", ".join(f"stage {stage}" for stage in lane.stages)
    copies = f" (also {rank_ranges(lane.ranks[1:])})" if len(lane.ranks) > 1 else ""
    yield _name("process_name", pid, tid, stages)
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": pid}}
    yield _name("thread_name", pid, tid, f"rank {tid}{copies}")


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, category: str, begin_s: float, end_s: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": begin_s * 1e6,
        "dur": (end_s - begin_s) * 1e6,
        "pid": pid,
        "tid": tid,
    }

"""The timeline as plain data for JSON: totals, lanes, memory over time, comparison, but no single actions."""

from __future__ import annotations

from typing import Any

from planner.play.memory import MemoryCurve
from planner.simulate.comparison import Comparison
from planner.simulate.timeline import Lane, Timeline, fullest_lanes

FORMAT = "shardplan-timeline"


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """Dicts and lists of plain numbers; seconds and bytes. O(actions of one lane a stage)."""
    return {
        "format": FORMAT,
        "version": 1,
        "model": timeline.name,
        "schedule": timeline.schedule,
        "transfers": timeline.transfers.value,
        "copies": timeline.copies,
        "micro_batches_per_copy": timeline.micro_batches,
        "step_s": timeline.step_s,
        "step_is": timeline.cost.value,
        "iterations_played": timeline.iterations,
        "samples_per_s": timeline.samples_per_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_convention": timeline.bubble_convention,
        "fits": all(lane.fits for lane in timeline.lanes),
        "comparison": _comparison(timeline.comparison),
        "lanes": [_lane(lane) for lane in timeline.lanes],
        "memory": [_memory(lane.stages, lane.ranks[0], lane.memory) for lane in fullest_lanes(timeline)],
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "predicted_s": found.predicted_s,
        "closed_form_s": found.closed_form_s,
        "critical_s": found.critical_s,
        "simulated_s": found.simulated_s,
        "difference": found.difference,
        "effects": [{"name": e.name, "seconds": e.seconds, "meaning": e.meaning} for e in found.effects],
    }


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "ranks": list(lane.ranks),
        "stages": list(lane.stages),
        "compute_s": lane.compute_s,
        "communication_s": lane.communication_s,
        "idle_s": lane.idle_s,
        "in_flight": lane.in_flight,
        "peak_bytes": round(lane.memory.peak_bytes),
        "capacity_bytes": lane.capacity_bytes,
        "fits": lane.fits,
    }


def _memory(stages: tuple[int, ...], rank: int, curve: MemoryCurve) -> dict[str, Any]:
    return {
        "stages": list(stages),
        "rank": rank,
        "time_s": curve.time_s.tolist(),
        "held_bytes": [round(held) for held in curve.held_bytes.tolist()],
    }

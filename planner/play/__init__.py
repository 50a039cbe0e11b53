"""The event loop: orders of work and durations to times, memory over time and the pace of pipelines that never drain.

`run` gives the times of all actions, `measure_schedule` what a schedule takes and keeps with durations by
stage. Nothing here knows of plans or decisions; `planner.simulate` draws the timeline of a plan with it.
"""

from planner.play.engine import run
from planner.play.measure import Cost, Measurement, measure_orders, measure_schedule
from planner.play.memory import MemoryCurve, StageBytes, held_units, memory_curve, peak_in_flight
from planner.play.times import Conditions, StageTimes, Trace, Transfers

__all__ = [
    "Conditions",
    "Cost",
    "Measurement",
    "MemoryCurve",
    "StageBytes",
    "StageTimes",
    "Trace",
    "Transfers",
    "held_units",
    "measure_orders",
    "measure_schedule",
    "memory_curve",
    "peak_in_flight",
    "run",
]

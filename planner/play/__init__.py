"""The event loop: orders of work and durations to times, memory over time and the pace of pipelines that never drain.

`play` and `run` give the times of all actions, `measure_schedule` what a schedule takes and keeps with durations by
stage. Nothing here knows of plans or decisions; `planner.simulate` draws the timeline of a plan with it.
"""

from planner.play.engine import run
from planner.play.measure import Cost, Measurement, measure_orders, measure_schedule
from planner.play.memory import MemoryCurve, StageBytes, memory_curve
from planner.play.pipelines import bubble_fraction, play
from planner.play.times import Conditions, StageTimes, Transfers
from planner.play.trace import Trace
from planner.play.weights import version_curve

__all__ = [
    "Conditions",
    "Cost",
    "Measurement",
    "MemoryCurve",
    "StageBytes",
    "StageTimes",
    "Trace",
    "Transfers",
    "bubble_fraction",
    "measure_orders",
    "measure_schedule",
    "memory_curve",
    "play",
    "run",
    "version_curve",
]

"""The event simulation: from orders and durations to times, memory over time, and the period of continuous runs.

`run` gives the times of all actions; `measure_schedule` measures time and memory of a schedule. Nothing here knows of
plans or configurations; `planner.simulate` builds the timeline of a plan on top of it.
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

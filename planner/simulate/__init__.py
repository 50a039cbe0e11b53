"""Play a plan's schedule out in time and memory.

`play` and `simulate_decision` give the times of a pipeline described by numbers, `simulate` those of a plan with its
memory, bubble and a comparison with the plan's own prediction; `draw_gantt`, `draw_svg` and `trace_json` draw it.
"""

from planner.simulate.comparison import Comparison, Effect, closed_form_s
from planner.simulate.documents import timeline_document
from planner.simulate.engine import Conditions, StageTimes, Trace, Transfers, run
from planner.simulate.gantt import SYMBOLS, Gantt, draw_gantt
from planner.simulate.measure import Cost, Measurement, measure_orders, measure_schedule
from planner.simulate.memory import StageBytes
from planner.simulate.perfetto import trace_json
from planner.simulate.play import bubble_fraction, play, simulate_decision
from planner.simulate.segments import Activity, rank_ranges
from planner.simulate.svg import draw_svg
from planner.simulate.timeline import Lane, Timeline, simulate
from planner.simulate.weights import version_curve

simulate_plan = simulate
"""The same under a name that the front door can export: there `simulate` is this package."""

__all__ = [
    "SYMBOLS",
    "Activity",
    "Comparison",
    "Conditions",
    "Cost",
    "Effect",
    "Gantt",
    "Lane",
    "Measurement",
    "StageBytes",
    "StageTimes",
    "Timeline",
    "Trace",
    "Transfers",
    "bubble_fraction",
    "closed_form_s",
    "draw_gantt",
    "draw_svg",
    "measure_orders",
    "measure_schedule",
    "play",
    "rank_ranges",
    "run",
    "simulate",
    "simulate_decision",
    "simulate_plan",
    "timeline_document",
    "trace_json",
    "version_curve",
]

"""Play a plan's schedule out in time and memory.

`simulate` gives the timeline of a plan with its memory, bubble and a comparison with the plan's own prediction;
`draw_gantt`, `draw_svg` and `trace_json` draw it. The event loop itself is `planner.play`.
"""

from planner.simulate.comparison import Comparison, Effect, closed_form_s
from planner.simulate.gantt import SYMBOLS, Gantt, draw_gantt
from planner.simulate.perfetto import trace_json
from planner.simulate.segments import Activity, rank_ranges
from planner.simulate.svg import draw_svg
from planner.simulate.timeline import Lane, Timeline, simulate, timeline_document

simulate_plan = simulate
"""The same under a name that the front door can export: there `simulate` is this package."""

__all__ = [
    "SYMBOLS",
    "Activity",
    "Comparison",
    "Effect",
    "Gantt",
    "Lane",
    "Timeline",
    "closed_form_s",
    "draw_gantt",
    "draw_svg",
    "rank_ranges",
    "simulate",
    "simulate_plan",
    "timeline_document",
    "trace_json",
]

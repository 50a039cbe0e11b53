"""Simulate a plan in time and memory.

`simulate` gives the timeline of a plan with its memory, its bubble and a comparison with the plan's own prediction.
`timeline_document` and `trace_json` write it, `planner.report` draws it. The event loop itself is `planner.play`.
"""

from planner.simulate.comparison import Comparison, Effect, closed_form_s
from planner.simulate.segments import Activity, rank_ranges, trace_json
from planner.simulate.timeline import Lane, Timeline, simulate, timeline_document

simulate_plan = simulate
"""`simulate` under a name that `planner` can export, where `simulate` is this package."""

__all__ = [
    "Activity",
    "Comparison",
    "Effect",
    "Lane",
    "Timeline",
    "closed_form_s",
    "rank_ranges",
    "simulate",
    "simulate_plan",
    "timeline_document",
    "trace_json",
]

"""Simulate a plan in time and memory.

`simulate` gives the timeline of a plan with its memory, its bubble and a comparison with the plan's own prediction.
`timeline_document` and `trace_json` write it, `planner.report` draws it. The event loop itself is `planner.play`.
"""

from planner.simulate.comparison import closed_form_s as closed_form_s
from planner.simulate.segments import Activity as Activity
from planner.simulate.segments import rank_ranges as rank_ranges
from planner.simulate.segments import trace_json as trace_json
from planner.simulate.timeline import Timeline as Timeline
from planner.simulate.timeline import simulate as simulate
from planner.simulate.timeline import timeline_document as timeline_document

simulate_plan = simulate
"""`simulate` under a name that `planner` can export, where `simulate` is this package."""

"""Questions about plans: why not another choice, what makes one fit, how many devices it takes, what a change is worth.

The answers come from the search and the evaluation that also make plans; nothing here computes prices of its own.
"""

from planner.ask.choices import Fix, WhyNot, Worth, explain_why_not, find_fixes, find_worth
from planner.ask.sweeps import Store, SweepRow, points_of, read_axes, run_point, sweep
from planner.ask.targets import Minimised, Target, TargetAnswer, least_devices, read_target, sizes_of

__all__ = [
    "Fix",
    "Minimised",
    "Store",
    "SweepRow",
    "Target",
    "TargetAnswer",
    "WhyNot",
    "Worth",
    "explain_why_not",
    "find_fixes",
    "find_worth",
    "least_devices",
    "points_of",
    "read_axes",
    "read_target",
    "run_point",
    "sizes_of",
    "sweep",
]

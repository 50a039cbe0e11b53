"""Questions about plans: why not another choice, what makes one fit, how many devices it takes, what a change is worth.

The answers come from the search and the evaluation that also make plans; nothing here computes prices of its own.
"""

from planner.ask.choices import Fix, WhyNot, Worth, explain_why_not, find_fixes, find_worth, read_choice
from planner.ask.sweeps import SAMPLES_A_DEVICE, Store, SweepRow, points_of, read_axes, run_point, sweep
from planner.ask.targets import TargetAnswer, least_devices, read_target, sizes_of

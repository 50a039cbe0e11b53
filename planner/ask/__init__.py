"""Questions about plans: why not another choice, what makes one fit, how many devices it takes, what a change is worth.

The answers come from the search and the evaluation that also make plans; nothing here computes prices of its own.
"""

from planner.ask.choices import Fix as Fix
from planner.ask.choices import WhyNot as WhyNot
from planner.ask.choices import Worth as Worth
from planner.ask.choices import explain_why_not as explain_why_not
from planner.ask.choices import find_fixes as find_fixes
from planner.ask.choices import find_worth as find_worth
from planner.ask.choices import read_choice as read_choice
from planner.ask.sweeps import SAMPLES_A_DEVICE as SAMPLES_A_DEVICE
from planner.ask.sweeps import Store as Store
from planner.ask.sweeps import SweepRow as SweepRow
from planner.ask.sweeps import points_of as points_of
from planner.ask.sweeps import read_axes as read_axes
from planner.ask.sweeps import run_point as run_point
from planner.ask.sweeps import sweep as sweep
from planner.ask.targets import TargetAnswer as TargetAnswer
from planner.ask.targets import least_devices as least_devices
from planner.ask.targets import read_target as read_target
from planner.ask.targets import sizes_of as sizes_of

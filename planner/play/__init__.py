"""The event simulation: from orders and durations to times, memory over time, and the period of continuous runs.

`run` gives the times of all actions; `measure_schedule` measures time and memory of a schedule. Nothing here knows of
plans or configurations; `planner.simulate` builds the timeline of a plan on top of it.
"""

from planner.play.engine import run as run
from planner.play.measure import Cost as Cost
from planner.play.measure import Measurement as Measurement
from planner.play.measure import measure_orders as measure_orders
from planner.play.measure import measure_schedule as measure_schedule
from planner.play.memory import MemoryCurve as MemoryCurve
from planner.play.memory import StageBytes as StageBytes
from planner.play.memory import held_units as held_units
from planner.play.memory import memory_curve as memory_curve
from planner.play.memory import peak_in_flight as peak_in_flight
from planner.play.times import Conditions as Conditions
from planner.play.times import StageTimes as StageTimes
from planner.play.times import Trace as Trace
from planner.play.times import Transfers as Transfers
from planner.play.times import weight_part_s as weight_part_s

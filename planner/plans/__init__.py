"""The answer as a file: types, JSON, assembly, diff, validation, explanation; `planner.report` shows them.

A straight line, each module knowing only those before it: `model`, `shardings`, `orders`, `records`, `figures` are the
data of a plan (`types`), read and written by `documents` and `files`; `rank_schedule`, `sections`, `shard_sections` and
`assemble` write a decision out as a plan; `readings` read it back, `rebuild` works its sections and decisions out again
for `checks` and `validate`; then come `explain`, `diff` and `comparison`.
"""

from planner.plans.assemble import assemble as assemble
from planner.plans.assemble import default_provenance as default_provenance
from planner.plans.assemble import with_minor as with_minor
from planner.plans.assemble import with_price as with_price
from planner.plans.assemble import with_simulation as with_simulation
from planner.plans.comparison import InfeasibleAnswer as InfeasibleAnswer
from planner.plans.comparison import PlanComparison as PlanComparison
from planner.plans.comparison import compare_plans as compare_plans
from planner.plans.comparison import dump_answer as dump_answer
from planner.plans.comparison import infeasible_answer as infeasible_answer
from planner.plans.comparison import load_answer as load_answer
from planner.plans.diff import Area as Area
from planner.plans.diff import Change as Change
from planner.plans.diff import diff as diff
from planner.plans.explain import explain as explain
from planner.plans.explain_shardings import SplitReason as SplitReason
from planner.plans.explain_shardings import split_reasons as split_reasons
from planner.plans.figures import FreeChoice as FreeChoice
from planner.plans.figures import Headline as Headline
from planner.plans.figures import StageCollective as StageCollective
from planner.plans.figures import gap_to as gap_to
from planner.plans.files import configuration_document as configuration_document
from planner.plans.files import configuration_schema as configuration_schema
from planner.plans.files import dump_configuration as dump_configuration
from planner.plans.files import dumps as dumps
from planner.plans.files import json_schema as json_schema
from planner.plans.files import load_configuration as load_configuration
from planner.plans.files import loads as loads
from planner.plans.files import parse_configuration as parse_configuration
from planner.plans.files import read as read
from planner.plans.files import seal as seal
from planner.plans.files import to_document as to_document
from planner.plans.files import write as write
from planner.plans.findings import Fault as Fault
from planner.plans.findings import Finding as Finding
from planner.plans.identity import other_hardware as other_hardware
from planner.plans.identity import other_model as other_model
from planner.plans.identity import require_inputs as require_inputs
from planner.plans.model import Block as Block
from planner.plans.model import BlockParameter as BlockParameter
from planner.plans.model import BlockRun as BlockRun
from planner.plans.model import Loss as Loss
from planner.plans.model import compress as compress
from planner.plans.model import expand as expand
from planner.plans.orders import RankOrder as RankOrder
from planner.plans.orders import Steady as Steady
from planner.plans.orders import Steps as Steps
from planner.plans.orders import decode as decode
from planner.plans.orders import encode as encode
from planner.plans.orders import encode_orders as encode_orders
from planner.plans.readings import SCHEDULE_KEYS as SCHEDULE_KEYS
from planner.plans.readings import WORDS as WORDS
from planner.plans.readings import counterparts as counterparts
from planner.plans.readings import has_closed_form as has_closed_form
from planner.plans.readings import leaders as leaders
from planner.plans.rebuild import priced_configuration as priced_configuration
from planner.plans.rebuild import rebuild as rebuild
from planner.plans.records import Boundary as Boundary
from planner.plans.records import Duplicated as Duplicated
from planner.plans.records import FileRead as FileRead
from planner.plans.records import Provenance as Provenance
from planner.plans.records import SharedParameter as SharedParameter
from planner.plans.rules import CLOSED as CLOSED
from planner.plans.rules import DEFAULT_GATES as DEFAULT_GATES
from planner.plans.rules import OFF as OFF
from planner.plans.rules import RULES as RULES
from planner.plans.rules import Remark as Remark
from planner.plans.rules import Severity as Severity
from planner.plans.rules import gate as gate
from planner.plans.rules import gates as gates
from planner.plans.rules import read_rules as read_rules
from planner.plans.rules import severities as severities
from planner.plans.shardings import BlockSeries as BlockSeries
from planner.plans.shardings import GroupCollective as GroupCollective
from planner.plans.shardings import Holding as Holding
from planner.plans.shardings import ShardedBlock as ShardedBlock
from planner.plans.shardings import Sharding as Sharding
from planner.plans.shardings import dealt as dealt
from planner.plans.types import Plan as Plan
from planner.plans.types import Requirement as Requirement
from planner.plans.validate import validate as validate
from planner.plans.words import chunks_of as chunks_of
from planner.plans.words import summary as summary

diff_plans, explain_plan, plan_schema = diff, explain, json_schema
dump_plan, load_plan, read_plan, write_plan = dumps, loads, read, write

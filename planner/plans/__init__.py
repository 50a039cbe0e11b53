"""The answer as a file: types, JSON, assembly, diff, validation, explanation; `planner.report` shows them.

A straight line, each module knowing only those before it: `model`, `shardings`, `orders`, `records`, `figures` are the
data of a plan (`types`), read and written by `documents` and `files`; `rank_schedule`, `sections`, `shard_sections` and
`assemble` write a decision out as a plan; `readings` read it back, `rebuild` works its sections and decisions out again
for `checks` and `validate`; then come `explain`, `diff` and `comparison`.
"""

from planner.plans.assemble import assemble, default_provenance, with_price, with_simulation
from planner.plans.comparison import compare_plans, dump_answer, infeasible_answer, load_answer
from planner.plans.diff import Area, Change, diff
from planner.plans.explain import explain
from planner.plans.explain_shardings import SplitReason, split_reasons
from planner.plans.figures import FreeChoice, Headline, StageCollective, gap_to
from planner.plans.files import (
    configuration_document,
    configuration_schema,
    dump_configuration,
    dumps,
    json_schema,
    load_configuration,
    loads,
    parse_configuration,
    read,
    seal,
    to_document,
    write,
)
from planner.plans.findings import Fault, Finding
from planner.plans.model import Block, BlockParameter, BlockRun, Loss, block_names, compress, expand
from planner.plans.orders import RankOrder, Steady, Steps, decode, encode, encode_orders
from planner.plans.readings import SCHEDULE_KEYS, WORDS, counterparts, has_closed_form, leaders
from planner.plans.rebuild import priced_configuration, rebuild
from planner.plans.records import Boundary, Duplicated, Provenance, SharedParameter
from planner.plans.rules import RULES, gate, read_rules
from planner.plans.shardings import BlockSeries, GroupCollective, Holding, ShardedBlock, Sharding, dealt
from planner.plans.types import Plan, Requirement
from planner.plans.validate import validate
from planner.plans.words import chunks_of, summary

diff_plans, explain_plan, plan_schema = diff, explain, json_schema
dump_plan, load_plan, read_plan, write_plan = dumps, loads, read, write

"""The answer as a file: types, JSON, assembly, diff, validation, explanation; `planner.report` shows them.

A straight line, each module knowing only those before it: `model`, `shardings`, `orders`, `records`, `figures` are the
data of a plan (`types`), read and written by `documents` and `files`; `rank_schedule`, `sections`, `shard_sections` and
`assemble` write a decision out as a plan; `readings` and `rebuild` read it back for `check_*` and `validate`,
`explain`, `diff` and `comparison`.
"""

from planner.plans.assemble import assemble, assemble_priced, default_provenance, with_price, with_simulation
from planner.plans.comparison import (
    PlanComparison,
    compare_answers,
    compare_plans,
    dump_answer,
    infeasible_answer,
    load_answer,
)
from planner.plans.diff import Area, Change, diff
from planner.plans.explain import Explanation, explain
from planner.plans.explain_shardings import SplitReason, group_views, split_reasons
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
from planner.plans.rank_schedule import lay_out
from planner.plans.readings import SCHEDULE_KEYS, WORDS, counterparts, has_closed_form, leaders, requirements
from planner.plans.rebuild import priced_configuration, rebuild
from planner.plans.records import Boundary, Duplicated, PlanNote, Provenance, SharedParameter
from planner.plans.requirement import Requirement
from planner.plans.rules import RULES, Gate, Metric, Severity, gate, read_rules
from planner.plans.shardings import BlockSeries, GroupCollective, Holding, MeshAxis, ShardedBlock, Sharding, dealt
from planner.plans.types import Plan
from planner.plans.validate import validate
from planner.plans.words import chunks_of, summary

diff_plans, explain_plan, plan_schema = diff, explain, json_schema
dump_plan, load_plan, read_plan, write_plan = dumps, loads, read, write

__all__ = [
    "RULES",
    "SCHEDULE_KEYS",
    "WORDS",
    "Area",
    "Block",
    "BlockParameter",
    "BlockRun",
    "BlockSeries",
    "Boundary",
    "Change",
    "Duplicated",
    "Explanation",
    "Fault",
    "Finding",
    "FreeChoice",
    "Gate",
    "GroupCollective",
    "Headline",
    "Holding",
    "Loss",
    "MeshAxis",
    "Metric",
    "Plan",
    "PlanComparison",
    "PlanNote",
    "Provenance",
    "RankOrder",
    "Requirement",
    "Severity",
    "ShardedBlock",
    "Sharding",
    "SharedParameter",
    "SplitReason",
    "StageCollective",
    "Steady",
    "Steps",
    "assemble",
    "assemble_priced",
    "block_names",
    "chunks_of",
    "compare_answers",
    "compare_plans",
    "compress",
    "configuration_document",
    "configuration_schema",
    "counterparts",
    "dealt",
    "decode",
    "default_provenance",
    "diff",
    "diff_plans",
    "dump_answer",
    "dump_configuration",
    "dump_plan",
    "dumps",
    "encode",
    "encode_orders",
    "expand",
    "explain",
    "explain_plan",
    "gap_to",
    "gate",
    "group_views",
    "has_closed_form",
    "infeasible_answer",
    "json_schema",
    "lay_out",
    "leaders",
    "load_answer",
    "load_configuration",
    "load_plan",
    "loads",
    "parse_configuration",
    "plan_schema",
    "priced_configuration",
    "read",
    "read_plan",
    "read_rules",
    "rebuild",
    "requirements",
    "seal",
    "split_reasons",
    "summary",
    "to_document",
    "validate",
    "with_price",
    "with_simulation",
    "write",
    "write_plan",
]

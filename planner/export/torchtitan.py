"""torchtitan: a TOML file of degrees, modules of each stage and schedule, and the order as CSV where it has no name.

Keys are those of `torchtitan/config/job_config.py`; releases whose configurations are Python have the same names in
`parallelism`, but `num_pp_microbatches` and `num_tokens_per_microbatch_per_dp_rank` in place of the batch sizes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from planner.costs.precision import precision as precision_of
from planner.escaping import markdown_code, prose_name, quoted
from planner.export import Export, Exporter, Gap, readings, register
from planner.export.reading.torchtitan import READER, SCHEDULES, TYPES
from planner.plans import Plan, Requirement
from planner.plans.readings import block_items, layer_name, layers
from planner.systems.backends import BACKENDS

BY_ORDERS = "PipelineScheduleMulti"
"""Schedule name that torchtitan wants beside a CSV file."""

BACKEND = BACKENDS.get("torchtitan")

Table = dict[str, str | int | bool | list[list[str]]]

WIDE_BYTES = 4
"""Of a gradient in float32."""

ZERO_2 = 2

ENDS = {"E": ("tok_embeddings",), "L": ("norm", "output")}
"""Modules of torchtitan's decoders beside `layers.0` and following, which its splitter knows by these names."""


def model_parts(plan: Plan) -> list[list[str]]:
    """Modules of each stage, by their names in torchtitan's decoders."""
    items, layer_names = block_items(plan), layers(plan)
    numbers = {name: f"layers.{number}" for number, name in enumerate(layer_names)}
    parts = []
    for stage in plan.stages:
        names: dict[str, None] = {}
        for at in range(*stage.blocks):
            modules = (numbers[layer_name(plan.block_table[at])],) if items[at] == "t" else ENDS[items[at]]
            names.update(dict.fromkeys(modules))
        parts.append(list(names))
    return parts


def _missing_features(plan: Plan) -> Iterator[Gap]:
    degrees, sharded = readings.degrees(plan), plan.configuration.zero > 0
    hint = f"`shardplan plan --zero {1 if len(plan.stages) > 1 else 2}`"
    beside = degrees.tensor * degrees.context * degrees.pipeline
    if degrees.expert > 1 and not sharded:
        yield Gap("expert parallel ranks that are no FSDP ranks (data_parallel_shard_degree)", hint)
    elif min(degrees.data, beside) > 1 and not sharded:
        yield Gap("replicas without shards (DDP) beside tensor, context or pipeline parallel ranks", hint)
    elif degrees.context > 1 and not sharded:
        yield Gap("context parallel ranks without shards: they are FSDP ranks", hint)
    elif degrees.data * degrees.context == 1 and beside > 1 and readings.precision_base(plan) != "fp32":
        yield Gap("mixed precision in tensor or pipeline parallel ranks without FSDP ranks", "`shardplan plan --dp 2`")
    if degrees.expert > 1 and degrees.expert_tensor not in (1, degrees.tensor):
        yield Gap(
            "experts cut over some tensor parallel ranks (expert_tensor_parallel_degree)", "`shardplan plan --ep 1`"
        )
    title, piped = SCHEDULES.get(plan.schedule.name.partition(":")[0]), len(plan.stages) > 1
    if title == "1F1B" and degrees.accumulated < len(plan.stages):
        few = f"{degrees.accumulated} micro-batches in the schedule 1F1B of {len(plan.stages)} stages"
        yield Gap(few, "`shardplan plan --schedule gpipe`, smaller micro-batches or fewer stages")
    if title == "DualPipeV" and degrees.expert > 1 and readings.recomputes(plan):
        yield Gap("recomputation in DualPipeV with experts dealt to ranks", "`shardplan plan --recompute never`")
    pieces, length = 2 * degrees.tensor * degrees.context, readings.sequence_length(plan)
    if length % pieces:
        steps = f"{length} steps for {degrees.tensor} tensor and {degrees.context} context parallel ranks"
        yield Gap(f"{steps}, which take {pieces} pieces", f"`--dim seq=` with a multiple of {pieces}")
    if piped and (others := [*readings.matrices(plan, "E")[1:], *readings.matrices(plan, "L")[:-1]]):
        known = ", ".join(itertools.chain.from_iterable(ENDS.values()))
        yield Gap(f"stages with modules beside {known} ({readings.some_of(others)})", "`shardplan plan --pp 1`")


def _tables(plan: Plan) -> Mapping[str, Table]:
    degrees, zero = readings.degrees(plan), plan.configuration.zero
    param, reduce = TYPES[readings.precision_base(plan)]
    piped = len(plan.stages) > 1
    over = plan.configuration.shard_over
    groups = len(plan.stages[0].replicas) // over if over else 1
    parallelism: Table = {
        "data_parallel_replicate_degree": groups if zero else degrees.data,
        "data_parallel_shard_degree": degrees.data // groups if zero else 1,
        "fsdp_reshard_after_forward": "always" if zero > 2 else "never",
        "tensor_parallel_degree": degrees.tensor,
        "context_parallel_degree": degrees.context,
        "expert_parallel_degree": degrees.expert,
        "pipeline_parallel_degree": degrees.pipeline,
    }
    if degrees.context > 1 and Requirement.RING_ATTENTION in plan.requires:
        parallelism["context_parallel_rotate_method"] = "alltoall"
    if degrees.expert > 1:
        parallelism["expert_tensor_parallel_degree"] = degrees.expert_tensor
    if piped:
        name = _title_of(plan.schedule.name)
        parallelism["module_fqns_per_model_part"] = model_parts(plan)
        parallelism["pipeline_parallel_schedule"] = name or BY_ORDERS
        parallelism["pipeline_parallel_microbatch_size"] = degrees.micro_batch
        if name is None:
            parallelism["pipeline_parallel_schedule_csv"] = "schedule.csv"
    return {
        "job": {"description": f"{plan.model.name} on {plan.hardware.name}, plan {plan.digest[:12]}"},
        "training": {
            "local_batch_size": degrees.micro_batch * (degrees.accumulated if piped else 1),
            "global_batch_size": plan.micro_batches.global_batch,
            "seq_len": readings.sequence_length(plan),
            "mixed_precision_param": param,
            "mixed_precision_reduce": reduce,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": "full" if readings.recomputes(plan) else "none"},
    }


def _toml(tables: Mapping[str, Table]) -> str:
    """The tables as TOML."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _value(value: str | int | bool | list[Any]) -> str:
    """A value in TOML: numbers are written like JSON's, and so are lists but for their strings."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _write(plan: Plan) -> Export:
    tables = _tables(plan)
    files = {"config.toml": _toml(tables)}
    if "pipeline_parallel_schedule_csv" in tables["parallelism"]:
        files["schedule.csv"] = readings.schedule_csv(plan)
    files["launch.sh"] = readings.launch(
        plan,
        "-m torchtitan.train",
        (
            '--job.config_file "${here}/config.toml"',
            *(
                ['--parallelism.pipeline_parallel_schedule_csv "${here}/schedule.csv"']
                if "schedule.csv" in files
                else []
            ),
            '"${model_arguments[@]}"',
        ),
        (
            "# MODEL_ARGS: the model and its data, as --model.name llama3 --model.flavor 8B",
            'here="$(cd "$(dirname "$0")" && pwd)"',
            'read -r -a model_arguments <<< "${MODEL_ARGS:?}"',
        ),
    )
    mapped = {
        table: ", ".join(markdown_code(f"{key} = {_value(value)}") for key, value in values.items())
        for table, values in tables.items()
    }
    modules_of_stages, layer_names = readings.stage_modules(plan), layers(plan)
    ends = [name for name in (*modules_of_stages[0], *modules_of_stages[-1]) if name not in layer_names]
    decoder = ", ".join(map(prose_name, [*ends, layer_names[0]])) + f" .. {prose_name(layer_names[-1])}"
    mapped[decoder] = "`tok_embeddings`, `norm`, `output`, `layers.0` .."
    left_out = [
        *_unlike_times(plan),
        f"The optimizer {plan.options.optimizer} and its settings: `[optimizer]`.",
        *readings.other_times(plan, "torchtitan"),
    ]
    if readings.degrees(plan).tensor > 1 and not readings.cuts_sequence(plan):
        left_out.append("Tensors between layers whole on all ranks of a group: torchtitan cuts them by the sequence.")
    return Export(files, mapped, tuple(left_out), readings.rank_order(plan))


def _unlike_times(plan: Plan) -> Iterator[str]:
    """What torchtitan does at other times or in other types than the plan, without a setting."""
    degrees, zero = readings.degrees(plan), plan.configuration.zero
    yield "Types of weights: torchtitan keeps them in float32 and casts them for the passes."
    narrow = precision_of(plan.options.precision).gradient_bytes
    if narrow < WIDE_BYTES:
        yield (
            f"Gradients of {narrow} bytes: `mixed_precision_reduce` is float32 alone, so that they travel and lie in "
            f"{WIDE_BYTES}. `shardplan predict --from torchtitan config.toml` says what that takes, and "
            "`shardplan plan --precision bf16-fp32grad` plans with it."
        )
    if len(plan.stages) > 1 or degrees.accumulated == 1 or degrees.data * degrees.context == 1:
        return
    each = f"in each of the {degrees.accumulated} micro-batches of a step, where the plan does so once"
    if zero == 0:
        yield f"Gradients of replicas (DDP): torchtitan reduces them {each}."
    elif zero == ZERO_2:
        yield f"Weights: FSDP gathers them again {each}."


def _title_of(schedule: str) -> str | None:
    """torch's class for a schedule, whose chunks follow from the stages; None for one with other options, or none."""
    key, _, options = schedule.partition(":")
    return SCHEDULES.get(key) if options.partition("=")[0] in ("", "chunks") and "," not in options else None


register(
    Exporter(
        backend=BACKEND,
        missing=_missing_features,
        write=_write,
        start="Run `launch.sh` on every machine, with `MODEL_ARGS` set; `config.toml` is torchtitan's configuration.",
        reader=READER,
    )
)

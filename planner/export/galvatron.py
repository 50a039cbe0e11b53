"""Galvatron: the JSON file of a strategy, one entry a layer, and the settings of its runtime that the file leaves open.

Keys are those that `galvatron/core/runtime/hybrid_parallel_config.py` and `config2strategy` in
`galvatron/utils/config_utils.py` read; lists are texts with commas. Its ranks count tensor parallel neighbours first,
then context, data and pipeline parallel ones (`comm_groups.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.documents import pretty
from planner.escaping import markdown_code
from planner.export import Export, Exporter, Gap, readings, register
from planner.export.layers import mixtures, unlike_layers
from planner.plans import Plan, Requirement
from planner.plans.readings import block_items, layer_name, layers
from planner.systems.backends import BACKENDS

FORMATS = {"fp32": ("fp32", True), "bf16": ("bf16", False), "bf16-fp32grad": ("bf16", True), "fp16": ("fp16", False)}
"""`mixed_precision` and `reduce_in_fp32` by precision."""

_TITAN = BACKENDS.get("torchtitan")
GALVATRON = dataclasses.replace(
    _TITAN,
    key="galvatron",
    title="Galvatron",
    can=(_TITAN.can | {Requirement.TIED_PARAMETERS})
    - {
        Requirement.MULTI_STAGE_RANK,
        Requirement.SPLIT_BACKWARD,
        Requirement.EXPERT_PARALLEL,
        Requirement.SHARDED_GROUPS,
    },
    schedules=("1f1b", "gpipe"),
    formats=tuple(FORMATS),
    optimizers=("adam", "adamw"),
    structure=dataclasses.replace(
        _TITAN.structure, alike=False, axes=("tensor", "context"), some_layers=True, zero_in_pipelines=()
    ),
)
"""What its runtime takes: a width, a kind of data parallelism and recomputation for each layer. Experts are dealt to
ranks in another order than a plan's (`pp-ep-edp-etp`)."""

PIPELINES = {"1f1b": "pipedream_flush", "gpipe": "gpipe"}
"""`pipeline_type` by the plan's schedule."""

SHARDED = {0: "ddp", 2: "zero2", 3: "zero3"}
"""`default_dp_type` by ZeRO stage: FSDP without sharding, of gradients and optimizer, of all."""


def _stage_layers(plan: Plan) -> tuple[int, ...]:
    """Layers of each stage."""
    items = block_items(plan)
    return tuple(
        len({layer_name(plan.block_table[at]) for at in range(*stage.blocks) if items[at] == "t"})
        for stage in plan.stages
    )


def _missing_features(plan: Plan) -> Iterator[Gap]:
    choices = plan.configuration.stages
    if unlike_layers(plan):
        yield Gap("layers of several kinds in a model", "`shardplan plan --for megatron`, which has them")
    empty = [index for index, count in enumerate(_stage_layers(plan)) if not count]
    if empty:
        yield Gap(f"stages without a layer ({', '.join(map(str, empty))})", "`shardplan plan --pp` with fewer stages")
    if len({stage.group_ranks * len(stage.replicas) for stage in plan.stages}) > 1:
        yield Gap("stages of unequally many ranks", "`shardplan plan --tp` with one width")
    elif len({(choice.ranks, choice.context, choice.expert) for choice in (choices[0], choices[-1])}) > 1:
        yield Gap("an embedding and logits cut over unequally many ranks (vtp)", "`shardplan plan --tp` with one width")


def strategy(plan: Plan) -> dict[str, Any]:
    """The strategy file."""
    degrees, layer_counts, sharded = readings.degrees(plan), _stage_layers(plan), int(plan.configuration.zero == 3)

    recomputed = set(readings.recomputed_layers(plan))

    def by_layer(of_stages: Sequence[int]) -> str:
        return _listed(value for value, count in zip(of_stages, layer_counts, strict=True) for _ in range(count))

    widths = by_layer([choice.ranks // choice.context for choice in plan.configuration.stages])
    return {
        "pp_deg": len(plan.stages),
        "tp_sizes_enc": widths,
        "tp_consecutive_flags": by_layer([1] * len(layer_counts)),
        "cp_sizes_enc": by_layer([choice.context for choice in plan.configuration.stages]),
        "dp_types_enc": by_layer([sharded] * len(layer_counts)),
        "use_sp": by_layer([0] * len(layer_counts)),
        "checkpoint": _listed(int(name in recomputed) for name in layers(plan)),
        "global_bsz": plan.micro_batches.global_batch,
        "chunks": degrees.accumulated,
        "pp_division": _listed(layer_counts),
        "pipeline_type": PIPELINES.get(plan.schedule.name, "gpipe"),
        "default_dp_type": SHARDED[plan.configuration.zero],
        "vtp": degrees.tensor,
        "vsp": 0,
        "vcp": degrees.context,
        **({"ep_sizes_enc": by_layer([1] * len(layer_counts)), "tp_of_ep_sizes_enc": widths} if mixtures(plan) else {}),
        **dict.fromkeys(("vocab_sdp", "embed_sdp"), sharded),  # the name in the source, and that in release 2.4
    }


def _listed(values: Iterator[int] | Sequence[int]) -> str:
    return ",".join(map(str, values))


def _settings(plan: Plan) -> Mapping[str, str]:
    """Settings of the runtime that the file leaves open, by their names below `runtime`."""
    kind, whole = FORMATS[readings.precision_base(plan)]
    experts = max(mixtures(plan).values(), default=0)
    flags = {
        "parallel.reduce_in_fp32": whole,
        "parallel.async_grad_reduce": plan.configuration.zero < 2,
        "train.sequence_parallel": readings.cuts_sequence(plan),
        "model.untie_embeddings_and_output_weights": not readings.is_tied(plan),
    }
    return {
        "parallel.mixed_precision": kind,
        **{name: str(flag).lower() for name, flag in flags.items()},
        "train.seq_length": str(readings.sequence_length(plan)),
        "model.num_layers": str(len(layers(plan))),
        **({"model.is_moe_model": "true", "model.num_moe_experts": str(experts)} if experts else {}),
    }


def _write(plan: Plan) -> Export:
    document, settings = strategy(plan), _settings(plan)
    overrides = [f"++runtime.{name}={value}" for name, value in settings.items()]
    script = readings.launch(
        plan,
        "train_dist.py",
        ('"${CONFIG:?}"', '"++runtime.parallel.galvatron_config_path=${here}/strategy.json"', *overrides),
        (
            "# CONFIG: Galvatron's configuration of the model and its data, as scripts/train_dist.yaml",
            'here="$(cd "$(dirname "$0")" && pwd)"',
        ),
    )
    mapped = {key: markdown_code(str(value)) for key, value in (*document.items(), *settings.items())}
    left_out = [
        "Widths, heads and vocabulary of the model, the optimizer's settings and the data: `CONFIG`.",
        "Types of weights: Galvatron keeps them in float32 and casts them for the passes, whatever else the plan's "
        "precision says.",
    ]
    if readings.degrees(plan).context > 1 and Requirement.RING_ATTENTION not in plan.requires:
        left_out.append("Keys and values gathered by context parallel ranks: Galvatron passes them around a ring.")
    if readings.recomputes(plan):
        left_out.append("Recomputation of the embedding and the logits: layers alone have a flag.")
    files = {"strategy.json": pretty(document) + "\n", "launch.sh": script}
    return Export(files, mapped, tuple(left_out), readings.rank_order(plan))


register(
    Exporter(
        backend=GALVATRON,
        plan_for="torchtitan --schedule 1f1b --ep 1 --zero 0 --zero 2 --zero 3",
        missing=_missing_features,
        write=_write,
        start="Run `launch.sh` in Galvatron's folder of the model (`galvatron/models/gpt`, for mixtures "
        "`galvatron/models/moe`) on every machine, with "
        "`CONFIG` set; `strategy.json` is the strategy file.",
    )
)

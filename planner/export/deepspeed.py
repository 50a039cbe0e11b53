"""DeepSpeed: its JSON configuration, and a `PipelineModule` whose stages are those of the plan."""

from __future__ import annotations

import itertools
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

from planner.documents import pretty
from planner.escaping import markdown_code, prose_name, quoted
from planner.export import Export, Exporter, Gap, readings, register
from planner.export.reading.deepspeed import OPTIMIZERS, READER
from planner.plans import Plan
from planner.systems.backends import BACKENDS
from planner.units import plural

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16-fp32grad": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16-deepspeed": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True}},
}
"""Settings by precision; ZeRO-1 with float32 gradients is the BF16_Optimizer of `bf16-deepspeed`."""

PIPELINE = (pkgutil.get_data(__name__, "pipeline.py.txt") or b"").decode()
"""Text of the file with the stages; DeepSpeed itself only cuts evenly, by parameters or by types of layers."""

SHARDED_WEIGHTS = 3
"""ZeRO stage in which `deepspeed.moe` is refused."""

KEPT = {"imports": "", "recompute": "activation_checkpoint_interval=0"}
RECOMPUTED = {
    "imports": "import deepspeed\n",
    "recompute": "activation_checkpoint_interval=1,\n"
    "            activation_checkpoint_func=deepspeed.checkpointing.non_reentrant_checkpoint",
}
"""Options of a pipeline that keeps its activations, and of one that recomputes each layer. DeepSpeed's default function
for recomputing fails in a layer none of whose inputs needs a gradient, such as an embedding."""


def _missing_features(plan: Plan) -> Iterator[Gap]:
    degrees = readings.degrees(plan)
    if degrees.expert > 1 and plan.configuration.zero == SHARDED_WEIGHTS and degrees.tensor > 1:
        yield Gap("experts dealt to ranks beside AutoTP in ZeRO-3", "`shardplan plan --tp 1` or `--zero 2`")
    own = itertools.chain.from_iterable(readings.own_weights(plan))
    if len(plan.stages) > 1 and (outside := [*readings.scattered_weights(plan), *own]):
        named = readings.some_of(outside)
        yield Gap(f"weights that are in no layer of one stage alone ({named})", "`shardplan plan --pp 1`")


def _auto_experts(plan: Plan) -> bool:
    """Whether AutoEP deals the experts (`expert_parallel`): in one stage, without AutoTP, each on one rank."""
    degrees = readings.degrees(plan)
    return degrees.expert > 1 and degrees.tensor == 1 and len(plan.stages) == 1


def configuration(plan: Plan) -> dict[str, Any]:
    """The JSON configuration."""
    degrees, zero = readings.degrees(plan), plan.configuration.zero
    document: dict[str, Any] = {
        "train_batch_size": plan.micro_batches.global_batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.accumulated,
        "zero_optimization": {"stage": zero, **({"overlap_comm": bool(plan.options.overlap)} if zero else {})},
        "optimizer": {"type": OPTIMIZERS[plan.options.optimizer.partition(":")[0]], "params": {}},
        **FORMATS[readings.precision_base(plan)],
    }
    if zero and document["optimizer"]["type"] not in ("Adam", "AdamW"):
        document["zero_allow_untested_optimizer"] = True
    if degrees.tensor > 1 and len(plan.stages) == 1:
        document["tensor_parallel"] = {"autotp_size": degrees.tensor}
    if _auto_experts(plan):
        document["expert_parallel"] = {"enabled": True, "autoep_size": degrees.expert}
    return document


def _pipeline(plan: Plan) -> dict[str, str]:
    """`pipeline.py`, where the plan has several stages."""
    degrees, stages = readings.degrees(plan), readings.stage_modules(plan)
    if len(stages) == 1:
        return {}
    parts = [0]
    for modules in stages:
        parts.append(parts[-1] + len(modules))
    text = PIPELINE.format(
        stages=f"{plural(parts[-1], 'layer')} in {plural(len(stages), 'stage')}",
        modules="(\n" + "".join(f"    {quoted(name)},\n" for modules in stages for name in modules) + ")",
        parts=tuple(parts),
        pipeline=degrees.pipeline,
        tensor=degrees.tensor,
        data=degrees.data,
        **(RECOMPUTED if readings.recomputes(plan) else KEPT),
    )
    return {"pipeline.py": text}


def _write(plan: Plan) -> Export:
    degrees, document = readings.degrees(plan), configuration(plan)
    piped = len(plan.stages) > 1
    script = readings.launch(
        plan,
        '"${TRAIN:?}"',
        ('--deepspeed --deepspeed_config "${here}/ds_config.json"',),
        ("# TRAIN: your training program", 'here="$(cd "$(dirname "$0")" && pwd)"'),
    )
    pipeline = _pipeline(plan)
    mapped = {key: markdown_code(json.dumps(value)) for key, value in document.items()}
    if piped:
        mapped[f"{len(plan.stages)} stages"] = "`PlannedPipeline` in `pipeline.py`"
    left_out = ["Settings of the optimizer (learning rate, betas): `optimizer.params`."]
    if readings.recomputes(plan) and not piped:
        left_out.append("Recomputation of all layers: call `deepspeed.checkpointing.checkpoint` in the model's layers.")
    if piped and degrees.tensor > 1:
        left_out.append(
            f"Tensor parallel {degrees.tensor}: AutoTP does not reach into a PipelineModule; give `PlannedPipeline` "
            "layers that are cut over the model axis of its topology, as those of Megatron-DeepSpeed are."
        )
    tables = [module for module, style in readings.module_styles(plan) if style.startswith(("embedding", "logits"))]
    if tables and "tensor_parallel" in document:
        left_out.append(
            f"Words of {readings.some_in_prose(tables)} cut over a group: AutoTP keeps the embedding whole, and cuts "
            "the logits by rows, with a sum of all of them behind."
        )
    if degrees.expert > 1 and not _auto_experts(plan):
        left_out.append(
            f"Expert parallel {degrees.expert}: build the mixtures with "
            f"`deepspeed.moe.layer.MoE(ep_size={degrees.expert})`; no setting of the configuration does it."
        )
    if piped and plan.shared_parameters:
        tied = ", ".join(prose_name(shared.parameter) for shared in plan.shared_parameters)
        left_out.append(f"Tied weights: `TiedLayerSpec` for {tied}.")
    return Export(
        {"ds_config.json": pretty(document) + "\n", "launch.sh": script, **pipeline},
        mapped,
        tuple(left_out),
        readings.rank_order(plan),
    )


register(
    Exporter(
        backend=BACKENDS.get("deepspeed"),
        missing=_missing_features,
        write=_write,
        start="Give `ds_config.json` to `deepspeed.initialize`, and the model as `PlannedPipeline` where there is a "
        "`pipeline.py`; `launch.sh` starts the program in `TRAIN`.",
        reader=READER,
    )
)

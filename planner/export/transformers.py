"""Hugging Face transformers: its `DistributedConfig` with the styles of modules, and the arguments of its Trainer.

Fields are those of `transformers/distributed/configuration_utils.py` (release 5.23), names of styles those of
`tensor_parallel.py` and `fsdp.py`. A rule names a module with `*` for the number of its layer; the rules that a model
has itself hold for the modules that none is written for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from planner.documents import pretty
from planner.escaping import markdown_code
from planner.export import Export, Exporter, Gap, readings, register
from planner.plans import Plan, Requirement
from planner.systems.backends import BACKENDS, GROUPS

FORMATS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16-fp32grad": "bf16", "fp16": "fp16"}
"""Arguments of the Trainer by precision."""

OPTIMIZERS = {"adam": "adamw_torch", "adamw": "adamw_torch", "sgd": "sgd", "adafactor": "adafactor"}

TRANSFORMERS = dataclasses.replace(
    BACKENDS.get("fsdp"),
    key="transformers",
    title="transformers",
    can=BACKENDS.get("fsdp").can | GROUPS - {Requirement.INTERLEAVED_SPLIT},
    zero=(0, 2, 3),
    formats=tuple(FORMATS),
    optimizers=tuple(OPTIMIZERS),
    structure=dataclasses.replace(
        BACKENDS.get("fsdp").structure,
        axes=("tensor", "expert"),
        head_groups="key-value heads",
        between_layers=("replicated",),  # enable_sequence_parallel is not wired up
    ),
)
"""Limits of training with transformers: FSDP2, tensor parallel rules, experts; its pipelines run forwards only."""

STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "logits": "colwise_gather_output",
    "embedding rows": "embedding_rowwise",
    "embedding columns": "embedding_colwise",
    "summed": "replicated_with_grad_allreduce",
}
"""Names in `ALL_PARALLEL_STYLES` by our style."""

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
"""The number of a layer in the path of a module."""


def _rules(plan: Plan) -> Mapping[str, set[str]]:
    """Parallel styles by rule (module path with `*` for layer numbers); several where layers of one kind differ."""
    styles_of: dict[str, set[str]] = {}
    for module, kind in readings.module_styles(plan):
        if kind != "experts":
            styles_of.setdefault(_NUMBER.sub(".*", module), set()).add(kind)
    return styles_of


def _missing_features(plan: Plan) -> Iterator[Gap]:
    degrees, alone = readings.degrees(plan), "`shardplan plan --tp 1`"
    rules = _rules(plan)
    other = [rule for rule, kinds in rules.items() if len(kinds) != 1 or not kinds <= STYLES.keys()]
    if other:
        yield Gap(f"a parallel style for how modules are cut ({readings.some_of(other)})", alone)
    if degrees.expert_tensor > 1 and degrees.expert > 1:
        yield Gap("experts whose products are cut over ranks", alone)
    if degrees.expert > 1 and (
        degrees.expert % degrees.tensor or (plan.configuration.zero < 2 and degrees.expert > degrees.tensor)
    ):
        yield Gap("expert parallel ranks that are no FSDP ranks (ep_size)", "`shardplan plan --zero 3`, or `--ep 1`")


def configuration(plan: Plan) -> dict[str, Any]:
    """The fields of `DistributedConfig`."""
    degrees, zero = readings.degrees(plan), plan.configuration.zero
    document: dict[str, Any] = {
        "tp_size": degrees.tensor,
        "fsdp_size": degrees.data if zero else 1,
        "dp_replicate_size": 1 if zero else degrees.data,
        "pp_size": 1,
    }
    if degrees.tensor > 1:
        document["tp_plan"] = {rule: STYLES[kind] for rule, kinds in _rules(plan).items() for kind in kinds}
    if degrees.expert > 1:
        document["ep_size"] = degrees.expert
    if degrees.data > 1:
        wrapped = dict.fromkeys(_NUMBER.sub(".*", name) for name in readings.stage_modules(plan)[0])
        document["fsdp_plan"] = dict.fromkeys(wrapped, "free_full_weight" if zero == 3 else "keep_full_weight")
        document["fsdp_mixed_precision"] = FORMATS[readings.precision_base(plan)] == "bf16"
    return document


def arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of the Trainer (`TrainingArguments`)."""
    degrees, kind = readings.degrees(plan), FORMATS[readings.precision_base(plan)]
    return {
        "per_device_train_batch_size": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.accumulated,
        "activation_checkpointing": readings.recomputes(plan),
        "optim": OPTIMIZERS[plan.options.optimizer.partition(":")[0]],
        **({} if kind == "fp32" else {kind: True}),
    }


def _write(plan: Plan) -> Export:
    document, trainer_arguments = configuration(plan), arguments(plan)
    files = {
        "distributed_config.json": pretty(document) + "\n",
        "training_arguments.json": pretty(trainer_arguments) + "\n",
        "launch.sh": readings.launch(plan, '"${TRAIN:?}"', (), ("# TRAIN: your training program",)),
    }
    settings = (*document.items(), *trainer_arguments.items())
    mapped = {markdown_code(key): markdown_code(str(value)) for key, value in settings}
    left_out = [
        "Settings of the optimizer (learning rate, betas): `TrainingArguments`.",
        "Types of weights: those that the model is loaded in; `fsdp_mixed_precision` casts them to bfloat16 for the "
        "passes and reduces gradients in float32, whatever else the plan's precision says.",
    ]
    if "tp_plan" in document:
        left_out.append("Modules that the plan keeps whole and the model's own `tp_plan` cuts: their rules stay.")
    if "ep_size" in document:
        left_out.append("How experts are dealt: the model's own `ep_plan`.")
    return Export(files, mapped, tuple(left_out), readings.rank_order(plan))


register(
    Exporter(
        backend=TRANSFORMERS,
        plan_for="fsdp",
        missing=_missing_features,
        write=_write,
        start="Give `DistributedConfig.from_dict` the contents of `distributed_config.json` and the result to "
        "`from_pretrained(distributed_config=...)`, and `TrainingArguments` those of `training_arguments.json`; "
        "`launch.sh` starts the program in `TRAIN`.",
    )
)

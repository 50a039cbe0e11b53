"""A hundred ways to damage a plan file, each with what its refusal must name."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, NamedTuple

from planner.plans import dumps, loads, seal
from tests.runtime import cases

GONE = object()
"""Stands for a value that is taken away."""

BASES = {
    "pipeline": cases.Case("", "gpt", 2, {"pipeline": 2}, 4),
    "groups": cases.Case("", "gpt, wide", 4, {"tensor": 2, "pipeline": 2}, 4),
    "repeated": cases.Case(
        "", "gpt", 2, {"pipeline": 2, "repeats": ("layernorm", "mlp"), "offload": ("core_attn",)}, 4
    ),
    "stale": cases.Case("", "gpt, untied", 2, {"pipeline": 2, "schedule": "pipedream"}, 4),
}


class Damage(NamedTuple):
    """One value of a plan file that is replaced, or taken away.

    Attributes:
        base: the plan.
        path: keys and places down to the value, joined by dots.
        value: what stands there instead.
        named: what the refusal says.
    """

    base: str
    path: str
    value: Any
    named: str


B = "F0.0-1 (B0.0 F0.2)*2 B0.2-3 S0 U0"
DAMAGES = [
    # fields that are missing, of a wrong type, or unknown
    *(
        Damage("pipeline", key, GONE, re.sub(r"\.(\d+)", r"[\1]", key))
        for key in (
            "format", "version", "digest", "model", "configuration", "world_size", "copies", "micro_batches",
            "requires", "stages", "routing", "boundaries", "shared_parameters", "duplicated", "schedule", "blocks",
            "stages.0.replicas", "stages.1.blocks", "schedule.orders", "schedule.orders.1.actions",
            "boundaries.0.gradient", "model.loss",
            "micro_batches.gradient_scale", "shared_parameters.0.stages", "blocks.0.blocks.0.nodes",
        )
    ),
    Damage("pipeline", "world_size", "two", "world_size"),
    Damage("pipeline", "stages.0.index", None, "stages[0].index"),
    Damage("pipeline", "stages", {}, "stages"),
    Damage("pipeline", "boundaries.0.shape", [1, "x"], "boundaries[0].shape"),
    Damage("pipeline", "schedule.orders.0.ranks", 0, "ranks"),
    Damage("pipeline", "micro_batches.loss_reduction", "median", "loss_reduction"),
    Damage("pipeline", "requires.0", "telepathy", "requires[0]"),
    Damage("pipeline", "routing", "random", "routing"),
    Damage("pipeline", "stages.0.colour", "red", "colour"),
    Damage("pipeline", "format", "shardplan-diary", "format"),
    Damage("pipeline", "version", 99, "version"),
    Damage("pipeline", "world_size", 10**12, "world_size"),
    Damage("pipeline", "micro_batches.count", 10**9, "micro_batches.count"),
    # stages and blocks
    Damage("pipeline", "stages.0.index", 1, "stage 1"),
    Damage("pipeline", "stages.0.blocks", [1, 10], "stage 0"),
    Damage("pipeline", "stages.0.blocks.1", 4, "stage 1"),
    Damage("pipeline", "stages.1.blocks.1", 99, "stage"),
    Damage("pipeline", "stages.0.replicas", [], "stage 0"),
    Damage("pipeline", "stages.0.replicas.0", [], "stage 0"),
    Damage("pipeline", "stages.1", GONE, "stages"),
    Damage("pipeline", "stages.0.kept_blocks", [1], "stage 0"),
    Damage("pipeline", "stages.0.parameters", 1, "stages[0].parameters"),
    Damage("pipeline", "stages.0.zero", 3, "zero"),
    Damage("pipeline", "stages.0.recompute", True, "recompute"),
    Damage("pipeline", "blocks.0.repeat", 2, "block 19"),
    Damage("pipeline", "blocks.0.blocks.0.nodes", ["lm_head.matmul"], "lm_head.matmul"),
    Damage("pipeline", "model.operators", 7, "operators"),
    Damage("repeated", "stages.0.repeated.0", "lm_head.matmul", "stages[0].repeated"),
    Damage("repeated", "stages.1.dropped.0", "nothing", "stages[1].dropped"),
    Damage("repeated", "stages.1.offloaded.0", "", "stages[1].offloaded"),
    Damage("pipeline", "configuration.stages.0.stop", 3, "configuration"),
    Damage("pipeline", "configuration.schedule", "gpipe", "schedule.name"),
    Damage("pipeline", "configuration.micro_batches", 2, "configuration"),
    Damage("pipeline", "configuration.copies", 2, "configuration has 8 micro-batches"),
    Damage("pipeline", "configuration.zero", 1, "stages[0].zero"),
    # ranks and routes
    Damage("pipeline", "stages.1.replicas", [[0]], "stages[1].replicas"),
    Damage("pipeline", "stages.1.replicas", [[1], [1]], "stages[1].replicas"),
    Damage("pipeline", "stages.1.replicas", [[7]], "stages[1].replicas"),
    Damage("pipeline", "stages.1.replicas", [[-1]], "stages[1].replicas"),
    Damage("pipeline", "world_size", 3, "world_size: 3"),
    Damage("pipeline", "world_size", 1, "world_size"),
    Damage("pipeline", "copies", 2, "stage 0"),
    Damage("pipeline", "copies", 0, "copies"),
    Damage("groups", "stages.0.replicas", [[0, 0]], "stages[0].replicas"),
    Damage("groups", "stages.0.replicas", [[0], [1]], "stage 0 is a group of 1"),
    Damage("groups", "stages.0.replicas", [[2, 1]], "stages[0].replicas"),
    # batches
    Damage("pipeline", "micro_batches.count", 3, "micro-batches"),
    Damage("pipeline", "micro_batches.size", 2, "micro_batches is 4 of 2"),
    Damage("pipeline", "micro_batches.size", 0, "micro-batches"),
    Damage("pipeline", "micro_batches.gradient_scale", 1.0, "micro_batches.gradient_scale"),
    # tensors between stages and ties
    Damage("pipeline", "boundaries.0.to_stages", [5], "transformer.h.3.mlp.add"),
    Damage("pipeline", "boundaries.0.from_stage", 1, "transformer.h.3.mlp.add"),
    Damage("pipeline", "boundaries.0.dtype", "complex7", "complex7"),
    Damage("pipeline", "boundaries.0.shape", [1, 8, 17], "transformer.h.3.mlp.add"),
    Damage("pipeline", "boundaries.0.dtype", "int32", "transformer.h.3.mlp.add"),
    Damage("pipeline", "shared_parameters", [], "transformer.wte.weight"),
    Damage("pipeline", "shared_parameters.0.reduction", "none", "transformer.wte.weight"),
    Damage("pipeline", "shared_parameters.0.stages", [0, 9], "transformer.wte.weight"),
    Damage("pipeline", "shared_parameters.0.parameter", "nothing", "transformer.wte.weight"),
    Damage("pipeline", "requires", [], "pipeline"),
    Damage("pipeline", "requires", ["pipeline", "tied_parameters", "zero3"], "zero3"),
    # orders
    Damage("pipeline", "schedule.orders.0.actions", "", "rank 0"),
    Damage("pipeline", "schedule.orders.0.actions", "Q0.0", "Q0.0"),
    Damage("pipeline", "schedule.orders.0.actions", B.replace("B0.0", "B0.0/1"), "rank 0"),
    Damage("pipeline", "schedule.orders.0.actions", B.replace(" S0", ""), "S0"),
    Damage("pipeline", "schedule.orders.0.actions", B.replace(" U0", ""), "U0"),
    Damage("pipeline", "schedule.orders.0.actions", B.replace("S0 U0", "U0 S0"), "U0"),
    Damage("pipeline", "schedule.orders.0.actions", B.replace("B0.2-3", "B0.2"), "rank 0"),
    Damage("pipeline", "schedule.orders.0.actions", B + " F0.0", "F0.0"),
    Damage("pipeline", "schedule.orders.0.actions", B + " F7.0", "F7.0"),
    Damage("pipeline", "schedule.orders.0.actions", B + " F0.9", "F0.9"),
    Damage("pipeline", "schedule.orders.0.actions", "B0.0 F0.0-3 B0.1-3 S0 U0", "B0.0"),
    Damage("pipeline", "schedule.orders.0.actions", "(F0.0 B0.0", "rank 0"),
    Damage("pipeline", "schedule.orders.0.actions", "(F0.0 B0.0)*99999999999", "rank 0"),
    Damage("pipeline", "schedule.orders.1.actions", "F1.1 B1.1 F1.0 B1.0 F1.2-3 B1.2-3 S1 U1", "schedule"),
    Damage("pipeline", "schedule.orders.1.actions", "S1 (F1.0 B1.0)*4 U1", "S1"),
    Damage("pipeline", "schedule.orders.1.actions", "B1.0-3 F1.0-3 S1 U1", "B1.0"),
    Damage("pipeline", "schedule.orders.1.ranks", [0], "rank"),
    Damage("pipeline", "schedule.orders.1.ranks", [9], "rank"),
    Damage("pipeline", "schedule.orders.1.ranks", [], "schedule.orders[1]"),
    Damage("pipeline", "schedule.orders.1.first", [0, 1], "schedule.orders[1].first"),
    Damage("pipeline", "schedule.orders.1.step", 2, "rank 1"),
    Damage("pipeline", "schedule.orders.1", GONE, "rank 1"),
    Damage("pipeline", "schedule.orders.0.actions", "F0.0-3 S0 U0", "B0.0"),
    Damage("stale", "schedule.weight_policy", "fresh", "fresh"),
    Damage("pipeline", "schedule.weight_policy", "stash", "schedule.weight_policy"),
    Damage("pipeline", "schedule.iterations", 2, "schedule.iterations"),
    Damage("pipeline", "schedule.parts", 3, "schedule.parts"),
    Damage("pipeline", "schedule.limits", [1], "limits"),
    Damage("stale", "schedule.versions", [1, 1], "version"),
    Damage("stale", "schedule.weight_policy", "sync", "schedule.weight_policy"),
    Damage("stale", "schedule.orders.1.actions", "(F1.0@9 B1.0@9 U1.0)*4v1", "rank 1"),
    Damage("stale", "schedule.orders.0.actions", "F0.0-1@0 B0.0@7", "rank 0"),
    # groups
    Damage("groups", "stages.0.sharding", "sideways", "sideways"),
    Damage("groups", "stages.0.sharding", GONE, "stage"),
    Damage("groups", "shardings.0.axes.0.size", 4, "tensor 2, replicated"),
    Damage("groups", "shardings.0.name", "other", "tensor 2, replicated"),
    Damage("groups", "shardings.0.blocks.0", GONE, "block"),
    Damage("groups", "shardings.0.blocks.0.tensors.0.value", "S", "'S'"),
    Damage("groups", "shardings.0.blocks.0.tensors.0.value", "Q", "'Q'"),
    Damage("groups", "shardings.0.blocks.0.operators.0.reads", ["X"], "X"),
    Damage("groups", "shardings.0.blocks.0.of.0.first", 99, "block 0"),
    Damage("groups", "shardings.0.boundaries", ["diagonal"], "boundaries"),
    Damage("groups", "boundaries.0.layout", "S0S1S2", "S0S1S2"),
    Damage("groups", "shardings.0.blocks.5.tensors.4.optimizer", "S2", "S2 cuts a dimension"),
    Damage("pipeline", "schedule.orders.0.actions", " ", "rank 0"),
    Damage("pipeline", "schedule.orders", [], "rank 0"),
    Damage("groups", "boundaries.0.received", [], "received"),
]  # fmt: skip


@functools.cache
def _text(base: str) -> str:
    return dumps(cases.plan(BASES[base]))


def sound(base: str) -> Any:
    """The plan without damage."""
    return loads(_text(base))


def text_of(damage: Damage) -> str:
    """The damaged file."""
    document = json.loads(_text(damage.base))
    *path, last = [int(key) if key.isdigit() else key for key in damage.path.split(".")]
    target = document
    for key in path:
        target = target[key]
    if damage.value is GONE:
        del target[last]
    else:
        target[last] = damage.value
    return json.dumps(document)


def plan_of(damage: Damage) -> Any:
    """The damaged plan, its digest made right so that only the damage is found."""
    return seal(loads(text_of(damage), name="damaged.json"))

"""JAX: a mesh and a `PartitionSpec` for each parameter, its gradient and its optimizer state, and for the inputs."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

from planner.documents import pretty
from planner.escaping import prose_name
from planner.export import Export, Exporter, Gap, readings, register
from planner.plans import Plan
from planner.plans.model import BlockParameter
from planner.sharding.layout import parse_layout
from planner.systems.backends import BACKENDS

DATA = "data"
"""The mesh axis of the replicas."""

Spec = list[str | list[str] | None]
"""A PartitionSpec: for each dimension no axis, one, or several, outermost first."""

PROGRAM = (pkgutil.get_data(__name__, "sharding.py.txt") or b"").decode()
"""The file that reads `sharding.json`."""


def _spec(plan: Plan, parameter: BlockParameter, layout: str) -> Spec:
    """Mesh axes that shard each dimension of a parameter; partial sums are left to JAX."""
    sharding = plan.sharding_of(0)
    entries: Spec = [None] * len(parameter.shape)
    if sharding is None or not layout:
        return entries
    for axis, part in zip(sharding.axes, parse_layout(layout, len(sharding.axes)), strict=True):
        if part.cuts:
            entries[part.dim] = _with(entries[part.dim], axis.name)
    return entries


def _with(entry: str | list[str] | None, axis: str) -> str | list[str]:
    """The entry of a dimension with one more axis, innermost."""
    if entry is None:
        return axis
    return [*entry, axis] if isinstance(entry, list) else [entry, axis]


def _over_replicas(plan: Plan, parameter: BlockParameter, entries: Spec) -> Spec:
    """A spec with one more dimension sharded over the replicas (ZeRO): the first free one that they divide evenly."""
    replicas = len(plan.stages[0].replicas)
    free = (d for d, size in enumerate(parameter.shape) if entries[d] is None and replicas > 1 and size % replicas == 0)
    dim = next(free, None)
    return [DATA if d == dim else entry for d, entry in enumerate(entries)]


def _parameters(plan: Plan) -> Iterator[tuple[str, dict[str, Spec]]]:
    """For each parameter its name, and the specs of value, gradient and optimizer state."""
    zero = plan.configuration.zero
    for parameter in plan.stage_parameters(0):
        place = plan.layout_of(parameter.name)
        value = _spec(plan, parameter, place.value if place else "")
        state = _spec(plan, parameter, place.optimizer if place else "")
        sharded = _over_replicas(plan, parameter, state) if zero else state
        yield (
            parameter.name,
            {
                "value": _over_replicas(plan, parameter, value) if zero > 2 else value,
                "gradient": sharded if zero > 1 else value,
                "optimizer": sharded,
            },
        )


def _input(plan: Plan, shape: Sequence[int]) -> Spec:
    """Spec of an input: samples over replicas and batch axes, positions over context axes; tensor axes read all."""
    sharding = plan.sharding_of(0)
    entries: Spec = [DATA, *[None] * (len(shape) - 1)] if shape else []
    dims = {"batch": 0, "sequence": 1}
    for axis, boundary in zip(sharding.axes, sharding.boundaries, strict=True) if sharding else ():
        whole = boundary == "sequence" and not axis.role.deals
        dim = len(shape) if whole else dims.get(boundary, len(shape))
        if dim < len(shape) and shape[dim] % axis.size == 0:
            entries[dim] = _with(entries[dim], axis.name)
    return entries


def _missing_features(plan: Plan) -> Iterator[Gap]:
    sharding = plan.sharding_of(0)
    pieces = {
        place.tensor
        for entry in (sharding.blocks if sharding else ())
        for place in entry.tensors
        if place.optimizer and "~" in place.value
    }
    if pieces:
        named = ", ".join(sorted(pieces)[:2])
        yield Gap(f"weights cut block by block, each part by itself ({named})", "`shardplan plan --tp 1`")


def _write(plan: Plan) -> Export:
    sharding, replicas = plan.sharding_of(0), plan.stages[0].replicas
    axes = [DATA, *(axis.name for axis in (sharding.axes if sharding else ()))]
    document: dict[str, Any] = {
        "plan": plan.digest,
        "mesh": {
            "axes": axes,
            "shape": [len(replicas), *(sharding.sizes if sharding else ())],
            "ranks": [rank for group in replicas for rank in group],
        },
        "inputs": {spec.name: _input(plan, spec.shape) for spec in plan.model.inputs},
        "micro_batches": {"size": plan.micro_batches.size, "count": plan.micro_batches.count // len(replicas)},
        "precision": plan.options.precision,
        "remat": list(readings.recomputed_layers(plan) or plan.stages[0].repeats),
        "parameters": dict(_parameters(plan)),
    }
    if offload := plan.stages[0].offload:
        document["offload"] = list(offload)
    sizes = " x ".join(f"{prose_name(axis)} {size}" for axis, size in zip(axes, document["mesh"]["shape"], strict=True))
    count, size = document["micro_batches"]["count"], plan.micro_batches.size
    specs = f"`parameters`: specs of {len(document['parameters'])} for value, gradient and optimizer state"
    mapped = {
        "replicas and groups of ranks": f"`mesh`: {sizes}",
        f"weights, ZeRO-{plan.configuration.zero}": specs,
        "micro-batches": f"`micro_batches`: {count} of {size} samples, gradients summed",
        "recomputation": f"`remat`: {len(document['remat'])} layers, or kinds of modules, for `jax.checkpoint`",
    }
    if offload:
        policy = "`jax.checkpoint_policies.save_and_offload_only_these_names`, from `device` to `pinned_host`"
        named = ", ".join(map(prose_name, offload))
        mapped["activations in the host's memory"] = f"`offload`: {named}, as named for {policy}"
    left_out = (
        "Layouts of activations: the compiler follows those of weights and inputs; `with_sharding_constraint` fixes "
        "more of them.",
        "Which collectives run, and what they hide behind: the compiler's choice.",
        f"The optimizer {plan.options.optimizer} and the accumulation of gradients: your training step.",
    )
    files = {"sharding.json": pretty(document) + "\n", "sharding.py": PROGRAM, "launch.sh": _launch(plan)}
    return Export(files, mapped, left_out, tuple(range(plan.world_size)))


def _launch(plan: Plan) -> str:
    """A script that starts one process a machine, as JAX wants it."""
    nodes, _ = readings.machines(plan)
    machines = [f"export JAX_NUM_PROCESSES={nodes}", 'export JAX_PROCESS_ID="${NODE_RANK:?}"'] if nodes > 1 else []
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", "# TRAIN: your training program, which imports sharding.py"]
    return "\n".join([*lines, *machines, 'python "${TRAIN:?}" "$@"', ""])


register(
    Exporter(
        backend=BACKENDS.get("jax"),
        missing=_missing_features,
        write=_write,
        start="Import `sharding.py` from your training program; `launch.sh` starts one process a machine "
        "(`jax.distributed.initialize` on several).",
    )
)

"""PyTorch alone: modules of each `PipelineStage`, the order as CSV, and which modules are tensor parallel or sharded.

`parallel.json` says what, `parallelize.py` does it with `torch.distributed`: `parallelize_module`, `fully_shard`,
`checkpoint_wrapper`, and the schedule that `torch.distributed.pipelining` reads from the CSV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from planner.export import Export, Exporter, Gap, readings, register
from planner.plans import Plan, Requirement
from planner.plans.documents import pretty
from planner.systems.backends import BACKENDS

_TITAN = BACKENDS.get("torchtitan")
TORCH = dataclasses.replace(
    _TITAN,
    key="torch",
    title="torch.distributed",
    can=_TITAN.can - {Requirement.SKIP_EDGES, Requirement.EXPERT_PARALLEL, Requirement.SHARDED_GROUPS},
    schedules=(
        "1f1b", "gpipe", "dapple", "interleaved", "hanayo", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v",
    ),
    structure=dataclasses.replace(_TITAN.structure, axes=("tensor",), some_layers=True),
)  # fmt: skip
"""What torch's own runtime takes: any order in which a stage is on one rank of a pipeline, tensors that go to the next
stage alone (`distributed/pipelining/schedules.py`); no dispatch of tokens to experts, no ring attention."""

STYLES = ("colwise", "rowwise", "embedding rows", "embedding columns", "logits", "sequence")
"""Styles that `torch.distributed.tensor.parallel` has a class for."""

PROGRAM = '''\
"""Parallelise a model as `parallel.json` says; the model's forward has to pass over modules that are None."""

import json
from pathlib import Path

import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

HERE = Path(__file__).parent
PLAN = json.loads((HERE / "parallel.json").read_text())
BETWEEN = Shard(1) if PLAN["sequence_parallel"] else Replicate()


def style(kind):
    """The parallel style of a module by its name in `parallel.json`."""
    if kind == "colwise":
        return ColwiseParallel(input_layouts=BETWEEN)
    if kind == "rowwise":
        return RowwiseParallel(output_layouts=BETWEEN)
    if kind == "embedding rows":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=BETWEEN)
    if kind == "embedding columns":
        return ColwiseParallel(input_layouts=Replicate(), output_layouts=BETWEEN)
    if kind == "logits":
        return ColwiseParallel(input_layouts=BETWEEN, output_layouts=Replicate())
    return SequenceParallel()


def mesh(device_type="cuda"):
    """Ranks by pipeline worker, replica and place in the tensor parallel group."""
    ranks = torch.tensor(PLAN["mesh"]["ranks"]).reshape(PLAN["mesh"]["shape"])
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(PLAN["mesh"]["axes"]))


def stage_module(model, stage):
    """The model with the modules of other stages replaced by None."""
    for other, names in enumerate(PLAN["stages"]):
        for name in names if other != stage else ():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, None)
    return model


def parallelize(model, stage, device_mesh):
    """Tensor parallelism, recomputation and FSDP or replication of a stage's modules, in this order."""
    names = PLAN["stages"][stage]
    own = [name for name in PLAN["parallelize"] if any(f"{name}.".startswith(f"{module}.") for module in names)]
    styles = {name: style(PLAN["parallelize"][name]) for name in own}
    if styles:
        parallelize_module(model, device_mesh["tensor"], styles)
    for name in PLAN["recompute"]:
        if name in names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, checkpoint_wrapper(model.get_submodule(name)))
    data = device_mesh["data"]
    if PLAN["zero"]:
        for name in names:
            fully_shard(model.get_submodule(name), mesh=data, reshard_after_forward=PLAN["zero"] == 3)
        fully_shard(model, mesh=data, reshard_after_forward=PLAN["zero"] == 3)
    elif data.size() > 1:
        replicate(model, device_mesh=data)
    return model


def pipeline(make_model, loss_fn, device, device_mesh):
    """The schedule of this rank; `step(inputs, target=...)` runs an iteration.

    Args:
        make_model: makes the whole model (on the meta device, if it is large).
        loss_fn: mean loss of a micro-batch from outputs and target.
        device: of this rank.
        device_mesh: of all ranks, as `mesh` makes it.
    """
    group = device_mesh["pipeline"].get_group()
    own = PLAN["stages_of_worker"][device_mesh["pipeline"].get_local_rank()]
    count = len(PLAN["stages"])
    modules = [parallelize(stage_module(make_model(), stage), stage, device_mesh) for stage in own]
    stages = [PipelineStage(module, stage, count, device, group=group) for stage, module in zip(own, modules)]
    schedule = _PipelineScheduleRuntime(stages, PLAN["micro_batches"]["count"], loss_fn)
    schedule._load_csv(str(HERE / "schedule.csv"), format="compute_only")
    return schedule
'''
"""The file that reads `parallel.json`."""


def _missing_features(plan: Plan) -> Iterator[Gap]:
    other = [module for module, kind in readings.module_styles(plan) if kind not in STYLES]
    if other:
        named = readings.some_of(other)
        yield Gap(
            f"a parallel style for how modules of tensor parallel layers are cut ({named})", "`shardplan plan --tp 1`"
        )
    if plan.schedule.parts > 1:
        yield Gap("micro-batches in parts", "another `--schedule`")
    if plan.shared_parameters:
        tied = ", ".join(shared.parameter for shared in plan.shared_parameters)
        yield Gap(f"weights tied over stages ({tied})", "`shardplan plan --pp 1`")


def _document(plan: Plan) -> dict[str, Any]:
    degrees = readings.degrees(plan)
    workers = list(dict.fromkeys(stage.replicas for stage in plan.stages))
    return {
        "plan": plan.digest,
        "stages": [list(names) for names in readings.stage_modules(plan)],
        "stages_of_worker": [[s.index for s in plan.stages if s.replicas == replicas] for replicas in workers],
        "mesh": {
            "axes": ["pipeline", "data", "tensor"],
            "shape": [degrees.pipeline, degrees.data, degrees.tensor],
            "ranks": [rank for replicas in workers for group in replicas for rank in group],
        },
        "micro_batches": {"size": degrees.micro_batch, "count": degrees.accumulated},
        "precision": plan.options.precision,
        "zero": plan.configuration.zero,
        "sequence_parallel": readings.cuts_sequence(plan),
        "parallelize": dict(readings.module_styles(plan)),
        "recompute": list(readings.recomputed_layers(plan)),
    }


def _write(plan: Plan) -> Export:
    document = _document(plan)
    script = readings.launch(
        plan, '"${TRAIN:?}"', (), ("# TRAIN: your training program, which imports parallelize.py",)
    )
    files = {"parallel.json": pretty(document) + "\n", "parallelize.py": PROGRAM, "launch.sh": script}
    mapped = {
        f"{len(plan.stages)} stages": "`stages`: modules of each `PipelineStage`",
        "replicas": f"`mesh`, `zero` {plan.configuration.zero}: `fully_shard`, or `replicate` for 0",
        "groups of ranks": f"`parallelize`: parallel styles of {len(document['parallelize'])} modules",
        "recomputation": f"`recompute`: {len(document['recompute'])} modules in a `checkpoint_wrapper`",
    }
    if len(plan.stages) > 1:
        files["schedule.csv"] = readings.schedule_csv(plan)
        mapped[f"the order {plan.schedule.name}"] = "`schedule.csv` (`compute_only`)"
    left_out = [
        f"The precision {plan.options.precision} and the optimizer {plan.options.optimizer}: cast the model, or give "
        "`fully_shard` a `MixedPrecisionPolicy`.",
        "One gathered input of several products: each `ColwiseParallel` gathers its own; `PrepareModuleInput` on the "
        "module around them gathers once.",
        "Modules without parameters (rotary tables, masks): every stage keeps them.",
    ]
    return Export(files, mapped, tuple(left_out), tuple(range(plan.world_size)))


register(
    Exporter(
        backend=TORCH,
        plan_for="torchtitan",
        missing=_missing_features,
        write=_write,
        start="Import `parallelize.py` from your training program: `pipeline` for several stages, `parallelize` for "
        "one; `launch.sh` starts it.",
    )
)

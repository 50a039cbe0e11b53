"""PyTorch alone: modules of each `PipelineStage`, the order as CSV, and which modules are tensor parallel or sharded.

`parallel.json` says what, `parallelize.py` does it with `torch.distributed`: `parallelize_module`, `fully_shard`,
`checkpoint_wrapper`, and the schedule that `torch.distributed.pipelining` reads from the CSV.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from typing import Any

from planner.documents import pretty
from planner.escaping import prose_name
from planner.export import Export, Exporter, Gap, readings, register
from planner.plans import Plan, Requirement
from planner.systems.backends import BACKENDS

_TITAN = BACKENDS.get("torchtitan")
TORCH = dataclasses.replace(
    _TITAN,
    key="torch",
    title="torch.distributed",
    can=(_TITAN.can | {Requirement.TIED_PARAMETERS})
    - {Requirement.SKIP_EDGES, Requirement.EXPERT_PARALLEL, Requirement.SHARDED_GROUPS},
    schedules=(
        "1f1b", "gpipe", "dapple", "interleaved", "hanayo", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v",
    ),
    formats=(),
    decoders=False,
    structure=dataclasses.replace(_TITAN.structure, axes=("tensor",), some_layers=True),
)  # fmt: skip
"""What torch's own runtime takes: any order in which a stage is on one rank of a pipeline, tensors that go to the next
stage alone (`distributed/pipelining/schedules.py`); no dispatch of tokens to experts, no ring attention."""

STYLES = ("colwise", "rowwise", "embedding rows", "embedding columns", "logits", "sequence")
"""Styles that `torch.distributed.tensor.parallel` has a class for."""

PROGRAM = (pkgutil.get_data(__name__, "parallelize.py.txt") or b"").decode()
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
    if len(plan.stages) > 1 and (scattered := readings.scattered_weights(plan)):
        named = readings.some_of(scattered)
        yield Gap(f"weights whose module is unknown, or in several stages ({named})", "`shardplan plan --pp 1`")


def _document(plan: Plan) -> dict[str, Any]:
    degrees = readings.degrees(plan)
    workers = list(dict.fromkeys(stage.replicas for stage in plan.stages))
    return {
        "plan": plan.digest,
        "stages": [list(names) for names in readings.stage_modules(plan)],
        "weights": [list(names) for names in readings.own_weights(plan)],
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
        f"{len(plan.stages)} stages": "`stages`: modules of each `PipelineStage`; `weights`: those outside of modules",
        "replicas": f"`mesh`, `zero` {plan.configuration.zero}: `fully_shard`, or `replicate` for 0",
        "groups of ranks": f"`parallelize`: parallel styles of {len(document['parallelize'])} modules",
        "recomputation": f"`recompute`: {len(document['recompute'])} modules in a `checkpoint_wrapper`",
    }
    if len(plan.stages) > 1:
        files["schedule.csv"] = readings.schedule_csv(plan)
        mapped[f"the order {prose_name(plan.schedule.name)}"] = "`schedule.csv` (`compute_only`)"
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

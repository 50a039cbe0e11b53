"""Systems that cut every operator instead of the model's length: Tofu, Mesh-TensorFlow, GShard."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.errors import UsageError
from planner.solvers.layouts import LayoutTask, lay_operators
from planner.space import Configuration
from planner.systems.setting import Setting
from planner.systems.types import Proposal, System


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """The layouts of the system's own search on each mesh with the largest micro-batches, fastest first."""
    if system.layouts is None:
        raise UsageError(f"{system.title} says no way to cut operators", hint="give the system its layouts")
    for each in lay_operators(task_of(setting), system.layouts):
        costs = setting.prices.whole(each.micro_batch, each.mesh, each.answer.decision, each.slowest)
        stage = costs.stage(0, setting.blocks)
        count = setting.job.global_batch // each.micro_batch
        configuration = Configuration((stage,), 1, each.micro_batch, count, "1f1b")
        shape = " x ".join(map(str, each.mesh))
        unlike = bool(setting.cluster.device_types[: math.prod(each.mesh)].any())
        yield Proposal(
            (configuration,),
            words=f"every operator on a mesh of {shape}, micro-batch {each.micro_batch} x {count}",
            notes=("communication is not overlapped", "unlike devices share the operators: no plan file")[: 1 + unlike],
            unwritten=f"{system.title} shares every operator among unlike devices: its row has no plan file" * unlike,
        )
        if setting.fits(configuration):
            return


def task_of(setting: Setting) -> LayoutTask:
    """What layouts are looked for."""
    only = setting.fixed or bool(setting.job.micro_batches)
    where = setting.prices, setting.cluster, setting.job, setting.devices
    return LayoutTask(*where, setting.sizes, only, setting.states_bytes)

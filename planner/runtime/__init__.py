"""Trains from a plan on torch.distributed: stages are the operators of the ONNX file, ranks follow the plan's orders.

Needs torch (`pip install torch`); planning does not, and never imports this package.

    trainer = planner.runtime.load("model.plan.json", "model.onnx")     # under torchrun
    loss = trainer.step(batch)

    report = planner.runtime.run(plan, "model.onnx", steps=20, check=True)   # all ranks on this machine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.runtime.data import synthetic as synthetic
    from planner.runtime.interpreter import run_graph as run_graph
    from planner.runtime.jobs import GradientCheck as GradientCheck
    from planner.runtime.jobs import RankMemory as RankMemory
    from planner.runtime.jobs import RunReport as RunReport
    from planner.runtime.jobs import fullest_rank as fullest_rank
    from planner.runtime.jobs import run as run
    from planner.runtime.launch import run_ranks as run_ranks
    from planner.runtime.links import MeasuredLink as MeasuredLink
    from planner.runtime.links import measure_links as measure_links
    from planner.runtime.measuring import TorchRunner as TorchRunner
    from planner.runtime.model_file import read_model as read_model
    from planner.runtime.operators import RULES as RULES
    from planner.runtime.passes import measure_passes as measure_passes
    from planner.runtime.requirements import EXECUTED as EXECUTED
    from planner.runtime.requirements import refusals as refusals
    from planner.runtime.requirements import require_executable as require_executable
    from planner.runtime.trainer import Trainer as Trainer
    from planner.runtime.trainer import load as load

_WHERE = {
    "EXECUTED": "requirements",
    "GradientCheck": "jobs",
    "MeasuredLink": "links",
    "RULES": "operators",
    "RankMemory": "jobs",
    "RunReport": "jobs",
    "TorchRunner": "measuring",
    "Trainer": "trainer",
    "fullest_rank": "jobs",
    "load": "trainer",
    "measure_links": "links",
    "measure_passes": "passes",
    "read_model": "model_file",
    "refusals": "requirements",
    "require_executable": "requirements",
    "run": "jobs",
    "run_graph": "interpreter",
    "run_ranks": "launch",
    "synthetic": "data",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import a name when it is first used, since torch takes seconds.

    Raises:
        UsageError: torch is not installed.
    """
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError("running a plan needs torch", hint="pip install torch (shardplan[torch])") from error
    return getattr(module, name)

"""Fields of a job that make no sense are named, whichever way a plan is asked for."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

import planner

WRONG: list[tuple[str, Any]] = [
    ("global_batch", 0),
    ("global_batch", 64.0),
    ("global_batch", "64"),
    ("global_batch", True),
    ("devices", -1),
    ("max_stages", -2),
    ("overlap", math.nan),
    ("overlap", -0.5),
    ("overlap", 3),
    ("micro_batches", 4),
    ("micro_batches", (0,)),
    ("tensor_parallel", 2),
    ("tensor_parallel", (0,)),
    ("pipeline_stages", (0,)),
    ("data_parallel", (-1,)),
    ("meshes", (2,)),
    ("meshes", ((0,),)),
    ("meshes", ((),)),
    ("schedules", "1f1b"),
    ("schedules", ()),
    ("zero", 1),
    ("zero", (4,)),
    ("zero", ()),
    ("recompute", ""),
    ("keep", ("layer0",)),
    ("forbid", "MatMul:k"),
]


@functools.cache
def loaded() -> tuple[planner.Graph, planner.Cluster]:
    return planner.load_graph("gpt3-125m", dims={"seq": 64}), planner.load_cluster("dgx-a100")


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_field_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    job = planner.Job(**{"global_batch": 64, name: value})
    for ask in (
        planner.plan,
        functools.partial(planner.plan_system, "1f1b"),
    ):
        with pytest.raises(planner.JobError, match=f"^{name} is"):
            ask(*loaded(), job)


def test_lists_do_for_tuples() -> None:
    plan = planner.plan(*loaded(), planner.Job(64, micro_batches=[8], zero=[1]))  # type: ignore[arg-type]
    assert plan.micro_batches.size == 8

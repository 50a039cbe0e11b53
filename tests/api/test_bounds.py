"""A matrix of jobs: no plan and no runner-up is faster than its bound, and no restriction makes a plan faster."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

import planner
from planner.plans import Plan, dumps
from tests.judge import judge

# model, hardware, nodes (0: as in the profile), dimensions, job, and the restrictions that are tried
Entry = tuple[str, str, int, dict[str, int], dict[str, Any], tuple[str, ...]]
SHORT = {"seq": 128}

JOBS: dict[str, Entry] = {
    "gpt2, three stages": (
        "gpt2", "p3.16xlarge", 0, SHORT, {"global_batch": 60, "pipeline_stages": (3,), "devices": 6}, ("1f1b",),
    ),
    "resnet18 on a mesh": ("resnet18", "tpu-v3-pod", 0, {}, {"global_batch": 64, "meshes": ((2, 2),)}, ("zero 0",)),
    "gpt2 on NVLink": ("gpt2", "dgx-1v", 0, SHORT, {"global_batch": 32}, ("no MatMul:m", "uniform")),
    "gpt2 on PCIe": ("gpt2", "v100-pcie-4", 0, {"seq": 256}, {"global_batch": 16}, ("two stages", "never again")),
    "gpt2, mixed pool": ("gpt2", "mixed-pool", 0, {"seq": 256}, {"global_batch": 32}, ("alone", "gpipe")),
    "bert-base": ("bert-base", "dgx-1v", 0, SHORT, {"global_batch": 32}, ("one sample", "zero 1")),
    "bert-large": ("bert-large", "p3.16xlarge", 0, SHORT, {"global_batch": 64}, ("uniform", "two ranks")),
    "vgg16 on PCIe": ("vgg16", "v100-pcie-4", 0, {}, {"global_batch": 64}, ("two stages", "always again")),
    "vgg16, mixed pool": ("vgg16", "mixed-pool", 0, {}, {"global_batch": 64}, ("uniform", "1f1b", "gpipe")),
    "alexnet on Ethernet": ("alexnet", "ethernet-10g", 0, {}, {"global_batch": 128, "devices": 8}, ("alone",)),
    "vgg11 on Ethernet": ("vgg11", "ethernet-25g", 0, {}, {"global_batch": 96}, ("zero 1", "uniform")),
    "resnet50": ("resnet50", "ethernet-25g", 0, {}, {"global_batch": 64}, ("two stages",)),
    "resnet34": ("resnet34", "v100-pcie-4", 0, {}, {"global_batch": 24}, ("zero 0", "1f1b")),
    "gnmt-8": ("gnmt-8", "v100-pcie-4", 0, {}, {"global_batch": 64}, ("uniform", "never again", "gpipe")),
    "gnmt-16 on Ethernet": ("gnmt-16", "ethernet-10g", 0, {}, {"global_batch": 128}, ("uniform",)),
    "t5-base": ("t5-base", "dgx-a100", 0, {}, {"global_batch": 64}, ("two ranks",)),
    "vit-s16": ("vit-s16", "tpu-v3-pod", 0, {}, {"global_batch": 96, "devices": 8}, ("two stages",)),
    "dlrm": ("dlrm-kaggle", "dgx-a100", 0, {}, {"global_batch": 512}, ("no MatMul:m",)),
    "llama2-13b": ("llama2-13b", "dgx-h100", 2, {"seq": 4096}, {"global_batch": 32}, ()),
    "mixtral": ("mixtral-8x7b", "dgx-h100", 2, {"seq": 2048}, {"global_batch": 64}, ("uniform",)),
}  # fmt: skip

RESTRICTIONS: dict[str, dict[str, Any]] = {
    "no MatMul:m": {"forbid": ("MatMul:m",)},
    "uniform": {"uniform": True},
    "1f1b": {"schedules": ("1f1b",)},
    "gpipe": {"schedules": ("gpipe",)},
    "zero 0": {"zero": (0,)},
    "zero 1": {"zero": (1,)},
    "never again": {"recompute": "never"},
    "always again": {"recompute": "always"},
    "alone": {"tensor_parallel": (1,)},
    "two ranks": {"tensor_parallel": (2,)},
    "two stages": {"pipeline_stages": (2,)},
    "one sample": {"micro_batches": (1,)},
}


@cache
def planned(name: str, restriction: str = "") -> Plan:
    """The plan of a job, perhaps restricted."""
    model, hardware, nodes, dims, options, _ = JOBS[name]
    graph, cluster = planner.load_graph(model, dims=dims), planner.load_cluster(hardware, nodes=nodes or None)
    job = dataclasses.replace(planner.Job(backends=("any",), **options), **RESTRICTIONS.get(restriction, {}))
    return planner.plan(graph, cluster, job)


def times_s(plan: Plan) -> list[float]:
    """Of the plan, and of what else was played and can run."""
    others = [other.simulated_iteration_s for other in plan.alternatives if not other.infeasible]
    return [plan.predictions.reached_s, *(seconds for seconds in others if seconds is not None)]


@pytest.mark.parametrize("name", JOBS)
def test_no_plan_beats_its_bound_and_no_restriction_wins(name: str) -> None:
    plan = planned(name)
    predictions = plan.predictions
    assert judge.judged(dumps(plan))[0] == pytest.approx(predictions.simulated_iteration_s, rel=1e-6)
    assert predictions.bound_s <= min(times_s(plan))
    assert predictions.proven_optimal == (predictions.gap <= 1e-9)
    for restriction in JOBS[name][5]:
        restricted = planned(name, restriction)
        assert min(times_s(plan)) <= min(times_s(restricted)) * (1 + 1e-9)
        assert predictions.bound_s <= min(times_s(restricted)) * (1 + 1e-9)
        line_s = predictions.line_bound_s
        if line_s is not None and restricted.schedule.name in ("1f1b", "gpipe"):
            assert predictions.bound_s < line_s <= restricted.predictions.reached_s * (1 + 1e-9)
        assert restricted.predictions.bound_s <= min(times_s(restricted))

"""What systems decide, and the best stages for a schedule or for orders of one's own, as plan files."""

from __future__ import annotations

from functools import cache

import pytest

import planner
from planner.errors import InfeasibleError, PlanError
from planner.graph import Graph
from planner.hardware import Cluster
from planner.plans import Plan, counterparts, dumps, leaders, loads, validate
from planner.simulate import simulate
from planner.systems import SystemRow, compare_systems, names, plan_system, plans_of
from tests.systems.test_systems import compared

JOB = planner.Job(global_batch=64, precision="fp32")
HALF = planner.Job(global_batch=64, precision="fp16")
SHORT = "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"


@cache
def loaded(model: str = "gnmt-8", hardware: str = "v100-pcie-4") -> tuple[Graph, Cluster]:
    return planner.load_graph(model), planner.load_cluster(hardware)


@cache
def planned() -> tuple[dict[str, SystemRow], dict[str, Plan], dict[str, str]]:
    """Rows, plans, and why there is none."""
    found = compared("gnmt-8", "v100-pcie-4", 64, "fp32")
    return {row.system: row for row in found.rows}, *plans_of(found)


def test_every_row_that_fits_has_a_plan() -> None:
    rows, plans, refused = planned()
    assert set(plans) == {name for name, row in rows.items() if row.feasible}
    assert refused == {}


def test_rows_without_a_plan_file_say_why() -> None:
    graph, cluster = loaded("gpt2", "mixed-pool")
    found = compare_systems(planner.Pricer(graph, cluster, HALF), cluster, HALF, systems=["gshard"])
    plans, refused = plans_of(found)
    assert plans == {}
    assert "GShard shares every operator among unlike devices: its row has no plan file" in refused["gshard"]
    assert "unlike devices share the operators: no plan file" in found.rows[0].notes


@pytest.mark.parametrize("name", sorted(names()))
def test_a_plan_says_what_its_row_says(name: str) -> None:
    graph, cluster = loaded()
    rows, plans, _ = planned()
    plan, row = plans[name], rows[name]
    assert loads(dumps(plan)) == plan
    assert validate(plan, planner.rebatch(graph, plan.micro_batches.size), cluster) == []
    assert plan.predictions.simulated_iteration_s == pytest.approx(plan.predictions.iteration_s, rel=0.02)
    assert plan.system is not None
    assert plan.predictions.simulated_iteration_s == pytest.approx(row.iteration_s, rel=1e-6)
    if name != "auto":  # its own search predicts by a closed form
        assert plan.predictions.iteration_s == pytest.approx(row.iteration_s)
    assert plan.micro_batches.size == row.micro_batch
    assert plan.world_size - len(plan.idle_ranks) == row.devices
    assert plan.system.name == name
    assert ("async_weights" in plan.requires) == (row.semantics.value == "async")
    assert max(plan.schedule.versions, default=1) == row.weight_versions


def test_replicas_of_a_plan_file_share_the_minibatches_evenly() -> None:
    """15-1 for VGG-16 with 16 minibatches has no file; with 30 of them it has."""
    graph, cluster = loaded("vgg16", "ethernet-10g")
    uneven = planner.plan_system(
        "pipedream", graph, cluster, planner.Job(global_batch=1024, precision="fp32", optimizer="momentum")
    )
    counts = [len(stage.replicas) for stage in uneven.stages]
    assert all(uneven.micro_batches.count % count == 0 for count in counts)
    assert uneven.system is not None
    assert "replicas 15-1 do not share 16 minibatches evenly" in uneven.system.notes[-1]
    even = planner.plan_system(
        "pipedream", graph, cluster, planner.Job(global_batch=960, precision="fp32", optimizer="momentum")
    )
    assert [len(stage.replicas) for stage in even.stages] == [15, 1]
    assert even.predictions.iteration_s < uneven.predictions.iteration_s


def test_asynchronous_plans_carry_what_keeps_training_right() -> None:
    _, plans, _ = planned()
    stages = len(plans["pipemare"].stages)
    count = plans["pipemare"].micro_batches.count
    taus = [c.forward_delay for c in plans["pipemare"].schedule.corrections]
    assert taus == pytest.approx([(2 * (stages - i) - 1) / count for i in range(stages)])
    assert plans["pipemare"].system is not None
    assert "T3" in plans["pipemare"].system.tells
    assert plans["pipelined-backprop"].schedule.averaged == (1,) * len(plans["pipelined-backprop"].stages)
    assert plans["hetpipe"].schedule.clock_distance == 0
    assert plans["pipedream-2bw"].schedule.versions == (2,) * len(plans["pipedream-2bw"].stages)


def test_gradients_of_servers_stand_in_the_plan_by_tensor() -> None:
    _, plans, _ = planned()
    found = {name: plans[name].exchange for name in ("byteps", "herring", "parallax")}
    assert plans["data-parallel"].exchange is None
    parallax, herring = found["parallax"], found["herring"]
    assert parallax is not None
    assert herring is not None
    ways = {tensor: e.method for e in parallax.tensors for tensor in e.tensors}
    sparse = {tensor for tensor, way in ways.items() if way == "ps"}
    assert sparse
    assert all("embed" in tensor for tensor in sparse)
    assert {e.shares for e in herring.tensors} == {(1.0,)}  # one machine
    assert len(herring.messages) > 1
    assert max(m.bytes for m in herring.messages) <= 25e6
    weights = {
        p.name for stage in range(len(plans["herring"].stages)) for p in plans["herring"].stage_parameters(stage)
    }
    assert {tensor for e in herring.tensors for tensor in e.tensors} <= weights


def test_a_system_by_name() -> None:
    plan = plan_system("chimera", *loaded(), JOB)
    assert plan.schedule.name.startswith("chimera")
    assert plan == planned()[1]["chimera"]
    with pytest.raises(PlanError, match="GShard shares every operator among unlike devices"):
        plan_system("gshard", *loaded("gpt2", "mixed-pool"), HALF)
    with pytest.raises(InfeasibleError, match=r"GPipe: no plan fits: .* needs .* GiB"):
        plan_system("gpipe", *loaded("gpt3-13b"), JOB)


def test_groups_of_ranks_of_the_best_of_all_stand_in_its_plan() -> None:
    """A model that one device cannot hold, and whose layers four can share."""
    graph, cluster = loaded("gpt3-2.7b")
    plan = plan_system("auto", graph, cluster, planner.Job(global_batch=4, tensor_parallel=(4,)))
    assert [stage.group_ranks for stage in plan.stages] == [4]
    assert len(plan.shardings) == 1
    assert validate(plan, planner.rebatch(graph, plan.micro_batches.size), cluster) == []


def test_copies_placed_stage_by_stage_are_played_once() -> None:
    """Two stages, two copies on two switches of two devices: copy 0 is ranks 0 and 2, copy 1 is ranks 1 and 3."""
    graph, cluster = loaded()
    plan = plan_system("pipedream-2bw", graph, cluster, JOB)
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan.copies == 2
    assert leaders(plan) == ([0, 2], 2)
    assert counterparts(plan, [0, 2], 2) == [((0,), (1,)), ((2,), (3,))]
    played = simulate(plan)
    assert [lane.ranks for lane in played.lanes] == [(0, 1), (2, 3)]
    assert played.step_s == pytest.approx(plan.predictions.iteration_s)

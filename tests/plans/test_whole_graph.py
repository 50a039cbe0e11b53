"""Plans in which one decision about the whole graph says where every tensor lies, also between blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import planner
from planner.errors import UsageError
from planner.graph import Graph
from planner.hardware import Cluster
from planner.plans import Fault, Plan, ShardedBlock, dumps, explain, loads, rebuild, seal, split_reasons, validate
from planner.report import explanation_document
from planner.sharding import BoundaryLayout, canonical_layout, evaluate
from planner.systems import plan_system

JOB = planner.Job(global_batch=16, precision="fp16")
SYSTEMS = ("gshard", "mesh-tensorflow", "tofu")


@cache
def planned(system: str, model: str = "resnet50") -> tuple[Plan, Graph, Cluster]:
    graph, cluster = planner.load_graph(model), planner.load_cluster("dgx-a100")
    plan = plan_system(system, graph, cluster, JOB)
    return plan, planner.rebatch(graph, plan.micro_batches.size), cluster


@pytest.mark.parametrize("model", ["resnet50", "gpt2"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_plan_is_read_back_and_stands_up_to_the_check(system: str, model: str) -> None:
    plan, graph, cluster = planned(system, model)
    assert [s.boundaries for s in plan.shardings] == [("free",) * len(plan.shardings[0].axes)]
    assert plan.stages[0].group_ranks == plan.shardings[0].ranks
    assert loads(dumps(plan)) == plan
    assert validate(plan, graph, cluster) == []
    assert validate(plan, graph) == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_blocks_add_up_to_what_the_whole_graph_costs(system: str) -> None:
    """The judge, asked once about all operators, finds what the blocks' figures say together: nothing runs twice."""
    plan, graph, cluster = planned(system)
    (rebuilt,) = rebuild(plan, graph, cluster)
    whole = {}
    for _, entry, names in plan.sharded_blocks(0):
        for name, choice in rebuilt.decision(entry).items():
            is_operator = name.startswith("op:")
            own = names[name.removeprefix("op:")]
            whole["op:" + own if is_operator else own] = choice
    assert len([name for name in whole if name.startswith("op:")]) == len(graph.nodes)
    verdict = evaluate(rebuilt.setting, whole, facts=rebuilt.facts)
    assert verdict.violations == []
    sums = [
        sum(getattr(entry.figures, key) * len(entry.members()) for entry in rebuilt.sharding.blocks)
        for key in ("forward_s", "backward_s", "sent_bytes")
    ]
    assert sums == pytest.approx([verdict.forward_s, verdict.backward_s, verdict.sent_bytes], rel=1e-6)


def changed(plan: Plan, tensor: str, **fields: Any) -> Plan:
    """The plan with a tensor's place changed in the one entry that makes or reads it first."""
    (sharding,) = plan.shardings

    def place(entry: ShardedBlock) -> ShardedBlock:
        own = (dataclasses.replace(p, **fields) if p.tensor == tensor else p for p in entry.tensors)
        return dataclasses.replace(entry, tensors=tuple(own))

    at = next(k for k, e in enumerate(sharding.blocks) if any(p.tensor == tensor for p in e.tensors))
    blocks = tuple(place(e) if k == at else e for k, e in enumerate(sharding.blocks))
    return seal(dataclasses.replace(plan, shardings=(dataclasses.replace(sharding, blocks=blocks),)))


def between(plan: Plan) -> str:
    """A tensor that one entry names as made and another as read."""
    names = [{p.tensor for p in entry.tensors if not p.optimizer} for entry in plan.shardings[0].blocks]
    return next(n for k, own in enumerate(names) for n in sorted(own) if any(n in other for other in names[k + 1 :]))


def test_blocks_that_disagree_about_a_tensor_are_found() -> None:
    plan, graph, _ = planned("tofu")
    name = between(plan)
    place = plan.layout_of(name, 0)
    assert place is not None
    other = "R" if place.value != "R" else "S0"
    found = validate(changed(plan, name, value=other, gradient=other), graph)
    assert any(f.fault is Fault.SHARDINGS and f.tensor == name and "for block" in f.message for f in found)


def halves(plan: Plan) -> Plan:
    (sharding,) = plan.shardings
    axes = tuple(
        dataclasses.replace(a, name=n, size=s) for a, n, s in zip(sharding.axes * 2, "ab", (4, 2), strict=True)
    )
    return dataclasses.replace(
        plan, shardings=(dataclasses.replace(sharding, axes=axes, boundaries=("free", "batch")),)
    )


def alike(treatment: str) -> Callable[[Plan], Plan]:
    """The plan that says of all tensors between blocks that they lie alike."""

    def change(plan: Plan) -> Plan:
        sharding = dataclasses.replace(plan.shardings[0], boundaries=(treatment,))  # type: ignore[arg-type]
        return dataclasses.replace(plan, shardings=(sharding,))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (halves, "has the mesh a 4 x b 2 and boundaries free/batch"),
        (alike("replicated"), "of 'tensor 8, free', else as R, "),
        (alike("batch"), "of 'tensor 8, free', else as S0, "),
        (alike("sequence"), "of 'tensor 8, free', else as R, "),
    ],
)
def test_boundaries_that_are_not_as_said_are_found(damage: Callable[[Plan], Plan], words: str) -> None:
    """Tofu's layouts of ResNet-50 are none that all tensors between blocks share."""
    plan, graph, _ = planned("tofu")
    assert any(words in f.message for f in validate(seal(damage(plan)), graph))


def test_it_is_explained() -> None:
    plan, graph, cluster = planned("gshard", "gpt2")
    (view,) = explanation_document(explain(plan))["groups"]
    assert sum(block["blocks"] for block in view["blocks"]) == len(plan.block_table)
    reasons = split_reasons(plan, graph, cluster, most=1)
    assert {reason.block for reason in reasons} == {entry.first[0] for entry in plan.shardings[0].blocks}
    assert all(rival.more_s > -1e-9 for reason in reasons for rival in reason.rivals[:1])


def test_a_free_boundary_does_not_follow_from_the_shape() -> None:
    graph = planner.load_graph("gpt2")
    tensor = next(iter(graph.tensors.values()))
    with pytest.raises(UsageError, match="is free"):
        canonical_layout(tensor, (BoundaryLayout.FREE,), (8,))

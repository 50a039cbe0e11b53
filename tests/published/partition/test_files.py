"""Partition plans as files: options, bytes, reading back, judging."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.errors import InfeasibleError, ModelError, PlanError, UsageError
from planner.published.families import FAMILIES, Instance
from planner.published.options import FLAGS, PartitionOptions, bandwidths, machine_counts, memory_size, seconds
from planner.published.plan_file import Part, PartitionPlan, from_ranges, in_words, seal, to_ranges, to_runs
from planner.published.problems import LatencyDecision, MaxLoadDecision
from planner.published.readers import operator_graph_from
from tests.published.partition.instances import PIPEDREAM, operator_graph, piper, written
from tests.shared_data import shared_path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return written(operator_graph(), tmp_path / "small.json")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return written(PIPEDREAM, tmp_path / "small.graph.txt")


def test_an_operator_graph_is_planned_as_written_out_by_hand(graph: Path) -> None:
    plan = planner.partition(graph)
    assert (plan.instance.name, plan.instance.family, plan.instance.nodes, plan.instance.edges) == (
        "small", "operator-graph", 4, 3,
    )  # fmt: skip
    goal = plan.objective
    assert (goal.name, goal.unit, goal.value, goal.bound, goal.gap) == ("max-load", "ms", 5.5, 5.5, 0.0)
    assert goal.proven_optimal
    assert goal.stopped_after_s is None
    assert plan.parts == (
        Part("accelerator", ((10, 11),), 5.5, 200.0),
        Part("accelerator", ((12, 13),), 5.5, 200.0),
        Part("cpu", (), 0.0),
    )
    assert [(t.name, t.value, t.breaks) for t in plan.trivial] == [
        ("one accelerator", 10.0, ("memory",)),
        ("even split in topological order", 5.5, ()),
        ("one CPU", 100.0, ()),
    ]
    assert plan.options == {"contiguous": True, "devices": 2, "cpus": 1, "memory_bytes": 250.0}


def test_options_replace_what_the_file_says(graph: Path) -> None:
    assert planner.partition(graph, devices=1, memory="1 KB", cpus=0).objective.value == 10.0
    assert planner.partition(graph, devices=4, contiguous=False).options["contiguous"] is False


def test_the_latency_of_a_chain_is_that_of_one_device(graph: Path) -> None:
    plan = planner.partition(graph, objective="latency", memory="1 KB")
    assert plan.objective.value == 10.0
    assert [part.nodes for part in plan.parts if part.nodes] == [((10, 13),)]
    assert planner.check_partition(plan, planner.load_instance(graph)) == ()


def test_pipers_layers_become_two_stages(tmp_path: Path) -> None:
    """Memory for 5: both layers on a device of two need 2 * (1 + 1) = 4 and take 2 / 2 s; so do two stages."""
    path = written(piper(), tmp_path / "two.json")
    plan = planner.partition(path)
    assert (plan.objective.name, plan.objective.unit, plan.objective.value) == ("time-per-sample", "s", 1.0)
    # With 3 bytes only one layer fits a device: two stages, the first with 2 samples in flight, 2 a + b = 3.
    tight = planner.partition(path, memory=3)
    assert [(part.nodes, part.replicas, part.memory_bytes) for part in tight.parts] == [
        (((0, 0),), 1, 3.0),
        (((1, 1),), 1, 2.0),
    ]
    assert tight.parts[0].choices[0].name == "vanilla"


def test_pipers_layers_in_an_iteration(tmp_path: Path) -> None:
    """8 micro-batches of 2 s of work on two devices: shared by both, 8 * 1 s."""
    plan = planner.partition(written(piper(), tmp_path / "two.json"), objective="iteration-time")
    assert plan.objective.value == 8.0
    assert plan.parts[0].configuration == "2 devices, vanilla"


def test_a_profile_gets_replicas_for_the_layers_with_few_weights(profile: Path) -> None:
    """Four machines: convolutions on three, (120 ms + 4 * 2 * 8 KB / (1 GB/s * 3)) / 3, the 30 ms layer on one."""
    plan = planner.partition(profile, objective="time-per-minibatch", machines="4", bandwidth="1 GB/s")
    assert plan.objective.value == pytest.approx((0.120 + 4 * 2 * 8000 / 3e9) / 3, rel=1e-12)
    assert [(part.nodes, part.replicas) for part in plan.parts] == [(((2, 3),), 3), (((4, 4),), 1)]
    # The paper's own cost: the longer of computation and exchange.
    paper = planner.partition(profile, machines="4", bandwidth="1 GB/s", cost="published")
    assert paper.objective.value == pytest.approx(0.040, rel=1e-12)


@pytest.mark.parametrize("layout", ["nested", "placed"])
def test_plans_on_several_levels_read_back(profile: Path, layout: str) -> None:
    plan = planner.partition(profile, machines="2x2", bandwidth=["10 GB/s", "1 GB/s"], layout=layout)
    assert plan.options["layout"] == layout
    assert planner.published.load_partition(planner.published.dump_partition(plan)) == plan
    assert planner.check_partition(plan, planner.load_instance(profile)) == ()


def test_a_cluster_stands_for_machines_bandwidth_and_memory(profile: Path) -> None:
    plan = planner.partition(profile, cluster=planner.load_cluster("dgx-a100", nodes=2))
    assert plan.options["machines"] == (8, 2)
    assert len(plan.options["bandwidth_byte_per_s"]) == 2  # type: ignore[arg-type]
    assert plan.options["memory_bytes"] == round(79.15 * 2**30) - 2e9
    with pytest.raises(UsageError, match="describe a cluster, and so does --hardware"):
        planner.partition(profile, cluster=planner.load_cluster("dgx-a100"), machines="8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machines": "4"}, "--machines does not apply to the objective max-load (operator graph (JSON))"),
        ({"objective": "max-lode"}, "'max-lode' is no objective"),
        ({"memory": "16"}, "16 has no unit"),
        ({"time_limit": 0}, "leaves no time"),
        ({"solver": "piper-dp"}, "does not take a MaxLoadProblem"),
        ({"cpus": -1}, "-1 is less than 0"),
        ({"cost": "realised"}, "'realised' is no cost"),
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(graph: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        planner.partition(graph, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "carries no machine: --machines is missing"),
        ({"machines": "4x2"}, "--bandwidth is missing"),
        ({"machines": "4x2", "bandwidth": "1GB/s"}, "1 bandwidths for 2 levels"),
        ({"machines": "4by2", "bandwidth": "1GB/s"}, "are no machines"),
        ({"machines": "4", "devices": 4, "bandwidth": "1GB/s"}, "both say how many devices"),
        ({"machines": "4", "bandwidth": "1Gb/s"}, "is not a unit"),
    ],
)
def test_what_a_profile_needs_is_asked_for(profile: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planner.partition(profile, **options)


def test_time_limits_and_quantities_as_people_write_them() -> None:
    assert (seconds("60s"), seconds("2min"), seconds("1.5"), seconds(3)) == (60.0, 120.0, 1.5, 3.0)
    options = PartitionOptions(
        memory_bytes=memory_size("16 GiB"),
        bandwidth_byte_per_s=bandwidths("10GB/s,1.25GB/s"),
        machines=machine_counts("4x2"),
    )
    assert options.memory_bytes == 16 * 2**30
    assert options.bandwidth_byte_per_s == (1e10, 1.25e9)
    assert options.machines == (4, 2)


def test_no_plan_names_the_instance_and_the_memory_that_would_do(graph: Path) -> None:
    with pytest.raises(InfeasibleError, match="small: no plan keeps all limits") as caught:
        planner.partition(graph, memory=120, cpus=0)
    assert "120 B a device is too little memory" in str(caught.value)


def test_files_that_are_no_instance_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such instance file"):
        planner.load_instance(tmp_path / "absent.json")
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    assert planner.published.instance_family(path) is None
    with pytest.raises(ModelError, match="not an instance of a partition problem"):
        planner.load_instance(path)


def test_every_objective_and_option_is_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "partition.md").read_text()
    for _, family in FAMILIES.items():
        for objective in family.objectives:
            row = next(line for line in text.splitlines() if f"| `{objective.name}` |" in line)
            assert row
            assert [FLAGS[name] for name in objective.options if f"`{FLAGS[name]}`" not in text] == []


def test_keys_may_stand_in_any_order(tmp_path: Path) -> None:
    content = operator_graph()
    edges = content.pop("edges")
    long = {"edges": edges, "about": "x" * 10_000, **content}
    assert planner.partition(written(long, tmp_path / "small.json")).objective.value == 5.5


def test_two_runs_give_the_same_bytes_and_bytes_read_back(graph: Path, profile: Path) -> None:
    for path, options in ((graph, {"contiguous": False}), (profile, {"machines": "2x2", "bandwidth": "9GB/s,1GB/s"})):
        texts = [planner.published.dump_partition(planner.partition(path, **options)) for _ in range(2)]
        assert texts[0] == texts[1]
        assert planner.published.dump_partition(planner.published.load_partition(texts[0])) == texts[0]


def _changed(plan: PartitionPlan, **changes: Any) -> PartitionPlan:
    return seal(dataclasses.replace(plan, **changes))


def test_check_finds_what_is_wrong(graph: Path) -> None:
    plan, instance = planner.partition(graph), planner.load_instance(graph)
    assert planner.check_partition(plan, instance) == ()

    def faults(**changes: Any) -> list[str]:
        return [finding.fault for finding in planner.check_partition(_changed(plan, **changes), instance)]

    one, two, cpu = plan.parts
    assert faults(parts=(dataclasses.replace(one, nodes=((10, 12),)), two, cpu)) == ["parts"]
    assert faults(parts=(dataclasses.replace(one, nodes=((10, 10),)), two, cpu)) == ["parts"]
    assert faults(parts=(one, two)) == ["parts"]
    assert faults(parts=(dataclasses.replace(one, nodes=((10, 99),)), two, cpu)) == ["parts"]
    moved = (dataclasses.replace(one, nodes=((10, 12),)), dataclasses.replace(two, nodes=((13, 13),)), cpu)
    assert faults(parts=moved) == ["memory", "value", "value", "value"]
    crossed = (
        dataclasses.replace(one, nodes=((10, 10), (12, 12))),
        dataclasses.replace(two, nodes=((11, 11), (13, 13))),
    )
    assert faults(parts=(*crossed, cpu))[0] == "order"
    assert faults(options={**plan.options, "devices": 3}) == ["parts"]
    assert faults(options={**plan.options, "colour": 3}) == ["parts"]
    assert faults(options={**plan.options, "cpus": "one"}) == ["parts"]
    goal = plan.objective
    assert faults(objective=dataclasses.replace(goal, value=5.4, bound=5.4)) == ["value"]
    assert faults(objective=dataclasses.replace(goal, bound=6.0)) == ["claim", "claim"]
    assert faults(objective=dataclasses.replace(goal, proven_optimal=False)) == ["claim"]
    assert faults(instance=dataclasses.replace(plan.instance, fingerprint="0" * 64)) == ["instance"]
    assert faults(instance=dataclasses.replace(plan.instance, family="pipers"))[0] == "family"
    unsealed = dataclasses.replace(plan, solver="me")
    assert [finding.fault for finding in planner.check_partition(unsealed)] == ["digest"]


def test_a_plan_file_is_read_strictly(graph: Path, tmp_path: Path) -> None:
    text = planner.published.dump_partition(planner.partition(graph))
    for change, message in [
        (("shardplan-partition", "shardplan-plan"), "not a partition file"),
        (('"version": 1', '"version": 2'), "version 2 cannot be read"),
        (('"solver"', '"solvers"'), "missing key 'solver'"),
        (('"value": 5.5', '"value": NaN'), "NaN is not JSON"),
        (('"nodes": 4', '"nodes": "4"'), "valid integer"),
    ]:
        assert change[0] in text
        with pytest.raises(PlanError, match=message):
            planner.published.load_partition(text.replace(*change, 1))
    with pytest.raises(PlanError, match="cannot read"):
        planner.read_partition(tmp_path / "absent.json")


def test_a_plan_file_agrees_with_its_schema(graph: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(planner.published.dump_partition(planner.partition(graph)))
    jsonschema.validate(document, planner.published.partition_schema())
    assert planner.published.partition_schema()["properties"]["solver"]["description"] == "who found the plan."


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_decision_on_an_operator_graph_reads_back(data: st.DataObject) -> None:
    """Also bad ones: what a file says is exactly what the judge sees."""
    count = data.draw(st.integers(1, 7))
    ids = data.draw(st.lists(st.integers(-50, 50), min_size=count, max_size=count, unique=True))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = [pair for pair in pairs if data.draw(st.booleans())]
    content = operator_graph()
    content["nodes"] = [
        {"id": i, "supportedOnFpga": 1, "cpuLatency": 5.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 10}
        for i in ids
    ]
    content["edges"] = [{"sourceId": ids[a], "destId": ids[b], "cost": 0.25} for a, b in edges]
    graph = operator_graph_from(content, "drawn")
    instance = Instance("operator-graph", "drawn", "", graph, tuple(ids), len(edges))
    placed = tuple(data.draw(st.integers(0, 2)) for _ in range(count))
    for name in ("max-load", "latency"):
        objective = FAMILIES.get("operator-graph").objective(name)
        problem = objective.problem(instance, objective.settle(instance, PartitionOptions()))
        own = tuple(min(device, problem.devices - 1) for device in placed)  # more than can help are left out
        decision = MaxLoadDecision(own) if name == "max-load" else LatencyDecision(own, tuple(range(count)))
        verdict = problem.judge(decision)
        parts = objective.encode(instance, problem, decision, verdict)
        assert problem.judge(objective.decode(instance, problem, parts)) == verdict


@given(st.sets(st.integers(-20, 60)))
@settings(max_examples=60, deadline=None)
def test_ranges_hold_exactly_their_numbers(numbers: set[int]) -> None:
    ranges = to_ranges(numbers)
    assert from_ranges(ranges, 200) == sorted(numbers)
    assert all(b[0] > a[1] + 1 for a, b in itertools.pairwise(ranges))


@given(st.lists(st.integers(-20, 60)))
@settings(max_examples=60, deadline=None)
def test_runs_keep_the_order(numbers: list[int]) -> None:
    assert from_ranges(to_runs(numbers), 10_000) == numbers


def test_ranges_in_words_and_their_limit() -> None:
    assert in_words(((1, 3), (7, 7), (9, 10)), 2) == "1-3, 7, and 1 more"
    assert from_ranges(((0, 10**12),), 100) is None


def test_every_shared_instance_is_of_one_family() -> None:
    folder = shared_path("instances")
    kinds = {"operator_graphs": "operator graph (JSON)", "piper": "Piper instance (TMPC JSON)"}
    kinds["pipedream"] = "PipeDream profile (graph.txt)"
    for path in (*folder.rglob("*Graphs/*.json"), *folder.rglob("*.graph.txt"), *folder.glob("piper/*.json")):
        family = planner.published.instance_family(path)
        assert family is not None
        assert family.title == kinds[path.relative_to(folder).parts[0]]


def test_published_figures_come_out_of_the_whole_way() -> None:
    """Recorded: 17.78990625 ms (published DP), 54.79 ms and at most 100.8 ms a minibatch, 0.16585575 s a sample."""
    folder = shared_path("instances")
    bert = planner.partition(folder / "operator_graphs/LayerGraphs/bert24_inference.json")
    assert (bert.objective.value, bert.objective.proven_optimal) == (17.78990625, True)
    vgg = folder / "pipedream/vgg16.graph.txt"
    flat = planner.partition(vgg, machines=16, bandwidth="1.25GB/s")
    assert flat.objective.value == pytest.approx(0.05479489083076923, rel=1e-12)
    placed = planner.partition(vgg, machines="4x2", bandwidth="10GB/s,1.25GB/s")
    assert placed.objective.value <= 0.1008
    sample = planner.partition(
        folder / "piper/bert32a100.json", devices=8, memory="8GiB", bandwidth="25GiB/s", batch=1920
    )
    assert sample.objective.value == pytest.approx(0.16585575, rel=1e-9)

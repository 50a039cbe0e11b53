"""What changes are worth: each is planned with that change alone, and gains are counted from the plan's own step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import planner
from planner import UsageError
from planner.plans import Plan, with_simulation
from tests.plans.sample import make_plan

GRAPH = planner.load_graph("gpt2", dims={"seq": 128})
CLUSTER = planner.load_cluster("dgx-a100", nodes=2)
STEP_S = 0.5


def fake(graph: object, cluster: planner.Cluster, job: planner.Job) -> Plan:
    """A step that falls by a tenth with memory, by a fifth with nvlink, by half with a node, by 2 % without --tp."""
    step_s = STEP_S
    step_s *= 0.9 if cluster.devices[0].memory_bytes == CLUSTER.devices[0].memory_bytes + (1 << 30) else 1.0
    step_s *= 0.8 if cluster.levels[0].byte_per_s == 2 * CLUSTER.levels[0].byte_per_s else 1.0
    step_s *= 0.5 if cluster.device_count == 24 else 1.0
    step_s *= 0.98 if job.tensor_parallel == () else 1.0
    return with_simulation(make_plan(), step_s)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr("planner.ask.choices.plan_job", fake)
    plan = with_simulation(make_plan(), STEP_S)
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, tensor_parallel=(2,)))


def test_every_change_is_planned_alone(own: Plan) -> None:
    found = planner.find_worth(own, GRAPH, CLUSTER, lambda: planner.load_cluster("dgx-a100", nodes=3))
    assert {each.words: each.gain and round(each.gain, 9) for each in found} == {
        "one more node": 0.5,
        "twice the bandwidth of nvlink": 0.2,
        "1 GiB more on each device": 0.1,
        "without --tp 2": 0.02,
        "twice the bandwidth of infiniband": 0.0,
    }
    assert [each.words for each in found][:2] == ["one more node", "twice the bandwidth of nvlink"]
    text = planner.report_to_text(planner.report.worth_report(own, found), table_width=200)
    assert "each planned anew, against 500 ms a step: DP 1 x TP 1 x PP 3" in text
    assert "-50.0%" in text


def test_a_faster_link_has_no_measured_collectives_of_the_slower_one(
    own: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[planner.Cluster] = []

    def watch(graph: object, cluster: planner.Cluster, job: planner.Job) -> Plan:
        seen.append(cluster)
        return fake(graph, cluster, job)

    monkeypatch.setattr("planner.ask.choices.plan_job", watch)
    planner.find_worth(own, GRAPH, CLUSTER)
    assert CLUSTER.levels[0].fits
    faster = [cluster for cluster in seen if cluster.levels[0].byte_per_s > CLUSTER.levels[0].byte_per_s]
    assert [cluster.levels[0].fits for cluster in faster] == [()]


def test_what_has_no_plan_says_why(own: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Plan:
        raise planner.InfeasibleError("nothing fits")

    monkeypatch.setattr("planner.ask.choices.plan_job", none)
    found = planner.find_worth(own, GRAPH, CLUSTER)
    assert {(each.gain, each.shape) for each in found} == {(None, "nothing fits")}


def test_plans_of_no_search_have_nothing_to_gain_from(own: Plan) -> None:
    given = dataclasses.replace(own, schedule=dataclasses.replace(own.schedule, given="configuration"))
    with pytest.raises(UsageError, match="not of a search"):
        planner.find_worth(given, GRAPH, CLUSTER)


def test_limits_of_frameworks_are_none_of_the_users() -> None:
    """A plan within the limits of the usual frameworks has orders, ZeRO stages and widths that nobody asked for."""
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")
    plan = planner.plan(graph, cluster, planner.Job(64))
    assert plan.options.backends
    assert plan.options.schedules != planner.Job(64).schedules
    assert not [each.words for each in planner.find_worth(plan, graph, cluster) if each.words.startswith("without")]
    for name in ("fsdp", "deepspeed"):
        framed = planner.plan(graph, cluster, planner.Job(64, backends=(name,)))
        assert framed.options != dataclasses.replace(planner.Job(64), backends=(name,))
        assert not [w.words for w in planner.find_worth(framed, graph, cluster) if w.words.startswith("without")]
    limited = planner.plan(graph, cluster, planner.Job(64, zero=(0,), micro_batches=(2,), backends=("megatron",)))
    found = {each.words for each in planner.find_worth(limited, graph, cluster) if each.words.startswith("without")}
    assert found == {"without --zero 0", "without --micro-batch 2"}

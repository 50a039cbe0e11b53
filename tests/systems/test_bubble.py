"""One definition of the bubble: a row of a comparison and the plan of that row say the same."""

from __future__ import annotations

import pytest

import planner


def test_a_row_and_its_plan_have_the_same_bubble() -> None:
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")
    job = planner.Job(64)
    systems = ("gpipe", "chimera", "pipedream-2bw", "data-parallel", "gshard")
    found = planner.compare_systems(planner.Pricer(graph, cluster, job), cluster, job, systems=systems)
    plans, _ = planner.systems.plans_of(found)
    compared = {row.system: row.bubble for row in found.rows if row.system in plans}
    assert len(compared) >= 4
    assert max(compared.values()) > 0.1
    for name, bubble in compared.items():
        assert bubble == pytest.approx(plans[name].predictions.bubble_fraction, abs=1e-6), name

"""A difference dealt to its causes: the parts add up, and each is what its cause alone would make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import planner
from planner.check import Cause
from planner.plans import seal


@pytest.fixture(scope="module")
def before() -> tuple[planner.Graph, planner.Cluster, planner.Plan]:
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")
    return graph, cluster, planner.plan(graph, cluster, planner.Job(64))


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> tuple[planner.Graph, planner.Cluster, planner.Plan]:
    import onnx

    path = tmp_path_factory.mktemp("model") / "deeper.onnx"
    deeper = planner.bundled.bundled_config("gpt2", {"layers": "13"})
    onnx.save(planner.build_configured(deeper, name="deeper", seq=128)[0], path)
    graph, cluster = planner.load_graph(path), planner.load_cluster("dgx-h100")
    return graph, cluster, planner.plan(graph, cluster, planner.Job(64, max_stages=1, zero=(0,)))


def test_parts_add_up_and_each_is_its_cause_alone(before: tuple, after: tuple) -> None:  # type: ignore[type-arg]
    (graph, cluster, old), (deeper, newer, new) = before, after
    parts, unpriced = planner.check.attribute(old, new, [graph, deeper], [cluster, newer])
    assert not unpriced
    assert [part.causes[0] for part in parts][:3] == [Cause.HARDWARE, Cause.OPTIONS, Cause.MODEL]
    total_s = new.predictions.reached_s - old.predictions.reached_s
    assert sum(part.seconds for part in parts) == pytest.approx(total_s, rel=1e-9)
    moved = planner.predict(graph, newer, old.options, old).iteration_s
    assert parts[0].seconds == pytest.approx(moved - old.predictions.reached_s)


def test_without_the_inputs_causes_stand_together(before: tuple, after: tuple) -> None:  # type: ignore[type-arg]
    old, new = before[2], after[2]
    parts, unpriced = planner.check.attribute(old, new)
    assert len(parts) == 1
    assert set(parts[0].causes) >= {Cause.HARDWARE, Cause.OPTIONS, Cause.MODEL}
    assert "not at hand" in unpriced[0]


def test_a_single_cause_needs_no_inputs(before: tuple) -> None:  # type: ignore[type-arg]
    old = before[2]
    p = old.predictions
    slow = dataclasses.replace(p, iteration_s=p.iteration_s * 2, simulated_iteration_s=p.reached_s * 2)
    tool = dataclasses.replace(old.provenance, version="9.9")
    (part,), _ = planner.check.attribute(old, seal(dataclasses.replace(old, predictions=slow, provenance=tool)))
    assert part.causes == (Cause.TOOL,)
    assert part.seconds == pytest.approx(p.reached_s)


def test_inputs_of_neither_plan_are_refused(before: tuple, tmp_path: Path) -> None:  # type: ignore[type-arg]
    other = planner.load_cluster("dgx-1v")
    with pytest.raises(planner.UsageError, match="hardware of neither plan"):
        planner.check.attribute(before[2], before[2], (), [other])

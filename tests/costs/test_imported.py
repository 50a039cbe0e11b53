"""PipeDream profiles: the graph, its traps, and the prices it carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.costs import imported_profile, is_priced, profile
from planner.errors import ModelError, UsageError
from planner.importers import load_graph
from planner.operators import rebatch, unique_bytes
from tests.costs.test_roofline import DEVICE, product
from tests.shared_data import shared_path


def line(name: str, text: str, forward: float, backward: float, size: str, weights: float, rest: str = "") -> str:
    """A node as the file writes it: milliseconds and bytes."""
    times = f"forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}"
    return f"{name} -- {text} -- {times}, activation_size={size}, parameter_size={weights:.3f}{rest}"


SMALL = "\n".join(
    [
        line("node1", "Input", 9, 0, "64.0", 0),
        line("node2", "LSTM(4, 4)", 1, 2.5, "[64.0; 16.0; 16.0]", 400),
        line("node3", "__getitem__(0)", 0, 0, "64.0", 0),
        line("node4", "__getitem__(1)", 0, 0, "16.0", 0),
        line("node5", "ReLU(inplace)", 0.5, 0.25, "64.0", 0),
        line("node6", "Linear(in_features=4, out_features=8, bias=True)", 2, 4, "128.0", 160, " -- stage_id=1"),
        line("node7", "Concat(1)", 0, 0, "64.0", 0),
        *(f"\tnode{a} -- node{b}" for a, b in ((1, 2), (2, 3), (2, 4), (3, 5), (5, 6), (5, 7), (6, 7))),
    ]
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "small.graph.txt"
    path.write_text(text)
    return path


def test_a_small_profile(tmp_path: Path) -> None:
    graph = load_graph(write(tmp_path, SMALL), dims={"batch": 4})
    assert graph.name == "small"
    assert [n.key for n in graph.nodes] == ["node2", "node3", "node5", "node6", "node7"]
    assert graph.inputs == ("node1",)
    assert graph.outputs == ("node7",)
    assert graph.parameter_count() == (400 + 160) // 4
    assert graph.tensors["node2"].byte_count == 64
    assert graph.tensors["node7"].shape == (4, 12)  # 64 + 128 bytes, not the 64 it records
    report = graph.report
    assert (report.total_nodes, len(graph.nodes), report.plumbing_nodes, report.dead_nodes) == (7, 5, 1, 1)
    assert {n.code for n in report.notes} == {"concat-size", "data-loading"}
    found = imported_profile(graph)
    assert found.forward_s.tolist() == pytest.approx([1e-3, 0.0, 0.5e-3, 2e-3, 0.0])
    assert found.backward_s.sum() == pytest.approx(6.75e-3)
    kept = {item.storage: item.byte_count for items in found.saved for item in items}
    assert kept == {"node2": 64, "node2:1": 16, "node2:2": 16, "node6": 128, "node7": 192}


def test_prices_follow_the_micro_batch(tmp_path: Path) -> None:
    graph = load_graph(write(tmp_path, SMALL), dims={"batch": 4})
    half = imported_profile(graph, micro_batch=2)
    assert half.micro_batch == 2
    assert half.forward_s.sum() == pytest.approx(1.75e-3)
    assert unique_bytes(half.saved) * 2 == unique_bytes(imported_profile(graph).saved)
    assert imported_profile(rebatch(graph, 2)).forward_s.sum() == pytest.approx(1.75e-3)  # set to that batch before


def test_the_graph_carries_its_prices_into_profile(tmp_path: Path) -> None:
    graph = load_graph(write(tmp_path, SMALL))
    assert is_priced(graph)
    assert profile(graph, DEVICE).source == "pipedream"
    assert "batch-unknown" in {n.code for n in graph.report.notes}
    with pytest.raises(UsageError, match="carries no measured times"):
        imported_profile(product(4, 4, 4))


@pytest.mark.parametrize(
    ("name", "nodes", "weights_mb", "forward_ms"),
    [  # nodes without `Input` and repeated results; sums of the files' columns
        ("vgg16", 40, 553.430176, 233.902),
        ("resnet50", 176, 102.228128, 182.488),
        ("alexnet", 22, 244.403360, 44.801),
        ("gnmt", 37, 775.063808, 33.533),
        ("densenet121", 428, 31.915424, 177.404),
        ("inception_v3", 325, 108.645056, 289.269),
    ],
)
def test_published_profiles(name: str, nodes: int, weights_mb: float, forward_ms: float) -> None:
    graph = load_graph(shared_path(f"instances/pipedream/{name}.graph.txt"), dims={"batch": 32})
    assert len(graph.nodes) == nodes
    assert graph.parameter_count() * 4 / 1e6 == pytest.approx(weights_mb)
    assert imported_profile(graph).forward_s.sum() * 1e3 == pytest.approx(forward_ms)
    codes = {n.code for n in graph.report.notes}
    assert ("backward-misplaced" in codes) == (name == "gnmt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node8 -- ReLU", "three parts"),
        ("node8 -- ReLU -- forward_compute_time=1.0", "lacks backward_compute_time"),
        ("what is this", "is not a node|three parts"),
        ("\tnode9 -- node2", "names a node that is not there"),
        ("\tnode7 -- node2", "goes backwards"),
        (
            "node8 -- R -- forward_compute_time=-1, backward_compute_time=0, activation_size=0, parameter_size=0",
            "negative",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_graph(write(tmp_path, f"{SMALL}\n{line}"))
    assert "small.graph.txt" in caught.value.problem.where


def test_all_bad_lines_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_graph(write(tmp_path, f"{SMALL}\nnode8 -- a\nnode9 -- b"))
    assert [p.where.rpartition("txt")[2] for p in caught.value.problems] == [":15:1", ":16:1"]

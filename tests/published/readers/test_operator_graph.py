"""Operator graphs: what is read, what is refused, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelError
from planner.published.readers import is_operator_graph, load_operator_graph, operator_graph_from
from tests.shared_data import shared_path


def node(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0, "isBackwardNode": 0,
            "colorClass": number, "size": 8.0, **more}  # fmt: skip


def edge(source: int, target: int, cost: float = 0.5) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": cost}


def document(nodes: list[Any], edges: list[Any], **more: Any) -> dict[str, Any]:
    return {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges, **more}


def refused(document: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        operator_graph_from(document, "g", where="g.json")
    return caught.value


def test_reads_every_field() -> None:
    nodes = [node(7, name="a", size=3), node(4, supportedOnFpga=0, isBackwardNode=1, colorClass=7, cpuLatency=2)]
    graph = operator_graph_from(document(nodes, [edge(7, 4, 0.25)]), "g")
    first, second = graph.nodes
    assert (first.id, first.name, first.accelerator_ms, first.cpu_ms, first.size_bytes) == (7, "a", 1.0, 10.0, 3.0)
    assert (first.supported, first.backward, first.colour) == (True, False, 7)
    assert (second.name, second.supported, second.backward, second.colour) == ("node4", False, True, 7)
    assert graph.edges == ((0, 1),)
    assert graph.transfer_ms == (0.25, 0.0)
    assert (graph.accelerators, graph.cpus, graph.memory_bytes) == (2, 1, 100.0)


@pytest.mark.parametrize("yes", [1, True])
@pytest.mark.parametrize("no", [0, False])
def test_flags_are_numbers_or_truth_values(yes: Any, no: Any) -> None:
    nodes = [node(1, supportedOnFpga=yes), node(2, supportedOnFpga=no, isBackwardNode=yes)]
    graph = operator_graph_from(document(nodes, []), "g")
    assert [n.supported for n in graph.nodes] == [True, False]
    assert [n.backward for n in graph.nodes] == [False, True]


@pytest.mark.parametrize("colour", [{}, {"colorClass": None}])
def test_colour_may_be_absent(colour: dict[str, Any]) -> None:
    bare = {k: v for k, v in node(1).items() if k != "colorClass"}
    graph = operator_graph_from(document([{**bare, **colour}], []), "g")
    assert graph.nodes[0].colour is None
    assert [note.code for note in graph.notes] == ["no-colour"]


def test_unsupported_nodes_need_no_accelerator_time() -> None:
    bare = {k: v for k, v in node(1, supportedOnFpga=0).items() if k != "fpgaLatency"}
    assert operator_graph_from(document([bare], []), "g").nodes[0].accelerator_ms == 0.0


def test_repeated_edges_count_once_and_are_said() -> None:
    graph = operator_graph_from(document([node(1), node(2)], [edge(1, 2), edge(1, 2)]), "g")
    assert graph.edges == ((0, 1),)
    assert [(n.code, "1 -> 2" in n.message) for n in graph.notes] == [("repeated-edge", True)]


def test_self_loops_are_left_out_and_said() -> None:
    graph = operator_graph_from(document([node(1), node(2)], [edge(1, 1), edge(2, 2)]), "g")
    assert graph.edges == ()
    assert graph.transfer_ms == (0.0, 0.0)
    assert [(n.code, "1, 2" in n.message) for n in graph.notes] == [("self-loop", True)]


def test_edges_of_a_source_must_agree() -> None:
    error = refused(document([node(1), node(2), node(3)], [edge(1, 2, 0.5), edge(1, 3, 0.75)]))
    assert error.problem.where == "g.json: edges[1].cost"
    assert "node 1 costs 0.75 ms" in error.problem.message
    assert "0.5 ms in edges[0]" in error.problem.message


def test_same_edge_twice_with_unlike_costs() -> None:
    assert (
        refused(document([node(1), node(2)], [edge(1, 2, 1), edge(1, 2, 2)])).problem.where == "g.json: edges[1].cost"
    )


def test_circles_are_named() -> None:
    edges = [edge(9, 1), edge(1, 2), edge(2, 3), edge(3, 1), edge(3, 4)]
    error = refused(document([node(i) for i in (9, 1, 2, 3, 4)], edges))
    text = error.problem.message.split(": ")[1].split(" -> ")
    assert sorted(text[:-1]) == ["1", "2", "3"]
    assert text[0] == text[-1]
    assert text in (["1", "2", "3", "1"], ["2", "3", "1", "2"], ["3", "1", "2", "3"])


def test_backward_nodes_without_twin_are_said() -> None:
    back = {"isBackwardNode": 1}
    nodes = [node(1), node(2, colorClass=1, **back), node(3, **back)]
    graph = operator_graph_from(document(nodes, []), "g")
    assert [(n.code, n.message.endswith("anywhere: 3")) for n in graph.notes] == [("backward-without-forward", True)]


def test_passes_that_nothing_ties_are_a_warning() -> None:
    graph = operator_graph_from(document([node(1), node(2, isBackwardNode=1)], []), "g")
    assert [n.code for n in graph.notes] == ["passes-untied"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"fpgaLatency": None}, "nodes[1].fpgaLatency"),
        ({"fpgaLatency": "1"}, "nodes[1].fpgaLatency"),
        ({"cpuLatency": -1}, "nodes[1].cpuLatency"),
        ({"cpuLatency": True}, "nodes[1].cpuLatency"),
        ({"size": float("nan")}, "nodes[1].size"),
        ({"size": float("inf")}, "nodes[1].size"),
        ({"supportedOnFpga": 2}, "nodes[1].supportedOnFpga"),
        ({"supportedOnFpga": None}, "nodes[1].supportedOnFpga"),
        ({"isBackwardNode": "no"}, "nodes[1].isBackwardNode"),
        ({"colorClass": 1.5}, "nodes[1].colorClass"),
        ({"id": "2"}, "nodes[1].id"),
        ({"id": 1}, "nodes[1].id"),
    ],
)
def test_bad_node_fields_are_named(change: dict[str, Any], path: str) -> None:
    error = refused(document([node(1), node(2, **change)], []))
    assert error.problem.where == f"g.json: {path}"


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"sourceId": 8, "destId": 1, "cost": 1}, "edges[0].sourceId"),
        ({"sourceId": 1, "destId": 8, "cost": 1}, "edges[0].destId"),
        ({"sourceId": 1, "destId": 2}, "edges[0].cost"),
        ({"sourceId": 1, "destId": 2, "cost": -1}, "edges[0].cost"),
        ({"destId": 2, "cost": 1}, "edges[0].sourceId"),
        ("1-2", "edges[0]"),
    ],
)
def test_bad_edges_are_named(changed: Any, path: str) -> None:
    assert refused(document([node(1), node(2)], [changed])).problem.where == f"g.json: {path}"


def test_all_findings_are_reported_together() -> None:
    error = refused(document([node(1, size=None), node(2, cpuLatency="x"), "node"], [], maxFPGAs=1.5))
    assert [p.where.split(": ")[1] for p in error.problems] == [
        "maxFPGAs",
        "nodes[0].size",
        "nodes[1].cpuLatency",
        "nodes[2]",
    ]


@pytest.mark.parametrize("wrong", [[], {}, {"nodes": 3}, None])
def test_other_documents_are_refused(wrong: Any) -> None:
    error = refused(wrong)
    assert error.problem.where.startswith("g.json")
    assert "should be" in error.problem.message or len(error.problems) == 5  # every key is missing


def test_no_devices_are_refused() -> None:
    assert "both 0" in refused(document([node(1)], [], maxFPGAs=0, maxCPUs=0)).problem.message


def test_edges_are_required() -> None:
    bare = document([node(1)], [])
    del bare["edges"]
    assert refused(bare).problem.where == "g.json: edges"


def test_files_are_found_read_and_recognised(tmp_path: Path) -> None:
    file = tmp_path / "net.json"
    with pytest.raises(ModelError, match=r"net\.json"):
        load_operator_graph(file)
    file.write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load_operator_graph(file)
    file.write_text(json.dumps(document([node(1), node(2)], [edge(1, 2)])))
    graph = load_operator_graph(file)
    assert graph.name == "net"
    assert len(graph.fingerprint) == 64
    assert is_operator_graph(file.read_bytes()[:64])
    assert not is_operator_graph(b'{"stages": []}')


@pytest.mark.parametrize(
    ("file", "nodes", "edges", "backward", "codes"),
    [
        ("LayerGraphs/bert24_training", 64, 110, 32, []),
        ("LayerGraphs/inceptionv3_inference", 326, 363, 0, []),
        ("OperatorGraphs/bert_l-12_inference", 783, 843, 0, ["no-colour"]),
        ("OperatorGraphs/bert_l-3_training", 600, 817, 365, ["backward-without-forward", "no-colour"]),
    ],
)
def test_published_graphs(file: str, nodes: int, edges: int, backward: int, codes: list[str]) -> None:
    graph = load_operator_graph(shared_path(f"instances/operator_graphs/{file}.json"))
    assert (len(graph.nodes), len(graph.edges), sum(n.backward for n in graph.nodes)) == (nodes, edges, backward)
    assert [note.code for note in graph.notes] == codes
    assert graph.memory_bytes == 17185374208.0

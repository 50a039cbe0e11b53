"""Results remembered with a graph."""

from __future__ import annotations

from dataclasses import replace

from planner.graph import DType, Graph, Node, Tensor, TensorKind, hand_on, per_graph, per_model, remember

CALLS: list[int] = []


@per_graph
def size(graph: Graph) -> int:
    CALLS.append(graph.batch)
    return len(graph.nodes)


@per_model
def names(graph: Graph) -> tuple[str, ...]:
    return tuple(graph.tensors)


def small(batch: int) -> Graph:
    names = {n: Tensor(n, (batch,), DType.FLOAT32, TensorKind.ACTIVATION) for n in ("x", "y")}
    return Graph("g", "0", (Node("y", "Relu", ("x",), ("y",)),), names, ("x",), ("y",), (), {}, batch=batch)


def test_computed_once_for_each_graph() -> None:
    CALLS.clear()
    one, other = small(1), small(2)
    assert [size(one), size(one), size(other), size(other)] == [1, 1, 1, 1]
    assert CALLS == [1, 2]
    assert one == small(1), "what is remembered is no part of the graph"


def test_copies_start_anew() -> None:
    CALLS.clear()
    graph = small(3)
    size(graph)
    assert size(replace(graph, nodes=())) == 0
    assert CALLS == [3, 3]


def test_results_are_given_and_handed_on_where_they_depend_on_no_sizes() -> None:
    CALLS.clear()
    graph, derived, unknowing = small(4), small(5), small(6)
    remember(graph, size, 7)
    remember(graph, names, ("x",))
    assert graph.producer == {"y": 0}
    hand_on(graph, derived)
    hand_on(unknowing, graph)
    assert (size(graph), size(derived)) == (7, 1)
    assert names(derived) == names(graph) == ("x",)
    assert vars(derived)["producer"] is graph.producer
    assert "edges" not in vars(graph)
    assert CALLS == [5]


def test_what_depends_on_no_sizes_is_found_once_on_whichever_graph_asks_first() -> None:
    graph, derived, further = small(7), small(8), small(9)
    hand_on(graph, derived)
    hand_on(graph, further)
    assert names(derived) is names(graph) is names(further)

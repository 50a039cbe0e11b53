"""Weights read in another order of dimensions than they are stored in."""

from __future__ import annotations

import pytest

from planner.importers import graph_from_proto
from tests.importers.build import absent, model, node, value


@pytest.mark.parametrize(
    ("folded", "stored", "order"),
    [
        ([node("Transpose", ["w"], ["v"], perm=[1, 0])], (8, 4), (1, 0)),
        ([node("Transpose", ["w"], ["v"])], (8, 4), (1, 0)),
        ([node("Identity", ["w"], ["i"]), node("Transpose", ["i"], ["v"], perm=[1, 0])], (8, 4), (1, 0)),
        ([node("Transpose", ["w"], ["t"], perm=[1, 0]), node("Transpose", ["t"], ["v"], perm=[1, 0])], (4, 8), None),
        ([node("Concat", ["w", "u"], ["c"], axis=0), node("Transpose", ["c"], ["v"], perm=[1, 0])], (4, 4), None),
        ([node("Identity", ["w"], ["v"])], (4, 8), None),
    ],
)  # fmt: skip
def test_only_whole_weights_that_are_transposed_count(
    folded: list[object], stored: tuple[int, int], order: tuple[int, ...] | None
) -> None:
    nodes = [*folded, node("MatMul", ["x", "v"], ["y"])]
    graph = graph_from_proto(
        model(nodes, [value("x", (2, 4))], [value("y", (2, 8))], [absent("w", stored), absent("u", (4, 4))]),  # type: ignore[arg-type]
        name="m",
    )
    (product,) = [n for n in graph.nodes if n.op == "MatMul"]
    assert graph.permuted.get(product.inputs[1]) == order


def test_three_dimensions_turned_twice() -> None:
    nodes = [
        node("Transpose", ["w"], ["t"], perm=[2, 0, 1]),
        node("Transpose", ["t"], ["v"], perm=[0, 2, 1]),
        node("MatMul", ["x", "v"], ["y"]),
    ]
    graph = graph_from_proto(
        model(nodes, [value("x", (6, 5, 3))], [value("y", (6, 5, 2))], [absent("w", (2, 3, 6))]), name="m"
    )
    (product,) = [n for n in graph.nodes if n.op == "MatMul"]
    assert graph.tensors[product.inputs[1]].shape == (6, 3, 2)
    assert graph.permuted[product.inputs[1]] == (2, 1, 0)

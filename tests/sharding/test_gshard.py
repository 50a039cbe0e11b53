"""GShard's completion of layouts: experts over ranks where their weights are large."""

from __future__ import annotations

from planner.graph import Graph
from planner.sharding import TensorChoice, layout_text
from planner.sharding.problem import rest_of
from planner.sharding.searches import get
from tests.operators.calls import graph, node
from tests.sharding.graphs import setting


def mixture(groups: int = 8, tokens: int = 16, width: int = 8, experts: int = 4, hidden: int = 32) -> Graph:
    """GShard's layer: one-hot products dispatch tokens to experts and combine what those make."""
    places = 2 * tokens // experts
    sizes = {
        "x0": f"x {groups} {tokens} {width}", "g": f"w {width}", "x": f"x {groups} {tokens} {width}",
        "mask": f"i:float32 {groups} {experts * places} {tokens}",
        "back": f"i:float32 {groups} {tokens} {experts * places}",
        "sent": f"x {groups} {experts * places} {width}", "apart": f"x {groups} {experts} {places} {width}",
        "turned": f"x {experts} {groups} {places} {width}", "rows": f"x {experts} {groups * places} {width}",
        "w1": f"w {experts} {width} {hidden}", "h": f"x {experts} {groups * places} {hidden}",
        "r": f"x {experts} {groups * places} {hidden}", "w2": f"w {experts} {hidden} {width}",
        "o": f"x {experts} {groups * places} {width}", "o1": f"x {experts} {groups} {places} {width}",
        "o2": f"x {groups} {experts} {places} {width}", "o3": f"x {groups} {experts * places} {width}",
        "y": f"x {groups} {tokens} {width}", "s4": "c:int64 4", "s3": "c:int64 3",
    }  # fmt: skip
    nodes = [
        node("Mul", "x0 g", "x"),
        node("MatMul", "mask x", "sent"),
        node("Reshape", "sent s4", "apart"),
        node("Transpose", "apart", "turned", perm=(1, 0, 2, 3)),
        node("Reshape", "turned s3", "rows"),
        node("MatMul", "rows w1", "h"),
        node("Relu", "h", "r"),
        node("MatMul", "r w2", "o"),
        node("Reshape", "o s4", "o1"),
        node("Transpose", "o1", "o2", perm=(1, 0, 2, 3)),
        node("Reshape", "o2 s3", "o3"),
        node("MatMul", "back o3", "y"),
    ]
    return graph(sizes, nodes)


def test_experts_are_parallel_where_weights_are_large() -> None:
    one = setting(mixture(tokens=8, width=512, hidden=2048), (4,), 1e9)
    answer = get("gshard")(one)
    rests = {n: layout_text(rest_of(c).value) for n, c in answer.decision.items() if not n.startswith("op:")}
    assert (rests["w1"], rests["w2"]) == ("S0", "S0")
    assert isinstance(answer.decision["x"], TensorChoice)
    assert any("all-to-all" in step.what for c in answer.verdict.communication for step in c.steps)

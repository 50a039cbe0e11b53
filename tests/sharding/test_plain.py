"""Every strategy of every rule that cuts without exchanging data, executed on one axis and on two."""

from __future__ import annotations

import numpy as np
import pytest

from planner.sharding import Options, Part, Setting, Strategy, formulate, ideal_mesh, layout_text
from tests.operators.calls import graph, node
from tests.sharding.execution import check
from tests.sharding.plain_cases import CASES

WITHOUT_RING = Options(coupled=False)


@pytest.mark.parametrize("name", CASES)
def test_on_one_axis(name: str) -> None:
    assert len(check(CASES[name](), (2,), WITHOUT_RING)) > 1, "nothing is cut"


@pytest.mark.parametrize("name", CASES)
def test_on_two_axes(name: str) -> None:
    check(CASES[name](), (2, 2), WITHOUT_RING)


@pytest.mark.parametrize("name", ["MatMul", "Gemm", "Add", "Split", "Concat", "Gather", "Gelu"])
def test_interleaved(name: str) -> None:
    check(CASES[name](), (2,), Options(coupled=False, blocks=(2,)))


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("MoE, gate alternating", {"m0", "e", "f"}),
        ("MoE, gate beside", {"m0", "e", "f"}),
        ("projected Attention", {"b", "g", "s"}),
        ("MultiHeadAttention with bias", {"b", "g", "s"}),
        ("GroupQueryAttention, packed", {"b", "g"}),
        ("RotaryEmbedding, heads side by side", {"b", "s", "g"}),
    ],
)
def test_what_can_be_cut(name: str, cuts: set[str]) -> None:
    found = check(CASES[name](), (2,), WITHOUT_RING)
    assert {(cut,) for cut in cuts} <= found


def test_a_graph_offers_the_heads_of_a_projection_inside_an_attention() -> None:
    """The projection's weight and bias may rest in interleaved thirds, so that nothing needs to move."""
    model = graph(
        {"x": "i 2 8 16", "w": "w 16 48", "b": "w 48", "y": "x 2 8 16"},
        [node("com.microsoft.Attention", "x w b", "y", num_heads=4)],
    )
    problem = formulate(Setting(model, ideal_mesh((2,)), forward_s=np.ones(1), backward_s=np.ones(1)))
    found = {s.splits: s for c in problem.choices for s in c if isinstance(s, Strategy)}
    assert {("b",), ("g",), ("s",)} <= found.keys()
    reads = {p: layout_text(layout) for p, layout in found[("g",)].reads}
    assert (reads[1], reads[2]) == (layout_text((Part(1, 3),)), layout_text((Part(0, 3),)))
    assert found[("g",)].share == 0.5

"""Layouts: texts, pieces, what does not divide."""

from __future__ import annotations

import pytest

from planner.errors import UsageError
from planner.sharding import PARTIAL, Part, layout_text, layouts, parse_layout, refusal, shard_elements, shard_shape


@pytest.mark.parametrize("text", ["", "R", "S0R", "RP", "S0S0", "S2~3R", "PS11"])
def test_texts_read_back(text: str) -> None:
    axes = sum(text.count(c) for c in "RPS")
    assert layout_text(parse_layout(text, axes)) == text


@pytest.mark.parametrize(("text", "axes"), [("S", 1), ("S0", 2), ("XR", 2), ("S0 R", 2), ("RRR", 2)])
def test_other_texts_are_refused(text: str, axes: int) -> None:
    with pytest.raises(UsageError, match="no layout"):
        parse_layout(text, axes)


@pytest.mark.parametrize(
    ("shape", "text", "sizes", "expected"),
    [
        ((8, 6), "RR", (2, 3), (8, 6)),
        ((8, 6), "S0S1", (2, 3), (4, 2)),
        ((12, 6), "S0S0", (2, 3), (2, 6)),
        ((7, 6), "S0P", (2, 3), (4, 6)),
        ((6, 9), "S1~3R", (3, 2), (6, 3)),
    ],
)
def test_pieces(shape: tuple[int, ...], text: str, sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert shard_shape(shape, parse_layout(text, 2), sizes) == expected


def test_uneven_cuts_are_refused_or_padded() -> None:
    layout = (Part(0),)
    assert "does not divide" in refusal((50257,), layout, (8,))
    assert refusal((50257,), layout, (8,), padded=True) == ""
    assert shard_elements((50257,), layout, (8,)) == 6283
    assert "empty" in refusal((9,), layout, (8,), padded=True), "five ranks hold two each, one holds nothing"


def test_other_refusals() -> None:
    assert "no dimension 3" in refusal((4, 4), (Part(3),), (2,))
    assert "two ways" in refusal((8, 8), (Part(0), Part(0, 2)), (2, 2))
    assert "equal blocks" in refusal((8, 8), (Part(0, 3),), (2,))


def test_all_layouts_of_a_matrix() -> None:
    found = [layout_text(x) for x in layouts((4, 2), (2,))]
    assert found == ["R", "P", "S0", "S1"]
    two = {layout_text(x) for x in layouts((4, 2), (2, 2)) if PARTIAL not in x}
    assert two == {"RR", "RS0", "RS1", "S0R", "S0S0", "S0S1", "S1R", "S1S0"}, "dimension 1 divides once"
    assert layouts((4, 2), (1,)) == ((Part(-1),),)

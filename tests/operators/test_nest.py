"""Loop nests from lines of text, and their transposes."""

from __future__ import annotations

import math

import pytest

from planner.errors import ModelError
from planner.operators import DimKind, gradient_nest, loop_nest


def test_matrix_product() -> None:
    nest = loop_nest("b m k, b k n -> b m n", [(0, (2, 3, 4)), (1, (2, 4, 5))], [(0, (2, 3, 5))], contraction=True)
    assert {d.name: (d.size, d.kind.value) for d in nest.dims} == {
        "b": (2, "parallel"),
        "m": (3, "parallel"),
        "k": (4, "reduced"),
        "n": (5, "parallel"),
    }
    assert math.prod(d.size for d in nest.dims) == 120
    assert nest.matrix_flops == 240


def test_broadcast_dimensions_have_no_index() -> None:
    nest = loop_nest("a b, a b -> a b", [(0, (2, 1)), (1, (2, 3))], [(0, (2, 3))])
    assert nest.reads[0].dims == (("a",), ())
    assert nest.dim("b").size == 3


def test_products_and_windows() -> None:
    nest = loop_nest(
        "n (g c) (y+r), (g k) c r -> n (g k) y",
        [(0, (1, 6, 9)), (1, (4, 3, 3))],
        [(0, (1, 4, 7))],
        sizes={"g": 2},
        halos={"y": 2},
        contraction=True,
    )
    assert {d.name: d.size for d in nest.dims} == {"n": 1, "g": 2, "c": 3, "y": 7, "r": 3, "k": 2}
    assert nest.reads[0].dims == (("n",), ("g", "c"), ("y", "r"))
    assert nest.reads[0].halo == ((2, 2),)
    assert nest.dim("r").kind is DimKind.WHOLE
    assert nest.matrix_flops == 2 * 2 * 3 * 7 * 3 * 2


def test_a_factor_of_one_disappears() -> None:
    nest = loop_nest("(g c) -> (g c)", [(0, (6,))], [(0, (6,))], sizes={"g": 1})
    assert nest.reads[0].dims == (("c",),)


def test_gradient_of_the_left_operand() -> None:
    nest = loop_nest("m k, k n -> m n", [(0, (3, 4)), (1, (4, 5))], [(0, (3, 5))], contraction=True)
    left = gradient_nest(nest, 0)
    # dA = dC B': m n, k n -> m k
    assert [access.dims for access in left.reads] == [(("m",), ("n",)), (("k",), ("n",))]
    assert left.writes[0].dims == (("m",), ("k",))
    assert {d.name: d.kind.value for d in left.dims} == {"m": "parallel", "k": "parallel", "n": "reduced"}
    assert left.matrix_flops == nest.matrix_flops == 120


def test_gradient_of_a_weight_reduces_over_the_batch() -> None:
    nest = loop_nest("b m k, k n -> b m n", [(0, (2, 3, 4)), (1, (4, 5))], [(0, (2, 3, 5))], contraction=True)
    weight = gradient_nest(nest, 1)
    assert [d.name for d in weight.dims if d.kind is DimKind.REDUCED] == ["b", "m"]


def test_contradictions_are_errors() -> None:
    with pytest.raises(ModelError, match="2 dimensions are expected"):
        loop_nest("m k -> m", [(0, (3,))], [(0, (3,))])
    with pytest.raises(ModelError, match="should be 4"):
        loop_nest("m k, k n -> m n", [(0, (3, 4)), (1, (6, 5))], [(0, (3, 5))])
    with pytest.raises(ValueError, match="no arrow"):
        loop_nest("m k", [(0, (3, 4))], [])

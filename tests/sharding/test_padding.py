"""Uneven division: refused with the reason, or padded, correct as executed and at its cost."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import InfeasibleError
from planner.operators import spec
from planner.sharding import (
    Options,
    Setting,
    Strategy,
    formulate,
    ideal_mesh,
    layout_text,
    parse_layout,
    reshard_table,
    strategies,
)
from planner.sharding.problem import rest_of
from planner.sharding.searches import get
from tests.operators.calls import call, graph, node
from tests.sharding.coupled_cases import numbers
from tests.sharding.execution import Case, check
from tests.sharding.graphs import attention_block, products, setting
from tests.sharding.mesh_sim import join, scatter

PADDED = Options(padded=True)


def _product() -> Case:
    return Case(
        call("MatMul", ["x 5 3", "w 3 7"], ["x 5 7"]),
        [numbers(5, 3), numbers(3, 7)],
        lambda a, b: (a @ b,),
        (0, 1),
    )


def _sum() -> Case:
    return Case(call("Add", ["x 5 3", "w 3"], ["x 5 3"]), [numbers(5, 3), numbers(3)], lambda a, b: (a + b,), (0, 1))


def _relu() -> Case:
    return Case(call("Relu", ["x 5 3"], ["x 5 3"]), [numbers(5, 3)], lambda a: (np.maximum(a, 0.0),))


def _transpose() -> Case:
    return Case(call("Transpose", ["x 5 3 7"], ["x 7 5 3"], perm=(2, 0, 1)), [numbers(5, 3, 7)],
                lambda a: (a.transpose(2, 0, 1),))  # fmt: skip


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (_product, {("m",), ("n",), ("k",)}),
        (_sum, {("d0",), ("d1",)}),
        (_relu, {("d0",), ("d1",)}),
        (_transpose, {("d0",), ("d1",), ("d2",)}),
    ],
    ids=["product", "sum", "relu", "transpose"],
)
def test_padded_pieces_give_the_whole_result_and_its_gradients(case: object, splits: set[tuple[str, ...]]) -> None:
    plain = check(case(), (2,))  # type: ignore[operator]
    assert plain & splits == set(), "without the option nothing uneven is cut"
    assert check(case(), (2,), PADDED) >= splits  # type: ignore[operator]
    check(case(), (3,), PADDED)  # type: ignore[operator]
    check(case(), (2, 2), PADDED)  # type: ignore[operator]


def test_gathering_padded_pieces_gives_the_whole() -> None:
    table = reshard_table(ideal_mesh((2,)), (5, 7), 1.0, padded=True)
    whole = np.random.default_rng(3).normal(size=(5, 7))
    pieces = scatter(whole, parse_layout("S0", 1), (2,))
    assert {p.shape for p in pieces.values()} == {(3, 7)}
    np.testing.assert_allclose(join(pieces, parse_layout("S0", 1), (2,), (5, 7)), whole)
    assert table.steps(parse_layout("S0", 1), parse_layout("R", 1))[0].payload_bytes == 35


@pytest.mark.parametrize(
    ("before", "after", "payload"), [("S0", "R", 35), ("P", "S0", 2 * 3 * 7), ("S0", "S1", 3 * 7), ("S1", "S0", 3 * 7)]
)
def test_padding_travels_too(before: str, after: str, payload: float) -> None:
    table = reshard_table(ideal_mesh((2,)), (5, 7), 1.0, padded=True)
    (step,) = table.steps(parse_layout(before, 1), parse_layout(after, 1))
    assert step.payload_bytes == payload


def test_a_factor_of_a_dimension_is_not_padded() -> None:
    """Twelve heads of eight on seven ranks would take two each, sixteen columns of 96; fourteen columns is a cut."""
    parted = call("Reshape", ["x 2 4 40", "c:int64 4"], ["x 2 4 5 8"], constants={1: (2, 4, 5, 8)})
    found = {s.splits for s in strategies(parted, spec(parted), ideal_mesh((3,)), 2.0, PADDED)}
    assert all("S2" not in layout_text(x) for s in strategies(parted, spec(parted), ideal_mesh((3,)), 2.0, PADDED)
               for _, x in (*s.reads, *s.writes))  # fmt: skip
    assert ("",) in found


def test_statistics_are_not_padded() -> None:
    softmax = call("Softmax", ["x 4 5"], ["x 4 5"], axis=-1)
    assert all(s.splits != ("d1",) for s in strategies(softmax, spec(softmax), ideal_mesh((2,)), 2.0, PADDED))


def test_a_padded_product_costs_its_padding() -> None:
    """Rows 5 on 2 ranks: three fifths of the work, three rows held of each activation."""
    one = setting(products([3, 7], batch=5), (2,), 1e6, options=PADDED, sharded_states=False)
    problem = formulate(one)
    v = problem.names.index("op:h0")
    shares = {s.splits: s.share for s in problem.choices[v] if isinstance(s, Strategy)}
    assert shares["m",] == pytest.approx(3 / 5)
    assert shares["n",] == pytest.approx(4 / 7)
    assert shares["k",] == pytest.approx(2 / 3)
    answer = get("gshard")(one)
    assert answer.verdict.violations == []
    assert answer.decision["op:h0"].splits == ("n",)  # type: ignore[union-attr]
    assert answer.verdict.compute_s == pytest.approx(3e6 * 4 / 7)


def _uneven_block(options: Options) -> Setting:
    return setting(attention_block(batch=3, steps=9, width=27, heads=3, inner=30), (2,), 1e3, options=options)


@pytest.mark.parametrize("name", ["gshard", "mesh-tensorflow", "tofu"])
def test_every_search_takes_the_option(name: str) -> None:
    assert get(name)(_uneven_block(PADDED)).verdict.violations == []


def test_a_vocabulary_that_does_not_divide_is_cut_where_padding_is_allowed() -> None:
    tensors = {"w": "w 50257 64", "ids": "i:int64 4 32", "e": "x 4 32 64", "p": "w 64 64", "y": "x 4 32 64"}
    what = graph(tensors, [node("Gather", "w ids", "e"), node("MatMul", "e p", "y")])
    limit = 50257 * 64 * 16 / 6
    with pytest.raises(InfeasibleError):
        get("gshard")(setting(what, (3, 3), 1.0, sharded_states=False), memory_bytes=limit)
    answer = get("gshard")(setting(what, (3, 3), 1.0, options=PADDED, sharded_states=False), memory_bytes=limit)
    assert answer.verdict.violations == []
    assert "S" in layout_text(rest_of(answer.decision["w"]).value)
    held = 5585 * 64 * 16
    assert answer.verdict.weight_bytes >= held, "a ninth of the rows, rounded up"

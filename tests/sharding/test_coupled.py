"""Cuts of dimensions whose points depend on each other: the declared exchanges suffice, forward and backward."""

from __future__ import annotations

import pytest

from tests.sharding import coupled_cases as cases
from tests.sharding.execution import check


@pytest.mark.parametrize("log", [False, True])
def test_softmax(log: bool) -> None:
    assert check(cases.softmax(log), (2, 2)) >= {("d2", ""), ("d0", "d2"), ("d2", "d1"), ("d2", "d2")}


def test_layer_norm() -> None:
    assert check(cases.layer_norm(), (2, 2)) >= {("h0", ""), ("b0", "h0"), ("h0", "h0")}


def test_batch_norm_in_training() -> None:
    assert check(cases.batch_norm(), (2, 2)) >= {("n", ""), ("c", "n"), ("n", "s0"), ("s0", "s1")}


def test_mean_variance_norm() -> None:
    assert ("d0",) in check(cases.mean_variance_norm())


def test_group_norm() -> None:
    assert check(cases.group_norm(), (2, 2)) >= {("g", "c"), ("n", "s0"), ("c", "s0")}


def test_instance_norm() -> None:
    assert check(cases.group_norm(4, 4, "InstanceNormalization"), (2, 2)) >= {("g", "g"), ("s0", "g")}


def test_rms_norm() -> None:
    assert check(cases.rms_norm(), (2, 2)) >= {("h0", "b0"), ("h0", "h0")}


def test_lp_norm() -> None:
    assert check(cases.lp_norm()) >= {("d0",), ("d1",)}


def test_skip_layer_norm() -> None:
    assert check(cases.skip_layer_norm()) >= {("h",), ("b0",)}


def test_embed_layer_norm() -> None:
    assert check(cases.embed_layer_norm(), (2, 2)) >= {("h", ""), ("b", "h"), ("s", "b"), ("h", "h")}


def test_cross_entropy_over_a_split_vocabulary() -> None:
    assert check(cases.cross_entropy(), (2, 2)) >= {("c", ""), ("n", "c"), ("c", "n"), ("n", "n")}


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
def test_reductions_that_do_not_add(op: str) -> None:
    assert check(cases.reduction(op), (2, 2)) >= {("d1", "d2"), ("d0", "d1"), ("d0", "d0")}


def test_global_max_pool() -> None:
    assert check(cases.global_max_pool()) >= {("d2",), ("d3",), ("d1",)}


def test_convolution_exchanges_borders_and_corners() -> None:
    assert check(cases.convolution(), (2, 2)) >= {("y0", "y1"), ("n", "y0"), ("c", "y1"), ("k", "c")}


def test_strided_convolution() -> None:
    assert check(cases.strided_convolution()) >= {("y0",), ("c",), ("k",), ("n",)}


def test_grouped_convolution() -> None:
    assert check(cases.grouped_convolution(), (2, 2)) >= {("g", "y0"), ("g", "c"), ("g", "k")}


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pooling(op: str) -> None:
    assert check(cases.pooling(op)) >= {("y0",), ("c",), ("n",)}


def test_ring_attention_on_four_ranks() -> None:
    assert ("ring",) in check(cases.attention(), (4,))


def test_attention_on_two_axes() -> None:
    done = check(cases.attention(), (2, 2))
    assert done >= {("g", "r"), ("g", "ring"), ("ring", "s"), ("b", "g"), ("r", "ring"), ("s", "r")}


def test_rows_travel_to_their_experts() -> None:
    done = check(cases.experts(), (2, 2))
    assert done >= {("experts", ""), ("experts", "experts"), ("experts", "f"), ("m0", "experts"), ("experts", "e")}


def test_rows_travel_to_experts_on_four_ranks() -> None:
    assert check(cases.experts(), (4,)) >= {("experts",), ("e",), ("f",), ("m0",)}

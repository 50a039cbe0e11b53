"""Searches within memory by prices: bounds and answers against enumeration, and on blocks and models of thousands."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.api import load_graph
from planner.costs import profile
from planner.errors import InfeasibleError
from planner.hardware import load_cluster
from planner.sharding import Options, Setting, WeightChoice, ideal_mesh, mesh_on
from planner.sharding.elimination import Factor, least_within, minimise, value
from planner.sharding.named_layout import NamedOperation, NamedProgram, NamedTensor, best_layout
from planner.sharding.searches import get
from tests.sharding.graphs import attention_block, products, setting
from tests.sharding.named_layouts import brute_force_layout


def test_variables_that_leave_small_tables_are_eliminated_first() -> None:
    """Five variables of 60 choices, each two of which share one of 4: tables over the five would have 777M entries."""
    pairs, draw = list(itertools.combinations(range(5), 2)), np.random.default_rng(3)
    tables = {(v, k): draw.integers(1000, size=(60, 4)) for k, pair in enumerate(pairs) for v in pair}
    factors = [Factor((v, 5 + k), table.astype(float)) for (v, k), table in tables.items()]
    least, choices = minimise([60] * 5 + [4] * 10, factors)
    total = np.zeros((4,) * 10)
    for v in range(5):
        beside = [k for k, pair in enumerate(pairs) if v in pair]
        own = sum(
            tables[v, k].reshape(60, *(4 if k == each else 1 for each in beside)) for k in beside
        )  # fmt: skip
        total += np.asarray(own).min(axis=0).reshape([4 if k in beside else 1 for k in range(10)])
    assert least == total.min() == value(factors, choices)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), count=st.integers(1, 4))
def test_the_bound_is_one_and_the_choice_fits(data: st.DataObject, count: int) -> None:
    sizes = [data.draw(st.integers(1, 3)) for _ in range(count)]

    def table(*scope: int) -> Factor:
        shape = [sizes[v] for v in scope]
        cells = data.draw(st.lists(st.integers(0, 9), min_size=math.prod(shape), max_size=math.prod(shape)))
        return Factor(scope, np.asarray(cells, dtype=float).reshape(shape))

    times = [table(v) for v in range(count)] + [table(v, v + 1) for v in range(count - 1)]
    held = [table(v) for v in range(count)]
    limit = data.draw(st.integers(1, 20))
    every = [(value(times, at), value(held, at)) for at in itertools.product(*map(range, sizes))]
    fitting = [seconds for seconds, kept in every if kept <= limit]
    found = least_within(sizes, times, held, limit)
    if not fitting:
        assert not found.choices
        return
    assert value(held, found.choices) <= limit
    assert found.seconds == value(times, found.choices)
    assert found.bound_s <= min(fitting) * (1 + 1e-9) + 1e-9
    assert min(fitting) <= found.seconds


def test_equal_layers_part_ways_where_memory_has_room_for_some() -> None:
    """Ten layers, each 1 s with 10 bytes or 2 s with 5: of 75 bytes five layers can be fast, 15 s."""
    layer, kept = np.array([1.0, 2.0]), np.array([10.0, 5.0])
    found = least_within(
        [2] * 10, [Factor((v,), layer) for v in range(10)], [Factor((v,), kept) for v in range(10)], 75
    )
    assert found.seconds == pytest.approx(15.0)
    assert 14.9 < found.bound_s <= 15.0 + 1e-9


def test_many_variables_of_one_choice_make_no_large_tables() -> None:
    """A hundred variables of one choice beside one of two."""
    scope = tuple(range(101))
    last = Factor((100,), np.array([3.0, 2.0]))
    every = Factor(scope[:60], np.zeros((1,) * 60))
    rest = Factor(scope[50:], np.zeros((1,) * 50 + (2,)))
    assert minimise([1] * 100 + [2], [every, rest, last]) == (2.0, (0,) * 100 + (1,))


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_named_layouts_equal_those_of_brute_force(data: st.DataObject) -> None:
    sizes = {d: data.draw(st.sampled_from([2, 3, 4, 6])) for d in "abcd"}

    def tensor(name: str) -> NamedTensor:
        dims = tuple(data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)))
        return NamedTensor(name, dims, tuple(sizes[d] for d in dims))

    tensors = [tensor("w0"), tensor("w1")]
    operations = []
    for k in range(data.draw(st.integers(1, 3))):
        reads = data.draw(st.lists(st.sampled_from([t.name for t in tensors]), min_size=1, max_size=2, unique=True))
        tensors.append(tensor(f"t{k}"))
        operations.append(NamedOperation(tuple(reads), (f"t{k}",)))
    program, mesh = NamedProgram(tuple(tensors), tuple(operations)), {"m": 2, "n": 3}
    found, exact = best_layout(program, mesh), brute_force_layout(program, mesh)
    assert len(found.assignment) == len(exact.assignment)
    assert found.peak_bytes == pytest.approx(exact.peak_bytes)


def test_gshard_within_memory_finds_what_tensor_parallel_layers_do_for_a_block() -> None:
    """Memory for an eighth of the weights: no slower than tensor parallel layers in the same memory."""
    mesh = mesh_on(load_cluster("dgx-a100"), {"tensor": 8})
    one = setting(attention_block(batch=4, steps=2048, width=4096, heads=32, inner=16384), mesh, 1e-3, micro_batches=64)
    known = get("gshard")(replace(one, options=Options(as_layers=True), sharded_states=False))
    found = get("gshard")(one, memory_bytes=known.verdict.memory_bytes)
    assert found.verdict.violations == []
    assert found.verdict.memory_bytes <= known.verdict.memory_bytes
    assert found.verdict.seconds <= known.verdict.seconds * 1.02


def test_the_leanest_layouts_cut_every_weight_and_state() -> None:
    one = setting(products([8, 16, 8], batch=8), (8,), 1.0)
    answer = get("leanest")(one)
    assert all(
        p.cuts
        for c in answer.decision.values()
        if isinstance(c, WeightChoice)
        for x in (c.weight, c.gradient, c.optimizer)
        for p in x
    )
    assert answer.verdict.weight_bytes == pytest.approx(2 * 8 * 16 * 16 / 8)
    with pytest.raises(InfeasibleError, match="every layout needs about"):
        get("leanest")(one, memory_bytes=answer.verdict.memory_bytes / 2)


@cache
def _model(name: str, batch: int, ranks: tuple[int, ...]) -> Setting:
    graph, cluster = load_graph(name, dims={"batch": batch}), load_cluster("dgx-a100", nodes=16)
    prices = profile(graph, cluster.devices[0])
    return Setting(
        graph, mesh_on(cluster, ranks), (), prices.forward_s, prices.backward_s, prices.saved, micro_batches=8,
        work_s=prices.at,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [(12,), (8,)])
def test_mesh_tensorflow_lays_out_48_layers(ranks: tuple[int, ...]) -> None:
    """On 12 ranks few of hundreds of names can be split at all."""
    answer = get("mesh-tensorflow")(_model("bert-48", 4, ranks))
    assert answer.verdict.violations == []
    assert answer.verdict.compute_s <= sum(map(float, map(np.sum, _model("bert-48", 4, ranks).nodes_s(1.0)))) * 1.0001


def test_mesh_tensorflow_within_memory_fits_and_is_no_leaner_than_needed() -> None:
    one = _model("bert-48", 8, (8,))
    least, fastest = get("mesh-tensorflow-memory")(one), get("mesh-tensorflow")(one)
    room = (least.verdict.memory_bytes + fastest.verdict.memory_bytes) / 2
    between = get("mesh-tensorflow")(one, memory_bytes=room)
    assert between.verdict.memory_bytes <= room
    assert fastest.verdict.seconds <= between.verdict.seconds <= least.verdict.seconds * (1 + 1e-9)


def test_a_map_of_names_within_memory_counts_what_operators_keep() -> None:
    one = setting(attention_block(), ideal_mesh((4,)), 1.0)
    fastest = get("mesh-tensorflow")(one)
    same = get("mesh-tensorflow")(one, memory_bytes=fastest.verdict.memory_bytes)
    assert same.verdict.seconds == pytest.approx(fastest.verdict.seconds)

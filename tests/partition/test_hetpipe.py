"""HetPipe: the published answer, prices by hand, and the exact search against trying everything."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.solvers.partition.hetpipe_dp import solve_hetpipe
from planner.space.partition.hetpipe import HetPipeDecision, HetPipeProblem, in_flight, uniform_links
from tests.oracles.hetpipe import try_everything
from tests.shared_data import shared_path


def problem(**changes: Any) -> HetPipeProblem:
    """Four layers on a fast device (1 s a layer, 30 bytes) and two slow ones (2 s, 100 bytes)."""
    terms = {
        "compute_s": np.array([[1.0] * 4, [2.0] * 4]),
        "weight_bytes": np.full(4, 3.0),
        "saved_bytes": np.full(4, 5.0),
        "boundary_bytes": np.array([0.0, 4.0, 4.0, 4.0, 0.0]),
        "counts": (1, 2),
        "memory_bytes": np.array([30.0, 100.0]),
        "bandwidth_byte_per_s": np.array([[math.inf, 8.0], [8.0, 16.0]]),
    }
    return HetPipeProblem(**{**terms, **changes})


def test_known_answer() -> None:
    entries = json.loads(shared_path("reference/known_answers.json").read_text())["HetPipe"]
    (entry,) = (e for e in entries if e["name"] == "min-max partition over GPU orders")
    layers, speeds = np.array(entry["input"]["layers"], dtype=float), entry["input"]["speeds"]
    kinds = sorted(set(speeds))
    count = len(layers)
    instance = HetPipeProblem(
        compute_s=np.array([layers / speed for speed in kinds]),
        weight_bytes=np.zeros(count),
        saved_bytes=np.zeros(count),
        boundary_bytes=np.zeros(count + 1),
        counts=tuple(speeds.count(kind) for kind in kinds),
        memory_bytes=np.full(len(kinds), math.inf),
        bandwidth_byte_per_s=uniform_links(len(kinds), math.inf),
    )
    result = solve_hetpipe(instance)
    assert result.objective == pytest.approx(entry["expect"]["bottleneck"])
    assert result.proven
    published = HetPipeDecision(
        tuple(entry["expect"]["boundaries"]), tuple(kinds.index(speed) for speed in entry["expect"]["order"])
    )
    assert instance.judge(published).objective == pytest.approx(entry["expect"]["bottleneck"])


@pytest.mark.parametrize(
    ("stages", "concurrent", "expected"),
    [(4, 4, [4, 3, 2, 1]), (4, 2, [2, 2, 2, 1]), (3, 5, [5, 4, 3]), (3, 1, [1, 1, 1])],
)
def test_mini_batches_in_flight(stages: int, concurrent: int, expected: list[int]) -> None:
    assert [in_flight(q, stages, concurrent) for q in range(stages)] == expected


def test_price_by_hand() -> None:
    verdict = problem().judge(HetPipeDecision((0, 1, 3, 4), (1, 0, 1)))
    # 2; 2 + 2 * 4 / 8; 2 + 2 * 4 / 8
    assert verdict.parts == pytest.approx((2.0, 3.0, 3.0))
    assert verdict.feasible
    # three in flight: the fast device in front would keep 3 * 2 * 8 = 48 of 30 bytes
    crowded = problem(concurrent=3).judge(HetPipeDecision((0, 2, 3, 4), (0, 1, 1)))
    assert [(v.kind, v.needed) for v in crowded.violations] == [("memory", 48.0)]


def test_memory_moves_the_small_device_to_the_end() -> None:
    result = solve_hetpipe(problem(concurrent=3))
    assert result.decision == HetPipeDecision((0, 1, 2, 4), (1, 1, 0))
    assert result.objective == pytest.approx(3.0)


def test_largest_number_of_mini_batches() -> None:
    # a layer of a mini-batch takes 8 bytes; the small device at the end keeps Nm - 2 of them, at most 3 in 30 bytes
    for concurrent in range(1, 31):
        found = solve_hetpipe(dataclasses.replace(problem(), concurrent=concurrent))
        assert (found.decision is not None) == (concurrent <= 5)
    assert solve_hetpipe(problem(memory_bytes=np.ones(2))).decision is None
    full = dataclasses.replace(problem(), concurrent=5)
    assert try_everything(full).decision is not None
    assert try_everything(dataclasses.replace(full, concurrent=6)).decision is None


def test_malformed() -> None:
    for kind, plan in {
        "coverage": HetPipeDecision((0, 2), (0,)),
        "devices": HetPipeDecision((0, 4), (0,)),
    }.items():
        assert kind in {v.kind for v in problem().judge(plan).violations}
    too_many = problem().judge(HetPipeDecision((0, 1, 2, 4), (0, 0, 1)))
    assert [v.kind for v in too_many.violations] == ["devices"]
    with pytest.raises(UsageError, match="tables"):
        problem(compute_s=np.ones((3, 4)))
    with pytest.raises(UsageError, match="nothing to decide"):
        problem(counts=(0, 0))


def test_more_devices_than_layers() -> None:
    assert solve_hetpipe(problem(counts=(3, 2))).decision is None
    assert solve_hetpipe(problem(counts=(3, 2), use_all=False)).decision is not None


@st.composite
def problems(draw: st.DrawFn) -> HetPipeProblem:
    layers, kinds = draw(st.integers(1, 6)), draw(st.integers(1, 3))

    def row(columns: int, least: int = 0) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(least, 9), min_size=columns, max_size=columns)), dtype=float)

    counts = draw(st.lists(st.integers(0, 2), min_size=kinds, max_size=kinds).filter(any))
    return HetPipeProblem(
        compute_s=np.array([row(layers) for _ in range(kinds)]),
        weight_bytes=row(layers),
        saved_bytes=row(layers),
        boundary_bytes=row(layers + 1),
        counts=tuple(counts),
        memory_bytes=np.array([draw(st.sampled_from([15.0, 40.0, 90.0, math.inf])) for _ in range(kinds)]),
        bandwidth_byte_per_s=np.array([row(kinds, 1) for _ in range(kinds)]),
        concurrent=draw(st.integers(1, 5)),
        stash_weights=draw(st.booleans()),
        optimizer_per_weight=draw(st.sampled_from([0.0, 2.0])),
        use_all=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(problems())
def test_same_as_trying_everything(instance: HetPipeProblem) -> None:
    oracle, found = try_everything(instance), solve_hetpipe(instance)
    assert found.objective == pytest.approx(oracle.objective, rel=1e-9)
    assert found.proven

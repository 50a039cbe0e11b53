"""BaPipe and HetPipe: published answers, prices by hand, the search against trying everything."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.published.problems import (
    BaPipeSchedule,
    ChainDecision,
    ChainStages,
    bapipe,
    features_in_flight,
    hetpipe,
    in_flight,
    pipeline_s,
    uniform_links,
)
from planner.published.solvers import search_partition
from tests.oracles.partitions import by_force
from tests.shared_data import shared_path


def answers(family: str, name: str) -> list[dict[str, Any]]:
    entries = json.loads(shared_path("reference/known_answers.json").read_text())[family]
    return [entry for entry in entries if entry["name"].startswith(name)]


def plan_of(problem: ChainStages, boundaries: tuple[int, ...]) -> ChainDecision:
    """The plan with these boundaries."""
    (pipeline,) = (p for p in problem.pipelines if p.stages == len(boundaries) - 1)
    return ChainDecision(boundaries, pipeline)


def test_known_times_and_features_of_bapipe() -> None:
    entries = answers("BaPipe", "1F1B-SNO vs 1F1B-SO")
    assert len(entries) == 4
    for entry in entries:
        given_, expect = entry["input"], entry["expect"]
        stages, count, slot = given_["N"], given_["M"], given_["F"] + given_["B"]
        for schedule, key in (("1f1b-as", "as_"), ("1f1b-sno", "sno"), ("1f1b-so", "so")):
            time = pipeline_s(BaPipeSchedule(schedule), stages, count, slot, given_["SR"])
            assert time == pytest.approx(expect[key])

        def kept(schedule: BaPipeSchedule, *, exact: bool = False, n: int = stages, m: int = count) -> list[int]:
            return [features_in_flight(schedule, i, n, m, exact=exact) for i in range(n)]

        assert kept(BaPipeSchedule.AS) == kept(BaPipeSchedule.SNO) == expect["features_as_sno"]
        assert kept(BaPipeSchedule.SO, exact=True) == expect["features_so_exact"]
        assert kept(BaPipeSchedule.SO) == expect["features_so_bound"]


def test_known_parallel_units_of_bapipe() -> None:
    (entry,) = answers("BaPipe", "FBP-AS")
    given_, expect = entry["input"], entry["expect"]
    stages, count, slot = given_["N"], given_["M"], given_["F"] + given_["B"]
    schedule = BaPipeSchedule.FBP_AS
    assert pipeline_s(schedule, stages, count, slot) == expect["makespan"]
    assert pipeline_s(schedule, stages, count, slot, fill_overlap=True) == expect["paper_form"]
    assert [features_in_flight(schedule, i, stages, count) for i in range(stages)] == expect["features"]


def bapipe_problem(**changes: Any) -> ChainStages:
    """Four layers of 1 s forward and 2 s backward on two devices; the middle cut carries ten times the bytes."""
    terms = {
        "compute_s": 3 * np.ones((2, 4)),
        "feature_bytes": np.array([1.0, 2.0, 3.0, 4.0]),
        "boundary_bytes": np.array([0.0, 1.0, 10.0, 1.0, 0.0]),
        "weight_bytes": np.full(4, 8.0),
        "memory_bytes": np.full(2, 1e9),
        "bandwidth_byte_per_s": 2.0,
        "micro_batches": 4,
        "schedule": BaPipeSchedule.SNO,
    }
    return bapipe(**{**terms, **changes})


@pytest.mark.parametrize(
    ("schedule", "middle", "seconds"),
    [
        (BaPipeSchedule.SNO, 2, 5 * 6 + (2 + 4 - 2 - 2) * 2 * 5),  # the cut in the middle takes 5 s one way; M 4, N 2
        (BaPipeSchedule.SO, 2, 5 * 6 + 2 * 5),
        (BaPipeSchedule.SNO, 1, 5 * 9 + 2 * 2 * 0.5),
    ],
)
def test_price_of_bapipe_by_hand(schedule: BaPipeSchedule, middle: int, seconds: float) -> None:
    problem = bapipe_problem(schedule=schedule)
    assert problem.judge(plan_of(problem, (0, middle, 4))).objective == pytest.approx(seconds)


def test_transfers_that_take_longer_than_the_work_set_the_pace_of_1f1b_so() -> None:
    # 10 bytes at 1 byte a second: slots of 10 s instead of 6 s
    problem = bapipe_problem(schedule=BaPipeSchedule.SO, bandwidth_byte_per_s=1.0)
    assert problem.judge(plan_of(problem, (0, 2, 4))).objective == pytest.approx(5 * 10 + 2 * 10)


def test_coarse_partition_avoids_the_heavy_cut() -> None:
    """Balance says the middle; its transfers cost more than the imbalance."""
    result = search_partition(bapipe_problem())
    assert result.decision.boundaries in ((0, 1, 4), (0, 3, 4))
    assert result.objective == pytest.approx(47.0)
    assert search_partition(bapipe_problem(bandwidth_byte_per_s=1e9)).decision.boundaries == (0, 2, 4)


def test_memory_moves_layers() -> None:
    # stage 0 of two with two layers under so: 2 * 16 + 3 * 3 = 41 bytes; stage 1: 2 * 16 + 7 = 39
    for memory, boundaries in ((41.0, (0, 2, 4)), (40.0, (0, 1, 4))):
        problem = bapipe_problem(
            schedule=BaPipeSchedule.SO, bandwidth_byte_per_s=200.0, memory_bytes=np.array([memory, 60.0])
        )
        assert search_partition(problem).decision == plan_of(problem, boundaries)


def hetpipe_problem(**changes: Any) -> ChainStages:
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
    return hetpipe(**{**terms, **changes})


def ordered(problem: ChainStages, boundaries: tuple[int, ...], types: tuple[int, ...]) -> ChainDecision:
    return ChainDecision(boundaries, problem.pipelines[0], types)


def test_known_answer_of_hetpipe() -> None:
    (entry,) = answers("HetPipe", "min-max partition over GPU orders")
    layers, speeds = np.array(entry["input"]["layers"], dtype=float), entry["input"]["speeds"]
    kinds = sorted(set(speeds))
    count = len(layers)
    problem = hetpipe(
        compute_s=np.array([layers / speed for speed in kinds]),
        weight_bytes=np.zeros(count),
        saved_bytes=np.zeros(count),
        boundary_bytes=np.zeros(count + 1),
        counts=tuple(speeds.count(kind) for kind in kinds),
        memory_bytes=np.full(len(kinds), math.inf),
        bandwidth_byte_per_s=uniform_links(len(kinds), math.inf),
    )
    result = search_partition(problem)
    assert result.objective == pytest.approx(entry["expect"]["bottleneck"])
    assert result.proven
    order = tuple(kinds.index(speed) for speed in entry["expect"]["order"])
    published = ordered(problem, tuple(entry["expect"]["boundaries"]), order)
    assert problem.judge(published).objective == pytest.approx(entry["expect"]["bottleneck"])


@pytest.mark.parametrize(
    ("stages", "concurrent", "expected"),
    [(4, 4, [4, 3, 2, 1]), (4, 2, [2, 2, 2, 1]), (3, 5, [5, 4, 3]), (3, 1, [1, 1, 1])],
)
def test_mini_batches_in_flight(stages: int, concurrent: int, expected: list[int]) -> None:
    assert [in_flight(q, stages, concurrent) for q in range(stages)] == expected


def test_price_of_hetpipe_by_hand() -> None:
    problem = hetpipe_problem()
    verdict = problem.judge(ordered(problem, (0, 1, 3, 4), (1, 0, 1)))
    # 2; 2 + 2 * 4 / 8; 2 + 2 * 4 / 8
    assert verdict.parts == pytest.approx((2.0, 3.0, 3.0))
    assert verdict.feasible
    # three in flight: the fast device in front would keep 3 * 2 * 8 = 48 of 30 bytes
    crowded = hetpipe_problem(concurrent=3)
    found = crowded.judge(ordered(crowded, (0, 2, 3, 4), (0, 1, 1))).violations
    assert [(v.kind, v.needed) for v in found] == [("memory", 48.0)]


def test_memory_moves_the_small_device_to_the_end() -> None:
    problem = hetpipe_problem(concurrent=3)
    result = search_partition(problem)
    assert result.decision == ordered(problem, (0, 1, 2, 4), (1, 1, 0))
    assert result.objective == pytest.approx(3.0)


def test_largest_number_of_mini_batches() -> None:
    # a layer of a mini-batch takes 8 bytes; the small device at the end keeps Nm - 2 of them, at most 3 in 30 bytes
    for concurrent in range(1, 31):
        result = search_partition(hetpipe_problem(concurrent=concurrent))
        assert (result.decision is not None) == (concurrent <= 5)
    assert search_partition(hetpipe_problem(memory_bytes=np.ones(2))).decision is None
    assert by_force(hetpipe_problem(concurrent=5)).decision is not None
    assert by_force(hetpipe_problem(concurrent=6)).decision is None


def test_malformed() -> None:
    straight, mixed = bapipe_problem(), hetpipe_problem()
    pipeline = straight.pipelines[0]
    for problem, plan, kind in (
        (straight, ChainDecision((0, 2), pipeline), "coverage"),
        (straight, ChainDecision((0, 1, 2, 4), pipeline), "devices"),
        (straight, ChainDecision((0, 2, 4), pipeline, (0, 1)), "devices"),
        (straight, ChainDecision((0, 4), bapipe_problem(schedule=BaPipeSchedule.SO).pipelines[-1]), "option"),
        (mixed, ordered(mixed, (0, 2), (0,)), "coverage"),
        (mixed, ordered(mixed, (0, 4), (0,)), "devices"),
        (mixed, ordered(mixed, (0, 1, 2, 4), (0, 0, 1)), "devices"),
        (mixed, ordered(mixed, (0, 1, 2, 4), (0, 1, 2)), "devices"),
    ):
        assert kind in {v.kind for v in problem.judge(plan).violations}


@pytest.mark.parametrize("broken", [
    lambda: bapipe_problem(compute_s=np.ones((3, 4))),
    lambda: bapipe_problem(weight_bytes=np.ones(3)),
    lambda: hetpipe_problem(compute_s=np.ones((3, 4))),
    lambda: hetpipe_problem(counts=(0, 0)),
])  # fmt: skip
def test_tables_that_do_not_agree(broken: Any) -> None:
    with pytest.raises(UsageError, match=r"tables|nothing to decide"):
        broken()


def test_more_devices_than_layers() -> None:
    assert search_partition(hetpipe_problem(counts=(3, 2))).decision is None
    assert search_partition(hetpipe_problem(counts=(3, 2), use_all=False)).decision is not None


def row(draw: st.DrawFn, columns: int, least: int = 0) -> np.ndarray:
    return np.array(draw(st.lists(st.integers(least, 9), min_size=columns, max_size=columns)), dtype=float)


@st.composite
def bapipe_problems(draw: st.DrawFn) -> ChainStages:
    layers, devices = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    speeds = np.array(draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=devices, max_size=devices)))
    return bapipe(
        speeds[:, None] * row(draw, layers),
        row(draw, layers),
        row(draw, layers + 1),
        row(draw, layers),
        np.array([draw(st.sampled_from([25.0, 60.0, 120.0, 1e9])) for _ in range(devices)]),
        bandwidth_byte_per_s=draw(st.sampled_from([0.5, 4.0, 100.0])),
        micro_batches=draw(st.sampled_from([1, 2, 6, 12])),
        schedule=draw(st.sampled_from([BaPipeSchedule.SNO, BaPipeSchedule.SO])),
    )


@st.composite
def hetpipe_problems(draw: st.DrawFn) -> ChainStages:
    layers, kinds = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return hetpipe(
        compute_s=np.array([row(draw, layers) for _ in range(kinds)]),
        weight_bytes=row(draw, layers),
        saved_bytes=row(draw, layers),
        boundary_bytes=row(draw, layers + 1),
        counts=tuple(draw(st.lists(st.integers(0, 2), min_size=kinds, max_size=kinds).filter(any))),
        memory_bytes=np.array([draw(st.sampled_from([15.0, 40.0, 90.0, math.inf])) for _ in range(kinds)]),
        bandwidth_byte_per_s=np.array([row(draw, kinds, 1) for _ in range(kinds)]),
        concurrent=draw(st.integers(1, 5)),
        optimizer_per_weight=draw(st.sampled_from([0.0, 2.0])),
        use_all=draw(st.booleans()),
    )


@settings(max_examples=500, deadline=None)
@given(st.one_of(bapipe_problems(), hetpipe_problems()))
def test_same_as_trying_everything(instance: ChainStages) -> None:
    oracle, result = by_force(instance), search_partition(instance)
    assert result.objective == pytest.approx(oracle.objective, rel=1e-9)
    assert result.proven

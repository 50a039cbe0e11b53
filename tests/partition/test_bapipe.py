"""BaPipe: published closed forms, prices by hand, and the exact search against trying everything."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.solvers.partition.bapipe_dp import solve_bapipe
from planner.space.partition.bapipe import (
    ASYNCHRONOUS,
    BaPipeDecision,
    BaPipeProblem,
    BaPipeSchedule,
    features_in_flight,
    pipeline_s,
)
from tests.oracles.bapipe import try_everything
from tests.shared_data import shared_path

ALL = tuple(BaPipeSchedule)


def answers(name: str) -> list[dict[str, Any]]:
    entries = json.loads(shared_path("reference/known_answers.json").read_text())["BaPipe"]
    return [entry for entry in entries if entry["name"].startswith(name)]


def test_known_times_and_features() -> None:
    entries = answers("1F1B-SNO vs 1F1B-SO")
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


def test_known_parallel_units() -> None:
    (entry,) = answers("FBP-AS")
    given_, expect = entry["input"], entry["expect"]
    stages, count, slot = given_["N"], given_["M"], given_["F"] + given_["B"]
    schedule = BaPipeSchedule.FBP_AS
    assert pipeline_s(schedule, stages, count, slot) == expect["makespan"]
    assert pipeline_s(schedule, stages, count, slot, fill_overlap=True) == expect["paper_form"]
    assert [features_in_flight(schedule, i, stages, count) for i in range(stages)] == expect["features"]


def problem(**changes: Any) -> BaPipeProblem:
    """Four layers of 1 s forward and 2 s backward on two devices; the middle cut carries ten times the bytes."""
    terms = {
        "micro_batches": (1,),
        "forward_s": np.ones((1, 2, 4)),
        "backward_s": 2 * np.ones((1, 2, 4)),
        "feature_bytes": np.array([[1.0, 2.0, 3.0, 4.0]]),
        "boundary_bytes": np.array([[0.0, 1.0, 10.0, 1.0, 0.0]]),
        "weight_bytes": np.full(4, 8.0),
        "memory_bytes": np.full(2, 1e9),
        "bandwidth_byte_per_s": 2.0,
        "global_batch": 4,
        "schedules": (BaPipeSchedule.SNO,),
    }
    return BaPipeProblem(**{**terms, **changes})


def test_price_by_hand() -> None:
    def price(schedule: BaPipeSchedule, middle: int = 2) -> float:
        return problem(schedules=ALL).judge(BaPipeDecision((0, middle, 4), schedule, 1)).objective

    # cut in the middle takes 5 s one way; M = 4, N = 2
    assert price(BaPipeSchedule.SNO) == pytest.approx(5 * 6 + (2 + 4 - 2 - 2) * 2 * 5)
    assert price(BaPipeSchedule.SO) == pytest.approx(5 * 6 + 2 * 5)
    assert price(BaPipeSchedule.AS) == pytest.approx(5 * 9)  # max(2, 5) + 4, or 2 + max(4, 5)
    assert price(BaPipeSchedule.FBP_AS) == pytest.approx(7 * 10)
    assert price(BaPipeSchedule.SNO, 1) == pytest.approx(5 * 9 + 2 * 2 * 0.5)
    # data parallel: two samples on each, 2 * 1/2 * 32 / 2
    plan = BaPipeDecision((0, 4), BaPipeSchedule.DATA_PARALLEL, 1)
    assert problem(schedules=ALL).judge(plan).objective == pytest.approx(2 * 12 + 16)


def test_coarse_partition_avoids_the_heavy_cut() -> None:
    """Balance says the middle; its transfers cost more than the imbalance."""
    result = solve_bapipe(problem())
    assert result.decision.boundaries in ((0, 1, 4), (0, 3, 4))
    assert result.objective == pytest.approx(47.0)
    assert solve_bapipe(problem(bandwidth_byte_per_s=1e9)).decision.boundaries == (0, 2, 4)


def test_memory_moves_layers_and_changes_the_schedule() -> None:
    # stage 1 of two with two layers: 2 * 16 + 4 * 3 = 44 bytes under so, 2 * 16 + 2 * 3 = 38 under sno
    both = (BaPipeSchedule.SO, BaPipeSchedule.SNO)
    wide = problem(schedules=both, bandwidth_byte_per_s=200.0, memory_bytes=np.array([44.0, 48.0]))
    assert solve_bapipe(wide).decision == BaPipeDecision((0, 2, 4), BaPipeSchedule.SO, 1)
    tight = problem(schedules=both, bandwidth_byte_per_s=200.0, memory_bytes=np.array([38.0, 48.0]))
    assert solve_bapipe(tight).decision == BaPipeDecision((0, 2, 4), BaPipeSchedule.SNO, 1)


def test_malformed() -> None:
    checks = {
        "coverage": BaPipeDecision((0, 2), BaPipeSchedule.SNO, 1),
        "devices": BaPipeDecision((0, 1, 2, 4), BaPipeSchedule.SNO, 1),
        "option": BaPipeDecision((0, 4), BaPipeSchedule.AS, 1),
    }
    for kind, plan in checks.items():
        assert [v.kind for v in problem().judge(plan).violations] == [kind]
    with pytest.raises(UsageError, match="tables"):
        problem(forward_s=np.ones((1, 3, 4)))


@st.composite
def problems(draw: st.DrawFn) -> BaPipeProblem:
    layers, devices = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    sizes = draw(st.sampled_from([(1,), (1, 2), (2, 3)]))
    whole = st.integers(0, 9)

    def row(columns: int) -> np.ndarray:
        return np.array(draw(st.lists(whole, min_size=columns, max_size=columns)), dtype=float)

    speeds = np.array(draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=devices, max_size=devices)))
    forward, backward, features, boundary = row(layers), row(layers), row(layers), row(layers + 1)
    return BaPipeProblem(
        sizes,
        np.array([[s * v * forward for v in speeds] for s in sizes]),
        np.array([[s * v * backward for v in speeds] for s in sizes]),
        np.array([s * features for s in sizes]),
        np.array([s * boundary for s in sizes]),
        row(layers),
        np.array([draw(st.sampled_from([25.0, 60.0, 120.0, 1e9])) for _ in range(devices)]),
        bandwidth_byte_per_s=draw(st.sampled_from([0.5, 4.0, 100.0])),
        global_batch=draw(st.sampled_from([2, 6, 12])),
        schedules=draw(st.sampled_from([ASYNCHRONOUS, ALL, (BaPipeSchedule.SNO,), (BaPipeSchedule.SO,)])),
        fill_overlap=draw(st.booleans()),
        exact_features=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(problems())
def test_same_as_trying_everything(instance: BaPipeProblem) -> None:
    oracle, found = try_everything(instance), solve_bapipe(instance)
    assert found.objective == pytest.approx(oracle.objective, rel=1e-9)
    assert found.proven

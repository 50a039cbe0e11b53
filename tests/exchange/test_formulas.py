"""Closed forms beside those of the reference (tests/published/formulas): other bandwidths, searches, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from planner.errors import UsageError
from planner.exchange import formulas as f


def test_byteps_shares_follow_the_bandwidth_of_the_cpu_machines() -> None:
    """4 GPU machines, 2 CPU machines of twice the bandwidth: x = 2*3*2/(16+2*2*2) = 1/2, so they sum everything."""
    assert f.byteps_shares(4, 2, 2.0) == (0.5, 0.0)
    assert f.byteps_shares(4, 2, 0.5)[0] == pytest.approx(2 * 3 * 0.5 / (16 + 2 * 2 * 0.5))
    assert f.byteps_shares(4, 9) == (1 / 9, 0.0)


@pytest.mark.parametrize("k", range(9))
def test_byteps_lies_between_a_ring_and_one_copy(k: int) -> None:
    assert 1.0 <= f.byteps_s(1, 8, k, 1) <= 1.75


def test_partition_search_stops_when_the_time_rises() -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return 2 + 30 / count + 0.3 * (count - 1)  # least at sqrt(30/0.3) = 10

    fit = f.search_partitions(measure, 4)
    assert asked == [4, 8, 16, 2]
    assert fit.best == 10
    assert fit.fixed_s == pytest.approx(2)
    assert fit.seconds(10) == pytest.approx(2 + 3 + 2.7)


def test_two_samples_give_the_better_one() -> None:
    assert f.fit_partitions({4: 1.5, 8: 1.25}).best == 8


def test_partitions_outside_the_samples_are_not_taken() -> None:
    assert f.fit_partitions({1: 101.0, 2: 51.0, 4: 26.0}).best == 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: f.zero_state_bytes(1, 8, 4),
        lambda: f.byteps_shares(0, 0),
        lambda: f.byteps_shares(4, -1),
        lambda: f.byteps_shares(4, 1, 0),
        lambda: f.wsp_staleness(0, 0),
        lambda: f.separate_server_s(1, 4, 0, 1),
        lambda: f.fit_partitions({}),
        lambda: f.fit_partitions({0: 1.0}),
        lambda: f.search_partitions(float, 0),
        lambda: f.best_partitions(-1, 1),
    ],
)
def test_refuses(wrong: Any) -> None:
    with pytest.raises(UsageError):
        wrong()


def test_variables_are_dealt_to_servers_in_turn() -> None:
    """Of five on three servers the first gets the first and the fourth; of more servers than variables some get 0."""
    assert f.round_robin_loads([9, 8, 2, 4, 1], 3) == (13, 9, 2)
    assert f.round_robin_loads([9, 8, 2, 4, 1], 1) == (24,)
    assert f.round_robin_loads([9, 8], 4) == (9, 8, 0, 0)
    assert f.balanced_loads([9, 8, 2, 4, 1], 3) == (8, 8, 8)


def test_partitions_are_at_most_what_is_allowed() -> None:
    """sqrt(4e12 / 1) is 2,000,000, beyond the 1,048,576 (2^20) that are tried where nothing else is said."""
    assert f.whole_partitions(4e12, 1.0) == 1_048_576
    assert f.whole_partitions(4e12, 1.0, 3_000_000) == 2_000_000
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return 1 / count  # falls for ever

    f.search_partitions(measure, 1)
    assert max(asked) == 1_048_576


def test_partitions_may_cost_nothing_but_not_less() -> None:
    """sqrt(0.25 / 0.25) is 1 and sqrt(0.5 / 0.125) is 2."""
    assert (f.best_partitions(0.25, 0.25), f.best_partitions(0.5, 0.125), f.best_partitions(0.0, 0.5)) == (1, 2, 0)
    assert f.best_partitions(0.5, 0.0) == math.inf
    for negative in ((-0.5, 0.5), (0.5, -0.5)):
        with pytest.raises(UsageError, match="must not be negative"):
            f.best_partitions(*negative)

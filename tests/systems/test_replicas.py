"""Replicated stages whose exchange runs beside their work: by hand, and against all plans."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware import load_cluster
from planner.solvers.cluster_chains.stages import carried, overlapped_exchange_stages
from planner.space import StageChoice

Chain = tuple[list[float], list[float], list[float]]


def tables(work: list[float], weight: list[float], cut: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(work)
    runs = [[[math.fsum(each[i:j]) for j in range(n + 1)] for i in range(n + 1)] for each in (work, weight)]
    return np.array(runs[0]), np.array(runs[1]), np.array([0.0, *cut, 0.0])


def ports(devices: int, byte_per_s: float) -> list[float]:
    return [byte_per_s * m for m in range(1, devices + 1)]


def slowest_s(chain: Chain, stages: tuple[StageChoice, ...], byte_per_s: float) -> float:
    work, weight, cut = chain
    crossing = [0.0, *cut, 0.0]
    times = []
    for s in stages:
        ring = 2 * (s.replicas - 1) / s.replicas * sum(weight[s.start : s.stop]) / byte_per_s
        times.append(
            max(sum(work[s.start : s.stop]), ring, (crossing[s.start] + crossing[s.stop]) / byte_per_s) / s.replicas
        )
    return max(times)


def all_plans(blocks: int, devices: int) -> list[tuple[StageChoice, ...]]:
    plans = []
    for count in range(1, min(blocks, devices) + 1):
        for inner in itertools.combinations(range(1, blocks), count - 1):
            marks = (0, *inner, blocks)
            for replicas in itertools.product(range(1, devices + 1), repeat=count):
                if sum(replicas) <= devices:
                    plans.append(
                        tuple(
                            StageChoice(a, b, r) for (a, b), r in zip(itertools.pairwise(marks), replicas, strict=True)
                        )
                    )
    return plans


def test_by_hand() -> None:
    """Weights at the end: 3 replicas of 9.5 s exchange nothing, one device has 2 s; a ring of all four takes 27 s."""
    chain = ([4.0, 4.0, 1.5, 2.0], [0.0, 0.0, 0.0, 18.0], [0.5, 0.5, 0.5])
    found = overlapped_exchange_stages(*tables(*chain), 1.0, ports(4, 1.0))
    assert found == (StageChoice(0, 3, 3), StageChoice(3, 4, 1))
    alone = (StageChoice(0, 4, 4),)
    assert slowest_s(chain, alone, 1.0) == pytest.approx(27 / 4)
    assert slowest_s(chain, found, 1.0) == pytest.approx(9.5 / 3)


def test_one_stage_where_nothing_is_exchanged() -> None:
    chain = ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [9.0, 9.0])
    assert overlapped_exchange_stages(*tables(*chain), 1.0, ports(4, 1.0)) == (StageChoice(0, 3, 4),)


def test_no_stage_is_no_plan() -> None:
    work, weight, cut = tables([1.0, 1.0], [1.0, 1.0], [1.0])
    assert overlapped_exchange_stages(np.full_like(work, np.inf), weight, cut, 1.0, ports(2, 1.0)) is None


@given(
    blocks=st.integers(1, 4).flatmap(
        lambda n: st.tuples(*(st.lists(st.integers(0, 9).map(float), min_size=k, max_size=k) for k in (n, n, n - 1)))
    ),
    devices=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_no_plan_is_faster(blocks: Chain, devices: int) -> None:
    found = overlapped_exchange_stages(*tables(*blocks), 2.0, ports(devices, 2.0))
    assert found is not None
    assert [s.start for s in found] == [0, *(s.stop for s in found[:-1])]
    assert found[-1].stop == len(blocks[0])
    assert sum(s.replicas for s in found) <= devices
    best = min(slowest_s(blocks, plan, 2.0) for plan in all_plans(len(blocks[0]), devices))
    assert slowest_s(blocks, found, 2.0) == pytest.approx(best)


def test_replicas_that_share_the_minibatches_evenly() -> None:
    """3-1 is out with 16 minibatches, as 3 does not divide them."""
    chain = ([4.0, 4.0, 1.5, 2.0], [0.0, 0.0, 0.0, 18.0], [0.5, 0.5, 0.5])
    found = overlapped_exchange_stages(*tables(*chain), 1.0, ports(4, 1.0), minibatches=16)
    assert found is not None
    assert {s.replicas for s in found} <= {1, 2, 4}
    assert slowest_s(chain, found, 1.0) == pytest.approx(4.0)


def test_stages_that_fit() -> None:
    """The first three blocks fit a device with one minibatch in flight only, and one device stands behind them."""
    chain = ([4.0, 4.0, 1.5, 2.0], [0.0, 0.0, 0.0, 18.0], [0.5, 0.5, 0.5])
    fits = [np.ones((5, 5), dtype=bool) for _ in range(4)]
    for more in fits[1:]:
        more[0, 3] = False
    found = overlapped_exchange_stages(*tables(*chain), 1.0, ports(4, 1.0), fits=fits)
    assert found is not None
    assert (0, 3) not in {(s.start, s.stop) for s in found}
    assert slowest_s(chain, found, 1.0) == pytest.approx(3.5)  # two blocks on three devices, two on the last
    nowhere = [np.zeros((5, 5), dtype=bool)] * 4
    assert overlapped_exchange_stages(*tables(*chain), 1.0, ports(4, 1.0), fits=nowhere) is None


def test_ports_that_are_shared() -> None:
    """Two servers of four devices, a link each: 10 Gbit/s at 80 % for up to four replicas, twice that for more."""
    cluster = load_cluster("ethernet-10g", nodes=2)
    assert carried(cluster, 8) == pytest.approx([1e9] * 4 + [2e9] * 4)
    single = load_cluster("ethernet-10g", nodes=1)
    assert carried(single, 4)[0] == pytest.approx(0.6 * 16e9)

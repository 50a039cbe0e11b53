"""Facts of stage costs and partitions at further sizes: each figure a sum worked out by hand, the section beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import UsageError, measure_schedule
from planner import formulas as f

LINK: dict[str, Any] = {"feature_bytes": 6.0, "forward_s": 1, "backward_s": 2, "stages": 4}


def exact(forward: list[float], backward: list[float], micro_batches: int, sync: Any = 0.0) -> float:
    stages = len(forward)
    return measure_schedule(
        "dapple", stages, micro_batches, forward_s=forward, backward_s=backward, sync_s=sync
    ).makespan_s


FACTS: list[tuple[str, str, Callable[[], Any], Any]] = [
    # DAPPLE
    ("DAPPLE", "pivot last: 5 + 3 x 9 + 10", lambda: f.dapple_latency_s([1, 1, 3], [2, 2, 6], 4), 42),
    ("DAPPLE", "and exact", lambda: exact([1, 1, 3], [2, 2, 6], 4), 42),
    (
        "DAPPLE",
        "heavy first, pivot last: 5 + 7 x 3 + ... = 48",
        lambda: f.dapple_latency_s([2, 1, 1, 1], [4, 2, 2, 2], 8),
        2 + 7 * 6 + 4,
    ),
    ("DAPPLE", "released: 6 x 7 + 15", lambda: f.dapple_released_latency_s([2, 1, 1, 1], [4, 2, 2, 2], 8), 57),
    ("DAPPLE", "exact 51", lambda: exact([2, 1, 1, 1], [4, 2, 2, 2], 8), 51),
    (
        "DAPPLE",
        "released, uniform: 3 x 7 + 12 + 5",
        lambda: f.dapple_released_latency_s([1] * 4, [2] * 4, 8, [5] * 4),
        38,
    ),
    (
        "DAPPLE",
        "AR hidden behind later blocks: max(0, 4 - 6)",
        lambda: f.dapple_released_latency_s([1] * 3, [2] * 3, 4, [0, 0, 4]),
        9 + 9,
    ),
    ("DAPPLE", "with transfers 1 + 2", lambda: f.dapple_released_latency_s([1] * 3, [2] * 3, 4, transfer_s=[1, 2]), 21),
    (
        "DAPPLE",
        "AR 3, 1, 1 uniform: 3 + 5 x 3 + 6 + 3 ends with the first",
        lambda: f.dapple_latency_s([1] * 3, [2] * 3, 6, [3, 1, 1]),
        27,
    ),
    ("DAPPLE", "and exact", lambda: exact([1] * 3, [2] * 3, 6, [3, 1, 1]), 27),
    ("DAPPLE", "one stage: M (F + B) + AR", lambda: f.dapple_latency_s([2], [3], 4, [1]), 21),
    ("DAPPLE", "K = min(D - i, 3), M 2", lambda: f.dapple_in_flight(4, 2, most=3), (2, 2, 2, 1)),
    # Alpa
    ("Alpa", "3 + 1 + 2 and 4 x 3", lambda: f.alpa_latency_s([3, 1, 2], 5), 18),
    ("Alpa", "one micro-batch", lambda: f.alpa_latency_s([3, 1, 2], 1), 6),
    ("Alpa", "(3,2) before (1,4): 5 + 3 x 3", lambda: f.alpa_partition([1, 2, 2], 2, 4)[0], 14),
    ("Alpa", "its cut", lambda: f.alpa_partition([1, 2, 2], 2, 4)[1], (0, 2, 3)),
    # Piper
    ("Piper", "8/4 + (20/4 + 4 x 3 x 100/(4 x 64))/100", lambda: f.piper_stage_s(8, 10, 100, 4, 64, 100), 2.096875),
    ("Piper", "alone: 8 + 20/100", lambda: f.piper_stage_s(8, 10, 100, 1, 64, 100), 8.2),
    ("Piper", "with tensor bytes 5: 2 x 15/100 more", lambda: f.piper_stage_s(8, 10, 100, 1, 64, 100, 5), 8.3),
    ("Piper", "chain of 12: 13 and 78", lambda: f.contiguous_sets(12), (13, 78)),
    (
        "Piper",
        "diamond: 6 downsets, 12 sets between",
        lambda: f.contiguous_sets(4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        (6, 12),
    ),
    ("Piper", "three loose nodes: 8 and 7", lambda: f.contiguous_sets(3, []), (8, 7)),
    # partitions by load
    ("Archer", "k 4: {4}, {3, 2}, {6}, {5}", lambda: f.max_load_partition([4, 3, 2, 6, 5], 4)[0], 6),
    ("Archer", "k 1: 20", lambda: f.max_load_partition([4, 3, 2, 6, 5], 1)[0], 20),
    ("Archer", "bound k 4: the node of 6", lambda: f.max_load_bound([4, 3, 2, 6, 5], 4), 6),
    (
        "Archer",
        "double chain, sizes 2, 1, 1, 1, 1, 0, two blocks",
        lambda: f.max_load_partition(
            [1, 4, 4, 3, 3, 1], 2, [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)], [2, 1, 1, 1, 1, 0]
        )[0],
        11,
    ),
    (
        "Archer",
        "a chain of equal work cut where least crosses: 4 + 1/1",
        lambda: f.max_load_partition([2, 2, 2, 2], 2, sizes=[9, 1, 9, 0])[0],
        5,
    ),
    # PipeDream
    (
        "PipeDream",
        "nothing to exchange: 12/4",
        lambda: f.pipedream_partition([3, 3, 3, 3], [0] * 4, [9, 9, 9, 0], 4, 1).bottleneck_s,
        3,
    ),
    (
        "PipeDream",
        "straight: two of 5, 4",
        lambda: f.pipedream_partition([3, 2, 4], [9] * 3, [0, 0, 0], 2, 1, replicate=False).bottleneck_s,
        5,
    ),
    (
        "PipeDream",
        "data parallel max(9, 2 x 27)/2",
        lambda: f.pipedream_partition([3, 2, 4], [9] * 3, [0, 0, 0], 2, 1).data_parallel_s,
        27,
    ),
    (
        "PipeDream",
        "released (9 + 4 x 27/2)/2",
        lambda: f.pipedream_partition([3, 2, 4], [9] * 3, [0, 0, 0], 2, 1, "released").data_parallel_s,
        31.5,
    ),
    (
        "PipeDream",
        "two levels: max(max(4, 2 x 4/4)/2, 2 x 4/1)/2",
        lambda: f.pipedream_partition([4], [4], [0], [2, 2], [4, 1]).bottleneck_s,
        4,
    ),
    (
        "PipeDream",
        "released: (4 + 4 x 4/(2 x 4))/2 = 3, (3 + 4 x 4/2/2)/2",
        lambda: f.pipedream_partition([4], [4], [0], [2, 2], [4, 1], "released").bottleneck_s,
        3.5,
    ),
    # BaPipe's choice
    ("BaPipe", "6 B in 1 s", lambda: f.bapipe_bandwidth_byte_per_s("as", 6, 1, 2), 6),
]


@pytest.mark.parametrize(("call", "expected"), [pytest.param(*row[2:], id=f"{row[0]}: {row[1]}") for row in FACTS])
def test_fact(call: Callable[[], Any], expected: Any) -> None:
    assert call() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("asynchronous", "byte_per_s", "memory_bytes", "schedule"),
    [
        (True, 6.0, 0, "as"),
        (True, 5.9, 0, "fbp"),
        (False, 1.0, 8 * 6 + 2 * 5, "so"),
        (False, 1.0, 8 * 6 + 2 * 5 - 1, "sno"),
    ],
)
def test_bapipe_picks(asynchronous: bool, byte_per_s: float, memory_bytes: float, schedule: str) -> None:
    """Link of a/F or not; twice the features and weights with gradients fit or not."""
    found = f.bapipe_schedule(
        asynchronous=asynchronous, byte_per_s=byte_per_s, memory_bytes=memory_bytes, weight_bytes=5, **LINK
    )
    assert found == schedule


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=40)
def test_hetpipe_against_every_order_and_cut(layers: list[int], speeds: list[int]) -> None:
    if len(speeds) > len(layers):
        return
    best = min(
        max(sum(layers[a:b]) / s for (a, b), s in zip(itertools.pairwise((0, *cuts, len(layers))), order, strict=True))
        for cuts in itertools.combinations(range(1, len(layers)), len(speeds) - 1)
        for order in itertools.permutations(speeds)
    )
    assert f.hetpipe_partition(layers, speeds)[0] == pytest.approx(best)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_chains_by_load_against_every_cut(work: list[int], devices: int) -> None:
    best = min(
        max(sum(work[a:b]) for a, b in itertools.pairwise((0, *cuts, len(work))))
        for count in range(min(devices, len(work)))
        for cuts in itertools.combinations(range(1, len(work)), count)
    )
    max_load, blocks = f.max_load_partition(work, devices)
    assert max_load == best
    assert list(blocks) == sorted(blocks)
    assert f.max_load_bound(work, devices) <= best


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: f.bapipe_makespan_s("soo", 4, 8, 1, 2), "did you mean 'so"),
        (lambda: f.bapipe_bandwidth_byte_per_s("so", 1, 1, 1), "use as or fbp"),
        (lambda: f.dapple_latency_s([1, 2], [1], 4), "backward_s 1"),
        (lambda: f.alpa_partition([1, 2], 3, 4), "do not make 3 stages"),
        (lambda: f.pipedream_partition([1], [1], [1], 2, 1, "paprika"), "did you mean 'paper'"),
        (lambda: f.max_load_partition([1, 2], 2, sizes=[1]), "sizes 1"),
        (lambda: f.piper_stage_s(1, 1, 1, 0, 4, 1), "replicas is 0"),
        (lambda: f.contiguous_sets(20, [], most=10), "more than 10 downsets"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        call()

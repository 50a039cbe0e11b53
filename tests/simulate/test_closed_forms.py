"""Where the closed forms equal the simulation, and on which side they fall where they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.play import StageTimes, Trace, peak_in_flight, run
from planner.schedules import Pipeline, compile_orders, get
from planner.simulate import closed_form_s

SECONDS = st.floats(0.01, 10.0)
SCHEDULES = st.sampled_from(["1f1b", "gpipe", "dapple"])


def play(schedule: str, replicas: tuple[int, ...], micro_batches: int, times: StageTimes) -> Trace:
    return run(compile_orders(get(schedule).order(Pipeline(replicas, micro_batches))), times)


@st.composite
def replica_vectors(draw: st.DrawFn, equal: bool) -> tuple[tuple[int, ...], int]:
    micro_batches = draw(st.sampled_from([1, 2, 4, 6, 12, 24]))
    divisors = [d for d in range(1, micro_batches + 1) if micro_batches % d == 0]
    stages = draw(st.integers(1, 6))
    if equal:
        return (draw(st.sampled_from(divisors)),) * stages, micro_batches
    return tuple(draw(st.sampled_from(divisors)) for _ in range(stages)), micro_batches


def draw_times(data: st.DataObject, stages: int) -> StageTimes:
    def column() -> list[float]:
        return data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))

    edge = [0.0] + [1.0] * (stages - 1)
    receive, back = ([a * b for a, b in zip(column(), edge, strict=True)] for _ in range(2))
    return StageTimes.of(column(), column(), receive, column(), column(), return_s=back)


def critical(schedule: str, replicas: tuple[int, ...], micro_batches: int, times: StageTimes) -> float:
    return get(schedule).critical_s(
        Pipeline(replicas, micro_batches),
        (times.forward_s + times.receive_s).tolist(),
        (times.backward_s + times.return_s).tolist(),
        (times.sync_s + times.update_s).tolist(),
    )


@settings(deadline=None, max_examples=120)
@given(SCHEDULES, replica_vectors(equal=True), SECONDS, SECONDS)
def test_closed_form_is_exact_for_equal_stages(
    schedule: str, shape: tuple[tuple[int, ...], int], forward: float, backward: float
) -> None:
    replicas, micro_batches = shape
    times = StageTimes.of([forward] * len(replicas), [backward] * len(replicas))
    simulated = play(schedule, replicas, micro_batches, times).makespan_s
    assert closed_form_s(replicas, micro_batches, times) == pytest.approx(simulated)
    assert critical(schedule, replicas, micro_batches, times) == pytest.approx(simulated)


@settings(deadline=None, max_examples=200)
@given(SCHEDULES, replica_vectors(equal=False), st.data())
def test_no_simulation_beats_the_critical_chain(
    schedule: str, shape: tuple[tuple[int, ...], int], data: st.DataObject
) -> None:
    replicas, micro_batches = shape
    times = draw_times(data, len(replicas))
    simulated = play(schedule, replicas, micro_batches, times).makespan_s
    assert critical(schedule, replicas, micro_batches, times) <= simulated * (1 + 1e-9)


@settings(deadline=None, max_examples=100)
@given(replica_vectors(equal=True), st.data())
def test_critical_chain_of_gpipe_is_exact_for_equal_replicas(
    shape: tuple[tuple[int, ...], int], data: st.DataObject
) -> None:
    replicas, micro_batches = shape
    times = draw_times(data, len(replicas))
    simulated = play("gpipe", replicas, micro_batches, times).makespan_s
    assert critical("gpipe", replicas, micro_batches, times) == pytest.approx(simulated)


@settings(deadline=None, max_examples=100)
@given(replica_vectors(equal=True), st.data())
def test_critical_chain_of_1f1b_is_exact_for_stages_within_a_fifth(
    shape: tuple[tuple[int, ...], int], data: st.DataObject
) -> None:
    replicas, micro_batches = shape
    work = data.draw(st.lists(st.floats(1.0, 1.2), min_size=len(replicas), max_size=len(replicas)))
    times = StageTimes.of([w / 3 for w in work], [w * 2 / 3 for w in work])
    simulated = play("1f1b", replicas, micro_batches, times).makespan_s
    assert critical("1f1b", replicas, micro_batches, times) == pytest.approx(simulated)
    assert closed_form_s(replicas, micro_batches, times) >= simulated * (1 - 1e-9)


@pytest.mark.parametrize(
    ("forward", "closed", "chain", "simulated"),
    [((2, 1, 1, 1), 57, 51, 51), ((1, 2, 1, 1), 57, 53, 53), ((1, 1, 2, 1), 57, 55, 55), ((1, 1, 1, 2), 57, 57, 57)],
)
def test_a_slow_stage_fills_its_waits_the_more_the_earlier_it_stands(
    forward: tuple[int, ...], closed: float, chain: float, simulated: float
) -> None:
    times = StageTimes.of([float(f) for f in forward], [2.0 * f for f in forward])
    assert closed_form_s((1,) * 4, 8, times) == pytest.approx(closed)
    assert critical("1f1b", (1,) * 4, 8, times) == pytest.approx(chain)
    assert play("1f1b", (1,) * 4, 8, times).makespan_s == pytest.approx(simulated)


@settings(deadline=None, max_examples=100)
@given(SCHEDULES, replica_vectors(equal=False))
def test_claimed_in_flight_is_the_simulated_peak(schedule: str, shape: tuple[tuple[int, ...], int]) -> None:
    pipeline = Pipeline(*shape)
    peaks = peak_in_flight(compile_orders(get(schedule).order(pipeline)))
    claimed = get(schedule).in_flight(pipeline)
    for worker, (stage, _) in enumerate(pipeline.workers()):
        assert peaks[worker, stage] == claimed[stage]
        assert peaks[worker].sum() == claimed[stage]


@pytest.mark.parametrize(
    "replicas", [(1, 8, 1), (1, 1, 8, 1), (8, 1, 8, 1), (1, 8, 2, 4), (4, 1, 8, 2), (3, 1, 6, 2), (1, 8, 4, 2, 1)]
)
def test_unequal_replicas_do_not_starve(replicas: tuple[int, ...]) -> None:
    """Stages in balance run at the pace of the closed form."""
    micro_batches = 24 * 8
    forward = [r / 3 for r in replicas]
    times = StageTimes.of(forward, [2 * f for f in forward])
    simulated = play("1f1b", replicas, micro_batches, times).makespan_s
    assert simulated <= 1.01 * closed_form_s(replicas, micro_batches, times)

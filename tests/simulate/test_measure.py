"""Measurements beyond the times of one synchronous iteration: steady states, memory over time, limits, own orders."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.play import (
    Conditions,
    Cost,
    MemoryCurve,
    StageBytes,
    StageTimes,
    Trace,
    held_units,
    measure_orders,
    measure_schedule,
    memory_curve,
    run,
)
from planner.schedules import Pipeline, Work, get, parse_action


def work(*lanes: str) -> Work:
    return Work(tuple(tuple(map(parse_action, lane.split())) for lane in lanes))


def sizes(stages: int, **more: np.ndarray) -> StageBytes:
    ones = np.ones(stages)
    return StageBytes(10 * ones, ones, 0 * ones, 0 * ones, **more)


ASYNCHRONOUS = ["pipedream", "pipedream-2bw", "pipemare", "pipelined-backprop", "hetpipe"]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ASYNCHRONOUS), st.integers(1, 5), st.data())
def test_the_recognised_pace_is_that_of_a_long_run(name: str, stages: int, data: st.DataObject) -> None:
    column = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    forward, backward = data.draw(column), data.draw(column)
    found = measure_schedule(name, stages, stages, forward_s=forward, backward_s=backward)
    times = StageTimes.of([float(f) for f in forward], [float(b) for b in backward])
    long = run(get(name).work(Pipeline((1,) * stages, stages), 60), times)
    begins = long.start_s[(long.program.stage == 0) & (long.program.kind == 0)]
    assert found.cycle
    assert found.iteration_s == pytest.approx((begins[-stages] - begins[stages * 30 - stages]) / 30, rel=0.05)
    if found.cycle == 1:
        assert found.iteration_s == pytest.approx(begins[-stages] - begins[-2 * stages])


def test_pace_is_set_by_the_slowest_stage() -> None:
    found = measure_schedule("pipedream", 3, 4, forward_s=[1, 2, 1], backward_s=[2, 4, 2])
    assert found.iteration_s == 24
    assert found.cost is Cost.PERIOD
    assert found.bubble == pytest.approx(1 - (3 + 6 + 3) / 18)


def test_replicated_first_stage_sets_the_pace_together() -> None:
    """Three replicas of a stage three times as slow keep up with one."""
    found = measure_schedule("pipedream", 2, 6, forward_s=[3, 1], backward_s=[6, 2], replicas=(3, 1))
    assert found.iteration_s == 18
    assert found.weight_versions == (2, 1)


def test_vertical_synchronisation_costs_versions_not_time() -> None:
    plain = measure_schedule("pipedream", 4, 8, forward_s=1, backward_s=2)
    vertical = measure_schedule("pipedream:vertical=true", 4, 8, forward_s=1, backward_s=2)
    assert vertical.iteration_s == plain.iteration_s == 24
    assert (plain.weight_versions, vertical.weight_versions) == ((4, 3, 2, 1), (4, 4, 4, 4))
    assert (plain.staleness, vertical.staleness) == ((3, 2, 1, 0), (3, 3, 3, 3))


def test_weight_versions_take_memory_over_time() -> None:
    """Stage 0 of PipeDream: 10 fixed, 4 micro-batches of 1, and 3 versions of 5 beyond the one that is fixed."""
    bytes_ = sizes(4, version_bytes=np.full(4, 5.0))
    found = measure_schedule("pipedream", 4, 8, forward_s=1, backward_s=2, sizes=bytes_)
    assert found.peak_bytes == (10 + 4 + 15, 10 + 3 + 10, 10 + 2 + 5, 10 + 1)


def test_recomputation_keeps_inputs_and_one_micro_batch() -> None:
    """8 checkpoints of 1/8 and one whole micro-batch of 1."""
    bytes_ = sizes(4, checkpoint_bytes=np.full(4, 0.125))
    found = measure_schedule("gpipe:recompute=true", 4, 8, forward_s=1, backward_s=2, sizes=bytes_)
    assert found.peak_bytes == pytest.approx((12, 12, 12, 12))
    plain = measure_schedule("gpipe", 4, 8, forward_s=1, backward_s=2, sizes=bytes_)
    assert plain.peak_bytes == (18, 18, 18, 18)


def test_evicted_activations_are_held_by_the_partner() -> None:
    found = measure_schedule("bpipe", 4, 8, forward_s=1, backward_s=2, evict_s=0.5, sizes=sizes(4))
    assert found.held == (3, 3, 2, 2)
    assert found.peak_bytes == (13, 13, 12, 12)
    plain = measure_schedule("1f1b", 4, 8, forward_s=1, backward_s=2, sizes=sizes(4))
    assert plain.peak_bytes == (14, 13, 12, 11)


def test_eviction_frees_its_worker_when_it_has_ended() -> None:
    orders = work("F0.0 E0.0>1 F0.1 B0.1 L0.0 B0.0", "F1.0 B1.0 F1.1 B1.1")
    trace = run(orders, StageTimes.of([1.0, 1.0], [2.0, 2.0], evict_s=3.0))
    own, partner = memory_curve(trace, 0, sizes(2)), memory_curve(trace, 1, sizes(2))
    assert own.time_s.tolist() == [0, 0, 4, 4, 10, 10, 15]
    assert own.held_bytes.tolist() == [10, 11, 10, 11, 10, 11, 10]
    assert partner.time_s.tolist() == [0, 1, 1, 4, 5, 8, 13]
    assert partner.held_bytes.tolist() == [10, 11, 12, 11, 12, 11, 10]
    assert held_units(trace).tolist() == [1, 2]


def test_slow_workers() -> None:
    slow = measure_schedule("1f1b", 2, 4, forward_s=1, backward_s=2, conditions=Conditions(slowdown=(2.0, 1.0)))
    assert slow.makespan_s == measure_schedule("1f1b", 2, 4, forward_s=[2, 1], backward_s=[4, 2]).makespan_s


def test_virtual_workers_may_run_ahead_by_the_distance() -> None:
    """A virtual worker twice as slow holds the other back, in the long run, whatever the distance."""
    uneven = Conditions(slowdown=(1.0, 2.0, 1.0, 2.0))
    found = [
        measure_schedule(
            f"hetpipe:distance={distance}", 2, 8, forward_s=1, backward_s=2, replicas=2, conditions=uneven
        ).iteration_s
        for distance in (0, 1, 4)
    ]
    assert found == pytest.approx([24, 24, 24])


def test_iterations_of_zero_bubble_follow_at_their_span() -> None:
    """Without a barrier, a second iteration of ZB-H2 ends one span, not one makespan, after the first."""
    schedule, pipeline = get("zb-h2"), Pipeline((1,) * 4, 8)
    times = StageTimes.of([1.0] * 4, [2.0] * 4, weight_grad_s=[1.0] * 4)
    once, twice = run(schedule.work(pipeline), times), run(schedule.work(pipeline, 2), times)
    assert (once.makespan_s, once.span_s()) == (27, 24)
    assert twice.makespan_s - once.makespan_s == 24


def test_own_orders_are_measured() -> None:
    found = measure_orders(
        work("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"),
        StageTimes.of([1.0, 1.0], [2.0, 2.0]),
        cost=Cost.SPAN,
    )
    assert found.schedule == "custom"
    assert found.makespan_s == 8
    assert found.iteration_s == 8
    assert found.held == (2, 2)


def test_measurements_refuse_what_makes_no_sense() -> None:
    with pytest.raises(PlanError, match="even number of stages"):
        measure_schedule("chimera", 3, 4, forward_s=1, backward_s=2)
    with pytest.raises(PlanError, match="takes longer than its whole backward"):
        measure_schedule("zb-h1", 2, 4, forward_s=1, backward_s=1, weight_grad_s=2)


def test_a_hundred_thousand_actions_take_a_second_or_so() -> None:
    began = time.perf_counter()
    found = measure_schedule("1f1b", 8, 6250, forward_s=1, backward_s=2)
    assert found.makespan_s == (6250 + 7) * 3
    assert time.perf_counter() - began < 15


def versions(trace: Trace, worker: int) -> MemoryCurve:
    """What a worker with one stage holds where a version of the weights is one byte, and nothing else any."""
    none, one = np.zeros(trace.program.stages), np.ones(trace.program.stages)
    return memory_curve(trace, worker, StageBytes(one, none, none, none, version_bytes=one))


def test_versions_over_time_by_hand() -> None:
    """One stage, F = 1, B = 2: the first update at 4 leaves version 0 to the second micro-batch, until 7."""
    orders = work("F0.0@0 F0.1@0 B0.0@0 U0.0 F0.2@1 B0.1@0 U0.1 B0.2@1 U0.2")
    curve = versions(run(orders, StageTimes.of([1.0], [2.0])), 0)
    assert curve.time_s.tolist() == [0, 4, 7, 7, 9]
    assert curve.held_bytes.tolist() == [1, 2, 1, 2, 1]


def test_versions_of_a_full_pipedream() -> None:
    trace = measure_schedule("pipedream", 4, 8, forward_s=1, backward_s=2).trace
    assert [versions(trace, stage).peak_bytes for stage in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "stages", "sync_s", "period_s"),
    [
        ("hetpipe", 4, 5, 17),  # nothing may run ahead: the exchange of a wave of 4, of 3 s each, is waited for
        ("hetpipe:distance=1", 4, 12, 12),
        ("hetpipe:distance=1", 4, 13, 13),
        ("hetpipe:concurrent=2,distance=8", 2, 5, 6),  # a wave of 2 takes 6 s
        ("hetpipe:concurrent=2,distance=8", 2, 100, 100),
        ("hetpipe:distance=20", 4, 13, 13),  # falls behind by 1 s a wave: after 240 waves the work has to wait
    ],
)
def test_exchanges_slower_than_the_work_set_the_pace(
    schedule: str, stages: int, sync_s: float, period_s: float
) -> None:
    """Two virtual workers, F = 1, B = 2: however far they may run ahead, no wave takes less than its exchange."""
    micro_batches = 2 * (2 if "concurrent" in schedule else stages)
    found = measure_schedule(
        schedule, stages, micro_batches, forward_s=1, backward_s=2, sync_s=sync_s, replicas=2
    )  # fmt: skip
    assert found.iteration_s == pytest.approx(period_s)

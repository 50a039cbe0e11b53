"""What schedules say of themselves against what their orders do when they are played."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.play import Conditions, StageBytes, StageTimes, Trace, Transfers, measure_schedule, memory_curve, run
from planner.schedules import ActionKind, Pipeline, Schedule, compile_orders, get
from planner.schedules.held import UnitSizes
from tests.schedules.shapes import SHAPES, served

TIMED = ("bapipe-fbp", "bpipe")
"""What their workers keep depends on the times; `peaks` is the most."""

SECONDS = st.floats(0.01, 5.0)


def column(data: st.DataObject, count: int, seconds: st.SearchStrategy[float] = SECONDS) -> np.ndarray:
    return np.array(data.draw(st.lists(seconds, min_size=count, max_size=count)))


def iterations(schedule: Schedule, pipeline: Pipeline) -> int:
    """As many as fill an asynchronous pipeline."""
    depth = max(schedule.in_flight(pipeline)) * max(pipeline.replicas)
    return 1 if schedule.drains else 2 + 2 * depth // pipeline.micro_batches


@settings(deadline=None, max_examples=250)
@given(served())
def test_placement_is_that_of_the_orders(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    schedule = get(name)
    work = schedule.work(pipeline)
    counts: list[dict[int, set[int]]] = [{} for _ in range(max(work.lane_workers) + 1)]
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        for action in lane:
            if action.kind is ActionKind.FORWARD:
                counts[worker].setdefault(action.stage, set()).add(action.micro_batch)
    assert schedule.placement(pipeline) == tuple(tuple(sorted(own)) for own in counts)
    assert schedule.workload(pipeline) == tuple(tuple(len(own[s]) for s in sorted(own)) for own in counts)
    assert schedule.holders(pipeline) == tuple(
        tuple(worker for worker, own in enumerate(counts) if stage in own) for stage in range(pipeline.stages)
    )
    assert schedule.workers(pipeline) == len(counts)
    assert schedule.parts == work.parts
    program = compile_orders(work)
    away = (program.source >= 0) & (program.worker[program.source] != program.worker) & (program.kind == 0)
    crossed = set(program.stage[away].tolist())
    assert schedule.crossings(pipeline) == tuple(stage in crossed for stage in range(pipeline.stages))


@settings(deadline=None, max_examples=120)
@given(served(split=True), st.data())
def test_peaks_of_split_backwards_are_those_of_the_simulation(case: tuple[str, Pipeline], data: st.DataObject) -> None:
    name, pipeline = case
    schedule, none = get(name), np.zeros(pipeline.stages)
    kept, waiting, more = (column(data, pipeline.stages, st.floats(0.0, 100.0)) for _ in range(3))
    turning = np.maximum(kept, waiting) + more
    times = StageTimes.of(column(data, pipeline.stages), column(data, pipeline.stages))
    trace = run(schedule.work(pipeline, iterations(schedule, pipeline)), times)
    sizes = StageBytes(none, kept, none, none, turning_bytes=turning, waiting_bytes=waiting)
    for worker, held in enumerate(schedule.peaks(pipeline)):
        if held.splits:
            played = memory_curve(trace, worker, sizes).peak_bytes
            assert played == pytest.approx(held.most_of(UnitSizes(kept, turning, waiting)))
            for stage in held.stages:
                alone = held.of_stage(stage).most_of(UnitSizes(kept, turning, waiting))
                assert alone <= held.most_of(UnitSizes(kept, turning, waiting)) * (1 + 1e-9)


def test_a_unit_waits_between_the_halves_of_its_backward() -> None:
    # F0 F1 I0 W0 F2 I1 W1 ... on the first worker, F0 I0 F1 I1 W0 ... on the second, whose W come a micro-batch late
    first, second = get("zb-h1").peaks(Pipeline((1, 1), 8))
    sizes = UnitSizes([3.0, 3.0], [7.0, 7.0], [5.0, 5.0])
    assert first.most_of(sizes) == 3.0 + 7.0
    assert second.most_of(sizes) == 5.0 + 7.0
    assert (first.total, second.total) == (2, 2)


@settings(deadline=None, max_examples=250)
@given(served(), st.data())
def test_peaks_are_those_of_the_simulation(case: tuple[str, Pipeline], data: st.DataObject) -> None:
    name, pipeline = case
    schedule, none = get(name), np.zeros(pipeline.stages)
    unit_bytes = column(data, pipeline.stages, st.floats(0.0, 100.0))
    times = StageTimes.of(
        column(data, pipeline.stages), column(data, pipeline.stages), evict_s=column(data, pipeline.stages)
    )
    recomputed = bool(schedule.recomputed_stages(pipeline))
    sizes = StageBytes(none, unit_bytes * schedule.parts, none, none, none if not recomputed else unit_bytes)
    if recomputed:  # all of a unit is there from its forward on
        sizes = StageBytes(none, none, none, none, unit_bytes)
    trace = run(schedule.work(pipeline, iterations(schedule, pipeline)), times)
    peaks = schedule.peaks(pipeline)
    for worker, held in enumerate(peaks):
        played = memory_curve(trace, worker, sizes).peak_bytes
        if name.startswith(TIMED):
            assert played <= held.most(unit_bytes) * (1 + 1e-9)
        else:
            assert played == pytest.approx(held.most(unit_bytes))
        assert held.total == schedule.held(pipeline)[worker]


@settings(deadline=None, max_examples=250)
@given(served(), st.data())
def test_what_is_kept_of_each_stage_is_at_most_the_peak(case: tuple[str, Pipeline], data: st.DataObject) -> None:
    name, pipeline = case
    schedule, unit_bytes = get(name), column(data, pipeline.stages, st.floats(0.0, 100.0))
    placed = schedule.placement(pipeline)
    for hosted, units, held in zip(placed, schedule.kept_of_each(pipeline), schedule.peaks(pipeline), strict=True):
        assert units * unit_bytes[list(hosted)].sum() <= held.most(unit_bytes) * (1 + 1e-9)


def test_what_each_worker_of_an_interleaved_pipeline_keeps_of_each_chunk() -> None:
    """Worker r runs 2 (4 - r - 1) + 4 + 1 forwards first: 4 of the first chunk, of the last as many as are left."""
    assert get("interleaved").kept_of_each(Pipeline((1,) * 8, 8)) == (4, 4, 3, 1)
    assert get("gpipe").kept_of_each(Pipeline((1, 1), 3)) == (3, 3)
    assert get("zb-h1").kept_of_each(Pipeline((1, 1), 3)) == (0, 0)


@pytest.mark.parametrize("name", ["interleaved", "interleaved:chunks=3", "chimera", "chimera:pairs=2", "gems"])
@pytest.mark.parametrize("micro_batches", [12, 24, 32, 36, 60])
def test_few_micro_batches_show_what_many_keep(name: str, micro_batches: int) -> None:
    """Counted in the whole order: every forward takes a unit of its stage, every backward gives one back."""
    schedule, pipeline = get(name), Pipeline((1,) * 12, micro_batches)
    if schedule.supports(pipeline):
        return
    unit_bytes = np.array([3.0, 5.0, 2.0, 7.0, 11.0, 1.0, 13.0, 4.0, 6.0, 9.0, 8.0, 10.0])
    for lane, held in zip(schedule.order(pipeline), schedule.peaks(pipeline), strict=True):
        now = most = 0.0
        for action in lane:
            now += {"F": 1, "B": -1}.get(action.kind, 0) * unit_bytes[action.stage]
            most = max(most, now)
        assert held.most(unit_bytes) == pytest.approx(most)


def test_units_are_kept_by_stage() -> None:
    """p = 2, v = 2, m = 4: F0.0 F0.1 F2.0 F2.1 F0.2 (3 and 2) B2.0 F0.3 (4 and 1) B2.1 F2.2 B0.0 F2.3 (3 and 2) ..."""
    held = get("interleaved").peaks(Pipeline((1,) * 4, 4))[0]
    assert held.stages == (0, 2)
    assert sorted(held.units.tolist()) == [[3, 2], [4, 1]]
    assert held.most([1.0, 9.0, 10.0, 9.0]) == 23
    assert held.most([9.0, 1.0, 1.0, 1.0]) == 37


def test_bpipe_keeps_guests() -> None:
    """p = 4, m = 8: worker 0 keeps 3 of its own 4, worker 3 its own one and the one that is too many."""
    peaks = get("bpipe").peaks(Pipeline((1,) * 4, 8))
    assert [(held.stages, held.units.tolist(), held.guests) for held in (peaks[0], peaks[3])] == [
        ((0,), [[3]], 0),
        ((3, 0), [[1, 1]], 1),
    ]


def draw_times(data: st.DataObject, pipeline: Pipeline, crossings: tuple[bool, ...]) -> StageTimes:
    count, cross = pipeline.stages, np.array(crossings, float)
    backward = column(data, count)
    return StageTimes.of(
        column(data, count),
        backward,
        column(data, count, st.floats(0.0, 2.0)) * cross,
        column(data, count, st.floats(0.0, 5.0)),
        column(data, count, st.floats(0.0, 5.0)),
        backward * column(data, count, st.floats(0.0, 1.0)),
        return_s=column(data, count, st.floats(0.0, 2.0)) * cross,
        recompute_s=column(data, count),
    )


def chain_s(schedule: Schedule, pipeline: Pipeline, times: StageTimes) -> float:
    again = times.recompute_s * [stage in schedule.recomputed_stages(pipeline) for stage in range(pipeline.stages)]
    return schedule.critical_s(
        pipeline,
        (times.forward_s + times.receive_s).tolist(),
        (times.backward_s + times.return_s + again).tolist(),
        (times.sync_s + times.update_s).tolist(),
        times.weight_grad_s.tolist(),
        (times.receive_s + times.return_s).tolist(),
    )


def iteration_s(schedule: Schedule, trace: Trace) -> float:
    return trace.span_s() if schedule.spans else trace.makespan_s


@settings(deadline=None, max_examples=400)
@given(served().filter(lambda case: get(case[0]).drains), st.data())
def test_no_iteration_is_shorter_than_the_chain(case: tuple[str, Pipeline], data: st.DataObject) -> None:
    name, pipeline = case
    schedule = get(name)
    times = draw_times(data, pipeline, schedule.crossings(pipeline))
    played = iteration_s(schedule, run(schedule.work(pipeline), times))
    assert chain_s(schedule, pipeline, times) <= played * (1 + 1e-9)
    if schedule.exact(pipeline):
        assert chain_s(schedule, pipeline, times) == pytest.approx(played)


@settings(deadline=None, max_examples=80)
@given(served().filter(lambda case: not get(case[0]).drains), st.data())
def test_no_pace_is_faster_than_the_chain(case: tuple[str, Pipeline], data: st.DataObject) -> None:
    name, pipeline = case
    schedule = get(name)
    forward, backward, update = (column(data, pipeline.stages) for _ in range(3))
    found = measure_schedule(
        schedule, pipeline.stages, pipeline.micro_batches, forward_s=forward.tolist(), backward_s=backward.tolist(),
        update_s=update.tolist(), replicas=pipeline.replicas, conditions=Conditions(Transfers.BLOCKING),
    )  # fmt: skip
    chain = schedule.critical_s(pipeline, forward.tolist(), backward.tolist(), update.tolist())
    assert chain <= found.iteration_s * (1 + 1e-6)


EXACT_WHEN_EQUAL = (
    "1f1b", "gpipe", "dapple", "bapipe-as", "bapipe-sno", "bapipe-so", "bapipe-fbp", "bapipe-fbp:fill_overlap=true",
    "interleaved", "interleaved:chunks=3", "gems", "seq1f1b", "seq1f1b:splits=4", "zb-h1", "zb-h2",
)  # fmt: skip


@pytest.mark.parametrize("name", EXACT_WHEN_EQUAL)
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 2.0, 1.0), (1.0, 1.0, 0.5), (2.0, 4.0, 2.0)])
def test_chain_and_idle_time_are_exact_for_equal_stages(
    name: str, forward: float, backward: float, weight: float
) -> None:
    schedule, stages = get(name), 6
    pipeline = Pipeline((1,) * stages, 24)
    times = StageTimes.of([forward] * stages, [backward] * stages, weight_grad_s=[weight] * stages)
    played = iteration_s(schedule, run(schedule.work(pipeline), times))
    if name.startswith("zb") and not forward == weight == backward / 2:
        return  # published for weight gradients no longer than the rest, reached with all parts equally long
    assert chain_s(schedule, pipeline, times) == pytest.approx(played)
    work_s = 24 * (forward + backward) * (stages / schedule.workers(pipeline))
    assert schedule.idle_s(pipeline, forward, backward, weight) == pytest.approx(played - work_s)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [
        ("chimera", 8, 8),
        ("chimera", 8, 32),
        ("chimera", 8, 3),
        ("chimera:pairs=2", 8, 1),
        ("chimera:pairs=2", 8, 6),
        ("chimera:pairs=2", 8, 8),
        ("chimera:over=double", 8, 32),
        ("chimera:over=halve", 8, 32),
        ("hanayo", 8, 4),
        ("hanayo:waves=2", 16, 4),
        ("zb-v", 8, 16),
        ("v-half", 8, 32),
        ("v-half", 10, 40),
        ("v-min", 8, 32),
        ("v-min", 12, 40),
        ("dualpipe", 8, 24),
        ("dualpipe-v", 8, 24),
        ("bpipe", 8, 24),
    ],
)
def test_idle_time_for_backwards_twice_as_long(name: str, stages: int, micro_batches: int) -> None:
    """Time of the iteration less the work of a worker, F = B_input = W = 1."""
    schedule, pipeline = get(name), Pipeline((1,) * stages, micro_batches)
    times = StageTimes.of([1.0] * stages, [2.0] * stages)
    played = iteration_s(schedule, run(schedule.work(pipeline), times))
    work_s = 3 * micro_batches * stages / schedule.workers(pipeline)
    assert schedule.idle_s(pipeline, 1.0, 2.0) == pytest.approx(played - work_s)


@settings(deadline=None, max_examples=120)
@given(served())
def test_exchanges_and_rhythm_are_those_of_the_orders(case: tuple[str, Pipeline]) -> None:
    """Of an asynchronous iteration in the middle of a run, by the updates or the waves that are sent."""
    name, pipeline = case
    schedule, count = get(name), 6
    lanes = [schedule.work(pipeline, k).lanes for k in ((count, count + 1) if not schedule.drains else (1, 1))]
    kind = ActionKind.LAUNCH_SYNC if schedule.clock_distance is not None else ActionKind.UPDATE
    for stage, expected in enumerate(schedule.exchanges(pipeline)):
        own = [[lane for lane in found if any(a.stage == stage for a in lane)][-1] for found in lanes]
        counts = [sum(a.kind is kind and a.stage == stage for a in lane) for lane in own]
        assert expected == (counts[1] - counts[0] if not schedule.drains else counts[0])
    assert pipeline.micro_batches % schedule.rhythm(pipeline) == 0


def test_recomputed_stages_are_those_of_the_orders() -> None:
    for name in SHAPES:
        schedule = get(name)
        pipeline = Pipeline((1,) * 4, 24)
        if schedule.supports(pipeline):
            continue
        lanes = schedule.order(pipeline)
        again = {a.stage for lane in lanes for a in lane if a.kind is ActionKind.RECOMPUTE}
        assert schedule.recomputed_stages(pipeline) == again


@pytest.mark.parametrize(
    ("name", "workers", "micro_batches", "recompute", "names"),
    [
        ("1f1b", 4, 8, True, ("1f1b",)),
        ("chimera", 8, 8, True, ("chimera", "chimera:pairs=2", "chimera:pairs=4")),
        ("chimera", 4, 8, True, ("chimera", "chimera:pairs=2", "chimera:over=double")),
        ("chimera", 4, 8, False, ("chimera", "chimera:pairs=2")),
        ("chimera", 3, 8, True, ()),
        ("chimera:pairs=2", 4, 8, True, ("chimera:pairs=2",)),
        ("interleaved", 4, 6, False, ()),
        ("interleaved", 4, 8, False, ("interleaved", *(f"interleaved:chunks={v}" for v in range(3, 21)))),
        ("hanayo", 4, 8, False, ("hanayo", "hanayo:waves=2", "hanayo:waves=4")),
        ("pipedream-2bw", 4, 3, False, ()),
    ],
)
def test_variants(name: str, workers: int, micro_batches: int, recompute: bool, names: tuple[str, ...]) -> None:
    found = get(name).variants(workers, micro_batches, recompute=recompute)
    assert tuple(variant.name for variant in found) == names


def test_stages_of_a_number_of_workers() -> None:
    counts = {name: get(name).stage_counts(4) for name in ("1f1b", "interleaved:chunks=3", "zb-v", "hanayo:waves=2")}
    assert counts == {"1f1b": (4,), "interleaved:chunks=3": (12,), "zb-v": (8,), "hanayo:waves=2": (16,)}


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(["1f1b", "gpipe", "dapple"]), st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=6))
def test_warm_up_as_a_recurrence(name: str, replicas: list[int]) -> None:
    schedule, passing, kept = get(name), np.array([0]), []
    for count in reversed(replicas):
        found = schedule.warm_up_after(np.array([count]), passing, 12)
        assert found is not None
        kept.append(int(found[0][0]))
        passing = found[1]
    assert tuple(reversed(kept)) == schedule.in_flight(Pipeline(tuple(replicas), 12))
    assert get("chimera").warm_up_after(np.array([1]), np.array([0]), 4) is None

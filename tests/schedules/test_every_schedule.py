"""Properties of every order that any schedule gives: complete, runnable, and keeping what it claims."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError, UsageError
from planner.play import Conditions, StageTimes, Trace, Transfers, held_units, peak_in_flight, run
from planner.schedules import (
    Action,
    ActionKind,
    Pipeline,
    Schedule,
    Work,
    compile_orders,
    get,
    names,
    peak_versions,
    staleness,
)
from planner.schedules.held import count_held
from tests.schedules.shapes import SHAPES, served

SHARED = ("bapipe-fbp", "bpipe")
"""Their memory is bounded by what they claim, and reaches it when all stages take equally long."""

GRADIENT = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)


def test_every_schedule_is_tried() -> None:
    assert {name.partition(":")[0] for name in SHAPES} == set(names())


def stage_times(data: st.DataObject, stages: int) -> StageTimes:
    def column(least: float) -> list[float]:
        return data.draw(st.lists(st.floats(least, 5.0), min_size=stages, max_size=stages))

    forward, backward, receive = column(0.01), column(0.02), [0.0, *column(0.0)[1:]]
    weight = [b * data.draw(st.floats(0.1, 0.9)) for b in backward]
    return StageTimes.of(forward, backward, receive, weight_grad_s=weight, evict_s=column(0.0))


@settings(deadline=None, max_examples=250)
@given(served())
def test_each_action_runs_once(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    work = get(name).work(pipeline)
    parts = [-1] if work.parts == 1 else list(range(work.parts))
    counts = Counter((a.kind, a.stage, a.micro_batch, a.part) for lane in work.lanes for a in lane)
    forwards = sum(count for (kind, *_), count in counts.items() if kind is ActionKind.FORWARD)
    assert forwards == pipeline.stages * pipeline.micro_batches * len(parts)
    for stage in range(pipeline.stages):
        for m in range(pipeline.micro_batches):
            for part in parts:
                whole = counts[ActionKind.BACKWARD, stage, m, part]
                assert counts[ActionKind.FORWARD, stage, m, part] == 1
                assert whole + counts[ActionKind.INPUT_GRAD, stage, m, part] == 1
                assert counts[ActionKind.WEIGHT_GRAD, stage, m, part] == 1 - whole


@settings(deadline=None, max_examples=250)
@given(served(), st.data(), st.sampled_from(list(Transfers)))
def test_dependencies_hold_and_claims_are_kept(
    case: tuple[str, Pipeline], data: st.DataObject, transfers: Transfers
) -> None:
    name, pipeline = case
    schedule = get(name)
    times = stage_times(data, pipeline.stages)
    trace = run(schedule.work(pipeline), times, Conditions(transfers))  # raises on a deadlock
    in_order(trace, streaming=trace.program.work.streaming)
    claimed = np.array(schedule.held(pipeline))
    if schedule.weight_policy.synchronous:
        if name.startswith(SHARED):
            assert (held_units(trace) <= claimed).all()
        else:
            assert held_units(trace).tolist() == claimed.tolist()
            assert peak_in_flight(trace.program).max(axis=0).tolist() == list(schedule.in_flight(pipeline))
        assert list(schedule.weight_versions(pipeline)) == [1] * pipeline.stages
        no_wait = np.zeros(pipeline.stages).tolist()
        passes = [each.tolist() for each in (times.forward_s, times.backward_s)]
        chain = schedule.critical_s(pipeline, *passes, no_wait, times.weight_grad_s.tolist())
        if "early" not in name:
            assert chain <= trace.makespan_s * (1 + 1e-9) + (times.recompute_s.sum() if "recompute" in name else 0)


def in_order(trace: Trace, streaming: bool) -> None:
    """What an action needs from a neighbour or from its own forward has ended before; no lane does two things."""
    program = trace.program
    end: dict[tuple[str, int, int], float] = {}
    kinds = {0: "F", 1: "B", 2: "B", 3: "W"}
    rows = list(zip(program.kind.tolist(), program.stage.tolist(), program.unit.tolist(), strict=True))
    for (kind, stage, unit), done in zip(rows, trace.compute_end_s.tolist(), strict=True):
        if kind in kinds:
            end[kinds[kind], stage, unit] = done
    slack = 1e-9 * trace.makespan_s
    if not streaming:
        for (kind, stage, unit), start in zip(rows, trace.compute_start_s.tolist(), strict=True):
            if kind == 0 and stage:
                assert start >= end["F", stage - 1, unit] - slack
            if kind in (1, 2):
                assert start >= end["F", stage, unit] - slack
                assert stage == program.stages - 1 or start >= end["B", stage + 1, unit] - slack
            if kind == 3:
                assert start >= end["B", stage, unit] - slack
    for low, high in zip(program.offsets[:-1], program.offsets[1:], strict=True):
        alone = ~program.paired[low + 1 : high]
        assert (trace.start_s[low + 1 : high][alone] >= trace.end_s[low : high - 1][alone] - slack).all()


@settings(deadline=None, max_examples=120)
@given(served())
def test_exchanges_are_launched_only_where_it_is_said(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    kinds = {action.kind for lane in get(name).work(pipeline).lanes for action in lane}
    assert ActionKind.LAUNCH_SYNC not in kinds or get(name).launches


@pytest.mark.parametrize("name", [n for n in sorted(SHAPES) if n.startswith(SHARED)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 9), (3, 9), (4, 16), (5, 13), (7, 30)])
def test_shared_memory_is_reached_when_stages_are_equal(name: str, stages: int, micro_batches: int) -> None:
    schedule, pipeline = get(name), Pipeline((1,) * stages, micro_batches)
    trace = run(schedule.work(pipeline), StageTimes.of([1.0] * stages, [2.0] * stages))
    assert max(held_units(trace)) == max(schedule.held(pipeline))
    if name.startswith("bapipe"):
        assert held_units(trace).tolist() == list(schedule.held(pipeline))


@settings(deadline=None, max_examples=120)
@given(served().filter(lambda case: not get(case[0]).weight_policy.synchronous))
def test_weight_versions_and_staleness_are_as_claimed(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    schedule = get(name)
    depth = max(schedule.in_flight(pipeline)) * max(pipeline.replicas)
    program = compile_orders(schedule.work(pipeline, 4 + 2 * depth // pipeline.micro_batches))
    assert peak_versions(program).tolist() == list(schedule.weight_versions(pipeline))
    assert staleness(program).forward_most.tolist() == list(schedule.staleness(pipeline))
    peaks = peak_in_flight(program).max(axis=0)
    assert peaks.tolist() == list(schedule.in_flight(pipeline))


def test_explicit_transfers_change_no_time() -> None:
    """GPipe of two stages and micro-batches, with its sends and receives written out."""
    times = StageTimes.of([1.0, 2.0], [2.0, 3.0], receive_s=[0.5, 0.5])
    (first, last), implicit = get("gpipe").order(Pipeline((1, 1), 2)), get("gpipe").work(Pipeline((1, 1), 2))
    sends = {ActionKind.FORWARD: ActionKind.SEND_ACTIVATION, ActionKind.BACKWARD: ActionKind.SEND_GRADIENT}
    receives = {ActionKind.FORWARD: ActionKind.RECEIVE_ACTIVATION, ActionKind.BACKWARD: ActionKind.RECEIVE_GRADIENT}

    def written_out(lane: tuple[Action, ...], sent: ActionKind, received: ActionKind) -> Iterator[Action]:
        for action in lane:
            if action.kind is received:
                yield action._replace(kind=receives[action.kind])
            yield action
            if action.kind is sent:
                yield action._replace(kind=sends[action.kind])

    lanes = (
        tuple(written_out(first, ActionKind.FORWARD, ActionKind.BACKWARD)),
        tuple(written_out(last, ActionKind.BACKWARD, ActionKind.FORWARD)),
    )
    overlapped = Conditions(Transfers.OVERLAPPED)
    explicit = run(dataclasses.replace(implicit, lanes=lanes), times, overlapped)
    assert explicit.makespan_s == pytest.approx(run(implicit, times, overlapped).makespan_s)


@settings(deadline=None, max_examples=60)
@given(served())
def test_same_pipeline_same_order(case: tuple[str, Pipeline]) -> None:
    name, pipeline = case
    assert get(name).order(pipeline) == get(name).work(pipeline).lanes


@pytest.mark.parametrize(
    ("name", "replicas", "micro_batches", "reason"),
    [
        ("chimera", (1,) * 3, 6, "even number of stages"),
        ("chimera:pairs=2", (1,) * 6, 6, "do not divide half"),
        ("chimera:over=double", (1,) * 4, 7, "do not make pairs"),
        ("chimera", (1, 2), 6, "same number of replicas"),
        ("interleaved", (1,) * 5, 6, "do not make 2 chunks"),
        ("interleaved", (1,) * 8, 6, "do not make groups of 4"),
        ("interleaved:group=3", (1,) * 8, 6, "groups of 3 micro-batches are smaller than the 4 workers"),
        ("interleaved:group=5", (1,) * 8, 7, "do not make groups of 4 and more"),
        ("hanayo:waves=2", (1,) * 6, 6, "do not make 4 chunks"),
        ("zb-v", (1,) * 3, 6, "do not make 2 chunks"),
        ("dualpipe", (1,) * 4, 6, "at least 8"),
        ("dualpipe", (1,) * 4, 9, "even number of micro-batches"),
        ("dualpipe-v", (1,) * 4, 3, "at least 4"),
        ("pipedream-2bw", (1,) * 4, 3, "at least 4 micro-batches"),
        ("pipedream:vertical=true", (1, 2), 4, "equal replicas"),
        ("dapple:most=2", (1, 2), 4, "same number of replicas"),
        ("hetpipe:concurrent=3", (1,) * 2, 4, "do not make waves of 3"),
        ("zb-h1", (2, 1), 4, "same number of replicas"),
    ],
)
def test_pipelines_that_a_schedule_cannot_serve(
    name: str, replicas: tuple[int, ...], micro_batches: int, reason: str
) -> None:
    pipeline = Pipeline(replicas, micro_batches)
    assert reason in get(name).supports(pipeline)
    with pytest.raises(PlanError, match=reason):
        get(name).order(pipeline)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "dapple", "pipedream", "pipedream-2bw"])
def test_schedules_for_unequal_replication(name: str) -> None:
    assert get(name).supports(Pipeline((1, 3, 2), 24)) == ""


@pytest.mark.parametrize(
    ("name", "stages", "placement"),
    [
        ("1f1b", 2, ((0,), (1,))),
        ("interleaved", 4, ((0, 2), (1, 3))),
        ("zb-v", 4, ((0, 3), (1, 2))),
        ("hanayo:waves=2", 8, ((0, 3, 4, 7), (1, 2, 5, 6))),
        ("chimera", 4, ((0, 3), (1, 2), (1, 2), (0, 3))),
        ("chimera:pairs=2", 4, ((0, 1, 2, 3),) * 4),
        ("bapipe-fbp", 2, ((0,), (1,))),
    ],
)
def test_placement(name: str, stages: int, placement: tuple[tuple[int, ...], ...]) -> None:
    assert get(name).placement(Pipeline((1,) * stages, 8)) == placement


def test_options_are_part_of_the_name() -> None:
    assert get("chimera:pairs=2,over=double").name == "chimera:pairs=2,over=double"
    assert get("chimera:pairs=1").name == "chimera"
    with pytest.raises(UsageError, match=r"no option 'pair'.*did you mean 'pairs'"):
        get("chimera:pair=2")
    with pytest.raises(UsageError, match="use concat or double or halve"):
        get("chimera:over=twice")
    with pytest.raises(UsageError, match="use a number like 1"):
        get("chimera:pairs=two")


def test_chimera_launches_exchanges_where_a_bubble_follows() -> None:
    """D = N = 4: the first and last worker end one stage early and then wait; the middle ones do not."""
    orders = get("chimera").order(Pipeline((1,) * 4, 4))
    launched = [[str(a) for a in order if a.kind is ActionKind.LAUNCH_SYNC] for order in orders]
    assert launched == [["G3"], [], [], ["G3"]]
    assert " ".join(map(str, orders[0])) == "F0.0 F0.1 F3.2 B3.2 F3.3 B3.3 G3 B0.0 B0.1 S0 S3 U0 U3"


def test_eager_exchange_hides_in_the_bubble() -> None:
    times = StageTimes.of([1.0] * 4, [1.0] * 4, sync_s=2.0)
    pipeline = Pipeline((1,) * 4, 4)
    eager = run(get("chimera").work(pipeline), times)
    late = run(get("chimera:eager=false").work(pipeline), times)
    assert late.makespan_s == 14
    assert eager.makespan_s < late.makespan_s


@pytest.mark.parametrize("over", ["concat", "double", "halve"])
@pytest.mark.parametrize(("stages", "pairs"), [(4, 1), (8, 2), (12, 1)])
def test_chimera_keeps_no_more_of_many_micro_batches_than_of_few(stages: int, pairs: int, over: str) -> None:
    schedule = get(f"chimera:pairs={pairs},over={over}")
    for micro_batches in (2, stages, 2 * stages, 2 * stages + 2, 7 * stages + 2):
        pipeline = Pipeline((1,) * stages, micro_batches)
        counted = count_held(schedule.order(pipeline), schedule.placement(pipeline))
        for claimed, worker in zip(schedule.peaks(pipeline), counted, strict=True):
            assert claimed.stages == worker.stages
            assert claimed.units.tolist() == worker.units.tolist()


def test_bpipe_lends_to_the_mirrored_worker() -> None:
    orders = get("bpipe").order(Pipeline((1,) * 4, 8))
    assert " ".join(map(str, orders[0][:9])) == "F0.0 F0.1 F0.2 E0.2>3 F0.3 B0.0 F0.4 B0.1 L0.2"
    assert all(a.kind is not ActionKind.EVICT for order in orders[1:] for a in order)


def test_dualpipe_pairs_a_forward_with_a_backward() -> None:
    orders = get("dualpipe").order(Pipeline((1,) * 4, 8))
    assert [str(a) for a in orders[0]][:12] == (
        ["F0.0", "F0.2", "F0.4", "F3.1", "I3.1", "W3.1", "F3.3", "F0.6", "+B3.3", "F3.5", "+B0.0", "B3.5"]
    )


def test_interleaved_order_of_the_first_worker() -> None:
    orders = get("interleaved").order(Pipeline((1,) * 4, 2))
    assert " ".join(map(str, orders[0])) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1 S0 S2 U0 U2"


def test_a_group_of_micro_batches_goes_through_a_chunk_in_a_row() -> None:
    orders = get("interleaved:group=3").order(Pipeline((1,) * 4, 5))
    forwards = [str(action) for action in orders[0] if str(action).startswith("F")]
    assert " ".join(forwards) == "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 F0.3 F0.4 F2.3 F2.4"


def test_work_is_checked_for_lanes() -> None:
    lane = (Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0))
    with pytest.raises(PlanError, match="1 lanes, but workers for 2"):
        compile_orders(Work((lane,), workers=(0, 1)))


def test_a_schedule_without_an_order_cannot_be_made() -> None:
    class Idle(Schedule):
        key = "idle"

    with pytest.raises(TypeError, match="order"):
        Idle()  # type: ignore[abstract]

"""BaPipe, PipeDream-2BW and HetPipe: published answers, prices by hand, the search against trying everything."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.solvers.partition import search_partition
from planner.space.partition import (
    ASYNCHRONOUS,
    BaPipeSchedule,
    ChainDecision,
    ChainStages,
    TwoBWSchedule,
    Verdict,
    bapipe,
    features_in_flight,
    hetpipe,
    in_flight,
    pipeline_s,
    stage_kept,
    twobw,
    uniform_links,
)
from tests.oracles.partitions import by_force
from tests.shared_data import shared_path

ALL = tuple(BaPipeSchedule)


def answers(family: str, name: str) -> list[dict[str, Any]]:
    entries = json.loads(shared_path("reference/known_answers.json").read_text())[family]
    return [entry for entry in entries if entry["name"].startswith(name)]


def plan_of(problem: ChainStages, boundaries: tuple[int, ...], **wanted: Any) -> ChainDecision:
    """The plan with these boundaries in the one pipeline that has so many stages and the fields wanted."""
    (pipeline,) = (
        p for p in problem.pipelines
        if p.stages == len(boundaries) - 1 and all(getattr(p, name) == value for name, value in wanted.items())
    )  # fmt: skip
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
    return bapipe(**{**terms, **changes})


def test_price_of_bapipe_by_hand() -> None:
    problem = bapipe_problem(schedules=ALL)

    def price(schedule: BaPipeSchedule, middle: int = 2) -> float:
        return problem.judge(plan_of(problem, (0, middle, 4), schedule=schedule)).objective

    # cut in the middle takes 5 s one way; M = 4, N = 2
    assert price(BaPipeSchedule.SNO) == pytest.approx(5 * 6 + (2 + 4 - 2 - 2) * 2 * 5)
    assert price(BaPipeSchedule.SO) == pytest.approx(5 * 6 + 2 * 5)
    assert price(BaPipeSchedule.AS) == pytest.approx(5 * 9)  # max(2, 5) + 4, or 2 + max(4, 5)
    assert price(BaPipeSchedule.FBP_AS) == pytest.approx(7 * 10)
    assert price(BaPipeSchedule.SNO, 1) == pytest.approx(5 * 9 + 2 * 2 * 0.5)
    # data parallel: two samples on each, 2 * 1/2 * 32 / 2
    plan = plan_of(problem, (0, 4), schedule=BaPipeSchedule.DATA_PARALLEL)
    assert problem.judge(plan).objective == pytest.approx(2 * 12 + 16)


def test_coarse_partition_avoids_the_heavy_cut() -> None:
    """Balance says the middle; its transfers cost more than the imbalance."""
    result = search_partition(bapipe_problem())
    assert result.decision.boundaries in ((0, 1, 4), (0, 3, 4))
    assert result.objective == pytest.approx(47.0)
    assert search_partition(bapipe_problem(bandwidth_byte_per_s=1e9)).decision.boundaries == (0, 2, 4)


def test_memory_moves_layers_and_changes_the_schedule() -> None:
    # stage 1 of two with two layers: 2 * 16 + 4 * 3 = 44 bytes under so, 2 * 16 + 2 * 3 = 38 under sno
    for memory, schedule in ((44.0, BaPipeSchedule.SO), (38.0, BaPipeSchedule.SNO)):
        problem = bapipe_problem(
            schedules=(BaPipeSchedule.SO, BaPipeSchedule.SNO),
            bandwidth_byte_per_s=200.0,
            memory_bytes=np.array([memory, 48.0]),
        )
        assert search_partition(problem).decision == plan_of(problem, (0, 2, 4), schedule=schedule)


def test_known_memory_of_2bw() -> None:
    (entry,) = answers("PipeDream-2BW", "worst stage memory")
    given_, expect = entry["input"], entry["expect"]
    depth = given_["d"]
    for schedule in TwoBWSchedule:
        held = schedule.in_flight(depth, given_["m_gpipe"])
        for recompute in (False, True):
            kept = stage_kept(schedule, depth, held, recompute=recompute)
            found = kept.bytes(given_["W"] / depth, given_["A_total"] / depth, given_["A_in"])
            assert found == pytest.approx(expect[schedule.value + ("+R" if recompute else "")])


def twobw_problem(**changes: Any) -> ChainStages:
    """Four equal blocks: a sample takes 1 s forward, 2 s backward, keeps 3 bytes; 2 bytes between, weights 4 each."""
    samples = np.array([[1.0], [2.0]])
    terms = {
        "micro_batches": (1, 2),
        "forward_s": samples * np.ones(4),
        "backward_s": samples * np.full(4, 2.0),
        "saved_bytes": samples * np.full(4, 3.0),
        "boundary_bytes": samples * np.full(5, 2.0),
        "weight_bytes": np.full(4, 4.0),
        "devices": 4,
        "global_batch": 8,
        "bandwidth_byte_per_s": 8.0,
    }
    return twobw(**{**terms, **changes})


def judged(problem: ChainStages, boundaries: tuple[int, ...], width: int, recompute: bool = False) -> Verdict:
    return problem.judge(plan_of(problem, boundaries, width=width, micro_batch=1, recompute=recompute))


def test_price_of_2bw_by_hand() -> None:
    # 2 pipelines of 2 stages: 4 micro-batches, (2 + 4 + 2 / 8) s each; gradients 2 * 1/2 * 8 / 8 = 1 s
    assert judged(twobw_problem(), (0, 2, 4), 2).objective == pytest.approx(4 * 6.25)
    flush = twobw_problem(schedules=(TwoBWSchedule.FLUSH,))
    assert judged(flush, (0, 2, 4), 2).objective == pytest.approx(5 * 6.25 + 1)
    # recomputed: 2 s more a micro-batch
    assert judged(twobw_problem(), (0, 2, 4), 2, recompute=True).objective == pytest.approx(4 * 8.25)


def test_gradients_set_the_pace_when_micro_batches_are_few() -> None:
    # one stage, four pipelines, two micro-batches of 12 s; gradients 2 * 3/4 * 16 / 0.1 = 240 s
    assert judged(twobw_problem(bandwidth_byte_per_s=0.1), (0, 4), 4).objective == pytest.approx(240)


def test_memory_of_2bw_by_stage() -> None:
    needed = [v.needed for v in judged(twobw_problem(memory_bytes=1.0), (0, 2, 4), 1).violations]
    assert needed == [2 * 8 + 2 * 6, 2 * 8 + 2 * 6]
    by_stage = twobw_problem(memory_bytes=1.0, in_flight_by_stage=True, optimizer_per_weight=1.0)
    assert [v.needed for v in judged(by_stage, (0, 2, 4), 1).violations] == [3 * 8 + 2 * 6, 3 * 8 + 6]


def test_plans_of_2bw_that_do_not_come_out_are_none_of_its_pipelines() -> None:
    def shapes(problem: ChainStages) -> set[tuple[int, int, int]]:
        return {(p.width, p.stages, p.micro_batch) for p in problem.pipelines}

    # at most four devices; micro-batches and pipelines divide the eight samples; equal stages of four layers
    assert shapes(twobw_problem()) == {(1, d, b) for d in (1, 2, 4) for b in (1, 2)} | {
        (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 2),
    }  # fmt: skip
    # two micro-batches do not fill four stages, unless the pipeline is drained
    assert (1, 4, 1) not in shapes(twobw_problem(global_batch=2))
    assert (1, 4, 1) in shapes(twobw_problem(global_batch=2, schedules=(TwoBWSchedule.FLUSH,)))


def test_recompute_is_chosen_when_memory_is_short() -> None:
    # two stages need 2 * 8 + 2 * 6 = 28 bytes, recomputed 2 * 8 + 6 + 2 * 2 = 26
    result = search_partition(twobw_problem(memory_bytes=26.0, devices=2))
    assert (result.decision.pipeline.stages, result.decision.pipeline.recompute) == (2, True)
    assert result.proven
    assert search_partition(twobw_problem(memory_bytes=1.0)).decision is None


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
    equal = twobw_problem()
    for problem, plan, kind in (
        (straight, ChainDecision((0, 2), pipeline), "coverage"),
        (straight, ChainDecision((0, 1, 2, 4), pipeline), "devices"),
        (straight, ChainDecision((0, 2, 4), pipeline, (0, 1)), "devices"),
        (straight, ChainDecision((0, 4), bapipe_problem(schedules=(BaPipeSchedule.AS,)).pipelines[-1]), "option"),
        (equal, plan_of(equal, (0, 1, 4), width=1, micro_batch=1, recompute=False), "option"),
        (mixed, ordered(mixed, (0, 2), (0,)), "coverage"),
        (mixed, ordered(mixed, (0, 4), (0,)), "devices"),
        (mixed, ordered(mixed, (0, 1, 2, 4), (0, 0, 1)), "devices"),
        (mixed, ordered(mixed, (0, 1, 2, 4), (0, 1, 2)), "devices"),
    ):
        assert kind in {v.kind for v in problem.judge(plan).violations}


@pytest.mark.parametrize("broken", [
    lambda: bapipe_problem(forward_s=np.ones((1, 3, 4))),
    lambda: twobw_problem(weight_bytes=np.ones(3)),
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
    sizes = draw(st.sampled_from([(1,), (1, 2), (2, 3)]))
    speeds = np.array(draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=devices, max_size=devices)))
    forward, backward, features = (row(draw, layers) for _ in range(3))
    return bapipe(
        sizes,
        np.array([[s * v * forward for v in speeds] for s in sizes]),
        np.array([[s * v * backward for v in speeds] for s in sizes]),
        np.array([s * features for s in sizes]),
        np.array([s * row(draw, layers + 1) for s in sizes]),
        row(draw, layers),
        np.array([draw(st.sampled_from([25.0, 60.0, 120.0, 1e9])) for _ in range(devices)]),
        bandwidth_byte_per_s=draw(st.sampled_from([0.5, 4.0, 100.0])),
        global_batch=draw(st.sampled_from([2, 6, 12])),
        schedules=draw(st.sampled_from([ASYNCHRONOUS, ALL, (BaPipeSchedule.SNO,), (BaPipeSchedule.SO,)])),
        fill_overlap=draw(st.booleans()),
        exact_features=draw(st.booleans()),
    )


@st.composite
def twobw_problems(draw: st.DrawFn) -> ChainStages:
    layers = draw(st.integers(1, 6))
    sizes = draw(st.sampled_from([(1,), (1, 2), (2, 3)]))

    def table(columns: int) -> np.ndarray:
        figures = row(draw, columns)
        return np.array([size * figures for size in sizes])

    return twobw(
        sizes,
        table(layers),
        table(layers),
        table(layers),
        table(layers + 1),
        row(draw, layers),
        devices=draw(st.integers(1, 5)),
        global_batch=draw(st.sampled_from([2, 6, 12])),
        bandwidth_byte_per_s=draw(st.sampled_from([0.5, 4.0, math.inf])),
        memory_bytes=draw(st.sampled_from([15.0, 40.0, 80.0, math.inf])),
        schedules=draw(st.sampled_from([(TwoBWSchedule.TWO_BW,), tuple(TwoBWSchedule), (TwoBWSchedule.FLUSH,)])),
        equal=draw(st.booleans()),
        optimizer_per_weight=draw(st.sampled_from([0.0, 2.0])),
        in_flight_by_stage=draw(st.booleans()),
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
        stash_weights=draw(st.booleans()),
        optimizer_per_weight=draw(st.sampled_from([0.0, 2.0])),
        use_all=draw(st.booleans()),
    )


@settings(max_examples=500, deadline=None)
@given(st.one_of(bapipe_problems(), twobw_problems(), hetpipe_problems()))
def test_same_as_trying_everything(instance: ChainStages) -> None:
    oracle, result = by_force(instance), search_partition(instance)
    assert result.objective == pytest.approx(oracle.objective, rel=1e-9)
    assert result.proven

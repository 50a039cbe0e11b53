"""PipeDream's problem: prices by hand, published answers, and what its released optimiser found."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

from planner.costs import imported_profile
from planner.errors import ModelError, UsageError
from planner.importers import load_graph
from planner.published.problems import (
    LayerDag,
    Memory,
    PipeDreamProblem,
    PlacedPipelineProblem,
    PlacedStage,
    Released,
    ReplicatedStage,
    chain_layers,
    priced_layers,
    recorded_layers,
)
from planner.published.solvers import search_partition
from planner.solvers.cluster_chains import hierarchical_dp
from tests.published.partition.pipedream_cases import recorded, recorded_rows, released_problem
from tests.shared_data import shared_path

CHAIN = chain_layers([4.0, 6.0, 2.0], [1.0, 2.0, 8.0], [3.0, 5.0, 7.0])
DIAMOND = LayerDag(  # 0 -> 1, 2 -> 3
    np.array([1.0, 2.0, 3.0, 4.0]),
    np.zeros(4),
    np.array([10.0, 1.0, 2.0, 5.0]),
    np.zeros(4),
    np.array([[0, 1], [0, 2], [1, 3], [2, 3]]),
)


def stages(*parts: tuple[int, ...]) -> tuple[ReplicatedStage, ...]:
    """Stages of one layer range each: (first, stop, replicas)."""
    return tuple(ReplicatedStage(tuple(range(a, b)), r) for a, b, r in parts)


# --- the judge, figures worked out by hand


def test_released_cost_of_a_flat_plan() -> None:
    problem = PipeDreamProblem(CHAIN, (3,), (2.0,))
    verdict = problem.judge(stages((0, 2, 2), (2, 3, 1)))
    # first: (10 + 4 * 1 * 3 / (2 * 2)) / 2 = 6.5, not charged for transfers; last: max(2, 2 * 5 / (2 * 1)) = 5
    assert verdict.parts == pytest.approx((6.5, 5.0))
    assert verdict.objective == pytest.approx(6.5)
    assert verdict.feasible


def test_paper_cost_of_a_flat_plan() -> None:
    problem = PipeDreamProblem(CHAIN, (4,), (2.0,), Released.NOTHING)
    verdict = problem.judge(stages((0, 1, 1), (1, 3, 3)))
    # second: max(8, 2 * 2 * 10 / 2) / 3 = 20/3; its transfer 2 * 3 / 2 = 3 is not shared among replicas
    assert verdict.parts == pytest.approx((4.0, 20 / 3))


def test_released_cost_on_two_levels() -> None:
    problem = PipeDreamProblem(CHAIN, (2, 2), (4.0, 1.0))
    inner = stages((0, 1, 1), (1, 3, 1))
    plan = (ReplicatedStage((0, 1, 2), 2, inner),)
    # inside: 4, and max(8, 2 * 3 / 4) = 8; between: (8 + 4 * 1 * 11 / (1 * 2) / 2) / 2 = 9.5
    assert problem.judge(plan).objective == pytest.approx(9.5)
    apart = (
        ReplicatedStage((0, 1), 1, stages((0, 2, 2))),
        ReplicatedStage((2,), 1, stages((2, 3, 2))),
    )
    # first server (10 + 4 * 3 / (4 * 2)) / 2 = 5.75; second (2 + 4 * 8 / (4 * 2)) / 2 = 3, its transfer 2 * 5 / 1 = 10
    assert problem.judge(apart).parts == pytest.approx((5.75, 10.0))


@pytest.mark.parametrize(
    ("before", "live", "released"),
    [
        ((0,), 10.0, 10.0),
        ((0, 1), 11.0, 11.0),
        # all readers of 0 lie before the cut, yet the released code counts it: it has one that is not before layer 1
        ((0, 1, 2), 3.0, 13.0),
        ((0, 1, 2, 3), 0.0, 5.0),
    ],
)
def test_bytes_at_a_cut(before: tuple[int, ...], live: float, released: float) -> None:
    rest = tuple(sorted(set(range(4)) - set(before)))
    plan = (ReplicatedStage(before, 1), ReplicatedStage(rest, 1)) if rest else (ReplicatedStage(before, 1),)
    for rules, expected in ((Released.COST, live), (Released.COST | Released.CUT_BYTES, released)):
        problem = PipeDreamProblem(DIAMOND, (2,), (0.01,), rules, use_all=False)
        assert problem.judge(plan).objective == pytest.approx(2 * expected / 0.01 if rest else 10.0)


def test_memory_by_hand() -> None:
    layers = chain_layers([1.0, 1.0], [3.0, 5.0], [2.0, 0.0], [10.0, 20.0])
    problem = PipeDreamProblem(layers, (2,), (1.0,), memory=Memory(0.5))
    # two minibatches in flight: 2 * (3 + 10) + 2 * 3; then one, with its input: 5 + 20 + 2 + 2 * 5
    assert [v.needed for v in problem.judge(stages((0, 1, 1), (1, 2, 1))).violations] == [32.0, 37.0]


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (stages((0, 2, 1)), "coverage"),
        (stages((1, 3, 1), (0, 1, 1)), "coverage"),
        (stages((0, 3, 2)), "devices"),
        (stages((0, 3, 4)), "devices"),
        ((ReplicatedStage((0, 1, 2), 3, stages((0, 3, 1))),), "coverage"),
        (stages((0, 3, 3)), "option"),
    ],
)
def test_malformed_plans(plan: tuple[ReplicatedStage, ...], kind: str) -> None:
    problem = PipeDreamProblem(CHAIN, (3,), (1.0,), replicate=kind != "option")
    assert kind in {v.kind for v in problem.judge(plan).violations}


def test_bad_problems() -> None:
    with pytest.raises(UsageError, match="bandwidth"):
        PipeDreamProblem(CHAIN, (2, 2), (1.0,))
    with pytest.raises(UsageError, match="positive"):
        PlacedPipelineProblem(CHAIN, (2,), (0.0,))
    with pytest.raises(ModelError, match="negative"):
        chain_layers([-1.0], [0.0], [0.0])
    with pytest.raises(UsageError, match="idle"):
        search_partition(PipeDreamProblem(CHAIN, (2, 2), (1.0, 1.0), memory=Memory(1e3), use_all=False))


def test_nothing_fits() -> None:
    result = search_partition(PipeDreamProblem(CHAIN, (2,), (1.0,), memory=Memory(1.0)))
    assert result.decision is None
    assert math.isinf(result.bound)


# --- placed on a tree


def test_placed_price_by_hand() -> None:
    problem = PlacedPipelineProblem(CHAIN, (2, 2), (8.0, 2.0))
    plan = (PlacedStage((0, 1), 0, 3), PlacedStage((2,), 3, 1))
    # three replicas on two servers: flat 4 * 2 / 3 / 2 = 4/3; by levels 2 / 8 + 2 / 2 = 1.25 a byte, which is less
    verdict = problem.judge(plan)
    assert verdict.parts == pytest.approx(((10 + 3 * 1.25) / 3, 2 * 5 / 2))
    # two on links that are as fast on both levels: flat 4 * 1 / 2 / 8, by levels the same inside a server
    assert problem.exchange_s_per_byte((0, 1)) == pytest.approx(0.25)
    alike = PlacedPipelineProblem(CHAIN, (2, 2), (2.0, 2.0))
    assert alike.exchange_s_per_byte((0, 1, 2)) == pytest.approx(4 / 3)


def test_placed_copies_keep_activations_inside() -> None:
    problem = PlacedPipelineProblem(CHAIN, (2, 2), (8.0, 2.0))
    plan = (PlacedStage((0,), 0, 1, 2, 2), PlacedStage((1, 2), 1, 1, 2, 2))
    # each stage on one device of either server: weights cross at 2 / 2 a byte; the cut 2 * 3 / (8 * 2)
    assert problem.judge(plan).parts == pytest.approx(((4 + 1) / 2, (8 + 10) / 2))
    assert plan[1].devices == (1, 3)


@pytest.mark.parametrize(
    "plan",
    [
        (PlacedStage((0, 1, 2), 1, 1),),
        (PlacedStage((0, 1), 0, 1), PlacedStage((2,), 2, 1)),
        (PlacedStage((0, 1, 2), 0, 5),),
        (PlacedStage((0, 1, 2), 0, 1, 2, 2),),
        (PlacedStage((0,), 0, 1), PlacedStage((1, 2), 1, 2, 2, 2)),
    ],
)
def test_placed_holes_and_overlaps(plan: tuple[PlacedStage, ...]) -> None:
    verdict = PlacedPipelineProblem(CHAIN, (2, 2), (8.0, 2.0)).judge(plan)
    assert {v.kind for v in verdict.violations} == {"devices"}


# --- published answers


@pytest.mark.parametrize("case", ["toy partition, paper cost", "toy partition, code cost"])
def test_known_answers(case: str) -> None:
    answers = json.loads(shared_path("reference/known_answers.json").read_text())["PipeDream"]
    entry = next(item for item in answers if item["name"] == case)
    given, expect = entry["input"], entry["expect"]
    problem = PipeDreamProblem(
        chain_layers(given["time"], given["weight"], given["act"]),
        (given["workers"],),
        (given["bandwidth"],),
        Released.NOTHING if "paper" in case else Released.COST,
    )
    result = search_partition(problem)
    assert result.objective == pytest.approx(expect["bottleneck"])
    assert [s.replicas for s in result.decision] == expect["replicas"]
    assert [0, *np.cumsum([len(s.layers) for s in result.decision])] == expect["boundaries"]
    parallel = dict(problem.trivial())["data-parallel"]
    assert problem.judge(parallel).objective == pytest.approx(expect["data_parallel"])
    assert result.proven


def test_every_recorded_run() -> None:
    """The released optimiser's optimum, on every run that came to an end."""
    for row in recorded_rows():
        result = search_partition(released_problem(row))
        where = {k: row[k] for k in ("profile", "n", "b", "comm", "mem", "straight", "fewer")}
        assert result.objective == pytest.approx(row["pipe_s"], rel=1e-9), where
        assert result.proven, where
        problem = released_problem(row)
        parallel = problem.judge(dict(problem.trivial())["data-parallel"])
        assert parallel.objective == pytest.approx(row["dp_s_per_mb"], rel=1e-9), where


def test_twenty_times_less_time_on_the_larger_runs() -> None:
    larger = [row for row in recorded_rows() if row.get("cpu_s", 0) > 3]
    assert len(larger) >= 10
    start = time.process_time()
    for row in larger:
        search_partition(released_problem(row))
    assert (time.process_time() - start) * 20 < sum(row["cpu_s"] for row in larger)


@pytest.mark.parametrize(
    ("fanout", "speeds", "flat_ms", "released_ms"),
    [
        ((4, 2), (10e9, 1.25e9), 100.85, 157.8),
        ((4, 4), (10e9, 1.25e9), 55.9, 67.1),
        ((8, 2), (50e9, 3.125e9), 45.53, 65.8),
    ],
)
def test_fast_inner_links_never_hurt(
    fanout: tuple[int, ...], speeds: tuple[float, ...], flat_ms: float, released_ms: float
) -> None:
    """VGG-16 on servers: never worse than the flat plan on the slowest links."""
    layers = recorded("vgg16")
    rules = Released.COST | Released.CUT_BYTES
    nested = PipeDreamProblem(layers, fanout, speeds, rules)
    assert search_partition(nested).objective * 1e3 == pytest.approx(released_ms, abs=0.05)
    result = search_partition(PlacedPipelineProblem(layers, fanout, speeds, rules, use_all=False))
    assert result.objective * 1e3 <= flat_ms
    assert result.proven


@pytest.mark.parametrize("profile", ["alexnet", "vgg16", "gnmt", "resnet50"])
def test_placed_is_never_worse_than_flat(profile: str) -> None:
    layers = recorded(profile)
    for speed in (1.25e9, 10e9):
        flat = search_partition(PipeDreamProblem(layers, (8,), (speed,)))
        one_level = search_partition(PlacedPipelineProblem(layers, (8,), (speed,), use_all=True))
        assert one_level.objective >= flat.objective * (1 - 1e-12)  # the first stage's sending is charged as well
        on_servers = search_partition(PlacedPipelineProblem(layers, (4, 2), (10 * speed, speed), use_all=False))
        assert on_servers.objective <= one_level.objective * (1 + 1e-12)


def test_cuts_that_the_released_walk_never_sees() -> None:
    """GNMT has several sources; with all cuts its pipeline is a fifth faster than the recorded one."""
    row = next(r for r in recorded_rows() if r["profile"] == "gnmt" and r["n"] == [16] and r["b"] == [10e9])
    problem = released_problem(row)
    free = PipeDreamProblem(problem.layers, problem.machines, problem.bandwidth_byte_per_s)
    result = search_partition(free)
    assert result.objective < 0.8 * row["pipe_s"]
    assert result.proven


def test_inception_is_solved_with_proof() -> None:
    """The graph on which the released optimiser never returns."""
    graph = load_graph(shared_path("instances/pipedream/inception_v3.graph.txt"))
    layers = priced_layers(graph, imported_profile(graph))
    result = search_partition(PipeDreamProblem(layers, (4,), (10e9,)))
    assert result.proven
    assert result.statistics["cuts"] > 200_000
    assert layers.compute_s.sum() / 4 <= result.objective < 1.01 * layers.compute_s.sum() / 4


def test_too_many_cuts_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical_dp, "MOST_CUTS", 10_000)
    graph = load_graph(shared_path("instances/pipedream/inception_v3.graph.txt"))
    result = search_partition(PipeDreamProblem(recorded_layers(graph), (4,), (10e9,)))
    assert result.decision is not None
    assert result.bound <= result.objective
    assert "some of the cuts" in result.space


def test_same_answer_twice() -> None:
    layers = recorded("gnmt")
    first, second = (search_partition(PlacedPipelineProblem(layers, (4, 4), (10e9, 1.25e9))) for _ in range(2))
    assert first == second


def test_layers_that_work_in_place_keep_nothing_of_their_own() -> None:
    graph = load_graph(shared_path("instances/pipedream/vgg16.graph.txt"))
    real, as_recorded = priced_layers(graph, imported_profile(graph)), recorded_layers(graph)
    assert real.saved_bytes.sum() < 0.7 * as_recorded.saved_bytes.sum()
    assert real.compute_s.sum() == as_recorded.compute_s.sum() == pytest.approx(0.672535)

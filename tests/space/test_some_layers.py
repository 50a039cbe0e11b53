"""Stages that recompute the first of their layers: which blocks those are, what they cost, and which number is best."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import planner
from planner.solvers import chain_dp
from planner.solvers.critical_path import bounded, critical_s, solve_bounded
from planner.space.evaluate import evaluate
from planner.space.evaluate_many import evaluate_many
from planner.space.formulate import Formulator
from planner.space.layers import Layers, layers_of_choice
from planner.space.pricer import Pricer
from planner.space.ranges import Ranges, least_added
from planner.space.types import BlockCosts, Configuration, Evaluation, Job, StageChoice, Structure

NAMES = ("wte", "h.0[1/2]", "h.0[2/2]", "h.1[1/2]", "h.1[2/2]", "h.2[1/2]", "h.2[2/2]", "lm_head")


@pytest.mark.parametrize(
    ("start", "stop", "layers", "kept_from"),
    [
        (0, 8, 1, 3),  # what comes before the first layer goes with it
        (0, 8, 2, 5),
        (0, 8, 3, 8),  # all layers: only the head may be kept, as without a number
        (0, 8, 0, 8),
        (0, 8, 9, 8),
        (2, 6, 1, 3),  # a part of a layer counts as one
        (2, 6, 2, 5),
        (2, 6, 3, 6),
        (7, 8, 1, 8),  # no layer at all
    ],
)
def test_which_blocks_are_kept_behind_the_first_layers(start: int, stop: int, layers: int, kept_from: int) -> None:
    assert int(Layers.of(NAMES).kept_from(start, stop, layers)) == kept_from


@pytest.mark.parametrize("choice", ["auto", "layers", "always", "layers:3", "layernorm"])
def test_single_blocks_are_the_diagonal_of_all_ranges(choice: str) -> None:
    pricer = Pricer(planner.load_graph("gpt2"), planner.load_cluster("dgx-h100", devices=8), Job(64))
    for costs in (pricer.costs(2), *pricer.even_split(2), pricer.floors(2)[0][0]):
        alone, ranges = Ranges(costs, by_block=np.diagonal), Ranges(costs)
        pairs = [(alone, ranges, ("elements", "shard_elements", "update_s", "workspace_bytes", "saved_bytes"))]
        for whole_stages in (False, True):
            ways = (each.ways(choice, whole_stages=whole_stages) for each in (alone, ranges))
            pairs += [(*both, ("repeat_s", "saved_bytes", "working_bytes")) for both in zip(*ways, strict=True)]
        for one, several, names in pairs:
            for name in names:
                diagonal = np.diagonal(getattr(several, name), axis1=-2, axis2=-1)
                np.testing.assert_allclose(getattr(one, name), diagonal, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("choice", ["auto", "layers", "always", "layernorm"])
def test_no_stage_keeps_less_than_its_blocks_add_at_the_least(choice: str) -> None:
    pricer = Pricer(planner.load_graph("gpt2"), planner.load_cluster("dgx-h100", devices=8), Job(64))
    for costs in (pricer.costs(2), *pricer.even_split(2)):
        least, ranges = Ranges(costs, by_block=least_added), Ranges(costs)
        for one, several in zip(least.ways(choice), ranges.ways(choice), strict=True):
            sums = np.triu(np.cumsum(one.saved_bytes) - (np.cumsum(one.saved_bytes) - one.saved_bytes)[:, None])
            assert (sums <= np.triu(several.saved_bytes) * (1 + 1e-9) + 1e-3).all()
            assert sums[0, -1] >= 0.9 * several.saved_bytes[0, -1]


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (2, 6), (1, 7), (3, 8)])
def test_the_number_of_layers_follows_from_the_kept_blocks(start: int, stop: int) -> None:
    layers = Layers.of(NAMES)
    for count in range(1, int(layers.count(start, stop))):
        kept = range(int(layers.kept_from(start, stop, count)), stop)
        assert layers.recomputed(start, stop, kept) == count
    assert layers.recomputed(start, stop, (7,)) == 0


def test_blocks_without_numbers_are_layers_but_the_last_one() -> None:
    layers = Layers.of(("stem", "body", "neck", "head"))
    assert [int(layers.kept_from(0, 4, count)) for count in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_a_choice_of_layers_is_read() -> None:
    assert [layers_of_choice(text) for text in ("layers:4", "layers", "layers:0", "mlp")] == [4, 0, 0, 0]


@pytest.fixture(scope="module")
def costs() -> BlockCosts:
    graph = planner.load_graph("gpt2", dims={"seq": 256})
    return Pricer(graph, planner.load_cluster("dgx-a100"), Job(16)).costs(2)


def one_stage(costs: BlockCosts, layers: int, *, recompute: bool = True, micro_batches: int = 8) -> Configuration:
    stage = StageChoice(0, len(costs.parameter_elements), 1, recompute, layers=layers)
    return Configuration((stage,), 1, 2, micro_batches, "1f1b")


def test_time_and_bytes_are_those_of_the_layers(costs: BlockCosts) -> None:
    cluster, job = planner.load_cluster("dgx-a100"), Job(16)
    terms = evaluate(costs, cluster, job, one_stage(costs, 5)).stages[0]
    behind = costs.names.index("transformer.h.5[1/2]")
    repeated_s = sum(float(costs.forward_s[0, b]) for b in range(behind))
    assert terms.recompute_s == pytest.approx(repeated_s)
    kept = float(costs.checkpoint_bytes[0, behind - 1] + costs.saved_bytes[behind, -1])
    assert terms.unit_bytes == pytest.approx(kept)
    bounds = [evaluate(costs, cluster, job, one_stage(costs, 0, recompute=again)).stages[0] for again in (True, False)]
    assert bounds[0].unit_bytes < terms.unit_bytes < bounds[1].unit_bytes
    assert bounds[0].backward_s > terms.backward_s > bounds[1].backward_s


def test_arrays_agree_with_the_judge(costs: BlockCosts) -> None:
    cluster, job = planner.load_cluster("dgx-a100"), Job(16)
    edges = ((0, 9, 27), (0, 14, 27), (0, 3, 27))
    configurations = [
        Configuration(
            tuple(StageChoice(a, b, 1, True, layers=n) for a, b, n in zip(cut, cut[1:], pair, strict=False)),
            1, 2, 8, "1f1b",
        )
        for cut in edges
        for pair in ((0, 0), (1, 2), (3, 1), (12, 4))
    ]  # fmt: skip
    (figures,) = evaluate_many((costs,), cluster, job, configurations)
    for index, configuration in enumerate(configurations):
        judged = evaluate(costs, cluster, job, configuration)
        assert figures.iteration_s[index] == pytest.approx(judged.iteration_s, rel=1e-12)
        peak = max(worker.memory.total for worker in judged.workers)
        assert figures.peak_bytes[index] == pytest.approx(peak, rel=1e-12)


def test_a_number_of_layers_needs_recomputation_layer_by_layer(costs: BlockCosts) -> None:
    cluster, job = planner.load_cluster("dgx-a100"), Job(16)
    kept = one_stage(costs, 2, recompute=False)
    whole = dataclasses.replace(one_stage(costs, 2), whole_stages=True)
    for configuration in (kept, whole):
        messages = [v.message for v in evaluate(costs, cluster, job, configuration).violations]
        assert any("number of layers to recompute, 2" in message for message in messages)


BLOCKS = 8


GIB = 2.0**30


def small(costs: BlockCosts) -> BlockCosts:
    """Embedding, three layers of two blocks each and a head: layers keep 2 GiB, their inputs are 128 MiB."""

    def over(sizes: list[float]) -> np.ndarray:
        return np.array([[sum(sizes[i : j + 1]) for j in range(BLOCKS)] for i in range(BLOCKS)])

    edges = np.array([0, *[GIB / 8] * (BLOCKS - 1), 0])
    return dataclasses.replace(
        costs,
        forward_s=np.array([[0.001, 0.01, 0.02, 0.012, 0.02, 0.01, 0.024, 0.004]]),
        backward_s=np.array([[0.002, 0.02, 0.04, 0.024, 0.04, 0.02, 0.048, 0.008]]),
        update_s=np.full((1, BLOCKS), 1e-4),
        parameter_elements=np.full(BLOCKS, 1e6),
        saved_bytes=over([0, GIB, GIB, 1.1 * GIB, GIB, GIB, 0.9 * GIB, GIB / 2]),
        checkpoint_bytes=over([0, GIB / 8, 0, GIB / 8, 0, GIB / 8, 0, GIB / 8]),
        boundary_bytes=edges,
        gradient_boundary_bytes=edges,
        workspace_bytes=np.zeros(BLOCKS),
        repeated=np.arange(BLOCKS) < BLOCKS - 1,
        kept_bytes=np.array([*[0.0] * (BLOCKS - 1), GIB * 3 / 8]),
        layer_starts=np.array([0, 1, 1, 3, 3, 5, 5, 7]),
        names=NAMES,
        ties=(),
        steps=None,
        selective=None,
    )


def fastest(costs: BlockCosts, cluster: planner.Cluster, job: Job, *, alike: bool) -> float:
    """Closed form of the fastest pipeline of two stages, every cut and every number of layers tried by the judge."""
    ways = [(False, 0), (True, 0), *((True, n) for n in range(1, 4))]
    best = np.inf
    for cut, *pair in itertools.product(range(1, BLOCKS), ways, ways):
        if alike and pair[0] != pair[1]:
            continue
        stages = tuple(
            StageChoice(a, b, 1, again, layers=n)
            for (a, b), (again, n) in zip(((0, cut), (cut, BLOCKS)), pair, strict=True)
        )
        evaluation = evaluate(costs, cluster, job, Configuration(stages, 1, 2, 4, "1f1b"))
        best = min(best, evaluation.iteration_s if evaluation.feasible else np.inf)
    return best


def machine(costs: BlockCosts, job: Job, part: float) -> planner.Cluster:
    """Devices with memory between the least need of two stages (0) and that of the fastest without a limit (1)."""
    whole = planner.load_cluster("dgx-a100")
    judged = []
    for cut, again in itertools.product(range(1, BLOCKS), (True, False)):
        stages = tuple(StageChoice(a, b, 1, again) for a, b in ((0, cut), (cut, BLOCKS)))
        judged.append(evaluate(costs, whole, job, Configuration(stages, 1, 2, 4, "1f1b")))
    peaks = [max(worker.memory.total for worker in each.workers) for each in judged]
    least, most = min(peaks), peaks[min(range(len(judged)), key=lambda k: judged[k].iteration_s)]
    device = dataclasses.replace(whole.devices[0], memory_bytes=int(least + part * (most - least)))
    return dataclasses.replace(whole, devices=(device,))


@pytest.mark.parametrize("part", [-0.2, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("alike", [False, True])
def test_the_search_takes_the_best_number_of_layers(costs: BlockCosts, part: float, alike: bool) -> None:
    chain, structure = small(costs), Structure(alike=alike, equal_replicas=True)
    job = Job(
        8, devices=2, zero=(0,), pipeline_stages=(2,), data_parallel=(1,), precision="bf16", structure=structure,
        overlap=0.0,
    )  # fmt: skip
    cluster = machine(chain, job, part)
    expected = fastest(chain, cluster, job, alike=alike)
    problem = Formulator(cluster, job, some_layers=True).problem(chain, copies=1, schedule="1f1b", zero=0)

    def judge(configuration: Configuration) -> Evaluation:
        return evaluate(chain, cluster, job, configuration)

    solution = chain_dp.solve(problem, judge)
    found = min((evaluation.iteration_s for _, evaluation in solution.decisions), default=np.inf)
    assert solution.bound_s <= expected * (1 + 1e-9)
    assert found == pytest.approx(expected, rel=1e-9)
    shortest = solve_bounded(bounded(problem, np.inf), judge, keep=4)
    if np.isfinite(expected):
        assert shortest.bound_s <= min(critical_s(*entry) for entry in solution.decisions) * (1 + 1e-9)


def test_a_little_less_memory_costs_a_layer_not_all(costs: BlockCosts) -> None:
    chain, job = small(costs), Job(8, devices=2, zero=(0,), pipeline_stages=(2,), data_parallel=(1,), overlap=0.0)
    cluster = machine(chain, job, 0.6)
    problem = Formulator(cluster, job, some_layers=True).problem(chain, copies=1, schedule="1f1b", zero=0)
    solution = chain_dp.solve(problem, lambda configuration: evaluate(chain, cluster, job, configuration))
    best = solution.decisions[0][0].stages
    assert any(0 < stage.layers < 3 for stage in best)


def test_a_number_of_layers_holds_for_several_stages_a_worker() -> None:
    graph = planner.load_graph("gpt2", dims={"seq": 256})
    job = Job(16, recompute="layers:2", schedules=("interleaved",), backends=("any",), devices=2)
    stages = planner.plan(graph, planner.load_cluster("dgx-a100"), job).configuration.stages
    assert len(stages) > 2
    assert {(stage.recompute, stage.layers) for stage in stages} == {(True, 2)}

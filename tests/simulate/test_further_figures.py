"""Further figures of the reference's sources, through the public measurement; its cases: tests/published/formulas.

Where a reference figure differs from what its schedule gives, the test says so.
"""

from __future__ import annotations

from typing import Any

import pytest

from planner import formulas, measure_schedule
from planner.play import Conditions, Measurement


def measure(
    schedule: str, stages: int, micro_batches: int, forward: float, backward: float, **more: Any
) -> Measurement:
    return measure_schedule(schedule, stages, micro_batches, forward_s=forward, backward_s=backward, **more)


def split(schedule: str, stages: int, micro_batches: int) -> Measurement:
    return measure(schedule, stages, micro_batches, 1, 2, weight_grad_s=1)


def test_dapples_pivot_formula_is_low_where_an_early_stage_is_slow() -> None:
    """Reference data: pivot 48, released program 57, exact 51."""
    found = measure_schedule("dapple", 4, 8, forward_s=[2, 1, 1, 1], backward_s=[4, 2, 2, 2])
    assert found.makespan_s == 51
    assert formulas.dapple_latency_s([2, 1, 1, 1], [4, 2, 2, 2], 8) == 48
    assert formulas.dapple_released_latency_s([2, 1, 1, 1], [4, 2, 2, 2], 8) == 57


def test_chimeras_critical_path() -> None:
    """N = D = 6, B = 2F: 6 forwards and 10 backwards, 26 in all."""
    assert formulas.chimera_iteration_s(6, 6, 1, 0) == 6
    assert formulas.chimera_iteration_s(6, 6, 0, 1) == 10
    assert measure("chimera", 6, 6, 1, 2).makespan_s == 26


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "cost"),
    [
        ("zb-h1", 8, 24, 79),
        ("zb-h1:limit=12", 8, 24, 75),
        ("zb-h2", 8, 24, 72),
        ("zb-v", 16, 24, 144),
        ("interleaved", 16, 16, 117),
    ],
)
def test_further_costs(schedule: str, stages: int, micro_batches: int, cost: float) -> None:
    """Figures of the same sources at other sizes; interleaved in chunk times (58.5 stage times)."""
    assert split(schedule, stages, micro_batches).iteration_s == cost


def test_iteration_cost_and_makespan_are_two_things() -> None:
    """ZB-H2, p = 4, m = 8: the makespan is 27, an iteration costs 24; 1F1B: both 33."""
    found = split("zb-h2", 4, 8)
    assert (found.makespan_s, found.iteration_s) == (27, 24)
    plain = measure("1f1b", 4, 8, 1, 2)
    assert (plain.makespan_s, plain.iteration_s) == (33, 33)


def test_streaming_keeps_half_of_what_is_published() -> None:
    """BaPipe's FBP-AS: the published figure for memory is that of the strict form."""
    strict, streamed = measure("bapipe-fbp", 3, 6, 1, 2), measure("bapipe-fbp:fill_overlap=true", 3, 6, 1, 2)
    assert streamed.held == tuple(kept // 2 for kept in strict.held)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_pipedream_is_stale_by_as_much_on_average_and_backward(stages: int) -> None:
    found = measure("pipedream", stages, stages, 1, 2)
    assert found.bubble == pytest.approx(0)
    assert found.mean_staleness == found.backward_staleness == found.staleness


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (4, 8), (3, 5)])
def test_the_uniform_rule_of_2bw_delays_every_stage_by_one(stages: int, micro_batches: int) -> None:
    found = measure("pipedream-2bw", stages, micro_batches, 1, 2)
    assert found.staleness == (1,) * stages
    assert found.weight_versions == (2,) * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (8, 4), (3, 7)])
def test_pipemare_reads_the_newest_weights_backward(stages: int, micro_batches: int) -> None:
    found = measure("pipemare", stages, micro_batches, 1, 1)
    assert found.mean_staleness == pytest.approx(formulas.pipemare_delays(stages, micro_batches))
    assert found.backward_staleness == pytest.approx([0] * stages)


@pytest.mark.parametrize("wave", [1, 4, 7])
def test_hetpipes_waves(wave: int) -> None:
    assert formulas.wsp_staleness(wave, 2).overall == 3 * wave + wave - 2


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (8, 16)])
def test_a_limit_of_2p_is_no_more_than_2p_less_1(stages: int, micro_batches: int) -> None:
    wide = split(f"zb-h2:limit={2 * stages}", stages, micro_batches)
    assert wide.iteration_s == split("zb-h2", stages, micro_batches).iteration_s


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (8, 20)])
def test_dualpipe_folded_has_the_same_bubble(stages: int, micro_batches: int) -> None:
    whole = {"weight_grad_s": 1, "conditions": Conditions(pair_overlap=0.0)}
    apart = measure("dualpipe", stages, micro_batches, 1, 2, **whole)
    folded = measure("dualpipe-v", stages, micro_batches, 1, 2, weight_grad_s=1)
    assert max(folded.worker_idle_s) == apart.worker_idle_s[0] == formulas.dualpipe_bubble_s(stages, 3, 2, 1)


@pytest.mark.parametrize("workers", [4, 8])
def test_bpipe_costs_no_time_when_links_are_free(workers: int) -> None:
    assert (
        measure("bpipe", workers, 4 * workers, 1, 2).makespan_s
        == measure("1f1b", workers, 4 * workers, 1, 2).makespan_s
    )

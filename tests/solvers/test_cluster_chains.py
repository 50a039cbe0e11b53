"""The stage problems that systems share with published instances, solved by one solver each; optima by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.solvers.cluster_chains.chain_dp import solve_chain
from planner.solvers.cluster_chains.chain_schedules import hetpipe
from planner.solvers.cluster_chains.hierarchical_dp import solve_nested
from planner.solvers.cluster_chains.pipedream import PipeDreamProblem, ReplicatedStage
from planner.solvers.cluster_chains.pipedream_terms import chain_layers
from planner.solvers.cluster_chains.search import OutOfTime, SearchState, best_decision

COMPUTE_S = (1.0, 1.0, 1.0, 3.0)


def _virtual_worker(memory_bytes: float = 100.0):  # noqa: ANN202
    """Four layers of one byte each on two equal devices, transfers free: the cut after three layers takes 3 s."""
    ones = np.ones(4)
    return hetpipe(
        np.array([COMPUTE_S]), ones, ones, np.zeros(5), (2,), np.array([memory_bytes]), np.array([[1.0]])
    )  # fmt: skip


def test_the_best_cut_of_a_chain() -> None:
    assert best_decision(_virtual_worker(), solve_chain, 5.0).boundaries == (0, 3, 4)


def test_without_time_the_even_split_is_kept() -> None:
    decision = best_decision(_virtual_worker(), solve_chain, 0.0)
    assert decision.boundaries == (0, 2, 4)
    assert _virtual_worker().judge(decision).objective == 1.0 + 3.0


@pytest.mark.parametrize(("memory_bytes", "boundaries"), [(6.0, (0, 3, 4)), (5.9, (0, 2, 4)), (3.9, None)])
def test_memory_limits_the_cut(memory_bytes: float, boundaries: tuple[int, ...] | None) -> None:
    """A stage of n layers keeps n bytes of weights and n of activations of the one mini-batch in flight."""
    decision = best_decision(_virtual_worker(memory_bytes), solve_chain, 5.0)
    assert (None if decision is None else decision.boundaries) == boundaries


def test_the_best_stages_of_pipedream() -> None:
    """Replicas exchange 10 bytes at 1 B/s: (6 + 4 * 10 / 2) / 2 = 13 s; two stages without replicas take 3 s."""
    layers = chain_layers(list(COMPUTE_S), [0.0, 0.0, 0.0, 10.0], [0.0] * 4)
    problem = PipeDreamProblem(layers, (2,), (1.0,))
    replicated = (ReplicatedStage((0, 1, 2, 3), 2),)
    assert problem.judge(replicated).objective == 13.0
    assert best_decision(problem, solve_nested, 5.0) == (ReplicatedStage((0, 1, 2), 1), ReplicatedStage((3,), 1))
    assert best_decision(problem, solve_nested, 0.0) == replicated


def test_a_turn_that_runs_out_of_time_keeps_what_was_offered() -> None:
    problem = _virtual_worker()
    search = SearchState(problem, math.inf)
    best = best_decision(problem, solve_chain, 5.0)

    def interrupted(state: SearchState) -> None:
        state.offer(best)
        raise OutOfTime

    search.take_turn("interrupted", interrupted, 0.5)
    assert search.decision == best
    assert search.result().solver == "interrupted"
    search.take_turn("none", lambda _: pytest.fail("a solver without a share runs"), 0.0)

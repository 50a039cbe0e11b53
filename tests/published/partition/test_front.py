"""The front: turns, trust, limits, and that nothing wrong can leave it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InfeasibleError, UsageError
from planner.published.problems import MaxLoadDecision, MaxLoadProblem, PartitionVerdict, max_load_problem
from planner.published.readers import operator_graph_from
from planner.published.solvers import PARTITION_SOLVERS, PartitionSolver, SearchState, solve_partition, solvers_for
from planner.space import Violation
from tests.published.partition.instances import operator_graph

SOLVERS = {
    "chain-dp": "ChainStages",
    "hierarchical-dp": "PipeDreamProblem",
    "hierarchical-dp-placed": "PlacedPipelineProblem",
    "iteration-dp": "IterationProblem",
    "latency-cp-sat": "LatencyProblem",
    "latency-list": "LatencyProblem",
    "layerwise": "LayerChoice",
    "max-load-cp-sat": "MaxLoadProblem",
    "max-load-highs": "MaxLoadProblem",
    "max-load-ideals": "MaxLoadProblem",
    "max-load-pairs": "MaxLoadProblem",
    "piper-dp": "PiperProblem",
}


@dataclasses.dataclass(frozen=True)
class Pick:
    """Pick one of some values, at most `limit`: the smallest wins. The trivial plan is the first of them."""

    values: tuple[float, ...]
    limit: float = math.inf

    unit = "ms"

    def judge(self, decision: int) -> PartitionVerdict:
        value = self.values[decision]
        over = (Violation("memory", 0, f"{value} is over {self.limit}", value, self.limit),)
        return PartitionVerdict(value, over if value > self.limit else (), (value,))

    def trivial(self) -> tuple[tuple[str, int], ...]:
        return (("the first", 0),)


@pytest.fixture
def register() -> Iterator[Any]:
    """Registers solvers of `Pick` for one test."""
    PARTITION_SOLVERS.names()
    known = dict(PARTITION_SOLVERS._entries)

    def add(name: str, run: Any, *, turn: int = 0, share: float = 1.0) -> None:
        PARTITION_SOLVERS.register(name, PartitionSolver(Pick, run, turn, lambda _: share))

    yield add
    PARTITION_SOLVERS._entries.clear()
    PARTITION_SOLVERS._entries.update(known)


def answers(decision: int | None, objective: float, bound: float, calls: list[Any] | None = None) -> Any:
    """A solver that always says the same."""

    def run(search: SearchState) -> None:
        if calls is not None:
            calls.append((search.solver, search.decision, search.deadline.left_s))
        search.offer(decision, objective)
        search.prove(bound)

    return run


def small(**changes: Any) -> MaxLoadProblem:
    contiguous = changes.pop("contiguous", True)
    return max_load_problem(operator_graph_from(operator_graph(**changes), "small"), contiguous=contiguous)


def test_every_registered_solver_is_in_the_table() -> None:
    found = {name: entry.takes.__name__ for name, entry in PARTITION_SOLVERS.items()}
    assert found == SOLVERS


def test_every_solver_is_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "partition.md").read_text()
    assert [name for name in SOLVERS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_small_graph_is_cut_in_the_middle(contiguous: bool) -> None:
    result = solve_partition(small(contiguous=contiguous), time_limit_s=20)
    assert result.objective == 5.5
    assert result.proven
    assert result.decision == MaxLoadDecision((0, 0, 1, 1))


@pytest.mark.parametrize("solver", [name for name, kind in SOLVERS.items() if kind == "MaxLoadProblem"])
def test_every_solver_of_a_family_can_be_named(solver: str) -> None:
    result = solve_partition(
        small(contiguous=False), solver=solver, time_limit_s=20, start=MaxLoadDecision((0, 1, 1, 1))
    )
    assert result.objective == 5.5
    assert result.bound <= 5.5


def test_a_solver_that_does_not_take_the_problem_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="does not take a MaxLoadProblem"):
        solve_partition(small(), solver="piper-dp")
    with pytest.raises(UsageError, match="unknown partition solver 'max-lode'"):
        solve_partition(small(), solver="max-lode")
    with pytest.raises(UsageError, match="no solver takes a Pick"):
        solve_partition(Pick((1.0,)))
    with pytest.raises(UsageError, match="leaves no time"):
        solve_partition(small(), time_limit_s=0)


def test_work_is_measured_out_whatever_the_turns_before_took(register: Any) -> None:
    given: list[float] = []

    def slow(search: SearchState) -> None:
        time.sleep(0.1)

    def counting(search: SearchState) -> None:
        assert search.deadline.left_s < search.work_s
        given.append(search.work_s)
        search.offer(1, 1.0)

    register("pick-a", slow)
    register("pick-b", counting, turn=1)
    assert solve_partition(Pick((2.0, 1.0)), time_limit_s=8.0).decision == 1
    assert given == [8.0]


def test_solvers_take_turns_each_from_the_best_so_far(register: Any) -> None:
    calls: list[Any] = []
    register("pick-engine", answers(3, 1.0, 1.0, calls), turn=2)
    register("pick-moves", answers(1, 3.0, 0.0, calls), share=0.25)
    register("pick-dp", answers(2, 2.0, 0.5, calls), turn=1, share=0.6)
    register("pick-other", answers(0, 4.0, 0.0, calls), turn=1, share=0.0)
    result = solve_partition(Pick((4.0, 3.0, 2.0, 1.0)), time_limit_s=100)
    assert [(name, start) for name, start, _ in calls] == [("pick-moves", 0), ("pick-dp", 1), ("pick-engine", 2)]
    assert [round(limit) for _, _, limit in calls] == [25, 60, 100]
    assert (result.decision, result.objective, result.bound, result.solver) == (3, 1.0, 1.0, "pick-engine")
    assert result.proven


def test_all_stop_as_soon_as_the_bound_meets_the_plan(register: Any) -> None:
    calls: list[Any] = []
    register("pick-a", answers(1, 3.0, 3.0, calls))
    register("pick-b", answers(1, 3.0, 3.0, calls))
    assert solve_partition(Pick((4.0, 3.0))).proven
    assert [name for name, *_ in calls] == ["pick-a"]


def test_a_trivial_plan_is_the_answer_when_no_solver_has_a_better_one(register: Any) -> None:
    register("pick-dp", answers(None, math.inf, 1.0))
    result = solve_partition(Pick((4.0,)))
    assert (result.decision, result.solver, result.bound) == (0, "trivial plan: the first", 1.0)


def test_a_start_that_breaks_a_limit_is_left_aside(register: Any) -> None:
    register("pick-dp", answers(0, 2.0, 2.0))
    result = solve_partition(Pick((2.0, 9.0), limit=5.0), start=1, solver="pick-dp")
    assert result.decision == 0


@pytest.mark.parametrize(
    ("decision", "objective", "bound", "fault"),
    [
        (1, 9.0, 0.0, "its plan breaks a limit: 9.0 is over 5.0"),
        (2, 2.0, 0.0, "says 2.0, the judge says 3.0"),
        (0, 4.0, 4.5, "proves a bound of 4.5, yet a plan has 4.0"),
        (0, 4.0, math.nan, "its bound is not a number"),
    ],
)
def test_a_solver_that_breaks_its_word_is_refused(
    register: Any, decision: int, objective: float, bound: float, fault: str
) -> None:
    register("pick-broken", answers(decision, objective, bound))
    for solver in ("auto", "pick-broken"):
        with pytest.raises(RuntimeError, match=fault):
            solve_partition(Pick((4.0, 9.0, 3.0), limit=5.0), solver=solver)


def test_progress_tells_of_the_best_plan_and_bound_of_all(register: Any) -> None:
    register("pick-a", answers(1, 3.0, 1.0))
    register("pick-b", answers(0, 4.0, 2.0))
    seen: list[tuple[str, float, float]] = []
    solve_partition(Pick((4.0, 3.0)), progress=lambda *event: seen.append(event))
    assert seen[0] == ("trivial plan: the first", 4.0, 0.0)
    assert seen[-1] == ("pick-b", 3.0, 2.0)
    assert all(b[1] <= a[1] and b[2] >= a[2] for a, b in itertools.pairwise(seen))


def test_infeasible_says_how_much_memory_would_do() -> None:
    """Three accelerators hold the 400 bytes of four nodes only two by two."""
    problem = small(maxSizePerFPGA=90, maxCPUs=0)
    with pytest.raises(InfeasibleError, match="no plan keeps all limits") as caught:
        solve_partition(problem)
    assert "90 B a device is too little memory: 2" in str(caught.value)


def test_nothing_found_in_time_is_not_called_infeasible(register: Any) -> None:
    register("pick-dp", answers(None, math.inf, 0.0))
    with pytest.raises(InfeasibleError, match="no plan was found within 1 s, and none was shown not to exist"):
        solve_partition(Pick((9.0,), limit=5.0), time_limit_s=1)


def test_two_solves_are_alike() -> None:
    for contiguous in (True, False):
        assert solve_partition(small(contiguous=contiguous)) == solve_partition(small(contiguous=contiguous))


def test_solvers_are_found_by_the_problems_type() -> None:
    assert sorted(solvers_for(small())) == [name for name, kind in SOLVERS.items() if kind == "MaxLoadProblem"]

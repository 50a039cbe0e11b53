"""Every max-load solver against enumeration through the judge, and the bounds and reductions they rest on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from planner.graph import enumerate_ideals
from planner.published.problems import MaxLoadDecision, MaxLoadProblem
from planner.published.solvers import Result, max_load_ideals, search_partition
from planner.published.solvers._max_load_form import (
    fluid_bound,
    form_of,
    pigeonhole_bound,
    reduce_form,
    simple_bound,
)
from planner.published.solvers.max_load_ideals import best_chain
from tests.oracles.partitions import by_force
from tests.published.partition.checks import by_cp_sat, by_highs, by_ideals, by_pairs
from tests.published.partition.max_load_instances import problem, problems

LIMIT_S = 20.0


def best(problem: MaxLoadProblem) -> float:
    return by_force(problem).objective


def check(problem: MaxLoadProblem, found: Result, optimum: float, *, exact: bool, tolerance: float = 1e-9) -> None:
    slack = tolerance * max(1.0, optimum if math.isfinite(optimum) else 1.0)
    assert found.bound <= optimum + slack
    if found.decision is not None:
        verdict = problem.judge(found.decision)
        assert verdict.feasible
        assert verdict.objective == found.objective >= optimum - slack
    if exact:
        assert found.proven
        assert found.objective <= optimum + slack
        assert (found.decision is None) == math.isinf(optimum)


@given(problems())
@settings(deadline=None, max_examples=60)
def test_ideals_find_the_best_chain(problem: MaxLoadProblem) -> None:
    found = by_ideals(problem, time_limit_s=LIMIT_S)
    check(problem, found, best(problem), exact=problem.contiguous and bool(form_of(problem).ordered.all()))


@given(problems())
@settings(deadline=None, max_examples=60)
def test_cp_sat_finds_the_best_plan(problem: MaxLoadProblem) -> None:
    check(problem, by_cp_sat(problem, time_limit_s=LIMIT_S), best(problem), exact=True)


@given(problems())
@settings(deadline=None, max_examples=30)
def test_highs_proves_a_bound(problem: MaxLoadProblem) -> None:
    found = by_highs(problem, time_limit_s=LIMIT_S)
    check(problem, found, best(problem), exact=False)
    assert problem.contiguous or found.bound >= simple_bound(form_of(problem)) * (1 - 1e-9)


@given(problems())
@settings(deadline=None, max_examples=30)
def test_the_front_finds_the_best_plan(problem: MaxLoadProblem) -> None:
    check(problem, search_partition(problem, time_limit_s=LIMIT_S), best(problem), exact=True)


@given(problems())
@settings(deadline=None, max_examples=30)
def test_devices_divided_anew_are_divided_best(problem: MaxLoadProblem) -> None:
    """Of two or three devices the small problem is the whole one, so that the answer is the best plan."""
    free = replace(problem, contiguous=False)
    plans = [plan for _, plan in free.trivial() if free.judge(plan).feasible]
    for plan in plans[-1:]:
        found = by_pairs(free, start=plan, time_limit_s=LIMIT_S)
        verdict, before = free.judge(found.decision), free.judge(plan).objective
        assert "out_of_time" not in found.statistics
        assert verdict.feasible
        assert verdict.objective <= before
        if free.devices == 2 or (free.devices == 3 and verdict.objective < before):
            assert verdict.objective == pytest.approx(best(free), rel=1e-9)


def test_devices_divided_anew_by_hand() -> None:
    # 9 + 3 against 2 + 2; evened out 9 | 3 + 2 + 2. No single move helps the third device, which holds 8.
    given = problem([9.0, 3.0, 2.0, 2.0, 8.0], [], [0.0] * 5, accelerators=3, contiguous=False)
    start = MaxLoadDecision((0, 0, 1, 1, 2))
    assert by_pairs(given, start=start, time_limit_s=LIMIT_S).decision == MaxLoadDecision((0, 1, 1, 1, 2))
    # Parted, 0 and 1 cost the incumbent's load, so that they count as one; the plan is mended before all else.
    torn = problem([0.0, 1.0], [(0, 1)], [1.0, 0.0], contiguous=False)
    assert by_pairs(torn, start=MaxLoadDecision((0, 1)), time_limit_s=LIMIT_S).objective == 1.0
    stopped = by_pairs(given, start=start, time_limit_s=1e-9)
    assert stopped.decision == start


@given(problems(most_nodes=5))
@settings(deadline=None, max_examples=40)
def test_reductions_keep_a_best_plan(problem: MaxLoadProblem) -> None:
    optimum = best(problem)
    form = reduce_form(form_of(problem), optimum * (1 + 1e-6) + 1e-6)
    devices = problem.devices
    least = min(
        (
            v.objective
            for code in range(devices**form.groups)
            if (v := problem.judge(form.decision(code // devices**g % devices for g in range(form.groups)))).feasible
        ),
        default=math.inf,
    )
    assert least == pytest.approx(optimum, rel=1e-12)


@given(problems(most_nodes=5))
@settings(deadline=None, max_examples=40)
def test_simple_bounds_hold(problem: MaxLoadProblem) -> None:
    assert simple_bound(form_of(problem)) <= best(problem) * (1 + 1e-9) + 1e-9


def test_fluid_bound_gives_cpus_what_suits_them() -> None:
    # Two accelerators and a CPU for which node 0 is as quick: it takes 6 of the 12 ms, 3 remain for each accelerator;
    # evened out by sharing node 0, (12 - x) / 2 = x at x = 4.
    given = problem([6.0, 3.0, 3.0], [], [0.0] * 3, cpus=1, cpu_ms=[6.0, 30.0, 30.0])
    assert fluid_bound(form_of(given)) == pytest.approx(4.0)
    assert fluid_bound(form_of(problem([6.0, 3.0, 3.0], [], [0.0] * 3))) == 6.0


def test_pigeonholes() -> None:
    # Five like groups on two accelerators: one holds three.
    assert pigeonhole_bound(form_of(problem([2.0] * 5, [], [0.0] * 5))) == pytest.approx(6.0)
    # A CPU that may take one of them below 6 ms leaves two for each.
    assert pigeonhole_bound(form_of(problem([2.0] * 5, [], [0.0] * 5, cpus=1, cpu_ms=[5.0] * 5))) == pytest.approx(5.0)


def test_a_light_group_follows_its_dear_neighbour() -> None:
    # 1 has no work and costs 5 towards 0 but only 1 towards 2.
    given = problem([1.0, 0.0, 1.0], [(0, 1), (1, 2)], [5.0, 1.0, 0.0], contiguous=False)
    assert reduce_form(form_of(given)).group_of.tolist() == [0, 0, 1]


def test_groups_too_dear_to_part_are_merged_below_an_incumbent() -> None:
    # Parting 0 and 1 costs each 3 + 6; no group is light enough to follow another.
    given = problem(
        [3.0, 3.0, 2.0, 2.0, 2.0, 2.0], [(3, 0), (4, 0), (0, 1), (2, 1), (5, 1)], [6.0, 0.0, 1.8, 1.8, 1.8, 1.8]
    )
    assert reduce_form(form_of(given), 9.5).groups == 6
    assert reduce_form(form_of(given), 9.0).group_of.tolist() == [0, 0, 1, 2, 3, 4]


def test_a_family_without_the_best_chain_gives_another() -> None:
    given = problem([2.0, 2.0, 2.0, 2.0], [(0, 1), (2, 3)], [0.0] * 4)
    form = form_of(given)
    ideals = enumerate_ideals(4, form.arcs, 100)
    assert ideals is not None
    assert best_chain(form, ideals, math.inf)[1] == 4.0
    ends = ideals[[i for i in range(len(ideals)) if int(ideals[i, 0]) in (0, 0b1, 0b1111)]]
    assert best_chain(form, ends, math.inf)[1] == 6.0
    assert best_chain(form, ideals, 4.0) == (None, math.inf)


def test_a_cap_on_ideals_leaves_the_proof_to_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 9
    given = problem([1.0 + i / 10 for i in range(n)], [(0, i) for i in range(1, n)], [0.5] * n, accelerators=3)
    monkeypatch.setattr(max_load_ideals, "MOST_IDEALS", 10)
    capped = search_partition(given, time_limit_s=LIMIT_S)
    monkeypatch.undo()
    free = by_ideals(given, time_limit_s=LIMIT_S)
    assert not any(name.endswith("ideals") for name in capped.statistics)
    assert free.statistics["ideals"] == 2 ** (n - 1) + 1
    assert capped.proven
    assert free.proven
    assert capped.objective == pytest.approx(free.objective, rel=1e-9)


def test_loose_nodes_are_placed_and_proven() -> None:
    # Backward node 3 sums what 1 and 2 send it and has no twin: with 2 it costs 3 + 1, with 1 it costs 3 + 2.
    given = problem(
        [5.0, 4.0, 4.0, 1.0], [(0, 1), (1, 2), (1, 3), (2, 3)], [0.0, 1.0, 2.0, 0.0],
        backward=[False, False, False, True], accelerators=2,
    )  # fmt: skip
    result = search_partition(given, time_limit_s=LIMIT_S)
    assert result.proven
    # 0 and 1 first: 9 + 1; 2 and 3: 5 + 1. Or 0 alone: 5; the rest: 9.
    assert result.objective == 9.0
    assert result.objective == best(given)


def test_no_plan_is_proven() -> None:
    full = problem([1.0, 1.0], [], [0.0, 0.0], size_bytes=[5.0, 5.0], memory_bytes=4.0)
    for solve in (by_cp_sat, search_partition):
        found = solve(full, time_limit_s=LIMIT_S)
        assert found.decision is None
        assert found.bound == math.inf


def test_plans_that_presolve_loses_are_found() -> None:
    # OR-tools 9.15 calls this one infeasible after presolve. All on the accelerator take 3, as does 1 on a CPU.
    given = problem([0.0, 1.0, 2.0], [], [0.0] * 3, accelerators=1, cpus=2, cpu_ms=[0.0, 3.0, 6.0])
    found = by_cp_sat(given, time_limit_s=LIMIT_S)
    assert (found.objective, found.bound) == (3.0, 3.0)


def test_not_contiguous_is_never_worse() -> None:
    # Alternating heavy and light nodes of a line: stages are stuck with neighbours.
    given = problem([5.0, 1.0, 5.0, 1.0, 1.0, 5.0], [(i, i + 1) for i in range(5)], [0.01] * 6, accelerators=3)
    chain = search_partition(given, time_limit_s=LIMIT_S)
    free = search_partition(
        problem([5.0, 1.0, 5.0, 1.0, 1.0, 5.0], [(i, i + 1) for i in range(5)], [0.01] * 6, accelerators=3,
                contiguous=False), time_limit_s=LIMIT_S,
    )  # fmt: skip
    assert chain.proven
    assert free.proven
    assert free.objective <= chain.objective


def test_two_runs_give_the_same() -> None:
    given = problem(
        [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], [(0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)],
        [0.5, 0.25, 1.0, 0.5, 0.25, 1.0, 0.5, 0.0], accelerators=3, cpus=1, contiguous=False,
    )  # fmt: skip
    first, second = (search_partition(given, time_limit_s=LIMIT_S) for _ in range(2))
    assert first == second
    assert first.proven


def test_progress_is_monotone() -> None:
    given = problem([3.0, 1.0, 4.0, 1.0, 5.0, 9.0], [(i, i + 1) for i in range(5)], [0.5] * 6, contiguous=False)
    seen: list[tuple[float, float]] = []
    search_partition(given, time_limit_s=LIMIT_S, progress=lambda _, load, bound: seen.append((load, bound)))
    assert seen
    assert all(bound <= load * (1 + 1e-9) for load, bound in seen)

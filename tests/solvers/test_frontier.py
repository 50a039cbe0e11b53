"""Cheap bounds: never above what enumeration finds, tight where they should be, and good enough to spare solving."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware import Cluster
from planner.solvers import Judge, Solution, chain_dp, critical_path, outer, search
from planner.solvers._frontier import Frontier, ProblemGroup, SearchTask
from planner.solvers._objectives import ClosedForm, LongestChain, TimeObjective
from planner.space import BlockCosts, Configuration, Evaluation, Formulator, Job, evaluate, played_s
from planner.space.problem import StageProblem
from planner.space.terms import TermCache
from tests.oracles import stages as brute_force
from tests.space.instances import chain, cluster, random_instance


def frontier(costs: BlockCosts, machine: Cluster, job: Job, objective: TimeObjective) -> Frontier:
    return Frontier(Formulator(machine, job), machine, job, objective, [costs])


OBJECTIVES = pytest.mark.parametrize("objective", [ClosedForm(), LongestChain()], ids=["closed form", "longest chain"])


@OBJECTIVES
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    zero=st.sampled_from([0, 1, 2, 3]),
    copies=st.integers(1, 3),
    overlap=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_what_enumeration_finds_is_never_ruled_out(
    objective: TimeObjective, seed: int, schedule: str, zero: int, copies: int, overlap: float
) -> None:
    costs, machine, job = random_instance(seed, others=True)
    job = dataclasses.replace(job, overlap=overlap)
    formulator = Formulator(machine, job)
    if copies > formulator.devices(costs.ranks) or job.global_batch % (copies * costs.micro_batch):
        copies = 1
    problem = formulator.problem(costs, copies=copies, schedule=schedule, zero=zero)
    measure = {"measure": played_s} if isinstance(objective, LongestChain) else {}
    cache = TermCache()
    exact = brute_force.solve(problem, lambda d: evaluate(costs, machine, job, d, cache=cache), keep=1, **measure)
    task = SearchTask(0.0, costs.micro_batch, copies, problem.slice_devices, schedule, zero)
    test = frontier(costs, machine, job, objective).feasibility(task, costs)
    if exact.decisions:
        assert test.possible(exact.bound_s * (1 + 1e-12))
        assert test.possible(math.inf)


@OBJECTIVES
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_tightened_bounds_stay_below_the_best_of_their_problems(objective: TimeObjective, seed: int) -> None:
    costs, machine, job = random_instance(seed)
    left = frontier(costs, machine, job, objective)
    formulator = Formulator(machine, job)

    def bound_s(problem: StageProblem) -> float:
        def judge(decision: Configuration) -> Evaluation:
            return evaluate(costs, machine, job, decision)

        if isinstance(objective, LongestChain):
            return critical_path.solve_bounded(critical_path.bounded(problem, math.inf), judge, keep=1).bound_s
        return chain_dp.solve(problem, judge, cutoff_s=math.inf, keep=1).bound_s

    while (group := left.pop(1e6)) is not None:
        assert isinstance(group, ProblemGroup)
        for task in group.tasks:
            problem = formulator.problem(
                costs, copies=task.copies, schedule=task.schedule, zero=task.zero, slice_devices=task.slice_devices
            )
            assert task.bound_s <= bound_s(problem) * (1 + 1e-9)


@pytest.mark.parametrize(("objective", "too_short_s"), [(ClosedForm(), 11.9), (LongestChain(), 10.9)])
def test_recomputation_that_memory_forces_and_uneven_replicas_are_in_the_bound(
    objective: TimeObjective, too_short_s: float
) -> None:
    # Two devices of three may be used by two micro-batches; activations fit only when recomputed: 1 + 2 + 1 each.
    # A chain of waits might be one of two stages: 1 + 2 before the cut, then 2 x (1 + 2 + 1) in two replicas.
    costs = chain([1.0] * 3, saved=100.0, checkpoint=1.0)
    machine = cluster((3,), (1e12,), memory_bytes=(150,))
    job = Job(global_batch=2, precision="fp32", micro_batches=(1,), max_stages=1)
    left = frontier(costs, machine, job, objective)
    test = left.feasibility(SearchTask(0.0, 1, 1, 3, "1f1b", 0), costs)
    assert test.possible(12.0)
    assert not test.possible(too_short_s)
    assert not left.feasibility(
        SearchTask(0.0, 1, 1, 3, "1f1b", 0), dataclasses.replace(costs, checkpoint_bytes=costs.saved_bytes)
    ).possible(math.inf)


@OBJECTIVES
def test_synchronisation_is_in_the_bound(objective: TimeObjective) -> None:
    # One stage on four devices: 400 bytes of gradients, 2 x 3/4 of them at 50 bytes/s, and an update of 1 s.
    costs = chain([1.0], elements=100.0, update_s=1.0)
    machine, job = cluster((4,), (50.0,)), Job(global_batch=8, precision="fp32")
    test = frontier(costs, machine, job, objective).feasibility(SearchTask(0.0, 1, 1, 4, "1f1b", 0), costs)
    assert test.possible(6.0 + 12.0 + 1.0)
    assert not test.possible(18.9)


@OBJECTIVES
def test_exchanges_in_every_pass_are_in_the_bound(objective: TimeObjective) -> None:
    # One stage on four devices with ZeRO-3: 2 micro-batches of 1 + 2 s, for each of which 3/4 of 400 bytes are gathered
    # twice and scattered once at 50 bytes/s, and a quarter of an update of 1 s.
    costs = chain([1.0], elements=100.0, update_s=1.0)
    machine = cluster((4,), (50.0,))
    job = Job(global_batch=8, precision="fp32", data_parallel=(4,), overlap=0.0)
    task = SearchTask(0.0, 1, 1, 4, "1f1b", 3)
    exact_s = 2 * (3.0 + 3 * 6.0) + 0.25
    assert frontier(costs, machine, job, objective).feasibility(task, costs).possible(exact_s)
    assert not frontier(costs, machine, job, objective).feasibility(task, costs).possible(exact_s - 0.1)
    hidden = dataclasses.replace(job, overlap=1.0)  # 1 s of 6, and 2 s of 12
    hidden_s = 2 * (6.0 + 12.0) + 0.25
    assert frontier(costs, machine, hidden, objective).feasibility(task, costs).possible(hidden_s)
    assert not frontier(costs, machine, hidden, objective).feasibility(task, costs).possible(hidden_s - 0.1)


def test_a_problem_is_split_only_as_far_as_its_bound_matters() -> None:
    costs = chain([1.0, 2.0, 1.5, 1.0], elements=10.0, boundary=1.0)
    machine, job = cluster((4,), (50.0,)), Job(global_batch=8, precision="fp32", uniform=True)
    problem = Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=1)
    known = critical_path.bounded(problem, math.inf)
    first_s = known.bound_s
    assert known.lowest(math.inf, enough_s=first_s * (1 - 1e-9)) is None
    assert [part.path for part in known.parts] == [()]
    part = known.lowest(math.inf)
    assert part is not None
    assert part.parts == ()
    assert len(np.unique(part.problem.replicas)) == 1
    assert first_s <= known.bound_s == part.relaxation.bound_s
    assert known.lowest(known.bound_s) is None


@pytest.mark.parametrize("batch", [720, 5040])
def test_batches_of_many_divisors_are_mostly_ruled_out_unsolved(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    solved, looked_at = list[critical_path.BoundedProblem](), list[int]()

    def counted(
        known: critical_path.BoundedProblem, judge: Judge, *, keep: int, cutoff_s: float = math.inf
    ) -> Solution:
        solved.append(known)
        return critical_path.solve_bounded(known, judge, keep=keep, cutoff_s=cutoff_s)

    monkeypatch.setattr(outer, "solve_bounded", counted)

    def costs_for(size: int) -> BlockCosts:
        work = [(0.3 + 0.7 * size) * (1 + (k % 3) / 10) for k in range(12)]
        return chain(
            work, micro_batch=size, elements=10.0, saved=40.0 * size, checkpoint=2.0 * size, boundary=2.0 * size
        )

    machine = cluster((8, 2), (1e4, 1e3), memory_bytes=(12 * 160,))
    job = Job(global_batch=batch, precision="fp32", schedules=("1f1b", "gpipe"))
    answer = search(costs_for, machine, job, progress=lambda done, *_: looked_at.append(done))
    assert answer.certificate.proven_optimal
    assert len(solved) < looked_at[-1] / 5

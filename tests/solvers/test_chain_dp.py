"""The chain DP against enumeration through the judge, and properties that any optimum has."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from planner.hardware import Cluster
from planner.solvers import Solution, chain_dp
from planner.solvers._objectives import ClosedForm, LongestChain
from planner.solvers._relaxation import Relaxation, relax
from planner.solvers._stages import stage_prices
from planner.solvers.critical_path import critical_s
from planner.solvers.diagnosis import least_memory_factor
from planner.space import BlockCosts, Formulator, Job, StageProblem, evaluate
from planner.space.configuration import Structure
from planner.space.problem import alike, joined, least_of
from planner.space.recompute_choices import offload_choices
from planner.space.terms import TermCache
from tests.oracles import stages as brute_force
from tests.space.instances import chain, cluster, random_instance, random_modules, shared_instance

SOLVERS = {"brute_force": brute_force.solve, "chain_dp": chain_dp.solve}


def solve(
    name: str, problem: StageProblem, costs: BlockCosts, machine: Cluster, job: Job, **options: float
) -> Solution:
    cutoff_s = options.get("cutoff_s", math.inf)
    cache = TermCache()
    return SOLVERS[name](problem, lambda d: evaluate(costs, machine, job, d, cache=cache), cutoff_s=cutoff_s, keep=8)


@pytest.mark.parametrize("seed", range(4))
def test_terms_that_are_kept_change_no_verdict(seed: int) -> None:
    costs, machine, job = random_instance(seed)
    problem, cache = Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=1), TermCache()
    for decision in brute_force.decisions(problem):
        assert evaluate(costs, machine, job, decision, cache=cache) == evaluate(costs, machine, job, decision)


def optimum(costs: BlockCosts, machine: Cluster, job: Job, **options: int) -> float:
    arguments = {"copies": 1, "schedule": "1f1b", "zero": 0, **options}
    solution = solve("chain_dp", Formulator(machine, job).problem(costs, **arguments), costs, machine, job)  # type: ignore[arg-type]
    return solution.decisions[0][1].iteration_s if solution.decisions else math.inf


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from([0, 1, 2, 3]), st.integers(1, 3))
@example(21723, "1f1b", 0, 2)  # every place has both device types, each of which is faster in some blocks
def test_equals_brute_force_through_the_judge(seed: int, schedule: str, zero: int, copies: int) -> None:
    costs, machine, job = random_instance(seed, zero=(0, 1, 2, 3))
    formulator = Formulator(machine, job)
    if copies > formulator.devices(costs.ranks) or job.global_batch % (copies * costs.micro_batch):
        copies = 1
    problem = formulator.problem(costs, copies=copies, schedule=schedule, zero=zero)
    exact = solve("brute_force", problem, costs, machine, job)
    found = solve("chain_dp", problem, costs, machine, job)
    assert bool(found.decisions) == bool(exact.decisions)
    if not exact.decisions:
        assert math.isinf(found.bound_s)
        return
    best_s = exact.decisions[0][1].iteration_s
    assert found.decisions[0][1].iteration_s == pytest.approx(best_s, rel=1e-9)
    assert found.bound_s == pytest.approx(best_s, rel=1e-9)
    assert len({decision for decision, _ in found.decisions}) == len(found.decisions)
    for decision, evaluation in found.decisions:
        assert evaluation == evaluate(costs, machine, job, decision)
        assert evaluation.feasible
        assert evaluation.iteration_s >= found.bound_s * (1 - 1e-9)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from([0, 1, 2, 3]), st.integers(1, 3))
def test_two_ranks_a_replica_and_the_users_limits_equal_brute_force(
    seed: int, schedule: str, zero: int, copies: int
) -> None:
    costs, machine, job = shared_instance(seed)
    formulator = Formulator(machine, job)
    if copies > formulator.devices(costs.ranks) or job.global_batch % (copies * costs.micro_batch):
        copies = 1
    if not formulator.replica_options(job.global_batch // costs.micro_batch // copies, copies, 9):
        return
    problem = formulator.problem(costs, copies=copies, schedule=schedule, zero=zero)
    exact = solve("brute_force", problem, costs, machine, job)
    found = solve("chain_dp", problem, costs, machine, job)
    assert bool(found.decisions) == bool(exact.decisions)
    if exact.decisions:
        best_s = exact.decisions[0][1].iteration_s
        assert found.decisions[0][1].iteration_s == pytest.approx(best_s, rel=1e-9)
        assert found.bound_s == pytest.approx(best_s, rel=1e-9)
        assert all(stage.ranks == 2 and stage.sharding == 3 for stage in found.decisions[0][0].stages)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from([0, 1, 2, 3]), st.booleans())
def test_stages_that_keep_activations_in_hosts_equal_brute_force(
    seed: int, schedule: str, zero: int, alike: bool
) -> None:
    costs, machine, job = random_instance(seed, zero=(0, 1, 2, 3))
    rng = np.random.default_rng(seed + 3)
    job = dataclasses.replace(job, structure=Structure(alike=alike, offloads=("layer_input", "c", "d")))
    options = {"copies": 1, "schedule": schedule, "zero": zero}
    for choice in offload_choices(job, costs):
        assert choice.offload in ((("layer_input",), ("c",)) if costs.selective else (("layer_input",),))
        # Memory from just enough for what no other way fits in, to a seventh more.
        least = least_memory_factor(Formulator(machine, job).offloading(choice).problem(costs, **options))
        tight = with_hosts(machine, rng.choice([10.0, 100.0, 1e9], len(machine.devices)), least * rng.uniform(1, 1.15))
        problem = Formulator(tight, job).offloading(choice).problem(costs, **options)
        exact, found = (solve(name, problem, costs, tight, job) for name in ("brute_force", "chain_dp"))
        assert bool(found.decisions) == bool(exact.decisions)
        if exact.decisions:
            best_s = exact.decisions[0][1].iteration_s
            assert found.decisions[0][1].iteration_s == pytest.approx(best_s, rel=1e-9)
            assert found.bound_s == pytest.approx(best_s, rel=1e-9)


def with_hosts(machine: Cluster, rates: np.ndarray, memory_factor: float) -> Cluster:
    """The machine with so many times the memory, and so many bytes a second from each device type to its host."""
    sizes = [math.ceil(device.memory_bytes * memory_factor) for device in machine.devices]
    each = zip(machine.devices, rates.tolist(), sizes, strict=True)
    devices = (dataclasses.replace(d, host_byte_per_s=rate, memory_bytes=size) for d, rate, size in each)
    return dataclasses.replace(machine, devices=tuple(devices))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from([0, 1, 2, 3]))
def test_every_stage_picks_its_own_sharding_as_brute_force_does(seed: int, schedule: str, zero: int) -> None:
    fast, machine, job = shared_instance(seed)
    assume(fast.forward_s.shape[1] < 5)  # with two shardings a stage, enumeration of more takes half a minute
    rng = np.random.default_rng(seed + 2)
    lean = dataclasses.replace(
        fast,
        sharding=4,
        forward_s=fast.forward_s * rng.uniform(0.6, 1.5, fast.forward_s.shape),
        saved_bytes=fast.saved_bytes * 0.4,
        parameter_elements=fast.parameter_elements * rng.choice([1.0, 0.5]),
        step_s=None,
        ties=(),
    )
    shelf = [dataclasses.replace(fast, step_s=None, ties=()), lean]
    job = dataclasses.replace(job, data_parallel=())
    formulator = Formulator(machine, job)
    assert alike(shelf) == [tuple(shelf)]
    problem = joined([formulator.problem(c, copies=1, schedule=schedule, zero=zero) for c in shelf])
    by_number, cache = {c.sharding: c for c in shelf}, TermCache()
    judge = lambda d: evaluate(by_number, machine, job, d, cache=cache)  # noqa: E731
    exact = brute_force.solve(problem, judge, cutoff_s=math.inf, keep=8)
    found = chain_dp.solve(problem, judge, cutoff_s=math.inf, keep=8)
    assert bool(found.decisions) == bool(exact.decisions)
    if exact.decisions:
        assert found.decisions[0][1].iteration_s == pytest.approx(exact.decisions[0][1].iteration_s, rel=1e-9)
        assert least_of(shelf).forward_s.sum() <= fast.forward_s.sum()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2))
def test_weights_shared_by_any_blocks_keep_the_bound_true(seed: int, copies: int) -> None:
    costs, machine, job = random_instance(seed, others=True)
    formulator = Formulator(machine, job)
    if copies > formulator.devices(costs.ranks) or job.global_batch % (copies * costs.micro_batch):
        copies = 1
    problem = formulator.problem(costs, copies=copies, schedule="1f1b", zero=0)
    exact = solve("brute_force", problem, costs, machine, job)
    found = solve("chain_dp", problem, costs, machine, job)
    assert bool(found.decisions) == bool(exact.decisions)
    if exact.decisions:
        best_s = exact.decisions[0][1].iteration_s
        assert found.bound_s <= best_s * (1 + 1e-9)
        assert found.decisions[0][1].iteration_s >= best_s * (1 - 1e-9)
        if not problem.tied_elsewhere:
            assert found.bound_s == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 1.5))
def test_a_cutoff_never_hides_a_better_decision(seed: int, factor: float) -> None:
    costs, machine, job = random_instance(seed)
    problem = Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=0)
    free = solve("chain_dp", problem, costs, machine, job)
    best_s = free.decisions[0][1].iteration_s if free.decisions else 1.0
    cut = solve("chain_dp", problem, costs, machine, job, cutoff_s=best_s * factor)
    if free.decisions and factor > 1 + 1e-6:
        assert cut.decisions[0][1].iteration_s == pytest.approx(best_s, rel=1e-9)
    elif factor < 1 - 1e-6:
        assert not cut.decisions
        assert cut.bound_s >= best_s * factor * (1 - 1e-9)
        assert not free.decisions or cut.bound_s <= best_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_more_memory_is_never_slower(seed: int) -> None:
    costs, machine, job = random_instance(seed)
    devices = tuple(dataclasses.replace(d, memory_bytes=2 * d.memory_bytes) for d in machine.devices)
    larger = dataclasses.replace(machine, devices=devices)
    assert optimum(costs, larger, job) <= optimum(costs, machine, job) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 3.0, 1000.0]))
@example(300, 0.01)  # modules that are repeated
def test_slower_in_all_things_is_slower_by_that_factor(seed: int, factor: float) -> None:
    costs, machine, job = random_instance(seed)
    times = {name: getattr(costs, name) * factor for name in ("forward_s", "backward_s", "update_s")}
    slower = dataclasses.replace(costs, **times)
    if slower.selective is not None:  # the seconds of what is repeated are parts of its forward
        slower = dataclasses.replace(slower, selective=random_modules(seed, slower))
    levels = tuple(
        dataclasses.replace(
            level,
            byte_per_s=level.byte_per_s / factor,
            device_byte_per_s=level.device_byte_per_s / factor,
            latency_s=level.latency_s * factor,
        )
        for level in machine.levels
    )
    scaled = optimum(slower, dataclasses.replace(machine, levels=levels), job)
    assert scaled == pytest.approx(factor * optimum(costs, machine, job), rel=1e-9)


def relaxed(costs: BlockCosts, machine: Cluster, job: Job, objective: ClosedForm | LongestChain) -> Relaxation:
    problem = Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=0)
    return relax(problem, stage_prices(problem), objective, math.inf)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.sets(st.integers(1, 4), min_size=1, max_size=2))
def test_bounds_of_certain_numbers_of_stages_are_bounds(seed: int, counts: set[int]) -> None:
    costs, machine, job = random_instance(seed)
    limited = dataclasses.replace(job, pipeline_stages=tuple(sorted(counts)))
    problem = Formulator(machine, limited).problem(costs, copies=1, schedule="1f1b", zero=0)
    decisions = [(d, evaluate(costs, machine, limited, d)) for d in brute_force.decisions(problem)]
    feasible = [(d, e) for d, e in decisions if e.feasible]
    for objective, time_of in ((ClosedForm(), lambda _, e: e.iteration_s), (LongestChain(), critical_s)):
        bound_s = relaxed(costs, machine, limited, objective).bound_s
        assert bound_s <= min((time_of(*each) for each in feasible), default=math.inf) * (1 + 1e-9)
        assert bound_s >= relaxed(costs, machine, job, objective).bound_s * (1 - 1e-9)


def test_bound_counts_the_transfers_between_three_stages() -> None:
    # One micro-batch waits 1 s in each direction at every boundary; a single stage on all devices never does.
    costs = chain([1.0] * 8, boundary=1e9)
    machine, job = cluster((4,), (1e9,)), Job(global_batch=16, precision="fp32", micro_batches=(1,))
    waiting = relaxed(costs, machine, dataclasses.replace(job, pipeline_stages=(3,)), ClosedForm())
    assert waiting.delay_s[0, -1, -1] == pytest.approx(8 * 3.0 + 2 * 2.0)
    assert relaxed(costs, machine, job, ClosedForm()).delay_s[0, -1, -1] == pytest.approx(8 * 3.0)


def test_equal_blocks_give_the_textbook_pipeline() -> None:
    # 8 equal blocks on 4 devices, no communication, 16 micro-batches, weights that need 4 stages: (16 + 4 - 1) * 6.
    costs = chain([1.0] * 8, elements=10.0, saved=1.0)
    machine = cluster((4,), (1e9,), memory_bytes=(16 * 20 + 2 * 4,))
    job = Job(global_batch=16, precision="fp32")
    solution = solve(
        "chain_dp", Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=0), costs, machine, job
    )
    decision, evaluation = solution.decisions[0]
    assert [(s.start, s.stop, s.replicas) for s in decision.stages] == [(0, 2, 1), (2, 4, 1), (4, 6, 1), (6, 8, 1)]
    assert evaluation.iteration_s == pytest.approx(19 * 6.0)


def test_recomputes_only_the_stage_that_does_not_fit() -> None:
    # Two stages by weight (no sharding); the first keeps two micro-batches of 40 bytes and has room for one and a half.
    costs = chain([1.0, 1.0], elements=10.0, saved=40.0, checkpoint=5.0)
    machine = cluster((2,), (1e9,), memory_bytes=(160 + 60,))
    job = Job(global_batch=8, precision="fp32")
    solution = solve(
        "chain_dp", Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=0), costs, machine, job
    )
    assert [stage.recompute for stage in solution.decisions[0][0].stages] == [True, False]
    assert solution.decisions[0][1].iteration_s == pytest.approx(4.0 + 3.0 + 7 * 4.0)


def test_sixty_blocks_on_two_nodes_are_solved_and_proven() -> None:
    rng = np.random.default_rng(1)
    costs = chain(rng.uniform(0.5, 1.5, 60), elements=rng.uniform(50, 150, 60).tolist(), saved=40.0, boundary=1.0)
    machine = cluster((8, 2), (1e5, 1e4), latency_s=1e-3, memory_bytes=(16 * 1500,))
    job = Job(global_batch=64, precision="fp32")
    solution = solve(
        "chain_dp", Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=1), costs, machine, job
    )
    assert solution.decisions[0][1].iteration_s == pytest.approx(solution.bound_s, rel=1e-9)
    compute_s = float(costs.forward_s.sum() + costs.backward_s.sum())
    assert 64 * compute_s / 16 <= solution.bound_s <= 64 * compute_s / 16 * 1.5


def test_coarse_fronts_keep_the_bound_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, machine, job = random_instance(7)
    costs = chain(np.random.default_rng(3).uniform(0.5, 1.5, 24), elements=9.0, saved=7.0, boundary=3.0, update_s=0.3)
    machine = cluster((4, 2), (30.0, 9.0), memory_bytes=(1500,))
    job = Job(global_batch=12, precision="fp32")
    problem = Formulator(machine, job).problem(costs, copies=1, schedule="1f1b", zero=0)
    exact = solve("chain_dp", problem, costs, machine, job)
    monkeypatch.setattr(chain_dp, "LABEL_LIMIT", 50)
    coarse = solve("chain_dp", problem, costs, machine, job)
    assert coarse.decisions
    assert coarse.bound_s <= exact.bound_s * (1 + 1e-9)
    assert coarse.decisions[0][1].iteration_s >= exact.decisions[0][1].iteration_s * (1 - 1e-9)

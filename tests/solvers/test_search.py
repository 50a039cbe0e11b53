"""The whole search: best of all micro-batch sizes, copies, schedules and ZeRO stages, with proof and reasons."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.errors import InfeasibleError, JobError
from planner.hardware import Cluster
from planner.solvers import comparable, search
from planner.space import BlockCosts, Configuration, Evaluation, Formulator, Job, evaluate, played_s
from planner.space.configuration import Structure
from planner.space.terms import TermCache
from tests.oracles import stages as brute_force
from tests.space.instances import chain, cluster, random_instance


def by_size(make: Callable[[int], BlockCosts]) -> Callable[[int], BlockCosts]:
    known: dict[int, BlockCosts] = {}

    def costs_for(size: int) -> BlockCosts:
        if size not in known:
            known[size] = make(size)
        return known[size]

    return costs_for


def grown(costs: BlockCosts, size: int) -> BlockCosts:
    """The same chain at another micro-batch size: times grow less than samples, activations as samples do."""
    factor = size / costs.micro_batch
    times = {name: getattr(costs, name) * (0.3 + 0.7 * factor) for name in ("forward_s", "backward_s")}
    kinds = ("saved_bytes", "checkpoint_bytes", "boundary_bytes", "gradient_boundary_bytes", "workspace_bytes")
    return dataclasses.replace(
        costs, micro_batch=size, **times, **{name: getattr(costs, name) * factor for name in kinds}
    )


def enumerated(costs_for: Callable[[int], BlockCosts], machine: Cluster, job: Job) -> float:
    """The least time of all decisions of all problems when they are played, through the judge alone."""
    return _least(costs_for, machine, job, played_s)


def packed(costs_for: Callable[[int], BlockCosts], machine: Cluster, job: Job) -> float:
    """The same where pipelines that leave devices of their slice idle may also stand close together."""

    def least_s(decision: Configuration, verdict: Evaluation) -> float:
        close = dataclasses.replace(decision, slice_devices=0)
        again = evaluate(costs_for(decision.micro_batch), machine, job, close)
        return min(played_s(decision, verdict), played_s(close, again) if again.feasible else math.inf)

    return _least(costs_for, machine, job, least_s)


def _least(
    costs_for: Callable[[int], BlockCosts], machine: Cluster, job: Job, measure: Callable[[Any, Any], float]
) -> float:
    best_s, formulator, caches = math.inf, Formulator(machine, job), defaultdict[int, TermCache](TermCache)
    for size in (b for b in range(1, job.global_batch + 1) if job.global_batch % b == 0):
        costs = costs_for(size)
        for copies in range(1, formulator.devices(costs.ranks) + 1):
            if (job.global_batch // size) % copies:
                continue
            for schedule in job.schedules:
                for zero in job.zero:
                    problem = formulator.problem(costs, copies=copies, schedule=schedule, zero=zero)
                    found = brute_force.solve(
                        problem,
                        lambda d, c=costs: evaluate(c, machine, job, d, cache=caches[c.micro_batch]),
                        keep=1,
                        measure=measure,
                    )
                    best_s = min(best_s, found.bound_s)
    return best_s


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
@example(375)  # a pipeline that stands close together is faster than with idle devices before it
def test_equals_enumeration_of_the_whole_space(seed: int) -> None:
    costs, machine, job = random_instance(seed)
    uniform = dataclasses.replace(machine, device_types=machine.device_types * 0)
    job = dataclasses.replace(job, global_batch=min(job.global_batch, 6))
    costs_for = by_size(lambda size: grown(costs, size))
    exact_s = enumerated(costs_for, uniform, job)
    if math.isinf(exact_s):
        with pytest.raises(InfeasibleError):
            search(costs_for, uniform, job)
        return
    answer = search(costs_for, uniform, job, simulated_s=played_s)
    assert answer.best.simulated_s is not None
    assert answer.certificate.bound_s <= exact_s * (1 + 1e-9)
    assert answer.best.simulated_s <= exact_s / (1 - answer.certificate.gap) * (1 + 1e-9)
    assert answer.best.simulated_s >= packed(costs_for, uniform, job) * (1 - 1e-9)
    assert answer.certificate.proven_optimal == (answer.certificate.gap <= 1e-9)
    for candidate in (answer.best, *answer.runners_up):
        again = evaluate(costs_for(candidate.decision.micro_batch), uniform, job, candidate.decision)
        assert again == candidate.evaluation
        assert again.feasible
        assert played_s(candidate.decision, again) == candidate.simulated_s
        assert candidate.simulated_s >= answer.certificate.bound_s * (1 - 1e-9)


PLAIN = by_size(lambda size: chain([0.1 + size] * 6, micro_batch=size, elements=100.0, saved=50.0 * size, boundary=2.0))


def test_answers_are_the_same_every_time_and_runners_up_differ() -> None:
    machine = cluster((4,), (1e4,), memory_bytes=(16 * 350,))
    first, second = (search(PLAIN, machine, Job(global_batch=16, precision="fp32")) for _ in range(2))
    assert first == second
    decisions = [c.decision for c in (first.best, *first.runners_up)]
    assert len(set(decisions)) == len(decisions) > 1
    times = [c.evaluation.iteration_s for c in (first.best, *first.runners_up)]
    assert times == pytest.approx(sorted(times))


def test_ample_memory_and_fast_links_give_plain_data_parallelism() -> None:
    answer = search(PLAIN, cluster((4,), (1e12,)), Job(global_batch=16, precision="fp32"))
    assert [(s.start, s.stop, s.replicas) for s in answer.best.decision.stages] == [(0, 6, 4)]
    assert (answer.best.decision.copies, answer.best.decision.zero) == (1, 0)


def test_a_search_that_begins_with_a_decision_is_no_slower() -> None:
    machine, job = cluster((4,), (1e4,)), Job(global_batch=16, precision="fp32")
    known, limited = search(PLAIN, machine, job).best, dataclasses.replace(job, recompute="always")
    alone = search(PLAIN, machine, limited)
    begun = search(PLAIN, machine, limited, known=[(known, [PLAIN(known.decision.micro_batch)])])
    assert known.simulated_s is not None
    assert alone.best.simulated_s is not None
    assert begun.best.decision == known.decision
    assert begun.best.simulated_s == known.simulated_s < alone.best.simulated_s
    assert begun.certificate.bound_s <= known.simulated_s


@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_with_a_limit_faster_plans_are_found_and_no_slower_one_counts_as_such(recompute: str) -> None:
    machine, job = cluster((4,), (1e4,)), Job(global_batch=16, precision="fp32", recompute=recompute)
    best = search(PLAIN, machine, job, simulated_s=played_s).best
    assert best.simulated_s is not None
    ample, tight = (
        search(PLAIN, machine, job, simulated_s=played_s, limit_s=factor * best.simulated_s) for factor in (1.01, 0.99)
    )
    assert ample.best.simulated_s == best.simulated_s
    assert tight.best.simulated_s is not None
    assert tight.best.simulated_s >= best.simulated_s
    assert tight.certificate.bound_s <= 0.99 * best.simulated_s


@pytest.mark.parametrize("devices", [3, 4])
def test_a_search_beside_a_known_plan_bounds_all_plans_and_shows_no_trivial_ones(devices: int) -> None:
    machine, job = cluster((devices,), (1e4,)), Job(12, precision="fp32", micro_batches=(1,), schedules=("1f1b",))
    known = search(PLAIN, machine, dataclasses.replace(job, recompute="always")).best
    beside = search(PLAIN, machine, job, known=[(known, [PLAIN(1)])], simulated_s=played_s, beside=True)
    least_s = enumerated(by_size(PLAIN), machine, job)
    assert beside.best.simulated_s == pytest.approx(least_s)
    assert beside.certificate.bound_s <= least_s * (1 + 1e-9)
    assert beside.trivial == ()


def test_trivial_plans_are_priced_even_when_they_do_not_fit() -> None:
    answer = search(PLAIN, cluster((4,), (1e4,), memory_bytes=(16 * 350,)), Job(global_batch=16, precision="fp32"))
    trivial = {c.label: c.evaluation for c in answer.trivial}
    assert list(trivial) == ["one device", "data parallel", "data parallel, ZeRO-1", "even split"]
    assert not trivial["one device"].feasible
    assert trivial["even split"].feasible
    assert all(e.iteration_s >= answer.best.evaluation.iteration_s for e in trivial.values() if e.feasible)


def test_progress_counts_every_problem() -> None:
    seen: list[tuple[int, int, float, float]] = []
    answer = search(PLAIN, cluster((4,), (1e4,)), Job(global_batch=8), progress=lambda *report: seen.append(report))
    done = [done for done, *_ in seen]
    assert done == sorted(done)
    assert {total for _, total, *_ in seen} == {done[-1]}
    assert all(bound <= best for *_, best, bound in seen)
    assert seen[-1][2] == answer.best.simulated_s
    assert seen[-1][3] == answer.certificate.bound_s


def test_limits_of_the_job_are_kept() -> None:
    job = Job(
        global_batch=16, precision="fp32", max_stages=2, zero=(0,), schedules=("gpipe",), recompute="always", devices=3
    )
    answer = search(PLAIN, cluster((4,), (1e4,), memory_bytes=(16 * 450,)), job)
    for candidate in (answer.best, *answer.runners_up):
        decision = candidate.decision
        assert len(decision.stages) <= 2
        assert (decision.zero, decision.schedule) == (0, "gpipe")
        assert all(stage.recompute for stage in decision.stages)
        assert decision.copies * sum(stage.replicas for stage in decision.stages) <= 3
    for word in ("at most 2", "recompute always", "gpipe", "at most 3 devices", "ZeRO 0"):
        assert word in answer.certificate.space


def test_slow_devices_at_the_end_of_a_mixed_pool_are_left_out() -> None:
    costs_for = by_size(lambda size: chain([1.0] * 2, micro_batch=size, elements=1.0, speeds=(1.0, 0.01)))
    machine = cluster((4,), (1e9,), memory_bytes=(10**6, 10**6), types=(0, 0, 1, 1))
    answer = search(costs_for, machine, Job(global_batch=8, micro_batches=(1,)))
    assert answer.best.evaluation.iteration_s == pytest.approx(24.0, rel=1e-3)
    assert sum(s.replicas for s in answer.best.decision.stages) * answer.best.decision.copies == 2


def test_no_micro_batch_size_divides_the_batch() -> None:
    with pytest.raises(JobError, match="global batch of 12") as raised:
        search(PLAIN, cluster((), ()), Job(global_batch=12, micro_batches=(5, 8)))
    assert "4, 6 or 12" in str(raised.value)


@pytest.mark.parametrize("change", [{"global_batch": 0}, {"schedules": ()}, {"zero": ()}, {"zero": (4,)}])
def test_jobs_that_leave_nothing(change: dict[str, object]) -> None:
    with pytest.raises(JobError):
        search(PLAIN, cluster((), ()), dataclasses.replace(Job(global_batch=8), **change))


def test_micro_batches_that_cannot_fit_are_never_priced() -> None:
    asked: list[int] = []

    def costs_for(size: int) -> BlockCosts:
        asked.append(size)
        return PLAIN(size)

    answer = search(costs_for, cluster((4,), (1e4,), memory_bytes=(16 * 350,)), Job(global_batch=4096))
    assert max(asked) == 128
    assert "sizes from 128 on left out" in answer.certificate.space


def test_the_last_bit_of_a_sum_tells_no_decisions_apart() -> None:
    terms = [0.1, 0.2, 0.3] * 7
    one_by_one, compensated = functools.reduce(operator.add, terms), math.fsum(terms)  # `sum` is either, by version
    assert one_by_one != compensated
    assert comparable(one_by_one) == comparable(compensated)
    assert comparable(1.0) < comparable(1.0 + 1e-8)
    assert comparable(math.inf) == math.inf


def test_a_search_is_no_slower_than_a_plan_of_another_space_that_it_begins_with() -> None:
    costs_for = by_size(lambda size: grown(chain([1.0, 2.0, 1.0], elements=10.0, boundary=1.0), size))
    machine, job = cluster((4,), (50.0,)), Job(global_batch=8, precision="fp32")
    free = search(costs_for, machine, job, simulated_s=played_s).best
    slow_job = dataclasses.replace(job, max_stages=1, zero=(0,), micro_batches=(8,))
    slow = search(costs_for, machine, slow_job, simulated_s=played_s)
    known = ((free, [costs_for(free.decision.micro_batch)]),)
    answer = search(costs_for, machine, slow_job, simulated_s=played_s, known=known)
    assert slow.best.simulated_s > free.simulated_s
    assert answer.best.decision == free.decision
    assert answer.certificate.bound_s <= free.simulated_s


@pytest.mark.parametrize(("memory", "offloads", "sizes"), [
    (600, (), 1),  # 8 inputs of layers of a sample, and one layer at work
    (600, ("layer_input",), 2),  # two inputs of each of 2 samples, and one layer at work
    (440, ("layer_input",), 2),
    (439, ("layer_input",), 1),
])  # fmt: skip
def test_inputs_of_layers_in_the_host_make_room_for_larger_micro_batches(
    memory: int, offloads: tuple[str, ...], sizes: int
) -> None:
    costs_for = by_size(lambda size: grown(chain([1.0] * 8, saved=100.0, checkpoint=60.0), size))
    machine = cluster((2,), (1e9,), memory_bytes=(memory,))
    job = Job(4, "fp32", recompute="layers", max_stages=1, structure=Structure(alike=True, offloads=offloads))
    answer = search(costs_for, machine, job)
    (stage,) = answer.best.decision.stages
    assert (answer.best.decision.micro_batch, stage.offload) == (sizes, offloads)
    assert stage.recompute
    each_s = 8 * (0.3 + 0.7 * sizes) * (1 + 2 + 1)
    assert answer.best.evaluation.iteration_s == pytest.approx(each_s * 4 / 2 / sizes)


def test_without_the_host_nothing_fits_where_inputs_of_layers_fill_a_device() -> None:
    costs_for = by_size(lambda size: grown(chain([1.0] * 8, saved=100.0, checkpoint=60.0), size))
    job = Job(4, "fp32", recompute="layers", max_stages=1, structure=Structure(alike=True))
    with pytest.raises(InfeasibleError):
        search(costs_for, cluster((2,), (1e9,), memory_bytes=(439,)), job)

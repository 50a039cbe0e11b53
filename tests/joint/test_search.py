"""The joint search over made-up shardings: as good as enumeration, and it behaves as a search for the least time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from planner.errors import InfeasibleError
from planner.hardware import Cluster, Terms
from planner.solvers import Answer, search
from planner.space import BlockCosts, Configuration, Job
from tests.joint.enumeration import best_s, judged, played_s
from tests.joint.instances import Ways, random_joint
from tests.space.instances import chain, cluster

SEEDS = st.integers(0, 10**6)
LIMITS = st.sampled_from(["tensor_parallel", "pipeline_stages", "data_parallel"])
some = settings(max_examples=10, deadline=None)


def found(ways: Ways, cluster: Cluster, job: Job) -> Answer | None:
    """The search's answer, None where nothing fits."""
    try:
        return search(ways.costs, cluster, job, shardings=ways.only(job.tensor_parallel), simulated_s=played_s)
    except InfeasibleError:
        return None


def seconds(answer: Answer | None) -> float:
    """The answer's time when it is played, infinite where there is none."""
    return math.inf if answer is None else answer.best.simulated_s or math.nan


@settings(max_examples=25, deadline=None)
@given(SEEDS)
@example(20602)  # the blocks' fastest shardings differ from block to block
def test_search_equals_enumeration(seed: int) -> None:
    ways, cluster, job = random_joint(seed)
    answer = found(ways, cluster, job)
    expected = best_s(judged(ways.shelves, cluster, job))
    assert seconds(answer) == pytest.approx(expected, rel=1e-9)
    if answer is not None:
        assert answer.certificate.bound_s <= expected * (1 + 1e-9)


def test_ways_to_share_operators_win_and_lose_among_the_instances() -> None:
    """What enumeration is compared on is not one-sided."""
    ranks = {seconds_ranks(*random_joint(seed)) for seed in range(12)}
    assert {1, 2} <= ranks


def seconds_ranks(ways: Ways, cluster: Cluster, job: Job) -> int:
    """Ranks of the answer's groups, 0 where there is none."""
    answer = found(ways, cluster, job)
    return answer.best.decision.stages[0].ranks if answer else 0


@some
@given(SEEDS)
def test_the_gap_is_that_of_answer_and_bound(seed: int) -> None:
    answer = found(*random_joint(seed))
    assume(answer is not None)
    assert answer is not None
    certificate, best = answer.certificate, seconds(answer)
    assert 0 <= certificate.bound_s <= best
    assert certificate.gap == pytest.approx((best - certificate.bound_s) / best, abs=1e-12)
    assert all(other.simulated_s is not None and best <= other.simulated_s for other in answer.runners_up)


@some
@given(SEEDS, st.floats(1.05, 4.0))
def test_more_memory_never_makes_the_best_plan_slower(seed: int, factor: float) -> None:
    ways, cluster, job = random_joint(seed)
    (device,) = cluster.devices
    roomier = dataclasses.replace(
        cluster, devices=(dataclasses.replace(device, memory_bytes=int(device.memory_bytes * factor) + 1),)
    )
    assert seconds(found(ways, roomier, job)) <= seconds(found(ways, cluster, job)) * (1 + 1e-9)


@some
@given(SEEDS, st.sampled_from([0.125, 0.5, 3.0, 1e3]))
def test_everything_slower_by_a_factor_is_an_answer_slower_by_that_factor(seed: int, factor: float) -> None:
    ways, cluster, job = random_joint(seed)
    job = dataclasses.replace(job, recompute="layers" if job.recompute == "auto" else job.recompute)
    times = ("forward_s", "backward_s", "update_s", "step_s", "gather_s", "gradient_gather_s")

    def slower(costs: BlockCosts) -> BlockCosts:
        scaled = {name: getattr(costs, name) for name in times}
        inner = tuple(
            dataclasses.replace(
                own,
                terms={k: Terms(t.latency_s * factor, t.s_per_byte * factor) for k, t in own.terms.items()},
            )
            for own in costs.inner_replicas
        )
        changed = {k: None if v is None else v * factor for k, v in scaled.items()}
        return dataclasses.replace(costs, **changed, inner_replicas=inner, selective=None)

    levels = tuple(
        dataclasses.replace(
            level,
            byte_per_s=level.byte_per_s / factor,
            device_byte_per_s=level.device_byte_per_s / factor,
            latency_s=level.latency_s * factor,
        )
        for level in cluster.levels
    )
    slow = Ways(
        {b: slower(c) for b, c in ways.plain.items()},
        {b: tuple(map(slower, each)) for b, each in ways.sharded.items()},
    )
    before, after = found(ways, cluster, job), found(slow, dataclasses.replace(cluster, levels=levels), job)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert seconds(after) == pytest.approx(seconds(before) * factor, rel=1e-9)
        assert after.certificate.bound_s == pytest.approx(before.certificate.bound_s * factor, rel=1e-6)


def honours(decision: Configuration, name: str, allowed: tuple[int, ...]) -> bool:
    """Whether a decision keeps to one of the job's limits."""
    taken = {
        "tensor_parallel": {stage.ranks for stage in decision.stages},
        "pipeline_stages": {len(decision.stages)},
        "data_parallel": {decision.copies * stage.replicas for stage in decision.stages},
    }
    return taken[name] <= set(allowed)


@settings(max_examples=8, deadline=None)
@given(SEEDS, LIMITS, st.sets(st.sampled_from([1, 2, 3, 4]), min_size=1))
def test_constraints_hold_and_cost_what_enumeration_says(seed: int, name: str, values: set[int]) -> None:
    ways, cluster, job = random_joint(seed)
    expected = best_s(e for e in judged(ways.shelves, cluster, job) if honours(e[0], name, tuple(values)))
    assume(math.isfinite(expected))
    allowed: dict[str, Any] = {name: tuple(sorted(values))}
    answer = found(ways, cluster, dataclasses.replace(job, **allowed))
    assert seconds(answer) == pytest.approx(expected, rel=1e-9)
    assert seconds(found(ways, cluster, job)) <= seconds(answer) * (1 + 1e-9)
    assert answer is not None
    assert honours(answer.best.decision, name, tuple(values))


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_stages_with_the_same_number_of_replicas(seed: int) -> None:
    ways, cluster, job = random_joint(seed)
    answer = found(ways, cluster, dataclasses.replace(job, uniform=True))
    alike = (e for e in judged(ways.shelves, cluster, job) if len({s.replicas for s in e[0].stages}) == 1)
    assert seconds(answer) == pytest.approx(best_s(alike), rel=1e-9)


def test_replicas_side_by_side_where_gradients_need_the_fast_links() -> None:
    """Two stages on two nodes: 50 elements a block are summed inside a node, one byte a micro-batch goes between."""
    ends = chain([1.0, 1.0], elements=50.0, saved=1.0, checkpoint=1.0, boundary=1.0)
    machine = cluster((2, 2), (1e6, 5.0), memory_bytes=(1100,))
    job = Job(global_batch=8, micro_batches=(1,), uniform=True, zero=(0,), precision="fp32")
    best = search(lambda _: ends, machine, job).best
    assert [(s.replicas, s.ranks) for s in best.decision.stages] == [(2, 1), (2, 1)]
    assert best.decision.copies == 1
    # Four micro-batches a replica of 3 s and 0.4 s of transfer each way (both replicas send at once), 3 s of the other
    # stage, sums of 200 bytes.
    assert best.evaluation.iteration_s == pytest.approx(4 * 3.8 + 3 + 200 / 1e6, rel=1e-6)

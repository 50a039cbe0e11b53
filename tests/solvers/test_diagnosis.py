"""Why nothing fits: the right stage, the right figures, and only changes that really help."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from planner.errors import InfeasibleError
from planner.hardware import Cluster
from planner.solvers import search
from planner.solvers._frontier import Frontier
from planner.solvers.diagnosis import least_memory_factor, may_fit
from planner.space import BlockCosts, Formulator, Job, evaluate
from tests.oracles import stages as brute_force
from tests.space.instances import chain, cluster

GIB = 2**30


def costs_for(size: int) -> BlockCosts:
    """Four blocks of 1 GiB of fp32 parameters (16 GiB with gradients and Adam), 2 GiB of activations a sample."""
    return dataclasses.replace(
        chain(
            [1.0] * 4,
            micro_batch=size,
            elements=GIB / 4.0,
            saved=2.0 * GIB * size,
            checkpoint=GIB / 16 * size,
            boundary=GIB / 16,
        ),
        names=("embed", "layer.0", "layer.1", "head"),
    )


def machine(memory_gib: float, devices: int = 2) -> Cluster:
    return cluster((devices,), (1e9,), memory_bytes=(int(memory_gib * GIB),))


def reasons(memory_gib: float, devices: int = 2, **options: Any) -> str:
    job = Job(**{"global_batch": 8, "precision": "fp32", **options})
    with pytest.raises(InfeasibleError) as raised:
        search(costs_for, machine(memory_gib, devices), job)
    return str(raised.value)


def test_a_block_that_fits_nowhere_is_named_with_its_needs() -> None:
    # Alone: 4 + 4 + 8 GiB of state and 2 GiB of activations... of which only 4 + 4 + 8/r remain with sharding.
    text = reasons(3.5, zero=(0,), recompute="never")
    assert "needs" in text
    assert "type 0 has 3.50 GiB" in text
    assert "weights" in text and "activations" in text  # noqa: PT018


def test_recompute_is_offered_when_it_helps() -> None:
    # Two stages of two blocks: state 8 GiB; the first keeps two micro-batches of 4 GiB; recomputed, of 1/8, and 2 GiB.
    text = reasons(12.0, zero=(0,), recompute="never", micro_batches=(1,))
    assert "recompute=auto" in text
    assert "ZeRO-1" not in text
    assert "16.00 GiB" in text


def test_sharding_is_offered_when_it_helps() -> None:
    # One stage only: 16 GiB of state; with two replicas sharding leaves 4 + 4 + 4.
    text = reasons(15.0, zero=(0,), max_stages=1, micro_batches=(1,))
    assert "ZeRO-1" in text
    assert "no limit on stages" in text


def test_smaller_micro_batches_are_offered_when_they_help() -> None:
    text = reasons(15.0, zero=(0,), micro_batches=(8,), recompute="never")
    assert "micro-batch 1" in text


def test_more_devices_and_memory_are_offered() -> None:
    text = reasons(7.0, zero=(0,), micro_batches=(1,))
    assert "4 devices instead of 2" in text
    assert "GiB of memory" in text


def test_verdict_comes_first_then_needs_what_fills_them_and_what_would_fit() -> None:
    # Two blocks a stage on 7 GiB: state 8 GiB with Adam, 4 without; 2 GiB at work and two checkpoints of 1/8 GiB.
    text = reasons(7.0, zero=(0,), micro_batches=(1,))
    assert text.startswith(
        "no plan fits: at best stage 0 of 2 ('embed' to 'layer.0') needs 10.25 GiB, type 0 has 7.00 GiB"
    )
    assert "(optimizer 4.00, activations 2.25, weights 2.00, gradients 2.00; micro-batch 1, 2 in flight" in text
    assert "all 2 stages too large) (this would fit: adafactor instead of adam, 4 devices instead of 2 or " in text
    assert "adafactor" not in reasons(6.0, zero=(0,), micro_batches=(1,))
    assert "adafactor" not in reasons(3.5, zero=(0,), optimizer="sgd", recompute="never")


def test_one_f_one_b_is_offered() -> None:
    text = reasons(16.5, zero=(0,), schedules=("gpipe",), recompute="never", micro_batches=(1,))
    assert "the 1f1b schedule" in text


def test_everything_together_is_offered_when_nothing_alone_helps() -> None:
    text = reasons(11.0, zero=(0,), recompute="never", micro_batches=(8,), schedules=("gpipe",))
    assert " with " in text


def test_what_is_offered_is_enough_and_just_below_is_not() -> None:
    job = Job(global_batch=8, precision="fp32", zero=(0,), micro_batches=(1,))
    with pytest.raises(InfeasibleError) as raised:
        search(costs_for, machine(7.0), job)
    offered = float(str(raised.value).rsplit("devices with ", 1)[1].split(" GiB")[0])
    assert search(costs_for, machine(offered), job).best.evaluation.feasible
    with pytest.raises(InfeasibleError):
        search(costs_for, machine(offered * 0.97), job)


def test_nothing_is_searched_where_the_states_exceed_all_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 GiB of weights, as much of gradients and 8 GiB of Adam: 16 GiB on two devices of 7.9, or just on two of 8.1.
    searched = list[object]()

    def noted(self: Frontier, *_: object, **__: object) -> None:
        searched.append(self)

    monkeypatch.setattr(Frontier, "pop", noted)
    assert "4 devices instead of 2" in reasons(7.9)
    assert not searched
    assert reasons(8.1)
    assert searched


def test_least_memory_by_hand() -> None:
    # Two stages of two blocks, recomputed: 8 GiB of state, two checkpoints of 1/8 GiB in the first, 2 GiB at work.
    job = Job(global_batch=8, precision="fp32", zero=(0,))
    problem = Formulator(machine(1.0), job).problem(costs_for(1), copies=1, schedule="1f1b", zero=0)
    assert least_memory_factor(problem) == pytest.approx(8.0 + 0.25 + 2.0)


@pytest.mark.parametrize(
    ("counts", "gib"),
    [
        ((1,), 16 + 0.25 + 2),  # four blocks, recomputed, one device: 16 GiB of state, 4 / 16 of checkpoints, 2 at work
        ((2,), 8 + 0.25 + 2),  # as above
        ((1, 2), 8 + 0.25 + 2),
    ],
)
def test_the_least_memory_of_so_many_stages(counts: tuple[int, ...], gib: float) -> None:
    job = Job(global_batch=8, precision="fp32", zero=(0,), pipeline_stages=counts)
    problem = Formulator(machine(1.0), job).problem(costs_for(1), copies=1, schedule="1f1b", zero=0)
    assert least_memory_factor(problem) == pytest.approx(gib)


@pytest.mark.parametrize("counts", [(), (1,), (2,), (3,), (1, 3)])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("recompute", ["auto", "never"])
def test_what_is_ruled_out_by_memory_is_found_by_nobody(counts: tuple[int, ...], zero: int, recompute: str) -> None:
    job = Job(global_batch=8, precision="fp32", zero=(zero,), pipeline_stages=counts, recompute=recompute)
    ruled_out = 0
    for gib in (4.5, 6.0, 8.5, 10.0, 12.5, 18.0, 27.0):
        costs, cluster_ = costs_for(1), machine(gib, 3)
        problem = Formulator(cluster_, job).problem(costs, copies=1, schedule="1f1b", zero=zero)
        oracle = brute_force.solve(problem, lambda d, c=costs, m=cluster_: evaluate(c, m, job, d))
        if not may_fit(problem):
            ruled_out += 1
            assert oracle.decisions == ()
    assert 0 < ruled_out < 7

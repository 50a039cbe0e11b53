"""The judge on schedules of every placement: sums by hand, and the event loop as its witness."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from planner.play import StageBytes, measure_schedule
from planner.schedules import get, names
from planner.space import Configuration, Job, StageChoice, Timed, evaluate, lay_workers
from planner.space.evaluate_many import evaluate_many
from planner.space.workers import pipeline_of
from tests.space.instances import chain, cluster

JOB = Job(global_batch=8, precision="fp32", optimizer="sgd")
WORKERS = 4


def pipeline(schedule: str, stages: int, copies: int = 1, *, adjacent: bool = False, zero: int = 0) -> Configuration:
    """One block a stage, and eight micro-batches for all copies."""
    choices = tuple(StageChoice(at, at + 1, 1) for at in range(stages))
    return Configuration(choices, copies, 1, 8 // copies, schedule, zero, adjacent=adjacent)


def allowed(configuration: Configuration) -> Job:
    return Job(8, precision="fp32", optimizer="sgd", schedules=(configuration.schedule,), zero=(configuration.zero,))


def test_interleaved_chunks_fill_with_a_chunk_at_a_time() -> None:
    # Two chunks of 1 + 2 s on each of two workers: 8 micro-batches of 6 s, and 3 s until worker 1 begins and ends.
    found = evaluate(
        chain([1.0] * 4), cluster((2,), (1e9,)), allowed(pipeline("interleaved", 4)), pipeline("interleaved", 4)
    )
    assert found.iteration_s == pytest.approx(8 * 6.0 + 3.0)
    assert found.feasible


def test_a_worker_holds_the_weights_of_all_its_chunks() -> None:
    # 10 fp32 elements a chunk, two chunks a worker: 80 bytes of weights and of gradients. Worker 0 keeps five chunks'
    # activations at the most, 2 (p - 1) + (v - 1) p + 1, of 3 bytes each.
    configuration = pipeline("interleaved", 4)
    costs = chain([1.0] * 4, elements=[10.0] * 4, saved=3.0)
    found = evaluate(costs, cluster((2,), (1e9,)), allowed(configuration), configuration)
    first = found.workers[0]
    assert (first.stages, first.memory.weights, first.memory.gradients) == ((0, 2), 80.0, 80.0)
    assert first.memory.activations == 15.0


def test_what_a_worker_lacks_is_said_with_all_its_stages() -> None:
    configuration = pipeline("interleaved", 4)
    costs = chain([1.0] * 4, elements=[10.0] * 4, saved=3.0)
    found = evaluate(costs, cluster((2,), (1e9,), memory_bytes=(174,)), allowed(configuration), configuration)
    (violation,) = [v for v in found.violations if v.stage == 0]
    assert (violation.kind, violation.needed, violation.available) == ("memory", 175.0, 174.0)
    assert violation.message.startswith("stages 0, 2 on one device")


@pytest.mark.parametrize("adjacent", [False, True])
def test_copies_of_chunks_exchange_among_their_own_devices(adjacent: bool) -> None:
    configuration = pipeline("interleaved", 4, 2, adjacent=adjacent, zero=1)
    workers = lay_workers(configuration, get("interleaved"))
    there = {False: [[[0], [2]], [[1], [3]]], True: [[[0], [1]], [[2], [3]]]}[adjacent]
    assert [workers.groups(stage)[:, 0].tolist() for stage in (0, 1)] == there
    assert [workers.groups(stage)[:, 0].tolist() for stage in (2, 3)] == there
    found = evaluate(
        chain([1.0] * 4, elements=[10.0] * 4), cluster((4,), (10.0,)), allowed(configuration), configuration
    )
    # Of 40 bytes of gradients half is scattered to the one other copy and half of the weights gathered from it.
    assert {round(t.sync_s, 9) for t in found.stages} == {4.0}


def test_copies_beside_each_other_share_the_link_between_their_stages() -> None:
    """Two pipelines of two stages on two switches of two devices: beside each other both send through one link.

    60 bytes at 10 a second: half of that for each, 12 s a transfer, as for two replicas in one pipeline. Where each
    pipeline has a switch of its own, 60 bytes at 30 a second are 2 s.
    """
    costs, machine = chain([1.0] * 2, boundary=60.0), cluster((2, 2), (30.0, 10.0))
    stages = (StageChoice(0, 1, 1), StageChoice(1, 2, 1))
    apart = Configuration(stages, 2, 1, 4, "1f1b")
    beside = dataclasses.replace(apart, adjacent=True)
    replicas = dataclasses.replace(
        apart, stages=tuple(dataclasses.replace(stage, replicas=2) for stage in stages), copies=1, micro_batches=8
    )
    found = [evaluate(costs, machine, Job(8, recompute="never"), c) for c in (apart, beside, replicas)]
    assert [f.stages[1].receive_s for f in found] == pytest.approx([2.0, 12.0, 12.0])
    assert found[1].iteration_s == pytest.approx(found[2].iteration_s)
    (many,) = evaluate_many((costs,), machine, Job(8, recompute="never"), [apart, beside, replicas])
    assert many.iteration_s.tolist() == pytest.approx([f.iteration_s for f in found])


def test_both_directions_of_chimera_exchange_between_the_two_holders() -> None:
    configuration = pipeline("chimera", 4)
    found = evaluate(chain([1.0] * 4, elements=10.0), cluster((4,), (10.0,)), allowed(configuration), configuration)
    # 40 bytes are summed by two devices: each sends 2 (2 - 1) / 2 of them at 10 bytes/s.
    assert [t.sync_s for t in found.stages] == pytest.approx([4.0] * 4)


def _served() -> list[tuple[str, int]]:
    """Every schedule, with a number of stages that it places on four workers and can serve with eight micro-batches."""
    found = []
    for name in names():
        counts = get(name).stage_counts(WORKERS)
        found += [(name, count) for count in counts[:1] if not evaluate_reason(name, count)]
    return found


def evaluate_reason(name: str, stages: int) -> str:
    from planner.schedules import Pipeline

    return get(name).supports(Pipeline((1,) * stages, 8))


def uneven(stages: int) -> Sequence[float]:
    """Forward seconds of unequal stages."""
    return [1.0 + 0.25 * (7 * stage % 5) for stage in range(stages)]


@pytest.mark.parametrize(("name", "stages"), _served())
def test_time_and_memory_are_those_of_the_event_loop(name: str, stages: int) -> None:
    configuration, forward_s = pipeline(name, stages), uneven(stages)
    costs = chain(forward_s, elements=[10.0] * stages, saved=[3.0 + s for s in range(stages)])
    machine, job = cluster((WORKERS,), (1e12,)), allowed(configuration)
    found = evaluate(costs, machine, job, configuration, timed=Timed.PLAYED)
    terms, nothing = found.stages, np.zeros(stages)
    sizes = StageBytes(nothing, np.array([t.unit_bytes for t in terms]) * get(name).parts, nothing, nothing)
    witness = measure_schedule(
        name, stages, 8, forward_s=[t.forward_s for t in terms], backward_s=[t.backward_s for t in terms],
        receive_s=0.0, sync_s=[t.exposed_sync_s for t in terms], update_s=[t.update_s for t in terms],
        evict_s=[t.evict_s for t in terms], sizes=sizes,
    )  # fmt: skip
    assert found.iteration_s == pytest.approx(witness.iteration_s, rel=1e-9)
    kept = {w.stages: w.memory.activations for w in found.workers}
    for stages_held, peak in zip(get(name).placement(pipeline_of(configuration)), witness.peak_bytes, strict=True):
        # Where lanes run side by side, or activations are evicted, how much is kept depends on the times.
        assert peak <= kept[stages_held] * (1 + 1e-9)
        assert peak == pytest.approx(kept[stages_held]) or name in ("bapipe-fbp", "bpipe")
    least = evaluate(costs, machine, job, configuration, timed=Timed.BOUND)
    assert least.iteration_s <= found.iteration_s * (1 + 1e-9)
    assert least.stages == found.stages


def test_every_schedule_is_tried_or_cannot_serve_four_workers() -> None:
    tried = {name for name, _ in _served()}
    left = {name for name in names() if name not in tried}
    assert all(not get(name).stage_counts(WORKERS) or evaluate_reason(name, get(name).stage_counts(WORKERS)[0])
               for name in left)  # fmt: skip


def test_stages_that_are_cut_alike_cost_alike() -> None:
    configuration = pipeline("zb-v", 8)
    found = evaluate(chain([1.0] * 8), cluster((4,), (1e9,)), allowed(configuration), configuration)
    assert len({(t.forward_s, t.backward_s) for t in found.stages}) == 1
    assert [own for own, _ in itertools.groupby(w.stages for w in found.workers)] == [(0, 7), (1, 6), (2, 5), (3, 4)]

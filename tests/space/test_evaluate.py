"""The judge against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from planner.schedules import get
from planner.space import BlockCosts, Configuration, Job, StageChoice, evaluate, lay_workers
from planner.space.types import Tie
from tests.space.instances import chain, cluster

JOB = Job(global_batch=8, precision="fp32", optimizer="adam")


def test_one_stage_on_one_device_takes_all_micro_batches_in_turn() -> None:
    costs = chain([1.0, 2.0], update_s=[0.25, 0.5], elements=[10.0, 20.0])
    found = evaluate(costs, cluster((), ()), JOB, Configuration((StageChoice(0, 2, 1),), 1, 1, 8, "1f1b"))
    assert found.iteration_s == pytest.approx(8 * 9.0 + 0.75)
    assert found.feasible


def test_two_stages_fill_steady_state_and_links() -> None:
    # t0 = 3, t1 = 6 + 10/5 there + 10/5 back = 10: fill 13, seven more micro-batches at 10.
    costs = chain([1.0, 2.0], boundary=10.0)
    decision = Configuration((StageChoice(0, 1, 1), StageChoice(1, 2, 1)), 1, 1, 8, "1f1b")
    found = evaluate(costs, cluster((2,), (5.0,)), JOB, decision)
    assert found.iteration_s == pytest.approx(13.0 + 7 * 10.0)
    assert found.bottleneck == 1
    assert found.stages[1].receive_s == found.stages[1].return_s == pytest.approx(2.0)


def test_ring_all_reduce_of_data_parallel_replicas_ends_the_iteration() -> None:
    # 100 fp32 gradients: 400 bytes, 2 (4-1)/4 of them at 50 bytes/s is 12 s; update 1 s; 2 micro-batches each of 3 s.
    costs = chain([1.0], elements=100.0, update_s=1.0)
    found = evaluate(costs, cluster((4,), (50.0,)), JOB, Configuration((StageChoice(0, 1, 4),), 1, 1, 8, "1f1b"))
    assert found.iteration_s == pytest.approx(6.0 + 12.0 + 1.0)


def test_zero_shards_optimizer_state_and_update() -> None:
    costs = chain([1.0], elements=100.0, update_s=1.0)
    decision = Configuration((StageChoice(0, 1, 4),), 1, 1, 8, "1f1b", zero=1)
    found = evaluate(costs, cluster((4,), (50.0,)), JOB, decision)
    assert found.iteration_s == pytest.approx(6.0 + 12.0 + 0.25)
    memory = found.stages[0].memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (400.0, 400.0, 200.0)


def test_later_stages_synchronise_while_earlier_ones_still_work() -> None:
    # Stage 1 ends its last backward 2 * 1 s before stage 0 and then updates for 5 s: 3 s stick out.
    costs = chain([1.0, 1.0], elements=1.0, update_s=[1.0, 5.0])
    decision = Configuration((StageChoice(0, 1, 1), StageChoice(1, 2, 1)), 1, 1, 8, "1f1b")
    found = evaluate(costs, cluster((2,), (1.0,)), JOB, decision)
    assert found.iteration_s == pytest.approx(6.0 + 7 * 3.0 + 3.0)


def test_synchronisation_hides_behind_backward_work() -> None:
    costs = chain([1.0], elements=100.0)
    job = Job(global_batch=8, precision="fp32", overlap=0.5)
    decision = Configuration((StageChoice(0, 1, 4),), 1, 1, 8, "1f1b")
    found = evaluate(costs, cluster((4,), (50.0,)), job, decision)
    assert found.stages[0].exposed_sync_s == pytest.approx(12.0 - 0.5 * 2.0)


def test_activations_in_flight_by_schedule_and_recomputation() -> None:
    costs = chain([1.0] * 3, saved=[10.0, 20.0, 30.0], checkpoint=[1.0, 2.0, 3.0], workspace=[7.0, 0.0, 5.0])
    machine = cluster((3,), (1.0,))

    def activations(schedule: str, recompute: bool) -> list[float]:
        stages = tuple(StageChoice(i, i + 1, 1, recompute) for i in range(3))
        found = evaluate(costs, machine, JOB, Configuration(stages, 1, 1, 8, schedule))
        return [terms.memory.activations for terms in found.stages]

    assert activations("1f1b", False) == [30.0, 40.0, 30.0]
    assert activations("gpipe", False) == [80.0, 160.0, 240.0]
    assert activations("1f1b", True) == [3 * 1.0 + 10.0, 2 * 2.0 + 20.0, 3.0 + 30.0]
    found = evaluate(costs, machine, JOB, Configuration((StageChoice(0, 3, 1, True),), 1, 1, 8, "1f1b"))
    assert found.stages[0].memory.activations == 6.0 + 30.0
    assert found.stages[0].memory.workspace == 7.0
    assert found.iteration_s == pytest.approx(8 * (9.0 + 3.0))


def test_a_recomputed_stage_keeps_its_head_and_repeats_the_rest() -> None:
    # The head keeps 30 beside its input; when a layer's 40 (or 20) bytes are there again, the head's are gone.
    costs = chain([1.0, 1.0, 4.0], saved=[20.0, 40.0, 33.0], checkpoint=[1.0, 2.0, 3.0])
    costs = dataclasses.replace(costs, repeated=np.array([True, True, False]), kept_bytes=np.array([0.0, 0.0, 30.0]))
    whole, split = (StageChoice(0, 3, 1, True),), (StageChoice(0, 2, 1, True), StageChoice(2, 3, 1, True))
    for machine, stages in ((cluster((), ()), whole), (cluster((2,), (1.0,)), split)):
        found = evaluate(costs, machine, JOB, Configuration(stages, 1, 1, 8, "gpipe")).stages
        assert sum(terms.recompute_s for terms in found) == 2.0
        if len(stages) == 1:
            assert (found[0].forward_s, found[0].backward_s, found[0].unit_bytes) == (6.0, 14.0, 36.0)
            assert found[0].memory.activations == 8 * 36.0 + 10.0
        else:
            assert (found[1].backward_s, found[1].unit_bytes, found[1].memory.activations) == (8.0, 33.0, 8 * 33.0)
            assert (found[0].unit_bytes, found[0].memory.activations) == (3.0, 8 * 3.0 + 40.0)


def test_slowest_and_smallest_device_of_a_stage_count() -> None:
    costs = chain([1.0, 1.0], saved=10.0, speeds=(1.0, 0.5))
    machine = cluster((4,), (1.0,), memory_bytes=(100, 15), types=(0, 0, 0, 1))
    decision = Configuration((StageChoice(0, 1, 2), StageChoice(1, 2, 2)), 1, 1, 8, "1f1b")
    found = evaluate(costs, machine, JOB, decision)
    assert [terms.forward_s for terms in found.stages] == [1.0, 2.0]
    assert [terms.capacity_bytes for terms in found.stages] == [100.0, 15.0]
    assert found.feasible
    assert not evaluate(chain([1.0, 1.0], saved=16.0, speeds=(1.0, 0.5)), machine, JOB, decision).feasible


def test_tied_parameters_of_a_stage_count_once() -> None:
    costs = chain([1.0, 1.0], elements=[10.0, 10.0], update_s=[1.0, 1.0])
    tied = dataclasses.replace(costs, ties=(Tie(10.0, (0, 1)),))
    found = evaluate(tied, cluster((), ()), JOB, Configuration((StageChoice(0, 2, 1),), 1, 1, 8, "1f1b"))
    assert found.stages[0].memory.weights == 40.0
    assert found.stages[0].update_s == pytest.approx(1.0)


def test_tied_gradients_are_summed_over_the_stages_that_hold_them() -> None:
    # 10 elements of 4 bytes at 5 bytes/s. Two ranks: 2 x 1/2 of 40 bytes. Three ranks: 2 x 2/3 of it.
    costs = chain([1.0] * 3, elements=10.0)
    tied = dataclasses.replace(costs, ties=(Tie(10.0, (0, 2)),))
    everywhere = dataclasses.replace(costs, ties=(Tie(10.0, (0, 1, 2)),))
    thirds = Configuration(tuple(StageChoice(i, i + 1, 1) for i in range(3)), 1, 1, 8, "1f1b")
    machine = cluster((6,), (5.0,))

    def tied_s(priced: BlockCosts, decision: Configuration) -> list[float]:
        return [terms.tied_sync_s for terms in evaluate(priced, machine, JOB, decision).stages]

    assert tied_s(tied, thirds) == pytest.approx([8.0, 0.0, 0.0])
    assert tied_s(everywhere, thirds) == pytest.approx([40 * 4 / 3 / 5, 0.0, 0.0])
    assert tied_s(costs, thirds) == [0.0] * 3
    assert tied_s(tied, Configuration((StageChoice(0, 3, 1),), 1, 1, 8, "1f1b")) == [0.0]
    # One replica before, two behind: each group is all three, as no micro-batch is seen by fewer.
    uneven = Configuration((StageChoice(0, 1, 1), StageChoice(1, 3, 2)), 1, 1, 8, "1f1b")
    assert tied_s(tied, uneven) == pytest.approx([40 * 4 / 3 / 5, 0.0])
    plain, summed = (evaluate(c, machine, JOB, thirds) for c in (costs, tied))
    assert summed.iteration_s == pytest.approx(plain.iteration_s + 8.0)
    assert summed.stages[0].exposed_sync_s == pytest.approx(8.0)


def test_tied_gradients_of_all_replicas_cross_nodes_at_once() -> None:
    # Two replicas a stage, each stage a node: two pairs share the 4 bytes/s that leave it.
    costs = dataclasses.replace(chain([1.0, 1.0], elements=10.0), ties=(Tie(10.0, (0, 1)),))
    decision = Configuration((StageChoice(0, 1, 2), StageChoice(1, 2, 2)), 1, 1, 8, "1f1b")
    found = evaluate(costs, cluster((2, 2), (100.0, 4.0)), JOB, decision)
    assert found.stages[0].tied_sync_s == pytest.approx(40 / 2.0)


def test_slow_link_counts_only_where_a_pair_of_replicas_crosses_it() -> None:
    costs = chain([1.0, 1.0], boundary=10.0)
    machine = cluster((2, 2), (100.0, 1.0))
    copies = Configuration((StageChoice(0, 1, 1), StageChoice(1, 2, 1)), 2, 1, 4, "1f1b")
    replicas = Configuration((StageChoice(0, 1, 2), StageChoice(1, 2, 2)), 1, 1, 8, "1f1b")
    assert evaluate(costs, machine, JOB, copies).stages[1].receive_s == pytest.approx(0.1)
    assert evaluate(costs, machine, JOB, replicas).stages[1].receive_s > 10.0 - 1e-9


@pytest.mark.parametrize(
    ("decision", "kind"),
    [
        (Configuration((StageChoice(0, 1, 1),), 1, 1, 8, "1f1b"), "coverage"),
        (Configuration((StageChoice(0, 1, 1), StageChoice(0, 2, 1)), 1, 1, 8, "1f1b"), "coverage"),
        (Configuration((), 1, 1, 8, "1f1b"), "coverage"),
        (Configuration((StageChoice(0, 2, 8),), 1, 1, 8, "1f1b"), "devices"),
        (Configuration((StageChoice(0, 2, 2),), 1, 1, 8, "1f1b", slice_devices=1), "devices"),
        (Configuration((StageChoice(0, 2, 1),), 0, 1, 8, "1f1b"), "devices"),
        (Configuration((StageChoice(0, 2, 3),), 1, 1, 8, "1f1b"), "divisibility"),
        (Configuration((StageChoice(0, 2, 1),), 1, 1, 7, "1f1b"), "divisibility"),
        (Configuration((StageChoice(0, 2, 1),), 1, 2, 4, "1f1b"), "divisibility"),
        (Configuration((StageChoice(0, 2, 1),), 1, 1, 8, "none such"), "option"),
    ],
)
def test_nonsense_is_named_and_never_fast(decision: Configuration, kind: str) -> None:
    found = evaluate(chain([1.0, 1.0]), cluster((4,), (1.0,)), JOB, decision)
    assert kind in {violation.kind for violation in found.violations}
    assert math.isinf(found.iteration_s)


def test_forbidden_options_are_violations() -> None:
    job = Job(
        global_batch=8, schedules=("gpipe",), zero=(0,), recompute="never", max_stages=1, micro_batches=(2,), devices=2
    )
    stages = (StageChoice(0, 1, 1, True), StageChoice(1, 2, 1))
    found = evaluate(chain([1.0, 1.0]), cluster((4,), (1.0,)), job, Configuration(stages, 1, 1, 8, "1f1b", zero=1))
    assert [violation.kind for violation in found.violations] == ["option"] * 5
    assert found.iteration_s == pytest.approx(4.0 + 3.0 + 7 * 4.0)


def test_memory_violation_says_what_is_needed() -> None:
    costs = chain([1.0], elements=10.0, saved=5.0)
    found = evaluate(
        costs, cluster((), (), memory_bytes=(164,)), JOB, Configuration((StageChoice(0, 1, 1),), 1, 1, 8, "1f1b")
    )
    (violation,) = found.violations
    assert (violation.kind, violation.needed, violation.available) == ("memory", 165.0, 164.0)


def test_ranks_of_copies_and_idle_devices() -> None:
    stages = (StageChoice(0, 1, 2), StageChoice(1, 2, 1))
    packed = lay_workers(Configuration(stages, 2, 1, 4, "1f1b"), get("1f1b"))
    assert [packed.groups(s)[..., 0].tolist() for s in (0, 1)] == [[[0, 1], [3, 4]], [[2], [5]]]
    spread = lay_workers(Configuration(stages, 2, 1, 4, "1f1b", slice_devices=4), get("1f1b"))
    assert [spread.groups(s)[..., 0].tolist() for s in (0, 1)] == [[[1, 2], [5, 6]], [[3], [7]]]
    together = lay_workers(Configuration(stages, 2, 1, 4, "1f1b", adjacent=True), get("1f1b"))
    assert [together.groups(s)[..., 0].tolist() for s in (0, 1)] == [[[0, 2], [1, 3]], [[4], [5]]]


def test_replicas_fed_by_fewer_begin_late() -> None:
    # t0 = 3 on one device, t1 = 6 on two. The second replica of stage 1 begins half a turn late.
    costs = chain([1.0, 2.0])
    decision = Configuration((StageChoice(0, 1, 1), StageChoice(1, 2, 2)), 1, 1, 8, "1f1b")
    found = evaluate(costs, cluster((3,), (1.0,)), JOB, decision)
    assert found.iteration_s == pytest.approx(9.0 + 3.5 * 6.0)
    falling = Configuration((StageChoice(0, 1, 2), StageChoice(1, 2, 1)), 1, 1, 8, "1f1b")
    assert evaluate(costs, cluster((3,), (1.0,)), JOB, falling).iteration_s == pytest.approx(9.0 + 7 * 6.0)


def test_what_the_job_forbids_is_said_before_what_the_schedule_cannot_do() -> None:
    costs = chain([1.0, 1.0, 1.0])
    odd = Configuration(tuple(StageChoice(i, i + 1, 1) for i in range(3)), 1, 1, 8, "chimera")
    found = evaluate(costs, cluster((3,), (1.0,)), JOB, odd)
    assert [v.message for v in found.violations] == [
        "excluded by --schedule 1f1b --schedule gpipe --schedule interleaved"
    ]
    allowed = evaluate(costs, cluster((3,), (1.0,)), dataclasses.replace(JOB, schedules=("chimera",)), odd)
    assert [v.message for v in allowed.violations] == ["chimera needs an even number of stages, not 3"]
    assert math.isinf(allowed.iteration_s)

"""A scheme that only states its recipe is priced everywhere: by the judge, the solvers, plans, the systems, by link.

It shards everything inside a machine and sums the shards' gradients across machines (hybrid-sharded data parallelism).
Two machines of two ranks, 10 B/s inside and 1 B/s between them, no latency; an element has 4 B of weight and as much of
gradient and no optimizer state, so 500 elements are 2,000 B of each:

- inside, a gather or a scatter of 2,000 B among two sends half of it, 1,000 B, at 10 B/s: 100 s;
- across, both ranks of each machine sum 1,000 B at once: each sends 2 * 1/2 * 1,000 B, so 2,000 B leave a machine at
  1 B/s: 2,000 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.check import CheckReport, check_plan
from planner.errors import UsageError
from planner.exchange import (
    SCHEMES,
    Content,
    ExchangeStep,
    Group,
    Phase,
    Recipe,
    Step,
    Variable,
    fabric_of,
    get,
    groups_of,
    kept_bytes,
    parts_of,
    phase_s,
    recipe_of,
    recipes,
    sent_bytes,
)
from planner.exchange.collective_schemes import CHEAPEST, Collectives, step_traffic
from planner.hardware import Collective
from planner.plans import validate
from planner.solvers import chain_dp
from planner.space import Configuration, Formulator, Job, StageChoice, evaluate
from planner.space.terms import TermCache
from tests.oracles import stages as brute_force
from tests.plans import sample
from tests.space.instances import chain, cluster, random_instance
from tests.systems.toy import setting

NUMBER = 7
GATHER = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.FORWARD, Group.INSIDE)
AGAIN = dataclasses.replace(GATHER, phase=Phase.BACKWARD)
SCATTER = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD, Group.INSIDE)
ACROSS = ExchangeStep(Collective.ALL_REDUCE, Content.GRADIENTS, Phase.END, Group.ACROSS)


HYBRID = Collectives(
    "hybrid", CHEAPEST, NUMBER, Recipe((GATHER, AGAIN, SCATTER, ACROSS), Group.INSIDE, Group.INSIDE, Group.INSIDE)
)
"""Everything in shards inside a machine."""


@pytest.fixture(autouse=True, scope="module")
def hybrid() -> Iterator[None]:
    SCHEMES.names()  # all others first
    SCHEMES.register("hybrid", HYBRID)
    yield
    del SCHEMES._entries["hybrid"]


MACHINE = dataclasses.replace(cluster((2, 2), (10.0, 1.0)), node_size=2)
COSTS = chain([1.0], elements=500.0)
JOB = Job(global_batch=8, precision="fp32", optimizer="sgd", zero=(NUMBER,), recompute="never")
WHOLE = Configuration((StageChoice(0, 1, 4),), 1, 1, 8, "1f1b", NUMBER)


class Sizes:
    """fp32."""

    gradient_bytes = 4.0
    weight_bytes = 4.0


def test_the_judge_prices_it() -> None:
    (stage,) = evaluate(COSTS, MACHINE, JOB, WHOLE).stages
    assert (stage.forward_s, stage.backward_s, stage.sync_s) == pytest.approx((1 + 100, 2 + 100 + 100, 2000))
    kept = stage.memory
    assert (kept.weights, kept.gradients, kept.optimizer) == (1000, 1000, 0)
    assert kept.workspace == 2 * 2000 + 2000  # two units gathered, one unit's gradients


def test_the_solvers_tables_say_what_the_judge_says() -> None:
    problem = Formulator(MACHINE, dataclasses.replace(JOB, data_parallel=(4,))).problem(
        COSTS, copies=1, schedule="1f1b", zero=NUMBER
    )
    assert problem.sync_s.ravel() == pytest.approx([2000])
    assert problem.exchange_forward_s.ravel() == pytest.approx([100])
    assert problem.exchange_backward_s.ravel() == pytest.approx([200])
    assert problem.resident_bytes.ravel() == pytest.approx([1000 + 1000 + 6000])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2))
def test_the_solver_finds_what_enumeration_through_the_judge_does(seed: int, copies: int) -> None:
    costs, machine, job = random_instance(seed, zero=(NUMBER,))
    if len(machine.levels) > 1:
        machine = dataclasses.replace(machine, node_size=machine.levels[0].size)
    if copies > machine.device_count or job.global_batch % (copies * costs.micro_batch):
        copies = 1
    problem = Formulator(machine, job).problem(costs, copies=copies, schedule="1f1b", zero=NUMBER)
    cache = TermCache()
    exact, found = (
        solve(problem, lambda d: evaluate(costs, machine, job, d, cache=cache), cutoff_s=math.inf, keep=1).decisions
        for solve in (brute_force.solve, chain_dp.solve)
    )
    assert [e.iteration_s for _, e in found] == pytest.approx([e.iteration_s for _, e in exact])


def test_a_plan_lists_its_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of two: four replicas are two groups inside and two across, two replicas one group inside."""
    machines = dataclasses.replace(sample.cluster(8), node_size=2)
    monkeypatch.setattr(sample, "cluster", lambda devices: machines)
    plan = sample.make_plan(chosen=sample.decision((4, 2, 1), micro_batches=4, zero=NUMBER), zero=(NUMBER,))
    listed = [
        [(c.kind, c.of, c.bytes, c.ranks, c.groups, c.each) for c in stage.collectives if c.of != "tied gradients"]
        for stage in plan.predictions.stages
    ]
    wide, narrow = (4 * stage.parameters for stage in plan.stages[:2])
    assert listed == [
        [
            ("all_gather", "weights", wide, 2, 2, "forward"),
            ("all_gather", "weights", wide, 2, 2, "backward"),
            ("reduce_scatter", "gradients", wide, 2, 2, "backward"),
            ("all_reduce", "gradients", wide // 2, 2, 2, ""),
        ],
        [
            ("all_gather", "weights", narrow, 2, 1, "forward"),
            ("all_gather", "weights", narrow, 2, 1, "backward"),
            ("reduce_scatter", "gradients", narrow, 2, 1, "backward"),
        ],
        [],
    ]
    assert validate(plan) == []
    assert [finding for finding in check_plan(plan).findings if "collectives" in finding.message] == []


def test_a_prediction_by_a_recipe_holds_its_shards_and_passes_the_check() -> None:
    """Two machines of 8: a device holds an eighth of the weights (2 B), gradients (2 B) and moments (12 B) of all."""
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100", nodes=2)
    plan = planner.predict(graph, cluster, Job(32, zero=(NUMBER,)), planner.Degrees(zero=NUMBER)).plan
    (memory,) = (stage.memory for stage in plan.predictions.stages)
    shard = graph.parameter_count() / 8
    held = memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes
    assert held == pytest.approx((2 * shard, 2 * shard, 12 * shard), rel=1e-6)
    assert check_plan(plan).findings == ()
    assert check_plan(plan, graph, cluster) == CheckReport(())


def test_bytes_and_memory_by_closed_form() -> None:
    ranks = range(4)

    def parts(group: Group | None) -> int:
        return parts_of(MACHINE, ranks, group)

    # once: two gathers and a scatter of 1,000 B in each of three passes; at the end 2 * 1/2 * 1,000 B
    assert sent_bytes(HYBRID.recipe, Sizes(), parts, 500.0, passes=3) == 3 * 3000 + 1000
    assert phase_s(MACHINE, HYBRID.recipe, Phase.BACKWARD, ranks, Sizes(), 500.0) == pytest.approx(200)
    kept = kept_bytes(HYBRID.recipe, Sizes(), 8.0, parts, 500.0, largest=100.0)
    assert (kept.weights, kept.gradients, kept.optimizer) == (1000, 1000, 2000)
    assert kept.transient == 100 * 4 + 2 * 100 * 4


def test_one_element_and_one_pass_are_what_is_not_said() -> None:
    """4 B in halves on 2 ranks: two gathers and a scatter of 2 B, at the end an all-reduce of 2 * 1/2 * 2 B."""
    ranks = range(4)

    def parts(group: Group | None) -> int:
        return parts_of(MACHINE, ranks, group)

    assert sent_bytes(HYBRID.recipe, Sizes(), parts) == 3 * 2 + 2
    assert phase_s(MACHINE, HYBRID.recipe, Phase.BACKWARD, ranks, Sizes()) == pytest.approx(200 / 500)
    kept = kept_bytes(HYBRID.recipe, Sizes(), 8.0, parts)
    assert (kept.weights, kept.gradients, kept.optimizer) == (2, 2, 4)
    assert kept.transient == 4 + 2 * 4  # one gradient that is not scattered yet, and two gathered units of one weight


def test_groups_at_once_share_the_way_between_machines() -> None:
    """An all-reduce of 4 B between two machines sends 4 B each way at 1 B/s; two groups at once have half of that."""
    recipe, ranks = recipe_of(0), [0, 2]
    assert phase_s(MACHINE, recipe, Phase.END, ranks, Sizes()) == pytest.approx(4)
    assert phase_s(MACHINE, recipe, Phase.END, ranks, Sizes(), concurrent=2) == pytest.approx(8)


def test_bytes_by_link() -> None:
    """A rank sends 3 * 1,000 B inside; a machine's two ranks 1,000 B each across."""
    fabric = fabric_of(MACHINE)
    step = Step((Variable("w", 2000.0),), backward_s=2.0, forward_s=1.0)
    inside, across = get("hybrid").plan_messages(fabric, step).traffic.by_level()
    assert (inside.out_bytes, across.out_bytes) == pytest.approx((3000, 2000))
    memory = get("hybrid").memory(fabric, step)
    assert memory.weights == memory.optimizer == 0.5
    one = step_traffic(fabric, ACROSS)
    assert one.machine_bytes()[0].tolist() == pytest.approx([1.0, 1.0])


def test_bytes_of_a_configuration_are_counted_with_it() -> None:
    """Four ranks, two passes each of three steps inside a machine, and 1,000 B each across."""
    traffic = setting(COSTS, MACHINE, 8, zero=(0, NUMBER)).traffic(WHOLE)
    assert traffic.sent_bytes == pytest.approx(4 * (2 * 3000 + 1000))
    assert traffic.by_level()[1].total_bytes == pytest.approx(4 * 1000)


def test_groups() -> None:
    ranks = np.array([2, 3, 4, 5, 8, 9])
    inside = groups_of(ranks // 4, ranks, Group.INSIDE)
    assert inside.tolist() == [[2, 3], [4, 5], [8, 9]]
    assert groups_of(ranks // 4, ranks, Group.ACROSS).tolist() == [[2, 4, 8], [3, 5, 9]]
    uneven = np.array([0, 1, 4])
    assert groups_of(uneven // 4, uneven, Group.INSIDE).tolist() == [[0], [1], [4]]
    assert groups_of(uneven // 4, uneven, Group.ACROSS).tolist() == [[0, 1, 4]]
    with pytest.raises(UsageError, match="parameter servers are no ranks"):
        groups_of(ranks // 4, ranks, Group.SERVERS)


def test_stages_are_known_by_their_numbers() -> None:
    assert sorted(recipes()) == [0, 1, 2, 3, NUMBER]
    with pytest.raises(UsageError, match=r"there is no ZeRO stage 5 \(use one of 0, 1, 2, 3, 7\)"):
        recipe_of(5)

"""Exchange schemes under the judge: data parallelism by hand, and what no scheme can serve."""

from __future__ import annotations

import dataclasses

import pytest

from planner.exchange import Step, Variable, names
from planner.space import BlockCosts, Configuration, Job, StageChoice, Timed, evaluate
from tests.space.instances import chain, cluster

JOB = Job(global_batch=6, precision="fp32", optimizer="sgd", schedules=("1f1b",))
PAIR = cluster((2,), (1.0,))
WHOLE = Configuration((StageChoice(0, 2, 1),), 2, 1, 3, "1f1b")


def costs(ready_s: float | None = None) -> BlockCosts:
    """Two blocks of 1 + 2 s, one weight of 2 elements in the first; 0.5 s of update."""
    weight = Variable("w", 8.0, ready_s)

    def steps(device_type: int, micro_batches: int, lookups: int) -> Step:
        return Step((weight,), 4.0, 2.0, micro_batches)

    return dataclasses.replace(chain([1.0, 1.0], elements=[2.0, 0.0], update_s=[0.5, 0.0]), steps=steps)


@pytest.mark.parametrize(("ready_s", "exposed_s"), [(None, 8.0), (1.0, 5.0)])
@pytest.mark.parametrize("timed", [Timed.PLAYED, Timed.CLOSED_FORM, Timed.BOUND])
def test_a_ring_of_two(ready_s: float | None, exposed_s: float, timed: Timed) -> None:
    """8 B of gradients take 2 * 1/2 * 8 / 1 = 8 s; complete after 1 s of a backward of 4, 3 of them are hidden.

    Three micro-batches of 2 + 4 s, and 0.5 s of update.
    """
    found = evaluate(costs(ready_s), PAIR, JOB, dataclasses.replace(WHOLE, exchange="ring"), timed=timed)
    assert found.feasible
    assert found.iteration_s == pytest.approx(18 + exposed_s + 0.5)
    assert (found.stages[0].sync_s, found.stages[0].exposed_sync_s) == pytest.approx((8.0, exposed_s))
    assert (found.workers[0].memory.weights, found.workers[0].memory.gradients) == (8.0, 8.0)


def test_replicas_of_the_stage_are_as_good_as_copies() -> None:
    copies = dataclasses.replace(WHOLE, exchange="ring")
    replicas = dataclasses.replace(copies, stages=(StageChoice(0, 2, 2),), copies=1, micro_batches=6)
    assert evaluate(costs(), PAIR, JOB, replicas) == evaluate(costs(), PAIR, JOB, copies)


STAGES = (StageChoice(0, 1, 1), StageChoice(1, 2, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": STAGES, "copies": 1, "micro_batches": 6}, "one stage of the whole model, not 2"),
        ({"zero": 1}, "and ZeRO-1 both say how gradients travel"),
        ({"devices": (1, 0)}, "serves devices in line"),
        ({"exchange": "zero1"}, "choose it by its stage, --zero 1"),
        ({"exchange": "rings"}, "unknown exchange scheme 'rings'"),
        ({"exchange": "byteps:cpu_machines=some"}, "cannot read 'some'"),
        ({"exchange": "byteps:cpu_machines=1"}, "network"),
    ],
)
def test_what_a_scheme_cannot_serve_is_said(change: dict[str, object], words: str) -> None:
    inside = dataclasses.replace(PAIR, node_size=2)
    found = evaluate(costs(), inside, JOB, dataclasses.replace(WHOLE, **{"exchange": "ring", **change}))
    assert not found.feasible
    assert not found.stages
    assert words in found.violations[0].message


@pytest.mark.parametrize("name", names())
def test_costs_that_know_no_variables_price_no_scheme(name: str) -> None:
    unknown = dataclasses.replace(costs(), steps=None)
    found = evaluate(unknown, PAIR, JOB, dataclasses.replace(WHOLE, exchange=name))
    assert "is not known from these costs" in found.violations[0].message

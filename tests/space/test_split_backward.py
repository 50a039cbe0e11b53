"""Memory between the halves of a split backward: the judge by hand, and the tables of searches against the judge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.space import BlockCosts, Configuration, Evaluation, Job, StageChoice, evaluate
from planner.space.ranges import Ranges
from planner.space.recompute_choices import RecomputeChoice
from tests.space.instances import chain, cluster

JOB = Job(8, precision="fp32", optimizer="sgd", schedules=("zb-h1",))


def judged(costs: BlockCosts, cut: int, *, recompute: bool = False, layers: int = 0) -> Evaluation:
    """Two stages of eight micro-batches under ZB-H1."""
    ends = ((0, cut), (cut, len(costs.parameter_elements)))
    stages = tuple(StageChoice(start, stop, 1, recompute, layers=layers) for start, stop in ends)
    job = dataclasses.replace(JOB, recompute="auto")
    return evaluate(costs, cluster((2,), (1e12,)), job, Configuration(stages, 1, 1, 8, "zb-h1"))


def test_what_waits_counts_in_place_of_what_was_kept() -> None:
    costs = chain([1.0] * 4, saved=3.0, checkpoint=1.0)
    costs = dataclasses.replace(costs, waiting_bytes=np.full(4, 2.0))
    first, second = judged(costs, 2).stages
    # 6 bytes of a micro-batch of two blocks, of which 4 wait. Worker 0 keeps two that wait for their first half; while
    # worker 1 runs the first half of one, another one waits for the second.
    assert (first.unit_bytes, first.turning_bytes, first.waiting_bytes) == (6.0, 6.0, 4.0)
    assert (first.memory.activations, second.memory.activations) == (12.0, 10.0)


def test_layers_are_there_one_at_a_time_beside_what_waits() -> None:
    costs = chain([1.0] * 4, saved=3.0, checkpoint=1.0)
    costs = dataclasses.replace(costs, waiting_bytes=np.full(4, 2.0))
    first, second = judged(costs, 2, recompute=True).stages
    # Inputs of two layers; when the first layer is made again (3) its input (1) is there, and the other one waits (2).
    assert (first.unit_bytes, first.turning_bytes, first.waiting_bytes) == (2.0, 6.0, 4.0)
    assert (first.memory.activations, second.memory.activations) == (2.0 + 6.0, 4.0 + 6.0)


def test_without_knowing_what_waits_all_stays() -> None:
    first, second = judged(chain([1.0] * 4, saved=3.0, checkpoint=1.0), 2).stages
    assert (first.memory.activations, second.memory.activations) == (12.0, 12.0)


_BYTES = st.lists(st.floats(0.0, 9.0), min_size=6, max_size=6)


@given(_BYTES, _BYTES, _BYTES, st.integers(1, 5), st.booleans(), st.sampled_from([None, 0, 1, 2]))
def test_tables_of_searches_are_as_the_judge_has_it(
    saved: list[float], inputs: list[float], waiting: list[float], cut: int, head: bool, layers: int | None
) -> None:
    costs = chain([1.0] * 6, saved=saved, checkpoint=inputs)
    starts = np.array([0, 1, 1, 3, 4, 5])
    costs = dataclasses.replace(costs, waiting_bytes=np.array(waiting), layer_starts=starts)
    if head:
        kept = np.array([0.0] * 5 + [saved[5] / 2])
        costs = dataclasses.replace(costs, repeated=np.arange(6) < 5, kept_bytes=kept)
    choice = RecomputeChoice() if layers is None else RecomputeChoice(True, layers=layers)
    waits, most = Ranges(costs).halves(choice)
    found = judged(costs, cut, recompute=choice.recompute, layers=choice.layers)
    for terms, (first, last) in zip(found.stages, ((0, cut - 1), (cut, 5)), strict=True):
        assert waits[first, last] == pytest.approx(terms.waiting_bytes)
        # a stage that begins inside a layer keeps what enters its part, which tables over all stages do not see
        begins = starts[first] == first or not choice.recompute
        assert most[first, last] == pytest.approx(terms.turning_bytes) or not begins

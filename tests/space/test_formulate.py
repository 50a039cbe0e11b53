"""Problems as numbers: the tables say what the schedule and the judge say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import schedules
from planner.errors import JobError, UsageError
from planner.schedules import Pipeline
from planner.space import Configuration, Formulator, Job, StageChoice, evaluate
from planner.space.formulate import warm_up_tables
from planner.space.types import Tie
from tests.space.instances import chain, cluster

COSTS = chain([1.0, 2.0, 3.0], elements=10.0, saved=5.0, boundary=4.0)
MACHINE = cluster((2, 2), (10.0, 1.0), latency_s=0.1)
JOB = Job(global_batch=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=6), st.integers(1, 4))
def test_warm_up_counted_from_the_back_is_the_schedules_own(replicas: list[int], times: int) -> None:
    micro_batches = 24 * times
    options = np.unique(replicas)
    for name in ("1f1b", "gpipe"):
        in_flight, passing, _ = warm_up_tables(name, options, sum(replicas), micro_batches)
        counts, coming = [], 0
        for r in reversed(replicas):
            option = int(np.searchsorted(options, r))
            counts.append(int(in_flight[option, coming]))
            coming = int(passing[option, coming])
        claimed = schedules.get(name).in_flight(Pipeline(tuple(replicas), micro_batches))
        assert tuple(reversed(counts)) == claimed


def test_in_flight_never_below_what_later_devices_imply() -> None:
    options = np.array([1, 2, 4])
    in_flight, passing, _ = warm_up_tables("1f1b", options, 8, 16)
    assert (np.diff(in_flight, axis=1) >= 0).all()
    assert (np.diff(passing, axis=1) >= 0).all()
    assert in_flight[:, 0].tolist() == [1, 1, 1]


def test_replica_options_divide_the_micro_batches() -> None:
    options = Formulator(MACHINE, JOB).replica_options
    assert options(12, 1, 8) == (1, 2, 3, 4, 6)
    assert options(12, 1, 100) == (1, 2, 4, 12)
    assert options(7, 1, 4) == (1,)
    assert Formulator(MACHINE, Job(global_batch=24, data_parallel=(4, 6))).replica_options(12, 2, 8) == (2, 3)


def test_places_and_links_of_two_nodes_of_two() -> None:
    problem = Formulator(MACHINE, JOB).problem(COSTS, copies=1, schedule="1f1b", zero=0)
    assert problem.replicas.tolist() == [1, 2, 4]
    one, two, four = problem.place
    assert len(set(one.tolist())) == 1
    assert two[0] == two[2] != two[1]
    assert two[3] == -1
    assert four.tolist()[1:] == [-1, -1, -1]
    # 40 bytes of boundary at 10 bytes/s inside a node; 1 byte/s and twice the latency across.
    inside, across = problem.link[0, 0, 1], problem.link[0, 0, 2]
    assert problem.receive_s[inside, 1] == pytest.approx(0.1 + 0.4)
    assert problem.receive_s[across, 1] == pytest.approx(0.2 + 4.0)


@pytest.mark.parametrize(("copies", "batch"), [(3, 8), (5, 10), (0, 8)])
def test_copies_must_divide_batch_and_devices(copies: int, batch: int) -> None:
    with pytest.raises(JobError, match="copies"):
        Formulator(MACHINE, Job(global_batch=batch)).problem(COSTS, copies=copies, schedule="1f1b", zero=0)


def test_unknown_choices() -> None:
    with pytest.raises(UsageError, match="schedule"):
        Formulator(MACHINE, JOB).problem(COSTS, copies=1, schedule="chimera", zero=0)
    with pytest.raises(UsageError, match="recompute"):
        Formulator(MACHINE, Job(global_batch=8, recompute="maybe")).problem(COSTS, copies=1, schedule="1f1b", zero=0)
    with pytest.raises(UsageError, match="optimizer"):
        Formulator(MACHINE, Job(global_batch=8, optimizer="adm")).problem(COSTS, copies=1, schedule="1f1b", zero=0)


@pytest.mark.parametrize(("sizes", "copies"), [((12,), 1), ((4, 3), 1), ((4, 3), 2), ((2, 2, 3), 1), ((2, 2, 3), 3)])
def test_sums_of_tied_gradients_are_those_of_the_judge(sizes: tuple[int, ...], copies: int) -> None:
    machine = cluster(sizes, (50.0, 7.0, 2.0)[: len(sizes)], latency_s=0.1)
    costs = dataclasses.replace(COSTS, ties=(Tie(5.0, (0, 2)), Tie(3.0, (0, 1))))
    job = Job(global_batch=12 * copies, precision="fp32")
    problem = Formulator(machine, job).problem(costs, copies=copies, schedule="1f1b", zero=0)
    assert problem.tied_elsewhere
    alone = dataclasses.replace(costs, ties=costs.ties[:1])
    width = problem.slice_devices
    for o, first in enumerate(problem.replicas.tolist()):
        for p, last in enumerate(problem.replicas.tolist()):
            for middle in range(1, width - first - last + 1):
                if 12 % middle:
                    continue
                stages = (StageChoice(0, 1, first), StageChoice(1, 2, middle), StageChoice(2, 3, last))
                decision = Configuration(stages, copies, 1, 12, "1f1b", slice_devices=width)
                judged_s = evaluate(alone, machine, job, decision).stages[0].tied_sync_s
                at = width - first - middle - last
                assert problem.tied_s[problem.tied_class[p], o, at] == pytest.approx(judged_s)
            assert np.isinf(problem.tied_s[problem.tied_class[p], o, max(0, width - first - last + 1) :]).all()
    assert not len(Formulator(machine, job).problem(COSTS, copies=copies, schedule="1f1b", zero=0).tied_s)

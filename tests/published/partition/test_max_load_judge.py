"""The judge of the max-load problem, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.instances.max_load import mirrored, repeated, widened
from planner.errors import JobError, UsageError
from planner.published.problems import MaxLoadDecision, MaxLoadProblem, max_load_problem
from planner.published.readers import OperatorGraph, OperatorNode
from tests.published.partition.max_load_instances import problem

# 0 feeds 1, 2 and 3; 1 and 2 feed 3.
DIAMOND = [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]
TIMES = [1.0, 2.0, 4.0, 8.0]
MOVES = [0.5, 0.25, 0.125, 0.0]


def kinds(problem: MaxLoadProblem, *device_of: int) -> list[str]:
    return [v.kind for v in problem.judge(MaxLoadDecision(device_of)).violations]


def test_each_source_is_paid_once_by_each_side() -> None:
    verdict = problem(TIMES, DIAMOND, MOVES).judge(MaxLoadDecision((0, 0, 1, 1)))
    # Device 0 sends 0 once for two readers, and 1; device 1 receives both.
    assert verdict.parts == (1 + 2 + 0.5 + 0.25, 4 + 8 + 0.5 + 0.25)
    assert verdict.objective == 12.75
    assert verdict.feasible


def test_a_third_device_between_pays_both_ways() -> None:
    verdict = problem(TIMES, DIAMOND, MOVES, accelerators=3).judge(MaxLoadDecision((0, 0, 1, 2)))
    assert verdict.parts == (1 + 2 + 0.5 + 0.25, 4 + 0.5 + 0.125, 8 + 0.5 + 0.25 + 0.125)


def test_cpus_pay_no_transfer_but_their_neighbours_do() -> None:
    verdict = problem(TIMES, DIAMOND, MOVES, accelerators=1, cpus=1).judge(MaxLoadDecision((1, 0, 0, 0)))
    assert verdict.parts == (2 + 4 + 8 + 0.5, 10.0)


def test_contiguous_plans_have_no_circle_between_devices() -> None:
    chain = problem(TIMES, DIAMOND, MOVES)
    assert kinds(chain, 0, 1, 0, 1) == []
    assert kinds(chain, 0, 1, 1, 0) == ["order"]
    assert kinds(problem(TIMES, DIAMOND, MOVES, contiguous=False), 0, 1, 1, 0) == []


def test_backward_nodes_are_not_ordered() -> None:
    training = problem([1.0] * 4, [(0, 1), (1, 2), (2, 3)], [0.0] * 4, backward=[False, False, True, True])
    assert kinds(training, 0, 1, 1, 0) == []


def test_colours_stay_together() -> None:
    assert kinds(problem(TIMES, [], MOVES, colour=[5, -1, 5, -1]), 0, 0, 1, 1) == ["colour"]
    assert kinds(problem(TIMES, [], MOVES, colour=[5, -1, 5, -1]), 0, 1, 0, 1) == []


def test_memory_counts_on_accelerators_only() -> None:
    tight = problem(TIMES, [], MOVES, cpus=1, size_bytes=[3.0, 3.0, 3.0, 3.0], memory_bytes=6.0)
    assert kinds(tight, 0, 0, 1, 1) == []
    assert kinds(tight, 0, 0, 0, 1) == ["memory"]
    assert kinds(tight, 2, 2, 2, 2) == []


def test_unsupported_nodes_belong_on_cpus() -> None:
    mixed = problem(TIMES, [], MOVES, cpus=1, supported=[True, False, True, True])
    assert kinds(mixed, 0, 1, 0, 0) == ["support"]
    assert kinds(mixed, 0, 2, 0, 0) == []


def test_malformed_decisions_are_infinitely_bad() -> None:
    given = problem(TIMES, [], MOVES)
    assert given.judge(MaxLoadDecision((0, 1))).objective == math.inf
    assert kinds(given, 0, 1) == ["coverage"]
    assert kinds(given, 0, 1, 2, -1) == ["devices", "devices"]


def test_trivial_plans() -> None:
    plans = dict(problem([1.0, 1.0, 1.0, 1.0], [(0, 1), (1, 2), (2, 3)], [0.0] * 4, cpus=1).trivial())
    assert plans["one accelerator"] == (0, 0, 0, 0)
    assert plans["even split in topological order"] == (0, 0, 1, 1)
    assert plans["one CPU"] == (2, 2, 2, 2)


def graph(supported: bool = True) -> OperatorGraph:
    nodes = (
        OperatorNode(10, "a", 1.0, 10.0, 4.0, supported, False, 40),
        OperatorNode(20, "b", 2.0, 20.0, 4.0, True, False, None),
        OperatorNode(30, "c", 3.0, 30.0, 4.0, True, False, -7),
    )
    return OperatorGraph("g", "", nodes, ((0, 1), (0, 2)), (0.5, 0.0, 0.0), 2, 0, 8.0)


def test_problems_of_graphs() -> None:
    found = max_load_problem(graph(), contiguous=True, accelerators=3, memory_bytes=math.inf)
    assert (found.accelerators, found.cpus, found.memory_bytes, found.unit) == (3, 0, math.inf, "ms")
    assert found.colour.tolist() == [0, -1, 1]
    assert np.array_equal(found.edges, [[0, 1], [0, 2]])
    assert max_load_problem(graph(), contiguous=False).memory_bytes == 8.0


def test_wishes_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="no devices"):
        max_load_problem(graph(), contiguous=True, accelerators=0)
    with pytest.raises(UsageError, match="cannot have"):
        max_load_problem(graph(), contiguous=True, memory_bytes=math.nan)
    with pytest.raises(JobError, match="10"):
        max_load_problem(graph(supported=False), contiguous=True)


def test_growing_graphs() -> None:
    twice = repeated(graph(), 2)
    assert [n.id for n in twice.nodes] == [10, 20, 30, 41, 51, 61]
    assert twice.edges == ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5))
    assert twice.transfer_ms == (0.5, 0.5, 0.5, 0.5, 0.0, 0.0)
    assert widened(graph(), 2).edges == ((0, 1), (0, 2), (3, 4), (3, 5))
    training = mirrored(graph())
    # Twins 3, 4, 5, and node 6 that sums the gradients which 1 and 2 send back for the result of 0.
    assert [n.backward for n in training.nodes] == [False] * 3 + [True] * 4
    assert set(training.edges) == {(0, 1), (0, 2), (0, 4), (0, 5), (4, 6), (5, 6), (6, 3)}
    assert [n.accelerator_ms for n in training.nodes] == [1.0, 2.0, 3.0, 2.0, 4.0, 6.0, 0.0]
    assert training.nodes[4].colour == training.nodes[1].colour
    assert training.transfer_ms == (0.5, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5)

"""Capacities at the edge of what plans need: solvers, integer models and judges decide alike, to the last bit.

Each problem gets the capacity that one of its plans needs exactly, off by 1e-13 to 1e-8 in both directions; the
tolerance of `fits` (1e-9) lies in between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.published.problems import (
    BaPipeSchedule,
    ChainStages,
    PipeDreamProblem,
    PlacedPipelineProblem,
    bapipe,
    hetpipe,
    piper_problem,
)
from planner.published.readers import piper_from_document
from planner.published.solvers import search_partition
from tests.oracles.partitions import by_force
from tests.published.partition import (
    test_chain,
    test_iteration,
    test_latency,
    test_layerwise,
)
from tests.published.partition.checks import by_cp_sat
from tests.published.partition.max_load_instances import problems as max_load_problems
from tests.published.partition.pipedream_cases import layer_graphs, memories
from tests.published.partition.piper_instances import documents

Solve = Callable[..., Any]
COMPUTE, WEIGHTS = np.array([[3.0, 3.0, 3.6]]), np.array([10.0, 10.0, 5.0])
ROUNDING, BEYOND = 1 - 5e-13, 1 - 2e-9


def balanced(part: float) -> ChainStages:
    """Two layers and one: 2 * 20 + 2 * 2 bytes, and (4 + 1) * 6 s; one and two: 5 * 6.6 s in less memory."""
    return bapipe(
        np.repeat(COMPUTE, 2, axis=0), np.ones(3), np.zeros(4), WEIGHTS, np.full(2, 44 * part),
        bandwidth_byte_per_s=1.0, micro_batches=4, schedule=BaPipeSchedule.SNO,
    )  # fmt: skip


def virtual_worker(part: float) -> ChainStages:
    """Two layers and one: two mini-batches in flight, 2 * (20 + 2) bytes, and 6 s; one and two: 6.6 s."""
    return hetpipe(
        COMPUTE, WEIGHTS, np.ones(3), np.zeros(4), (2,), np.array([44 * part]), np.ones((1, 1)), concurrent=2
    )


@pytest.mark.parametrize(
    ("problem", "seconds"),
    [(balanced(ROUNDING), 30.0), (balanced(BEYOND), 33.0),
     (virtual_worker(ROUNDING), 6.0), (virtual_worker(BEYOND), 6.6)],
)  # fmt: skip
def test_a_stage_that_just_fits_and_one_that_just_does_not(problem: ChainStages, seconds: float) -> None:
    for solve in (by_force, search_partition):
        found = solve(problem)
        assert (found.objective, found.proven) == (pytest.approx(seconds, rel=1e-12), True)


FIELDS = ("memory_bytes", "memory")
"""What families call the memory of a device."""


def with_capacity(problem: Any, capacity: float) -> Any:
    """The same problem with another memory on every device."""
    field = next(name for name in FIELDS if hasattr(problem, name))
    present = getattr(problem, field)
    if field == "memory":
        return replace(problem, memory=replace(present, device_bytes=capacity))
    return replace(problem, **{field: np.full(present.shape, capacity) if np.ndim(present) else capacity})


def needs(problem: Any) -> list[float]:
    """What the devices of the best plan without limit, and of plans that anybody would try, need exactly."""
    free = by_force(with_capacity(problem, math.inf))
    plans = [plan for _, plan in problem.trivial()] + ([free.decision] if free.decision is not None else [])
    empty = with_capacity(problem, 0.0)
    return sorted({v.needed for plan in plans for v in empty.judge(plan).violations if v.kind == "memory"})


def apart() -> st.SearchStrategy[float]:
    """Relative distances of 1e-13 to 1e-8 in both directions, and the tolerance itself."""
    sizes = st.floats(-13, -8).map(lambda power: 10.0**power)
    return st.tuples(st.sampled_from([-1, 1]), st.one_of(sizes, st.sampled_from([0.0, 1e-9, 1e-16]))).map(math.prod)


def agree(problem: Any, at: int, distance: float, *solvers: Solve) -> None:
    """Every solver proves what trying everything through the judge finds."""
    known = needs(problem)
    if not known:
        return
    edge = with_capacity(problem, known[at % len(known)] * (1 + distance))
    oracle = by_force(edge)
    for solve in solvers:
        found = solve(edge, time_limit_s=60.0)
        assert found.objective == pytest.approx(oracle.objective, rel=1e-9)
        assert found.proven
        assert found.decision is None or edge.judge(found.decision).feasible


EXAMPLES = settings(max_examples=60, deadline=None)
AT = st.integers(0, 20)
SCALES = st.sampled_from([1.0, 0.1, 1 / 3, 1e9 / 7])


def scaled(problem: Any, factor: float, *fields: str) -> Any:
    """The same problem with sizes that are no whole numbers, whose sums are rounded."""
    return dataclasses.replace(problem, **{name: factor * getattr(problem, name) for name in fields})


@EXAMPLES
@given(
    st.one_of(test_chain.bapipe_problems(), test_chain.hetpipe_problems()),
    SCALES, AT, apart(),
)  # fmt: skip
def test_chains(problem: ChainStages, factor: float, at: int, distance: float) -> None:
    problem = scaled(problem, factor, "saved_bytes", "weight_bytes", "boundary_bytes")
    agree(problem, at, distance, search_partition)


@EXAMPLES
@given(max_load_problems(5), AT, apart())
def test_max_load(problem: Any, at: int, distance: float) -> None:
    agree(problem, at, distance, by_cp_sat, search_partition)


@EXAMPLES
@given(test_latency._instances(), AT, apart())
def test_latency_plans(problem: Any, at: int, distance: float) -> None:
    agree(problem, at, distance, search_partition)


@EXAMPLES
@given(test_layerwise._instances(), AT, apart())
def test_layerwise_strategies(problem: Any, at: int, distance: float) -> None:
    agree(problem, at, distance, search_partition)


@EXAMPLES
@given(test_iteration._instances().filter(lambda p: p.fixed_bytes is not None), SCALES, AT, apart())
def test_iteration_times(problem: Any, factor: float, at: int, distance: float) -> None:
    problem = scaled(problem, factor, "fixed_bytes", "activation_bytes")
    agree(problem, at, distance, search_partition)


@EXAMPLES
@given(documents(), AT, apart())
def test_piper(document: dict[str, Any], at: int, distance: float) -> None:
    agree(piper_problem(piper_from_document(document)), at, distance, search_partition)


@EXAMPLES
@given(layer_graphs(4), memories(), st.booleans(), AT, apart())
def test_pipedream_on_one_level(layers: Any, memory: Any, replicate: bool, at: int, distance: float) -> None:
    problem = PipeDreamProblem(layers, (3,), (8.0,), memory=memory, replicate=replicate, use_all=False)
    agree(problem, at, distance, search_partition)


@EXAMPLES
@given(layer_graphs(4), memories(), st.booleans(), AT, apart())
def test_pipedream_on_two_levels(layers: Any, memory: Any, replicate: bool, at: int, distance: float) -> None:
    problem = PipeDreamProblem(layers, (2, 2), (8.0, 2.0), memory=memory, replicate=replicate)
    agree(problem, at, distance, search_partition)


@EXAMPLES
@given(layer_graphs(4), memories(), st.booleans(), AT, apart())
def test_placed_stages(layers: Any, memory: Any, use_all: bool, at: int, distance: float) -> None:
    problem = PlacedPipelineProblem(layers, (2, 2), (8.0, 2.0), memory=memory, use_all=use_all)
    agree(problem, at, distance, search_partition)

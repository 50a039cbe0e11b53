"""The exact solvers of PipeDream's problems find what trying everything finds, through the judge."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.published.problems import LayerDag, Memory, PipeDreamProblem, PlacedPipelineProblem
from planner.published.solvers import search_partition
from tests.oracles.partitions import by_force
from tests.published.partition.pipedream_cases import TERMS, layer_graphs, memories

EXAMPLES = settings(max_examples=150, deadline=None)


def same(first: float, second: float) -> bool:
    return first == second or math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)


@EXAMPLES
@given(
    layers=layer_graphs(),
    machines=st.integers(1, 5),
    speed=st.sampled_from([0.5, 2.0, 50.0]),
    memory=memories(),
    replicate=st.booleans(),
    use_fewer=st.booleans(),
    terms=st.fixed_dictionaries(TERMS),
)
def test_one_level(
    layers: LayerDag, machines: int, speed: float, memory: Memory, replicate: bool, use_fewer: bool, terms: dict
) -> None:
    problem = PipeDreamProblem(
        layers, (machines,), (speed,), memory=memory, replicate=replicate, use_all=not use_fewer, **terms
    )
    oracle, result = by_force(problem), search_partition(problem)
    assert same(result.objective, oracle.objective)
    assert result.proven


@EXAMPLES
@given(
    layers=layer_graphs(4),
    machines=st.sampled_from([(2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (2, 1, 2), (2, 2, 2)]),
    speeds=st.tuples(*(st.sampled_from([0.5, 2.0, 50.0]) for _ in range(3))),
    memory=memories(),
    replicate=st.booleans(),
    use_fewer=st.booleans(),
    terms=st.fixed_dictionaries(TERMS),
)
def test_several_levels(
    layers: LayerDag,
    machines: tuple[int, ...],
    speeds: tuple[float, ...],
    memory: Memory,
    replicate: bool,
    use_fewer: bool,
    terms: dict,
) -> None:
    if math.isfinite(memory.device_bytes):
        use_fewer = False
    problem = PipeDreamProblem(
        layers,
        machines,
        speeds[: len(machines)],
        memory=memory,
        replicate=replicate,
        use_all=not use_fewer or len(machines) >= 3,
        **terms,
    )
    oracle, result = by_force(problem), search_partition(problem)
    assert same(result.objective, oracle.objective)
    assert result.proven


@EXAMPLES
@given(
    layers=layer_graphs(4),
    fanout=st.sampled_from([(4,), (2, 2), (3, 2), (2, 3), (2, 2, 2)]),
    speeds=st.tuples(st.sampled_from([50.0, 8.0]), st.sampled_from([8.0, 2.0]), st.sampled_from([2.0, 0.5])),
    memory=memories(),
    use_all=st.booleans(),
    terms=st.fixed_dictionaries(TERMS),
)
def test_placed(
    layers: LayerDag,
    fanout: tuple[int, ...],
    speeds: tuple[float, ...],
    memory: Memory,
    use_all: bool,
    terms: dict,
) -> None:
    problem = PlacedPipelineProblem(layers, fanout, speeds[: len(fanout)], memory=memory, use_all=use_all, **terms)
    oracle, result = by_force(problem), search_partition(problem)
    assert same(result.objective, oracle.objective)
    assert result.proven

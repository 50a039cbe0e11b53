"""Tofu's recursion against enumeration of all sequences of steps, its coarsening, and the theorem on its optimality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph import Graph
from planner.operators import graph_specs, needs_gradient
from planner.sharding import Part, layout_text
from planner.sharding.choices import shrink
from planner.sharding.searches.tofu import Pass, cut_bytes, cuts_of, passes_of, prime_factors, tofu_plan
from tests.operators.calls import graph, node
from tests.sharding.graphs import attention_block, products


def _passes(what: Graph) -> list[Pass]:
    specs, wanted = graph_specs(what), needs_gradient(what)
    return [one for i in range(len(what.nodes)) for one in passes_of(what, i, specs[i], wanted)]


def _exhaustive(what: Graph, steps: Sequence[int]) -> float:
    """Least total over all ways to rest every tensor and cut every pass in every step."""

    def best(passes: list[Pass], shapes: dict[str, tuple[int, ...]], left: Sequence[int], groups: int) -> float:
        if not left:
            return 0.0
        p, total = left[0], math.inf
        names = sorted(shapes)
        options = [[Part(d) for d in range(len(shapes[n])) if shapes[n][d] % p == 0] or [Part(-1)] for n in names]
        for rest in itertools.product(*options):
            at = dict(zip(names, rest, strict=True))
            smaller = {n: tuple(s // p if at[n].dim == d else s for d, s in enumerate(shapes[n])) for n in names}
            for cuts in itertools.product(*(cuts_of(one, p, 4.0) for one in passes)):
                here = sum(
                    cut_bytes(one, cut, [at[n] for n in (*one.reads, *one.writes)], p, 4.0)
                    for one, cut in zip(passes, cuts, strict=True)
                )
                if groups * here >= total:
                    continue
                inner = [
                    replace(one, nests=tuple(shrink(n, cut.dim, p) for n in one.nests))
                    for one, cut in zip(passes, cuts, strict=True)
                ]
                total = min(total, groups * here + best(inner, smaller, left[1:], groups * p))
        return total

    passes = _passes(what)
    shapes = {n: what.tensors[n].shape for one in passes for n in (*one.reads, *one.writes)}
    return best(passes, shapes, steps, 1)


@settings(deadline=None, max_examples=12)
@given(sizes=st.lists(st.sampled_from([4, 8, 16, 64]), min_size=2, max_size=2), batch=st.sampled_from([4, 16, 64]))
def test_two_steps_are_within_the_theorem_of_the_exhaustive_optimum(sizes: list[int], batch: int) -> None:
    what = products(sizes, batch=batch)
    plan = tofu_plan(what, 4)
    best = _exhaustive(what, (2, 2))
    assert plan.total_bytes >= best - 1e-9
    totals = [step.total_bytes for step in plan.steps]
    if totals == sorted(totals):
        assert plan.total_bytes == pytest.approx(best)


@settings(deadline=None, max_examples=8)
@given(sizes=st.lists(st.sampled_from([4, 8, 32]), min_size=3, max_size=3), batch=st.sampled_from([4, 32]))
def test_one_step_is_the_exhaustive_optimum(sizes: list[int], batch: int) -> None:
    what = products(sizes, batch=batch)
    assert tofu_plan(what, 2).total_bytes == pytest.approx(_exhaustive(what, (2,)))


def test_prime_factors() -> None:
    assert prime_factors(1) == ()
    assert prime_factors(12) == (2, 2, 3)
    assert prime_factors(7) == (7,)


def test_three_workers_cut_in_three() -> None:
    plan = tofu_plan(products([9, 9], batch=6), 3)
    assert [step.ranks for step in plan.steps] == [3]
    assert all(plan.layout(n)[0].cuts for n in ("w0", "h0"))


def test_every_tensor_is_cut_and_memory_falls_with_the_workers() -> None:
    plan = tofu_plan(attention_block(), 8)
    assert all(part.cuts for name in ("wq", "wu", "wd", "n1", "a", "u") for part in plan.layout(name))
    assert layout_text(plan.layout("wu")).count("S") == 3


def test_elementwise_operators_join_their_tensors() -> None:
    plan = tofu_plan(products([8, 8, 8], relu=True), 2)
    assert plan.layout("h0") == plan.layout("r0")


def test_unrolled_steps_are_cut_alike() -> None:
    """The same weight applied at four time steps: one group of hidden states."""
    tensors = {"w": "w 8 8", "x0": "x 4 8"} | {f"x{t}": "x 4 8" for t in range(1, 5)}
    nodes = [node("MatMul", f"x{t} w", f"x{t + 1}") for t in range(4)]
    plan = tofu_plan(graph(tensors, nodes), 2)
    assert len({plan.layout(f"x{t}") for t in range(5)}) == 1


def test_each_step_counts_all_groups_of_the_steps_before() -> None:
    plan = tofu_plan(products([64, 64], batch=64), 8)
    assert plan.total_bytes == sum(step.groups * step.bytes for step in plan.steps)
    assert [step.groups for step in plan.steps] == [1, 2, 4]

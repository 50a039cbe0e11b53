"""Changes of layout: the steps, executed, lead where they say, and cost what is counted by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware import load_cluster
from planner.sharding import Part, ideal_mesh, layouts, mesh_on, parse_layout, reshard, reshard_table
from tests.sharding.mesh_sim import apply_step, join, scatter


@pytest.mark.parametrize(
    ("before", "after", "moves", "sent"),
    [
        ("S0R", "S0R", [], 0.0),
        ("PR", "RR", ["all-reduce"], 2 * 1 / 2 * 256),
        ("S0P", "S0S1", ["reduce-scatter"], 3 / 4 * 128),
        ("RP", "RS1", ["slice", "reduce-scatter", "all-gather"], 3 / 4 * 128 + 1 / 2 * 64),
        ("RS1", "RR", ["all-gather"], 3 / 4 * 256),
        ("RS1", "RS0", ["all-to-all"], 3 / 4 * 64),
        ("RR", "S0S1", ["slice", "slice"], 0.0),
        ("PP", "RR", ["all-reduce"], 2 * 7 / 8 * 256),
        ("S0P", "S0R", ["all-reduce"], 2 * 3 / 4 * 128),
        ("RR", "PR", ["mask"], 0.0),
    ],
)
def test_known_changes_of_a_256_byte_tensor_on_2_by_4(before: str, after: str, moves: list[str], sent: float) -> None:
    mesh = ideal_mesh((2, 4))
    steps = reshard(mesh, (8, 16), 2.0, parse_layout(before, 2), parse_layout(after, 2))
    assert [s.what for s in steps] == moves
    assert sum(s.sent_bytes for s in steps) == pytest.approx(sent)


def test_a_cut_moves_between_equal_axes_by_a_permutation() -> None:
    mesh = ideal_mesh((2, 2))
    (step,) = reshard(mesh, (8, 4), 1.0, parse_layout("S0R", 2), parse_layout("RS0", 2))
    assert step.what == "permute"
    assert step.sent_bytes == 16


@settings(deadline=None, max_examples=60)
@given(data=st.data(), sizes=st.sampled_from([(2,), (4,), (2, 2), (2, 4), (4, 2), (2, 2, 2)]))
def test_steps_lead_to_the_layout(data: st.DataObject, sizes: tuple[int, ...]) -> None:
    shape = (8, 24)
    mesh = ideal_mesh(sizes)
    tags = (Part(1, 3),)
    choices = list(layouts(shape, sizes, interleaved=tags))
    before, after = data.draw(st.sampled_from(choices)), data.draw(st.sampled_from(choices))
    table = reshard_table(mesh, shape, 1.0, interleaved=tags)
    if not np.isfinite(table.seconds[table.index[before], table.index[after]]):
        return
    whole = np.random.default_rng(0).normal(size=shape)
    pieces = scatter(whole, before, sizes)
    steps = table.steps(before, after)
    for step in steps:
        pieces = apply_step(pieces, step, sizes)
    np.testing.assert_allclose(join(pieces, after, sizes, shape), whole, atol=1e-12)
    expected = scatter(whole, after, sizes)
    if all(p.dim != -2 for p in after):
        for at, piece in pieces.items():
            np.testing.assert_allclose(piece, expected[at], atol=1e-12)
    assert sum(s.seconds for s in steps) == pytest.approx(table.seconds[table.index[before], table.index[after]])


def test_every_layout_can_be_reached_from_every_other() -> None:
    table = reshard_table(ideal_mesh((2, 4)), (8, 16, 8), 2.0)
    assert np.isfinite(table.seconds).all()


def test_changes_are_shortest_paths() -> None:
    cluster = load_cluster("dgx-a100", nodes=2)
    table = reshard_table(mesh_on(cluster, (2, 8)), (16, 1024, 512), 2.0)
    cost = table.seconds
    for a, b, c in itertools.product(range(0, len(cost), 3), repeat=3):
        assert cost[a, c] <= cost[a, b] + cost[b, c] + 1e-12


@pytest.mark.parametrize("shape", [(16, 32, 64), (2, 32, 64), (16, 16, 16)])
def test_layouts_that_differ_in_the_names_of_dimensions_cost_the_same(shape: tuple[int, ...]) -> None:
    """On four axes, each change is a direct step and the fastest change from there, and no way round is faster."""
    table = reshard_table(mesh_on(load_cluster("dgx-a100", nodes=2), (2, 2, 2, 2)), shape, 2.0)
    cost, draw = table.seconds, np.random.default_rng(0)
    assert len(cost) > 256
    for i, j in draw.integers(len(cost), size=(300, 2)).tolist():
        steps = table.steps(table.layouts[i], table.layouts[j])
        assert sum(step.seconds for step in steps) == pytest.approx(cost[i, j])
        assert sum(step.sent_bytes for step in steps) == pytest.approx(table.sent_bytes[i, j])
        assert [*(step.before for step in steps), table.layouts[j]] == [
            table.layouts[i], *(step.after for step in steps)
        ]  # fmt: skip
        assert (cost[i] + cost[:, j] >= cost[i, j] * (1 - 1e-12)).all()

"""Meshes: which ranks an axis joins, and what that costs on the links."""

from __future__ import annotations

import pytest

from planner.errors import UsageError
from planner.hardware import Collective, collective_s, load_cluster
from planner.sharding import ideal_mesh, mesh_on


def test_the_last_axis_is_innermost() -> None:
    mesh = ideal_mesh({"data": 2, "model": 4})
    assert mesh.groups((1,)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups((0,)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups((0, 1)).tolist() == [list(range(8))]


def test_ideal_collectives_count_traffic() -> None:
    mesh = ideal_mesh((4,))
    assert float(mesh.seconds(Collective.ALL_REDUCE, (0,), 100.0)) == pytest.approx(150.0)
    assert float(mesh.seconds(Collective.ALL_GATHER, (0,), 100.0)) == pytest.approx(75.0)
    assert float(mesh.seconds(Collective.SEND, (0,), 100.0)) == 100.0


def test_axes_cost_what_their_groups_cost() -> None:
    cluster = load_cluster("dgx-a100", nodes=2)
    mesh = mesh_on(cluster, {"data": 2, "model": 8})
    inside = collective_s(cluster, Collective.ALL_REDUCE, list(range(8)), 1e8, concurrent=2)
    across = collective_s(cluster, Collective.ALL_REDUCE, [0, 8], 1e8, concurrent=8)
    assert float(mesh.seconds(Collective.ALL_REDUCE, (1,), 1e8)) == pytest.approx(inside)
    assert float(mesh.seconds(Collective.ALL_REDUCE, (0,), 1e8)) == pytest.approx(across)
    assert across > inside, "eight groups share the node's ports"


def test_groups_of_which_one_leaves_a_node_are_priced_by_the_slowest() -> None:
    cluster = load_cluster("dgx-a100", nodes=2)
    mesh = mesh_on(cluster, (5, 3))
    groups = mesh.groups((1,))
    assert groups.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    slow = collective_s(cluster, Collective.ALL_GATHER, groups[2], 1e9, concurrent=5)
    assert float(mesh.seconds(Collective.ALL_GATHER, (1,), 1e9)) == pytest.approx(slow)


def test_a_mesh_must_fit() -> None:
    cluster = load_cluster("dgx-a100")
    with pytest.raises(UsageError, match="leaves"):
        mesh_on(cluster, (4, 4))
    with pytest.raises(UsageError, match="0 ranks"):
        ideal_mesh({"data": 0})

"""Shapes that systems with equal pipelines try: where their copies are placed, and what is given up unplayed."""

from __future__ import annotations

import pytest

from planner import schedules
from planner.play import Transfers
from planner.space.types import StageChoice
from planner.systems import get
from planner.systems._least import least_s
from planner.systems._ordered import _best
from planner.systems._play import play
from planner.systems._price import price
from planner.systems._shapes import shapes_for
from planner.systems._sweep import _candidates, _shorter, by_sweep, cut, point_of
from planner.systems.types import Point
from tests.space.instances import chain, cluster
from tests.systems.toy import bench


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_replicas_of_a_stage_share_a_node_where_gradients_are_large(name: str) -> None:
    """Two nodes of two devices, 100 B/s inside and 1 B/s between; two blocks of 8 elements, F = 1 s, B = 2 s.

    Two stages, two copies of two micro-batches: (2 + 2 - 1) (1 + 2) = 9 s, and 32 B of gradients a stage are reduced
    among two: 2 * 1/2 * 32 / 100 = 0.32 s inside a node, 32 s or more between the nodes.
    """
    found = by_sweep(bench(chain([1.0, 1.0], elements=8.0), cluster((2, 2), (100.0, 1.0)), 4), get(name))
    assert found.plan == "2 stages x 2 copies, placed stage by stage, micro-batch 1 x 2"
    assert found.iteration_s == pytest.approx(9.32)
    # Both stages: 2 (2 - 1) * 32 B leave the devices.
    assert found.sent_bytes == pytest.approx(128)


def test_stages_of_a_pipeline_share_a_node_where_activations_are_large() -> None:
    """The same without weights and with 10 B over the boundary, each way 0.1 s inside a node, 10 s between nodes.

    Stage 1: receives until 1.1, works until 4.1, sends until 4.2; then 0.1 + 3 + 0.1 again until 7.4. Stage 0 repeats
    its second backward from there: 9.4 s.
    """
    found = by_sweep(bench(chain([1.0, 1.0], boundary=10.0), cluster((2, 2), (100.0, 1.0)), 4), get("1f1b"))
    assert found.plan == "2 stages x 2 copies, micro-batch 1 x 2"
    assert found.iteration_s == pytest.approx(9.4)


def test_stages_for_a_schedule_are_placed_both_ways_too() -> None:
    """The same two jobs as above, as `plan --schedule` has them: 9.32 s side by side, 9.4 s in line."""
    machine, schedule = cluster((2, 2), (100.0, 1.0)), schedules.get("1f1b")
    for costs, ranks, seconds in (
        (chain([1.0, 1.0], elements=8.0), (0, 2, 1, 3), 9.32),
        (chain([1.0, 1.0], boundary=10.0), (0, 1, 2, 3), 9.4),
    ):
        own = bench(costs, machine, 4)
        shapes = [shape for shape in shapes_for(own, schedule) if shape.copies == 2 and not shape.recompute]
        found = _best(own, shapes, Transfers.BLOCKING)
        assert found.seconds == pytest.approx(seconds)
        assert found.point.ranks == ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "chimera", "pipedream-2bw", "pipemare"])
def test_no_shape_is_faster_than_its_bound(name: str) -> None:
    costs = chain(
        [0.7, 1.0, 1.3, 0.4, 1.1, 0.9], elements=3.0, boundary=[0, 4.0, 9.0, 2.0, 30.0, 6.0, 0], update_s=0.05
    )
    own, system, played = bench(costs, cluster((2, 3), (90.0, 11.0)), 24), get(name), 0
    for candidate in _candidates(own, system):
        marks = cut(own, candidate)
        if marks is None:
            continue
        point = point_of(candidate, marks, _shorter(system, candidate))
        drains = schedules.get(point.schedule).weight_policy.synchronous
        least = least_s(price(own, point), point.micro_batches, system.transfers, drains=drains)
        found = play(own, point, system.transfers)
        if found.feasible:
            assert least <= found.iteration_s * (1 + 1e-9)
            assert found.iteration_s < 4 * least
            played += 1
    assert played


def test_links_that_stages_share_are_shared_in_time() -> None:
    """Two copies over two nodes: both stages reduce over the same ports of 1 B/s, 32 B and 8 B between two devices.

    Both at half the speed until the smaller is done, 2 * 2 * 1/2 * 8 = 16 s; the larger has 24 B left: 16 + 24 = 40 s.
    """
    own = bench(chain([1.0, 1.0], elements=[8.0, 2.0]), cluster((2, 2), (1e9, 1.0)), 4)
    stages = (StageChoice(0, 1, 1), StageChoice(1, 2, 1))
    figures = price(own, Point(stages, 2, 1, 2, "1f1b"))
    assert figures.sync_s.tolist() == pytest.approx([40, 16])
    assert figures.exchanged_bytes.tolist() == [64, 16]
    # Replicas of a stage in a node of their own share no port.
    beside = price(own, Point(stages, 2, 1, 2, "1f1b", ranks=(0, 2, 1, 3)))
    assert beside.sync_s.tolist() == pytest.approx([32e-9, 8e-9])


@pytest.mark.parametrize("name", ["pipedream-2bw", "pipemare", "pipelined-backprop"])
def test_pipelines_that_never_drain_are_never_idle_where_nothing_travels(name: str) -> None:
    """Eight samples through four blocks of 1 + 2 s on four devices: 8 * 4 * 3 / 4 = 24 s, whatever the shape."""
    found = by_sweep(bench(chain([1.0] * 4), cluster((4,), (1e9,)), 8), get(name))
    assert found.iteration_s == pytest.approx(24)
    assert found.bubble == pytest.approx(0, abs=1e-9)
    assert found.devices == 4


@pytest.mark.parametrize(("name", "slots"), [("gpipe", 5), ("1f1b", 5)])
def test_pipelines_that_drain_are_idle_as_their_page_says(name: str, slots: int) -> None:
    """The same synchronously. Two stages of two blocks (6 s), two copies of M = 4: (4 + 1) * 6 = 30 s, bubble 1/5.

    Four stages of 3 s, M = 8, would take (8 + 3) * 3 = 33 s.
    """
    found = by_sweep(bench(chain([1.0] * 4), cluster((4,), (1e9,)), 8), get(name))
    assert found.iteration_s == pytest.approx(slots * 6)
    assert found.bubble == pytest.approx(1 / 5)


def test_chimera_is_idle_less_than_1f1b() -> None:
    """Two stages in both directions on two devices: N = D = 2 has no bubble, so that 8 * 4 * 3 / 4 = 24 s.

    Every device holds all blocks then, and reduces them among all four: 4 blocks of 8 elements of 4 B and 4 B.
    """
    found = by_sweep(bench(chain([1.0] * 4, elements=8.0), cluster((4,), (1e9,)), 8), get("chimera"))
    assert found.iteration_s == pytest.approx(24, rel=1e-6)
    assert found.memory is not None
    assert found.memory.weights + found.memory.gradients == pytest.approx(4 * 8 * (4 + 4))
    assert found.sent_bytes == pytest.approx(2 * 3 * 4 * 8 * 4)


def test_one_sample_is_too_little_for_two_versions() -> None:
    found = by_sweep(bench(chain([1.0] * 4), cluster((4,), (1e9,)), 1), get("pipedream-2bw"))
    assert "needs at least 2 micro-batches an iteration" in found.reason

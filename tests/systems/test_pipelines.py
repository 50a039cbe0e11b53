"""What systems with equal pipelines decide on clusters so small that it can be worked out by hand."""

from __future__ import annotations

import pytest

from planner.systems import get, proposals
from tests.space.instances import chain, cluster
from tests.systems.toy import run_system, setting


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_replicas_of_a_stage_share_a_node_where_gradients_are_large(name: str) -> None:
    """Two nodes of two devices, 100 B/s inside and 1 B/s between; two blocks of 8 elements, F = 1 s, B = 2 s.

    Two stages, two copies of two micro-batches: (2 + 2 - 1) (1 + 2) = 9 s, and 32 B of gradients a stage are reduced
    among two: 2 * 1/2 * 32 / 100 = 0.32 s inside a node, 32 s or more between the nodes.
    """
    found = run_system(get(name), setting(chain([1.0, 1.0], elements=8.0), cluster((2, 2), (100.0, 1.0)), 4))
    assert found.plan == "DP 2 x TP 1 x PP 2, micro-batch 1 x 2"
    assert found.iteration_s == pytest.approx(9.32)
    # Both stages: 2 (2 - 1) * 32 B leave the devices.
    assert found.sent_bytes == pytest.approx(128)


def test_stages_of_a_pipeline_share_a_node_where_activations_are_large() -> None:
    """The same without weights and with 10 B over the boundary, each way 0.1 s inside a node, 10 s between nodes.

    Stage 1: receives until 1.1, works until 4.1, sends until 4.2; then 0.1 + 3 + 0.1 again until 7.4. Stage 0 repeats
    its second backward from there: 9.4 s.
    """
    found = run_system(get("1f1b"), setting(chain([1.0, 1.0], boundary=10.0), cluster((2, 2), (100.0, 1.0)), 4))
    assert found.plan == "DP 2 x TP 1 x PP 2, micro-batch 1 x 2"
    assert found.iteration_s == pytest.approx(9.4)


@pytest.mark.parametrize("name", ["pipedream-2bw", "pipemare", "pipelined-backprop"])
def test_pipelines_that_never_drain_are_never_idle_where_nothing_travels(name: str) -> None:
    """Eight samples through four blocks of 1 + 2 s on four devices: 8 * 4 * 3 / 4 = 24 s, whatever the shape."""
    found = run_system(get(name), setting(chain([1.0] * 4), cluster((4,), (1e9,)), 8))
    assert found.iteration_s == pytest.approx(24)
    assert found.bubble == pytest.approx(0, abs=1e-9)
    assert found.devices == 4


@pytest.mark.parametrize(("name", "slots"), [("gpipe", 5), ("1f1b", 5)])
def test_pipelines_that_drain_are_idle_as_their_page_says(name: str, slots: int) -> None:
    """The same synchronously. Two stages of two blocks (6 s), two copies of M = 4: (4 + 1) * 6 = 30 s, bubble 1/5.

    Four stages of 3 s, M = 8, would take (8 + 3) * 3 = 33 s.
    """
    found = run_system(get(name), setting(chain([1.0] * 4), cluster((4,), (1e9,)), 8))
    assert found.iteration_s == pytest.approx(slots * 6)
    assert found.bubble == pytest.approx(1 / 5)


def test_chimera_is_idle_less_than_1f1b() -> None:
    """Two stages in both directions on two devices: N = D = 2 has no bubble, so that 8 * 4 * 3 / 4 = 24 s.

    Every device holds all blocks then, and reduces them among all four: 4 blocks of 8 elements of 4 B and 4 B.
    """
    found = run_system(get("chimera"), setting(chain([1.0] * 4, elements=8.0), cluster((4,), (1e9,)), 8))
    assert found.iteration_s == pytest.approx(24, rel=1e-6)
    assert found.memory is not None
    assert found.memory.weights + found.memory.gradients == pytest.approx(4 * 8 * (4 + 4))
    assert found.sent_bytes == pytest.approx(2 * 3 * 4 * 8 * 4)


def test_one_sample_is_too_little_for_two_versions() -> None:
    found = run_system(get("pipedream-2bw"), setting(chain([1.0] * 4), cluster((4,), (1e9,)), 1))
    assert "needs at least 2 micro-batches an iteration" in found.reason


def test_a_block_that_no_device_can_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e12 elements of 8 bytes on devices of 1e12 bytes: one search explains it, none tries kinds of recomputation."""
    asked: list[bool] = []
    search = proposals.search
    monkeypatch.setattr(
        proposals, "search", lambda *a, **k: (asked.append(k.get("any_plan", False)), search(*a, **k))[1]
    )
    where = setting(chain([1.0] * 3, elements=[1.0, 1e12, 1.0]), cluster((2, 2), (100.0, 1.0)), 4)
    found = run_system(get("gpipe"), where)
    assert "block 'block 1' alone needs 7450.58 GiB, type 0 has 884.76 GiB below a headroom of 5.0%" in found.reason
    assert asked == [True]
    fitting = run_system(get("gpipe"), setting(chain([1.0] * 3, elements=[1.0, 1e11, 1.0]), where.cluster, 4))
    assert fitting.feasible

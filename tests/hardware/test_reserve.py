"""What the runtime takes of a device: communication buffers by groups, headroom, what a driver shows."""

from __future__ import annotations

import numpy as np
import pytest

from planner.hardware import load_cluster, load_device, neighbours, reserve_bytes, shown_bytes, with_headroom


@pytest.mark.parametrize(
    ("tensor", "data", "piped", "count"),
    [
        (1, 1, False, 0),
        (2, 1, False, 1),  # one other rank
        (8, 1, False, 3),  # ring and tree
        (1, 64, False, 3),
        (1, 2, True, 1 + 2 + 3),  # replica, neighbouring stages, and the group of all ranks
        (8, 8, True, 3 + 3 + 2 + 3),
    ],
)
def test_neighbours_by_groups(tensor: int, data: int, piped: bool, count: int) -> None:
    assert neighbours(tensor, data, piped) == count
    device = load_device("h100-sxm-80gb")
    assert reserve_bytes(device, tensor, data, piped) == 600 * 2**20 + count * 220 * 2**20


def test_neighbours_of_many_at_once() -> None:
    assert neighbours(1, np.array([1, 2, 8]), True).tolist() == [2, 6, 8]


def test_compiled_devices_keep_no_buffers_for_neighbours() -> None:
    assert reserve_bytes(load_device("tpu-v4"), 8, 8, True) == 512 * 2**20


def test_headroom_is_taken_off_what_plans_may_fill() -> None:
    cluster = load_cluster("dgx-h100")
    (device,), (whole,) = with_headroom(cluster, 0.1).devices, cluster.devices
    assert whole.capacity_bytes == whole.memory_bytes
    assert device.memory_bytes == whole.memory_bytes
    assert device.capacity_bytes == int(0.9 * whole.memory_bytes)
    assert device.usable_bytes == device.capacity_bytes - device.reserve_bytes
    assert with_headroom(cluster, 0.0) is cluster
    assert with_headroom(cluster, 0.1).fingerprint == cluster.fingerprint


def test_a_driver_shows_caches_and_the_copies_of_the_optimizer_step() -> None:
    # 10 GB of tensors and 2 billion 16-bit gradients in fp32, 8 % more by fragmentation, and a reserve of 1 GB
    assert shown_bytes(10e9, 1e9, 1.08, 2e9) == pytest.approx(1.08 * 18e9 + 1e9)

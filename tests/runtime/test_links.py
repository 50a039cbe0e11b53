"""What ranks of this machine take to exchange, measured and written as a node."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import planner
from planner.hardware.types import Collective

pytest.importorskip("torch", reason="torch is not installed")

from planner import runtime

SIZES = {4096: 4, 1 << 20: 4, 16 << 20: 2}


def test_two_ranks_are_measured_and_planned_for(tmp_path: Path) -> None:
    found = runtime.measure_links(2, runs_of=SIZES)
    assert (found.backend, found.ranks, set(found.ping_s)) == ("gloo", 2, set(SIZES))
    exchanged = {Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL}
    assert set(found.collectives_s) == exchanged | {Collective.BROADCAST}
    for seconds in (found.ping_s, *found.collectives_s.values()):
        assert all(1e-6 < s < 10 for s in seconds.values())
    assert found.machine is not None
    own = {"rank": planner.hardware.measured_device(found.machine, 2)}
    node = planner.hardware.ClusterSketch("here", "rank", (found.sketch(),), device_types=own)
    file = tmp_path / "here.yaml"
    file.write_text(planner.hardware.sketch_text(node))
    cluster = planner.load_cluster(file)
    assert (cluster.device_count, cluster.levels[0].name) == (2, "gloo")
    assert cluster.devices[0].memory_bytes == pytest.approx(found.machine.memory_bytes / 2, rel=0.01)
    assert "all_reduce" in file.read_text()


def test_latency_and_bandwidth_are_those_of_a_line() -> None:
    ping_s = {size: 1e-4 + size / 2e9 for size in SIZES}
    summed_s = {size: 2e-4 + size / 1e9 for size in SIZES}  # of two ranks 2 (n - 1) / n of the bytes is all of them
    found = runtime.MeasuredLink("gloo", 2, ping_s, {Collective.ALL_REDUCE: summed_s})
    sketch = found.sketch()
    assert sketch.byte_per_s == pytest.approx(2e9)
    assert sketch.latency_s == pytest.approx(1e-4)
    assert sketch.measured == {"all_reduce": [{"ranks": 2, "latency": "200 us", "bandwidth": "1 GB/s"}]}
    assert dataclasses.replace(found, collectives_s={}).sketch().measured == {}


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(planner.UsageError, match="1 rank exchanges nothing"):
        runtime.measure_links(1)
    with pytest.raises(planner.UsageError, match="GPUs"):
        runtime.measure_links(64, on_gpus=True)

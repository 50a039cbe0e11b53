"""Small instance files written out by hand, whose best plans can be seen without a computer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def operator_graph(**changes: Any) -> dict[str, Any]:
    """A chain of four nodes of 2, 3, 3 and 2 ms on two accelerators, 0.5 ms to move a result; on CPUs ten times slower.

    Cut in the middle each accelerator has 5 ms of work and pays one transfer: 5.5 ms, and no cut does better.
    """
    times = (2.0, 3.0, 3.0, 2.0)
    nodes = [
        {"id": 10 + i, "supportedOnFpga": 1, "cpuLatency": 10 * t, "fpgaLatency": t, "isBackwardNode": 0, "size": 100}
        for i, t in enumerate(times)
    ]
    edges = [{"sourceId": 10 + i, "destId": 11 + i, "cost": 0.5} for i in range(3)]
    return {"maxSizePerFPGA": 250, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges} | changes


def piper() -> dict[str, Any]:
    """Two layers of 1 s, on two devices of a link that costs nothing to speak of."""

    def choices(before: list[int], after: list[int]) -> list[dict[str, Any]]:
        return [{
            "id": "vanilla", "timePerSample": 1.0, "parameterSize": 0.0, "memoryUsageA": 1.0, "memoryUsageB": 1.0,
            "syncTimeFw": {str(i): 0.0 for i in before}, "syncTimeBw": {str(i): 0.0 for i in after},
        }]  # fmt: skip

    nodes = [
        {"id": 0, "name": "a", "TMPCs": {"1": choices([], [1])}},
        {"id": 1, "name": "b", "TMPCs": {"1": choices([0], [])}},
    ]
    edges = [{"sourceId": 0, "destId": 1, "communicationCost": 0.0}]
    return {
        "maxDevices": 2,
        "maxMemoryPerDevice": 5.0,
        "bandwidth": 1.0,
        "mbsInBatch": 8,
        "nodes": nodes,
        "edges": edges,
    }


PIPEDREAM = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=4000000.0, parameter_size=0.000
node2 -- Conv(1) -- forward_compute_time=20.000, backward_compute_time=40.000, activation_size=4000000.0, parameter_size=4000.000
node3 -- Conv(2) -- forward_compute_time=20.000, backward_compute_time=40.000, activation_size=4000000.0, parameter_size=4000.000
node4 -- Linear(3) -- forward_compute_time=10.000, backward_compute_time=20.000, activation_size=4000.0, parameter_size=400000000.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4"""  # noqa: E501
"""Two convolutions with few weights, which replicas suit, and a linear layer with many, which one device suits."""


def written(content: dict[str, Any] | str, path: Path) -> Path:
    """The instance as a file."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path

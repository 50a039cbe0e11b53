"""Small max-load problems: one to compute by hand, and random ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from planner.published.problems import MaxLoadProblem


def problem(
    accelerator_ms: list[float], edges: list[tuple[int, int]], transfer_ms: list[float], **more: Any
) -> MaxLoadProblem:
    """A problem with plain defaults: CPUs ten times slower, no memory limit, no colours, all forward."""
    n = len(accelerator_ms)
    given = {"accelerators": 2, "cpus": 0, "memory_bytes": math.inf, "contiguous": True, **more}
    return MaxLoadProblem(
        accelerators=given["accelerators"],
        cpus=given["cpus"],
        memory_bytes=given["memory_bytes"],
        accelerator_ms=np.array(accelerator_ms, dtype=float),
        cpu_ms=np.array(given.get("cpu_ms", [10 * t for t in accelerator_ms]), dtype=float),
        size_bytes=np.array(given.get("size_bytes", [0.0] * n), dtype=float),
        supported=np.array(given.get("supported", [True] * n), dtype=bool),
        backward=np.array(given.get("backward", [False] * n), dtype=bool),
        colour=np.array(given.get("colour", [-1] * n), dtype=np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        transfer_ms=np.array(transfer_ms, dtype=float),
        contiguous=given["contiguous"],
    )


@st.composite
def problems(draw: st.DrawFn, most_nodes: int = 6) -> MaxLoadProblem:
    """Random DAGs: memory tight and loose, mixed devices, colours, backward nodes with and without twins."""
    n = draw(st.integers(1, most_nodes))
    devices = draw(st.sampled_from([(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (0, 2), (1, 2)]))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    numbers = st.integers(0, 6)
    sizes = draw(st.lists(numbers, min_size=n, max_size=n))
    accelerator_ms = draw(st.lists(numbers, min_size=n, max_size=n))
    slower = draw(st.sampled_from([1, 3]))
    return problem(
        [float(t) for t in accelerator_ms],
        edges,
        [float(t) for t in draw(st.lists(numbers, min_size=n, max_size=n))],
        accelerators=devices[0],
        cpus=devices[1],
        memory_bytes=draw(st.sampled_from([math.inf, float(sum(sizes)), sum(sizes) // 2 + 1.0])),
        cpu_ms=[float(slower * t) for t in accelerator_ms],
        size_bytes=[float(s) for s in sizes],
        supported=[draw(st.integers(0, 5)) > 0 for _ in range(n)],
        backward=[i >= n - draw(st.integers(0, 1)) * (n // 2) for i in range(n)],
        colour=[draw(st.sampled_from([-1, -1, 0, 1])) for _ in range(n)],
        contiguous=draw(st.booleans()),
    )

"""Small random Piper instances, as documents that the importer reads."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_SIZES = st.integers(0, 12)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """2 to 4 nodes in a random acyclic graph, 1 or 2 tensor degrees, up to 3 choices, memory tight to loose."""
    count = draw(st.integers(1, 4))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = [e for e in pairs if draw(st.booleans())]
    alike = draw(st.booleans())
    most = draw(st.integers(1, 3))
    template = draw(_choices([], [], most)) if alike else None
    nodes = []
    for v in range(count):
        before = [a for a, b in edges if b == v]
        after = [b for a, b in edges if a == v]
        degrees = [1, 2] if draw(st.integers(0, 3)) else draw(st.sampled_from([[1], [2], [1, 2]]))
        table = {}
        for t in degrees:
            choices = draw(_choices(before, after, most))
            if template is not None:
                sync = {key: choices[0][key] for key in ("syncTimeFw", "syncTimeBw")}
                choices = [dict(c, **sync) for c in template]
            table[str(t)] = choices
        nodes.append({"id": 10 * v, "name": f"n{v}", "TMPCs": table})
    return {
        "maxDevices": draw(st.integers(1, 5)),
        "maxMemoryPerDevice": float(draw(st.integers(5, 120))),
        "bandwidth": float(draw(st.sampled_from([1, 4, 50]))),
        "mbsInBatch": draw(st.sampled_from([1, 2, 3, 4, 6])),
        "nodes": nodes,
        "edges": [
            {"sourceId": 10 * u, "destId": 10 * v, "communicationCost": float(draw(_SIZES))} for u, v in edges
        ],
    }  # fmt: skip


@st.composite
def _choices(draw: st.DrawFn, before: list[int], after: list[int], most: int) -> list[dict[str, Any]]:
    found = []
    for i in range(draw(st.integers(1, most))):
        found.append({
            "id": f"choice{i}",
            "timePerSample": draw(st.integers(0, 30)) / 4,
            "parameterSize": float(draw(_SIZES)),
            "memoryUsageA": float(draw(_SIZES)),
            "memoryUsageB": float(draw(_SIZES)),
            "syncTimeFw": {str(10 * u): float(draw(_SIZES)) for u in before},
            "syncTimeBw": {str(10 * x): float(draw(_SIZES)) for x in after},
        })  # fmt: skip
    return found

"""Operator graphs of any size that make searches take long: with far too many ideals to list, or deep and narrow.

Like the small instances they are documents as a file holds them; the same arguments give the same document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Edges = list[tuple[int, int]]


def sparse(nodes: int, *, accelerators: int = 6, seed: int = 0) -> dict[str, Any]:
    """A random graph with two edges a node, whose ends lie near each other."""
    random = np.random.default_rng(seed)
    edges = set()
    for target in range(1, nodes):
        for source in random.integers(max(0, target - 50), target, size=2).tolist():
            edges.add((source, target))
    return _document(nodes, sorted(edges), accelerators, random)


def layered(nodes: int, *, width: int = 30, accelerators: int = 6, seed: int = 0) -> dict[str, Any]:
    """Layers of `width` nodes, each of which reads three nodes of the layer before."""
    random = np.random.default_rng(seed)
    edges = set()
    for target in range(width, nodes):
        before = target // width * width - width
        for source in random.choice(width, size=3, replace=False).tolist():
            edges.add((before + source, target))
    return _document(nodes, sorted(edges), accelerators, random)


def tree(nodes: int, *, accelerators: int = 6, seed: int = 0) -> dict[str, Any]:
    """A random tree from its root to its leaves: every node reads one before it."""
    random = np.random.default_rng(seed)
    edges = [(int(random.integers(0, target)), target) for target in range(1, nodes)]
    return _document(nodes, edges, accelerators, random)


def _document(nodes: int, edges: Edges, accelerators: int, random: np.random.Generator) -> dict[str, Any]:
    """Nodes of 1 to 10 ms and 1 MB, ten times slower on the CPU; a result takes 0.1 to 1 ms to move."""
    work = random.uniform(1.0, 10.0, nodes).round(3).tolist()
    moved = random.uniform(0.1, 1.0, nodes).round(3).tolist()
    return {
        "maxSizePerFPGA": 1e9,
        "maxFPGAs": accelerators,
        "maxCPUs": 1,
        "nodes": [
            {"id": i, "supportedOnFpga": 1, "cpuLatency": 10 * t, "fpgaLatency": t, "isBackwardNode": 0, "size": 1e6}
            for i, t in enumerate(work)
        ],
        "edges": [{"sourceId": u, "destId": v, "cost": moved[u]} for u, v in edges],
    }

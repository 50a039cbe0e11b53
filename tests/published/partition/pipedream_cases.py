"""Random layer graphs and problems of PipeDream's family, and its recorded runs."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from planner.importers import load_graph
from planner.published.problems import (
    LayerDag,
    Memory,
    PipeDreamProblem,
    Released,
    recorded_layers,
)
from tests.shared_data import shared_path


@st.composite
def layer_graphs(draw: st.DrawFn, most: int = 5) -> LayerDag:
    """Up to `most` layers with small whole figures, zeros included, and edges at random."""
    count = draw(st.integers(1, most))
    figures = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    compute, weights, outputs, saved = (np.array(draw(figures), dtype=float) for _ in range(4))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = [pair for pair in pairs if draw(st.booleans()) or (pair[1] - pair[0] == 1 and draw(st.booleans()))]
    return LayerDag(compute, weights, outputs, saved, np.array(edges, dtype=np.int64).reshape(-1, 2))


def memories() -> st.SearchStrategy[Memory]:
    """No limit, or one that is tight for layers of these sizes."""
    tight = st.builds(Memory, st.sampled_from([8.0, 20.0, 45.0, 90.0]))
    return st.one_of(st.just(Memory()), tight)


TERMS: dict[str, st.SearchStrategy[Any]] = {
    "released": st.integers(0, (~Released.NOTHING).value).map(Released),
    "transfers": st.booleans(),
}


@functools.cache
def recorded(profile: str) -> LayerDag:
    """Layers of a published profile as its own optimiser reads them."""
    return recorded_layers(load_graph(shared_path(f"instances/pipedream/{profile}.graph.txt")))


def recorded_rows() -> list[dict[str, Any]]:
    """The runs of the released optimiser that came to an end."""
    rows = json.loads(shared_path("instances/peers.json").read_text())["pipedream"]
    return [row for row in rows if row["status"] == "ok"]


def released_problem(row: dict[str, Any]) -> PipeDreamProblem:
    """The problem of a recorded run, with the released code's rules; its rule of memory decides none of them."""
    return PipeDreamProblem(
        recorded(row["profile"]),
        tuple(row["n"]),
        tuple(row["b"]),
        ~Released.NOTHING,
        transfers=bool(row["comm"]),
        replicate=not row["straight"],
        use_all=not row["fewer"],
    )

"""Plans of configurations that are named in full, so that what must be written for them can be worked out by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import planner
from planner.graph import Graph
from planner.plans import Plan

IMAGES = ("resnet50", "vit-s16")
"""Models that read no sequence."""


@cache
def graph(model: str, seq: int = 256) -> Graph:
    return planner.load_graph(model, dims={} if model in IMAGES else {"seq": seq})


@cache
def plan(
    model: str = "llama3.2-1b", nodes: int = 1, global_batch: int = 64, precision: str = "bf16", seq: int = 256,
    optimizer: str = "adam", backends: tuple[str, ...] = (), **degrees: Any,
) -> Plan:  # fmt: skip
    job = planner.Job(global_batch=global_batch, precision=precision, optimizer=optimizer, backends=backends)
    cluster = planner.load_cluster("dgx-h100", nodes=nodes)
    return planner.predict(graph(model, seq), cluster, job, planner.Degrees(**degrees), fewest_weights=True).plan

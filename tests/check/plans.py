"""Small plans of all kinds on bundled models and clusters: what `check` and the judge of the page are held against."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import planner
from planner.graph import Graph
from planner.hardware import Cluster
from planner.plans import Plan, decode
from planner.schedules import Work, custom_schedule
from planner.systems import plan_system

V100, DGX, POOL = "v100-pcie-4", "dgx-1v", "mixed-pool"
ZIGZAG = ["F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"]
ALONE = {"tensor_parallel": (1,)}

# who decides, the model, the hardware, and the job; half precision unless said otherwise
KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "replicas": ("", "resnet50", V100, {"global_batch": 64, **ALONE}),
    "pipeline": ("", "gnmt-8", V100, {"global_batch": 64, "recompute": "never", "zero": (0,), **ALONE}),
    "unequal replicas": ("", "vgg16", V100, {"global_batch": 64, **ALONE}),
    "recomputation": ("", "gnmt-8", V100, {"global_batch": 64, "recompute": "always", **ALONE}),
    "tied stages": ("", "gpt2", V100, {"global_batch": 16, "pipeline_stages": (2,), **ALONE}),
    "zero 1": ("", "gpt2", V100, {"global_batch": 64, "zero": (1,), **ALONE}),
    "zero 2": ("", "gpt2", V100, {"global_batch": 64, "zero": (2,), **ALONE}),
    "zero 3": ("", "gpt2", V100, {"global_batch": 64, "zero": (3,), **ALONE}),
    "gpipe": ("", "gnmt-8", DGX, {"global_batch": 64, "schedules": ("gpipe",), "pipeline_stages": (2,), **ALONE}),
    "sharded": ("", "gpt2", V100, {"global_batch": 16, "tensor_parallel": (2,)}),
    "sharded pipeline": (
        "", "bert-base", DGX,
        {"global_batch": 32, "tensor_parallel": (2,), "pipeline_stages": (2,), "data_parallel": (2,)},
    ),
    "mixed pool": ("", "gnmt-8", POOL, {"global_batch": 32, "pipeline_stages": (3,), "micro_batches": (4,), **ALONE}),
    "zb-h1": ("schedule zb-h1", "gnmt-8", V100, {"global_batch": 64}),
    "interleaved": ("schedule interleaved", "gnmt-8", V100, {"global_batch": 64}),
    "seq1f1b": ("schedule seq1f1b", "gpt2", V100, {"global_batch": 16}),
    "dualpipe": ("schedule dualpipe", "gnmt-8", V100, {"global_batch": 64}),
    "repeated forwards": ("schedule gpipe:recompute=true", "gpt2", V100, {"global_batch": 16}),
    "side by side": ("schedule bapipe-fbp", "gpt2", V100, {"global_batch": 16}),
    "pipedream-2bw by name": ("schedule pipedream-2bw", "gnmt-8", V100, {"global_batch": 64}),
    "orders of one's own": ("orders", "gnmt-8", V100, {"global_batch": 64}),
    "gpipe as published": ("system gpipe", "gnmt-8", V100, {"global_batch": 64}),
    "chimera": ("system chimera", "gnmt-8", V100, {"global_batch": 64, "precision": "fp32"}),
    "pipedream": ("system pipedream", "gnmt-8", V100, {"global_batch": 64}),
    "pipemare": ("system pipemare", "gnmt-8", V100, {"global_batch": 64}),
    "hetpipe": ("system hetpipe", "gnmt-8", V100, {"global_batch": 64}),
    "parallax": ("system parallax", "gnmt-8", V100, {"global_batch": 64}),
    "byteps": ("system byteps", "gnmt-8", V100, {"global_batch": 64, "precision": "fp32"}),
    "data-parallel": ("system data-parallel", "gnmt-8", V100, {"global_batch": 64, "precision": "fp32"}),
    "tofu": ("system tofu", "gnmt-8", V100, {"global_batch": 64, "precision": "fp32"}),
}  # fmt: skip


@cache
def loaded(kind: str) -> tuple[Graph, Cluster]:
    """Model and hardware of a kind of plan."""
    _, model, hardware, _ = KINDS[kind]
    return _model(model), _cluster(hardware)


@cache
def _model(name: str) -> Graph:
    return planner.load_graph(name)


@cache
def _cluster(name: str) -> Cluster:
    return planner.load_cluster(name)


@cache
def planned(kind: str) -> Plan:
    """The plan of a kind."""
    who, _, _, options = KINDS[kind]
    graph, cluster = loaded(kind)
    job = planner.Job(**{"precision": "fp16", "backends": ("any",), **options})
    by, _, name = who.partition(" ")
    if by == "schedule":
        job = dataclasses.replace(job, schedules=(name,), tensor_parallel=(1,), zero=(0,))
        return planner.plan(graph, cluster, job)
    if by == "system":
        return plan_system(name, graph, cluster, dataclasses.replace(job, backends=()))
    if by == "orders":
        job = dataclasses.replace(job, tensor_parallel=(1,), zero=(0,))
        return planner.plan(graph, cluster, job, orders=custom_schedule(Work(tuple(map(decode, ZIGZAG))), "zigzag"))
    return planner.plan(graph, cluster, job)

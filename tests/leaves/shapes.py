"""Plans of each kind, of small models: what every leaf is mutated in."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import planner
from planner.graph import Graph
from planner.hardware import Cluster
from planner.importers import graph_from_proto
from planner.plans import Plan, decode
from planner.schedules import Work, custom_schedule
from planner.systems import plan_system
from tests.plans import fixed_batch

GPT, LLAMA, EXPERTS, LAYERS = "gpt2", "llama3.2-1b", "mixtral-8x7b", "gnmt-8"
SIZES: Mapping[str, dict[str, str]] = {
    GPT: {"layers": "4"},
    LLAMA: {"layers": "4", "vocab": "4096"},
    EXPERTS: {"layers": "2", "hidden": "512", "heads": "8", "kv-heads": "2", "ffn": "1024", "vocab": "4096"},
}
"""Sizes of models that are built smaller than the bundled ones."""
V100, A100, H100 = "v100-pcie-4", "dgx-a100", "dgx-h100"
ZIGZAG = ["F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"]
SEQ = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of plan: who decides, for which model, hardware and job.

    Attributes:
        model: name of a model, or of a function that makes one.
        hardware: name of a cluster.
        job: fields of the job.
        by: how the plan is made: "search", "system NAME", "orders" or "predict".
        devices: of the cluster; 0 for all.
        degrees: of a plan that is predicted.
        seq: sequence length, of models that have one.
    """

    model: str
    hardware: str
    job: dict[str, Any]
    by: str = "search"
    devices: int = 0
    degrees: dict[str, Any] = dataclasses.field(default_factory=dict)
    seq: int = SEQ


ANY = {"backends": ("any",)}
ALONE = {"tensor_parallel": (1,)}

SHAPES: dict[str, Shape] = {
    "single device": Shape(GPT, A100, {"global_batch": 8, **ANY}, devices=1),
    "for frameworks, ZeRO-3": Shape(GPT, A100, {"global_batch": 64, "zero": (3,), **ALONE}, devices=4),
    "for no framework": Shape(
        LAYERS,
        V100,
        {"global_batch": 16, "precision": "fp32", "pipeline_stages": (2,), "schedules": ("gpipe",), **ALONE},
    ),
    "pipeline": Shape(LAYERS, V100, {"global_batch": 64, "recompute": "never", "zero": (0,), **ALONE, **ANY}),
    "interleaved": Shape(
        LAYERS, V100, {"global_batch": 64, "schedules": ("interleaved",), "zero": (0,), **ALONE, **ANY}
    ),
    "two directions": Shape(LAYERS, V100, {"global_batch": 64, "precision": "fp32"}, "system chimera"),
    "split backward": Shape(
        GPT, A100, {"global_batch": 16, "schedules": ("zb-v",), "zero": (0,), **ALONE, **ANY}, devices=2
    ),
    "groups of ranks": Shape(
        GPT, A100, {"global_batch": 8, "tensor_parallel": (2,), "pipeline_stages": (2,), **ANY}, devices=4
    ),
    "experts": Shape(
        EXPERTS,
        H100,
        {"global_batch": 8, "expert_parallel": (2,), "tensor_parallel": (2,), "pipeline_stages": (1,), **ANY},
        devices=4,
    ),
    "context": Shape(LLAMA, H100, {"global_batch": 4, "context_parallel": (2,), **ANY}, devices=2, seq=512),
    "recompute": Shape(
        GPT, A100, {"global_batch": 16, "recompute": "layers:1", "pipeline_stages": (2,), **ANY}, devices=2
    ),
    "modules repeated": Shape(LLAMA, A100, {"global_batch": 16, "recompute": "layernorm,act", **ANY}, devices=2),
    "offload": Shape(GPT, A100, {"global_batch": 16}, "predict", 2, {"pipeline": 2, "offload": ("core_attn",)}),
    "mixed pool": Shape(
        LAYERS, "mixed-pool", {"global_batch": 32, "pipeline_stages": (3,), "micro_batches": (4,), **ALONE, **ANY}
    ),
    "weight versions": Shape(
        LAYERS, V100, {"global_batch": 64, "schedules": ("pipedream-2bw",), "zero": (0,), **ALONE, **ANY}
    ),
    "a published system": Shape(LAYERS, V100, {"global_batch": 64}, "system pipemare"),
    "exchange by tensors": Shape(LAYERS, V100, {"global_batch": 64}, "system parallax"),
    "fp8": Shape(GPT, H100, {"global_batch": 16, "precision": "fp8", **ANY}, devices=2),
    "predicted": Shape(GPT, A100, {"global_batch": 16}, "predict", 4, {"pipeline": 2, "zero": 1}),
    "shards over a part": Shape(GPT, A100, {"global_batch": 16}, "predict", 4, {"zero": 3, "shard_over": 2}),
    "orders of one's own": Shape(LAYERS, V100, {"global_batch": 64, **ALONE, "zero": (0,), **ANY}, "orders"),
    "parts of sequences": Shape(
        GPT, V100, {"global_batch": 16, "schedules": ("seq1f1b",), "zero": (0,), **ALONE, **ANY}
    ),
    "a model file": Shape(
        "file",
        A100,
        {"global_batch": 8, "precision": "fp32", "optimizer": "sgd"},
        "predict",
        2,
        {"pipeline": 2, "micro_batch": 4},
    ),
}


@cache
def inputs(name: str) -> tuple[Graph, Cluster]:
    """Model and hardware of a shape."""
    shape = SHAPES[name]
    return _model(shape.model, shape.seq), _cluster(shape.hardware, shape.devices)


@cache
def _model(name: str, seq: int) -> Graph:
    if name == "file":
        return planner.load_graph(fixed_batch.model_file(Path(_folder().name) / "fixed.onnx"))
    if name not in SIZES:
        return planner.load_graph(name)
    config = planner.bundled.bundled_config(name, SIZES[name])
    return graph_from_proto(planner.build_configured(config, name=name, seq=seq)[0], name=name)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the model file lies as long as tests run: its hash is worked out when it is asked for."""
    return tempfile.TemporaryDirectory()


@cache
def _cluster(name: str, devices: int) -> Cluster:
    return planner.load_cluster(name, devices=devices or None)


def _searched(graph: Graph, cluster: Cluster, job: planner.Job) -> Plan:
    return planner.plan(graph, cluster, job)


def _ordered(graph: Graph, cluster: Cluster, job: planner.Job) -> Plan:
    return planner.plan(graph, cluster, job, orders=custom_schedule(Work(tuple(map(decode, ZIGZAG))), "zigzag"))


_MAKERS: Mapping[str, Callable[[Graph, Cluster, planner.Job], Plan]] = {"search": _searched, "orders": _ordered}


@cache
def planned(name: str) -> Plan:
    """The plan of a shape."""
    shape, (graph, cluster) = SHAPES[name], inputs(name)
    job = planner.Job(**{"precision": "fp16" if shape.hardware != H100 else "bf16", **shape.job})
    if shape.by == "predict":
        return planner.predict(graph, cluster, job, planner.Degrees(**shape.degrees)).plan
    if shape.by in _MAKERS:
        return _MAKERS[shape.by](graph, cluster, job)
    return plan_system(shape.by.removeprefix("system "), graph, cluster, job)

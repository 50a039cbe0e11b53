"""Small plans put together from hand-written graphs and figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from planner.costs import Profile
from planner.errors import ModelError
from planner.graph import Chain, Graph, build_chain
from planner.hardware import Cluster, Curve, Device, Level
from planner.operators import Origin
from planner.plans import Plan, Provenance, assemble, seal
from planner.sharding import StageSharding
from planner.space import (
    BlockCosts,
    Candidate,
    Certificate,
    Configuration,
    Evaluation,
    Job,
    MemoryBytes,
    StageChoice,
    StageTerms,
    Violation,
    WorkerMemory,
)
from tests.graph import make_graph

GIB = 2**30
FLAT = Curve((1.0,), (1.0,))


def language_model(layers: int = 4) -> Graph:
    """An embedding tied to the head, a mask that all layers read, and layers with a residual."""
    lines = ["mask = Trilu(x)", "[embed] h0 = Gather(w_embed, x)"]
    for i in range(layers):
        lines += [
            f"[layers.{i}] a{i} = MatMul(h{i}, w{i})",
            f"[layers.{i}] m{i} = Add(a{i}, mask)",
            f"[layers.{i}] h{i + 1} = Add(h{i}, m{i})",
        ]
    graph = make_graph([*lines, f"[head] y = MatMul(h{layers}, w_head)"])
    tied = tuple(dataclasses.replace(p, tied_to="w_embed") if p.name == "w_head" else p for p in graph.parameters)
    return dataclasses.replace(graph, name="toy", fingerprint="f" * 64, parameters=tied, batch=1, opset=17)


def cluster(devices: int = 8, memory_gib: int = 16) -> Cluster:
    """One machine of equal devices."""
    device = Device("toy-gpu", memory_gib * GIB, GIB, {"fp32": 1e12, "bf16": 1e13}, FLAT, 1e12, 1e12, FLAT, 1e-6)
    levels = (Level("bus", devices, 1e11, 1e11, 1e-6),) if devices > 1 else ()
    return Cluster("toy-box", "c" * 64, (device,), np.zeros(devices, dtype=np.int64), levels)


def decision(
    replicas: tuple[int, ...] = (1, 1, 1),
    starts: tuple[int, ...] = (0, 2, 4),
    blocks: int = 6,
    *,
    copies: int = 1,
    micro_batches: int = 6,
    schedule: str = "1f1b",
    recompute: bool = False,
    zero: int = 0,
) -> Configuration:
    """Stages that start at the given blocks."""
    stops = (*starts[1:], blocks)
    stages = tuple(StageChoice(a, b, r, recompute) for a, b, r in zip(starts, stops, replicas, strict=True))
    return Configuration(stages, copies, 1, micro_batches, schedule, zero)


def evaluation(chosen: Configuration, iteration_s: float = 0.5, violations: tuple[Violation, ...] = ()) -> Evaluation:
    """The same made-up terms for every stage: 1 ms forward, 2 ms backward, 3 GiB of memory."""
    terms = StageTerms(
        forward_s=0.001,
        backward_s=0.002,
        recompute_s=0.0,
        receive_s=0.0001,
        sync_s=0.003,
        exposed_sync_s=0.002,
        update_s=0.0005,
        in_flight=2,
        memory=MemoryBytes(GIB / 2, GIB / 4, GIB / 4, GIB * 0.75, GIB / 4, GIB),
        capacity_bytes=16.0 * GIB,
        return_s=0.0001,
        unit_bytes=GIB * 0.375,
    )
    workers = (WorkerMemory((0,), terms.memory, terms.capacity_bytes),)
    return Evaluation(iteration_s, (terms,) * len(chosen.stages), violations, len(chosen.stages) - 1, workers)


def chain_of(graph: Graph) -> Chain:
    """The graph's blocks."""
    return build_chain(graph)


def make_plan(
    graph: Graph | None = None,
    chosen: Configuration | None = None,
    *,
    devices: int = 8,
    alternatives: tuple[Candidate, ...] | None = None,
    **job: Any,
) -> Plan:
    """A plan of the toy model."""
    graph = graph or language_model()
    chosen = chosen or decision()
    batch = chosen.micro_batch * chosen.micro_batches * chosen.copies
    options = Job(**{"global_batch": batch, "precision": "fp32", **job})
    verdict = evaluation(chosen)
    found = assemble(
        priced(graph, chain_of(graph), prices(graph)),
        cluster(devices),
        options,
        chosen,
        verdict,
        verdict.iteration_s,
        certificate=Certificate(0.4, 0.2, "all contiguous stages of this chain", False),
        provenance=Provenance("shardplan", "0.0", ("shardplan", "plan", "toy.onnx"), "toy.onnx", "toy-box"),
        alternatives=default_alternatives() if alternatives is None else alternatives,
    )
    unplayed = dataclasses.replace(found.predictions, simulated_iteration_s=None)
    return seal(dataclasses.replace(found, predictions=unplayed))


def priced(graph: Graph, chain: Chain, profile: Profile, shardings: Mapping[int, StageSharding] | None = None) -> Any:
    """What assembly asks a pricer for, of a graph at its own batch."""
    return SimpleNamespace(
        graph=graph,
        chain=chain,
        graph_at=lambda size: graph,
        profiles=lambda size: (profile,),
        stage_shardings=lambda decision: shardings or {},
        costs_of=_of_one_batch,
    )


def _of_one_batch(configuration: Configuration) -> list[BlockCosts]:
    """Prices of the toy at another batch.

    Raises:
        ModelError: always: it has those of its own batch only.
    """
    raise ModelError("the toy is priced at its own batch only", hint="take that batch")


def prices(graph: Graph) -> Profile:
    """A billion floating-point operations an operator, forward, and twice as many backward."""
    each = np.ones(len(graph.nodes))
    origins = (*(Origin.RULE,) * (len(graph.nodes) - 1), Origin.FALLBACK)
    seconds, flops, sizes = (each,) * 3, (1e9 * each, 2e9 * each), (each,) * 3
    return Profile("toy-gpu", "fp32", max(1, graph.batch), "roofline", *seconds, *flops, *sizes, origins, ())


def default_alternatives() -> tuple[Candidate, ...]:
    """A runner-up that costs more and a single device that does not fit."""
    second = decision((2, 2), (0, 3))
    one = decision((1,), (0,))
    too_big = Violation("memory", 0, "stage 0 needs 20.0 GiB, a device has 16.0 GiB", 20.0 * GIB, 16.0 * GIB)
    return (
        Candidate("runner-up", second, evaluation(second, 0.6)),
        Candidate("one device", one, evaluation(one, 2.0, (too_big,))),
    )

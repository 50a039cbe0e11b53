"""Plans that the runtime executes: small models, and configurations of them over schedules, shardings and ZeRO."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import models
import planner
from planner import prediction
from planner.space import StageChoice
from tests.models import test_values as families
from tests.models.graphs import gpt


@dataclass(frozen=True)
class Case:
    """A configuration of a small model.

    Attributes:
        name: in the table of the documentation and the test's name.
        model: name of a builder below, or of a family's small model.
        ranks: processes.
        degrees: as of `planner.Degrees`.
        batch: samples of an iteration.
        way: which of the ways to share operators is taken, in the order in which they are tried; -1 for the one with
            the fewest weights on a rank.
        stages: (share of the blocks up to which it goes, replicas) of each stage, in place of degrees.
        limit: largest error of a gradient.
    """

    name: str
    model: str
    ranks: int
    degrees: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    way: int = -1
    stages: tuple[tuple[float, int], ...] = ()
    limit: float = 1e-12


def _gpt(layers: int, hidden: int, vocab: int, *, batch: int = 1, **options: Any) -> Any:
    return models.build_custom(gpt(layers, hidden, 4, vocab, 8, **options), batch=batch, seq=8, seed=1)


def _decoder(model_type: str, **options: Any) -> Any:
    return models.build_custom(
        models.size_of(model_type=model_type, **families.SMALL, **options), batch=2, seq=8, seed=1
    )


MODELS = {
    "gpt": lambda: _gpt(8, 16, 32),
    "gpt, untied": lambda: _gpt(4, 16, 32, tie_word_embeddings=False),
    "gpt, 2 samples": lambda: _gpt(4, 16, 32, batch=2),
    "gpt, 4 samples": lambda: _gpt(8, 16, 32, batch=4),
    "llama": lambda: _decoder("llama"),
    "gpt, wide": lambda: _gpt(4, 64, 64),
    "gpt, wide, 2 samples": lambda: _gpt(2, 64, 64, batch=2),
}
ILL_CONDITIONED = ("resnet", "resnet, two convolutions")
"""Batch normalisation over few samples makes small differences large."""


@functools.cache
def model(name: str) -> Any:
    """A small model with weights."""
    if name in MODELS:
        return MODELS[name]()
    return models.build_custom(families.TINY[name][0], batch=families.BATCH, seq=families.SEQ, seed=1)


def only(way: int) -> Any:
    """Takes one of the ways to share operators that a prediction tries."""
    tried = prediction.ways_to_share

    def ways(*arguments: Any) -> Iterator[Any]:
        return itertools.islice(tried(*arguments), way, way + 1)

    return mock.patch.object(prediction, "ways_to_share", ways)


@functools.cache
def graph(name: str) -> planner.Graph:
    """The same as a graph."""
    return planner.graph_from_proto(model(name), name=name)


def plan(case: Case) -> planner.Plan:
    """The plan of a case."""
    model_graph, cluster = graph(case.model), planner.load_cluster("dgx-a100")
    size = model_graph.batch or 1
    job = planner.Job(global_batch=case.batch * size, precision="fp32", optimizer="sgd", devices=case.ranks)
    asked: Any = planner.Degrees(micro_batch=size, **case.degrees)
    if case.stages:
        count = len(planner.Pricer(model_graph, cluster, job).chain.blocks)
        ends = [round(share * count) for share, _ in case.stages]
        stages = zip([0, *ends], ends, (replicas for _, replicas in case.stages), strict=False)
        asked = planner.Configuration(
            tuple(StageChoice(*stage) for stage in stages), 1, size, case.batch, case.degrees.get("schedule", "1f1b"),
            zero=case.degrees.get("zero", 0),
        )  # fmt: skip
    if case.way < 0:
        return planner.predict(model_graph, cluster, job, asked, fewest_weights=True).plan
    with only(case.way):
        return planner.predict(model_graph, cluster, job, asked).plan


SYNCHRONOUS = (
    "1f1b", "gpipe", "dapple", "interleaved", "hanayo", "chimera", "gems", "dualpipe", "dualpipe-v", "zb-h1", "zb-h2",
    "zb-v", "v-half", "v-min", "bapipe-as", "bapipe-fbp", "bapipe-sno", "bapipe-so", "bpipe",
)  # fmt: skip


_OFFLOADED: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("offloaded", "gpt", 1, {"offload": ("core_attn", "attn_proj", "mlp", "layernorm")}),
    ("2 stages, offloaded", "gpt", 2, {"pipeline": 2, "offload": ("core_attn", "attn_proj", "mlp")}),
    ("zb-h1, offloaded", "gpt", 2, {"pipeline": 2, "schedule": "zb-h1", "offload": ("act", "layernorm")}),
    ("recomputed, inputs offloaded", "gpt", 2, {"pipeline": 2, "recompute": True, "offload": ("layer_input",)}),
    ("tensor 2, ZeRO-3, offloaded", "gpt, wide", 4, {"tensor": 2, "zero": 3, "offload": ("qkv_linear", "core_attn")}),
    ("experts repeated and offloaded", "mixtral", 2,
     {"pipeline": 2, "repeats": ("moe_act",), "offload": ("expert_fc1", "moe_act")}),
)  # fmt: skip


_NORMS, _ALL = ("layernorm", "act"), ("layernorm", "mlp", "core_attn")
_REPEATED: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("norms and activations repeated", "gpt", 1, {"repeats": _NORMS}),
    ("sums repeated by pattern", "gpt, untied", 1, {"repeats": ("Add",)}),
    ("all operators repeated by pattern", "llama", 1, {"repeats": ("*",)}),
    ("zb-h1, modules repeated", "gpt", 2, {"pipeline": 2, "schedule": "zb-h1", "repeats": _ALL}),
    ("zb-v, modules repeated", "llama", 2, {"pipeline": 2, "schedule": "zb-v", "repeats": _NORMS}),
    ("interleaved, modules repeated", "gpt", 2, {"pipeline": 2, "schedule": "interleaved", "repeats": _ALL}),
    ("2 parts of a sequence, modules repeated", "llama", 2,
     {"pipeline": 2, "schedule": "seq1f1b:splits=2", "repeats": _ALL}),
    ("2 replicas, ZeRO-3, modules repeated", "gpt", 2, {"zero": 3, "repeats": _ALL}),
    ("tensor 2, modules repeated", "gpt, wide", 2, {"tensor": 2, "repeats": _NORMS}),
    ("tensor 2, ZeRO-3, modules repeated", "gpt, wide", 4, {"tensor": 2, "zero": 3, "repeats": _ALL}),
    ("experts and projections repeated", "deepseek", 2, {"pipeline": 2, "repeats": ("mla_up_proj", "moe")}),
    ("repeated and offloaded", "gpt", 1, {"repeats": ("act", "mlp_norm"), "offload": ("attn_norm", "mlp")}),
)  # fmt: skip


def _cases() -> list[Case]:
    found = [Case(f"{name}, 2 stages", "gpt", 2, {"pipeline": 2, "schedule": name}) for name in SYNCHRONOUS]
    found += [Case(f"{name}, 4 stages", "gpt", 4, {"pipeline": 4, "schedule": name}) for name in SYNCHRONOUS]
    for zero in range(4):
        found.append(Case(f"2 replicas, ZeRO-{zero}", "gpt", 2, {"zero": zero}))
        found.append(Case(f"2 stages, 2 replicas, ZeRO-{zero}", "gpt", 4, {"pipeline": 2, "zero": zero}))
        found.append(Case(f"tensor 2, ZeRO-{zero}", "gpt, wide", 4, {"tensor": 2, "zero": zero}))
    found += [
        Case("untied, 2 stages, ZeRO-1", "gpt, untied", 4, {"pipeline": 2, "zero": 1}),
        Case("3 replicas, ZeRO-2", "gpt, untied", 3, {"zero": 2}, 6),
        Case("3 replicas, ZeRO-3", "gpt, untied", 3, {"zero": 3}, 6),
        Case("2 stages, recomputed", "gpt", 2, {"pipeline": 2, "recompute": True}),
        Case("zb-h1, recomputed", "gpt", 2, {"pipeline": 2, "recompute": True, "schedule": "zb-h1"}),
        Case("tensor 2", "gpt, wide", 2, {"tensor": 2}),
        Case("tensor 4", "gpt, wide", 4, {"tensor": 4}),
        Case("tensor 2, recomputed", "gpt, wide", 2, {"tensor": 2, "recompute": True}),
        Case("tensor 2, 2 stages", "gpt, wide", 4, {"tensor": 2, "pipeline": 2}),
        Case("tensor 2, 2 stages, gpipe", "gpt, wide", 4, {"tensor": 2, "pipeline": 2, "schedule": "gpipe"}),
        Case("tensor 2, 2 stages, zb-h1", "gpt, wide", 4, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}),
    ]
    found += [Case(name, of, ranks, degrees, 2) for name, of, ranks, degrees in (*_OFFLOADED, *_REPEATED)]
    for splits in (2, 4):
        parts = {"pipeline": 2, "schedule": f"seq1f1b:splits={splits}"}
        found += [
            Case(f"{name}, {splits} parts of a sequence", name, 2, parts, 4)
            for name in ("gpt, 2 samples", "llama", "gemma 2", "gpt-neox", "mistral, window")
        ]
        found.append(
            Case(f"{splits} parts of a sequence, recomputed", "gpt, 2 samples", 2, {**parts, "recompute": True}, 4)
        )
    found.append(Case("4 parts of a sequence, 2 replicas, ZeRO-1", "llama", 4, {**parts, "zero": 1}, 4))
    for replicas in ((2, 1), (1, 2), (1, 3), (3, 1)):
        stages = ((0.5, replicas[0]), (1.0, replicas[1]))
        for zero in (0, 1, 3):
            name = f"stages of {replicas[0]} and {replicas[1]} replicas, ZeRO-{zero}"
            found.append(Case(name, "gpt", sum(replicas), {"zero": zero}, 6, stages=stages))
    found.append(Case("stages of 1, 2 and 1 replicas", "gpt", 4, batch=6, stages=((0.3, 1), (0.7, 2), (1.0, 1))))
    for tensor, pipeline, ways in ((2, 1, 7), (4, 1, 11), (2, 2, 7)):
        name = f"tensor {tensor}" + (f", {pipeline} stages" if pipeline > 1 else "")
        degrees = {"tensor": tensor, "pipeline": pipeline}
        found += [
            Case(f"{name}, way {way}", "gpt, wide", tensor * pipeline, degrees, 4, way=way) for way in range(1, ways)
        ]
    found += [
        Case(f"batch cut, way {way}", "gpt, wide, 2 samples", 2, {"tensor": 2}, 4, way=way) for way in (1, 7, 8, 9)
    ]
    for name in sorted(families.TINY):
        limit = 1e-7 if name in ILL_CONDITIONED else 1e-11
        found.append(Case(f"{name}, 2 stages", name, 2, {"pipeline": 2}, 2, limit=limit))
        found += [
            Case(f"{name}, tensor 2, way {way}", name, 2, {"tensor": 2}, 2, way=way, limit=limit) for way in (3, 5)
        ]
    return found


CASES = _cases()

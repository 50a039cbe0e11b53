"""Plans that the runtime executes: small models, and configurations of them over schedules, shardings and ZeRO."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import models
import planner
from models import gpt


@dataclass(frozen=True)
class Case:
    """A configuration of a small model.

    Attributes:
        name: in the table of the documentation and the test's name.
        model: name of a builder below.
        ranks: processes.
        degrees: as of `planner.Degrees`.
        batch: samples of an iteration.
    """

    name: str
    model: str
    ranks: int
    degrees: dict[str, Any] = field(default_factory=dict)
    batch: int = 8


def _gpt(layers: int, hidden: int, vocab: int, **options: Any) -> Any:
    size = gpt.GPTSize(layers=layers, hidden=hidden, heads=4, vocab=vocab, positions=8, **options)
    return models.build_custom(size, batch=1, seq=8, seed=1)


MODELS = {
    "gpt": lambda: _gpt(8, 16, 32),
    "gpt, untied": lambda: _gpt(4, 16, 32, tied=False),
    "gpt, wide": lambda: _gpt(4, 64, 64),
}


@functools.cache
def model(name: str) -> Any:
    """A small model with weights, at a batch of 1."""
    return MODELS[name]()


@functools.cache
def plan_of(name: str, ranks: int, batch: int, degrees: tuple[tuple[str, Any], ...]) -> planner.Plan:
    """The plan of a configuration by degrees, with operators shared so that the fewest weights are on a rank."""
    graph = planner.graph_from_proto(model(name), name=name)
    job = planner.Job(global_batch=batch, precision="fp32", optimizer="sgd", devices=ranks)
    asked = planner.Degrees(micro_batch=1, **dict(degrees))
    return planner.predict(graph, planner.load_cluster("dgx-a100"), job, asked, fewest_weights=True).plan


def plan(case: Case) -> planner.Plan:
    """The plan of a case."""
    return plan_of(case.model, case.ranks, case.batch, tuple(sorted(case.degrees.items())))


SYNCHRONOUS = (
    "1f1b", "gpipe", "dapple", "interleaved", "hanayo", "chimera", "gems", "dualpipe", "dualpipe-v", "zb-h1", "zb-h2",
    "zb-v", "v-half", "v-min", "bapipe-as", "bapipe-fbp", "bapipe-sno", "bapipe-so", "bpipe",
)  # fmt: skip


def _cases() -> list[Case]:
    found = [Case(f"{name}, 2 stages", "gpt", 2, {"pipeline": 2, "schedule": name}) for name in SYNCHRONOUS]
    found += [
        Case(f"{name}, 4 stages", "gpt", 4, {"pipeline": 4, "schedule": name})
        for name in SYNCHRONOUS
        if name != "bpipe"
    ]
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
    return found


CASES = _cases()

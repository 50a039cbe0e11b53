"""Decisions and seconds of ten jobs as JSON, to compare environments.

`python -m tests.decisions OUT` writes them, `python -m tests.decisions --compare A B` holds them against each other.
Versions of the dependencies and of Python must not change what is decided, nor seconds by more than 1e-9.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import planner

JOBS: dict[str, tuple[str, str, int | None, dict[str, Any]]] = {
    "gpt2": ("gpt2", "dgx-a100", None, {"global_batch": 64}),
    "gpt2, two stages": ("gpt2", "dgx-a100", None, {"global_batch": 64, "pipeline_stages": (2,)}),
    "gpt2, shared by 2": ("gpt2", "dgx-a100", 2, {"global_batch": 64, "tensor_parallel": (2,)}),
    "gpt2-xl, fp16": ("gpt2-xl", "p3.16xlarge", None, {"global_batch": 64, "precision": "fp16"}),
    "gpt2, mixed pool": ("gpt2", "mixed-pool", None, {"global_batch": 64}),
    "resnet50": ("resnet50", "dgx-1v", None, {"global_batch": 256, "precision": "fp16"}),
    "gnmt-8, ethernet": ("gnmt-8", "ethernet-25g", None, {"global_batch": 256}),
    "bert, ZeRO-3": ("bert-large", "dgx-h100", None, {"global_batch": 128, "zero": (3,)}),
    "gpt2, chimera": ("gpt2", "dgx-a100", None, {"global_batch": 64, "schedules": ("chimera",)}),
    "gpt2-medium, fp8": ("gpt2-medium", "dgx-h100", None, {"global_batch": 64, "precision": "fp8"}),
}
"""Model, hardware, nodes and job by name."""


def decisions() -> dict[str, dict[str, Any]]:
    """What each job's plan decides, its seconds and its bound."""
    found = {}
    for name, (model, hardware, nodes, job) in JOBS.items():
        cluster = planner.load_cluster(hardware, nodes=nodes)
        plan = planner.plan(planner.load_graph(model), cluster, planner.Job(**job))
        document = planner.plans.to_document(plan)
        seconds = {"reached_s": plan.predictions.reached_s, "bound_s": plan.predictions.bound_s}
        found[name] = {"decided": document["configuration"], "digest": plan.digest, **seconds}
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two files of decisions, a line each."""
    lines = []
    for name in JOBS:
        a, b = one[name], other[name]
        if a["decided"] != b["decided"]:
            lines.append(f"{name}: decides otherwise")
        for key in ("reached_s", "bound_s"):
            if not math.isclose(a[key], b[key], rel_tol=1e-9):
                lines.append(f"{name}: {key} {a[key]!r} and {b[key]!r}")
    return lines


def main(arguments: list[str]) -> int:
    """Write the decisions, or compare files of them."""
    if arguments[:1] != ["--compare"]:
        Path(arguments[0]).write_text(json.dumps(decisions(), indent=1))
        return 0
    files = [json.loads(Path(name).read_text()) for name in arguments[1:]]
    lines = [
        f"{name}: {line}" for name, f in zip(arguments[2:], files[1:], strict=True) for line in differing(files[0], f)
    ]
    equal = sum(all(f[name]["digest"] == files[0][name]["digest"] for f in files) for name in JOBS)
    lines.append(f"{equal} of {len(JOBS)} plans are equal to the last digit in {len(files)} environments")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if len(lines) > 1 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

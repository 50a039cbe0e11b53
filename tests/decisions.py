"""Decisions, seconds and digests of ten jobs as JSON, to compare environments.

`python -m tests.decisions OUT [PLANS]` writes them, and the plans into a folder; `--compare A B ..` holds files of them
against the first, `--same A B ..` every digit of the plans, too; `--check PLANS` checks plans that another environment
made, searching anew. Versions of the dependencies must not change what is decided, nor seconds by more than 1e-9; the
version of Python nothing at all. `tests/decisions.json` holds what is expected (`make golden` writes it).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner

JOBS: dict[str, tuple[str, dict[str, int], str, int | None, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"seq": 128}, "dgx-a100", None, {"global_batch": 64}),
    "gpt2, two stages": ("gpt2", {}, "dgx-a100", None, {"global_batch": 64, "pipeline_stages": (2,)}),
    "gpt2, shared by 2": ("gpt2", {}, "dgx-a100", 2, {"global_batch": 64, "tensor_parallel": (2,)}),
    "gpt2-xl, fp16": ("gpt2-xl", {}, "p3.16xlarge", None, {"global_batch": 64, "precision": "fp16"}),
    "gpt2, mixed pool": ("gpt2", {}, "mixed-pool", None, {"global_batch": 64}),
    "resnet50": ("resnet50", {}, "dgx-1v", None, {"global_batch": 256, "precision": "fp16"}),
    "gnmt-8, ethernet": ("gnmt-8", {}, "ethernet-25g", None, {"global_batch": 256}),
    "bert, ZeRO-3": ("bert-large", {}, "dgx-h100", None, {"global_batch": 128, "zero": (3,)}),
    "gpt2, chimera": ("gpt2", {}, "dgx-a100", None, {"global_batch": 64, "schedules": ("chimera",)}),
    "gpt2-medium, fp8": ("gpt2-medium", {}, "dgx-h100", None, {"global_batch": 64, "precision": "fp8"}),
}
"""Model, sizes of its dimensions, hardware, nodes and job by name."""

SEARCH_S = 300.0
"""Time limit in seconds of the search that checks a plan's bound and runners-up."""


def _inputs(name: str) -> tuple[planner.Graph, planner.Cluster]:
    model, dims, hardware, nodes, _ = JOBS[name]
    return planner.load_graph(model, dims=dims), planner.load_cluster(hardware, nodes=nodes)


def _plan_file(plans: Path, name: str) -> Path:
    return plans / f"{name.replace(', ', '-').replace(' ', '-')}.plan.json"


def decisions(plans: Path | None = None) -> dict[str, dict[str, Any]]:
    """What each job's plan decides, its seconds, its bound and its digest; writes the plans into a folder if given."""
    found = {}
    for name, job in JOBS.items():
        plan = planner.plan(*_inputs(name), planner.Job(**job[-1]))
        document = planner.plans.to_document(plan)
        seconds = {"reached_s": plan.predictions.reached_s, "bound_s": plan.predictions.bound_s}
        found[name] = {"decided": document["configuration"], "digest": plan.digest, **seconds}
        if plans is not None:
            plans.mkdir(parents=True, exist_ok=True)
            _plan_file(plans, name).write_text(planner.plans.dumps(plan), encoding="utf-8")
    return found


def faults(plans: Path) -> Iterator[str]:
    """What is wrong with plans of the jobs in a folder, or was not checked, a line each."""
    for name in JOBS:
        plan = planner.plans.loads(_plan_file(plans, name).read_text(encoding="utf-8"))
        report = planner.check_plan(plan, *_inputs(name), search_s=SEARCH_S)
        yield from (f"{name}: {finding.message}" for finding in report.findings)
        yield from (f"{name}: not checked: {line}" for line in report.unchecked)


def differing(one: dict[str, Any], other: dict[str, Any], *, exactly: bool = False) -> list[str]:
    """What differs between two files of decisions, a line each."""
    lines = []
    for name in JOBS:
        a, b = one[name], other[name]
        if a["decided"] != b["decided"]:
            lines.append(f"{name}: decides otherwise: {json.dumps(a['decided'])} and {json.dumps(b['decided'])}")
        for key in ("reached_s", "bound_s"):
            if not math.isclose(a[key], b[key], rel_tol=1e-9):
                lines.append(f"{name}: {key} {a[key]!r} and {b[key]!r}")
        if exactly and a["digest"] != b["digest"]:
            lines.append(
                f"{name}: digest {a['digest'][:12]} and {b['digest'][:12]}: the plans differ in a digit or a runner-up"
            )
    return lines


def _compare(names: list[str], *, exactly: bool) -> int:
    files = [json.loads(Path(name).read_text(encoding="utf-8")) for name in names]
    lines = [
        f"{name}: {line}"
        for name, f in zip(names[1:], files[1:], strict=True)
        for line in differing(files[0], f, exactly=exactly)
    ]
    equal = sum(all(f[name]["digest"] == files[0][name]["digest"] for f in files) for name in JOBS)
    lines.append(f"{equal} of {len(JOBS)} plans are equal to the last digit in {len(files)} environments")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if len(lines) > 1 else 0


def main(arguments: list[str]) -> int:
    """Write the decisions, compare files of them, or check plans."""
    if arguments[0] in ("--compare", "--same"):
        return _compare(arguments[1:], exactly=arguments[0] == "--same")
    if arguments[0] == "--check":
        lines = list(faults(Path(arguments[1])))
        sys.stdout.write("".join(f"{line}\n" for line in lines) or f"{len(JOBS)} plans have no fault\n")
        return 1 if lines else 0
    found = decisions(*map(Path, arguments[1:]))
    Path(arguments[0]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Time, memory and gap of the joint search: `python -m benchmarks.joint [--models FOLDER] [--only PART]`.

Every job runs in a process of its own, from the start of Python to the written plan. *s* is wall-clock time, *CPU s*
what the process used of all cores (the machine may be shared), *MB* its peak. FOLDER holds ONNX files, each of which is
planned on two DGX A100. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

import models
from benchmarks.hand_tuned import span

COMMAND = (sys.executable, "-c", "from cli.main import main; main()")
LAYERS = (12, 24, 48, 96, 192)
DEVICES = (8, 32, 128, 512, 2048, 8192, 16384)
AXES: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("none", ((1,),)),
    ("1: 8", ((8,),)),
    ("1: 2, 4, 8", ((2,), (4,), (8,))),
    ("2: 2 x 4", ((2, 4),)),
    ("2: 2 x 2, 2 x 4, 4 x 2", ((2, 2), (2, 4), (4, 2))),
    ("3: 2 x 2 x 2", ((2, 2, 2),)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One job.

    Attributes:
        title: what the table calls it.
        model: a bundled model's name, or an ONNX file.
        hardware, nodes, batch: cluster and global batch.
        options: further ones of `shardplan plan`.
        size: layers, width and heads of a GPT to be built in place of a bundled model.
    """

    title: str
    model: str
    hardware: str
    nodes: int
    batch: int
    options: tuple[str, ...] = ()
    size: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a job: seconds, peak in MB, the plan as written, or why there is none."""

    case: Case
    wall_s: float
    cpu_s: float
    peak_mb: float
    plan: dict[str, Any] = field(default_factory=dict)
    error: str = ""


BIG = (
    Case("GPT-3 175B, 1,024 A100", "gpt3-175b", "dgx-a100", 128, 1536),
    Case("LLaMA-3 405B, 16,384 H100", "llama3-405b", "dgx-h100", 2048, 2048),
    Case("Mixtral-8x7B, 256 H100", "mixtral-8x7b", "dgx-h100", 32, 1024),
    Case("GShard-600B, 2,048 TPU v3 cores (1,024 chips)", "gshard-600b", "tpu-v3-pod", 256, 2048),
)


def growth_with_layers() -> list[Case]:
    """A GPT of width 8192 with more and more layers on 512 A100."""
    return [Case(f"{n}", f"gpt-{n}", "dgx-a100", 64, 1024, size=(n, 8192, 64)) for n in LAYERS]


def growth_with_devices() -> list[Case]:
    """A GPT of 24 layers of width 4096 on more and more H100, four samples a device."""
    return [Case(f"{n:,}", "gpt-24", "dgx-h100", n // 8, 4 * n, size=(24, 4096, 32)) for n in DEVICES]


def growth_with_axes() -> list[Case]:
    """A GPT of 48 layers of width 8192 on 512 A100, operators shared on certain meshes only."""
    found = []
    for title, meshes in AXES:
        shapes = ",".join("x".join(map(str, mesh)) for mesh in meshes)
        options = ("--tp", "1") if meshes == ((1,),) else ("--mesh", shapes)
        found.append(Case(title, "gpt-48", "dgx-a100", 64, 1024, options, (48, 8192, 64)))
    return found


def measure(case: Case, folder: Path) -> Measured:
    """Write the model's file, then plan it in a process of its own."""
    model, output = _model(case, folder), folder / "plan.json"
    output.unlink(missing_ok=True)
    arguments = ["plan", str(model), "-H", case.hardware, "--nodes", str(case.nodes), "-b", str(case.batch)]
    arguments += ["--for", "any"]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        command = [*COMMAND, *arguments, *case.options, "-o", str(output), "--quiet"]
        process = subprocess.Popen(command, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - begin
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    plan = json.loads(output.read_text()) if process.returncode == 0 else {}
    error = "" if plan else (said[-1] if said else f"exit code {process.returncode}")
    return Measured(case, wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, plan, error)


def _model(case: Case, folder: Path) -> Path:
    if case.model.endswith(".onnx"):
        return Path(case.model)
    path = folder / f"{case.model}.onnx"
    if not path.exists():
        onnx.save(_gpt(case.model, *case.size) if case.size else models.build(case.model), str(path))
    return path


def _gpt(name: str, layers: int, hidden: int, heads: int) -> onnx.ModelProto:
    """A GPT of 51,200 words and 2,048 positions."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 51200, "n_positions": 2048}
    return models.build_custom(models.size_of(model_type="gpt2", **sizes), batch=1, seq=2048, name=name)


def shape(plan: dict[str, Any]) -> str:
    """Ranks that share operators x stages x replicas of each."""
    stages = plan["stages"]
    ranks = sorted({len(stage["replicas"][0]) for stage in stages})
    replicas = sorted({len(stage["replicas"]) for stage in stages})
    return f"{span(ranks)} x {len(stages)} x {span(replicas)}"


HEAD = ("s", "CPU s", "MB", "ranks x stages x replicas", "micro-batch", "samples/s", "gap")


def row(found: Measured) -> list[str]:
    """A line of a table."""
    spent = [found.case.title, f"{found.wall_s:.1f}", f"{found.cpu_s:.1f}", f"{found.peak_mb:.0f}"]
    if not found.plan:
        return [*spent, found.error, *[""] * 3]
    figures, batch = found.plan["predictions"], found.plan["micro_batches"]
    seconds = figures.get("simulated_iteration_s") or figures["iteration_s"]
    again = sum(bool(stage["recompute"]) for stage in found.plan["stages"])
    options = [f"recompute {again}"] if again else []
    options += [f"ZeRO-{z}" for z in sorted({stage["zero"] for stage in found.plan["stages"]}) if z]
    return [
        *spent,
        ", ".join([shape(found.plan), *options]),
        f"{batch['size']} of {batch['global_batch']}",
        f"{batch['global_batch'] / seconds:,.4g}",
        f"{figures['gap']:.2%}",
    ]


def table(title: str, first: str, cases: Sequence[Case], folder: Path) -> Iterator[str]:
    """A table in Markdown, line by line as the jobs end."""
    yield f"\n## {title}\n"
    yield _line((first, *HEAD))
    yield _line(["---"] * (len(HEAD) + 1))
    for case in cases:
        yield _line(row(measure(case, folder)))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def given_models(folder: Path) -> list[Case]:
    """Every ONNX file of a folder on two DGX A100, 8 samples a device; symbolic batches are 1, other axes 128."""
    return [
        Case(path.stem, str(path), "dgx-a100", 2, 128, tuple(_dims(path))) for path in sorted(folder.glob("*.onnx"))
    ]


def _dims(path: Path) -> Iterator[str]:
    """Options that size the symbolic axes of a model's inputs."""
    graph = onnx.load(str(path), load_external_data=False).graph
    axes = (d for given in graph.input for d in given.type.tensor_type.shape.dim)
    for name in sorted({d.dim_param for d in axes} - {""}):
        yield from ("--dim", f"{name}={1 if name == 'batch' else 128}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parts: dict[str, tuple[str, str, Callable[[], Sequence[Case]]]] = {
        "big": ("From file to plan", "job", lambda: BIG),
        "models": (
            "Models from files, two DGX A100",
            "model",
            lambda: given_models(given.models) if given.models else (),
        ),
        "layers": ("Time against layers", "layers", growth_with_layers),
        "devices": ("Time against devices", "devices", growth_with_devices),
        "axes": ("Time against mesh axes", "meshes", growth_with_axes),
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint", description=__doc__)
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="plan every ONNX file of this folder too")
    parser.add_argument("--only", action="append", choices=tuple(parts), help="print this part only; repeatable")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        for part, (title, first, cases) in parts.items():
            chosen = cases() if part in (given.only or parts) else ()
            for line in table(title, first, chosen, Path(name)) if chosen else ():
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Training jobs that experts tuned by hand, as published: what of each row the program takes, and what not and why."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner

RECIPES, MODELS = "recipes.json", "models.json"

ABLE = frozenset(field.name for kind in (planner.Degrees, planner.Job) for field in dataclasses.fields(kind))
"""What a configuration by its degrees and a job can say."""

FORMATS = {"bf16": "bf16"}
"""Our number format for each that rows name."""
FRAMEWORKS = {
    "Megatron-Bridge performance summary": "Megatron-Bridge",
    "NeMo AutoModel performance summary": "NeMo AutoModel",
    "NeMo performance summary 24.07": "NeMo 24.07",
    "Google tpu-recipes Ironwood": "MaxText",
    "Google tpu-recipes v5p": "MaxText",
    "Google gpu-recipes MaxText": "MaxText",
    "MLPerf Training v5.1": "MLPerf",
    "Megatron-LM README table (mcore r0.8)": "Megatron-LM",
    "Megatron-LM examples/llama": "Megatron-LM",
    "Megatron-Core MoE report": "Megatron-LM",
    "Megatron-MoE-ModelZoo": "Megatron-LM",
    "Llama 3 herd of models table 4": "Meta",
}
MACHINES = {
    "H100-SXM": ("dgx-h100", 8),
    "H200": ("dgx-h200", 8),
    "B200": ("p6-b200.48xlarge", 8),
    "GB200-NVL72": ("gb200-nvl72", 72),
    "TPU v5p": ("tpu-v5p-pod", 0),
}
"""Profile of a device's cluster, and devices of one node in it; 0 where a profile is one pod."""
TUNED = (1, 2, 3, 4, 6, 7, 8)
"""Chunks a worker that are tried where a row says that they were tuned, and not which."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A row as the program takes it.

    Attributes:
        model, seq: a bundled model and its sequence length in tokens.
        cluster, nodes, stack: the machine and its software.
        job: what is trained.
        tried: the configuration; several where the source leaves something open, of which the fastest that fits is
            meant.
    """

    model: str
    seq: int
    cluster: str
    nodes: int
    stack: str
    job: planner.Job
    tried: tuple[planner.Degrees, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A published row.

    Attributes:
        key: the row's name.
        source: where it was published.
        stack: framework and release.
        device: by the row's name.
        job: what was trained, on how many devices: rows of one job differ in configuration or software.
        measured_s: seconds of an iteration; 0 where not stated.
        lacks: features of the row that the program cannot state; empty where it takes all.
        assumed: what the row does not say.
        statement: the row as the program takes it; None where it lacks something.
    """

    key: str
    source: str
    stack: tuple[str, str]
    device: str
    job: tuple[Any, ...]
    measured_s: float
    lacks: tuple[str, ...]
    assumed: tuple[str, ...]
    statement: Statement | None


def read_recipes(folder: Path) -> tuple[tuple[Recipe, ...], tuple[Mapping[str, Any], ...]]:
    """All rows in file order, and the pairs of configurations of one job.

    Raises:
        OSError: a file is absent or cannot be read.
    """
    document = json.loads((folder / RECIPES).read_text())
    sizes = json.loads((folder / MODELS).read_text())["models"]
    known = set(planner.bundled_names())
    rows = tuple(_recipe(row, _model(row, sizes, known), known) for row in document["rows"])
    return rows, tuple(document.get("pairs", ()))


def _model(row: Mapping[str, Any], sizes: Mapping[str, Any], known: set[str]) -> str:
    """The bundled model: with predictors of further tokens where the row's layout or its FLOPs a token contain them."""
    name, measured = row["model"], row["measured"]
    if f"{name}-mtp" not in known:
        return str(name)
    stated = sizes.get(name, {}).get("train_gflops_per_token", {}).get(str(row["seq"]), 0.0)
    tokens, flops = measured.get("tokens_per_s_per_gpu"), measured.get("tflops_per_gpu")
    with_all = bool(tokens and flops and stated) and flops * 1e3 / tokens > 0.98 * stated
    return f"{name}-mtp" if "m" in _layout(row) or with_all else str(name)


def _layout(row: Mapping[str, Any]) -> str:
    """The pipeline layout, where the row writes one out."""
    text = row.get("pipeline_layout") or ""
    return text if text.startswith("E") else ""


def _recipe(row: Mapping[str, Any], model: str, known: set[str]) -> Recipe:
    assumed: list[str] = []
    lacks = tuple(_lacks(row, model, known))
    return Recipe(
        key=row["id"],
        source=row["source"],
        stack=(FRAMEWORKS.get(row["source"], row["source"]), row["release"]),
        device=row["system"]["device"],
        job=(row["model"], row["system"]["device"], row["system"]["gpus"], row["gbs"], row["seq"], row.get("task")),
        measured_s=row["measured"].get("iteration_s") or 0.0,
        lacks=lacks,
        statement=None if lacks else _statement(row, model, assumed),
        assumed=tuple(assumed),
    )


def _lacks(row: Mapping[str, Any], model: str, known: set[str]) -> Iterator[str]:
    """The features of a row that the program cannot state."""
    recompute, optimizer, fsdp = row.get("recompute") or {}, row.get("optimizer") or {}, row.get("fsdp") or 0
    modules = recompute.get("modules") or []
    reasons = {
        "not measured as an iteration": not row["measured"].get("iteration_s"),
        "parallelism not stated": not all(row.get(name) for name in ("tp", "pp", "cp", "ep", "dp", "gbs")),
        f"model: {row['model']}": model not in known,
        f"system: {row['system']['device']}": row["system"]["device"] not in MACHINES,
        f"number format: {row['precision']}": row["precision"] not in FORMATS,
        f"optimizer moments: {optimizer.get('moments')}": (optimizer.get("moments") or "fp32") != "fp32"
        and "moments" not in ABLE,
        "context parallelism": (row.get("cp") or 1) > 1 and "context" not in ABLE,
        "expert parallelism": (row.get("ep") or 1) > 1 and "expert" not in ABLE,
        "recomputation by module": bool(modules) and "repeats" not in ABLE,
        "recomputation of operators that are not named": recompute.get("granularity") == "selective" and not modules,
        "recomputation of some layers": bool(recompute.get("num_layers")),
        "activations in the host's memory": any((row.get("offload") or {}).values()),
        "weights that are not trained (LoRA)": row.get("task") == "lora",
        "sharding over a part of the copies": fsdp not in (0, row.get("dp")),
    }
    return (reason for reason, applies in reasons.items() if applies)


def _statement(row: Mapping[str, Any], model: str, assumed: list[str]) -> Statement:
    cluster, per_node = MACHINES[row["system"]["device"]]
    if row["source"].startswith("Llama 3"):
        cluster = "grand-teton-h100"
    devices = row["system"]["gpus"]
    whole = (row.get("cuda_graphs") or {}).get("impl") == "full_iteration" or cluster.startswith("tpu")
    return Statement(
        model=model,
        seq=row["seq"],
        cluster=cluster,
        nodes=-(-devices // per_node) if per_node else 1,
        stack="graphs" if whole else "",
        job=planner.Job(
            row["gbs"], precision=_precision(row, assumed), optimizer="adam", devices=devices, dropout=False
        ),
        tried=_tried(row, assumed),
    )


def _precision(row: Mapping[str, Any], assumed: list[str]) -> str:
    name, gradients = FORMATS[row["precision"]], (row.get("optimizer") or {}).get("main_grads")
    if gradients is None:
        assumed.append("gradients are summed in fp32")
    return f"{name}-fp32grad" if gradients in (None, "fp32") and name == "bf16" else name


def _tried(row: Mapping[str, Any], assumed: list[str]) -> tuple[planner.Degrees, ...]:
    """The row's configuration, once for each value of what it leaves open."""
    recompute, optimizer = row.get("recompute") or {}, row.get("optimizer") or {}
    cores = max(1, row["tp"] * row["pp"] * row["cp"] * row["dp"] // row["system"]["gpus"])
    if cores > 1:
        assumed.append(f"a device with {cores} cores is one rank")
    if not row.get("recompute") or recompute.get("detail", "").startswith("none stated"):
        assumed.append("nothing is recomputed")
    if optimizer.get("distributed") is None and not row.get("fsdp"):
        assumed.append("the optimizer state is sharded over data-parallel ranks")
    micro_batches, chunks = [row["mbs"]], [row["vp"]]
    if row["mbs"] is None:
        micro_batches = [1, 2, 4]
        assumed.append("the micro-batch is the fastest of 1, 2, 4")
    if row["vp"] is None:
        chunks = [*TUNED] if row["pp"] > 1 and "interleaved" in (row.get("schedule") or "") else [1]
        assumed.extend(["the number of chunks is the fastest"] if len(chunks) > 1 else [])
    named: dict[str, Any] = {
        "tensor": row["tp"],
        "pipeline": row["pp"],
        "data": row["dp"] // cores,
        "layout": _layout(row),
        "zero": _zero(row),
        "recompute": recompute.get("granularity") == "full",
    }
    return tuple(
        planner.Degrees(**named, micro_batch=size * cores, chunks=1 if _layout(row) else count)
        for size, count in itertools.product(micro_batches, chunks)
    )


def _zero(row: Mapping[str, Any]) -> int:
    """ZeRO stage: 3 for FSDP, 1 for a distributed optimizer and where weights stay gathered until the update.

    FSDP in a pipeline sums gradients on each rank and scatters them once, after the last micro-batch.
    """
    if row["dp"] == 1:
        return 0
    words = f"{row.get('schedule')} {row.get('notes')}"
    if row.get("fsdp"):
        return 1 if "not resharded" in words or "reshard_after_forward false" in words else 3
    return 0 if (row.get("optimizer") or {}).get("distributed") is False else 1

"""Training jobs that experts tuned by hand, as published: what of each row the program takes, and what not and why."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner
from benchmarks.recipe_practice import with_practice

RECIPES, MODELS = "recipes.json", "models.json"

ABLE = frozenset(field.name for kind in (planner.Degrees, planner.Job) for field in dataclasses.fields(kind))
"""What a configuration by its degrees and a job can say."""

FORMATS = {
    "bf16": "bf16", "fp8": "fp8", "fp8-cs": "fp8-cs", "fp8-ds/cs": "fp8-cs", "fp8-blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip
"""Our number format for each that rows name."""
STORED = {"fp32": "fp32", "bf16": "bf16", "bf16 (first)": "bf16"}
"""Our name for each format in which rows store gradients and moments."""
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
BACKENDS = {"NeMo AutoModel": "torchtitan", "MaxText": "jax"}
"""What plans of a framework's jobs are limited to (`Job.backends`); the others are built on Megatron Core."""
MACHINES = {
    "H100-SXM": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "GB200-NVL72": "gb200-nvl72",
    "GB300-NVL72": "gb300-nvl72",
    "MI350X": "mi350x-8",
    "MI355X": "mi355x-8",
    "TPU v5p": "tpu-v5p-pod",
    "TPU7x (Ironwood)": "tpu7x-pod",
}
"""Profile of the cluster of each device."""
ALONE = 0.4
"""Part of tensor-parallel communication that Megatron's layers hide without being asked: of ten changes of layout in a
layer, the gathers of what the weights' gradients need and the scatters of what goes back, four, run beside products."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A row as the program takes it.

    Attributes:
        model, seq: a bundled model and its sequence length in tokens.
        cluster, devices: the machine, of which so many devices are used.
        stack: its software by name.
        eager: no part of it is captured in CUDA graphs: every operation is launched by the host.
        inner_overlap: `Stack.inner_overlap` by mesh axis.
        product_pieces: `Stack.product_pieces`.
        rows_once: `Stack.rows_once`: as the `flex` dispatcher sends rows.
        grouped: `Stack.grouped_experts`: a row's own words.
        job: what is trained.
        tried: the configuration; several where the source leaves something open, of which the fastest that fits is
            meant.
    """

    model: str
    seq: int
    cluster: str
    devices: int
    stack: str
    eager: bool
    inner_overlap: tuple[tuple[str, float], ...]
    product_pieces: int
    rows_once: bool
    grouped: bool
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
        mixture: its model is a mixture of experts.
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
    mixture: bool
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
    filled = [with_practice(row) for row in document["rows"]]
    rows = tuple(_recipe(row, _model(row, sizes, known), known, taken) for row, taken in filled)
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


def _recipe(row: Mapping[str, Any], model: str, known: set[str], taken: tuple[str, ...]) -> Recipe:
    """A row as far as the program takes it; `taken` says what the source's scripts add to its own words."""
    assumed = list(taken)
    lacks = tuple(_lacks(row, model, known))
    return Recipe(
        key=row["id"],
        source=row["source"],
        stack=(FRAMEWORKS.get(row["source"], row["source"]), row["release"]),
        device=row["system"]["device"],
        job=(row["model"], row["system"]["device"], row["system"]["gpus"], row["gbs"], row["seq"], row.get("task")),
        mixture=model in known and planner.bundled_info(model).active is not None,
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
        f"optimizer moments: {optimizer.get('moments')}": (optimizer.get("moments") or "fp32") not in STORED,
        "context parallelism": (row.get("cp") or 1) > 1 and "context" not in ABLE,
        "expert parallelism": (row.get("ep") or 1) > 1 and "expert" not in ABLE,
        "recomputation of operators that are not named": recompute.get("granularity") == "selective"
        and not (modules or _offload(row)),
        "activations in the host's memory": any((row.get("offload") or {}).values()) and not _offload(row),
        "weights that are not trained (LoRA)": row.get("task") == "lora",
        "sharding over a part of the copies": bool(fsdp) and (row.get("dp") or 0) % fsdp > 0,
    }
    return (reason for reason, applies in reasons.items() if applies)


def _offload(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules whose activations lie in the host's memory, or `layer_input`; none where the row has another way."""
    said = row.get("offload") or {}
    return ("layer_input",) if said.get("layer_input") else tuple(said.get("fine_grained") or ())


def _statement(row: Mapping[str, Any], model: str, assumed: list[str]) -> Statement:
    cluster, optimizer = MACHINES[row["system"]["device"]], row.get("optimizer") or {}
    if row["source"].startswith("Llama 3"):
        cluster = "grand-teton-h100"
    graphs, moe = row.get("cuda_graphs") or {}, row.get("moe") or {}
    whole = "full_iteration" in (graphs.get("impl"), *graphs.get("scope", ())) or cluster.startswith("tpu")
    if row.get("cuda_graphs") is None and not whole:
        assumed.append("layers are partly captured in CUDA graphs")
    moments, in_pieces = STORED[optimizer.get("moments") or "fp32"], _in_pieces(row, assumed)
    if "first" in (optimizer.get("moments") or ""):
        assumed.append("both moments are in bf16")
    return Statement(
        model=model,
        seq=row["seq"],
        cluster=cluster,
        devices=row["system"]["gpus"],
        stack="maxtext" if cluster.startswith("tpu") else "graphs" if whole else "megatron-2025",
        eager=not whole and row.get("cuda_graphs") is not None and not _captured(graphs),
        inner_overlap=_inner_overlap(row, in_pieces=in_pieces),
        product_pieces=_overlapped().product_pieces if in_pieces else 1,
        rows_once=moe.get("dispatcher") == "flex",
        grouped=bool(moe.get("fused_grouped_mlp")),
        job=planner.Job(
            row["gbs"],
            precision=_precision(row, assumed),
            optimizer="adam" if moments == "fp32" else f"adam:moments={moments}",
            dropout=False,
        ),
        tried=_tried(row, planner.bundled_info(model).layers, assumed),
    )


def _captured(graphs: Mapping[str, Any]) -> bool:
    """Whether CUDA graphs hold the body of a layer: by scopes that name more than its router, or as a whole."""
    scope = graphs.get("scope")
    return "impl" in graphs and (not scope or not {*scope} <= {"moe_router", "moe_preprocess"})


def _overlapped() -> planner.Stack:
    return planner.load_stack("overlapped")


def _in_pieces(row: Mapping[str, Any], assumed: list[str]) -> bool:
    """Whether products run in pieces beside tensor-parallel communication; without words on overlap, Megatron-Bridge's
    do."""
    said = row.get("overlap") or []
    in_pieces = "tp_comm" in said or (isinstance(said, str) and "tp" in said)
    if row["tp"] > 1 and not said and FRAMEWORKS.get(row["source"]) == "Megatron-Bridge":
        assumed.append("tensor-parallel communication is overlapped")
        return True
    if row["tp"] > 1 and not in_pieces:
        assumed.append(f"{ALONE:.0%} of tensor-parallel communication hides behind products")
    return in_pieces


def _inner_overlap(row: Mapping[str, Any], *, in_pieces: bool) -> tuple[tuple[str, float], ...]:
    """What hides communication inside a group: products in pieces, the all-to-alls of another micro-batch, or backward
    products alone, as Megatron Core does by itself."""
    said, shares = row.get("overlap") or [], _overlapped().inner_overlap
    tensor = shares["tensor"] if in_pieces else ALONE
    return (("expert", shares["expert"] if "moe_a2a" in said else 0.0), ("context", 0.0), ("*", tensor))


def _precision(row: Mapping[str, Any], assumed: list[str]) -> str:
    name, optimizer = FORMATS[row["precision"]], row.get("optimizer") or {}
    options = []
    if optimizer.get("main_grads") is None:
        assumed.append("gradients are summed in fp32")
    if STORED[optimizer.get("main_grads") or "fp32"] == "fp32":
        options.append("grads=fp32")
    if optimizer.get("grad_reduce"):
        options.append(f"reduce={STORED[optimizer['grad_reduce']]}")
    if "bf16 gathered" in (optimizer.get("param_gather") or ""):
        options.append("weights=bf16")
    return ":".join([name, ",".join(options)]) if options else name


def _chunks(row: Mapping[str, Any], layers: int) -> list[int]:
    """Numbers of chunks, two and more, that the layers fill equally, embedding and loss counted as layers or not; 1
    where none does."""
    counts = range(2, (layers + 2) // row["pp"] + 1)
    found = [v for v in counts if not layers % (row["pp"] * v) or not (layers + 2) % (row["pp"] * v)]
    return found or [1]


def _tried(row: Mapping[str, Any], layers: int, assumed: list[str]) -> tuple[planner.Degrees, ...]:
    """The row's configuration, once for each value of what it leaves open."""
    recompute, optimizer = row.get("recompute") or {}, row.get("optimizer") or {}
    offload = _offload(row)
    if offload == ("layer_input",):
        assumed.append("all but the layers' inputs is recomputed")
    cores = max(1, row["tp"] * row["pp"] * row["cp"] * row["dp"] // row["system"]["gpus"])
    if cores > 1:
        assumed.append(f"a device with {cores} cores is one rank")
    if not row.get("recompute") or recompute.get("detail", "").startswith("none stated"):
        assumed.append("nothing is recomputed")
    if optimizer.get("distributed") is None and not row.get("fsdp"):
        assumed.append("the optimizer state is sharded over data-parallel ranks")
    micro_batches, chunks = [row["mbs"]], [row["vp"]]
    if row["mbs"] is None:
        micro_batches = [1, 2]
        assumed.append("the micro-batch is the fastest of 1 and 2")
    if row["vp"] is None:
        chunks = _chunks(row, layers) if "interleaved" in (row.get("schedule") or "") else [1]
        assumed.extend(["the number of chunks is the fastest"] if len(chunks) > 1 else [])
    expert = row["ep"]
    if row["ep"] * max(1, row["cp"]) > 1 and row["dp"] // cores % row["ep"]:
        expert = math.gcd(row["ep"], row["dp"] // cores)
        assumed.append(f"experts are dealt to {expert} ranks, and cut by those beside them")
    named: dict[str, Any] = {
        "tensor": row["tp"],
        "context": row["cp"],
        "expert": expert,
        "pipeline": row["pp"],
        "data": row["dp"] // cores,
        "layout": _layout(row),
        "zero": _zero(row),
        "shard_over": max(1, (row.get("fsdp") or 0) // cores) if row.get("fsdp") not in (0, None, row["dp"]) else 0,
        "recompute": recompute.get("granularity") == "full" or offload == ("layer_input",),
        "recompute_layers": recompute.get("num_layers") or 0,
        "repeats": tuple(recompute.get("modules") or ()),
        "offload": offload,
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

"""Measured training runs as the published tables give them, and why the planner cannot express some of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE_NODE = "single_node_runs.json"
PUBLISHED = "published_runs.json"
_SINGLE_NODE_SOURCE = "vTrain single node"
_DENSE = ("gpt", "mpt")
_FORMATS = {"fp16": "fp16", "bf16": "bf16", "amp_bf16": "bf16", "fp32": "fp32", "bf16-optimizer": "bf16-deepspeed"}
_SCHEDULES = {
    "gpipe": "gpipe", "fsdp": "1f1b", "1f1b": "1f1b", "interleaved-1f1b": "interleaved",
    "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zb-2p*": "zb-h2", "zb-v": "zb-v",
}  # fmt: skip
"""Our schedule that keeps as many micro-batches as the one that a source names."""
_TIME_ALONE = ("not an iteration time", "interleaved stages", "schedule other than gpipe and 1f1b")
"""Obstacles to pricing the time of a row, not its memory."""
_CLUSTERS = Path(__file__).parent / "clusters"
_TRACES = Path(__file__).parent / "stacks" / "traces.yaml"
"""The stack of times that were composed from kernel traces."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster profile: a bundled name or a file, and the devices in one of its nodes."""

    profile: str
    node_size: int

    def nodes(self, devices: int) -> int:
        """Nodes that hold so many devices."""
        return max(1, -(-devices // self.node_size))


_MACHINES = {
    ("A100-SXM-80GB", "4x200Gb/s"): Machine(str(_CLUSTERS / "a100-4hdr.yaml"), 8),
    ("A100-SXM-80GB", "Omni-Path"): Machine("jean-zay-a100", 8),
    ("A100-SXM-80GB", ""): Machine("dgx-a100", 8),
    ("A100-SXM-40GB", ""): Machine("p4d.24xlarge", 8),
    ("V100-SXM2-32GB", "Jean Zay"): Machine(str(_CLUSTERS / "jean-zay-v100.yaml"), 4),
    ("V100-SXM2-16GB", "Jean Zay"): Machine(str(_CLUSTERS / "jean-zay-v100.yaml"), 4),
    ("H100-SXM-80GB", ""): Machine("dgx-h100", 8),
}
"""By device and a phrase of the interconnect; the first that matches. The 16 GB V100 differs in capacity alone."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run.

    Attributes:
        key: which row of which file.
        source: short name of the publication or campaign.
        obstacle: why the planner's space has no such plan; "" when it has.
        sharded: gradients or parameters are sharded too (ZeRO-2, ZeRO-3, FSDP).
        layers, hidden, heads, ffn, vocab, seq: sizes of the transformer; 0 where not stated.
        global_batch, micro_batch: samples; 0 where not stated.
        stages, replicas: pipeline and data parallelism.
        zero: ZeRO stage, 3 for FSDP.
        schedule: `1f1b` or `gpipe`.
        recompute: every layer is recomputed.
        precision: name of the number format.
        fused_attention: attention is one kernel.
        dropout: the run draws dropout masks (Megatron's default), as opposed to none (MPT's).
        machine: where it ran; None where no profile describes it.
        seconds: measured iteration.
        memory_bytes: measured peak of the fullest device; 0 where not stated.
        memory_by: "allocator" or "nvidia-smi".
        ranks: tensor parallelism, by columns and rows with whole norms and sums.
        stack: the software that ran it.
        chunks: stages on each worker.
        out_of_memory: the run did not fit.
        memory_obstacle: why the planner has no such memory; "" when it has.
    """

    key: str
    source: str
    obstacle: str
    sharded: bool
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    global_batch: int
    micro_batch: int
    stages: int
    replicas: int
    zero: int
    schedule: str
    recompute: bool
    precision: str
    fused_attention: bool
    dropout: bool
    machine: Machine | None
    seconds: float
    memory_bytes: float = 0.0
    memory_by: str = ""
    ranks: int = 1
    stack: str = ""
    chunks: int = 1
    out_of_memory: bool = False
    memory_obstacle: str = ""

    @property
    def devices(self) -> int:
        """Devices at work."""
        return self.stages * self.replicas * self.ranks

    @property
    def shape(self) -> str:
        """The run in a few words."""
        size = f"h{self.hidden} L{self.layers} s{self.seq}"
        ranks = f"tp{self.ranks} " if self.ranks > 1 else ""
        return f"{size} {ranks}pp{self.stages} dp{self.replicas} mb{self.micro_batch} gbs{self.global_batch}" + (
            " recompute" if self.recompute else ""
        )


def read_runs(folder: Path) -> tuple[Run, ...]:
    """All rows of both files, in file order.

    Raises:
        OSError: a file is absent or cannot be read.
    """
    single = json.loads((folder / SINGLE_NODE).read_text())
    published = json.loads((folder / PUBLISHED).read_text())
    rows = [dict(zip(single["columns"], row, strict=True)) for row in single["rows"]]
    return (*(_single_node(i, row) for i, row in enumerate(rows)), *map(_published, published["rows"]))


def _single_node(index: int, row: Mapping[str, Any]) -> Run:
    """The campaign's rows: eager Megatron-DeepSpeed, fp16, recomputation on, vocabulary of GPT-2."""
    return Run(
        key=f"single[{index}]",
        source=_SINGLE_NODE_SOURCE,
        obstacle="",
        sharded=False,
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        ffn=4 * row["hidden"],
        vocab=50257,
        seq=row["seq"],
        global_batch=row["global_batch"],
        micro_batch=row["micro_batch"],
        stages=row["pp"],
        replicas=row["dp"],
        zero=0,
        schedule="1f1b",
        recompute=True,
        precision="fp16",
        fused_attention=False,
        dropout=True,
        machine=Machine("dgx-a100", 8),
        seconds=row["iter_ms"] / 1e3,
        ranks=row["tp"],
        stack=str(_TRACES),
    )


def _published(row: Mapping[str, Any]) -> Run:
    model, batch, parallel, hardware = row["model"], row["batch"], row["parallel"], row["hardware"]
    gpu, wires = hardware["gpu"].split(" (")[0], hardware["interconnect"] or ""
    found = (m for (name, phrase), m in _MACHINES.items() if name == gpu and phrase in wires)
    machine = next(found, None)
    composer = "Composer" in (row["framework"] or "")
    memory = row["measured"].get("peak_mem_gb") or 0.0
    return Run(
        key=row["id"],
        source=_short(row["source"]["ref"]),
        obstacle=next(_obstacles(row, machine), ""),
        memory_obstacle=next((o for o in _obstacles(row, machine) if o not in _TIME_ALONE), ""),
        chunks=parallel["vpp"] or 1,
        out_of_memory=row["kind"] == "oom" or bool(row["measured"].get("oom")),
        sharded=(parallel["zero_stage"] or 0) >= 2,
        layers=model["layers"] or 0,
        hidden=model["hidden"] or 0,
        heads=model["heads"] or 0,
        ffn=model["ffn"] or 0,
        vocab=model["vocab"] or 50257,
        seq=model["seq"] or 0,
        global_batch=batch["global_"] or 0,
        micro_batch=int(batch["micro"] or 0),
        stages=parallel["pp"] or 0,
        replicas=parallel["dp"] or 0,
        zero=parallel["zero_stage"] or 0,
        schedule=_SCHEDULES.get(parallel["schedule"] or "", "1f1b"),
        recompute=row["recompute"] == "full",
        precision=_FORMATS.get(_format(row["precision"]), ""),
        fused_attention="flash" in (row["attention_kernel"] or ""),
        dropout=not composer,
        machine=machine,
        seconds=row["derived"].get("iter_time_s") or 0.0,
        memory_bytes=memory * (2**30 if row["measured"].get("mem_unit_note") == "GiB" else 1e9),
        memory_by="nvidia-smi" if "bigscience" in row["source"]["ref"] else "allocator" if memory else "",
        ranks=parallel["tp"] or 1,
        stack=_stack(row["framework"] or "", gpu),
    )


def _stack(framework: str, gpu: str) -> str:
    """The stack of a framework as the tables name it.

    BigScience's launches waited on its A100s; Composer's runs on H100 were among the first there.
    """
    if "Megatron-DeepSpeed (BigScience)" in framework and gpu.startswith("A100"):
        return "bigscience-2022"
    known = {"ZeRO-3": "deepspeed-2021", "Composer": "fsdp-2023-h100" if gpu.startswith("H100") else "fsdp-2023"}
    return next((stack for phrase, stack in known.items() if phrase in framework), "megatron-2021")


def _format(precision: str | None) -> str:
    """`fp16 mixed (Megatron default)` and the like in one word."""
    return (precision or "").split(" ")[0]


def _short(reference: str) -> str:
    known = {
        "Zero Bubble": "Zero Bubble",
        "mosaicml": "MosaicML",
        "bigscience": "BigScience",
        "vTrain": "vTrain multi-node",
        "Megatron-LM": "Megatron-LM",
        "Reducing Activation": "Korthikanti",
    }
    return next((name for phrase, name in known.items() if phrase in reference), reference.split(",")[0].split(" ")[0])


def _obstacles(row: Mapping[str, Any], machine: Machine | None) -> Iterator[str]:
    """The reasons why a row cannot be priced as it ran."""
    model, batch, parallel = row["model"], row["batch"], row["parallel"]
    layers, stages = model["layers"] or 0, parallel["pp"] or 0
    schedule = parallel["schedule"] or ("1f1b" if stages == 1 else "")
    reasons = {
        "not an iteration time": row["kind"] != "e2e" or not row["derived"].get("iter_time_s"),
        "sequence parallelism": (parallel["tp"] or 0) > 1 and bool(parallel["sequence_parallel"]),
        "context or expert parallelism": (parallel["cp"] or 1) > 1 or (parallel["ep"] or 1) > 1,
        "interleaved stages": (parallel["vpp"] or 1) > 1,
        "schedule other than gpipe and 1f1b": stages > 1 and schedule not in ("gpipe", "1f1b"),
        "parallelism not stated": not parallel["tp"] or not stages or not parallel["dp"],
        "model other than a dense GPT, or sizes not stated": model["family"] not in _DENSE
        or not (layers and model["hidden"] and model["heads"] and model["seq"]),
        "micro-batch not stated": not batch["micro"] or not batch["global_"],
        "number format": _format(row["precision"]) not in _FORMATS,
        "recomputation selective or not stated": row["recompute"] not in ("full", "none"),
        "machine without a profile": machine is None,
        "layers that stages do not divide": bool(stages) and layers % stages != 0 and (layers + 2) % stages != 0,
    }
    return (reason for reason, applies in reasons.items() if applies)

"""One model through several exporters: what the planner makes of each file, and what torch kept of the model.

    python -m benchmarks.exports              the tables
    python -m benchmarks.exports --write      the tables, put into docs/accuracy.md

The files, and what torch kept of each model (`truth.json`: distinct tensors saved for backward, fp32, on a CPU, without
a loss), are those of `onnx/families` in the folder of reference data.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import planner
from planner import Cluster, Graph, Job, Plan
from planner.graph import build_chain
from planner.operators import SavedOptions, graph_specs, saved_for_backward, unique_bytes
from tests.shared_data import shared_path

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = "dgx-a100"
BATCHES = (2, 4)
GLOBAL_BATCH = 64
DOCUMENT = ROOT / "docs" / "accuracy.md"


@dataclass(frozen=True)
class Planned:
    """What a plan decides, and its time.

    Attributes:
        seconds: of an iteration.
        cuts: first module of each stage.
        replicas: of each stage.
    """

    seconds: float
    cuts: tuple[str, ...]
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Export:
    """What one file says.

    Attributes:
        family: the model.
        exporter: how it was exported.
        blocks: blocks of its chain.
        parameters: trained elements.
        flops: matrix work of a forward and a backward pass.
        forward_s: seconds of a forward pass.
        backward_s: seconds of a backward pass.
        plan: the fastest plan.
        pipeline: the fastest plan of two stages.
        saved_bytes: bytes kept for backward, without a loss, by batch; absent where the batch cannot be changed.
        unfused_bytes: the same at the first batch, attention running step by step.
    """

    family: str
    exporter: str
    blocks: int
    parameters: int
    flops: float
    forward_s: float
    backward_s: float
    plan: Planned
    pipeline: Planned
    saved_bytes: dict[int, int]
    unfused_bytes: int


def measured() -> dict[str, dict[int, int]]:
    """Bytes that torch kept, by family and batch."""
    models = json.loads(shared_path("onnx/families/truth.json").read_text())["models"]
    return {
        name: {batch: int(figures[f"batch {batch}"]["saved_bytes"]) for batch in BATCHES}
        for name, figures in models.items()
    }


def exports() -> Iterator[Export]:
    """Every file of every family, in order of names."""
    cluster = planner.load_cluster(CLUSTER)
    for path in sorted(shared_path("onnx/families").glob("*.onnx")):
        yield export_of(path, cluster)


def export_of(path: Path, cluster: Cluster) -> Export:
    """What one file says, on a GPU of the cluster in fp32 and, planned, on all of them."""
    family, exporter, _ = path.name.split(".")
    graph = planner.load_graph(path)
    saved = {}
    for batch in BATCHES:
        try:
            saved[batch] = kept(graph, batch)
        except planner.ModelError:
            continue  # the file fixes its batch
    found = planner.profile(graph, cluster.devices[0], precision="fp32")
    return Export(
        family,
        exporter,
        len(build_chain(graph).blocks),
        graph.parameter_count(),
        float(found.forward_flops.sum() + found.backward_flops.sum()),
        float(found.forward_s.sum()),
        float(found.backward_s.sum()),
        _planned(planner.plan(graph, cluster, Job(GLOBAL_BATCH, backends=("any",)))),
        _planned(planner.plan(graph, cluster, Job(GLOBAL_BATCH, backends=("any",), pipeline_stages=(2,)))),
        saved,
        kept(graph, BATCHES[0], fused=False),
    )


def kept(graph: Graph, batch: int, *, fused: bool = True) -> int:
    """Bytes kept for backward without a loss, by a framework that runs operator by operator.

    Raises:
        ModelError: the file fixes another batch.
    """
    same = graph if batch == graph.batch else planner.rebatch(graph, batch)
    options = SavedOptions(loss=False, fused_attention=fused)
    return unique_bytes(saved_for_backward(same, graph_specs(same), options=options))


def _planned(plan: Plan) -> Planned:
    return Planned(
        plan.predictions.iteration_s,
        tuple(stage.modules[0] if stage.modules else "" for stage in plan.stages),
        tuple(len(stage.replicas) for stage in plan.stages),
    )


def exports_table(found: Sequence[Export]) -> list[str]:
    """Families with several exports side by side, and the largest distance of each from the family's last file."""
    columns = (
        "model", "exporter", "blocks", "parameters", "GFLOP", "kept", "forward", "backward", "plan", "two stages",
        "second from", "off by",
    )  # fmt: skip
    sides = ("---" if column in ("model", "exporter", "second from") else "--:" for column in columns)
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(sides)}|"]
    last = {export.family: export for export in found}
    families = [export.family for export in found]
    for export in found:
        if families.count(export.family) > 1:
            cells = [
                export.family, export.exporter, str(export.blocks), f"{export.parameters:,}",
                f"{export.flops / 1e9:.4f}", f"{export.saved_bytes[BATCHES[0]] / 1e6:.3f} MB",
                f"{export.forward_s * 1e3:.3f} ms", f"{export.backward_s * 1e3:.3f} ms",
                f"{export.plan.seconds * 1e3:.3f} ms", f"{export.pipeline.seconds * 1e3:.3f} ms",
                f"`{export.pipeline.cuts[1]}`", f"{distance(export, last[export.family]):.1%}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def figures(export: Export) -> dict[str, float]:
    """What every export of a model should agree on."""
    return {
        "blocks": export.blocks, "parameters": export.parameters, "FLOPs": export.flops,
        "kept bytes": export.saved_bytes[BATCHES[0]], "forward": export.forward_s, "backward": export.backward_s,
        "plan": export.plan.seconds, "two stages": export.pipeline.seconds,
    }  # fmt: skip


def distance(export: Export, other: Export) -> float:
    """The largest relative distance of a figure from that of another export."""
    return max(abs(one / two - 1) for one, two in zip(figures(export).values(), figures(other).values(), strict=True))


def saved_table(found: Sequence[Export]) -> list[str]:
    """Predicted over measured bytes of every file, with an attention kernel and step by step; the median distance."""
    truth = measured()
    lines = [
        "| model | exporter | batch 2 | batch 4 | predicted / measured | without an attention kernel |",
        "|---|---|--:|--:|--:|--:|",
    ]
    distances = []
    for export in found:
        ratios = {batch: kept / truth[export.family][batch] for batch, kept in export.saved_bytes.items()}
        distances.append(abs(ratios[2] - 1))
        shown = " | ".join(f"{truth[export.family][b] / 1e6:.2f} MB" if b in ratios else "fixed" for b in BATCHES)
        both = ", ".join(f"{ratio:.3f}" for ratio in ratios.values())
        steps = export.unfused_bytes / truth[export.family][BATCHES[0]]
        lines.append(f"| {export.family} | {export.exporter} | {shown} | {both} | {steps:.3f} |")
    return [*lines, "", f"Median distance: {statistics.median(distances):.1%}, largest {max(distances):.1%}."]


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """A document with a table in the place marked for it.

    Raises:
        ValueError: the document lacks the marks.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not closed:
        raise ValueError(f"the document has no marks {begin} and {end}")
    return "\n".join([before + begin, *lines, end + after])


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them where they are published."""
    found = list(exports())
    for name, lines in (("exports", exports_table(found)), ("saved bytes", saved_table(found))):
        if "--write" in arguments:
            DOCUMENT.write_text(put(DOCUMENT.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
        else:
            print("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])

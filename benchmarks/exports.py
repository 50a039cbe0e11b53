"""One model through several exporters: what the planner makes of each file, and what torch kept of the model.

    python -m benchmarks.exports              the tables
    python -m benchmarks.exports --write      the tables, put into docs/models.md and docs/accuracy.md

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
from planner.graph import build_chain
from planner.operators import unique_bytes
from tests.shared_data import shared_path

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = "dgx-a100"
BATCHES = (2, 4)
DOCUMENTS = {"exports": "docs/models.md", "saved bytes": "docs/accuracy.md"}


@dataclass(frozen=True)
class Export:
    """What one file says.

    Attributes:
        family: the model.
        exporter: how it was exported.
        blocks: blocks of its chain.
        forward_flops: matrix work of a forward pass.
        forward_s: seconds of a forward pass.
        backward_s: seconds of a backward pass.
        saved_bytes: bytes kept for backward, without a loss, by batch; absent where the batch cannot be changed.
        unfused_bytes: the same at the first batch, attention running step by step.
    """

    family: str
    exporter: str
    blocks: int
    forward_flops: float
    forward_s: float
    backward_s: float
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
    device = planner.load_cluster(CLUSTER).devices[0]
    for path in sorted(shared_path("onnx/families").glob("*.onnx")):
        family, exporter, _ = path.name.split(".")
        graph = planner.load_graph(path)
        saved = {}
        for batch in BATCHES:
            try:
                costs = planner.profile(graph, device, precision="fp32", micro_batch=batch, loss=False)
            except planner.ModelError:
                continue  # the file fixes its batch
            saved[batch] = unique_bytes(costs.saved)
        found = planner.profile(graph, device, precision="fp32")
        steps = planner.profile(
            graph, device, precision="fp32", micro_batch=BATCHES[0], loss=False, fused_attention=False
        )
        yield Export(
            family,
            exporter,
            len(build_chain(graph).blocks),
            float(found.forward_flops.sum()),
            float(found.forward_s.sum()),
            float(found.backward_s.sum()),
            saved,
            unique_bytes(steps.saved),
        )


def exports_table(found: Sequence[Export]) -> list[str]:
    """Families with several exports side by side."""
    lines = [
        "| model | exporter | blocks | forward | backward | kept for backward |",
        "|---|---|--:|--:|--:|--:|",
    ]
    families = [export.family for export in found]
    for export in found:
        if families.count(export.family) > 1:
            times = f"{export.forward_s * 1e3:.2f} ms | {export.backward_s * 1e3:.2f} ms"
            kept = f"{export.saved_bytes[2] / 1e6:.3f} MB"
            lines.append(f"| {export.family} | {export.exporter} | {export.blocks} | {times} | {kept} |")
    return lines


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
            path = ROOT / DOCUMENTS[name]
            path.write_text(put(path.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
        else:
            print("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])

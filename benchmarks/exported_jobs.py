"""Well-known jobs planned for every framework and exported to it: what is refused and why, and what each limit costs.

    python -m benchmarks.exported_jobs              the table
    python -m benchmarks.exported_jobs --write      the table, put into docs/export.md

Takes about ten minutes of one core.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import planner
from planner import Graph, Plan, export
from planner.errors import ShardplanError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "export.md"
PART = re.compile(r"(<!-- generated: jobs -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class KnownJob:
    """A model on a cluster with so many samples an iteration."""

    model: str
    cluster: str
    devices: int
    global_batch: int

    @property
    def title(self) -> str:
        """Model, devices, cluster and batch in words."""
        return f"{self.model} on {self.devices} of {self.cluster}, batch {self.global_batch}"


JOBS = (
    KnownJob("gpt2", "dgx-h100", 8, 64),
    KnownJob("gpt2-xl", "dgx-a100", 8, 64),
    KnownJob("bert-large", "dgx-a100", 16, 512),
    KnownJob("resnet50", "dgx-h100", 8, 512),
    KnownJob("vit-l16", "p4d.24xlarge", 16, 1024),
    KnownJob("llama3.2-1b", "dgx-h100", 8, 64),
    KnownJob("llama3-8b", "dgx-h100", 8, 64),
    KnownJob("llama3-8b", "dgx-b200", 8, 128),
    KnownJob("llama3-8b", "tpu-v5p-pod", 64, 256),
    KnownJob("mistral-7b", "dgx-h100", 8, 64),
    KnownJob("qwen3-8b", "nd-mi300x-v5", 8, 64),
    KnownJob("gemma2-9b", "p5en.48xlarge", 8, 64),
    KnownJob("llama2-13b", "dgx-a100", 32, 256),
    KnownJob("mixtral-8x7b", "dgx-h100", 32, 256),
    KnownJob("qwen3-30b-a3b", "dgx-h100", 16, 512),
    KnownJob("gpt-oss-20b", "dgx-b200", 8, 256),
    KnownJob("llama3-70b", "dgx-h100", 64, 256),
    KnownJob("llama3-70b", "gb200-nvl72", 64, 256),
    KnownJob("gpt3-175b", "dgx-a100", 512, 1536),
    KnownJob("deepseek-v3", "dgx-h100", 1024, 8192),
)


@dataclass
class Reasons:
    """Reasons for refusals, numbered in the order in which they come up."""

    texts: list[str] = field(default_factory=list)

    def number(self, text: str) -> int:
        """The number of a reason, from 1."""
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


@cache
def model_of(name: str) -> Graph:
    """The bundled model."""
    return planner.load_graph(name)


@cache
def planned(job: KnownJob, *backends: str) -> Plan:
    """The job's plan for some frameworks; for the usual ones without any."""
    cluster = planner.load_cluster(job.cluster, devices=job.devices)
    return planner.plan(model_of(job.model), cluster, planner.Job(job.global_batch, backends=backends))


def shape(plan: Plan) -> str:
    """Stages, replicas, ranks of a group, ZeRO stage and recomputation, in words."""
    stage = plan.stages[0]
    ranks = f" of {stage.group_ranks}" if stage.group_ranks > 1 else ""
    repeats = ", recompute" if stage.recompute else f", recompute {'+'.join(stage.repeats)}" if stage.repeats else ""
    stages = planner.units.plural(len(plan.stages), "stage")
    return f"{stages}, {len(stage.replicas)} replicas{ranks}, ZeRO-{stage.zero}{repeats}"


def cell(job: KnownJob, name: str, free_s: float, reasons: Reasons) -> str:
    """Iteration of the plan for a framework over that of the free choice; numbers of reasons where it is refused."""
    words = export.planned_for(planned(job), name) or export.EXPORTERS.get(name).plan_for or name
    try:
        plan = planned(job, words.partition(" ")[0])
    except ShardplanError as error:
        return f"({reasons.number(error.problem.message)})"
    ratio = f"{plan.predictions.iteration_s / free_s:.3f}"
    gaps = export.lacking(plan, name, model_of(job.model))
    numbers = ", ".join(str(reasons.number(gap.need)) for gap in gaps)
    return f"{ratio} ({numbers})" if gaps else ratio


def table(jobs: Sequence[KnownJob] = JOBS) -> Iterator[str]:
    """The rows of the table, and its reasons."""
    reasons, names = Reasons(), [name for name in export.names() if name != "onnx"]
    yield f"| job | `--for any` | default plan | it is taken by | {' | '.join(names)} |"
    yield "|---|---|---|---|" + "---|" * len(names)
    for job in jobs:
        free_s, default = planned(job, "any").predictions.iteration_s, planned(job)
        taken = [name for name in export.names() if not export.lacking(default, name, model_of(job.model))]
        cells = [cell(job, name, free_s, reasons) for name in names]
        slower = f"{default.predictions.iteration_s / free_s:.3f}"
        row = (job.title, planner.units.format_seconds(free_s), f"{shape(default)}: {slower}", ", ".join(taken) or "-")
        yield f"| {' | '.join((*row, *cells))} |"
        print(job.title, file=sys.stderr, flush=True)
    yield ""
    yield from (f"({number}) {text}  " for number, text in enumerate(reasons.texts, 1))


def main() -> None:
    """Print the table, or write it into the page."""
    text = "\n".join(table()) + "\n"
    if "--write" in sys.argv[1:]:
        PAGE.write_text(
            PART.sub(lambda part: part[1] + text + part[3], PAGE.read_text(encoding="utf-8")), encoding="utf-8"
        )
    else:
        print(text)


if __name__ == "__main__":
    main()

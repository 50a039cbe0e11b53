"""Default plans of well-known jobs, and which frameworks they can be written for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import planner
from planner import export

JOBS = (
    ("gpt2", 1, 64), ("gpt2-xl", 1, 64), ("bert-large", 1, 256), ("resnet50", 1, 512), ("llama3.2-1b", 1, 64),
    ("llama3-8b", 1, 64), ("mistral-7b", 1, 64), ("qwen3-8b", 1, 64), ("llama2-13b", 1, 64), ("mixtral-8x7b", 4, 256),
)  # fmt: skip
"""Model, nodes of 8 H100, samples of an iteration."""


@cache
def default_plan(model: str, nodes: int, global_batch: int) -> tuple[planner.Graph, planner.Plan]:
    graph = planner.load_graph(model)
    cluster = planner.load_cluster("dgx-h100", nodes=nodes)
    return graph, planner.plan(graph, cluster, planner.Job(global_batch))


def table() -> Iterator[str]:
    """The page's table: a row for each job and framework."""
    yield "| job | default plan | takes it | refuses it |"
    yield "|---|---|---|---|"
    for model, nodes, global_batch in JOBS:
        graph, plan = default_plan(model, nodes, global_batch)
        lacks = {name: export.lacking(plan, name, graph) for name in export.names()}
        takes = ", ".join(name for name, reasons in lacks.items() if not reasons)
        refuses = "; ".join(
            f"{name}: {', '.join(r.need for r in reasons)}" for name, reasons in lacks.items() if reasons
        )
        stage = plan.stages[0]
        ranks = f" of {stage.group_ranks} ranks" if stage.group_ranks > 1 else ""
        repeats = (
            ", recompute" if stage.recompute else f", recompute {'+'.join(stage.repeats)}" if stage.repeats else ""
        )
        stages = planner.units.plural(len(plan.stages), "stage")
        shape = f"{stages}, {len(stage.replicas)} replicas{ranks}, ZeRO-{stage.zero}"
        yield f"| {model}, {8 * nodes} GPUs, batch {global_batch} | {shape}{repeats} | {takes or 'none'} | {refuses} |"

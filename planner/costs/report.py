"""A profile summed up for people: totals, layers, operators, coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner.costs.types import Profile
from planner.graph import Graph, Note
from planner.graph.blocks import layers_along
from planner.operators.saved import unique_bytes
from planner.operators.types import Origin

FORMAT = "shardplan-profile/1"


@dataclass(frozen=True, slots=True)
class CostGroup:
    """Some nodes of a profile added up.

    Attributes:
        name: layer or operator.
        count: how many alike groups the row stands for; all figures are of one of them.
        nodes: number of nodes.
        parameters: weight elements, each counted once.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        forward_flops: matrix and convolution work.
        backward_flops: the same, backward.
        saved_bytes: bytes kept for backward, each storage once.
        fallback_nodes: nodes priced without a rule.
    """

    name: str
    count: int
    nodes: int
    parameters: int
    forward_s: float
    backward_s: float
    forward_flops: float
    backward_flops: float
    saved_bytes: int
    fallback_nodes: int

    @property
    def total_s(self) -> float:
        """Seconds of all groups of the row, both passes."""
        return self.count * (self.forward_s + self.backward_s)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How the operators of the model file were treated.

    Attributes:
        total: operators in the file.
        by_rule: priced by the rule of their type.
        by_fallback: priced by a generic estimate.
        plumbing: shape arithmetic and the like, not priced and not in any stage.
        folded: computed once from constants, weights or other operators.
        dead: results that nobody reads.
        fallback_ops: number of fallback operators by type.
    """

    total: int
    by_rule: int
    by_fallback: int
    plumbing: int
    folded: int
    dead: int
    fallback_ops: dict[str, int]


@dataclass(frozen=True, slots=True)
class CostReport:
    """A profile summed up.

    Attributes:
        model: name of the model.
        device: device or machine.
        precision: training precision.
        source: where the prices come from.
        micro_batch: samples per execution.
        whole: all nodes together.
        layers: costliest first, neighbours that cost the same in one row.
        operators: by operator type, costliest first.
        coverage: what became of the file's nodes.
        notes: the importer's and the pricing's.
    """

    model: str
    device: str
    precision: str
    source: str
    micro_batch: int
    whole: CostGroup
    layers: tuple[CostGroup, ...]
    operators: tuple[CostGroup, ...]
    coverage: Coverage
    notes: tuple[Note, ...]

    @property
    def flop_per_s(self) -> float:
        """Matrix work of both passes over their time."""
        work = self.whole.forward_flops + self.whole.backward_flops
        return work / self.whole.total_s if self.whole.total_s else 0.0

    def document(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        content, covered = asdict(self), self.coverage
        content["coverage"] = {
            "total": covered.total, "rule": covered.by_rule, "fallback": covered.fallback_ops,
            "plumbing": covered.plumbing, "folded": covered.folded, "dead": covered.dead,
        }  # fmt: skip
        content["notes"] = [{k: str(v) for k, v in asdict(n).items()} for n in self.notes]
        return {"format": FORMAT, **content, "flop_per_s": self.flop_per_s}


def cost_report(graph: Graph, profile: Profile) -> CostReport:
    """Sum a profile up. O(nodes)."""
    nodes, layers, operators = range(len(graph.nodes)), dict[str, list[int]](), dict[str, list[int]]()
    for i, layer in enumerate(layers_along(graph, nodes)):
        layers.setdefault(layer or "(no module)", []).append(i)
        operators.setdefault(graph.nodes[i].op, []).append(i)
    rows = _merged([_group(graph, profile, name, members) for name, members in layers.items()])
    by_operator = [_group(graph, profile, name, members) for name, members in operators.items()]
    return CostReport(
        model=graph.name,
        device=profile.device,
        precision=profile.precision,
        source=profile.source,
        micro_batch=profile.micro_batch,
        whole=_group(graph, profile, graph.name, nodes),
        layers=tuple(sorted(rows, key=lambda g: -g.total_s)),
        operators=tuple(sorted(by_operator, key=lambda g: (-g.total_s, g.name))),
        coverage=coverage(graph, profile.origin),
        notes=(*graph.report.notes, *profile.notes),
    )


def _group(graph: Graph, profile: Profile, name: str, members: Iterable[int]) -> CostGroup:
    index = np.fromiter(members, dtype=np.int64)
    weights = {p for i in index for p in graph.node_parameters[i]}
    return CostGroup(
        name=name,
        count=1,
        nodes=len(index),
        parameters=sum(int(graph.parameters[p].elements) for p in weights if graph.parameters[p].trainable),
        forward_s=float(profile.forward_s[index].sum()),
        backward_s=float(profile.backward_s[index].sum()),
        forward_flops=float(profile.forward_flops[index].sum()),
        backward_flops=float(profile.backward_flops[index].sum()),
        saved_bytes=unique_bytes(profile.saved[i] for i in index),
        fallback_nodes=sum(profile.origin[i] is Origin.FALLBACK for i in index),
    )


def _merged(groups: Sequence[CostGroup]) -> list[CostGroup]:
    """Neighbouring layers that cost the same become one row, named from the first to the last."""
    runs: list[list[CostGroup]] = []
    for group in groups:
        if runs and _figures(runs[-1][0]) == _figures(group) and "." in group.name:
            runs[-1].append(group)
        else:
            runs.append([group])
    return [_run(run) for run in runs]


def _figures(group: CostGroup) -> tuple[object, ...]:
    seconds = (f"{group.forward_s:.9e}", f"{group.backward_s:.9e}")
    return (group.nodes, group.parameters, group.forward_flops, group.saved_bytes, *seconds)


def _run(run: Sequence[CostGroup]) -> CostGroup:
    first = run[0]
    if len(run) == 1:
        return first
    fields = asdict(first) | {"name": f"{first.name} .. {run[-1].name.rpartition('.')[2]}", "count": len(run)}
    return CostGroup(**fields)


def coverage(graph: Graph, origins: Sequence[Origin]) -> Coverage:
    """Counts of the model file's operators by treatment; `origins` is aligned with the graph's nodes."""
    counts = Counter(origins)
    fallbacks = Counter(n.op for n, origin in zip(graph.nodes, origins, strict=True) if origin is Origin.FALLBACK)
    report = graph.report
    return Coverage(
        total=report.total_nodes,
        by_rule=counts[Origin.RULE] + report.merged_nodes,
        by_fallback=counts[Origin.FALLBACK],
        plumbing=report.plumbing_nodes + counts[Origin.PLUMBING],
        folded=report.folded_nodes,
        dead=report.dead_nodes,
        fallback_ops=dict(sorted(fallbacks.items())),
    )

"""Prices that came with the graph: a profile measured elsewhere, read by an importer."""

from __future__ import annotations

import numpy as np

from planner.costs.types import Profile
from planner.costs.work import tensor_bytes
from planner.errors import UsageError
from planner.graph import Graph, Node, Note, NoteLevel
from planner.operators.batching import rebatch
from planner.operators.saved import element_bytes
from planner.operators.types import Origin, SavedBytes


def is_priced(graph: Graph) -> bool:
    """Whether every node of a graph carries measured seconds of its own."""
    return bool(graph.nodes) and all("forward_s" in n.attributes and "backward_s" in n.attributes for n in graph.nodes)


def imported_profile(graph: Graph, *, micro_batch: int | None = None) -> Profile:
    """The profile that a graph carries.

    Every node keeps its results for backward; in-place operators, views and picked results share their operand's
    storage. Times and sizes grow with the micro-batch in proportion to the batch they were measured at, which the nodes
    say too (`measured_batch`), so that a graph set to another batch keeps its prices a sample.

    Args:
        graph: a graph whose nodes have `forward_s` and `backward_s` among their attributes.
        micro_batch: samples per execution; by default those of the measurement.

    Raises:
        UsageError: the graph carries no prices.
        ModelError: sizes cannot follow another micro-batch.
    """
    if not is_priced(graph):
        raise UsageError("the model carries no measured times", hint="price it with --device or --measure")
    sized = graph if micro_batch is None else rebatch(graph, micro_batch)
    measured = _number(graph.nodes[0], "measured_batch") or float(graph.batch)
    scale = sized.batch / measured
    sizes = element_bytes(sized, 4.0)
    outputs, workspace = tensor_bytes(sized, sizes)
    forward = np.array([_number(node, "forward_s") for node in graph.nodes]) * scale
    backward = np.array([_number(node, "backward_s") for node in graph.nodes]) * scale
    note = Note(
        NoteLevel.INFO,
        "imported-profile",
        f"times were measured in fp32 by the profile's authors on their device, for batches of {measured:g}",
    )
    zeros = np.zeros(len(sized.nodes))
    return Profile(
        device=f"as measured ({graph.report.format})",
        precision="fp32",
        micro_batch=sized.batch,
        source=graph.report.format,
        forward_s=forward,
        backward_s=backward,
        weight_grad_s=np.array([0.5 * b if w else 0.0 for b, w in zip(backward, sized.node_parameters, strict=True)]),
        forward_flops=zeros,
        backward_flops=zeros.copy(),
        moved_bytes=zeros.copy(),
        output_bytes=outputs,
        workspace_bytes=workspace,
        origin=(Origin.RULE,) * len(sized.nodes),
        saved=_saved(sized),
        notes=(note,),
    )


def _number(node: Node, name: str) -> float:
    value = node.attributes.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _saved(graph: Graph) -> tuple[tuple[SavedBytes, ...], ...]:
    roots: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        shared = bool(node.attributes.get("view")) and bool(node.inputs)
        for output in node.outputs:
            roots[output] = roots.get(node.inputs[0], node.inputs[0]) if shared else output
        names = dict.fromkeys(roots[o] for o in node.outputs)
        owned = (graph.tensors[n] for n in names if n in graph.producer)
        kept.append(tuple(SavedBytes(t.name, t.byte_count) for t in owned if t.byte_count))
    return tuple(kept)

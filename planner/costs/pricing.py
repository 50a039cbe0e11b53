"""The front door of pricing: a graph and a device to seconds, bytes and kept activations of every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.costs.imported import by_own_costs, imported_profile, is_priced
from planner.costs.precision import narrow_products, supported_precision
from planner.costs.rates import unaligned_products
from planner.costs.roofline import Roofline
from planner.costs.types import Profile
from planner.costs.work import node_work, tensor_bytes
from planner.errors import ModelError, Problem
from planner.graph import Graph
from planner.hardware.types import Device
from planner.operators.batching import rebatch
from planner.operators.saved import (
    SavedOptions,
    element_bytes,
    saved_for_backward,
    saved_notes,
    storages_in_training,
)
from planner.operators.specs import by_class, graph_specs
from planner.operators.types import OpSpec, Origin


def profile(
    graph: Graph,
    device: Device,
    *,
    precision: str = "",
    micro_batch: int | None = None,
    fused_attention: bool = True,
    dropout: bool = True,
    assume_dropout: bool = False,
    loss: bool = True,
    strict_ops: bool = False,
) -> Profile:
    """Price every node of a graph on a device by the roofline.

    A graph that carries measured times of its own (`imported_profile`) is priced by those, whatever the device; one
    that was given costs from a file (`with_costs`) takes its seconds from there.

    Args:
        graph: the graph.
        device: the device.
        precision: name of the training precision; the model's own floating-point type is computed in it. By default
            the best one that the device computes in.
        micro_batch: samples per execution; by default the batch that the graph's shapes are for.
        fused_attention: attention runs as one kernel without a score matrix in memory.
        dropout: dropout nodes draw and keep masks.
        assume_dropout: put dropout masks where transformers have them when the graph has no dropout nodes.
        loss: a graph that ends at logits is followed by a cross-entropy loss; its time and what it keeps are added.
        strict_ops: refuse operators that no rule describes.

    Returns:
        A profile whose arrays are aligned with `graph.nodes`. O(nodes); equal operator calls are described once.

    Raises:
        ModelError: a node stops the change of batch, or `strict_ops` meets an operator without a rule.
        HardwareError: the device has no matrix peak for a type that the model has beside its own floating-point type.
        JobError: the device does not compute in the precision's format.
        UsageError: no precision has that name.
    """
    if is_priced(graph):
        return imported_profile(graph, micro_batch=micro_batch)
    chosen = supported_precision(precision, device)
    sized = graph if micro_batch is None else rebatch(graph, micro_batch)
    specs = graph_specs(sized)
    if strict_ops:
        refuse_fallbacks(sized, specs)
    options = SavedOptions(
        fused_attention=fused_attention,
        dropout=dropout,
        assume_dropout=assume_dropout,
        loss=loss,
        loss_bytes=chosen.loss_bytes,
        fused=device.stack.fused,
    )
    sizes = element_bytes(sized, chosen.compute.bits / 8)
    narrow = narrow_products(sized, specs, chosen)
    storages = storages_in_training(sized, specs, options)
    work = node_work(
        sized,
        specs,
        sizes,
        chosen,
        narrow=narrow,
        fused=fused_attention,
        storages=storages,
        device=device,
        loss_bytes=options.loss_bytes if loss else 0.0,
    )
    times = Roofline(sized, work, device)
    outputs, workspace = tensor_bytes(sized, sizes, work.scores)
    priced = Profile(
        device=device.name,
        precision=chosen.name,
        micro_batch=sized.batch,
        source="roofline",
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_grad_s=times.weight_grad_s,
        forward_flops=np.array(by_class(sized, lambda i: specs[i].matrix_flops)),
        backward_flops=np.array(
            by_class(sized, lambda i: specs[i].input_grad_matrix_flops + specs[i].weight_grad_matrix_flops)
        ),
        moved_bytes=work.bytes.copy(),
        output_bytes=outputs,
        workspace_bytes=workspace,
        origin=tuple(s.origin for s in specs),
        saved=saved_for_backward(
            sized,
            specs,
            width=sizes,
            options=options,
            storages=storages,
            narrow=narrow.kept_bytes if narrow else None,
        ),
        formats=tuple(work.formats.tolist()),
        notes=(*times.notes, *((narrow.note(chosen),) if narrow else ()), *saved_notes(sized, options)),
        executed=times.executed,
        by_share=times.at,
    )
    return by_own_costs(sized, priced)


def alignment_advice(graph: Graph, device: Device, *, precision: str, fused_attention: bool) -> str:
    """What rows that are no multiple of 16 bytes cost, and which lengths near theirs would not; "" for no such rows.

    Products of two computed matrices have such rows where a head has 150 elements, say. Time is all work, as priced
    with and without them.
    """
    width = supported_precision(precision, device).compute.bits / 8
    lengths = unaligned_products(graph, graph_specs(graph), element_bytes(graph, width), fused=fused_attention)
    if not lengths or device.stack.unaligned_rate == 1.0:
        return ""
    aligned = replace(device, stack=replace(device.stack, unaligned_rate=1.0))
    now_s, then_s = (
        float((priced.forward_s + priced.backward_s).sum())
        for priced in (
            profile(graph, each, precision=precision, fused_attention=fused_attention) for each in (device, aligned)
        )
    )
    length, step = Counter(lengths.values()).most_common(1)[0][0], round(16 / width)
    below, above = length // step * step, -(-length // step) * step
    sizes = f"{below} or {above}" if below else f"{above}"
    return (
        f"{len(lengths)} products of activations have rows of {length} elements (a head's size, say), no multiple of "
        f"{step}: {sizes} would save {1 - then_s / now_s:.0%} of the work"
    )


def refuse_fallbacks(graph: Graph, specs: Sequence[OpSpec]) -> None:
    """Raise when an operator was priced without a rule.

    Raises:
        ModelError: one problem an operator type, with how often it occurs and where first.
    """
    unknown = [
        (node, i) for i, (node, s) in enumerate(zip(graph.nodes, specs, strict=True)) if s.origin is Origin.FALLBACK
    ]
    if not unknown:
        return
    counts = Counter(node.op for node, _ in unknown)
    first = {node.op: node.name or node.key for node, _ in reversed(unknown)}
    problems = tuple(
        Problem(f"no rule prices the operator {op} ({count} nodes)", first[op], "leave out --strict-ops to estimate it")
        for op, count in sorted(counts.items())
    )
    raise ModelError(problems[0].message, where=problems[0].where, hint=problems[0].hint, problems=problems)

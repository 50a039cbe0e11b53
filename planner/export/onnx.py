"""ONNX: the model itself with the multi-device annotations of IR version 11.

`ModelProto.configuration` names the devices of one replica, `NodeProto.device_configurations` gives each operator its
pipeline stage and the layouts in which it reads and writes (`docs/proposals/0006-ONNXMultiDeviceProposal.md` and
`0007-ShardingFormalism.md` of onnx). The annotations speak of one forward pass and change nothing in the graph;
communication follows from them. For a partial sum they give the layout after the reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from planner.documents import pretty
from planner.errors import PlanError
from planner.escaping import prose_name
from planner.export import Export, Exporter, Gap, register
from planner.graph import Graph, Node
from planner.importers.onnx_graph.read import inlined
from planner.plans import Plan, Requirement
from planner.plans.shardings import OperatorSplit
from planner.schedules import names as schedule_names
from planner.sharding.layout import TensorLayout, parse_layout
from planner.systems.backends import BACKENDS
from planner.units import plural

if TYPE_CHECKING:
    import onnx

NAME = "plan"
"""Name of the configuration in the model."""

IR_VERSION = 11
"""First IR version with multi-device annotations."""

ONNX = dataclasses.replace(
    BACKENDS.get("jax"),
    key="onnx",
    title="ONNX",
    can=frozenset(Requirement) - {Requirement.ASYNC_WEIGHTS, Requirement.SEPARATE_COPIES},
    schedules=schedule_names(),
    structure=dataclasses.replace(BACKENDS.get("jax").structure, alike=False),
    offloads=(),
)
"""What the annotations can say: any stages, any layouts; one pipeline, of which replicas are copies."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OperatorPlacement:
    """Stage and devices of an operator.

    Attributes:
        stage: the first stage that computes the operator.
        devices: for each stage that computes it, the devices of its group, as numbered in the configuration.
        sizes: ranks along each mesh axis of a group.
        split: how the group divides the operator; None where all ranks do the same.
        rests: layouts of its results between operators, by tensor, as the plan writes them.
    """

    stage: int
    devices: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    split: OperatorSplit | None
    rests: Mapping[str, str]


def _missing_features(plan: Plan) -> Iterator[Gap]:
    unlike = [
        operator.operator
        for sharding in plan.shardings
        for entry in sharding.blocks
        for operator in entry.operators
        for text in (*operator.reads, *operator.writes)
        if text and _cut_unlike(parse_layout(text, len(sharding.axes)))
    ]
    if unlike:
        yield Gap(f"a dimension cut in unlike blocks along two axes ({unlike[0]})", "`shardplan plan --tp 1`")


def _cut_unlike(layout: TensorLayout) -> bool:
    """Whether two axes shard the same dimension in different numbers of blocks."""
    blocks = {(part.dim, part.blocks) for part in layout if part.cuts}
    return len({dim for dim, _ in blocks}) < len(blocks)


def _ranks(plan: Plan, replica: int) -> tuple[int, ...]:
    """Ranks of one replica of all stages; device k of the configuration is rank k of these."""
    return tuple(dict.fromkeys(rank for stage in plan.stages for rank in stage.replicas[replica]))


def _places(plan: Plan, graph: Graph) -> Mapping[str, _OperatorPlacement]:
    """Stage and devices of each operator of the plan, by its first result."""
    numbers = {rank: device for device, rank in enumerate(_ranks(plan, 0))}
    results = {node.key: node.outputs for node in graph.nodes}
    placements: dict[str, _OperatorPlacement] = {}
    for stage in plan.stages:
        group = tuple(numbers[rank] for rank in stage.replicas[0])
        sharding = plan.sharding_of(stage.index)
        splits, rests = dict[str, OperatorSplit](), dict[str, str]()
        for _, entry, own_names in plan.sharded_blocks(stage.index):
            splits |= {own_names[o.operator]: o for o in entry.operators}
            rests |= {own_names[place.tensor]: place.value for place in entry.tensors}
        sizes = sharding.sizes if sharding else ()
        for name in plan.stage_nodes(stage.index):
            result_layouts = {tensor: rests[tensor] for tensor in results.get(name, ()) if tensor in rests}
            place = placements.setdefault(
                name, _OperatorPlacement(stage.index, (), sizes, splits.get(name), result_layouts)
            )
            placements[name] = dataclasses.replace(place, devices=(*place.devices, group))
    return placements


def annotate(plan: Plan, graph: Graph, model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model with the plan's devices, stages and layouts.

    Operators that the plan does not name (shapes, parts of one that importers read as one) get the stage of the first
    operator that reads them.

    Args:
        plan: the plan.
        graph: the model as it was planned.
        model: the model as ONNX; functions are inlined.

    Raises:
        PlanError: an operator of the plan is not in the model.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(inlined(model))
    copy.ir_version = max(copy.ir_version, IR_VERSION)
    ranks = _ranks(plan, 0)
    copy.configuration.add(name=NAME, num_devices=len(ranks), device=[f"rank {rank}" for rank in ranks])
    places, planned = _places(plan, graph), {node.key: node for node in graph.nodes}
    nodes = {next((name for name in node.output if name), ""): node for node in copy.graph.node}
    lost = [name for name in places if name not in nodes]
    if lost:
        raise PlanError(f"the model has no operator {lost[0]!r}", where="--model", hint="give the plan's ONNX file")
    makers: dict[str, int | None] = {tensor: None for node in copy.graph.node for tensor in node.output}
    makers |= {tensor: place.stage for name, place in places.items() for tensor in nodes[name].output}
    for name, place in places.items():
        written = nodes[name].device_configurations.add(configuration_id=NAME, pipeline_stage=place.stage)
        for tensor, layout in _layouts(place, planned[name], nodes[name], makers):
            _write_spec(written.sharding_spec.add(tensor_name=tensor), place, layout)
    stages = {tensor: place.stage for name, place in places.items() for tensor in nodes[name].input}
    for node in reversed(copy.graph.node):
        if not node.device_configurations:
            readers = [stages[tensor] for tensor in node.output if tensor in stages]
            if readers:
                node.device_configurations.add(configuration_id=NAME, pipeline_stage=min(readers))
        for entry in node.device_configurations:
            stages |= {name: min(entry.pipeline_stage, stages.get(name, entry.pipeline_stage)) for name in node.input}
    return copy


def _layouts(
    place: _OperatorPlacement, planned: Node, node: onnx.NodeProto, makers: Mapping[str, int | None]
) -> Iterator[tuple[str, TensorLayout]]:
    """Tensors that an operator reads and writes, with their layouts on the devices of its group.

    Tensors without a layout in the plan that come from the same stage, or from operators that the plan does not name,
    are left out: they keep the layout in which they are made.

    Args:
        place: where the operator runs.
        planned: the operator in the plan's graph.
        node: the operator in the ONNX model.
        makers: by tensor, the stage that makes it; None where the plan does not name its operator.
    """
    whole = parse_layout("R" * len(place.sizes), len(place.sizes))
    alike = len(planned.inputs) == len(node.input)
    names = tuple(node.input) if alike else planned.inputs
    reads = dict(zip(names, place.split.reads if place.split else (), strict=False))
    for tensor in dict.fromkeys(name for name in node.input if name):
        text = reads.get(tensor, "")
        if "P" not in text and (text or makers.get(tensor, -1) not in (None, place.stage)):
            yield tensor, parse_layout(text, len(place.sizes)) if text else whole
    writes = dict(zip(planned.outputs, place.split.writes if place.split else (), strict=False))
    for tensor in (name for name in node.output if name):
        text = writes.get(tensor, "")
        text = place.rests.get(tensor, "") if "P" in text else text
        if "P" not in text:
            yield tensor, parse_layout(text, len(place.sizes)) if text else whole


def _write_spec(spec: onnx.ShardingSpecProto, place: _OperatorPlacement, layout: TensorLayout) -> None:
    """Write the pieces of a tensor in order, each with the device or the set of devices that hold it."""
    cut = sorted({part.dim for part in layout if part.cuts})
    order = [axis for dim in cut for axis, part in enumerate(layout) if part.dim == dim]
    whole = [axis for axis, part in enumerate(layout) if not part.cuts]
    pieces = int(np.prod([place.sizes[axis] for axis in order], dtype=np.int64))
    groups = np.array(place.devices).reshape(len(place.devices), *place.sizes)
    axes = [0, *(axis + 1 for axis in (*order, *whole))]
    holders = np.moveaxis(groups.transpose(axes).reshape(len(place.devices), pieces, -1), 0, 1).reshape(pieces, -1)
    for number, devices in enumerate(holders.tolist(), 1):
        if len(devices) > 1:
            spec.index_to_device_group_map.add(key=-number, value=devices)
        spec.device.append(-number if len(devices) > 1 else devices[0])
    for dim in cut:
        written = spec.sharded_dim.add(axis=dim)
        blocks = next(part.blocks for part in layout if part.dim == dim)
        if blocks > 1:
            written.simple_sharding.add(dim_value=blocks, num_shards=1)
        shards = int(np.prod([place.sizes[axis] for axis in order if layout[axis].dim == dim], dtype=np.int64))
        written.simple_sharding.add(num_shards=shards)


def _write(plan: Plan) -> Export:
    replicas, batches = len(plan.stages[0].replicas), plan.micro_batches
    files, left_out = dict[str, str](), list(_left_out(plan))
    if replicas > 1:
        document = {f"replica {number}": list(_ranks(plan, number)) for number in range(replicas)}
        files["replicas.json"] = pretty(document) + "\n"
        left_out.append(
            "Replicas beyond the first: the same on other ranks, `replicas.json` has them by device number."
        )
    mapped = {
        plural(len(plan.stages), "stage"): "`pipeline_stage` of each operator",
        "ranks of one replica": f"`configuration` {NAME}: {plural(len(_ranks(plan, 0)), 'device')}",
        "layouts of tensors and weights": "`sharding_spec` of each operator that reads or writes them",
        f"{batches.count} micro-batches of {plural(batches.size, 'sample')}": "the samples of one pass",
    }
    return Export(files, mapped, tuple(left_out))


def _left_out(plan: Plan) -> Iterator[str]:
    order = prose_name(plan.schedule.name)
    yield f"The order of work ({order}), micro-batches and recomputation: annotations are of one pass."
    yield f"Training: the backward pass, gradients, ZeRO-{plan.configuration.zero}, the optimizer and the precision."
    yield "Weights in files beside the model: their names stay, so put `model.onnx` beside them."
    if plan.duplicated:
        yield "Operators of several stages: `pipeline_stage` has room for one; their results lie on the devices of all."


register(
    Exporter(
        backend=ONNX,
        plan_for="jax",
        missing=_missing_features,
        write=_write,
        start="`model.onnx` is the model with annotations of IR version 11; a runtime that knows none ignores them.",
        files_of_model=lambda plan, graph, model: {"model.onnx": annotate(plan, graph, model).SerializeToString()},
    )
)

"""Sections of a plan, each computed from one source: the model, the cluster, the evaluation, operators in stages.

`Staging` computes what follows from the assignment of operators to stages: tensors between stages, inputs, outputs. The
assembly of a plan and its check use the same functions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.costs.errors import JobClass, MeasuredError, measured_error
from planner.costs.precision import Precision
from planner.errors import ModelError
from planner.graph import Graph, SourceFile, Tensor, layer_of, per_model
from planner.hardware.types import Cluster
from planner.operators import batch_constants, needs_gradient, rule_of
from planner.plans import figures
from planner.plans.model import (
    BlockParameter,
    Loss,
    ModelSection,
    RebatchedOperand,
    RebatchedTensor,
    SeparatedWeight,
    TensorSpec,
)
from planner.plans.records import Boundary, DeviceRun, HardwareSection, LinkLevel, MicroBatches, SharedParameter
from planner.plans.words import significant, summary
from planner.space.blocks import loss_outputs
from planner.space.steps import ExposedSeconds, StepView, fullest_of
from planner.space.types import Candidate, Certificate, Configuration, Evaluation, StageTerms


def model_section(graph: Graph, chosen: Precision) -> ModelSection:
    """The section of the model, at the graph's batch, in the number formats `chosen`."""
    losses = loss_outputs(graph)
    section = ModelSection(
        name=graph.name,
        fingerprint=graph.fingerprint,
        opset=graph.opset,
        inputs=tensor_specs(graph, graph.inputs, chosen),
        outputs=tensor_specs(graph, graph.outputs, chosen),
        loss=Loss.IN_GRAPH if losses else Loss.AT_OUTPUTS,
        loss_output=losses[0] if losses and losses[0] != graph.outputs[0] else "",
        operators=len(graph.nodes),
        parameters=graph.parameter_count(),
        separated=_separated(graph),
    )
    return section if graph.source is None else _of_file(section, graph, graph.source)


def _separated(graph: Graph) -> tuple[SeparatedWeight, ...]:
    """Weights of their own that the file stores as one with others, with the operators that read them at a place."""
    readers: dict[tuple[str, str, int], list[str]] = {}
    for read in graph.separated:
        readers.setdefault((read.weight, read.stored, read.operand), []).append(read.operator)
    return tuple(
        SeparatedWeight(weight, stored, tuple(names), operand) for (weight, stored, operand), names in readers.items()
    )


def _of_file(section: ModelSection, graph: Graph, source: SourceFile) -> ModelSection:
    """The section with the model file's hash and the constants to change in it for the graph's batch.

    It says nothing of a file that is gone since it was read.
    """
    if not source.sha256:
        return section
    section = dataclasses.replace(section, file_sha256=source.sha256, identities=graph.identities)
    written = source.written
    shapes = {name: written.tensors[name].shape for name in written.inputs}
    open_sizes = {shape[0] for name, shape in shapes.items() if shape and 0 in source.open_sizes.get(name, ())}
    if written.batch in (0, *open_sizes):
        return section
    change = batch_constants(written, graph.batch)
    readers: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for (name, operand), values in change.operands.items():
        readers.setdefault((operand, values), []).append(name)
    sizes = {name: list(written.tensors[name].shape) for name in change.samples}
    for name, dims in change.samples.items():
        for d, size in dims.items():
            sizes[name][d] = size
    return dataclasses.replace(
        section,
        exported_batch=written.batch,
        rebatch=tuple(RebatchedOperand(tuple(names), operand, v) for (operand, v), names in readers.items()),
        rebatched_tensors=tuple(RebatchedTensor(name, tuple(shape)) for name, shape in sizes.items()),
    )


def hardware_section(cluster: Cluster) -> HardwareSection:
    """The section of the cluster."""
    runs: list[DeviceRun] = []
    types = [int(t) for t in cluster.device_types]
    for kind, group in itertools.groupby(range(len(types)), key=types.__getitem__):
        ranks = list(group)
        device = cluster.devices[kind]
        sizes = device.memory_bytes, device.reserve_bytes, device.neighbour_bytes
        runs.append(DeviceRun(device.name, ranks[0], len(ranks), *map(int, sizes)))
    levels = tuple(
        LinkLevel(v.name, v.size, float(v.byte_per_s), float(v.device_byte_per_s), float(v.latency_s))
        for v in cluster.levels
    )
    headroom = float(max(device.headroom for device in cluster.devices))
    innermost = levels[0].size if levels else 1
    node_size = cluster.node_size if (cluster.node_size or 1) != innermost else 0
    return HardwareSection(
        cluster.name,
        cluster.fingerprint,
        cluster.device_count,
        tuple(runs),
        levels,
        cluster.stack.name,
        headroom,
        node_size or 0,
        cluster.device_order,
    )


def micro_batches_section(decision: Configuration) -> MicroBatches:
    """How the global batch is divided."""
    count = decision.micro_batches * decision.copies
    return MicroBatches(decision.micro_batch, count, decision.micro_batch * count, "mean", 1.0 / count)


def job_class(cluster: Cluster, decision: Configuration) -> JobClass:
    """The class of jobs, with measured errors of its own, that a configuration belongs to."""
    return JobClass.of(
        cluster.stack.name,
        cluster.devices[0].name,
        ranks=max(stage.ranks for stage in decision.stages),
        zero=decision.zero,
        stages=len(decision.stages),
        schedule=decision.schedule,
    )


def compared_error(cluster: Cluster, decision: Configuration) -> MeasuredError | None:
    """Measured error of predictions for jobs of the configuration's class, to three digits; None without a stack."""
    if not cluster.stack.name:
        return None
    error = measured_error(job_class(cluster, decision), cluster.stack.compared)
    low, high = (None if bound is None else float(f"{bound:.3g}") for bound in (error.low, error.high))
    return dataclasses.replace(error, low=low, high=high)


def predictions_section(
    decision: Configuration,
    evaluation: Evaluation,
    certificate: Certificate,
    collectives: Sequence[tuple[figures.StageCollective, ...]],
    *,
    step: StepView,
    split: bool,
    error: MeasuredError | None,
) -> figures.Predictions:
    """The section of predictions: times and memory by stage, bound and gap.

    Args:
        decision: the configuration.
        evaluation: its times and memory.
        certificate: bound and gap.
        collectives: by stage, what its ranks run once an iteration or in every pass.
        step: the step of each worker.
        split: whether input and weight gradients are computed in actions of their own.
        error: how predictions of such jobs compared with measured runs.

    Raises:
        ModelError: an iteration takes no time.
    """
    iteration_s = significant(evaluation.iteration_s)
    if iteration_s <= 0:
        raise ModelError("an iteration takes no time: the model has nothing to compute", hint="check the export")
    count = decision.micro_batches * decision.copies
    return figures.Predictions(
        iteration_s=iteration_s,
        simulated_iteration_s=None,
        samples_per_s=significant(decision.micro_batch * count / iteration_s),
        bubble_fraction=significant(step.bubble),
        bubble_convention=figures.BUBBLE_CONVENTION,
        bottleneck=evaluation.bottleneck,
        bound_s=significant(certificate.bound_s),
        gap=significant(certificate.gap),
        space=certificate.space,
        proven_optimal=certificate.proven_optimal,
        stages=tuple(
            _stage_prediction(terms, own, split=split)
            for terms, own in zip(evaluation.stages, collectives, strict=True)
        ),
        tried_bound_s=None if certificate.tried_bound_s is None else significant(certificate.tried_bound_s),
        line_bound_s=None if certificate.line_bound_s is None else significant(certificate.line_bound_s),
        measured_error=error,
    )


_SECONDS = (
    "forward_s", "backward_s", "recompute_s", "receive_s", "return_s", "sync_s", "exposed_sync_s", "tied_sync_s",
    "update_s", "move_s",
)  # fmt: skip
"""Fields with the same name in `StageTerms` and `StagePrediction`."""


def _stage_prediction(
    terms: StageTerms, collectives: tuple[figures.StageCollective, ...], *, split: bool
) -> figures.StagePrediction:
    halves = split and terms.turning_bytes
    seconds: dict[str, Any] = {name: significant(getattr(terms, name)) for name in _SECONDS}
    kinds = [field.name for field in dataclasses.fields(figures.StageMemory)]
    sizes = {kind: math.ceil(getattr(terms.memory, kind.removesuffix("_bytes"))) for kind in kinds}
    return figures.StagePrediction(
        **seconds,
        in_flight=int(terms.in_flight),
        unit_bytes=math.floor(terms.unit_bytes),
        host_bytes=math.floor(terms.host_bytes),
        memory=figures.StageMemory(**sizes),
        capacity_bytes=math.floor(terms.capacity_bytes),
        collectives=collectives,
        exposed=ExposedSeconds(*map(significant, dataclasses.astuple(terms.exposed))),
        weight_grad_s=significant(terms.weight_grad_s) if split and terms.weight_grad_s is not None else None,
        turning_bytes=math.ceil(terms.turning_bytes) if halves else None,
        waiting_bytes=math.ceil(terms.waiting_bytes) if halves else None,
    )


_OF_CONFIGURATION = ("copies", "micro_batch", "micro_batches", "schedule", "zero")
"""Fields with the same name in `Configuration` and `Alternative`."""


def alternative_section(candidate: Candidate, experts: int = 1) -> figures.Alternative:
    """The section of a decision that was priced and not chosen; `experts` as of `Alternative`."""
    decision, evaluation = candidate.decision, candidate.evaluation
    priced = math.isfinite(evaluation.iteration_s) and evaluation.iteration_s > 0
    return figures.Alternative(
        label=candidate.label,
        summary=summary(decision),
        iteration_s=significant(evaluation.iteration_s) if priced else None,
        memory_bytes=math.ceil(fullest_of(evaluation.workers).memory.total) if evaluation.workers else 0,
        infeasible=tuple(violation.message for violation in evaluation.violations),
        **{name: getattr(decision, name) for name in _OF_CONFIGURATION},
        starts=tuple(stage.start for stage in decision.stages),
        replicas=tuple(stage.replicas for stage in decision.stages),
        recompute=tuple(i for i, stage in enumerate(decision.stages) if stage.recompute),
        ranks=tuple(s.ranks for s in decision.stages) if any(s.ranks > 1 for s in decision.stages) else (),
        simulated_iteration_s=None if candidate.simulated_s is None else significant(candidate.simulated_s),
        repeats=_names_by_stage([stage.repeats for stage in decision.stages]),
        context=decision.stages[0].context,
        expert=decision.stages[0].expert,
        layers=tuple(s.layers for s in decision.stages) if any(s.layers for s in decision.stages) else (),
        offload=_names_by_stage([stage.offload for stage in decision.stages]),
        experts=experts if experts > decision.stages[0].expert else 1,
    )


def _names_by_stage(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Modules of each stage, `layernorm,act`; empty where no stage has any."""
    return tuple(map(",".join, names)) if any(names) else ()


@dataclass(frozen=True)
class Staging:
    """Operators of a graph in stages.

    Attributes:
        graph: the graph at the plan's micro-batch size.
        stage_of: stage by operator index, without duplicated operators.
        copies: stages of each duplicated operator by index.
        chosen: number formats.
    """

    graph: Graph
    stage_of: Mapping[int, int]
    copies: Mapping[int, frozenset[int]]
    chosen: Precision

    @functools.cached_property
    def flows(self) -> frozenset[str]:
        """Tensors through which a gradient flows."""
        return differentiable(self.graph)

    def readers(self, tensor: str) -> tuple[int, ...]:
        """Stages that read a tensor, ascending."""
        stages: set[int] = set()
        for node in self.graph.consumers.get(tensor, ()):
            stages |= {self.stage_of[node]} if node in self.stage_of else self.copies.get(node, frozenset())
        return tuple(sorted(stages))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Tensors that go to another stage than the one that makes them, by stage and in order of production."""
        boundaries = []
        for index, stage in sorted(self.stage_of.items(), key=lambda entry: (entry[1], entry[0])):
            for name in self.graph.nodes[index].outputs:
                targets = tuple(s for s in self.readers(name) if s != stage) if name else ()
                if targets:
                    boundaries.append(self._boundary(name, stage, targets))
        return tuple(boundaries)

    def _boundary(self, name: str, stage: int, targets: tuple[int, ...]) -> Boundary:
        tensor = self.graph.tensors[name]
        dtype = trained_dtype(tensor, self.chosen)
        size = tensor.elements * self.chosen.compute.bits // 8 if tensor.dtype.is_float else tensor.byte_count
        return Boundary(name, stage, targets, tensor.shape, dtype, size, name in self.flows)

    def inputs(self, stage: int) -> tuple[str, ...]:
        """Model inputs that a stage reads, in the model's order."""
        return tuple(name for name in self.graph.inputs if stage in self.readers(name))

    def outputs(self, stage: int) -> tuple[str, ...]:
        """Model outputs that a stage makes; a duplicated operator's belongs to its first stage."""
        return tuple(name for name in self.graph.outputs if self._maker(name) == stage)

    def _maker(self, tensor: str) -> int:
        node = self.graph.producer.get(tensor, -1)
        return self.stage_of.get(node, min(self.copies.get(node, (-1,))))

    def divided_modules(self) -> tuple[str, ...]:
        """Layers whose weighted operators lie in more than one stage."""
        stages: dict[str, set[int]] = {}
        for node, stage in self.stage_of.items():
            module = layer_of(self.graph.nodes[node].module)
            if module and self.graph.node_parameters[node]:
                stages.setdefault(module, set()).add(stage)
        return tuple(module for module, found in stages.items() if len(found) > 1)


def shared_parameters(
    stages: Sequence[Sequence[BlockParameter]], order: Mapping[str, int], chosen: Precision, *, summed: bool
) -> tuple[SharedParameter, ...]:
    """Trained parameters that several stages hold.

    Args:
        stages: by stage, the weights that it reads.
        order: the place of each parameter among those of the model, by name.
        chosen: number formats.
        summed: whether their gradients are summed over the stages: the pipeline drains before an update.
    """
    holders: dict[str, dict[int, None]] = {}
    names: dict[str, dict[str, None]] = {}
    elements: dict[str, int] = {}
    for index, parameters in enumerate(stages):
        for parameter in parameters:
            if parameter.trainable:
                holders.setdefault(parameter.owner, {})[index] = None
                names.setdefault(parameter.owner, {})[parameter.name] = None
                elements[parameter.owner] = parameter.elements

    def place(name: str) -> int:
        return order.get(name, len(order))

    return tuple(
        SharedParameter(
            parameter=owner,
            names=tuple(sorted(names[owner], key=place)),
            stages=tuple(holders[owner]),
            reduction="sum" if summed else "none",
            bytes=round(elements[owner] * chosen.gradient_bytes),
        )
        for owner in sorted(holders, key=place)
        if len(holders[owner]) > 1
    )


@per_model
def parameter_indices(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """By node, indices of the parameters that it reads as the file names them, ties not resolved, each once."""
    index, sources = graph.parameter_index, graph.sources
    return tuple(
        tuple(dict.fromkeys([index[s] for name in node.inputs if name in sources for s in sources[name]]))
        for node in graph.nodes
    )


def block_parameters(graph: Graph, nodes: Iterable[int]) -> tuple[BlockParameter, ...]:
    """Weights that the operators of a block read, each once, in order of first use."""
    sources = parameter_indices(graph)
    used = dict.fromkeys(index for node in nodes for index in sources[node])
    return tuple(
        BlockParameter(
            **{**dataclasses.asdict(p), "dtype": str(p.dtype), "label": "" if p.label == p.name else p.label}
        )
        for p in (graph.parameters[index] for index in used)
    )


def trained_dtype(tensor: Tensor, chosen: Precision) -> str:
    """The type a tensor has in training: floats the compute type, all else as stored."""
    return str(chosen.compute if tensor.dtype.is_float else tensor.dtype)


def tensor_specs(graph: Graph, names: Sequence[str], chosen: Precision) -> tuple[TensorSpec, ...]:
    """Descriptions of the named tensors that the graph knows."""
    known = (graph.tensors[name] for name in names if name in graph.tensors)
    return tuple(TensorSpec(t.name, t.shape, trained_dtype(t, chosen)) for t in known)


def differentiable(graph: Graph) -> frozenset[str]:
    """Names of the tensors through which a gradient flows in training.

    These depend on a trained weight, and the loss depends on them, both through inputs that an operator can
    differentiate. Without a loss in the graph every output counts as one. O(nodes).
    """
    reaches = set(loss_outputs(graph) or graph.outputs)
    for node in reversed(graph.nodes):
        if not reaches.isdisjoint(node.outputs):
            rule = rule_of(node.op)
            reaches.update(name for i, name in enumerate(node.inputs) if name and rule.differentiable(i))
    return needs_gradient(graph) & reaches

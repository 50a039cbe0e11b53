"""Parts of a plan that are read off one thing each: the model, the cluster, the verdict, other decisions, coverage."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from planner.costs.precision import Precision
from planner.errors import ModelError
from planner.exchange import Phase, groups_of, recipe_of
from planner.graph import Graph
from planner.hardware.types import Cluster, Collective
from planner.operators.types import Origin
from planner.plans.cuts import tensor_specs
from planner.plans.figures import (
    BUBBLE_CONVENTION,
    Alternative,
    Coverage,
    Predictions,
    StageCollective,
    StageMemory,
    StagePrediction,
)
from planner.plans.records import (
    DeviceRun,
    HardwareSection,
    LinkLevel,
    Loss,
    MicroBatches,
    ModelSection,
    SharedParameter,
    Stage,
)
from planner.plans.words import significant, summary
from planner.space.blocks import loss_outputs
from planner.space.types import Candidate, Certificate, Configuration, Evaluation, StageTerms

_EACH: dict[Phase, Literal["", "forward", "backward"]] = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.END: "",
}


def model_section(graph: Graph, chosen: Precision) -> ModelSection:
    """The model."""
    return ModelSection(
        name=graph.name,
        fingerprint=graph.fingerprint,
        opset=graph.opset,
        inputs=tensor_specs(graph, graph.inputs, chosen),
        outputs=tensor_specs(graph, graph.outputs, chosen),
        loss=Loss.IN_GRAPH if loss_outputs(graph) else Loss.AT_OUTPUTS,
        operators=len(graph.nodes),
        parameters=graph.parameter_count(),
    )


def hardware_section(cluster: Cluster) -> HardwareSection:
    """The cluster."""
    runs: list[DeviceRun] = []
    types = [int(t) for t in cluster.device_types]
    for kind, group in itertools.groupby(range(len(types)), key=types.__getitem__):
        ranks = list(group)
        device = cluster.devices[kind]
        runs.append(DeviceRun(device.name, ranks[0], len(ranks), int(device.memory_bytes), int(device.reserve_bytes)))
    levels = tuple(
        LinkLevel(v.name, v.size, float(v.byte_per_s), float(v.device_byte_per_s), float(v.latency_s))
        for v in cluster.levels
    )
    return HardwareSection(cluster.name, cluster.fingerprint, cluster.device_count, tuple(runs), levels)


def micro_batches_section(decision: Configuration) -> MicroBatches:
    """How the global batch is divided."""
    count = decision.micro_batches * decision.copies
    return MicroBatches(decision.micro_batch, count, decision.micro_batch * count, "mean", 1.0 / count)


def predictions_section(
    stages: Sequence[Stage],
    decision: Configuration,
    evaluation: Evaluation,
    certificate: Certificate,
    chosen: Precision,
    shared: Sequence[SharedParameter] = (),
    node_size: int | None = None,
) -> Predictions:
    """What the judge and the solver say of the answer.

    `shared` are the parameters that several stages hold, `node_size` the number of devices of a machine.
    """
    iteration_s = significant(evaluation.iteration_s)
    if iteration_s <= 0:
        raise ModelError("an iteration takes no time: the model has nothing to compute", hint="check the export")
    batch = decision.micro_batch * decision.micro_batches * decision.copies
    return Predictions(
        iteration_s=iteration_s,
        simulated_iteration_s=None,
        samples_per_s=significant(batch / iteration_s),
        bubble_fraction=significant(_bubble(stages, decision, evaluation)),
        bubble_convention=BUBBLE_CONVENTION,
        bottleneck=evaluation.bottleneck,
        bound_s=significant(certificate.bound_s),
        gap=significant(certificate.gap),
        space=certificate.space,
        proven_optimal=certificate.proven_optimal,
        stages=tuple(
            _stage_prediction(
                terms, (*stage_collectives(stage, chosen, node_size), *tied_collectives(stage, decision, shared))
            )
            for stage, terms in zip(stages, evaluation.stages, strict=True)
        ),
        tried_bound_s=None if certificate.tried_bound_s is None else significant(certificate.tried_bound_s),
        line_bound_s=None if certificate.line_bound_s is None else significant(certificate.line_bound_s),
    )


def _bubble(stages: Sequence[Stage], decision: Configuration, evaluation: Evaluation) -> float:
    """Idle share of the working devices' time, over all copies."""
    count = decision.micro_batches * decision.copies
    busy = sum(
        ((terms.forward_s + terms.backward_s) * count + terms.update_s * len(stage.replicas)) * stage.group_ranks
        for stage, terms in zip(stages, evaluation.stages, strict=True)
    )
    devices = len({rank for stage in stages for rank in stage.ranks})
    return max(0.0, 1.0 - busy / (devices * evaluation.iteration_s))


def _stage_prediction(terms: StageTerms, collectives: tuple[StageCollective, ...]) -> StagePrediction:
    memory = terms.memory
    return StagePrediction(
        forward_s=significant(terms.forward_s),
        backward_s=significant(terms.backward_s),
        recompute_s=significant(terms.recompute_s),
        receive_s=significant(terms.receive_s),
        return_s=significant(terms.return_s),
        sync_s=significant(terms.sync_s),
        exposed_sync_s=significant(terms.exposed_sync_s),
        tied_sync_s=significant(terms.tied_sync_s),
        update_s=significant(terms.update_s),
        in_flight=int(terms.in_flight),
        unit_bytes=math.floor(terms.unit_bytes),
        memory=StageMemory(
            weights_bytes=math.ceil(memory.weights),
            gradients_bytes=math.ceil(memory.gradients),
            optimizer_bytes=math.ceil(memory.optimizer),
            activations_bytes=math.ceil(memory.activations),
            workspace_bytes=math.ceil(memory.workspace),
            reserve_bytes=math.ceil(memory.reserve),
        ),
        capacity_bytes=math.floor(terms.capacity_bytes),
        collectives=collectives,
    )


def stage_collectives(stage: Stage, chosen: Precision, node_size: int | None = None) -> tuple[StageCollective, ...]:
    """What a stage's replicas exchange, by the recipe of its ZeRO stage; groups of one rank exchange nothing.

    `node_size` is the number of devices of a machine, for recipes with steps inside machines and across them.
    """
    if len(stage.replicas) < 2 or not stage.parameters:
        return ()
    firsts = np.sort(np.asarray([group[0] for group in stage.replicas], dtype=np.int64))
    found = []
    for step in recipe_of(stage.zero).steps:
        groups = groups_of(firsts // (node_size or 1), firsts, step.group)
        count, ranks = groups.shape
        payload = stage.held_parameters * step.payload(chosen) / step.shares(groups)
        if ranks > 1:
            beside, each = count * stage.group_ranks, _EACH[step.phase]
            found.append(
                StageCollective(step.collective.value, step.content.value, math.ceil(payload), ranks, beside, each)
            )
    return tuple(found)


def tied_collectives(
    stage: Stage, decision: Configuration, shared: Sequence[SharedParameter]
) -> tuple[StageCollective, ...]:
    """What a stage exchanges with the other holders of its parameters, once for each set of holders.

    A group has the replicas of all holders whose numbers are equal modulo the greatest common divisor of their counts;
    where replicas have several ranks, equal ranks of them. `shared` says the bytes of one rank. Copies that are trained
    apart exchange nothing.
    """
    payload: dict[tuple[int, ...], int] = {}
    for entry in shared:
        if stage.index in entry.stages and entry.reduction == "sum":
            payload[entry.stages] = payload.get(entry.stages, 0) + entry.bytes
    found = []
    for holders, size in payload.items():
        counts = [decision.stages[k].replicas for k in holders]
        groups = math.gcd(*counts)
        ranks, groups = sum(counts) // groups, groups * decision.copies * stage.group_ranks
        found.append(StageCollective(Collective.ALL_REDUCE.value, "tied gradients", size, ranks, groups))
    return tuple(found)


def alternative_section(candidate: Candidate) -> Alternative:
    """A decision that was priced and not chosen."""
    decision, evaluation = candidate.decision, candidate.evaluation
    priced = math.isfinite(evaluation.iteration_s) and evaluation.iteration_s > 0
    return Alternative(
        label=candidate.label,
        summary=summary(decision),
        iteration_s=significant(evaluation.iteration_s) if priced else None,
        memory_bytes=max((math.ceil(terms.memory.total) for terms in evaluation.stages), default=0),
        infeasible=tuple(violation.message for violation in evaluation.violations),
        copies=decision.copies,
        micro_batch=decision.micro_batch,
        micro_batches=decision.micro_batches,
        schedule=decision.schedule,
        zero=decision.zero,
        starts=tuple(stage.start for stage in decision.stages),
        replicas=tuple(stage.replicas for stage in decision.stages),
        recompute=tuple(i for i, stage in enumerate(decision.stages) if stage.recompute),
        ranks=tuple(s.ranks for s in decision.stages) if any(s.ranks > 1 for s in decision.stages) else (),
        simulated_iteration_s=None if candidate.simulated_s is None else significant(candidate.simulated_s),
    )


def coverage_section(graph: Graph, origins: Sequence[Origin]) -> Coverage:
    """How the operators of the model file were treated; `origins` is aligned with the graph's nodes."""
    counts = Counter(origins)
    fallbacks = Counter(n.op for n, origin in zip(graph.nodes, origins, strict=True) if origin is Origin.FALLBACK)
    report = graph.report
    return Coverage(
        total=report.total_nodes,
        by_rule=counts[Origin.RULE],
        by_fallback=counts[Origin.FALLBACK],
        plumbing=report.plumbing_nodes + counts[Origin.PLUMBING],
        folded=report.folded_nodes,
        dead=report.dead_nodes,
        fallback_ops=dict(sorted(fallbacks.items())),
    )

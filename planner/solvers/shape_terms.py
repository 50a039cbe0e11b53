"""Devices of a pipeline shape's workers, what a trainable element costs them, and what the stages of a cut cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.exchange import ModelStateBytes, Phase, kept_bytes, phase_s, recipe_of
from planner.hardware.types import Cluster, neighbours
from planner.solvers.shapes import Shape
from planner.solvers.stage_options import StageOptions, run_pairs
from planner.space.configuration import Configuration, StageChoice
from planner.space.jobs import precision_of
from planner.space.types import Job
from planner.space.workers import lay_workers


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTerms:
    """Terms that do not depend on where the chain is cut.

    Attributes:
        device_types: types of the devices that hold each stage, by stage.
        memory_bytes: float64 [workers], usable memory of the worker's smallest device.
        pass_s_per_element: seconds of exchange per element in one forward and backward pass.
        end_s_per_element: seconds of exchange per element at the end of an iteration.
        bytes_per_element: float64 [stages], state per element that a rank holds.
        bytes_per_shard_element: float64 [stages], what to add per element that sharding leaves to a rank.
        transient_bytes: the largest block where weights are gathered block by block.
    """

    device_types: list[list[int]]
    memory_bytes: np.ndarray
    pass_s_per_element: float
    end_s_per_element: float
    bytes_per_element: np.ndarray
    bytes_per_shard_element: np.ndarray
    transient_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Time and memory of the stages of one cut in each option, float64 [stages, options].

    Attributes:
        forward_s, work_s: forward, and forward with backward, of a micro-batch.
        tail_s: exchanges of an iteration.
        unit: bytes kept of each micro-batch in flight.
        waiting: of one between the halves of a split backward.
        turning: at most of one in the first half.
        resident: bytes of weights, gradients and optimizer state.
        working: bytes kept of the micro-batch whose forward is repeated.
        workspace: scratch bytes.
    """

    forward_s: np.ndarray
    work_s: np.ndarray
    tail_s: np.ndarray
    unit: np.ndarray
    waiting: np.ndarray
    turning: np.ndarray
    resident: np.ndarray
    working: np.ndarray
    workspace: np.ndarray


def worker_terms(shape: Shape, cluster: Cluster, job: Job) -> WorkerTerms:
    """Terms of a shape; exchanges are priced for the replicas of the first stage. O(workers + stages)."""
    device_types, memory_bytes, first_ranks = _devices(shape, cluster)
    pass_s, end_s = _exchange_s_per_element(shape, cluster, job, first_ranks)
    by_element, by_shard_element, transient_bytes = _state_bytes(shape, cluster, job)
    return WorkerTerms(device_types, memory_bytes, pass_s, end_s, by_element, by_shard_element, transient_bytes)


def stage_costs(shape: Shape, options: StageOptions, terms: WorkerTerms, edges: Sequence[int]) -> StageCosts:
    """Time and memory of the stages between these boundaries in each option."""
    first, last = run_pairs(edges)
    forward_s, work_s = options.forward_s[:, :, first, last], options.work_s[:, :, first, last]
    hosts = np.zeros((work_s.shape[1], len(first)), bool)
    for stage, types in enumerate(terms.device_types):
        hosts[types, stage] = True
    elements, shard_elements = options.elements[:, first, last], options.shard_elements[:, first, last]
    passes = shape.micro_batches / len(shape.schedule.holders(shape.pipeline)[0])
    exchange_s = terms.end_s_per_element + terms.pass_s_per_element * passes
    return StageCosts(
        np.where(hosts, forward_s, 0.0).max(axis=1).T,
        np.where(hosts, work_s, 0.0).max(axis=1).T,
        shard_elements.T * exchange_s,
        options.unit_bytes[:, first, last].T / shape.schedule.parts,
        options.waiting_bytes[:, first, last].T,
        options.turning_bytes[:, first, last].T,
        (elements * terms.bytes_per_element + shard_elements * terms.bytes_per_shard_element).T,
        options.working_bytes[:, first, last].T,
        options.workspace_bytes[:, first, last].T,
    )


def _devices(shape: Shape, cluster: Cluster) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """(device types by stage, usable bytes by worker, first rank of each replica of the first stage)."""
    ranks, holders = shape.shardings[0].ranks, shape.schedule.holders(shape.pipeline)
    stages = tuple(StageChoice(i, i + 1, 1, ranks=ranks) for i in range(shape.stages))
    layout = lay_workers(
        Configuration(stages, shape.copies, 1, shape.micro_batches, shape.schedule.name, adjacent=shape.adjacent),
        shape.schedule,
    )
    types_by_worker = [np.unique(cluster.device_types[ranks]).tolist() for ranks in layout.ranks]
    peers = neighbours(ranks, shape.copies * len(holders[0]), shape.stages > 1)
    devices = [[cluster.devices[t] for t in types] for types in types_by_worker]
    usable_bytes = [min(float(d.usable_bytes - d.neighbour_bytes * peers) for d in own) for own in devices]
    types_by_stage = [sorted({t for worker in workers for t in types_by_worker[worker]}) for workers in holders]
    return types_by_stage, np.array(usable_bytes), layout.groups(0)[..., 0].ravel()


def _exchange_s_per_element(shape: Shape, cluster: Cluster, job: Job, ranks: np.ndarray) -> tuple[float, float]:
    """Seconds of exchange per trainable element: (in one forward and backward, at the end of an iteration)."""
    recipe, holders = recipe_of(shape.zero), shape.schedule.holders(shape.pipeline)
    elements = float(shape.shardings[0].exchanged_elements.sum()) / shape.stages
    if len(ranks) < 2 or not elements:
        return 0.0, 0.0
    workers = len(shape.schedule.placement(shape.pipeline))
    at_once = max(1, workers // len(holders[0])) * shape.shardings[0].ranks
    forward_s, backward_s, end_s = (
        phase_s(cluster, recipe, phase, ranks, precision_of(job, cluster), elements, at_once) / elements
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.END)
    )
    return forward_s + backward_s, end_s if shape.schedule.weight_policy.synchronous else 0.0


def _state_bytes(shape: Shape, cluster: Cluster, job: Job) -> tuple[np.ndarray, np.ndarray, float]:
    """(`bytes_per_element`, `bytes_per_shard_element`, `transient_bytes`) of `WorkerTerms`."""
    precision, recipe = precision_of(job, cluster), recipe_of(shape.zero)
    replicas = shape.copies * len(shape.schedule.holders(shape.pipeline)[0])
    state_bytes = optimizer_state_bytes(job.optimizer, precision)
    largest_block = float(shape.shardings[0].parameter_elements.max())

    def kept(count: float, elements: float, largest: float) -> ModelStateBytes:
        def parts(group: object) -> float:
            return 1.0 if group is None else count

        spare_bytes, copy_bytes = precision.spare_bytes, precision.copy_bytes
        return kept_bytes(recipe, precision, state_bytes, parts, elements, largest, spare_bytes, copy_bytes)

    # Infinitely many replicas leave no sharded part: what remains is held whole.
    sharded, held_whole = kept(replicas, 1.0, 0.0), kept(math.inf, 1.0, 0.0)
    versions = np.array(shape.schedule.weight_versions(shape.pipeline), float)
    fixed = float(held_whole.gradients + held_whole.optimizer)
    buffers = shape.schedule.weight_buffers * precision.weight_bytes
    by_element = versions * float(held_whole.weights) + fixed + buffers
    by_shard_element = versions * float(sharded.weights - held_whole.weights)
    by_shard_element = by_shard_element + float(
        sharded.gradients + sharded.optimizer - held_whole.gradients - held_whole.optimizer
    )
    return by_element, by_shard_element, float(kept(replicas, 0.0, largest_block).transient)

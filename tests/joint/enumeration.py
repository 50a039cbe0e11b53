"""The joint search's space, decision by decision, from its description alone; only the judge says what one costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from planner.hardware.types import Cluster
from planner.space import BlockCosts, Job, evaluate
from planner.space.types import Decision, Evaluation, StageChoice

Shelves = Mapping[int, Mapping[int, BlockCosts]]
"""Costs by micro-batch size and sharding."""


def decisions(costs: BlockCosts, devices: int, job: Job) -> Iterator[Decision]:
    """All decisions in which groups of `costs.ranks` devices share every operator in one way."""
    blocks, batches, groups = len(costs.parameter_elements), job.global_batch // costs.micro_batch, 0
    groups = devices // costs.ranks
    again = {"never": (False,), "always": (True,), "auto": (False, True)}[job.recompute]
    for copies in range(1, groups + 1):
        if batches % copies:
            continue
        width, micro_batches = groups // copies, batches // copies
        for stages in _stages(blocks, width, micro_batches, again, costs, job.max_stages or blocks):
            full = sum(stage.replicas for stage in stages) == width
            slice_devices = 0 if full else width * costs.ranks
            for schedule, zero in itertools.product(job.schedules, job.zero):
                yield Decision(stages, copies, costs.micro_batch, micro_batches, schedule, zero, slice_devices)


def _stages(
    blocks: int, width: int, micro_batches: int, again: tuple[bool, ...], costs: BlockCosts, most: int
) -> Iterator[tuple[StageChoice, ...]]:
    replicas = [r for r in range(1, width + 1) if micro_batches % r == 0]
    for count in range(1, min(blocks, width, most) + 1):
        for cuts in itertools.combinations(range(1, blocks), count - 1):
            ranges = list(itertools.pairwise((0, *cuts, blocks)))
            for chosen in itertools.product(replicas, repeat=count):
                if sum(chosen) <= width:
                    for flags in itertools.product(again, repeat=count):
                        yield tuple(
                            StageChoice(a, b, r, flag, costs.ranks, costs.sharding)
                            for (a, b), r, flag in zip(ranges, chosen, flags, strict=True)
                        )


def judged(shelves: Shelves, cluster: Cluster, job: Job) -> Iterator[tuple[Decision, Evaluation]]:
    """Every feasible decision with what the judge says of it."""
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    for shelf in shelves.values():
        for costs in shelf.values():
            for decision in decisions(costs, devices, job):
                verdict = evaluate(dict(shelf), cluster, job, decision)
                if verdict.feasible:
                    yield decision, verdict


def best_s(found: Iterable[tuple[Decision, Evaluation]]) -> float:
    """The least time; infinite when nothing is feasible."""
    return min((verdict.iteration_s for _, verdict in found), default=math.inf)

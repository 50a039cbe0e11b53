"""The joint search's space, decision by decision, from its description alone; only the judge says what one costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from planner.hardware import Cluster
from planner.space import BlockCosts, Configuration, Evaluation, Job, StageChoice, evaluate, played_s
from planner.space.terms import TermCache

Shelves = Mapping[int, Mapping[int, BlockCosts]]
"""Costs by micro-batch size and sharding."""


def decisions(ways: Sequence[BlockCosts], devices: int, job: Job) -> Iterator[Configuration]:
    """All decisions in which groups of equally many devices share operators, each stage in one of some ways."""
    first = ways[0]
    blocks, batches = len(first.parameter_elements), job.global_batch // first.micro_batch
    groups = devices // first.ranks
    for copies in range(1, groups + 1):
        if batches % copies:
            continue
        width, micro_batches = groups // copies, batches // copies
        for stages in _stages(blocks, width, micro_batches, ways, job):
            full = sum(stage.replicas for stage in stages) == width
            slice_devices = 0 if full else width * first.ranks
            for schedule, zero in itertools.product(job.schedules, job.zero):
                yield Configuration(stages, copies, first.micro_batch, micro_batches, schedule, zero, slice_devices)


def _stages(
    blocks: int, width: int, micro_batches: int, ways: Sequence[BlockCosts], job: Job
) -> Iterator[tuple[StageChoice, ...]]:
    layers = {"never": (False,), "always": (True,), "auto": (False, True)}[job.recompute]
    again: list[tuple[bool, tuple[str, ...]]] = [(flag, ()) for flag in layers]
    if job.recompute == "auto" and ways[0].selective is not None:
        again += [(False, repeats) for repeats in ways[0].selective.offered]
    numbers, ranks = [way.sharding for way in ways], ways[0].ranks
    replicas = [r for r in range(1, width + 1) if micro_batches % r == 0]
    for count in range(1, min(blocks, width, job.max_stages or blocks) + 1):
        dealt = [chosen for chosen in itertools.product(replicas, repeat=count) if sum(chosen) <= width]
        options = list(itertools.product(itertools.product(again, numbers), repeat=count))
        for cuts in itertools.combinations(range(1, blocks), count - 1):
            ranges = list(itertools.pairwise((0, *cuts, blocks)))
            for chosen, taken in itertools.product(dealt, options):
                yield tuple(
                    StageChoice(a, b, r, flag, ranks, number, repeats=repeats)
                    for (a, b), r, ((flag, repeats), number) in zip(ranges, chosen, taken, strict=True)
                )


def judged(shelves: Shelves, cluster: Cluster, job: Job) -> Iterator[tuple[Configuration, Evaluation]]:
    """Every feasible decision with what the judge says of it."""
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    for shelf in shelves.values():
        by_label, cache = dict[str, list[BlockCosts]](), TermCache()
        for costs in shelf.values():
            by_label.setdefault(costs.label, []).append(costs)
        for ways in by_label.values():
            for decision in decisions(ways, devices, job):
                verdict = evaluate(shelf, cluster, job, decision, cache=cache)
                if verdict.feasible:
                    yield decision, verdict


def best_s(found: Iterable[tuple[Configuration, Evaluation]]) -> float:
    """The least time of all when they are played; infinite when nothing is feasible.

    Not played are those in which the work of one replica alone takes longer.
    """
    least_s = math.inf
    for busy_s, decision, verdict in sorted(((busiest_s(*each), *each) for each in found), key=lambda each: each[0]):
        if busy_s > least_s:
            break
        least_s = min(least_s, played_s(decision, verdict))
    return least_s


def busiest_s(decision: Configuration, verdict: Evaluation) -> float:
    """Most seconds that one replica works in an iteration."""
    return max(
        (terms.forward_s + terms.backward_s) * decision.micro_batches / stage.replicas
        for stage, terms in zip(decision.stages, verdict.stages, strict=True)
    )

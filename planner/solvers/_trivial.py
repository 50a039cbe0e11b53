"""The plans one would write down without a search, so that an answer can be compared with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from planner.hardware.types import Cluster
from planner.schedules import get, names
from planner.space import evaluate
from planner.space.evaluate_many import evaluate_many
from planner.space.limits import forbidden_choices
from planner.space.repeats import PlainWay, plain_ways
from planner.space.types import BlockCosts, Candidate, Configuration, Evaluation, Job, StageChoice

ONE_DEVICE, DATA_PARALLEL, SHARDED, EVEN_SPLIT = "one device", "data parallel", "data parallel, ZeRO-1", "even split"
TENSOR_PARALLEL = "tensor parallel, even split"


class TrivialPlans:
    """Each trivial plan at the micro-batch size (and with or without recomputation) that suits it best.

    A plan that fits nowhere is kept where it is over by least.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster, self._job = cluster, job
        self._best: dict[str, tuple[tuple[float, float], Candidate]] = {}

    def add(self, costs: BlockCosts) -> None:
        """Price all trivial plans at one more micro-batch size."""
        fits: set[str] = set()
        for label, decision in _trivial(costs, self._cluster, self._job):
            if label in fits:
                continue  # recomputing what fits only makes it slower
            fits.update([label] if self._priced(label, costs, decision).feasible else [])

    def _priced(self, label: str, costs: BlockCosts, decision: Configuration) -> Evaluation:
        """The judge's verdict of a plan, which is kept if it is the best of its label."""
        evaluation = evaluate(costs, self._cluster, self._job, decision)
        key = (_excess(evaluation), evaluation.iteration_s)
        if label not in self._best or key < self._best[label][0]:
            self._best[label] = (key, Candidate(label, decision, evaluation))
        return evaluation

    def add_sharded(self, costs: BlockCosts) -> None:
        """Price even splits of a model whose operators are shared by several ranks, into any number of stages."""
        splits = list(_even_splits(costs, self._cluster, self._job))
        allowed = [c for c in splits if not forbidden_choices(self._job, c, costs.names)] or splits
        if not allowed:
            return
        found = evaluate_many(costs, self._cluster, self._job, allowed)
        over = np.where(found.fits, 0.0, found.peak_bytes / found.capacity_bytes)
        self._priced(TENSOR_PARALLEL, costs, allowed[int(np.lexsort((found.iteration_s, over))[0])])

    def candidates(self) -> tuple[Candidate, ...]:
        """The plans, from simplest to most involved."""
        order = (ONE_DEVICE, DATA_PARALLEL, SHARDED, EVEN_SPLIT, TENSOR_PARALLEL)
        return tuple(self._best[label][1] for label in order if label in self._best)

    def best_s(self) -> float:
        """The fastest feasible one; infinite when none is."""
        feasible = (c.evaluation.iteration_s for c in self.candidates() if c.evaluation.feasible)
        return min(feasible, default=math.inf)


def plain_schedule(job: Job) -> str:
    """The schedule of plans that one would write down: one that serves any number of stages, an allowed one if any."""
    known = [name for name in (*job.schedules, *names()) if name in names()]
    return next(name for name in known if get(name).closed_form)


def _excess(evaluation: Evaluation) -> float:
    """How far the fullest device is over its memory, as a fraction; 0 when all fits."""
    return max((v.needed / v.available - 1 for v in evaluation.violations if v.kind == "memory"), default=0.0)


def _trivial(costs: BlockCosts, cluster: Cluster, job: Job) -> Iterator[tuple[str, Configuration]]:
    blocks, batches = len(costs.parameter_elements), job.global_batch // costs.micro_batch
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    schedule = plain_schedule(job)
    replicas = max(r for r in range(1, devices + 1) if batches % r == 0)
    for way in plain_ways(job.recompute):

        def decision(bounds: Sequence[int], replicas: int, zero: int, way: PlainWay = way) -> Configuration:
            pairs = itertools.pairwise(bounds)
            stages = tuple(StageChoice(start, stop, replicas, way[0], repeats=way[1]) for start, stop in pairs)
            return Configuration(stages, 1, costs.micro_batch, batches, schedule, zero)

        yield ONE_DEVICE, decision((0, blocks), 1, 0)
        if devices > 1:
            yield DATA_PARALLEL, decision((0, blocks), replicas, 0)
            yield SHARDED, decision((0, blocks), replicas, 1)
            count = min(devices, blocks, job.max_stages or blocks)
            yield EVEN_SPLIT, decision([math.floor(k * blocks / count) for k in range(count + 1)], 1, 0)


def _even_splits(costs: BlockCosts, cluster: Cluster, job: Job) -> Iterator[Configuration]:
    """Stages of about equal time on all devices, one replica a copy: what Megatron-LM's users write down."""
    batches, ranks = job.global_batch // costs.micro_batch, costs.ranks
    groups = min(job.devices or cluster.device_count, cluster.device_count) // ranks
    seconds = np.cumsum((costs.forward_s + costs.backward_s).min(axis=0))
    for count in (n for n in range(1, min(groups, len(seconds)) + 1) if groups % n == 0):
        copies = groups // count
        cuts = np.searchsorted(seconds, seconds[-1] * np.arange(1, count) / count) + 1
        bounds = [0, *cuts.tolist(), len(seconds)]
        if batches % copies or len(set(bounds)) != count + 1:
            continue
        for zero, way in itertools.product(sorted(set(job.zero), reverse=True), plain_ways(job.recompute)):
            stages = tuple(costs.stage(start, stop, 1, *way) for start, stop in itertools.pairwise(bounds))
            yield Configuration(stages, copies, costs.micro_batch, batches // copies, plain_schedule(job), zero)

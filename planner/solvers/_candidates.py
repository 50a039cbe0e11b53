"""Decisions that a search has found, and how long an iteration of each takes when it is played out; and the plans one
would write down without a search, so that an answer can be compared with them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.hardware.types import Cluster
from planner.schedules import get, names
from planner.solvers.critical_path import critical_s
from planner.solvers.types import Judge, Measure
from planner.space import evaluate
from planner.space.evaluate_many import evaluate_many
from planner.space.limits import forbidden_choices
from planner.space.repeats import PlainWay, plain_ways
from planner.space.types import BlockCosts, Candidate, Configuration, Evaluation, Job, StageChoice

SAME = 1e-9
"""Relative difference below which two times are the same."""


def comparable(figure: float) -> float:
    """A figure to nine digits, by which decisions are put in order: of equally good ones a rule picks, not the last
    bit of a sum, which depends on how the Python in use adds."""
    return float(f"{figure:.9g}")


MOST_ACTIONS = 100_000
"""Forwards and backwards that are played for the sake of runners-up."""


class Candidates:
    """Feasible decisions and their times; those that cannot be the fastest are not played.

    Args:
        simulated_s: plays a judged decision.
    """

    def __init__(self, simulated_s: Measure) -> None:
        self._simulated_s = simulated_s
        self._verdicts: dict[Configuration, Evaluation] = {}
        self._least_s: dict[Configuration, float] = {}
        self._times: dict[Configuration, float] = {}
        self.best_s = self.best_form_s = math.inf

    def __bool__(self) -> bool:
        return bool(self._verdicts)

    def add(
        self,
        decision: Configuration,
        evaluation: Evaluation,
        *,
        play: bool = True,
        least_s: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Take a feasible decision in; it is played, or will be, if it may be the fastest.

        Args:
            decision: the decision.
            evaluation: the judge's verdict.
            play: whether it is to be played now.
            least_s: no play is faster, where that is known.
            seconds: its time, where it has been played.
        """
        if decision not in self._verdicts:
            self._verdicts[decision] = evaluation
            self._least_s[decision] = critical_s(decision, evaluation) if least_s is None else least_s
            self.best_form_s = min(self.best_form_s, evaluation.iteration_s)
            if seconds is not None:
                self._times[decision] = seconds
                self.best_s = min(self.best_s, seconds)
            elif play:
                self._play_if_faster(decision)

    def best(self) -> Configuration:
        """The fastest that was played."""
        return min(self._times.items(), key=_order)[0]

    def play(self, count: int) -> None:
        """Play those that the closed form says are the fastest, if they may be."""
        ordered = sorted(self._verdicts, key=lambda d: (comparable(self._verdicts[d].iteration_s), repr(d)))
        for decision in ordered[:count]:
            self._play_if_faster(decision)

    def _play_if_faster(self, decision: Configuration) -> None:
        if self._least_s[decision] < self.best_s * (1 - SAME):
            self._play(decision)

    def _play(self, decision: Configuration) -> None:
        if decision not in self._times:
            self._times[decision] = self._simulated_s(decision, self._verdicts[decision])
            self.best_s = min(self.best_s, self._times[decision])

    def timed(self, candidate: Candidate) -> Candidate:
        """The candidate with its time, if it is feasible and does not take long to play."""
        if candidate.evaluation.feasible and _actions(candidate.decision) <= MOST_ACTIONS:
            self._verdicts.setdefault(candidate.decision, candidate.evaluation)
            self._play(candidate.decision)
        return dataclasses.replace(candidate, simulated_s=self._times.get(candidate.decision))

    def fastest(self, count: int, judge: Callable[[int], Judge]) -> list[Candidate]:
        """The fastest decisions that are known, the best first, without what gains nothing.

        Args:
            count: how many at the most.
            judge: by micro-batch size.
        """
        actions = 0
        for decision in sorted(self._least_s, key=lambda d: (comparable(self._least_s[d]), repr(d)))[: 2 * count]:
            actions += _actions(decision) * (decision not in self._times)
            if actions > MOST_ACTIONS:
                break
            self._play(decision)
        found: dict[Configuration, tuple[Evaluation, float]] = {}
        for decision, _ in sorted(self._times.items(), key=_order)[: 2 * count]:
            simple = self._simplified(decision, judge(decision.micro_batch))
            found[simple] = self._verdicts[simple], self._times[simple]
        ordered = sorted(((d, seconds) for d, (_, seconds) in found.items()), key=_order)[:count]
        self.best_s = ordered[0][1]
        return [
            Candidate("best" if k == 0 else f"runner-up {k}", decision, found[decision][0], seconds)
            for k, (decision, seconds) in enumerate(ordered)
        ]

    def _simplified(self, decision: Configuration, judge: Judge) -> Configuration:
        """The same decision without what gains nothing: idle devices, sharding, recomputation, copies of one stage."""
        for simplify in (_packed, _unsharded, _kept, _merged):
            simpler = simplify(decision)
            if simpler != decision and self._no_slower(simpler, decision, judge):
                decision = simpler
        return decision

    def _no_slower(self, simpler: Configuration, decision: Configuration, judge: Judge) -> bool:
        verdict = judge(simpler)
        if not verdict.feasible:
            return False
        alike = _played(simpler, verdict) == _played(decision, self._verdicts[decision])
        seconds = self._times[decision] if alike else self._simulated_s(simpler, verdict)
        if seconds <= self._times[decision] * (1 + SAME):
            self._verdicts[simpler], self._times[simpler] = verdict, seconds
            return True
        return False


def _actions(decision: Configuration) -> int:
    return 2 * len(decision.stages) * decision.micro_batches


def _order(entry: tuple[Configuration, float]) -> tuple[float, int, str]:
    """By time as far as rounding allows, then the plainer decision."""
    decision, seconds = entry
    return comparable(seconds), len(decision.stages), repr(decision)


def _played(decision: Configuration, evaluation: Evaluation) -> tuple[object, ...]:
    """All that the time of a decision follows from when it is played."""
    times = tuple(
        (t.forward_s, t.backward_s, t.receive_s, t.return_s, t.exposed_sync_s, t.update_s) for t in evaluation.stages
    )
    return decision.schedule, decision.micro_batches, tuple(stage.replicas for stage in decision.stages), times


def _packed(decision: Configuration) -> Configuration:
    return dataclasses.replace(decision, slice_devices=0)


def _unsharded(decision: Configuration) -> Configuration:
    return dataclasses.replace(decision, zero=0)


def _kept(decision: Configuration) -> Configuration:
    return dataclasses.replace(
        decision, stages=tuple(dataclasses.replace(stage, recompute=False, repeats=()) for stage in decision.stages)
    )


def _merged(decision: Configuration) -> Configuration:
    """Copies of a single stage as replicas of one."""
    if len(decision.stages) > 1 or decision.slice_devices:
        return decision
    only = dataclasses.replace(decision.stages[0], replicas=decision.copies * decision.stages[0].replicas)
    return dataclasses.replace(
        decision, stages=(only,), copies=1, micro_batches=decision.copies * decision.micro_batches
    )


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

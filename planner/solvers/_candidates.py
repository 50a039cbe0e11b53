"""Candidates of a search with their simulated times, and the trivial plans that an answer is compared with."""

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
from planner.space.configuration import KEEP_ALL, RecomputeChoice
from planner.space.evaluate_many import evaluate_many
from planner.space.limits import forbidden_choices
from planner.space.recompute_choices import recompute_choices
from planner.space.types import BlockCosts, Candidate, Configuration, Evaluation, Job, StageChoice

SAME = 1e-9
"""Relative difference below which two times count as equal."""


def comparable(figure: float) -> float:
    """Round a figure to nine digits for sorting.

    Ties are then broken by the next sort key, not by the last bit of a sum, which differs between Python versions.
    """
    return float(f"{figure:.9g}")


MAX_PLAYED_ACTIONS = 100_000
"""Most forwards and backwards that are simulated for the sake of runners-up."""


class Candidates:
    """Feasible decisions with their simulated times; those that cannot be the fastest are not simulated.

    Args:
        simulated_s: simulates an evaluated decision.
        limit_s: the time of a plan that is known elsewhere: only faster ones are looked for.

    Attributes:
        best_s: fastest simulated time, in seconds.
        best_form_s: least time by the judge, which is the closed form where the schedule has one.
    """

    def __init__(self, simulated_s: Measure, limit_s: float = math.inf) -> None:
        self._simulated_s = simulated_s
        self._evaluations: dict[Configuration, Evaluation] = {}
        self._least_s: dict[Configuration, float] = {}
        self._times: dict[Configuration, float] = {}
        self.best_s = self.best_form_s = limit_s

    def __bool__(self) -> bool:
        return bool(self._evaluations)

    def add(
        self,
        decision: Configuration,
        evaluation: Evaluation,
        *,
        play: bool = True,
        least_s: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Collect a feasible decision, and simulate it if it may be the fastest.

        Args:
            decision: the decision.
            evaluation: the judge's evaluation.
            play: simulate now; else left for `play` or `fastest`.
            least_s: a known lower bound on the simulated time; by default the critical path.
            seconds: the simulated time, if it is known.
        """
        if decision not in self._evaluations:
            self._evaluations[decision] = evaluation
            self._least_s[decision] = critical_s(decision, evaluation) if least_s is None else least_s
            self.best_form_s = min(self.best_form_s, evaluation.iteration_s)
            if seconds is not None:
                self._times[decision] = seconds
                self.best_s = min(self.best_s, seconds)
            elif play:
                self._play_if_faster(decision)

    def best(self) -> Configuration:
        """The fastest simulated decision; if none is simulated yet, the one that is by its bound."""
        if not self._times:
            self._play(min(self._least_s, key=lambda d: (comparable(self._least_s[d]), repr(d))))
        return min(self._times.items(), key=_order)[0]

    def play(self, count: int) -> None:
        """Simulate the `count` fastest decisions by the judge's time, unless their bound rules them out."""
        ordered = sorted(self._evaluations, key=lambda d: (comparable(self._evaluations[d].iteration_s), repr(d)))
        for decision in ordered[:count]:
            self._play_if_faster(decision)

    def _play_if_faster(self, decision: Configuration) -> None:
        if self._least_s[decision] < self.best_s * (1 - SAME):
            self._play(decision)

    def _play(self, decision: Configuration) -> None:
        if decision not in self._times:
            self._times[decision] = self._simulated_s(decision, self._evaluations[decision])
            self.best_s = min(self.best_s, self._times[decision])

    def timed(self, candidate: Candidate) -> Candidate:
        """The candidate with its simulated time, if it is feasible and has few enough actions to simulate."""
        if candidate.evaluation.feasible and _actions(candidate.decision) <= MAX_PLAYED_ACTIONS:
            self._evaluations.setdefault(candidate.decision, candidate.evaluation)
            self._play(candidate.decision)
        return dataclasses.replace(candidate, simulated_s=self._times.get(candidate.decision))

    def fastest(self, count: int, judge: Callable[[int], Judge]) -> list[Candidate]:
        """The fastest decisions, best first, each simplified as far as that costs no time.

        Args:
            count: most decisions to return.
            judge: the judge by micro-batch size.
        """
        actions = 0
        for decision in sorted(self._least_s, key=lambda d: (comparable(self._least_s[d]), repr(d)))[: 2 * count]:
            actions += _actions(decision) * (decision not in self._times)
            if actions > MAX_PLAYED_ACTIONS:
                break
            self._play(decision)
        simplified: dict[Configuration, tuple[Evaluation, float]] = {}
        for decision, _ in sorted(self._times.items(), key=_order)[: 2 * count]:
            simple = self._simplified(decision, judge(decision.micro_batch))
            simplified[simple] = self._evaluations[simple], self._times[simple]
        ordered = sorted(((d, seconds) for d, (_, seconds) in simplified.items()), key=_order)[:count]
        self.best_s = ordered[0][1]
        return [
            Candidate("best" if k == 0 else f"runner-up {k}", decision, simplified[decision][0], seconds)
            for k, (decision, seconds) in enumerate(ordered)
        ]

    def recomputed_shardings(self, count: int) -> list[tuple[int, int]]:
        """Micro-batch sizes and shardings of the fastest decisions, by their bounds, that recompute something."""
        again = [d for d in self._least_s if any(stage.recompute or stage.repeats for stage in d.stages)]
        again.sort(key=lambda d: (comparable(self._least_s[d]), repr(d)))
        return list(dict.fromkeys((d.micro_batch, stage.sharding) for d in again for stage in d.stages))[:count]

    def _simplified(self, decision: Configuration, judge: Judge) -> Configuration:
        """Drop idle devices, ZeRO, recomputation and copies of a single stage where they gain no time."""
        for simplify in (_without_idle_devices, _without_zero, _without_recompute, _with_copies_merged):
            simpler = simplify(decision)
            if simpler != decision and self._no_slower(simpler, decision, judge):
                decision = simpler
        return decision

    def _no_slower(self, simpler: Configuration, decision: Configuration, judge: Judge) -> bool:
        """True if the simpler decision is feasible and no slower; it is then collected too."""
        evaluation = judge(simpler)
        if not evaluation.feasible:
            return False
        same_timing = _timing_inputs(simpler, evaluation) == _timing_inputs(decision, self._evaluations[decision])
        seconds = self._times[decision] if same_timing else self._simulated_s(simpler, evaluation)
        if seconds <= self._times[decision] * (1 + SAME):
            self._evaluations[simpler], self._times[simpler] = evaluation, seconds
            return True
        return False


def _actions(decision: Configuration) -> int:
    """Forwards and backwards of one copy in an iteration."""
    return 2 * len(decision.stages) * decision.micro_batches


def _order(entry: tuple[Configuration, float]) -> tuple[float, int, str]:
    """Sort key of (decision, seconds): time to nine digits, then fewer stages."""
    decision, seconds = entry
    return comparable(seconds), len(decision.stages), repr(decision)


def _timing_inputs(decision: Configuration, evaluation: Evaluation) -> tuple[object, ...]:
    """Everything that the simulated time of a decision depends on."""
    times = tuple(
        (t.forward_s, t.backward_s, t.receive_s, t.return_s, t.exposed_sync_s, t.update_s) for t in evaluation.stages
    )
    return decision.schedule, decision.micro_batches, tuple(stage.replicas for stage in decision.stages), times


def _without_idle_devices(decision: Configuration) -> Configuration:
    return dataclasses.replace(decision, slice_devices=0)


def _without_zero(decision: Configuration) -> Configuration:
    return dataclasses.replace(decision, zero=0)


def _without_recompute(decision: Configuration) -> Configuration:
    return dataclasses.replace(
        decision,
        stages=tuple(dataclasses.replace(stage, **KEEP_ALL._asdict()) for stage in decision.stages),
    )


def _with_copies_merged(decision: Configuration) -> Configuration:
    """Turn copies of a single stage into replicas of one copy."""
    if len(decision.stages) > 1 or decision.slice_devices:
        return decision
    merged = dataclasses.replace(decision.stages[0], replicas=decision.copies * decision.stages[0].replicas)
    return dataclasses.replace(
        decision, stages=(merged,), copies=1, micro_batches=decision.copies * decision.micro_batches
    )


ONE_DEVICE, DATA_PARALLEL, SHARDED, EVEN_SPLIT = "one device", "data parallel", "data parallel, ZeRO-1", "even split"
TENSOR_PARALLEL = "tensor parallel, even split"


class TrivialPlans:
    """The trivial plans, each with its best micro-batch size and recomputation.

    A plan that never fits is kept in the variant that exceeds memory by least.

    Args:
        cluster: the cluster.
        job: the job.
        known_s: time of a plan beside which no trivial plans are wanted; infinite where they are.
    """

    def __init__(self, cluster: Cluster, job: Job, known_s: float = math.inf) -> None:
        self._cluster, self._job, self._known_s = cluster, job, known_s
        self._best: dict[str, tuple[tuple[float, float], Candidate]] = {}

    def add(self, costs: BlockCosts) -> None:
        """Evaluate all trivial plans at one more micro-batch size."""
        fits: set[str] = set()
        for label, decision in _trivial_plans(costs, self._cluster, self._job) if math.isinf(self._known_s) else ():
            if label in fits:
                continue  # Recomputation only makes a plan that fits slower.
            fits.update([label] if self._evaluated(label, costs, decision).feasible else [])

    def _evaluated(self, label: str, costs: BlockCosts, decision: Configuration) -> Evaluation:
        """The judge's evaluation of a plan; the best plan of each label is kept."""
        evaluation = evaluate(costs, self._cluster, self._job, decision)
        key = (_excess(evaluation), evaluation.iteration_s)
        if label not in self._best or key < self._best[label][0]:
            self._best[label] = (key, Candidate(label, decision, evaluation))
        return evaluation

    def add_sharded(self, costs: BlockCosts) -> None:
        """Evaluate even splits of a sharded model into any number of stages."""
        splits = list(_even_splits(costs, self._cluster, self._job))
        allowed = [c for c in splits if not forbidden_choices(self._job, c, costs.names)] or splits
        if not allowed:
            return
        (figures,) = evaluate_many((costs,), self._cluster, self._job, allowed)
        excess = np.where(figures.fits, 0.0, figures.peak_bytes / figures.capacity_bytes)
        self._evaluated(TENSOR_PARALLEL, costs, allowed[int(np.lexsort((figures.iteration_s, excess))[0])])

    def candidates(self) -> tuple[Candidate, ...]:
        """The trivial plans, simplest first."""
        order = (ONE_DEVICE, DATA_PARALLEL, SHARDED, EVEN_SPLIT, TENSOR_PARALLEL)
        return tuple(self._best[label][1] for label in order if label in self._best)

    def best_s(self) -> float:
        """Time of the known plan or of the fastest feasible trivial one, in seconds; infinite if none is feasible."""
        feasible = (c.evaluation.iteration_s for c in self.candidates() if c.evaluation.feasible)
        return min(feasible, default=self._known_s)


def plain_schedule(job: Job) -> str:
    """The schedule of trivial plans: the first with a closed form, among those allowed if any, else of all."""
    known = [name for name in (*job.schedules, *names()) if name in names()]
    return next(name for name in known if get(name).closed_form)


def _excess(evaluation: Evaluation) -> float:
    """Fraction by which the fullest device exceeds its memory; 0 if all fit."""
    return max((v.needed / v.available - 1 for v in evaluation.violations if v.kind == "memory"), default=0.0)


def _trivial_plans(costs: BlockCosts, cluster: Cluster, job: Job) -> Iterator[tuple[str, Configuration]]:
    """(label, decision) of the trivial plans on single devices, with each plain choice of recomputation."""
    blocks, batches = len(costs.parameter_elements), job.global_batch // costs.micro_batch
    devices = job.devices_of(cluster)
    schedule = plain_schedule(job)
    replicas = max(r for r in range(1, devices + 1) if batches % r == 0)
    for recompute_choice in recompute_choices(job.recompute):

        def decision(
            bounds: Sequence[int], replicas: int, zero: int, recompute_choice: RecomputeChoice = recompute_choice
        ) -> Configuration:
            pairs = itertools.pairwise(bounds)
            stages = tuple(StageChoice(start, stop, replicas, **recompute_choice._asdict()) for start, stop in pairs)
            return Configuration(stages, 1, costs.micro_batch, batches, schedule, zero)

        yield ONE_DEVICE, decision((0, blocks), 1, 0)
        if devices > 1:
            yield DATA_PARALLEL, decision((0, blocks), replicas, 0)
            yield SHARDED, decision((0, blocks), replicas, 1)
            count = min(devices, blocks, job.max_stages or blocks)
            yield EVEN_SPLIT, decision([math.floor(k * blocks / count) for k in range(count + 1)], 1, 0)


def _even_splits(costs: BlockCosts, cluster: Cluster, job: Job) -> Iterator[Configuration]:
    """Pipelines of about equal stages on all devices, one replica per stage and copy, as Megatron-LM users write."""
    batches, ranks = job.global_batch // costs.micro_batch, costs.ranks
    groups = job.devices_of(cluster) // ranks
    seconds = np.cumsum((costs.forward_s + costs.backward_s).min(axis=0))
    for count in (n for n in range(1, min(groups, len(seconds)) + 1) if groups % n == 0):
        copies = groups // count
        cuts = np.searchsorted(seconds, seconds[-1] * np.arange(1, count) / count) + 1
        bounds = [0, *cuts.tolist(), len(seconds)]
        if batches % copies or len(set(bounds)) != count + 1:
            continue
        for zero, recompute_choice in itertools.product(
            sorted(set(job.zero), reverse=True), recompute_choices(job.recompute)
        ):
            stages = tuple(costs.stage(start, stop, 1, recompute_choice) for start, stop in itertools.pairwise(bounds))
            yield Configuration(stages, copies, costs.micro_batch, batches // copies, plain_schedule(job), zero)

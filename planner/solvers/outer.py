"""The whole search: every micro-batch size, number of copies, schedule and ZeRO stage, best bound first.

Each combination is a `StageProblem` that the chain DP solves exactly under the best time known so far, unless compute
alone already takes longer or another combination offers the same decisions at no more time and memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.errors import JobError
from planner.hardware.types import Cluster
from planner.solvers._diagnosis import infeasible
from planner.solvers._registry import SOLVERS
from planner.solvers._trivial import TrivialPlans
from planner.solvers.types import Answer, Explored, Judge, Outcome, Progress, Solution
from planner.space import evaluate
from planner.space.formulate import ALL_DIVISORS_UP_TO, Formulator
from planner.space.problem import StageProblem
from planner.space.types import BlockCosts, Candidate, Certificate, Decision, Evaluation, Job

CostsFor = Callable[[int], BlockCosts]
"""Block costs by micro-batch size; the caller remembers what it has priced."""

KEEP = 8
"""Runners-up that an answer carries at the most."""

SLACK = 0.02
"""Decisions slower than the best by up to this fraction are still looked for, as runners-up."""

SLACK_UP_TO = 64
"""In slices of more devices only the best decision is looked for."""

MOST_TYPE_CHANGES = 8
"""Where device types change more often along the line, only all devices are dealt to the copies."""

SAME = 1e-9
"""Relative difference below which two times are the same."""


def search(
    costs_for: CostsFor, cluster: Cluster, job: Job, *, progress: Progress | None = None, solver: str = "chain_dp"
) -> Answer:
    """Find the fastest decision for a job on a cluster, and prove it.

    Args:
        costs_for: block costs by micro-batch size.
        cluster: the machine.
        job: what is to be trained, and which choices are allowed.
        progress: told about every problem that is settled.
        solver: which solver works on the problems.

    Raises:
        JobError: no allowed micro-batch size divides the global batch, or the job leaves nothing to choose from.
        InfeasibleError: nothing fits; the message says what is in the way, and what would help.

    Memory use of larger micro-batches is taken to be no smaller: sizes beyond one of which a single block does not
    fit, or of which one micro-batch takes longer than the best plan, are not priced.
    """
    run = _Search(costs_for, cluster, job, progress, solver)
    return run.answer()


@dataclass(frozen=True, slots=True)
class _Task:
    """A problem to be settled, what its compute takes at the least, and the least of that among problems alike."""

    bound_s: float
    alike_s: float
    slice_devices: int
    micro_batch: int
    copies: int
    rank: int
    schedule: str
    zero: int

    def order(self) -> tuple[float, int, int, int, int]:
        """Best bound first; narrow slices, which are solved fastest, before wide ones; alike problems together."""
        return self.alike_s, self.slice_devices, self.micro_batch, self.copies, self.rank

    @property
    def key(self) -> tuple[int, int, int]:
        """What alike problems have in common."""
        return self.micro_batch, self.copies, self.slice_devices


class _Search:
    def __init__(self, costs_for: CostsFor, cluster: Cluster, job: Job, progress: Progress | None, solver: str) -> None:
        self._sizes = micro_batch_sizes(job)
        self._costs_for, self._cluster, self._job, self._progress = costs_for, cluster, job, progress
        self._solve = SOLVERS.get(solver)
        self._formulator = Formulator(cluster, job)
        self._explored: list[Explored] = []
        self._alike: tuple[tuple[int, int, int] | None, list[tuple[StageProblem, float]]] = (None, [])
        self._known: dict[Decision, Evaluation] = {}
        self._best_s = math.inf

    def answer(self) -> Answer:
        """Run the search."""
        trivial = TrivialPlans(self._cluster, self._job)
        priced = self._price(trivial)
        for candidate in trivial.candidates():
            if candidate.evaluation.feasible:
                self._remember(candidate.decision, candidate.evaluation)
        tasks = sorted((task for costs in priced for task in self._tasks(costs)), key=_Task.order)
        costs_of = {costs.micro_batch: costs for costs in priced}
        for done, task in enumerate(tasks, 1):
            self._settle(task, costs_of[task.micro_batch])
            if self._progress is not None:
                ahead = tasks[done].alike_s if done < len(tasks) else math.inf
                self._progress(done, len(tasks), self._best_s, min(self._best_s, ahead, self._bound()))
        if not self._known:
            raise infeasible(priced, self._cluster, self._job, self._costs_for)
        return self._assemble(priced, trivial.candidates())

    def _price(self, trivial: TrivialPlans) -> list[BlockCosts]:
        """Costs of all sizes worth looking at, smallest first; the trivial plans are priced on the way."""
        priced: list[BlockCosts] = []
        for size in self._sizes:
            costs = self._costs_for(size)
            if priced and (_compute_s(costs) >= trivial.best_s() or not self._any_block_fits(costs)):
                break
            priced.append(costs)
            trivial.add(costs)
        return priced

    def _any_block_fits(self, costs: BlockCosts) -> bool:
        """Whether the activations of one micro-batch in each block alone leave room on the largest device."""
        kept = np.diagonal(costs.saved_bytes) + costs.workspace_bytes
        return bool((kept <= max(d.usable_bytes for d in self._cluster.devices)).all())

    def _tasks(self, costs: BlockCosts) -> list[_Task]:
        job = self._job
        batches = job.global_batch // costs.micro_batch
        order = sorted(job.schedules, key=lambda name: name != "1f1b")
        kinds = [(schedule, zero) for schedule in dict.fromkeys(order) for zero in sorted(set(job.zero), reverse=True)]
        slices = {
            (copies, used // copies)
            for used in self._device_counts()
            for copies in range(1, used + 1)
            if batches % copies == 0
        }
        outside_s = {zero: self._outside_s(costs, zero) for zero in set(job.zero)}
        compute_s = _compute_s(costs)
        tasks = []
        for copies, width in sorted(slices):
            bounds = {z: max(batches // copies * compute_s / width + s, compute_s) for z, s in outside_s.items()}
            for rank, (schedule, zero) in enumerate(kinds):
                which = (width, costs.micro_batch, copies, rank, schedule, zero)
                tasks.append(_Task(bounds[zero], min(bounds.values()), *which))
        return tasks

    def _outside_s(self, costs: BlockCosts, zero: int) -> float:
        """Compute of one micro-batch that no single stage can hold; infinite when some block fits nowhere.

        A copy with W devices takes at least m C / W (the slowest stage, at a pace no better than perfect balance) and
        beside it the work of all other stages on one micro-batch.
        """
        room = max(d.usable_bytes for d in self._cluster.devices) * (1 + SAME)
        fits = np.triu(self._formulator.least_bytes(costs, zero) <= room)
        if not fits.diagonal().all():
            return math.inf
        prefix = np.concatenate([[0.0], np.cumsum((costs.forward_s + costs.backward_s).min(axis=0))])
        held = np.where(fits, prefix[None, 1:] - prefix[:-1, None], 0.0)
        return float(max(0.0, prefix[-1] - held.max()))

    def _device_counts(self) -> list[int]:
        """How many devices to deal to the copies: all, or as many as come before a change of device type."""
        types = self._cluster.device_types[: self._formulator.devices]
        changes = (np.flatnonzero(types[1:] != types[:-1]) + 1).tolist()
        return [*(changes if len(changes) <= MOST_TYPE_CHANGES else ()), len(types)]

    def _settle(self, task: _Task, costs: BlockCosts) -> None:
        cutoff_s = self._best_s * (1 + (SLACK if task.slice_devices <= SLACK_UP_TO else 0.0))
        if task.bound_s >= cutoff_s:
            outcome = Outcome.INFEASIBLE if math.isinf(task.bound_s) else Outcome.BOUNDED
            self._note(task, outcome, task.bound_s)
            return
        if self._alike[0] != task.key:
            self._alike = (task.key, [])
        alike = self._alike[1]
        for other, bound_s in alike:
            if (other.schedule, task.schedule, other.zero) == ("1f1b", "gpipe", task.zero):
                self._note(task, Outcome.DOMINATED, bound_s)
                return
        problem = self._formulator.problem(
            costs, copies=task.copies, schedule=task.schedule, zero=task.zero, slice_devices=task.slice_devices
        )
        better_s = next((bound_s for other, bound_s in alike if _covers(other, problem)), None)
        if better_s is not None:
            self._note(task, Outcome.DOMINATED, better_s)
            alike.append((problem, better_s))
            return
        solution = self._solve(problem, self._judge(costs), cutoff_s=cutoff_s, keep=KEEP)
        for decision, evaluation in solution.found:
            self._remember(decision, evaluation)
        outcome = Outcome.INFEASIBLE if math.isinf(solution.bound_s) else Outcome.SOLVED
        self._note(task, outcome, solution.bound_s, solution)
        alike.append((problem, solution.bound_s))

    def _judge(self, costs: BlockCosts) -> Judge:
        return lambda decision: evaluate(costs, self._cluster, self._job, decision)

    def _remember(self, decision: Decision, evaluation: Evaluation) -> None:
        self._known.setdefault(decision, evaluation)
        self._best_s = min(self._best_s, evaluation.iteration_s)

    def _note(self, task: _Task, outcome: Outcome, bound_s: float, solution: Solution | None = None) -> None:
        best_s = solution.found[0][1].iteration_s if solution and solution.found else math.inf
        states = solution.states if solution else 0
        self._explored.append(
            Explored(task.micro_batch, task.copies, task.schedule, task.zero, outcome, bound_s, best_s, states)
        )

    def _bound(self) -> float:
        return min((e.bound_s for e in self._explored), default=math.inf)

    def _assemble(self, priced: list[BlockCosts], trivial: tuple[Candidate, ...]) -> Answer:
        costs_of = {costs.micro_batch: costs for costs in priced}
        found: dict[Decision, Evaluation] = {}
        for decision, evaluation in sorted(self._known.items(), key=lambda e: (e[1].iteration_s, repr(e[0])))[
            : 3 * KEEP
        ]:
            simple = simplified(decision, evaluation, self._judge(costs_of[decision.micro_batch]))
            found.setdefault(*simple)
        ordered = sorted(found.items(), key=lambda e: (e[1].iteration_s, len(e[0].stages), repr(e[0])))
        candidates = [Candidate("best" if k == 0 else f"runner-up {k}", *e) for k, e in enumerate(ordered[: KEEP + 1])]
        best_s = candidates[0].evaluation.iteration_s
        bound_s = min(best_s, self._bound())
        gap = (best_s - bound_s) / best_s if best_s else 0.0
        certificate = Certificate(bound_s, gap, self._space(priced), gap <= SAME)
        return Answer(candidates[0], tuple(candidates[1:]), trivial, certificate, tuple(self._explored))

    def _space(self, priced: list[BlockCosts]) -> str:
        """What the bound speaks of, in words."""
        job, devices = self._job, self._formulator.devices
        sizes = [costs.micro_batch for costs in priced]
        skipped = self._sizes[len(sizes) :]
        replicas = "any number of replicas that divides the micro-batches"
        if devices > ALL_DIVISORS_UP_TO:
            replicas += f" (in slices of more than {ALL_DIVISORS_UP_TO} devices: powers of two and the largest)"
        parts = [
            f"all cuts of {len(priced[0].parameter_elements)} blocks into stages"
            + (f" (at most {job.max_stages})" if job.max_stages else ""),
            f"on at most {devices} devices in line, dealt to copies of the pipeline in equal slices",
            f"{replicas} for each stage",
            f"recompute {job.recompute}, ZeRO {_either(job.zero)}, schedule {_either(job.schedules)}",
            f"micro-batch size {_either(sizes)}",
        ]
        last = len(priced[0].parameter_elements) - 1
        if any(tie.blocks != (0, last) for tie in priced[0].ties):
            parts.append(
                "the bound leaves out summing gradients of weights that other blocks than the first and last share"
            )
        if skipped:
            parts.append(f"sizes from {skipped[0]} on left out (a block does not fit, or one alone takes longer)")
        return "; ".join(parts)


def _preference(entry: tuple[Decision, Evaluation]) -> tuple[float, int, int, str]:
    """Faster first; of those that only rounding tells apart, fewer stages, then fewer copies."""
    decision, evaluation = entry
    return float(f"{evaluation.iteration_s:.9e}"), len(decision.stages), decision.copies, repr(decision)


def _either(values: tuple[object, ...] | list[int]) -> str:
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def micro_batch_sizes(job: Job) -> tuple[int, ...]:
    """Allowed micro-batch sizes that divide the global batch, ascending.

    Raises:
        JobError: there is none, or the job allows no schedule or ZeRO stage.
    """
    if job.global_batch < 1:
        raise JobError(f"a global batch of {job.global_batch} samples", hint="use at least one sample")
    if not job.schedules or not job.zero or not set(job.zero) <= {0, 1}:
        raise JobError("no schedule or no ZeRO stage to choose from", hint="allow a schedule, and ZeRO stage 0 or 1")
    divisors = [b for b in range(1, job.global_batch + 1) if job.global_batch % b == 0]
    if not job.micro_batches:
        return tuple(divisors)
    chosen = tuple(b for b in divisors if b in job.micro_batches)
    if not chosen:
        asked = max(1, *job.micro_batches)
        near = sorted(sorted(divisors, key=lambda b: (abs(math.log(b / asked)), b))[:6])
        raise JobError(
            f"no micro-batch size of {_either(job.micro_batches)} divides the global batch of {job.global_batch}",
            hint=f"use a micro-batch size of {_either(near)}, or another global batch",
        )
    return chosen


def simplified(decision: Decision, evaluation: Evaluation, judge: Judge) -> tuple[Decision, Evaluation]:
    """The same decision without what gains nothing: idle devices, sharding, recomputation, copies of a single stage."""

    def packed(d: Decision) -> Decision:
        return dataclasses.replace(d, slice_devices=0)

    def unsharded(d: Decision) -> Decision:
        return dataclasses.replace(d, zero=0)

    def kept(d: Decision) -> Decision:
        return dataclasses.replace(d, stages=tuple(dataclasses.replace(s, recompute=False) for s in d.stages))

    def merged(d: Decision) -> Decision:
        if len(d.stages) > 1 or d.slice_devices:
            return d
        only = dataclasses.replace(d.stages[0], replicas=d.copies * d.stages[0].replicas)
        return dataclasses.replace(d, stages=(only,), copies=1, micro_batches=d.copies * d.micro_batches)

    for simplify in (packed, unsharded, kept, merged):
        simpler = simplify(decision)
        if simpler != decision:
            verdict = judge(simpler)
            if verdict.feasible and verdict.iteration_s <= evaluation.iteration_s * (1 + SAME):
                decision, evaluation = simpler, verdict
    return decision, evaluation


def _compute_s(costs: BlockCosts) -> float:
    """Forward and backward of one micro-batch through all blocks on the fastest device of each."""
    return float((costs.forward_s + costs.backward_s).min(axis=0).sum())


def _covers(sharded: StageProblem, plain: StageProblem) -> bool:
    """Whether sharding the optimizer state costs no time at any place, whatever is hidden (it never costs memory)."""
    if sharded.schedule != plain.schedule or sharded.zero <= plain.zero:
        return False
    end_s, other_s = sharded.sync_s + sharded.update_s, plain.sync_s + plain.update_s
    return bool((end_s <= other_s * (1 + SAME)).all())

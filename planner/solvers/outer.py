"""The whole search: every mesh, micro-batch size, number of copies, schedule and ZeRO stage, best bound first.

Each combination is a `StageProblem`. Its bound is one of the time that its decisions take when they are played out, and
is worked out more closely whenever it is the least: compute over devices, then what stages need in memory and devices,
then a relaxation, then the shortest critical path. A problem whose bound stays below the best time known is solved for
its best decisions, by the critical path and by the closed form, and those that may be fastest are played.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from planner.errors import InfeasibleError
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.schedules import Schedule
from planner.solvers import chain_dp
from planner.solvers._account import Account, space_in_words
from planner.solvers._candidates import SAME, Candidates, TrivialPlans
from planner.solvers._frontier import Alike, Frontier, Looked, Task, by_zero, compute_s, covers
from planner.solvers._objectives import ClosedForm, LongestChain, Objective
from planner.solvers.critical_path import bounded, critical_s, settle
from planner.solvers.diagnosis import infeasible, limited, may_fit
from planner.solvers.shape_search import ShapeSearch, waits
from planner.solvers.shapes import SchedulesFor, by_engine, schedules_with
from planner.solvers.sizes import micro_batch_sizes
from planner.solvers.types import Answer, Judge, Key, Measure, Progress, Refined, Shardings, Solution
from planner.space import evaluate
from planner.space.asked import allows_single_devices
from planner.space.formulate import Formulator
from planner.space.jobs import settled
from planner.space.problem import StageProblem, joined
from planner.space.types import BlockCosts, Candidate, Job

CostsFor = Callable[[int], BlockCosts]
"""Block costs by micro-batch size; the caller remembers what it has priced."""

KEEP = 8
"""Runners-up that an answer carries at the most."""

SLACK = 0.02
"""By the closed form, decisions slower than the best by up to this fraction are still looked for."""

THOROUGH_UP_TO = 64
"""On more devices the closed form says which problems are solved, and only some of those that the bound depends on are
bounded more closely."""

MOST_BOUNDED = 4
"""How many these are."""

MOST_LIFTED = 6
"""Problems that bound others and are solved for the sake of their bound, the least first."""

NEAR = 1.2
"""A plan within this factor of perfectly balanced compute is good enough to begin with."""

MOST_TRIED = 2
"""Micro-batch sizes for which a first tensor parallel plan is looked for."""


def search(
    costs_for: CostsFor,
    cluster: Cluster,
    job: Job,
    *,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
    simulated_s: Measure | None = None,
    any_plan: bool = False,
    diagnose: bool = True,
    own: Schedule | None = None,
) -> Answer:
    """Find the fastest decision for a job on a cluster, and a bound that none is faster than.

    Args:
        costs_for: block costs by micro-batch size.
        cluster: the machine.
        job: what is to be trained, and which choices are allowed.
        shardings: ways to share operators among several ranks; without them every replica is one device.
        progress: told about every problem that is settled.
        simulated_s: plays a judged decision out (`planner.space.played_s`) and says how long an iteration
            takes; by default the critical path stands for it, which is no longer.
        any_plan: end with the first problem that has a decision, whether or not it is the fastest.
        diagnose: find out why nothing fits, and what would, where that is so.
        own: a schedule that no registry knows, which the job allows by its name.

    Raises:
        JobError: no allowed micro-batch size divides the global batch, which may also be too large, or the job leaves
            nothing to choose from.
        InfeasibleError: nothing fits; the message says what is in the way, and what would help.

    Memory use of larger micro-batches is taken to be no smaller: sizes beyond one of which a single block does not
    fit, or of which one micro-batch takes longer than the best plan, are not priced.
    """
    measure = simulated_s or critical_s
    run = _Search(costs_for, cluster, settled(job, cluster), shardings, progress, measure, schedules_with(own))
    return run.answer(any_plan=any_plan, diagnose=diagnose)


class _Search:
    def __init__(
        self,
        costs_for: CostsFor,
        cluster: Cluster,
        job: Job,
        shardings: Shardings | None,
        progress: Progress | None,
        simulated_s: Measure,
        schedule_of: SchedulesFor,
    ) -> None:
        self._sizes = micro_batch_sizes(job)
        self._lines, self._placed = by_engine(job, schedule_of)
        self._looked_at = self._lines
        self._costs_for, self._cluster, self._job, self._progress = costs_for, cluster, job, progress
        self._shardings = shardings
        self._shelves: dict[int, dict[int, BlockCosts]] = {}
        self._formulator = Formulator(cluster, job)
        self._account = Account()
        self._found = Candidates(simulated_s)
        self._settled = 0
        self._refined: dict[tuple[int, Key], Refined] = {}
        self._effort = math.inf if self._thorough else MOST_BOUNDED
        self._shapes = ShapeSearch(
            cluster, self._placed, schedule_of, self._shelves, self._found, self._offered, self._account.lower_beside
        )

    def answer(self, *, any_plan: bool, diagnose: bool) -> Answer:
        """Run the search."""
        trivial = TrivialPlans(self._cluster, self._job)
        priced = self._price(trivial)
        first = self._try_even_splits(priced, trivial)
        for candidate in trivial.candidates():
            if candidate.evaluation.feasible:
                self._found.add(candidate.decision, candidate.evaluation, play=self._thorough)
        alone, floors = priced if self._alone else [], self._floors()
        if not self._thorough:
            self._search_others(alone, floors, any_plan=any_plan)
        self._search_lines(alone, floors, first, any_plan=any_plan)
        self._search_others(alone, floors, any_plan=any_plan)
        if not self._found:
            if self._lines.schedules and (not diagnose or limited(self._job)):
                raise InfeasibleError("no plan fits within the job's limits", hint="lift one of them")
            raise self._nothing_fits(priced)
        if not any_plan and self._lines.schedules:
            self._look_closer()
            self._lift()
        return self._assemble(priced, trivial.candidates())

    def _search_lines(
        self,
        alone: Sequence[BlockCosts],
        floors: Sequence[tuple[BlockCosts, Key]],
        first: Sequence[BlockCosts],
        *,
        any_plan: bool,
    ) -> None:
        """Search the schedules whose stages stand in line, if any is allowed: on few devices all that may be the
        fastest, on many what the closed form prefers, and bounds as far as that of everything depends on them."""
        if not self._lines.schedules:
            return
        if not self._thorough:
            self._prefer(self._frontier(ClosedForm(), alone, floors, self._offered, first), any_plan=any_plan)
            first = []
        refine = self._refine if self._thorough else self._refined_before
        self._prove(self._frontier(LongestChain(), alone, floors, refine, first), any_plan=any_plan)

    def _search_others(
        self, alone: Sequence[BlockCosts], floors: Sequence[tuple[BlockCosts, Key]], *, any_plan: bool
    ) -> None:
        """Search other schedules, once: where there are no others, or where the pipelines that are known wait for
        long; on many devices before those, which then have less to do."""
        others, lines = self._placed.schedules, self._lines.schedules
        if not others or self._looked_at is self._job or (any_plan and self._found):
            return
        if lines and math.isfinite(self._found.best_s):
            best = self._found.best()
            if any_plan or len(best.stages) == 1 or not waits(best, self._judge(best.micro_batch)(best)):
                return
        self._looked_at = self._job
        thorough = self._thorough and bool(lines)
        self._shapes.run(alone, floors, any_plan=any_plan, thorough=thorough, report=self._report)

    def _nothing_fits(self, priced: list[BlockCosts]) -> InfeasibleError:
        """Why nothing fits: of schedules whose stages stand in line in general, else what came nearest."""
        if self._lines.schedules:
            return infeasible(self._leanest(priced), self._cluster, self._job, self._costs_for)
        return self._shapes.error(priced[-1].micro_batch if len(priced) < len(self._sizes) else 0)

    def _leanest(self, priced: list[BlockCosts]) -> list[BlockCosts]:
        """Costs with the least memory among those of the smallest micro-batch: what comes nearest to fitting."""
        size = self._sizes[0]
        known = [c for c in self._shelves.get(size, {}).values() if c.sharding > 0]
        if self._shardings is not None:
            known += [c for c in self._shardings.even_split(size) if c.ranks > 1]
            self._offer(size, known)
        leanest = sorted(known, key=lambda c: (float(c.parameter_elements.sum()), float(c.saved_bytes[0, -1])))[:1]
        return leanest + (priced if self._alone or not leanest else [])

    @property
    def _alone(self) -> bool:
        """Whether a replica may be a single device."""
        return allows_single_devices(self._job)

    def _price(self, trivial: TrivialPlans) -> list[BlockCosts]:
        """Costs of all sizes worth looking at, smallest first; the trivial plans are priced on the way."""
        priced: list[BlockCosts] = []
        for size in self._sizes:
            costs = self._costs_for(size)
            if priced and compute_s(costs) >= trivial.best_s():
                self._account.lower(trivial.best_s())
                break
            if priced and not self._any_block_fits(costs):
                break
            priced.append(costs)
            self._offer(size, [costs])
            trivial.add(costs)
        return priced

    def _try_even_splits(self, priced: list[BlockCosts], trivial: TrivialPlans) -> list[BlockCosts]:
        """Tensor parallel plans by rule, where none without comes near what compute alone takes; their costs."""
        tried: list[BlockCosts] = []
        if self._shardings is None or not priced or not self._lines.schedules:
            return tried
        near_s = NEAR * min(self._job.global_batch / c.micro_batch * compute_s(c) for c in priced)
        for size in self._sizes[:MOST_TRIED]:
            if trivial.best_s() <= near_s / self._formulator.devices():
                break
            for costs in self._shardings.even_split(size):
                self._offer(size, [costs])
                trivial.add_sharded(costs)
                tried.append(costs)
        return tried

    def _floors(self) -> list[tuple[BlockCosts, Key]]:
        """Least costs of shardings, by mesh and by size as far as these are worth looking at."""
        found: list[tuple[BlockCosts, Key]] = []
        ended: set[Key] = set()
        limit_s = max(self._found.best_s if self._thorough else 0.0, self._found.best_form_s)
        if self._shardings is None:
            return found
        for size in self._sizes:
            floors = [(f, key) for f, key in self._shardings.floors(size) if key not in ended]
            slow = {key for f, key in floors if compute_s(f) >= limit_s}
            self._account.lower(limit_s if slow else math.inf)
            ended |= slow | {key for f, key in floors if not self._any_block_fits(f)}
            found += [(f, key) for f, key in floors if key not in ended]
            if len(ended) >= len(floors) and all(key in ended for _, key in floors):
                break
        return found

    def _frontier(
        self,
        objective: Objective,
        alone: Sequence[BlockCosts],
        floors: Sequence[tuple[BlockCosts, Key]],
        refine: Callable[[int, Key], Refined | None],
        first: Sequence[BlockCosts],
    ) -> Frontier:
        return Frontier(self._formulator, self._cluster, self._lines, objective, alone, floors, refine, first)

    def _refine(self, micro_batch: int, key: Key) -> Refined:
        """What a floor stands for; the judge knows shardings that are worked out from then on."""
        if self._shardings is None or (micro_batch, key) in self._refined:
            return self._refined.get((micro_batch, key), ((), (), None))
        closer, found = self._shardings.refine(micro_batch, key)
        least = self._shardings.least(micro_batch, key) if found else None
        self._offer(micro_batch, [*found, *([] if least is None else [least])])
        self._refined[micro_batch, key] = closer, found, least
        return closer, found, least

    def _offered(self, micro_batch: int, key: Key) -> Refined:
        """The same, where only decisions are looked for: without what bounds those that are not offered."""
        closer, found, _ = self._refine(micro_batch, key)
        return closer, found, None

    def _offer(self, micro_batch: int, costs: Sequence[BlockCosts]) -> None:
        """Let the judge know shardings."""
        self._shelves.setdefault(micro_batch, {}).update((each.sharding, each) for each in costs)

    def _refined_before(self, micro_batch: int, key: Key) -> Refined | None:
        """The same, if it has been worked out, or effort is left."""
        if (micro_batch, key) not in self._refined and self._effort > 0:
            self._effort -= 1
            self._refine(micro_batch, key)
        return self._refined.get((micro_batch, key))

    def _any_block_fits(self, costs: BlockCosts) -> bool:
        """Whether the activations of one micro-batch in each block alone leave room on the largest device."""
        kept = np.diagonal(costs.saved_bytes) + costs.workspace_bytes
        return bool(fits(kept, max(d.usable_bytes for d in self._cluster.devices)).all())

    def _report(self, frontier: Frontier | None = None, settled: int = 0) -> None:
        """Tell how far the search is."""
        self._settled += settled
        if self._progress is not None:
            best_s, done = self._found.best_s, self._settled + self._account.settled + self._shapes.looked
            total, ahead_s = (done, best_s) if frontier is None else (frontier.count, frontier.bound_s)
            self._progress(done, total, best_s, min(best_s, self._account.lowest_s, ahead_s))

    @property
    def _thorough(self) -> bool:
        """Whether all problems that may hold a faster plan are solved for their critical paths."""
        return self._formulator.devices() <= THOROUGH_UP_TO

    @property
    def _cutoff_s(self) -> float:
        """Problems none of whose decisions is faster are not solved for their critical paths."""
        return self._found.best_s if self._thorough else min(self._found.best_s, self._account.bound_s)

    def _prefer(self, frontier: Frontier, *, any_plan: bool) -> None:
        """Find the decisions that the closed form prefers."""
        while not (any_plan and self._found):
            alike = frontier.pop(self._found.best_form_s)
            if not isinstance(alike, Alike):
                break
            solved: list[StageProblem] = []
            for tasks in by_zero(alike):
                problem = self._worth_solving(frontier, alike, tasks[0], self._found.best_form_s)
                if problem is not None and not any(covers(other, problem) for other in solved):
                    solved.append(problem)
                    judge = self._judge(problem.micro_batch)
                    solution = chain_dp.solve(problem, judge, cutoff_s=self._found.best_form_s, keep=KEEP)
                    self._add(solution, play=False)
            self._report(frontier, len(alike.tasks))
        self._found.play(KEEP + 1)

    def _look_closer(self) -> None:
        """Look for decisions in more of the ways in which the fastest that is known shares operators."""
        best = self._found.best()
        number = max(stage.sharding for stage in best.stages)
        if self._shardings is not None and number and best.schedule in self._lines.schedules:
            finer = self._shardings.finer(best.micro_batch, number)
            self._offer(best.micro_batch, finer)
            self._prefer(self._frontier(ClosedForm(), (), (), self._offered, finer), any_plan=False)

    def _prove(self, frontier: Frontier, *, any_plan: bool) -> None:
        """Bound the simulated time of all decisions, and find those that come closest."""
        while not (any_plan and self._found):
            entry = frontier.pop(self._cutoff_s)
            self._account.lower(frontier.left_out_s)
            if entry is None:
                break
            if isinstance(entry, Looked):
                self._solve(entry)
            else:
                self._look(frontier, entry)
            self._report(frontier, 0)

    def _worth_solving(self, frontier: Frontier, alike: Alike, task: Task, cutoff_s: float) -> StageProblem | None:
        """A problem as numbers, if it can hold a decision below a cutoff; without one, any decision that fits."""
        if task.bound_s >= cutoff_s or not frontier.reach(task, alike.costs).possible(cutoff_s):
            return None
        problem = self._formulated(task, alike.shelf)
        return problem if math.isfinite(cutoff_s) or may_fit(problem) else None

    def _look(self, frontier: Frontier, alike: Alike) -> None:
        """Bound problems that differ in schedule, ZeRO stage and sharding only; what may win is put back.

        Of one ZeRO stage the first has every decision of the others, in no more memory, and waits no longer.
        """
        looked: list[StageProblem] = []
        only = alike.only_bounds
        for tasks in by_zero(alike):
            cutoff_s = self._cutoff_s
            problem = self._worth_solving(frontier, alike, tasks[0], cutoff_s)
            if problem is None:
                self._account.settle(len(tasks), max(tasks[0].bound_s, cutoff_s), only_bounds=only)
            elif self._effort <= 0:
                self._account.settle(len(tasks), tasks[0].bound_s, only_bounds=only)
            elif any(covers(other, problem) for other in looked):
                self._account.settle(len(tasks), math.inf)
            else:
                looked.append(problem)
                self._effort -= 1
                known = bounded(problem, cutoff_s)
                if known.bound_s >= cutoff_s:
                    self._account.settle(len(tasks), known.bound_s, only_bounds=only)
                    continue
                for task in tasks:
                    frontier.put_back(Looked(task, alike.shelf, known, alike.only_bounds))

    def _formulated(self, task: Task, shelf: Sequence[BlockCosts]) -> StageProblem:
        return joined([
            self._formulator.problem(
                costs, copies=task.copies, schedule=task.schedule, zero=task.zero, slice_devices=task.slice_devices
            )
            for costs in shelf
        ])  # fmt: skip

    def _solve(self, entry: Looked) -> None:
        """Solve a problem that may hold the fastest decision; one that only bounds others may be lifted later."""
        task, known, cutoff_s = entry.task, entry.known, self._cutoff_s
        if entry.bound_s >= cutoff_s or (entry.only_bounds and not self._thorough):
            self._account.settle(1, entry.bound_s, only_bounds=entry.only_bounds)
            return
        if entry.only_bounds:
            self._account.settled += 1
            self._account.open.append(entry)
            return
        if task.schedule != known.problem.schedule:
            known = known.ordered(self._formulated(task, entry.shelf))
        shortest = settle(known, self._judge(task.micro_batch), keep=KEEP, cutoff_s=cutoff_s)
        self._account.settle(1, max(entry.bound_s, shortest.bound_s))
        self._add(shortest)
        self._solve_beside(known.problem, shortest.bound_s)

    def _lift(self) -> None:
        """Bound more closely what bounds others, as long as the bound of all depends on it."""
        left = sorted(self._account.open, key=lambda entry: (entry.bound_s, entry.task.sharding))
        for entry in left[:MOST_LIFTED]:
            task, known, least_s = entry.task, entry.known, entry.bound_s
            if least_s < self._account.bound_s:
                if task.schedule != known.problem.schedule:
                    known = known.ordered(self._formulated(task, entry.shelf))
                solved = settle(known, self._judge(task.micro_batch), keep=1, cutoff_s=self._found.best_s)
                least_s = max(least_s, solved.bound_s)
            self._account.lower(least_s, only_bounds=True)
        self._account.lower(min((entry.bound_s for entry in left[MOST_LIFTED:]), default=math.inf), only_bounds=True)

    def _solve_beside(self, problem: StageProblem, shortest_s: float) -> None:
        """Look for decisions that may be faster than the one with the shortest critical path, which says little of
        stages with unequal replicas: those that the closed form prefers, and those with equal replicas."""
        unlike = len(np.unique(problem.replicas)) > 1 and not problem.uniform
        if not self._thorough or not unlike or shortest_s >= self._found.best_s * (1 - SAME):
            return
        judge = self._judge(problem.micro_batch)
        self._add(chain_dp.solve(problem, judge, cutoff_s=self._found.best_form_s * (1 + SLACK), keep=KEEP))
        equal = dataclasses.replace(problem, uniform=True)
        self._add(settle(bounded(equal, self._found.best_s), judge, keep=1))

    def _add(self, solution: Solution, *, play: bool = True) -> None:
        for decision, evaluation in solution.found:
            self._found.add(decision, evaluation, play=play)

    def _judge(self, micro_batch: int) -> Judge:
        shelf = self._shelves[micro_batch]
        return lambda decision: evaluate(shelf, self._cluster, self._job, decision)

    def _space(self, priced: list[BlockCosts]) -> str:
        sizes = [costs.micro_batch for costs in priced]
        placed, skipped = () if self._looked_at is self._lines else self._placed.schedules, self._sizes[len(sizes) :]
        words = space_in_words(self._looked_at, self._formulator.devices(), priced[0], sizes, skipped, placed)
        return words if self._shardings is None else f"{words}; {self._shardings.in_words()}"

    def _assemble(self, priced: list[BlockCosts], trivial: tuple[Candidate, ...]) -> Answer:
        candidates = self._found.fastest(KEEP + 1, self._judge)
        best_s = self._found.best_s
        certificate = self._account.certificate(best_s, self._space(priced))
        played = tuple(self._found.timed(candidate) for candidate in trivial)
        return Answer(candidates[0], tuple(candidates[1:]), played, certificate)

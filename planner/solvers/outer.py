"""Branch and bound over every mesh, micro-batch size, number of copies, schedule and ZeRO stage, lowest bound first.

Each combination is a `StageProblem`. Its bound is a lower bound on the simulated time of its decisions. Whenever it is
the lowest of all, it is tightened: from compute over devices to the memory and devices that stages need, to a
relaxation, to the shortest critical path. A problem whose bound stays below the best known time is solved, by the
critical path and by the closed form, and its decisions that may be the fastest are simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from planner.errors import InfeasibleError
from planner.hardware.types import Cluster
from planner.schedules import Schedule
from planner.solvers import chain_dp
from planner.solvers._account import (
    MAX_BOUNDED,
    MAX_OFFLOADED,
    MAX_PRICED_BESIDE,
    MAX_RAISED,
    MAX_RETRIED,
    MAX_RUNNERS_UP,
    MAX_SIZES_TRIED,
    NEAR,
    SLACK,
    THOROUGH_UP_TO,
    Account,
    space_in_words,
)
from planner.solvers._candidates import SAME, Candidates, TrivialPlans
from planner.solvers._frontier import Frontier, OpenProblem, ProblemGroup, SearchTask, by_zero, compute_s, covers
from planner.solvers._known_costs import KnownCosts
from planner.solvers._objectives import ClosedForm, LongestChain
from planner.solvers.critical_path import BoundedProblem, bounded, critical_s, solve_bounded
from planner.solvers.diagnosis import infeasible, limited, may_fit, state_fits
from planner.solvers.shape_search import ShapeSearch, waits
from planner.solvers.shapes import SchedulesFor, by_engine, schedules_with
from planner.solvers.sizes import micro_batch_sizes
from planner.solvers.types import (
    Answer,
    CostsFor,
    Judge,
    KnownPlan,
    Measure,
    Progress,
    Solution,
)
from planner.space import evaluate
from planner.space.formulate import Formulator
from planner.space.job_options import allows_single_devices
from planner.space.jobs import settled
from planner.space.pricer import FloorKey, Floors, Pricer, Refinement
from planner.space.problem import StageProblem, joined
from planner.space.recompute_choices import allows_some_layers, offload_choices
from planner.space.types import BlockCosts, Candidate, Job


def search(
    costs_for: CostsFor,
    cluster: Cluster,
    job: Job,
    *,
    shardings: Pricer | None = None,
    progress: Progress | None = None,
    simulated_s: Measure | None = None,
    any_plan: bool = False,
    diagnose: bool = True,
    own: Schedule | None = None,
    known: Sequence[KnownPlan] = (),
    beside: bool = False,
    limit_s: float = math.inf,
) -> Answer:
    """Find the fastest decision for a job on a cluster, with a lower bound on the time of all decisions.

    Args:
        costs_for: block costs by micro-batch size.
        cluster: the cluster.
        job: what is trained, and which choices are allowed.
        shardings: shardings of operators over several ranks; without them every replica is one device.
        progress: called after each closed problem.
        simulated_s: simulates an evaluated decision (`planner.space.played_s`) and returns its iteration time; by
            default the critical path, which is a lower bound on it.
        any_plan: stop at the first problem that has a decision, whether or not it is the fastest.
        diagnose: if nothing fits, find out why and what would.
        own: an unregistered schedule, which the job allows by its name.
        known: simulated decisions to begin with, which need not be of the space; the answer is no slower.
        beside: the answer stands beside the known ones, so that a few shardings are priced that may be faster
            (`MAX_PRICED_BESIDE`), and no trivial plans. The bound holds for the others, too.
        limit_s: seconds of a plan that is known elsewhere: only faster ones are looked for, as if it were the best.

    Raises:
        JobError: no allowed micro-batch size divides the global batch, or the job leaves no choice.
        InfeasibleError: nothing fits; the message says what exceeds memory, and what would help.

    Larger micro-batches are assumed to need no less memory: sizes are not priced beyond one for which a single block
    does not fit, or for which one micro-batch takes longer than the best plan.
    """
    candidates = Candidates(simulated_s or critical_s, limit_s)
    run = _Search(
        costs_for, cluster, settled(job, cluster), shardings, progress, candidates, schedules_with(own), beside
    )
    for candidate, costs in known:
        run.known.add(candidate.decision.micro_batch, costs)
        seconds = candidate.simulated_s
        candidates.add(candidate.decision, candidate.evaluation, least_s=seconds, seconds=seconds)
    return run.answer(any_plan=any_plan, diagnose=diagnose)


class _Search:
    def __init__(
        self,
        costs_for: CostsFor,
        cluster: Cluster,
        job: Job,
        shardings: Pricer | None,
        progress: Progress | None,
        candidates: Candidates,
        schedule_of: SchedulesFor,
        beside: bool,
    ) -> None:
        self._sizes, self._beside = micro_batch_sizes(job), beside
        self._closed_form_job, self._shapes_job = by_engine(job, schedule_of)
        self._searched_job = self._closed_form_job
        self._costs_for, self._cluster, self._job, self._progress = costs_for, cluster, job, progress
        self._shardings = shardings
        self._closest: Callable[[Floors], Floors] = tuple if shardings is None else shardings.closest
        self.known = KnownCosts(shardings, MAX_PRICED_BESIDE if beside else math.inf)
        self._formulator = Formulator(cluster, job)
        self._account = Account()
        self._candidates = candidates
        self._closed, self._tried_layers, self._tried_offload = 0, False, False
        self._effort = math.inf if self._thorough else MAX_BOUNDED
        self._shapes = ShapeSearch(
            cluster,
            self._shapes_job,
            schedule_of,
            self.known.by_size,
            self._candidates,
            self.known.refine,
            self._account.lower_other,
        )

    def answer(self, *, any_plan: bool, diagnose: bool) -> Answer:
        """Run the search and assemble its answer."""
        self._account.lower(self._candidates.best_s)
        trivial = TrivialPlans(self._cluster, self._job, self._candidates.best_form_s if self._beside else math.inf)
        priced, slower_s = self.known.price(self._sizes, self._costs_for, self._cluster, trivial)
        self._account.lower(slower_s)
        held = not self._closed_form_job.schedules or state_fits(priced[0], self._cluster, self._job)
        first = self._even_splits(priced, trivial) if held else []
        for candidate in trivial.candidates():
            if candidate.evaluation.feasible:
                self._candidates.add(candidate.decision, candidate.evaluation, play=self._thorough)
        if held:
            single_device, floors = priced if allows_single_devices(self._job) else [], self._floors()
            if not self._thorough:
                self._search_shapes(single_device, floors, any_plan=any_plan)
                self._search_by_closed_form(single_device, floors, first, any_plan=any_plan)
            if self._thorough or not self._beside:
                self._search_by_critical_path(single_device, floors, first, any_plan=any_plan)
            if self._beside:
                self._keep_in_hosts(any_plan=any_plan)
            self._search_shapes(single_device, floors, any_plan=any_plan)
            if self._beside and not self._thorough:  # only bounds, up to what the others found
                self._search_by_critical_path(single_device, floors, first, any_plan=any_plan)
            if not self._beside and (not any_plan or (diagnose and not self._candidates)):
                self._keep_in_hosts(any_plan=any_plan)
        if not self._candidates:
            if self._closed_form_job.schedules and (not diagnose or limited(self._job)):
                raise InfeasibleError("no plan fits within the job's limits", hint="lift one of them")
            raise self._nothing_fits(priced)
        if not any_plan and self._closed_form_job.schedules:
            self._look_closer()
            self._recompute_fewer_layers()
            self._raise_bound()
        return self._assemble(priced, trivial.candidates())

    def _search_shapes(self, single_device: Sequence[BlockCosts], floors: Floors, *, any_plan: bool) -> None:
        """Search the other schedules by shape, at most once.

        They are searched if the job allows no schedule with a closed form, if the best pipeline so far waits for much
        of its time, or if by its estimate, of floors that may not be priced too, one is faster than the best so far.
        """
        other_schedules, closed_form_schedules = self._shapes_job.schedules, self._closed_form_job.schedules
        if not other_schedules or self._searched_job is self._job or (any_plan and self._candidates):
            return
        if closed_form_schedules and self._candidates:
            best = self._candidates.best()
            waiting = len(best.stages) > 1 and waits(best, self._judge(best.micro_batch)(best))
            groups = [(costs,) for costs in single_device] + [
                tuple(priced) for _, priced in self.known.refined.values()
            ]
            groups += [(floor,) for floor, _ in floors if self.known.all_refined]
            if not waiting and self._shapes.estimate_s(filter(None, groups)) >= self._candidates.best_s:
                return
        self._searched_job = self._job
        thorough, floors = self._thorough and bool(closed_form_schedules), self._closest(floors)
        self._shapes.run(single_device, floors, any_plan=any_plan, thorough=thorough, report=self._report)

    def _nothing_fits(self, priced: list[BlockCosts]) -> InfeasibleError:
        """The error to raise if nothing fits, diagnosed for schedules with a closed form if there are any."""
        if self._closed_form_job.schedules:
            leanest = self.known.leanest(self._sizes[0])
            costs = leanest + (priced if allows_single_devices(self._job) or not leanest else [])
            return infeasible(costs, self._cluster, self._job, self._costs_for)
        return self._shapes.error(priced[-1].micro_batch if len(priced) < len(self._sizes) else 0)

    def _even_splits(self, priced: list[BlockCosts], trivial: TrivialPlans) -> list[BlockCosts]:
        """Costs of even tensor parallel splits, priced if no trivial plan is near balanced compute."""
        if not priced or not self._closed_form_job.schedules or self._beside:
            return []
        least_s = min(self._job.global_batch / c.micro_batch * compute_s(c) for c in priced)
        near_s = NEAR * least_s / self._formulator.devices()
        return self.known.even_splits(self._sizes[:MAX_SIZES_TRIED], near_s, trivial)

    def _floors(self) -> Floors:
        """Floors of shardings with their keys, by micro-batch size, as far as their sizes may beat the best time."""
        limit_s = max(self._candidates.best_s if self._thorough else 0.0, self._candidates.best_form_s)
        floors, any_slow = self.known.floors(self._sizes, self._cluster, limit_s)
        self._account.lower(limit_s if any_slow else math.inf)
        return floors

    def _least(self, micro_batch: int, key: FloorKey) -> BlockCosts | None:
        """`Pricer.least` made known to the judge."""
        if self._shardings is None:
            return None
        least = self._shardings.least(micro_batch, key)
        self.known.add(micro_batch, [] if least is None else [least])
        return least

    def _refine_within_effort(self, micro_batch: int, key: FloorKey) -> Refinement | None:
        """`KnownCosts.refine` if the floor is priced already or effort is left; else None."""
        if (micro_batch, key) not in self.known.refined and self._effort > 0:
            self._effort -= 1
            self.known.refine(micro_batch, key)
        return self.known.refined.get((micro_batch, key))

    def _report(self, frontier: Frontier | None = None, closed_count: int = 0) -> None:
        """Report progress, after so many more problems were closed."""
        self._closed += closed_count
        if self._progress is not None:
            best_s, done = self._candidates.best_s, self._closed + self._account.closed + self._shapes.shapes_seen
            total, ahead_s = (done, best_s) if frontier is None else (frontier.count, frontier.bound_s)
            self._progress(done, total, best_s, min(best_s, self._account.lowest_s, ahead_s))

    @property
    def _thorough(self) -> bool:
        """True if all problems that may hold a faster plan are solved by critical path (`THOROUGH_UP_TO`)."""
        return self._formulator.devices() <= THOROUGH_UP_TO

    @property
    def _cutoff_s(self) -> float:
        """Bound from which problems are not solved by critical path, in seconds."""
        return self._candidates.best_s if self._thorough else min(self._candidates.best_s, self._account.bound_s)

    def _search_by_closed_form(
        self,
        single_device: Sequence[BlockCosts],
        floors: Floors,
        first: Sequence[BlockCosts],
        *,
        any_plan: bool,
        keep: int = MAX_RUNNERS_UP,
    ) -> None:
        """Find the fastest decisions by the closed form, so many of a problem, and simulate the best of them."""
        if not self._closed_form_job.schedules:
            return
        setting = self._formulator, self._cluster, self._closed_form_job
        closest, refine = self._closest(floors), self.known.refine_or_drop
        frontier = Frontier(*setting, ClosedForm(), single_device, closest, refine, first)
        while not (any_plan and self._candidates):
            group = frontier.pop(self._candidates.best_form_s)
            if not isinstance(group, ProblemGroup):
                break
            solved: list[StageProblem] = []
            for tasks in by_zero(group):
                problem = self._worth_solving(frontier, group, tasks[0], self._candidates.best_form_s)
                if problem is not None and not any(covers(other, problem) for other in solved):
                    solved.append(problem)
                    judge = self._judge(problem.micro_batch)
                    cutoff_s = self._candidates.best_form_s
                    self._add(chain_dp.solve(problem, judge, cutoff_s=cutoff_s, keep=keep), play=False)
            self._report(frontier, len(group.tasks))
        self._candidates.play(MAX_RUNNERS_UP + 1)

    def _look_closer(self) -> None:
        """Search further shardings that stages can mix with the sharding of the best decision."""
        best = self._candidates.best()
        number = max(stage.sharding for stage in best.stages)
        if self._shardings is not None and number and best.schedule in self._closed_form_job.schedules:
            finer = self._shardings.finer(best.micro_batch, number)
            self.known.add(best.micro_batch, finer)
            self._search_by_closed_form((), (), finer, any_plan=False)

    def _recompute_fewer_layers(self) -> None:
        """Search plans that recompute the first layers of a stage, with the shardings of the best plans that recompute.

        Their times are no part of the bound: it speaks of stages that recompute all layers, modules or nothing.
        """
        known = self._candidates.recomputed_shardings(MAX_RETRIED if allows_some_layers(self._job) else 0)
        costs = self.known.of(known)
        if costs:
            self._tried_layers = True
            plain, self._formulator = self._formulator, Formulator(self._cluster, self._job, some_layers=True)
            self._search_by_closed_form((), (), costs, any_plan=False)
            self._formulator = plain

    def _keep_in_hosts(self, *, any_plan: bool) -> None:
        """Search plans that keep activations in the host's memory, where those of a model fill more than a device.

        Their times are no part of the bound.
        """
        plain, job, structure = self._formulator, self._closed_form_job, self._job.structure
        zero = tuple(stage for stage in job.zero if stage in (structure.offload_zero or job.zero))
        if not structure.offloads or not job.schedules or not zero:
            return
        self._closed_form_job = dataclasses.replace(job, zero=zero)
        least_ranks = 1 if allows_single_devices(self._job) else 2
        able = [c for c in self.known.priced if c.ranks >= least_ranks]
        ample = [c for c in sorted(able, key=self._ideal_s) if self._ideal_s(c) < self._candidates.best_form_s]
        again = self.known.of(self._candidates.recomputed_shardings(MAX_OFFLOADED))
        first = [*again, *itertools.islice((c for c in ample if plain.exceeds(c, max(zero))), MAX_OFFLOADED)]
        for choice in offload_choices(self._job, first[0]) if first else ():
            self._tried_offload = True
            self._formulator = plain.offloading(choice)
            self._search_by_closed_form((), (), first, any_plan=any_plan, keep=1)
        self._formulator, self._closed_form_job = plain, job

    def _ideal_s(self, costs: BlockCosts) -> float:
        """Seconds of the global batch with compute spread as evenly over all devices as one stage or more allow."""
        turns = self._job.global_batch / costs.micro_batch / max(1, self._formulator.devices(costs.ranks))
        return (math.ceil(turns) if self._job.max_stages == 1 else turns) * compute_s(costs)

    def _search_by_critical_path(
        self, single_device: Sequence[BlockCosts], floors: Floors, first: Sequence[BlockCosts], *, any_plan: bool
    ) -> None:
        """Bound the simulated time of all decisions by critical path, and find the decisions that reach the bound.

        On few devices every problem that may hold the fastest decision is solved. On many devices the closed form
        picked the problems to solve, and only those that the overall bound depends on are bounded.
        """
        if not self._closed_form_job.schedules:
            return
        first, refine = (first, self.known.refine) if self._thorough else ((), self._refine_within_effort)
        setting = self._formulator, self._cluster, self._closed_form_job
        frontier = Frontier(*setting, LongestChain(), single_device, self._closest(floors), refine, first, self._least)
        while not (any_plan and self._candidates):
            entry = frontier.pop(self._cutoff_s)
            self._account.lower(frontier.left_out_s)
            if entry is None:
                break
            if isinstance(entry, OpenProblem):
                self._solve(frontier, entry)
            else:
                self._bound_group(frontier, entry)
            self._report(frontier, 0)

    def _worth_solving(
        self, frontier: Frontier, group: ProblemGroup, task: SearchTask, cutoff_s: float
    ) -> StageProblem | None:
        """Formulate a problem if it may have a decision below a cutoff (if that is infinite: one that fits)."""
        if task.bound_s >= cutoff_s or not frontier.may_reach(task, group.costs, cutoff_s):
            return None
        problem = self._problem(task, group.shardings)
        return problem if math.isfinite(cutoff_s) or may_fit(problem) else None

    def _bound_group(self, frontier: Frontier, group: ProblemGroup) -> None:
        """Bound the problems of a group; those that may beat the cutoff are queued again.

        Among the tasks of one ZeRO stage, the first has every decision of the others, needs no more memory and waits no
        longer, so its bound serves for all of them.
        """
        only, bounded_before = group.only_bounds, list[StageProblem]()
        for tasks in by_zero(group):
            cutoff_s = self._cutoff_s
            problem = self._worth_solving(frontier, group, tasks[0], cutoff_s)
            if problem is None:
                self._account.close(len(tasks), max(tasks[0].bound_s, cutoff_s), only_bounds=only)
            elif self._effort <= 0:
                self._account.close(len(tasks), tasks[0].bound_s, only_bounds=only)
            elif any(covers(other, problem) for other in bounded_before):
                self._account.close(len(tasks), math.inf)
            else:
                bounded_before.append(problem)
                self._effort -= 1
                bounded_first = bounded(problem, cutoff_s)
                if bounded_first.bound_s >= cutoff_s:
                    self._account.close(len(tasks), bounded_first.bound_s, only_bounds=only)
                    continue
                for task in tasks:
                    frontier.put_back(OpenProblem(task, group.shardings, bounded_first, group.only_bounds))

    def _problem(self, task: SearchTask, shardings: Sequence[BlockCosts]) -> StageProblem:
        """Formulate a task; every stage picks one of the shardings."""
        return joined([
            self._formulator.problem(
                costs, copies=task.copies, schedule=task.schedule, zero=task.zero, slice_devices=task.slice_devices
            )
            for costs in shardings
        ])  # fmt: skip

    def _solve(self, frontier: Frontier, entry: OpenProblem) -> None:
        """Solve a problem that may hold the fastest decision; one of unpriced shardings is left for `_raise_bound`.

        It is split first, and put back if that raises its bound above those of others.
        """
        task, cutoff_s = entry.task, self._cutoff_s
        if entry.bound_s < cutoff_s:
            entry.bounded.lowest(cutoff_s, math.inf if entry.only_bounds else frontier.next_s)
        if frontier.next_s < entry.bound_s < cutoff_s:
            frontier.put_back(entry)
            return
        if entry.bound_s >= cutoff_s or (entry.only_bounds and not self._thorough):
            self._account.close(1, entry.bound_s, only_bounds=entry.only_bounds)
            return
        if entry.only_bounds:
            self._account.closed += 1
            self._account.open.append(entry)
            return
        bounded_problem = self._bounded_for_schedule(entry)
        shortest = solve_bounded(bounded_problem, self._judge(task.micro_batch), keep=MAX_RUNNERS_UP, cutoff_s=cutoff_s)
        self._account.close(1, max(entry.bound_s, shortest.bound_s))
        self._add(shortest)
        self._solve_further(bounded_problem.problem, shortest.bound_s)

    def _bounded_for_schedule(self, entry: OpenProblem) -> BoundedProblem:
        """The bound of an open problem, transferred to its own schedule."""
        if entry.task.schedule == entry.bounded.problem.schedule:
            return entry.bounded
        return entry.bounded.ordered(self._problem(entry.task, entry.shardings))

    def _raise_bound(self) -> None:
        """Solve open problems of unpriced shardings, as long as the overall bound depends on them."""
        left = sorted(self._account.open, key=lambda entry: (entry.bound_s, entry.task.sharding))
        for entry in left[:MAX_RAISED]:
            least_s = entry.bound_s
            if least_s < self._account.bound_s:
                judge = self._judge(entry.task.micro_batch)
                known = self._bounded_for_schedule(entry)
                least_s = max(least_s, solve_bounded(known, judge, keep=1, cutoff_s=self._candidates.best_s).bound_s)
            self._account.lower(least_s, only_bounds=True)
        self._account.lower(min((entry.bound_s for entry in left[MAX_RAISED:]), default=math.inf), only_bounds=True)

    def _solve_further(self, problem: StageProblem, shortest_s: float) -> None:
        """Search decisions of a solved problem that may be faster than those with the shortest critical path.

        With unequal replicas the critical path says little about the simulated time. So the best decisions by the
        closed form and those with equal replicas are tried as well.
        """
        unequal_replicas = len(np.unique(problem.replicas)) > 1 and not problem.uniform
        if not self._thorough or not unequal_replicas or shortest_s >= self._candidates.best_s * (1 - SAME):
            return
        judge = self._judge(problem.micro_batch)
        cutoff_s = self._candidates.best_form_s * (1 + SLACK)
        self._add(chain_dp.solve(problem, judge, cutoff_s=cutoff_s, keep=MAX_RUNNERS_UP))
        equal = dataclasses.replace(problem, uniform=True)
        self._add(solve_bounded(bounded(equal, self._candidates.best_s), judge, keep=1))

    def _add(self, solution: Solution, *, play: bool = True) -> None:
        """Collect the decisions of a solution as candidates."""
        for decision, evaluation in solution.decisions:
            self._candidates.add(decision, evaluation, play=play)

    def _judge(self, micro_batch: int) -> Judge:
        """The judge of decisions with this micro-batch size."""
        costs_by_sharding = self.known.by_size[micro_batch]
        return lambda decision: evaluate(costs_by_sharding, self._cluster, self._job, decision)

    def _space(self, priced: list[BlockCosts]) -> str:
        """The searched space in words."""
        sizes, skipped = [costs.micro_batch for costs in priced], self._sizes[len(priced) :]
        placed = () if self._searched_job is self._closed_form_job else self._shapes_job.schedules
        words = space_in_words(self._searched_job, self._formulator.devices(), priced[0], sizes, skipped, placed)
        words += "; not stages that recompute some of their layers, which were tried beside it" * self._tried_layers
        words += "; not activations in the host's memory, which was tried beside it" * self._tried_offload
        return words if self._shardings is None else f"{words}; {self._shardings.in_words()}"

    def _assemble(self, priced: list[BlockCosts], trivial: tuple[Candidate, ...]) -> Answer:
        """The answer from the collected candidates, with its certificate."""
        candidates = self._candidates.fastest(1 if self._beside else MAX_RUNNERS_UP + 1, self._judge)
        best_s = self._candidates.best_s
        certificate = self._account.certificate(best_s, self._space(priced))
        played = tuple(self._candidates.timed(candidate) for candidate in trivial)
        return Answer(candidates[0], tuple(candidates[1:]), played, certificate)

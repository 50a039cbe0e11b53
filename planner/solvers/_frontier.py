"""Queue of the problems of a search, lowest bound first; cheap bounds are tightened when they reach the front."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.exchange import Phase, recipe_of
from planner.hardware.types import Cluster
from planner.solvers._candidates import SAME
from planner.solvers._objectives import TimeObjective
from planner.solvers._relaxation import FeasibilityTest
from planner.solvers.critical_path import BoundedProblem
from planner.space.formulate import ALL_DIVISORS_UP_TO, Formulator
from planner.space.pricer import FloorKey, Floors, Refinement
from planner.space.problem import StageProblem, alike, least_of
from planner.space.types import BlockCosts, Job

MAX_TYPE_CHANGES = 8
"""Most changes of device type along the line at which the devices used may end; with more, all devices are used."""

_WIDEN, _HALVINGS, _FINE_HALVINGS = 4.0, 4, 7
"""First bracket of the bisection as a factor of the known bound, and its steps; the finer for `LongestChain`."""


@dataclass(frozen=True, slots=True)
class SearchTask:
    """One problem of the search, by its discrete choices.

    Attributes:
        bound_s: lower bound on the time of any of its decisions.
        micro_batch: samples of a micro-batch.
        copies: copies of the pipeline.
        slice_devices: devices of one copy, in groups of `ranks`.
        schedule: name of the schedule.
        zero: ZeRO stage.
        ranks: ranks that share every operator; they count as one device.
        sharding: number of the sharding.
    """

    bound_s: float
    micro_batch: int
    copies: int
    slice_devices: int
    schedule: str
    zero: int
    ranks: int = 1
    sharding: int = 0


@dataclass(frozen=True, slots=True)
class ProblemGroup:
    """Problems that differ only in schedule and ZeRO stage.

    Among the tasks of one ZeRO stage, the first has every decision of the others and needs no more memory.

    Attributes:
        bound_s: lower bound on the time of any decision.
        shardings: costs of the shardings that each stage may pick from.
        costs: elementwise lower bound of these costs.
        tasks: the problems.
        only_bounds: the costs are themselves a lower bound of unpriced shardings, so no decision is built from them.
    """

    bound_s: float
    shardings: tuple[BlockCosts, ...]
    costs: BlockCosts
    tasks: tuple[SearchTask, ...]
    only_bounds: bool = False

    @property
    def slice_devices(self) -> int:
        """Devices of one copy of the pipeline."""
        return self.tasks[0].slice_devices

    def at_least(self, bound_s: float) -> ProblemGroup:
        """This group with its bounds raised to at least `bound_s`."""
        tasks = tuple(replace(task, bound_s=max(task.bound_s, bound_s)) for task in self.tasks)
        return replace(self, bound_s=max(self.bound_s, bound_s), tasks=tasks)


@dataclass(frozen=True, slots=True)
class UnpricedShardings:
    """A family of shardings at one micro-batch size that is not priced yet.

    Attributes:
        bound_s: lower bound on the time of any decision with them.
        floor: lower bound on their costs.
        key: identifies the family (`Pricer.refine`).
    """

    bound_s: float
    floor: BlockCosts
    key: FloorKey


@dataclass(frozen=True, slots=True)
class OpenProblem:
    """A problem that is bounded but not solved.

    Attributes:
        task: the problem.
        shardings: costs of the shardings that stages pick from.
        bounded: its bound, or that of the same problem with a schedule that leaves more memory.
        only_bounds: see `ProblemGroup`.
    """

    task: SearchTask
    shardings: tuple[BlockCosts, ...]
    bounded: BoundedProblem
    only_bounds: bool = False

    @property
    def bound_s(self) -> float:
        """Lower bound on the time of any of its decisions, in seconds."""
        return max(self.task.bound_s, self.bounded.bound_s)


_ReachKey = tuple[int, int, str, int, BlockCosts]
"""Copies, devices of a copy, schedule, ZeRO stage, costs."""

_Reach = tuple[float, float]
"""Of a problem, the longest time known to be out of reach, and the shortest that is not."""

_MOST_TESTS = 8
"""Feasibility tests that are kept at a time; each holds a few arrays over all ranges of blocks."""


class Frontier:
    """Priority queue of all problems of a job that are still open.

    Args:
        formulator: formulates the job's problems.
        cluster: the cluster.
        job: the job.
        objective: the time that bounds speak of.
        priced: costs with one device per replica, by micro-batch size.
        unpriced: floors of unpriced shardings with their keys.
        refine: prices the shardings of a floor (`Pricer.refine`); returns None if that is not worth it.
        first: costs whose problems come before all others.
        least: by micro-batch size and key of a floor, lower bound on the costs of shardings that are not among the
            priced ones of the floor; None if there are none.

    Attributes:
        count: number of problems queued so far.
        left_out_s: lower bound on the decisions with shardings that were never priced.
    """

    def __init__(
        self,
        formulator: Formulator,
        cluster: Cluster,
        job: Job,
        objective: TimeObjective,
        priced: Sequence[BlockCosts],
        unpriced: Floors = (),
        refine: Callable[[int, FloorKey], Refinement | None] | None = None,
        first: Sequence[BlockCosts] = (),
        least: Callable[[int, FloorKey], BlockCosts | None] = lambda *_: None,
    ) -> None:
        self._formulator, self._cluster, self._job = formulator, cluster, job
        self._refine, self._least_of = refine, least
        self._objective, self._least_s = objective, math.inf
        self._halvings = _FINE_HALVINGS if objective.counts_passing else _HALVINGS
        self._heap: list[_Entry] = []
        self._after_first: list[_Entry] = []
        self.count = 0
        self.left_out_s = math.inf
        self._numbers = itertools.count()
        self._reach: dict[_ReachKey, _Reach] = {}
        self._tests: dict[_ReachKey, FeasibilityTest] = {}
        self._added: set[tuple[int, int]] = set()
        for shardings in alike(first):
            self._add(shardings)
        if first:
            self._heap, self._after_first = self._after_first, self._heap
        for costs in priced:
            self._add((costs,))
        for floor, key in unpriced:
            self._add_unpriced(floor, key)
        if first:
            self._heap, self._after_first = self._after_first, self._heap

    def _add_unpriced(self, floor: BlockCosts, key: FloorKey, least_s: float = 0.0) -> None:
        bound_s = min((group.bound_s for group in self._groups((floor,))), default=math.inf)
        self._push(UnpricedShardings(max(bound_s, least_s), floor, key), tight=False)

    def _add(self, shardings: tuple[BlockCosts, ...], least_s: float = 0.0, *, only_bounds: bool = False) -> None:
        """Queue all problems in which stages pick from these shardings, unless they were queued before."""
        if (shardings[0].micro_batch, shardings[0].sharding) in self._added:
            return
        self._added.add((shardings[0].micro_batch, shardings[0].sharding))
        groups = self._groups(shardings)
        self.count += sum(len(group.tasks) for group in groups)
        for group in groups:
            self._push(replace(group.at_least(least_s), only_bounds=only_bounds), tight=False)

    def put_back(self, entry: OpenProblem) -> None:
        """Queue a bounded problem again under its bound."""
        self._push(entry, tight=True)

    def _push(self, entry: ProblemGroup | UnpricedShardings | OpenProblem, *, tight: bool) -> None:
        heapq.heappush(self._heap, (*_order(entry), next(self._numbers), tight, entry))

    @property
    def bound_s(self) -> float:
        """Lower bound on the decisions of all queued problems; infinite if the queue is empty."""
        return min((heap[0][0] for heap in (self._heap, self._after_first) if heap), default=math.inf)

    @property
    def next_s(self) -> float:
        """Known bound of the entry that `pop` looks at before those that are put back; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, cutoff_s: float) -> ProblemGroup | OpenProblem | None:
        """Remove and return the entry with the lowest bound, narrow slices first; None if the queue is empty.

        A bound is tightened, up to the cutoff, the first time that it reaches the front.
        """
        while self._heap or self._after_first:
            if not self._heap:
                self._heap, self._after_first = self._after_first, []
            *_, tight, entry = heapq.heappop(self._heap)
            if isinstance(entry, UnpricedShardings):
                self._price(entry, cutoff_s, tight=tight)
                continue
            if tight or isinstance(entry, OpenProblem) or entry.bound_s >= cutoff_s:
                return entry
            bound_s, tight = self._tightened([entry], entry.bound_s, cutoff_s)
            self._push(entry.at_least(bound_s), tight=tight)
        return None

    def _price(self, entry: UnpricedShardings, cutoff_s: float, *, tight: bool) -> None:
        """Replace unpriced shardings by priced ones or closer floors, if one of them may beat the cutoff."""
        floors = self._groups((entry.floor,))
        if not self._may_beat(floors, cutoff_s):
            bounds_s = (max(f.bound_s, cutoff_s) for f in floors)
            self.left_out_s = min(self.left_out_s, min(bounds_s, default=math.inf))
            return
        refined = self._refine(entry.floor.micro_batch, entry.key) if self._refine is not None else None
        if refined is None and tight:
            self.left_out_s = min(self.left_out_s, entry.bound_s)
            return
        if refined is None:
            bound_s, tight = self._tightened(floors, entry.bound_s, cutoff_s)
            self._push(replace(entry, bound_s=bound_s), tight=tight)
            return
        closer, priced = refined
        for floor, key in closer:
            self._add_unpriced(floor, key, entry.bound_s)
        if priced and (lower_bound := self._least_of(entry.floor.micro_batch, entry.key)) is not None:
            self._add((lower_bound,), entry.bound_s, only_bounds=True)
        for shardings in alike(priced):
            self._add(shardings, entry.bound_s)

    def _may_beat(self, groups: Sequence[ProblemGroup], cutoff_s: float) -> bool:
        """True unless simple bounds show that no decision of the groups is below the cutoff."""
        return any(
            task.bound_s < cutoff_s and self.may_reach(task, group.costs, cutoff_s)
            for group in groups
            for task in _first_by_zero(group)
        )

    def may_reach(self, task: SearchTask, costs: BlockCosts, time_s: float) -> bool:
        """False if simple bounds show that no decision of a problem takes less than a time, wherever its stages lie."""
        key: _ReachKey = task.copies, task.slice_devices, task.schedule, task.zero, costs
        impossible_s, possible_s = self._reach.get(key, (-math.inf, math.inf))
        if impossible_s < time_s < possible_s:
            if key not in self._tests:
                if len(self._tests) == _MOST_TESTS:
                    self._tests.clear()
                self._tests[key] = self.feasibility(task, costs)
            possible = self._tests[key].possible(time_s)
            self._reach[key] = (impossible_s, time_s) if possible else (time_s, possible_s)
            return possible
        return time_s >= possible_s

    def feasibility(self, task: SearchTask, costs: BlockCosts) -> FeasibilityTest:
        """The test of which times a problem can reach, wherever its stages lie."""
        batches = self._job.global_batch // (task.micro_batch * task.copies)
        replicas = self._formulator.replica_options(batches, task.copies, task.slice_devices)
        slices = task.copies, task.slice_devices, task.zero
        forward, backward, sync = (
            self._formulator.least_exchange(task.ranks, slices, replicas, phase)
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.END)
        )
        counts = np.asarray(replicas)
        return FeasibilityTest(
            needs=self._formulator.needs(costs, task.zero),
            objective=self._objective,
            schedule=task.schedule,
            devices=task.slice_devices,
            micro_batches=batches,
            replicas=counts,
            sync_s=sync[:, 0],
            sync_s_per_element=sync[:, 1],
            pass_terms=(forward, backward) if forward.any() or backward.any() else None,
            update_share=1 / (task.copies * counts) if recipe_of(task.zero).optimizer else np.ones(len(counts)),
            overlap=self._formulator.overlap,
        )

    def _tightened(self, entries: Sequence[ProblemGroup], low_s: float, cutoff_s: float) -> tuple[float, bool]:
        """Raise the bound of some problems by bisection: (bound, True if it cannot be raised further this way).

        Bisects on a logarithmic scale between `low_s` and the cutoff. The lowest bound found so far is tried first,
        because only the lowest of all bounds matters.
        """
        problems = [(task, entry.costs) for entry in entries for task in _first_by_zero(entry)]
        least_s = self._least_s

        def possible(time_s: float) -> bool:
            return any(self.may_reach(task, costs, time_s) for task, costs in problems)

        if not possible(cutoff_s):
            return cutoff_s, True
        if low_s < least_s < cutoff_s and not possible(least_s):
            return least_s, False
        high_s = min(cutoff_s, _WIDEN * low_s)
        for _ in range(self._halvings):
            middle_s = math.sqrt(low_s * high_s)
            if possible(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        self._least_s = min(self._least_s, low_s)
        return low_s, True

    def _groups(self, shardings: tuple[BlockCosts, ...]) -> list[ProblemGroup]:
        """All groups of problems with these shardings: one for each number of copies and devices of a copy."""
        job, formulator, costs = self._job, self._formulator, least_of(shardings)
        batches, fewest_stages = job.global_batch // costs.micro_batch, min(job.pipeline_stages, default=1)
        order = sorted(job.schedules, key=lambda name: name != "1f1b")
        variants = [
            (schedule, zero) for schedule in dict.fromkeys(order) for zero in sorted(set(job.zero), reverse=True)
        ]
        widest = max(ALL_DIVISORS_UP_TO, len(costs.parameter_elements))
        slices = {
            (copies, used // copies)
            for used in self._device_counts(costs.ranks)
            for copies in range(1, used + 1)
            if batches % copies == 0
            if (options := formulator.replica_options(batches // copies, copies, used // copies))
            if used // copies >= fewest_stages * options[0]
            if used // copies <= widest or batches % (2 * copies) or 2 * copies > used
        }
        groups, work_s = [], compute_s(costs)
        for copies, width in sorted(slices):
            bound_s = max(batches // copies * work_s / width, work_s)
            tasks = tuple(
                SearchTask(bound_s, costs.micro_batch, copies, width, schedule, zero, costs.ranks, costs.sharding)
                for schedule, zero in variants
            )
            groups.append(ProblemGroup(bound_s, shardings, costs, tasks))
        return groups

    def _device_counts(self, ranks: int) -> list[int]:
        """Numbers of devices to use: all, and those before each change of device type along the line."""
        count = self._formulator.devices(ranks)
        types = self._cluster.device_types[: count * ranks]
        changes = (np.flatnonzero(types[1:] != types[:-1]) + 1).tolist()
        changes = sorted({change // ranks for change in changes if change >= ranks})
        return [*(changes if len(changes) <= MAX_TYPE_CHANGES else ()), count] if count else []


def compute_s(costs: BlockCosts) -> float:
    """Seconds of one micro-batch through all blocks, each on its fastest device type."""
    return float((costs.forward_s + costs.backward_s).min(axis=0).sum())


def _order(entry: ProblemGroup | UnpricedShardings | OpenProblem) -> tuple[float, int, int, int, int]:
    """Sort key: lowest bound first, then narrow slices, which are solved fastest."""
    if isinstance(entry, UnpricedShardings):
        return entry.bound_s, 0, entry.floor.micro_batch, entry.floor.ranks, 0
    task = entry.task if isinstance(entry, OpenProblem) else entry.tasks[0]
    return entry.bound_s, task.slice_devices, task.micro_batch, task.ranks, task.copies


_Entry = tuple[float, int, int, int, int, int, bool, ProblemGroup | UnpricedShardings | OpenProblem]


def _first_by_zero(group: ProblemGroup) -> Iterable[SearchTask]:
    """The first task of each ZeRO stage, which has every decision of the others."""
    return {task.zero: task for task in reversed(group.tasks)}.values()


def by_zero(group: ProblemGroup) -> list[list[SearchTask]]:
    """The tasks of a group by ZeRO stage, highest stage first."""
    ordered = sorted(group.tasks, key=lambda task: -task.zero)
    return [list(tasks) for _, tasks in itertools.groupby(ordered, key=lambda task: task.zero)]


def covers(sharded: StageProblem, plain: StageProblem) -> bool:
    """True if the problem with the sharded optimizer state is no slower at any place, so that it dominates the other.

    It never needs more memory.
    """
    recipe, plain_recipe = recipe_of(sharded.zero), recipe_of(plain.zero)
    sharded_without_passes = recipe.optimizer is not None and not recipe.during(Phase.FORWARD, Phase.BACKWARD)
    if sharded.schedule != plain.schedule or not sharded_without_passes or any(plain_recipe.held):
        return False
    end_s, plain_end_s = sharded.sync_s + sharded.update_s, plain.sync_s + plain.update_s
    return bool((end_s <= plain_end_s * (1 + SAME)).all())

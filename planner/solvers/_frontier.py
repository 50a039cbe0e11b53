"""The problems of a search, best bound first; bounds that cost little are tightened when their turn comes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.exchange import Phase, recipe_of
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.solvers._candidates import SAME
from planner.solvers._objectives import Objective
from planner.solvers._relaxation import Reach, Share
from planner.solvers.critical_path import Bounded
from planner.solvers.types import Key, Refined
from planner.space.formulate import ALL_DIVISORS_UP_TO, Formulator
from planner.space.problem import StageProblem, alike, least_of
from planner.space.types import BlockCosts, Job

MOST_TYPE_CHANGES = 8
"""Where device types change more often along the line, only all devices are dealt to the copies."""

_WIDEN, _HALVINGS, _FINE_HALVINGS = 4.0, 4, 7


@dataclass(frozen=True, slots=True)
class Task:
    """A problem to be settled; none of its decisions is faster than `bound_s`.

    Groups of `ranks` devices count as one; `sharding` says how they share operators.
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
class Alike:
    """Problems that differ in schedule, ZeRO stage and sharding only.

    Of one ZeRO stage the first has every decision of the others, in no more memory. Every stage of a decision picks one
    of the shardings of the shelf; `costs` are what none of them is below. Where it `only_bounds`, the shelf is what
    no sharding is below, and no decision is made of it.
    """

    bound_s: float
    shelf: tuple[BlockCosts, ...]
    costs: BlockCosts
    tasks: tuple[Task, ...]
    only_bounds: bool = False

    @property
    def slice_devices(self) -> int:
        """Devices of one copy."""
        return self.tasks[0].slice_devices

    def at_least(self, bound_s: float) -> Alike:
        """The same with a bound that is no lower."""
        tasks = tuple(replace(task, bound_s=max(task.bound_s, bound_s)) for task in self.tasks)
        return replace(self, bound_s=max(self.bound_s, bound_s), tasks=tasks)


@dataclass(frozen=True, slots=True)
class Unpriced:
    """Shardings at a micro-batch size that are not worked out yet.

    Attributes:
        bound_s: no decision with them is faster.
        floor: what none of them is cheaper than.
        key: which they are.
    """

    bound_s: float
    floor: BlockCosts
    key: Key


@dataclass(frozen=True, slots=True)
class Looked:
    """A problem that has been bounded, but not solved.

    Attributes:
        task: which it is.
        shelf: the shardings that stages pick from.
        known: what is known of it, or of the same problem in an order of work that leaves more room.
        only_bounds: of `Alike`.
    """

    task: Task
    shelf: tuple[BlockCosts, ...]
    known: Bounded
    only_bounds: bool = False

    @property
    def bound_s(self) -> float:
        """None of its decisions is faster."""
        return max(self.task.bound_s, self.known.bound_s)


class Frontier:
    """All problems of a job that are still to be settled.

    Args:
        formulator: the job's.
        cluster: the machine.
        job: the job.
        objective: what bounds are of.
        priced: costs of the micro-batch sizes to look at.
        unpriced: least costs of shardings that are not worked out.
        refine: works them out (`Shardings.refine`); None where that is not worth it.
        first: costs whose problems come before all others.
    """

    def __init__(
        self,
        formulator: Formulator,
        cluster: Cluster,
        job: Job,
        objective: Objective,
        priced: Sequence[BlockCosts],
        unpriced: Sequence[tuple[BlockCosts, Key]] = (),
        refine: Callable[[int, Key], Refined | None] | None = None,
        first: Sequence[BlockCosts] = (),
    ) -> None:
        self._formulator, self._cluster, self._job, self._refine = formulator, cluster, job, refine
        self._objective, self._least_s = objective, math.inf
        self._halvings = _FINE_HALVINGS if objective.counts_passing else _HALVINGS
        self._heap: list[_Entry] = []
        self._later: list[_Entry] = []
        self.count = 0
        self.left_out_s = math.inf
        self._numbers = itertools.count()
        self._added: set[tuple[int, int]] = set()
        for shelf in alike(first):
            self._add(shelf)
        if first:
            self._heap, self._later = self._later, self._heap
        for costs in priced:
            self._add((costs,))
        for floor, key in unpriced:
            self._add_unpriced(floor, key)
        if first:
            self._heap, self._later = self._later, self._heap

    def _add_unpriced(self, floor: BlockCosts, key: Key, least_s: float = 0.0) -> None:
        bound_s = min((each.bound_s for each in self._alike((floor,))), default=math.inf)
        self._push(Unpriced(max(bound_s, least_s), floor, key), tight=False)

    def _add(self, shelf: tuple[BlockCosts, ...], least_s: float = 0.0, *, only_bounds: bool = False) -> None:
        """Add all problems in which stages pick from a shelf, unless they were there already."""
        if (shelf[0].micro_batch, shelf[0].sharding) in self._added:
            return
        self._added.add((shelf[0].micro_batch, shelf[0].sharding))
        found = self._alike(shelf)
        self.count += sum(len(each.tasks) for each in found)
        for each in found:
            self._push(replace(each.at_least(least_s), only_bounds=only_bounds), tight=False)

    def put_back(self, entry: Looked) -> None:
        """Leave a problem for when its bound comes up again."""
        self._push(entry, tight=True)

    def _push(self, entry: Alike | Unpriced | Looked, *, tight: bool) -> None:
        heapq.heappush(self._heap, (*_order(entry), next(self._numbers), tight, entry))

    @property
    def bound_s(self) -> float:
        """No decision of what is left is faster; infinite when nothing is."""
        return min((heap[0][0] for heap in (self._heap, self._later) if heap), default=math.inf)

    def pop(self, cutoff_s: float) -> Alike | Looked | None:
        """The problems with the least bound, narrow slices first; None when all are gone.

        A bound is tightened as far as the cutoff the first time that it comes up.
        """
        while self._heap or self._later:
            if not self._heap:
                self._heap, self._later = self._later, []
            *_, tight, entry = heapq.heappop(self._heap)
            if isinstance(entry, Unpriced):
                self._work_out(entry, cutoff_s, tight=tight)
                continue
            if tight or isinstance(entry, Looked) or entry.bound_s >= cutoff_s:
                return entry
            bound_s, tight = self._tightened([entry], entry.bound_s, cutoff_s)
            self._push(entry.at_least(bound_s), tight=tight)
        return None

    def _work_out(self, entry: Unpriced, cutoff_s: float, *, tight: bool) -> None:
        """Put what is known more closely in its place, if one of the shardings might win and that is worth it."""
        floors = self._alike((entry.floor,))
        if not any(self._may_win(floor, cutoff_s) for floor in floors):
            reached_s = (max(f.bound_s, cutoff_s) for f in floors)
            self.left_out_s = min(self.left_out_s, min(reached_s, default=math.inf))
            return
        refined = self._refine(entry.floor.micro_batch, entry.key) if self._refine is not None else None
        if refined is None and tight:
            self.left_out_s = min(self.left_out_s, entry.bound_s)
            return
        if refined is None:
            bound_s, tight = self._tightened(floors, entry.bound_s, cutoff_s)
            self._push(replace(entry, bound_s=bound_s), tight=tight)
            return
        closer, worked_out, least = refined
        for floor, key in closer:
            self._add_unpriced(floor, key, entry.bound_s)
        if least is not None:
            self._add((least,), entry.bound_s, only_bounds=True)
        for shelf in alike(worked_out):
            self._add(shelf, entry.bound_s)

    def _may_win(self, entry: Alike, cutoff_s: float) -> bool:
        if entry.bound_s >= cutoff_s:
            return False
        first = {task.zero: task for task in reversed(entry.tasks)}
        return any(self.reach(task, entry.costs).possible(cutoff_s) for task in first.values())

    def reach(self, task: Task, costs: BlockCosts) -> Reach:
        """What a problem's decisions take at the least, wherever their stages lie."""
        batches = self._job.global_batch // (task.micro_batch * task.copies)
        replicas = self._formulator.replica_options(batches, task.copies, task.slice_devices)
        sync = self._formulator.least_sync(task.ranks, (task.copies, task.slice_devices, task.zero), replicas)
        counts = np.asarray(replicas)
        share = Share(
            schedule=task.schedule,
            devices=task.slice_devices,
            micro_batches=batches,
            replicas=counts,
            sync_s=sync[:, 0],
            sync_s_per_element=sync[:, 1],
            update_share=1 / (task.copies * counts) if recipe_of(task.zero).optimizer else np.ones(len(counts)),
            overlap=self._formulator.overlap,
        )
        return Reach(self._formulator.needs(costs, task.zero), share, self._objective)

    def _tightened(self, entries: Sequence[Alike], low_s: float, cutoff_s: float) -> tuple[float, bool]:
        """A higher bound of some problems than is known, up to the cutoff, and whether that is as far as it goes.

        The range (on a logarithmic scale) in which it lies is halved; first it is held against the least bound that
        was found in this way, since only the least of all matters.
        """
        reaches = [
            self.reach(task, entry.costs)
            for entry in entries
            for task in {task.zero: task for task in reversed(entry.tasks)}.values()
        ]
        least_s = self._least_s

        def possible(most_s: float) -> bool:
            return any(reach.possible(most_s) for reach in reaches)

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

    def _alike(self, shelf: tuple[BlockCosts, ...]) -> list[Alike]:
        job, formulator, costs = self._job, self._formulator, least_of(shelf)
        batches, fewest = job.global_batch // costs.micro_batch, min(job.pipeline_stages, default=1)
        order = sorted(job.schedules, key=lambda name: name != "1f1b")
        kinds = [(schedule, zero) for schedule in dict.fromkeys(order) for zero in sorted(set(job.zero), reverse=True)]
        widest = max(ALL_DIVISORS_UP_TO, len(costs.parameter_elements))
        slices = {
            (copies, used // copies)
            for used in self._device_counts(costs.ranks)
            for copies in range(1, used + 1)
            if batches % copies == 0 and formulator.replica_options(batches // copies, copies, used // copies)
            if used // copies >= fewest
            if used // copies <= widest or batches % (2 * copies) or 2 * copies > used
        }
        whole_s = compute_s(costs)
        least_s = {zero: whole_s if self._any_fits(costs, zero) else math.inf for zero in set(job.zero)}
        found = []
        for copies, width in sorted(slices):
            bounds = {zero: max(batches // copies * whole_s / width, s) for zero, s in least_s.items()}
            tasks = tuple(
                Task(bounds[zero], costs.micro_batch, copies, width, schedule, zero, costs.ranks, costs.sharding)
                for schedule, zero in kinds
            )
            found.append(Alike(min(bounds.values()), shelf, costs, tasks))
        return found

    def _any_fits(self, costs: BlockCosts, zero: int) -> bool:
        """Whether the blocks fit anywhere: each by itself, and all in as many stages as are allowed."""
        largest = max(d.usable_bytes for d in self._cluster.devices)
        holds = np.triu(fits(self._formulator.least_bytes(costs, zero), largest))
        most_stages = self._most_stages()
        return bool(holds.diagonal().all()) and (most_stages == math.inf or _fewest_stages(holds) <= most_stages)

    def _most_stages(self) -> float:
        limits = (max(self._job.pipeline_stages, default=0), self._job.max_stages)
        return min((limit for limit in limits if limit), default=math.inf)

    def _device_counts(self, ranks: int) -> list[int]:
        """How many devices to deal to the copies: all, or as many as come before a change of device type."""
        count = self._formulator.devices(ranks)
        types = self._cluster.device_types[: count * ranks]
        changes = (np.flatnonzero(types[1:] != types[:-1]) + 1).tolist()
        changes = sorted({change // ranks for change in changes if change >= ranks})
        return [*(changes if len(changes) <= MOST_TYPE_CHANGES else ()), count] if count else []


def compute_s(costs: BlockCosts) -> float:
    """Forward and backward of one micro-batch through all blocks on the fastest device of each."""
    return float((costs.forward_s + costs.backward_s).min(axis=0).sum())


def _order(entry: Alike | Unpriced | Looked) -> tuple[float, int, int, int, int]:
    """Best bound first; narrow slices, which are solved fastest, before wide ones."""
    if isinstance(entry, Unpriced):
        return entry.bound_s, 0, entry.floor.micro_batch, entry.floor.ranks, 0
    task = entry.task if isinstance(entry, Looked) else entry.tasks[0]
    return entry.bound_s, task.slice_devices, task.micro_batch, task.ranks, task.copies


_Entry = tuple[float, int, int, int, int, int, bool, Alike | Unpriced | Looked]


def _fewest_stages(holds: np.ndarray) -> float:
    """Stages that the blocks take at the least, where `holds` [n, n] says which runs one can hold; O(n^2)."""
    n = len(holds)
    fewest = np.full(n + 1, math.inf)
    fewest[0] = 0.0
    for i in range(n):
        np.minimum(fewest[i + 1 :], np.where(holds[i, i:], fewest[i] + 1, math.inf), out=fewest[i + 1 :])
    return float(fewest[n])


def by_zero(alike: Alike) -> list[list[Task]]:
    """Problems of one ZeRO stage together, most sharding first."""
    ordered = sorted(alike.tasks, key=lambda task: -task.zero)
    return [list(tasks) for _, tasks in itertools.groupby(ordered, key=lambda task: task.zero)]


def covers(sharded: StageProblem, plain: StageProblem) -> bool:
    """Whether sharding the optimizer state costs no time at any place, whatever is hidden (it never costs memory)."""
    more, less = recipe_of(sharded.zero), recipe_of(plain.zero)
    once = more.optimizer is not None and not more.during(Phase.FORWARD, Phase.BACKWARD)
    if sharded.schedule != plain.schedule or not once or any(less.held):
        return False
    end_s, other_s = sharded.sync_s + sharded.update_s, plain.sync_s + plain.update_s
    return bool((end_s <= other_s * (1 + SAME)).all())

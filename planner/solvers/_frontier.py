"""The problems of a search, best bound first; bounds that cost little are tightened when their turn comes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.hardware.types import Cluster
from planner.solvers._reach import Reach, Share
from planner.space.formulate import Formulator
from planner.space.types import BlockCosts, Job

MOST_TYPE_CHANGES = 8
"""Where device types change more often along the line, only all devices are dealt to the copies."""

_ROUNDING = 1e-9
_WIDEN, _HALVINGS = 4.0, 4


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
    """Problems that differ in schedule and sharding only.

    Of one sharding the first has every decision of the others, in no more memory.
    """

    bound_s: float
    costs: BlockCosts
    tasks: tuple[Task, ...]

    @property
    def slice_devices(self) -> int:
        """Devices of one copy."""
        return self.tasks[0].slice_devices

    def at_least(self, bound_s: float) -> Alike:
        """The same with a bound that is no lower."""
        tasks = tuple(replace(task, bound_s=max(task.bound_s, bound_s)) for task in self.tasks)
        return Alike(max(self.bound_s, bound_s), self.costs, tasks)


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A mesh at a micro-batch size of which the shardings are not worked out yet.

    Attributes:
        bound_s: no decision with them is faster.
        floor: what any sharding on the mesh costs at the least: no communication, everything cut evenly.
        mesh: ranks by axis.
    """

    bound_s: float
    floor: BlockCosts
    mesh: tuple[int, ...]


class Frontier:
    """All problems of a job that are still to be settled.

    Args:
        formulator: the job's.
        cluster: the machine.
        job: the job.
        priced: costs of the micro-batch sizes to look at, and of shardings that are worked out.
        unpriced: least costs of shardings that are not worked out, with their meshes.
        price: works out the shardings on a mesh at a micro-batch size.
    """

    def __init__(
        self,
        formulator: Formulator,
        cluster: Cluster,
        job: Job,
        priced: Sequence[BlockCosts],
        unpriced: Sequence[tuple[BlockCosts, tuple[int, ...]]] = (),
        price: Callable[[int, tuple[int, ...]], Sequence[BlockCosts]] | None = None,
    ) -> None:
        self._formulator, self._cluster, self._job, self._price = formulator, cluster, job, price
        self._heap: list[_Entry] = []
        self.count = 0
        self.left_out_s = math.inf
        self._numbers = itertools.count()
        for costs in priced:
            self._add(costs)
        for floor, mesh in unpriced:
            bound_s = min((alike.bound_s for alike in self._alike(floor)), default=math.inf)
            self._push(Unpriced(bound_s, floor, mesh), tight=False)

    def _add(self, costs: BlockCosts, least_s: float = 0.0) -> None:
        found = self._alike(costs)
        self.count += sum(len(alike.tasks) for alike in found)
        for alike in found:
            self._push(alike.at_least(least_s), tight=False)

    def _push(self, entry: Alike | Unpriced, *, tight: bool) -> None:
        heapq.heappush(self._heap, (*_order(entry), next(self._numbers), tight, entry))

    @property
    def bound_s(self) -> float:
        """No decision of what is left is faster; infinite when nothing is."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, cutoff_s: Callable[[int], float]) -> Alike | None:
        """The problems with the least bound, narrow slices first; None when all are gone.

        A bound is tightened as far as the cutoff of its slice the first time that it comes up.
        """
        while self._heap:
            *_, tight, entry = heapq.heappop(self._heap)
            if isinstance(entry, Unpriced):
                self._work_out(entry, cutoff_s)
                continue
            if tight or entry.bound_s >= cutoff_s(entry.slice_devices):
                return entry
            self._push(entry.at_least(self._tightened(entry, cutoff_s(entry.slice_devices))), tight=True)
        return None

    def _work_out(self, entry: Unpriced, cutoff_s: Callable[[int], float]) -> None:
        """Put the shardings on a mesh in its place, if one of them might win."""
        floors = self._alike(entry.floor)
        if self._price is None or not any(self._may_win(floor, cutoff_s) for floor in floors):
            self.left_out_s = min(self.left_out_s, *(max(f.bound_s, cutoff_s(f.slice_devices)) for f in floors))
            return
        for costs in self._price(entry.floor.micro_batch, entry.mesh):
            self._add(costs, entry.bound_s)

    def _may_win(self, alike: Alike, cutoff_s: Callable[[int], float]) -> bool:
        most_s = cutoff_s(alike.slice_devices)
        if alike.bound_s >= most_s:
            return False
        first = {task.zero: task for task in reversed(alike.tasks)}
        return any(self.reach(task, alike.costs).possible(most_s) for task in first.values())

    def reach(self, task: Task, costs: BlockCosts) -> Reach:
        """What a problem's decisions take at the least, wherever their stages lie."""
        batches = self._job.global_batch // (task.micro_batch * task.copies)
        replicas = self._formulator.replica_options(batches, task.copies, task.slice_devices)
        sync = self._formulator.least_sync(task, replicas)
        counts = np.asarray(replicas)
        share = Share(
            schedule=task.schedule,
            devices=task.slice_devices,
            micro_batches=batches,
            replicas=counts,
            sync_s=sync[:, 0],
            sync_s_per_element=sync[:, 1],
            update_share=1 / (task.copies * counts) if task.zero else np.ones(len(counts)),
            overlap=self._job.overlap,
        )
        return Reach(self._formulator.needs(costs, task.zero), share)

    def _tightened(self, alike: Alike, cutoff_s: float) -> float:
        """A higher bound, up to the cutoff, by halving the range (on a logarithmic scale) in which it lies."""
        first = {task.zero: task for task in reversed(alike.tasks)}
        reaches, low_s = [self.reach(task, alike.costs) for task in first.values()], alike.bound_s
        if not any(reach.possible(cutoff_s) for reach in reaches):
            return cutoff_s
        high_s = min(cutoff_s, _WIDEN * low_s)
        for _ in range(_HALVINGS):
            middle_s = math.sqrt(low_s * high_s)
            if any(reach.possible(middle_s) for reach in reaches):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _alike(self, costs: BlockCosts) -> list[Alike]:
        job, formulator = self._job, self._formulator
        batches = job.global_batch // costs.micro_batch
        order = sorted(job.schedules, key=lambda name: name != "1f1b")
        kinds = [(schedule, zero) for schedule in dict.fromkeys(order) for zero in sorted(set(job.zero), reverse=True)]
        slices = {
            (copies, used // copies)
            for used in self._device_counts(costs.ranks)
            for copies in range(1, used + 1)
            if batches % copies == 0 and formulator.replica_options(batches // copies, copies, used // copies)
        }
        outside_s = {zero: self._outside_s(costs, zero) for zero in set(job.zero)}
        whole_s = compute_s(costs)
        found = []
        for copies, width in sorted(slices):
            bounds = {z: max(batches // copies * whole_s / width + s, whole_s) for z, s in outside_s.items()}
            tasks = tuple(
                Task(bounds[zero], costs.micro_batch, copies, width, schedule, zero, costs.ranks, costs.sharding)
                for schedule, zero in kinds
            )
            found.append(Alike(min(bounds.values()), costs, tasks))
        return found

    def _outside_s(self, costs: BlockCosts, zero: int) -> float:
        """Compute of one micro-batch that no single stage can hold; infinite when some block fits nowhere.

        A copy with W devices takes at least m C / W (the slowest stage, at a pace no better than perfect balance) and
        beside it the work of all other stages on one micro-batch.
        """
        room = max(d.usable_bytes for d in self._cluster.devices) * (1 + _ROUNDING)
        fits = np.triu(self._formulator.least_bytes(costs, zero) <= room)
        if not fits.diagonal().all():
            return math.inf
        prefix = np.concatenate([[0.0], np.cumsum((costs.forward_s + costs.backward_s).min(axis=0))])
        held = np.where(fits, prefix[None, 1:] - prefix[:-1, None], 0.0)
        return float(max(0.0, prefix[-1] - held.max()))

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


def _order(entry: Alike | Unpriced) -> tuple[float, int, int, int, int]:
    """Best bound first; narrow slices, which are solved fastest, before wide ones."""
    if isinstance(entry, Unpriced):
        return entry.bound_s, 0, entry.floor.micro_batch, entry.floor.ranks, 0
    task = entry.tasks[0]
    return entry.bound_s, task.slice_devices, task.micro_batch, task.ranks, task.copies


_Entry = tuple[float, int, int, int, int, int, bool, Alike | Unpriced]

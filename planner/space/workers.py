"""Assign devices to the workers of a configuration, and stages to workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedules import Pipeline, Schedule
from planner.space.configuration import Configuration


@dataclass(frozen=True, slots=True, eq=False)
class Workers:
    """The workers of a configuration on the line of devices.

    Attributes:
        hosted: by worker of one copy, the stages that it holds, ascending.
        holders: by stage, the workers of one copy that hold it.
        ranks: by worker, int64 [copies, ranks of a worker].
        world_size: number of devices of all slices, idle ones included.
    """

    hosted: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    ranks: tuple[np.ndarray, ...]
    world_size: int

    def groups(self, stage: int) -> np.ndarray:
        """Ranks of a stage: int64 [copies, holders, ranks of a holder]."""
        return np.stack([self.ranks[worker] for worker in self.holders[stage]], axis=1)

    @property
    def in_line(self) -> bool:
        """True if every worker holds one stage; the replicas of a stage then take micro-batches in turn."""
        return all(len(own) == 1 for own in self.hosted)


def pipeline_of(configuration: Configuration) -> Pipeline:
    """One copy of the configuration as the schedule sees it: replicas by stage, and micro-batches.

    Raises:
        PlanError: no stage, no micro-batch, or replicas that do not divide the micro-batches.
    """
    return Pipeline(tuple(stage.replicas for stage in configuration.stages), configuration.micro_batches)


def lay_workers(configuration: Configuration, schedule: Schedule) -> Workers:
    """Assign the devices of a configuration to its workers; O(workers * copies).

    Copy c owns the devices from `c * width` on, and its workers take neighbouring groups up to the end of the slice;
    with `adjacent` copies of each worker stand together instead. Workers of in-line schedules are the replicas of
    stage 0, then those of stage 1, and so on.
    """
    pipeline = pipeline_of(configuration)
    hosted, holders = schedule.placement(pipeline), schedule.holders(pipeline)
    sizes = [configuration.stages[own[0]].ranks if own else 1 for own in hosted]
    ranks, world = _ranks(configuration, sizes)
    return Workers(hosted, holders, ranks, world)


def slice_width(configuration: Configuration, worker_ranks: Sequence[int] = ()) -> int:
    """Devices in the slice of one copy of the pipeline."""
    taken = sum(worker_ranks) if worker_ranks else sum(stage.devices for stage in configuration.stages)
    return configuration.slice_devices or taken


def _ranks(configuration: Configuration, sizes: Sequence[int]) -> tuple[tuple[np.ndarray, ...], int]:
    """By worker int64 [copies, ranks], and devices in all."""
    copies, edges = configuration.copies, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    if configuration.devices:
        table = np.asarray(configuration.devices, dtype=np.int64).reshape(copies, -1)
        return tuple(table[:, a:b] for a, b in itertools.pairwise(edges.tolist())), int(table.max()) + 1
    width = slice_width(configuration, sizes)
    copy = np.arange(copies, dtype=np.int64)[:, None]
    if configuration.adjacent:
        found = (a * copies + copy * (b - a) + np.arange(b - a) for a, b in itertools.pairwise(edges.tolist()))
        return tuple(found), copies * width
    first = copy * width + width - edges[-1]
    return tuple(first + np.arange(a, b) for a, b in itertools.pairwise(edges.tolist())), copies * width


def sending_at_once(before: np.ndarray, here: np.ndarray) -> int:
    """Neighbouring devices that send over a boundary at the same time, and share the links that leave them.

    Args:
        before, here: ranks of the stages on both sides, int64 [copies, replicas, ranks of a replica].

    All ranks of a replica send; so do the replicas of a stage, as many as the smaller side has, and all copies of the
    pipeline where they stand beside each other.
    """
    copies, senders, ranks = map(int, before.shape)
    side_by_side = copies > 1 and int(before[1, 0, 0] - before[0, 0, 0]) == senders * ranks
    return (copies if side_by_side else 1) * min(senders, int(here.shape[1])) * ranks


def in_turn(before: np.ndarray, here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranks that send over a boundary and those that receive, [copies, turns, ranks], as replicas take their turns.

    Args:
        before, here: ranks of the stages on both sides, int64 [copies, replicas, ranks of a replica].
    """
    turns = np.arange(math.lcm(before.shape[1], here.shape[1]))
    return before[:, turns % before.shape[1]], here[:, turns % here.shape[1]]


def sums_together(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sets of ranks that sum gradients of weights which several stages hold; all of them communicate at once.

    With g the greatest common divisor of the holders' replicas, replica q of each exchanges with all replicas of the
    others whose number is q modulo g: these see the same micro-batches.

    Args:
        groups: ranks of the stages, int64 [copies, replicas, ranks of a replica]; the first rank stands for a replica.
    """
    sets_a_copy = math.gcd(*(group.shape[1] for group in groups))
    return [
        np.unique(np.concatenate([group[copy, q::sets_a_copy, 0] for group in groups]))
        for copy in range(len(groups[0]))
        for q in range(sets_a_copy)
    ]


def exchanging_at_once(configuration: Configuration, ranks: int, workers: int, holders: int) -> int:
    """Number of groups that exchange at the same time on the same links: those of all stages, rank by rank.

    Args:
        configuration: the configuration.
        ranks: of a replica of the stage.
        workers: of one copy.
        holders: workers of one copy that hold the stage.
    """
    width = configuration.slice_devices // ranks if configuration.slice_devices else workers
    return max(1, width // holders) * ranks

"""One pass over the ideals: whether a pipeline whose stages all keep a cap needs no more than the devices there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solvers.partition._deadline import Deadline
from planner.solvers.partition._piper_ideals import Pairs
from planner.space.partition.piper import PiperProblem


@dataclass(frozen=True)
class Options:
    """Stages a pass may use, sorted by the ideal before them: at most `most_after` replicas may follow."""

    lower: np.ndarray
    upper: np.ndarray
    tensor: np.ndarray
    data: np.ndarray
    most_after: np.ndarray
    row: np.ndarray


class _States:
    """Undominated states of one pass, ideal by ideal: replicas, devices, state before, option taken."""

    def __init__(self, ideals: int) -> None:
        self.begin = np.zeros(ideals, dtype=np.int64)
        self.count = np.zeros(ideals, dtype=np.int64)
        self.table = np.zeros((4, 1024), dtype=np.int64)
        self.table[:, 0] = 0, 0, -1, -1  # the whole graph: nothing comes after it
        self.count[-1] = 1
        self.filled = 1

    def add(self, ideal: int, columns: tuple[np.ndarray, ...]) -> None:
        """Keep those states of an ideal that no other one beats in replicas and devices."""
        replicas, devices = columns[0], columns[1]
        order = np.lexsort((devices, replicas))
        devices = devices[order]
        kept = np.ones(len(order), dtype=bool)
        kept[1:] = devices[1:] < np.minimum.accumulate(devices)[:-1]
        order = order[kept]
        end = self.filled + len(order)
        while end > self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        for row, column in enumerate(columns):
            self.table[row, self.filled : end] = column[order]
        self.begin[ideal], self.count[ideal] = self.filled, len(order)
        self.filled = end


def run_pass(
    problem: PiperProblem, pairs: Pairs, options: Options, reserve: np.ndarray, deadline: Deadline
) -> tuple[list[tuple[int, int, int, int]] | None, int]:
    """Stages (row, tensor, data, replicas after) of a plan, in order, and how many states there were.

    Args:
        problem: the instance.
        pairs: its ideals.
        options: the stages that keep the cap.
        reserve: [i] devices that the nodes of an ideal take at the least.
        deadline: when to stop.

    Returns:
        None for the stages when there is no plan.

    Raises:
        OutOfTime: the deadline passed.
    """
    ideals = len(pairs.members)
    most_devices = (problem.devices - np.minimum(reserve, problem.devices + 1)).astype(np.int64)
    first = np.searchsorted(options.lower, np.arange(ideals + 1))
    cost = options.data * options.tensor
    states = _States(ideals)
    for ideal in range(ideals - 2, -1, -1):
        deadline.check()
        upper = options.upper[first[ideal] : first[ideal + 1]]
        lengths = states.count[upper]
        total = int(lengths.sum())
        if not total:
            continue
        option = np.repeat(np.arange(first[ideal], first[ideal + 1]), lengths)
        offset = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.repeat(states.begin[upper], lengths) + offset
        after = states.table[0, source]
        replicas = after + options.data[option]
        devices = states.table[1, source] + cost[option]
        fits = (after <= options.most_after[option]) & (replicas <= problem.batch) & (devices <= most_devices[ideal])
        if fits.any():
            states.add(ideal, (replicas[fits], devices[fits], source[fits], option[fits]))
    return (_path(states, options) if states.count[0] else None), states.filled


def _path(states: _States, options: Options) -> list[tuple[int, int, int, int]]:
    """The stages that lead to the empty ideal's state with the fewest devices."""
    reached = slice(states.begin[0], states.begin[0] + states.count[0])
    state = int(states.begin[0] + np.argmin(states.table[1, reached]))
    path = []
    while states.table[3, state] >= 0:
        option, state = int(states.table[3, state]), int(states.table[2, state])
        stage = (int(options.row[option]), int(options.tensor[option]), int(options.data[option]))
        path.append((*stage, int(states.table[0, state])))
    return path

"""Piper's stages as pairs of ideals (a stage holds the nodes of the larger ideal that are not in the smaller one).

`run_pass` is the dynamic program over ideals: is there a pipeline of given stages on the available devices?
`cheapest_choices` finds the exact best choices of the nodes of one stage under the memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from planner.graph.ideals import enumerate_ideals, prefix_ideals, topological_lines
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.solvers.partition import search_partition
from planner.solvers.partition.types import NEVER, Deadline, OutOfTime
from planner.space.partition import LayerChoice, PiperProblem


def useful_choices(problem: PiperProblem, tensor: int) -> list[np.ndarray]:
    """For every node, its choices at a tensor degree without the dominated ones (no better in time or any size)."""
    columns = np.column_stack([
        problem.time_s, problem.weight_bytes, problem.activation_bytes, problem.fixed_bytes,
        problem.input_sync_bytes, problem.output_sync_bytes,
    ])  # fmt: skip
    at_degree = problem.choice_tensor == tensor
    useful = []
    for node in range(problem.node_count):
        choices = np.flatnonzero(at_degree & (problem.choice_node == node))
        own = columns[choices]
        no_worse, better = (own[:, None] <= own).all(axis=2), (own[:, None] < own).any(axis=2)
        earlier = choices[:, None] < choices
        useful.append(choices[~(no_worse & (better | earlier)).any(axis=0)])
    return useful


def stage_costs(problem: PiperProblem, inside: np.ndarray, choices: np.ndarray, data: int) -> np.ndarray:
    """[choices] seconds that each choice adds to the stage's time, its syncs on the stage's cut edges included."""
    source, target = problem.edges[:, 0], problem.edges[:, 1]
    entering = inside[target] & ~inside[source]
    leaving = inside[source] & ~inside[target]
    moved = problem.input_sync_bytes[choices] @ entering + problem.output_sync_bytes[choices] @ leaving
    exchange = 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, data) / problem.batch * problem.weight_bytes[choices]
    seconds: np.ndarray = problem.time_s[choices] / data + (2 * moved / data + exchange) / problem.bandwidth_bytes_per_s
    return seconds


def border_seconds(problem: PiperProblem, inside: np.ndarray, data: int) -> float:
    """Transfer time of the stage's cut edges in seconds, independent of the choices inside the stage."""
    crossing = inside[problem.edges[:, 0]] != inside[problem.edges[:, 1]]
    return float(2 * problem.edge_bytes[crossing].sum() / data / problem.bandwidth_bytes_per_s)


def cheapest_choices(
    problem: PiperProblem, useful: list[np.ndarray], inside: np.ndarray, data: int, in_flight: int, deadline: Deadline
) -> tuple[float, np.ndarray]:
    """The stage's least seconds under the memory, infinite if nothing fits, and the choice (index) of each node.

    It is a choice of strategies by layer without switches between them.

    Raises:
        OutOfTime: the deadline passed before the choices were proven.
    """
    deadline.check()
    nodes = np.flatnonzero(inside)
    shape = len(nodes), max(len(useful[v]) for v in nodes)
    seconds, kept = np.full(shape, np.inf), np.zeros(shape)
    for row, v in enumerate(nodes):
        seconds[row, : len(useful[v])] = stage_costs(problem, inside, useful[v], data)
        kept[row, : len(useful[v])] = problem.activation_bytes[useful[v]] * in_flight + problem.fixed_bytes[useful[v]]
    stage = LayerChoice(seconds, kept, np.zeros((shape[1],) * 2), problem.memory_bytes)
    result = search_partition(stage, time_limit_s=deadline.left_s)
    if not result.proven:
        raise OutOfTime
    if result.decision is None:
        return np.inf, np.zeros(0, dtype=np.int64)
    choices = [useful[v][c] for v, c in zip(nodes, result.decision, strict=True)]
    return border_seconds(problem, inside, data) + result.objective, np.array(choices, dtype=np.int64)


@dataclass(frozen=True)
class Pairs:
    """Candidate stages as pairs of nested ideals. i ideals, r pairs, n nodes.

    Attributes:
        members: [i, n] 0/1; ideals by size, the empty one first and the whole graph last.
        lower: [r] ideal before the stage, ascending.
        upper: [r] ideal after it.
        complete: whether all ideals of the graph are included.
    """

    members: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    complete: bool


_MOST_IDEALS = 1500
"""Up to this many ideals, all their pairs are searched; a pass takes seconds."""
_MOST_CHOSEN = 700
"""With more ideals, about this many with little data across them are searched."""
_MOST_LISTED = 28_000
"""With more ideals than this, only those along one topological order are searched."""
_SHARE = 0.25
"""Largest fraction of the time that is spent on listing ideals."""


def pairs_of(node_count: int, edges: np.ndarray, edge_bytes: np.ndarray, deadline: Deadline = NEVER) -> Pairs:
    """All pairs of ideals; with too many ideals, pairs of those with the fewest bytes on cut edges.

    With ideals that cannot be listed before the deadline, pairs of those along one topological order.

    Args:
        node_count: n.
        edges: [m, 2] source and target.
        edge_bytes: [m] bytes that an edge moves if it is cut.
        deadline: when to stop.

    Raises:
        OutOfTime: the deadline passed before any pairs were known.
    """
    arcs = [(u, v) for u, v in edges.tolist()]
    rows, listing = None, deadline.within(deadline.left_s * _SHARE)
    with contextlib.suppress(OutOfTime):
        rows = enumerate_ideals(node_count, arcs, _MOST_LISTED, check=listing.check)
    complete = rows is not None and len(rows) <= _MOST_IDEALS
    if rows is None or not complete:
        chain = prefix_ideals(node_count, topological_lines(node_count, arcs)[1:2])
        rows = chain if rows is None else _cheapest(rows, chain, _members(rows, node_count), edges, edge_bytes)
    deadline.check()
    members = _members(rows, node_count)
    members = members[np.lexsort((*rows.T, members.sum(axis=1)))]
    outside = members @ (1 - members).T  # [row, column] nodes of the row's ideal that the column's does not hold
    np.fill_diagonal(outside, 1)
    lower, upper = np.nonzero(outside == 0)
    return Pairs(members, lower, upper, complete)


def _members(rows: np.ndarray, node_count: int) -> np.ndarray:
    """[i, n] 0/1 from ideals as bits."""
    octets = np.ascontiguousarray(rows).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little", count=node_count).astype(np.float32)


def _cheapest(
    rows: np.ndarray, chain: np.ndarray, members: np.ndarray, edges: np.ndarray, edge_bytes: np.ndarray
) -> np.ndarray:
    """The ideals along one topological order, and of each size an equal number with the fewest bytes on cut edges."""
    sizes = members.sum(axis=1)
    crossing = (members[:, edges[:, 0]] - members[:, edges[:, 1]]) @ edge_bytes
    order = np.lexsort((*rows.T, crossing, sizes))
    first_of_size = np.searchsorted(sizes[order], sizes[order], side="left")
    room = max((_MOST_CHOSEN - len(chain)) // members.shape[1], 0)
    return np.unique(np.concatenate([chain, rows[order[np.arange(len(order)) - first_of_size < room]]]), axis=0)


@dataclass(frozen=True)
class Options:
    """Stages that a pass may use, sorted by the ideal before them.

    Attributes:
        lower: ideal before the stage.
        upper: ideal after it.
        tensor: tensor degree.
        data: replicas.
        most_after: most replicas of later stages with which its samples in flight fit the memory.
        row: position among all pairs.
    """

    lower: np.ndarray
    upper: np.ndarray
    tensor: np.ndarray
    data: np.ndarray
    most_after: np.ndarray
    row: np.ndarray


class _States:
    """Undominated states of one pass, ideal by ideal.

    Rows of the table: replicas and devices of the stages after the ideal, state that it came from, option taken.
    """

    def __init__(self, ideals: int) -> None:
        self.begin = np.zeros(ideals, dtype=np.int64)
        self.count = np.zeros(ideals, dtype=np.int64)
        self.table = np.zeros((4, 1024), dtype=np.int64)
        self.table[:, 0] = 0, 0, -1, -1  # the state of the full ideal: no stage after it
        self.count[-1] = 1
        self.filled = 1

    def add(self, ideal: int, columns: tuple[np.ndarray, ...]) -> None:
        """Store the states of an ideal that are not dominated in replicas and devices."""
        replicas, devices = columns[0], columns[1]
        order = np.lexsort((devices, replicas))
        devices = devices[order]
        undominated = np.ones(len(order), dtype=bool)
        undominated[1:] = devices[1:] < np.minimum.accumulate(devices)[:-1]
        order = order[undominated]
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
    """Stages (row, tensor, data, replicas after) of a plan in order, and the number of states.

    Args:
        problem: the instance.
        pairs: its ideals.
        options: the stages under the cap.
        reserve: [i] lower bound on the devices that the nodes of an ideal need.
        deadline: when to stop.

    Returns:
        None in place of the stages if there is no plan.

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
    """The stages behind the empty ideal's state with the fewest devices."""
    reached = slice(states.begin[0], states.begin[0] + states.count[0])
    state = int(states.begin[0] + np.argmin(states.table[1, reached]))
    path = []
    while states.table[3, state] >= 0:
        option, state = int(states.table[3, state]), int(states.table[2, state])
        stage = (int(options.row[option]), int(options.tensor[option]), int(options.data[option]))
        path.append((*stage, int(states.table[0, state])))
    return path

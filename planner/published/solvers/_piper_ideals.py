"""Piper's stages as pairs of ideals (a stage holds the nodes of the larger ideal that are not in the smaller one).

`run_pass` is the dynamic program over ideals: is there a pipeline of given stages on the available devices?
`cheapest_stage` finds the exact best choices of the nodes of one stage under the memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from planner.graph.ideals import enumerate_ideals, prefix_ideals, topological_lines
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.published.problems import LayerChoice, PiperProblem, PiperStage, stage_figures
from planner.published.solvers import search_partition
from planner.solvers.cluster_chains.search import NEVER, Deadline, OutOfTime


def cheapest_stage(
    problem: PiperProblem, inside: np.ndarray, tensor: int, data: int, in_flight: int, deadline: Deadline
) -> tuple[float, PiperStage | None]:
    """The fastest stage of given nodes under the memory, and its seconds; infinite and None if no choices fit.

    It is a choice of strategies by layer without switches between them.

    Args:
        problem: the instance.
        inside: bool [n] nodes of the stage.
        tensor: tensor degree.
        data: replicas.
        in_flight: samples in flight.
        deadline: when to stop.

    Raises:
        OutOfTime: the deadline passed before the choices were proven.
    """
    deadline.check()
    source, target = problem.edges[:, 0], problem.edges[:, 1]
    moved = problem.input_sync_bytes @ (inside[target] & ~inside[source])
    moved += problem.output_sync_bytes @ (inside[source] & ~inside[target])
    exchange = 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, data) / problem.batch * problem.weight_bytes
    seconds = problem.time_s / data + (2 * moved / data + exchange) / problem.bandwidth_bytes_per_s
    kept = problem.activation_bytes * in_flight + problem.fixed_bytes
    nodes = np.flatnonzero(inside).tolist()
    options = [problem.options(v, tensor) for v in nodes]
    shape = len(nodes), max(map(len, options))
    choice_s, choice_bytes = np.full(shape, np.inf), np.zeros(shape)
    for row, choices in enumerate(options):
        choice_s[row, : len(choices)], choice_bytes[row, : len(choices)] = seconds[choices], kept[choices]
    layers = LayerChoice(choice_s, choice_bytes, np.zeros((shape[1],) * 2), problem.memory_bytes)
    result = search_partition(layers, time_limit_s=deadline.left_s)
    if not result.proven:
        raise OutOfTime
    if result.decision is None:
        return np.inf, None
    stage = PiperStage(tuple(nodes), tensor, data, result.decision)
    return stage_figures(problem, stage, in_flight)[0], stage


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


def run_pass(
    problem: PiperProblem, pairs: Pairs, options: np.ndarray, deadline: Deadline
) -> tuple[list[tuple[int, int, int, int]] | None, int]:
    """Stages (row, tensor, data, replicas after) of a plan in order, and the number of states.

    A state is an ideal with the replicas and devices of the stages after it; dominated ones are dropped.

    Args:
        problem: the instance.
        pairs: its ideals.
        options: int64 [4, o] stages that may be used, sorted by the ideal before them: position among all pairs,
            tensor degree, replicas, and most replicas of later stages with which its samples in flight fit the memory.
        deadline: when to stop.

    Returns:
        None in place of the stages if there is no plan.

    Raises:
        OutOfTime: the deadline passed.
    """
    ideals = len(pairs.members)
    row, tensor, data, most_after = options
    cost = data * tensor
    upper = pairs.upper[row]
    first = np.searchsorted(pairs.lower[row], np.arange(ideals + 1))
    begin, count = np.zeros(ideals, dtype=np.int64), np.zeros(ideals, dtype=np.int64)
    count[-1] = 1
    states = np.array([[0], [0], [-1], [-1]])  # rows: replicas, devices, state after, option that led from it
    for ideal in range(ideals - 2, -1, -1):
        deadline.check()
        choices = np.arange(first[ideal], first[ideal + 1])
        lengths = count[upper[choices]]
        option = np.repeat(choices, lengths)
        offset = np.arange(len(option)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = begin[upper[option]] + offset
        after = states[0, source]
        replicas, devices = after + data[option], states[1, source] + cost[option]
        fits = (after <= most_after[option]) & (replicas <= problem.batch) & (devices <= problem.devices)
        reached = _undominated(np.stack([replicas, devices, source, option])[:, fits])
        begin[ideal], count[ideal] = states.shape[1], reached.shape[1]
        states = np.concatenate([states, reached], axis=1)
    return (_path(states, int(begin[0]), options) if count[0] else None), states.shape[1]


def _undominated(states: np.ndarray) -> np.ndarray:
    """The states for which no other has no more replicas and no more devices, by replicas."""
    states = states[:, np.argsort(states[0] * (states[1].max(initial=0) + 1) + states[1], kind="stable")]
    kept = np.ones(states.shape[1], dtype=bool)
    kept[1:] = states[1, 1:] < np.minimum.accumulate(states[1])[:-1]
    return states[:, kept]


def _path(states: np.ndarray, begin: int, options: np.ndarray) -> list[tuple[int, int, int, int]]:
    """The stages behind the empty ideal's state with the fewest devices."""
    state = begin + int(np.argmin(states[1, begin:]))
    path = []
    while states[3, state] >= 0:
        option, state = int(states[3, state]), int(states[2, state])
        row, tensor, data, _ = options[:, option].tolist()
        path.append((row, tensor, data, int(states[0, state])))
    return path

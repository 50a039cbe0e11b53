"""Sites and moves of the sweep: flat machines, and devices on a tree of levels."""

from __future__ import annotations

from collections import defaultdict

from planner.hardware.collectives import moved_bytes
from planner.hardware.types import Collective
from planner.solvers.partition._deadline import Deadline
from planner.solvers.partition._pipedream_sweep import Layout, Move
from planner.space.partition.pipedream import PipeDreamProblem
from planner.space.partition.pipedream_placed import PlacedPipelineProblem
from planner.space.partition.pipedream_terms import StageCost

Site = tuple[int, int, int, int]
"""(devices before, copies, stride, offset inside a unit); (p, 1, 0, 0) between sections."""


def flat_layout(problem: PipeDreamProblem, devices: int, deadline: Deadline) -> Layout:
    """Any numbers of machines one after another, `devices` in all, on a single level."""
    speed = problem.bandwidth_byte_per_s[0]
    moves = []
    for used in range(devices):
        most = devices - used if problem.replicate else 1
        row = []
        deadline.check()
        for replicas in range(1, most + 1):
            paper = problem.cost is StageCost.PAPER
            traffic = 2.0 * (replicas - 1) if paper else 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, replicas)
            place = (used, replicas, 1, 0)
            row.append(Move(used + replicas, replicas, used + replicas, traffic / speed, 0, 0, place))
        moves.append(tuple(row))
    return Layout(devices, tuple(moves))


def placed_layout(problem: PlacedPipelineProblem, devices: int, deadline: Deadline) -> Layout:
    """Runs of neighbouring devices, and sections of several units that are run alike, `devices` in all."""
    found: dict[Site, list[tuple[Site, Move]]] = defaultdict(list)
    for before in range(devices):
        for width in range(1, devices - before + 1):
            deadline.check()
            after: Site = (before + width, 1, 0, 0)
            found[(before, 1, 0, 0)].append((after, _move(problem, (before, 1, 0, 0), after, width)))
        for level in range(1, len(problem.fanout)):
            stride = problem.unit_devices(level)
            if before % stride == 0:
                for copies in range(2, (devices - before) // stride + 1):
                    deadline.check()
                    _add_section(problem, found, before, copies, stride)
    sites = sorted({*found, *(after for ways in found.values() for after, _ in ways)}, key=_order)
    number = {site: i for i, site in enumerate(sites)}
    rows = []
    for site in sites[:-1]:
        ways = sorted(found[site], key=lambda way: (number[way[0]], way[1].place))
        rows.append(tuple(_aimed(move, number[after]) for after, move in ways))
    return Layout(devices, tuple(rows))


def _order(site: Site) -> tuple[int, ...]:
    """Topological: by devices really used, whole sections last among equals."""
    before, copies, stride, offset = site
    return (before + copies * offset, offset == 0, before, copies, stride)


def _add_section(
    problem: PlacedPipelineProblem, found: dict[Site, list[tuple[Site, Move]]], before: int, copies: int, stride: int
) -> None:
    end: Site = (before + copies * stride, 1, 0, 0)
    for offset in range(stride):
        site: Site = (before, copies, stride, offset) if offset else (before, 1, 0, 0)
        for width in range(1, stride - offset + 1):
            if width == stride:
                continue
            after = end if offset + width == stride else (before, copies, stride, offset + width)
            found[site].append((after, _move(problem, (before, copies, stride, offset), after, width)))


def _move(problem: PlacedPipelineProblem, site: Site, after: Site, width: int) -> Move:
    before, copies, stride, offset = site
    first = before + offset
    devices = [first + k * stride + i for k in range(copies) for i in range(width)]
    within = offset > 0
    last = first + width - 1 if within else devices[-1]
    next_device = after[0] + after[3]
    inside_after = after[1] > 1
    edge = next_device if inside_after or next_device < problem.devices else devices[-1]
    return Move(
        target=-1,
        replicas=len(devices),
        used=before + copies * (offset + width),
        exchange_s_per_byte=problem.exchange_s_per_byte(devices),
        level=problem.span_level(first, last),
        tail_level=problem.span_level(first, edge),
        place=(first, width, copies, stride if copies > 1 else 0),
    )


def _aimed(move: Move, target: int) -> Move:
    return Move(target, move.replicas, move.used, move.exchange_s_per_byte, move.level, move.tail_level, move.place)

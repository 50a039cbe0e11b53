"""HetPipe: virtual workers of unlike devices, each a pipeline, with waves of mini-batches pushed to servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.memory import fits
from planner.schedules.hetpipe import global_staleness
from planner.sync import fabric_of
from planner.sync.traffic import Traffic, nothing
from planner.systems._bench import Bench
from planner.systems._found import Found, Played
from planner.systems._play import play
from planner.systems._price import price, rank_table
from planner.systems._search import best_of, found_of, search
from planner.systems._workers import Cut, Workers, allocations, in_order, kinds, matched, own_cut, point_of
from planner.systems.types import Point, System
from planner.units import format_bytes

MOST_CONCURRENT = 16
"""Mini-batches in a virtual worker's pipeline at the most, and never more than twice its devices."""

Playing = Callable[[Bench, System, Workers, int, int, int], Played | None]
"""Plays virtual workers with micro-batches of a size, so many concurrent, so many each in an iteration."""


@search("hetpipe")
def by_virtual_workers(bench: Bench, system: System) -> Found:
    """The allocation, mini-batch and number of concurrent mini-batches with the highest throughput."""
    policies = allocations(bench)
    wanted = system.options.get("policy", "")
    if wanted and wanted not in policies:
        known = ", ".join(policies) or "none"
        return Found(reason=f"allocation policy {wanted} does not come out on this pool (possible: {known})")
    chosen = {name: own for name, own in policies.items() if name == wanted or not wanted}
    best, words, reason = _best(bench, system, chosen, _play)
    if best is None:
        return Found(reason=reason)
    local, overall = best.weight_versions - 1, best.staleness
    delays = f"own updates: up to {local}" + (f"; of others: up to {overall}" if overall > local else "")
    tells = {"allocation": words, "clock_distance": "0", "delays": delays}
    found = found_of(best, tells=tells, notes=(words,))
    if best.exchanges:
        return replace(found, plan=f"{words}, {found.plan}")
    point = best.point
    shape = f"{len(point.stages)} stages, cut by kind, micro-batch {point.micro_batch} x {point.micro_batches}"
    alike, alike_words, _ = _best(bench, system, chosen, play_alike)
    plan = f"{words}, {shape}"
    return replace(found, plan=plan, played=None, alike=alike, alike_words=alike_words or words)


def _best(
    bench: Bench, system: System, policies: dict[str, Workers], playing: Playing
) -> tuple[Played | None, str, str]:
    """The fastest decision, the allocation in words, and why there is none."""
    best: Played | None = None
    chosen, reason = "", "a virtual worker needs two devices, and the batch must divide among virtual workers"
    for policy, workers in policies.items():
        for size in bench.sizes:
            for concurrent, each in _waves(bench, workers, size):
                played = playing(bench, system, workers, size, concurrent, each)
                if played is None or not played.feasible:
                    reason = played.reason if played else _crowded(bench, workers)
                    continue
                if best is None or played.iteration_s < best.iteration_s:
                    best, chosen = played, f"{_counted(len(workers))} ({policy}), Nm {concurrent}"
                break
    return best, chosen, reason


def _crowded(bench: Bench, workers: Workers) -> str:
    """Why a virtual worker cannot hold the model: not even cut evenly, its largest block, or the stashed wave."""
    chosen, tables = bench.precision, bench.tables(bench.sizes[0])
    a_state = chosen.weight_bytes + chosen.gradient_bytes + bench.state_bytes
    own = min(workers, key=lambda ranks: sum(_room(bench, rank) for rank in ranks))
    room = max(_room(bench, rank) for rank in own)
    even, largest = float(tables.elements[0, -1]) / len(own), float(np.diagonal(tables.elements, 1).max())
    reason = "no stages fit in a virtual worker with a stashed wave"
    state = "weights, gradients and optimizer state"
    if not fits(even * a_state, room):
        return f"{reason}: {state} alone are {format_bytes(even * a_state)} a device when cut evenly over {len(own)}"
    if not fits(largest * a_state, room):
        return f"{reason}: {state} of one block are {format_bytes(largest * a_state)}"
    return reason


def _room(bench: Bench, rank: int) -> float:
    return float(bench.cluster.devices[int(bench.cluster.device_types[rank])].usable_bytes)


def _counted(workers: int) -> str:
    return f"{workers} virtual workers" if workers > 1 else "1 virtual worker"


def _waves(bench: Bench, workers: Workers, size: int) -> Iterator[tuple[int, int]]:
    """(concurrent mini-batches, mini-batches of an iteration) of a virtual worker, the most concurrent first."""
    each, rest = divmod(bench.job.global_batch, size * max(1, len(workers)))
    most = min(MOST_CONCURRENT, 2 * max((len(own) for own in workers), default=0))
    if not rest and each:
        for concurrent in range(min(each, most), 0, -1):
            if each % concurrent == 0:
                yield concurrent, each


def _play(bench: Bench, system: System, workers: Workers, size: int, concurrent: int, each: int) -> Played | None:
    """The slowest kind of virtual worker: all work at its pace, as the clock distance is bounded."""
    found = []
    cuts = _cuts(bench, workers, size, concurrent)
    for alike in kinds(bench, workers):
        points = [
            point_of(cut[0], _dealt(bench, alike, cut, size), len(alike), size, concurrent, each)
            for cut in cuts
            if len(cut[0]) - 1 <= len(alike[0])
        ]
        best = best_of(play(bench, point, system.transfers) for point in points)
        if best is None or not best.feasible:
            return best
        found.append(best)
    slowest = max(found, key=lambda p: p.iteration_s)
    # Workers that are cut alike keep a stage's servers beside the stage, and its exchange has been played; unlike ones
    # deal their shards evenly over all nodes.
    unlike, waves = len(found) > 1, each / concurrent
    exchange = _exchange(bench, [p.point for p in found]) if unlike else nothing(fabric_of(bench.cluster, workers[0]))
    exchange_s = waves * float(exchange.busy_s().max(initial=0.0))
    total_s = max(slowest.iteration_s, exchange_s)
    busy = sum((1 - p.bubble) * p.iteration_s * p.devices for p in found)
    pushed = waves * float(exchange.machine_bytes()[0].sum())
    own = sum(_passed(bench, p.point) if unlike else p.sent_bytes for p in found)
    devices = sum(p.devices for p in found)
    fullest = max(found, key=lambda p: p.memory.total / p.capacity_bytes if p.memory else 0.0)
    return replace(
        slowest,
        memory=fullest.memory,
        capacity_bytes=fullest.capacity_bytes,
        iteration_s=total_s,
        bubble=max(0.0, 1 - busy / (devices * total_s)),
        devices=devices,
        exchanges=() if unlike else slowest.exchanges,
        sent_bytes=own + pushed,
        staleness=max(slowest.staleness, _staleness(workers, concurrent)),
    )


def _passed(bench: Bench, point: Point) -> float:
    """Bytes between the stages of virtual workers in an iteration."""
    return float(price(bench, point).moved_bytes.sum()) * point.micro_batches * point.copies


def _exchange(bench: Bench, points: Sequence[Point]) -> Traffic:
    """One wave's pushes and pulls, the servers' shards spread evenly over the machines.

    Of the B_i bytes that the workers of machine i hold, each of N machines serves a part: machine i pushes B_i / N to
    machine j and answers the pulls of j's workers with B_j / N. A worker's own port passes what it holds.
    """
    held: dict[int, float] = {}
    for point in points:
        figures, table = price(bench, point), rank_table(point)
        for stage, own in enumerate(figures.holders):
            held.update(dict.fromkeys(table[:, list(own)].ravel().tolist(), float(figures.gradient_bytes[stage])))
    fabric = fabric_of(bench.cluster, sorted(held))
    each = np.array([held[rank] for rank in fabric.ranks])
    machine = np.array([sum(held[rank] for rank in own) for own in fabric.machines])
    flows = (machine[:, None] + machine[None, :]) / len(machine)
    out_bytes, in_bytes = np.zeros(len(fabric.ports)), np.zeros(len(fabric.ports))
    for level in range(fabric.top + 1):
        if fabric.inside(level):
            np.add.at(out_bytes, fabric.rank_ports[level], each)
            np.add.at(in_bytes, fabric.rank_ports[level], each)
    for row in fabric.machine_ports:
        crossing = np.where(row[:, None] != row[None, :], flows, 0.0)
        np.add.at(out_bytes, row, crossing.sum(axis=1))
        np.add.at(in_bytes, row, crossing.sum(axis=0))
    return Traffic(fabric, out_bytes, in_bytes)


def play_alike(bench: Bench, system: System, workers: Workers, size: int, concurrent: int, each: int) -> Played | None:
    """One cut for all virtual workers, that of any kind."""
    points = [
        point_of(cut[0], _dealt(bench, workers, cut, size), len(workers), size, concurrent, each)
        for cut in _cuts(bench, workers, size, concurrent)
        if len(cut[0]) - 1 <= min(len(own) for own in workers)
    ]
    best = best_of(play(bench, point, system.transfers) for point in points)
    return None if best is None else replace(best, staleness=max(best.staleness, _staleness(workers, concurrent)))


def _cuts(bench: Bench, workers: Workers, size: int, concurrent: int) -> list[Cut]:
    """The best cut of each kind of virtual worker that has one."""
    found = (own_cut(bench, alike[0], size, concurrent) for alike in kinds(bench, workers))
    return [cut for cut in found if cut is not None]


def _dealt(bench: Bench, workers: Workers, cut: Cut, size: int) -> list[int]:
    """Devices of the stages of a cut, one virtual worker after the other: in its order of types, or matched to it."""
    boundaries, types = cut
    found: list[int] = []
    for ranks in workers:
        own = sorted(bench.cluster.device_types[ranks].tolist()) == sorted(types)
        found += in_order(bench, ranks, types) if own else matched(bench, ranks, boundaries, size)
    return found


def _staleness(workers: Workers, concurrent: int) -> int:
    return global_staleness(concurrent, 0) if len(workers) > 1 else concurrent - 1

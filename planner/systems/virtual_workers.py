"""HetPipe's virtual workers: who belongs to which, each one's cut and order of devices, and waves pushed to servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner import schedules
from planner.errors import InfeasibleError
from planner.hardware.collectives import send_terms
from planner.memory import fits
from planner.schedules.hetpipe import global_staleness
from planner.solvers.partition.hetpipe_dp import solve_hetpipe
from planner.space import Configuration, lay_workers
from planner.space.partition.hetpipe import HetPipeProblem
from planner.sync import Traffic, fabric_of
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.stages import stages_of
from planner.systems.types import Limits, System
from planner.systems.words import words_of
from planner.units import format_bytes

TIME_LIMIT_S = 3.0
"""For the cut of one kind of virtual worker."""

MOST_CONCURRENT = 16
"""Mini-batches in a virtual worker's pipeline at the most, and never more than twice its devices."""

PROBE_BYTES = 1e8
"""Size of the transfer whose rate stands for a link."""

UNLIKE = "each kind of virtual worker has a cut of its own, a plan file one cut for all virtual workers"

Workers = list[list[int]]
Cut = tuple[tuple[int, ...], list[int]]
"""Boundaries, and the device type of each stage."""


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """By allocation and size of mini-batches, the cuts with the most concurrent mini-batches with which one fits."""
    policies, wanted = allocations(setting), system.options.get("policy", "")
    if wanted and wanted not in policies:
        known = ", ".join(policies) or "none"
        raise InfeasibleError(f"allocation policy {wanted} does not come out on this pool (possible: {known})")
    found = False
    chosen = {name: own for name, own in policies.items() if name == wanted or not wanted}
    for policy, workers in chosen.items():
        for size in setting.sizes:
            for own in _of_waves(setting, system, policy, workers, size):
                found |= bool(own)
                yield from own
    if not found:
        raise InfeasibleError(_crowded(setting, list(chosen.values())))


def _of_waves(
    setting: Setting, system: System, policy: str, workers: Workers, size: int
) -> Iterator[Sequence[Proposal]]:
    """Cuts with the most concurrent mini-batches: where kinds are unlike, one for each of them; and one cut for all."""
    for alone in (True, False) if len(kinds(setting, workers)) > 1 else (False,):
        for concurrent, each in _waves(setting, workers, size):
            wave = _Wave(setting, system, workers, size, concurrent, each)
            parts = wave.by_kind() if alone else wave.alike()
            if parts:
                yield [wave.proposal(policy, own) for own in parts]
                break


class _Wave:
    """Virtual workers with so many concurrent mini-batches of a size, and so many each in an iteration."""

    def __init__(
        self, setting: Setting, system: System, workers: Workers, size: int, concurrent: int, each: int
    ) -> None:
        self.setting, self.workers, self.concurrent, self.each = setting, workers, concurrent, each
        (name,), transfers = system.schedules, (system.limits or Limits()).transfers
        self._base = Configuration((), 1, size, each, f"{name}:concurrent={concurrent}", transfers=transfers)
        found = (own_cut(setting, alike[0], size, concurrent) for alike in kinds(setting, workers))
        self._cuts = [cut for cut in found if cut is not None]

    def alike(self) -> list[tuple[Configuration, ...]]:
        """One cut for all virtual workers, that of any kind, where it fits."""
        return [(configuration,) for configuration in self._fitting(self.workers)]

    def by_kind(self) -> list[tuple[Configuration, ...]]:
        """The fastest cut of each kind; none where one kind has no cut that fits."""
        evaluate = self.setting.evaluate
        fitting = [self._fitting(alike) for alike in kinds(self.setting, self.workers)]
        if not all(fitting):
            return []
        return [tuple(min(own, key=lambda c: (evaluate(c).iteration_s, len(c.stages))) for own in fitting)]

    def proposal(self, policy: str, parts: tuple[Configuration, ...]) -> Proposal:
        """What is judged of these virtual workers, and what is told of them."""
        count, local = len(self.workers), self.concurrent - 1
        overall = global_staleness(self.concurrent, 0) if count > 1 else local
        words = f"{count} virtual worker{'s' if count > 1 else ''} ({policy}), Nm {self.concurrent}"
        shape = words_of(parts[0])
        if len(parts) > 1:
            slowest = max(parts, key=lambda part: self.setting.evaluate(part).iteration_s)
            shape = f"{len(slowest.stages)} stages, cut by kind, micro-batch {self._base.micro_batch} x {self.each}"
        delays = f"own updates: up to {local}" + (f"; of others: up to {overall}" if overall > local else "")
        return Proposal(
            parts,
            words=f"{words}, {shape}",
            notes=(words,),
            tells={"allocation": words, "clock_distance": "0", "delays": delays},
            staleness=overall,
            exchange=_pushed(self.setting, parts) * (self.each / self.concurrent) if len(parts) > 1 else None,
            unwritten=UNLIKE if len(parts) > 1 else "",
        )

    def _fitting(self, workers: Workers) -> list[Configuration]:
        """Configurations of virtual workers that are cut alike, the devices of one after those of another."""
        found = []
        for boundaries, types in self._cuts:
            if len(types) <= min(len(own) for own in workers):
                stages, devices = stages_of(boundaries), _dealt(self.setting, workers, boundaries, types, self._base)
                found.append(replace(self._base, stages=stages, copies=len(workers), devices=devices))
        return [configuration for configuration in found if self.setting.fits(configuration)]


def _dealt(
    setting: Setting, workers: Workers, boundaries: Sequence[int], types: list[int], base: Configuration
) -> tuple[int, ...]:
    """Devices of the stages of a cut, one virtual worker after the other: in its order of types, or matched to it."""
    found: list[int] = []
    for ranks in workers:
        own = sorted(setting.cluster.device_types[ranks].tolist()) == sorted(types)
        found += _in_order(setting, ranks, types) if own else _matched(setting, ranks, boundaries, base.micro_batch)
    return tuple(found)


def _in_order(setting: Setting, ranks: Sequence[int], types: Sequence[int]) -> list[int]:
    """A virtual worker's devices in the order of their types."""
    free = {t: [r for r in ranks if int(setting.cluster.device_types[r]) == t] for t in types}
    return [free[t].pop(0) for t in types]


def _matched(setting: Setting, ranks: Sequence[int], boundaries: Sequence[int], size: int) -> list[int]:
    """A virtual worker's devices for stages that are given: the most work to the fastest device, and so on."""
    costs = setting.costs(size)
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    fastest = sorted(ranks, key=lambda r: (float(work_s[setting.cluster.device_types[r]]), r))
    mean = (costs.forward_s + costs.backward_s).mean(axis=0)
    stages = range(len(boundaries) - 1)
    heaviest = sorted(stages, key=lambda s: (-float(mean[boundaries[s] : boundaries[s + 1]].sum()), s))
    places = dict(zip(heaviest, fastest, strict=False))
    return [places[stage] for stage in stages]


def _waves(setting: Setting, workers: Workers, size: int) -> Iterator[tuple[int, int]]:
    """(concurrent mini-batches, mini-batches of an iteration) of a virtual worker, the most concurrent first."""
    each, rest = divmod(setting.job.global_batch, size * max(1, len(workers)))
    most = min(MOST_CONCURRENT, 2 * max((len(own) for own in workers), default=0))
    if not rest and each:
        yield from ((concurrent, each) for concurrent in range(min(each, most), 0, -1) if each % concurrent == 0)


def _pushed(setting: Setting, parts: Sequence[Configuration]) -> Traffic:
    """One wave's pushes and pulls, the servers' shards spread evenly over the machines.

    Of the B_i bytes that the workers of machine i hold, each of N machines serves a part: machine i pushes B_i / N to
    machine j and answers the pulls of j's workers with B_j / N. A worker's own port passes what it holds.
    """
    held: dict[int, float] = {}
    for part in parts:
        workers = lay_workers(part, schedules.get(part.schedule))
        for stage, terms in enumerate(setting.evaluate(part).stages):
            held.update(dict.fromkeys(workers.groups(stage).ravel().tolist(), terms.memory.gradients))
    fabric = fabric_of(setting.cluster, sorted(held))
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


def _crowded(setting: Setting, policies: Sequence[Workers]) -> str:
    """Why a virtual worker cannot hold the model: not even cut evenly, its largest block, or the stashed wave."""
    each = [own for workers in policies for own in workers]
    if not any(
        _of_size for workers in policies for size in setting.sizes for _of_size in _waves(setting, workers, size)
    ):
        return "a virtual worker needs two devices, and the batch must divide among virtual workers"
    costs, room = setting.costs(setting.sizes[0]), setting.cluster.devices
    own = min(each, key=lambda ranks: sum(room[int(setting.cluster.device_types[r])].usable_bytes for r in ranks))
    most = max(room[int(setting.cluster.device_types[r])].usable_bytes for r in own)
    even = float(costs.parameter_elements.sum()) / len(own) * setting.element_bytes
    largest = float(costs.parameter_elements.max()) * setting.element_bytes
    reason, state = "no stages fit in a virtual worker with a stashed wave", "weights, gradients and optimizer state"
    if not fits(even, most):
        return f"{reason}: {state} alone are {format_bytes(even)} a device when cut evenly over {len(own)}"
    return reason if fits(largest, most) else f"{reason}: {state} of one block are {format_bytes(largest)}"


def allocations(setting: Setting) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    Where a node is used in part, virtual workers are equal parts of nodes; where none come out, it is left idle.
    HD joins the fastest type with the slowest, the second fastest with the second slowest, and so on, half of a virtual
    worker from each; a type left in the middle keeps to itself. It stands where virtual workers of a node's size come
    out whole.
    """
    ranks = list(range(setting.devices))
    found: dict[str, Workers] = {}
    size = setting.cluster.node_size or setting.devices
    part = math.gcd(size, setting.devices) if setting.devices > size else setting.devices
    part = part if part > 1 else size
    if part > 1:
        found["NP"] = [ranks[i : i + part] for i in range(0, setting.devices - part + 1, part)]
    by_type: dict[int, list[int]] = {}
    for rank in ranks:
        by_type.setdefault(int(setting.cluster.device_types[rank]), []).append(rank)
    count = math.gcd(*(len(own) for own in by_type.values()))
    if len(by_type) > 1:
        shares = [len(own) // count for own in by_type.values()]
        found["ED"] = [
            [r for own, k in zip(by_type.values(), shares, strict=True) for r in own[v * k : (v + 1) * k]]
            for v in range(count)
        ]
        hybrid = _hybrid(setting, by_type, size)
        if hybrid is not None and len(by_type) > 2:
            found["HD"] = hybrid
    return found


def _hybrid(setting: Setting, by_type: dict[int, list[int]], size: int) -> Workers | None:
    """Virtual workers of `size` devices, half of one type and half of its partner; None where they do not come out."""
    costs = setting.costs(setting.sizes[0])
    fastest_first = sorted(by_type, key=lambda t: float((costs.forward_s + costs.backward_s)[t].sum()))
    found: Workers = []
    while fastest_first:
        pair = {fastest_first.pop(0), fastest_first.pop() if fastest_first else -1} - {-1}
        part = size // len(pair)
        counts = {len(by_type[t]) for t in pair}
        if part < 1 or size % len(pair) or len(counts) > 1 or (count := counts.pop()) % part:
            return None
        found += [
            [r for t in sorted(pair) for r in by_type[t][v * part : (v + 1) * part]] for v in range(count // part)
        ]
    return found


def kinds(setting: Setting, workers: Workers) -> list[Workers]:
    """Virtual workers with the same devices together."""
    found: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        found.setdefault(tuple(sorted(setting.cluster.device_types[ranks].tolist())), []).append(ranks)
    return list(found.values())


def own_cut(setting: Setting, ranks: Sequence[int], size: int, concurrent: int) -> Cut | None:
    """A virtual worker's cut by the exact search; None where nothing fits.

    Args:
        setting: model, cluster and job.
        ranks: its devices.
        size: micro-batch size.
        concurrent: mini-batches in its pipeline.
    """
    costs, cluster = setting.costs(size), setting.cluster
    counts = Counter(int(t) for t in cluster.device_types[list(ranks)])
    types = sorted(counts)
    weight_bytes = setting.precision.weight_bytes
    problem = HetPipeProblem(
        (costs.forward_s + costs.backward_s)[types],
        costs.parameter_elements * weight_bytes,
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        tuple(counts[t] for t in types),
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        _speeds(setting, ranks, types),
        concurrent=concurrent,
        optimizer_per_weight=setting.element_bytes / weight_bytes - 1,
        use_all=len(ranks) <= setting.blocks,
    )
    decision = solve_hetpipe(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else (decision.boundaries, [types[kind] for kind in decision.types])


def _speeds(setting: Setting, ranks: Sequence[int], types: Sequence[int]) -> np.ndarray:
    """[t, t] bytes a second between a device of one type and another of the virtual worker."""
    found = np.full((len(types), len(types)), np.inf)
    of_type = setting.cluster.device_types
    for i, a in enumerate(types):
        for j, b in enumerate(types):
            pairs = [(r, s) for r in ranks for s in ranks if r != s and of_type[r] == a and of_type[s] == b]
            if pairs:
                seconds = send_terms(setting.cluster, *np.asarray(pairs).T).seconds(PROBE_BYTES)
                found[i, j] = PROBE_BYTES / float(seconds.max())
    return found


SOLVERS.register("hetpipe", propose)

"""HetPipe's virtual workers: who belongs to which, and the exact order of devices and cuts of each.

The search is a DP over (devices used by type, last type, layers placed).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.hardware.collectives import send_terms
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    Deadline,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
    verified,
)
from planner.solvers.partition.chains import prefix_differences, real_runs, run_sums
from planner.space.cuts import StageTables
from planner.space.partition.hetpipe import HetPipeDecision, HetPipeProblem, in_flight
from planner.space.types import BlockCosts

TIME_LIMIT_S = 3.0
"""For the cut of one kind of virtual worker."""

PROBE_BYTES = 1e8
"""Size of the transfer whose rate stands for a link."""

Workers = list[list[int]]
"""Ranks of each virtual worker."""

Cut = tuple[tuple[int, ...], list[int]]
"""Boundaries, and the device type of each stage."""


def allocations(cluster: Cluster, devices: int, work_s: Sequence[float]) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    Where a node is used in part, virtual workers are equal parts of nodes; where none come out, it is left idle.
    HD joins the fastest type with the slowest, the second fastest with the second slowest, and so on, half of a virtual
    worker from each; a type left in the middle keeps to itself. It stands where virtual workers of a node's size come
    out whole.

    Args:
        cluster: the machine.
        devices: that are used, in line.
        work_s: by device type, forward and backward of the whole model.
    """
    ranks = list(range(devices))
    found: dict[str, Workers] = {}
    size = cluster.node_size or devices
    part = math.gcd(size, devices) if devices > size else devices
    part = part if part > 1 else size
    if part > 1:
        found["NP"] = [ranks[i : i + part] for i in range(0, devices - part + 1, part)]
    by_type: dict[int, list[int]] = {}
    for rank in ranks:
        by_type.setdefault(int(cluster.device_types[rank]), []).append(rank)
    count = math.gcd(*(len(own) for own in by_type.values()))
    if len(by_type) > 1:
        shares = [len(own) // count for own in by_type.values()]
        found["ED"] = [
            [r for own, k in zip(by_type.values(), shares, strict=True) for r in own[v * k : (v + 1) * k]]
            for v in range(count)
        ]
        hybrid = _hybrid(work_s, by_type, size)
        if hybrid is not None and len(by_type) > 2:
            found["HD"] = hybrid
    return found


def _hybrid(work_s: Sequence[float], by_type: dict[int, list[int]], size: int) -> Workers | None:
    """Virtual workers of `size` devices, half of one type and half of its partner; None where they do not come out."""
    fastest_first = sorted(by_type, key=work_s.__getitem__)
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


def kinds(cluster: Cluster, workers: Workers) -> list[Workers]:
    """Virtual workers with the same devices together."""
    found: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        found.setdefault(tuple(sorted(cluster.device_types[ranks].tolist())), []).append(ranks)
    return list(found.values())


def own_cut(tables: StageTables, cluster: Cluster, ranks: Sequence[int], concurrent: int) -> Cut | None:
    """A virtual worker's cut by the exact search; None where nothing fits.

    Args:
        tables: of the chain, for a mini-batch.
        cluster: the machine.
        ranks: its devices.
        concurrent: mini-batches in its pipeline.
    """
    costs, chosen = tables.costs, tables.precision
    counts = Counter(int(t) for t in cluster.device_types[list(ranks)])
    types = sorted(counts)
    problem = HetPipeProblem(
        (costs.forward_s + costs.backward_s)[types],
        costs.parameter_elements * chosen.weight_bytes,
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        tuple(counts[t] for t in types),
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        _speeds(cluster, ranks, types),
        concurrent=concurrent,
        optimizer_per_weight=(chosen.held_gradient_bytes + tables.state_bytes) / chosen.weight_bytes,
        use_all=len(ranks) <= len(costs.parameter_elements),
    )
    decision = solve_hetpipe(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else (decision.boundaries, [types[kind] for kind in decision.types])


def _speeds(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> np.ndarray:
    """[t, t] bytes a second between a device of one type and another of the virtual worker."""
    found = np.full((len(types), len(types)), np.inf)
    of_type = cluster.device_types
    for i, a in enumerate(types):
        for j, b in enumerate(types):
            pairs = [(r, s) for r in ranks for s in ranks if r != s and of_type[r] == a and of_type[s] == b]
            if pairs:
                seconds = send_terms(cluster, *np.asarray(pairs).T).seconds(PROBE_BYTES)
                found[i, j] = PROBE_BYTES / float(seconds.max())
    return found


def dealt(costs: BlockCosts, cluster: Cluster, workers: Workers, cut: Cut) -> tuple[int, ...]:
    """Devices of the stages of a cut, one virtual worker after the other: in its order of types, or matched to it."""
    boundaries, types = cut
    found: list[int] = []
    for ranks in workers:
        own = sorted(cluster.device_types[ranks].tolist()) == sorted(types)
        found += _in_order(cluster, ranks, types) if own else _matched(costs, cluster, ranks, boundaries)
    return tuple(found)


def _in_order(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> list[int]:
    """A virtual worker's devices in the order of their types."""
    free = {t: [r for r in ranks if int(cluster.device_types[r]) == t] for t in types}
    return [free[t].pop(0) for t in types]


def _matched(costs: BlockCosts, cluster: Cluster, ranks: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """A virtual worker's devices for stages that are given: the most work to the fastest device, and so on."""
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    fastest = sorted(ranks, key=lambda r: (float(work_s[cluster.device_types[r]]), r))
    mean = (costs.forward_s + costs.backward_s).mean(axis=0)
    stages = range(len(boundaries) - 1)
    heaviest = sorted(stages, key=lambda s: (-float(mean[boundaries[s] : boundaries[s + 1]].sum()), s))
    places = dict(zip(heaviest, fastest, strict=False))
    return [places[stage] for stage in stages]


NAME = "hetpipe-dp"
State = tuple[tuple[int, ...], int]
"""Devices used of each type, type of the last."""


def solve_hetpipe(
    problem: HetPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: HetPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The order of devices and the cuts with the fastest slowest stage.

    With u devices used before a stage, it is the (u + 1)-st: so what it keeps in flight is known from the state, and a
    type need not be told from another device of it. O(prod(counts + 1) types^2 layers^2), vectorised over layers; for
    pipelines that may leave devices idle once for each length.
    """
    deadline = Deadline(time_limit_s)
    best, decision, finished, states = math.inf, None, False, 0
    if start is not None and (verdict := problem.judge(start)).feasible:
        best, decision = verdict.objective, start
    devices = sum(problem.counts)
    lengths = [devices] if problem.use_all else range(min(devices, problem.layers), 0, -1)
    with contextlib.suppress(OutOfTime):
        for stages in lengths:
            if stages > problem.layers:
                continue
            deadline.check()
            line = _Line(problem, stages, deadline)
            slowest, plan = line.run()
            states += len(line.best)
            if plan is not None and slowest < best:
                best, decision = slowest, plan
                if progress:
                    progress(NAME, best, 0.0)
        finished = True
    bound = best if finished else 0.0
    return verified(problem, decision, best, bound, NAME, "orders of devices and cuts", {"states": states})


class _Line:
    """Pipelines of exactly `stages` stages."""

    def __init__(self, problem: HetPipeProblem, stages: int, deadline: Deadline) -> None:
        self.problem, self.stages, self.deadline = problem, stages, deadline
        self.best: dict[State, np.ndarray] = {}
        self.kinds = [kind for kind, count in enumerate(problem.counts) if count]
        self.compute = {kind: prefix_differences(problem.compute_s[kind]) for kind in self.kinds}
        self.weights, self.saved = run_sums(problem.weight_bytes), run_sums(problem.saved_bytes)
        self.real = real_runs(problem.layers)

    def run(self) -> tuple[float, HetPipeDecision | None]:
        """The slowest stage of the best pipeline, and it."""
        for used in sorted(self._multisets(), key=lambda used: (sum(used), used)):
            self.deadline.check()
            for kind in self.kinds:
                if used[kind]:
                    self.best[used, kind] = self._arrive(used, kind).min(axis=0)
        ends = [(float(v[-1]), state) for state, v in self.best.items() if sum(state[0]) == self.stages]
        slowest, state = min(ends, default=(math.inf, None))
        if state is None or math.isinf(slowest):
            return math.inf, None
        return slowest, self._trace(state)

    def _multisets(self) -> list[tuple[int, ...]]:
        every = itertools.product(*(range(count + 1) for count in self.problem.counts))
        return [used for used in every if 1 <= sum(used) <= self.stages]

    def _arrive(self, used: tuple[int, ...], kind: int) -> np.ndarray:
        """Slowest stage of pipelines on `used` whose last device is of a type, by (cut before it, cut behind it)."""
        before = tuple(count - (i == kind) for i, count in enumerate(used))
        stage = np.where(self._fits(sum(before), kind), self.compute[kind], np.inf)
        if not any(before):
            only = np.full_like(stage, np.inf)
            only[0] = stage[0]
            return only
        ways = []
        for last in self.kinds:
            if before[last]:
                transfer = 2 * self.problem.boundary_bytes / self.problem.bandwidth_byte_per_s[last, kind]
                ways.append(np.maximum(self.best[before, last][:, None], stage + transfer[:, None]))
        return np.asarray(np.minimum.reduce(ways))

    def _fits(self, place: int, kind: int) -> np.ndarray:
        """Which runs of layers fit on a device of a type as stage `place` (0 is the first)."""
        problem = self.problem
        kept = in_flight(place, self.stages, problem.concurrent)
        versions = (kept if problem.stash_weights else 1) + problem.optimizer_per_weight
        needed = versions * self.weights + kept * self.saved
        return np.asarray(self.real & fits(needed, problem.memory_bytes[kind]))

    def _trace(self, state: State) -> HetPipeDecision:
        marks, types = [self.problem.layers], [state[1]]
        while True:
            used, kind = state
            at = int(np.argmin(self._arrive(used, kind)[:, marks[-1]]))
            marks.append(at)
            before = tuple(count - (i == kind) for i, count in enumerate(used))
            if not any(before):
                return HetPipeDecision(tuple(reversed(marks)), tuple(reversed(types)))
            here = marks[-2]
            stage = self.compute[kind][at, here]
            prices = {
                last: max(
                    float(self.best[before, last][at]),
                    stage + 2 * self.problem.boundary_bytes[at] / float(self.problem.bandwidth_byte_per_s[last, kind]),
                )
                for last in self.kinds
                if before[last]
            }
            last = min(prices, key=lambda kind: (prices[kind], kind))
            types.append(last)
            state = (before, last)


PARTITION_SOLVERS.register(NAME, PartitionSolver((HetPipeProblem,), exact=True, run=solve_hetpipe))

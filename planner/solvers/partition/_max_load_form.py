"""The max-load problem on groups of nodes that share a device in at least one best plan; all its solvers work on it.

Groups, nets and arcs replace nodes and edges. A *net* is a node's result with its producer and all its readers: every
accelerator that holds some but not all of the net's groups pays the net's cost, which is exactly the published transfer
cost. An *arc* is a forward edge between two groups; it constrains contiguous plans only.

Groups are merged by rules that keep at least one best plan:

* nodes of one colour, and cycles of forward edges between groups (contiguous plans only), share a device;
* a light group joins a neighbour if the nets of these two cost more than its own work and all its other nets;
* two groups share a device if separating them would raise some device's load to the incumbent's. This rule keeps plans
  better than the incumbent only: if the reduced problem has none, the incumbent is optimal.

The module also holds the lower bounds that need no search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.graph.ideals import ancestor_bits, components
from planner.memory import fits
from planner.solvers.partition.types import NEVER, RELATIVE_TOLERANCE, Deadline, Search
from planner.space.partition import MaxLoadDecision, MaxLoadProblem

_MOST_COUNTED = 600
_SAFE = 1 - 1e-12
"""Factor on bounds that are sums of floats, which covers their rounding."""


@dataclass(frozen=True, eq=False)
class Form:
    """A max-load problem on g groups.

    Attributes:
        problem: the problem on nodes.
        group_of: int64 [n] group of each node.
        acc: float64 [g] time on an accelerator, ms.
        cpu: float64 [g] time on a CPU, ms.
        size: float64 [g] memory on an accelerator, bytes.
        supported: bool [g] whether an accelerator can run it.
        ordered: bool [g] whether it has a forward node; only such groups have arcs.
        nets: sorted groups of each net, two or more; nets with the same groups are merged.
        cost: float64 [nets] ms that a net costs each accelerator that holds a part of it.
        arcs: sorted forward edges between groups, without cycles; empty unless contiguous.
    """

    problem: MaxLoadProblem
    group_of: np.ndarray
    acc: np.ndarray
    cpu: np.ndarray
    size: np.ndarray
    supported: np.ndarray
    ordered: np.ndarray
    nets: tuple[tuple[int, ...], ...]
    cost: np.ndarray
    arcs: tuple[tuple[int, int], ...]

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.acc)

    @property
    def roomy(self) -> bool:
        """True if one accelerator could hold all groups, so that memory never constrains."""
        return fits(float(self.size.sum()), self.problem.memory_bytes)

    def decision(self, device_of_group: Iterable[int]) -> MaxLoadDecision:
        """The plan that gives every node the device of its group."""
        device = np.asarray(list(device_of_group), dtype=np.int64)
        return tuple(int(d) for d in device[self.group_of])


def form_of(problem: MaxLoadProblem) -> Form:
    """Group nodes by colour and, for contiguous plans, by cycles of forward edges; O(nodes + edges)."""
    n = len(problem.accelerator_ms)
    first: dict[int, int] = {}
    keys = [first.setdefault(int(c), i) if c >= 0 else i for i, c in enumerate(problem.colour)]
    group_of = _renumber(keys)
    forward = [
        (int(u), int(v)) for u, v in problem.edges if not problem.backward[u] and not problem.backward[v]
    ]  # fmt: skip
    if problem.contiguous:
        arcs = {(int(group_of[u]), int(group_of[v])) for u, v in forward}
        group_of = _renumber(np.array(components(int(group_of.max(initial=-1)) + 1, arcs))[group_of]) if n else group_of
    return _build(problem, group_of)


def _renumber(keys: Iterable[int]) -> np.ndarray:
    """int64 [n] the keys renumbered from 0 in the order of their first node."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(int(k), len(numbers)) for k in keys], dtype=np.int64)


def _build(problem: MaxLoadProblem, group_of: np.ndarray) -> Form:
    g = int(group_of.max(initial=-1)) + 1
    supported = np.ones(g, dtype=bool)
    np.logical_and.at(supported, group_of, problem.supported)
    ordered = np.zeros(g, dtype=bool)
    np.logical_or.at(ordered, group_of, ~problem.backward)
    pins: dict[int, set[int]] = {}
    arcs: set[tuple[int, int]] = set()
    for u, v in problem.edges.tolist():
        a, b = int(group_of[u]), int(group_of[v])
        if a == b:
            continue
        pins.setdefault(u, {a}).add(b)
        if problem.contiguous and not problem.backward[u] and not problem.backward[v]:
            arcs.add((a, b))
    nets: dict[tuple[int, ...], list[float]] = {}
    for u, groups in pins.items():
        if problem.transfer_ms[u] > 0:
            nets.setdefault(tuple(sorted(groups)), []).append(float(problem.transfer_ms[u]))
    shapes = sorted(nets)
    return Form(
        problem=problem,
        group_of=group_of,
        acc=_sums(problem.accelerator_ms, group_of, g),
        cpu=_sums(problem.cpu_ms, group_of, g),
        size=_sums(problem.size_bytes, group_of, g),
        supported=supported,
        ordered=ordered,
        nets=tuple(shapes),
        cost=np.array([math.fsum(nets[s]) for s in shapes], dtype=float),
        arcs=tuple(sorted(arcs)),
    )


def _sums(values: np.ndarray, group_of: np.ndarray, groups: int) -> np.ndarray:
    members: list[list[float]] = [[] for _ in range(groups)]
    for value, group in zip(values.tolist(), group_of.tolist(), strict=True):
        members[group].append(value)
    return np.array([math.fsum(m) for m in members], dtype=float)


def reduce_form(form: Form, incumbent_ms: float = math.inf, deadline: Deadline = NEVER) -> Form:
    """Merge groups by the rules above until none applies, or until the deadline (every merge is valid by itself).

    Args:
        form: groups so far.
        incumbent_ms: load of a known plan; the reduced problem keeps a plan below it if one exists.
        deadline: when to stop.

    Complexity: each pass takes O(pins of all nets + groups^2 / 64); passes are few.
    """
    while True:
        merged = None if deadline.passed else _one_pass(form, incumbent_ms)
        if merged is None:
            return form
        if form.problem.contiguous:
            arcs = {(int(merged[a]), int(merged[b])) for a, b in form.arcs}
            merged = np.array(components(form.groups, arcs), dtype=np.int64)[merged]
        form = _build(form.problem, _renumber(merged[form.group_of]))


def merge_groups(form: Form, into: np.ndarray) -> Form:
    """The form with group v merged into group `into[v]`, int64 [g]; may exclude all best plans."""
    return _build(form.problem, _renumber(into[form.group_of]))


def _one_pass(form: Form, incumbent: float) -> np.ndarray | None:
    """Merge each group with at most one other; int64 [g] the group that each is merged into, None if none merges."""
    rules = _Rules(form, incumbent)
    into = np.arange(form.groups, dtype=np.int64)
    busy = np.zeros(form.groups, dtype=bool)
    for v in range(form.groups):
        if busy[v]:
            continue
        target = next((u for u in rules.neighbours[v] if not busy[u] and rules.together(v, u)), None)
        if target is None:
            continue
        into[v] = target
        # A rule reads the neighbours of both groups, so these must not be merged in the same pass.
        for w in (v, target, *rules.neighbours[v], *rules.neighbours[target]):
            busy[w] = True
    return into if (into != np.arange(form.groups)).any() else None


class _Rules:
    """The merging rules on one form."""

    def __init__(self, form: Form, incumbent: float) -> None:
        self.form = form
        # A plan counts as better only if the difference exceeds rounding.
        self.incumbent = incumbent * (1 - 1e-12)
        self.nets_of: list[list[int]] = [[] for _ in range(form.groups)]
        for e, pins in enumerate(form.nets):
            for group in pins:
                self.nets_of[group].append(e)
        self.neighbours = [sorted({u for e in nets for u in form.nets[e]} - {v}) for v, nets in enumerate(self.nets_of)]
        problem = form.problem
        self.no_cpu = (form.cpu >= self.incumbent) | (problem.cpus == 0)
        self.no_acc = ~form.supported | (problem.accelerators == 0) | (form.acc >= self.incumbent)
        self.before = ancestor_bits(form.groups, form.arcs)
        self.after = ancestor_bits(form.groups, [(b, a) for a, b in form.arcs])
        self.sources: list[list[int]] = [[] for _ in range(form.groups)]
        self.targets: list[list[int]] = [[] for _ in range(form.groups)]
        for a, b in form.arcs:
            self.sources[b].append(a)
            self.targets[a].append(b)

    def together(self, v: int, u: int) -> bool:
        """True if some best plan has v on u's device."""
        return self._follows(v, u) or self._inseparable(v, u)

    def _follows(self, v: int, u: int) -> bool:
        """True if moving v to u's device never raises a load: the second rule of the module."""
        form = self.form
        shared_cost = sum(float(form.cost[e]) for e in self.nets_of[v] if form.nets[e] == (min(u, v), max(u, v)))
        other_cost = sum(float(form.cost[e]) for e in self.nets_of[v] if u not in form.nets[e])
        if form.acc[v] + other_cost > shared_cost * (1 - 1e-12):
            return False
        cpu_ok = form.cpu[v] == 0 or bool(self.no_cpu[u])
        acc_ok = (bool(form.supported[v]) and (form.size[v] == 0 or form.roomy)) or bool(self.no_acc[u])
        return cpu_ok and acc_ok and self._may_move(v, u)

    def _may_move(self, v: int, u: int) -> bool:
        """True if moving v to u's stage keeps every forward edge in order."""
        form = self.form
        if not form.problem.contiguous or not form.ordered[v]:
            return True
        up = self.before[u] | 1 << u
        down = self.after[u] | 1 << u
        if u in self.sources[v] and all(up >> p & 1 for p in self.sources[v]):
            return True
        return u in self.targets[v] and all(down >> s & 1 for s in self.targets[v])

    def _inseparable(self, v: int, u: int) -> bool:
        """True if every plan with v and u apart has the incumbent's load or more: the third rule of the module."""
        form = self.form
        common = sum(float(form.cost[e]) for e in self.nets_of[v] if u in form.nets[e])
        load_v, load_u = form.acc[v] + common, form.acc[u] + common
        limit = self.incumbent
        accs_full = max(load_v, load_u) >= limit or form.problem.accelerators < 2 or bool(self.no_acc[[u, v]].any())
        v_cpu_full = bool(self.no_cpu[v]) or bool(self.no_acc[u]) or load_u >= limit
        u_cpu_full = bool(self.no_cpu[u]) or bool(self.no_acc[v]) or load_v >= limit
        cpus_full = form.problem.cpus < 2 or bool(self.no_cpu[[u, v]].any())
        return accs_full and v_cpu_full and u_cpu_full and cpus_full


def simple_bound(form: Form) -> float:
    """The larger of the fluid and the pigeonhole bound, ms; O(g^2)."""
    return max(fluid_bound(form), pigeonhole_bound(form)) * _SAFE


def fluid_bound(form: Form) -> float:
    """Least largest load in ms if groups could be split at will and transfers were free; O(g log g).

    The groups with the smallest ratio of CPU time to accelerator time go to the CPUs.
    """
    accs, cpus = form.problem.accelerators, form.problem.cpus
    cpu_only = ~form.supported
    cpu_done, acc_left = float(form.cpu[cpu_only].sum()), float(form.acc[form.supported].sum())
    if not cpus:
        return acc_left / accs
    if not accs:
        return float(form.cpu.sum()) / cpus
    free = np.flatnonzero(form.supported & (form.acc > 0))
    order = free[np.argsort(form.cpu[free] / form.acc[free], kind="stable")]
    for v in order:
        acc, cpu = float(form.acc[v]), float(form.cpu[v])
        if (cpu_done + cpu) / cpus >= (acc_left - acc) / accs:
            # With this share of the group on the CPUs, both kinds of devices finish together.
            share = (acc_left / accs - cpu_done / cpus) / (cpu / cpus + acc / accs)
            return max(acc_left / accs - max(share, 0.0) * acc / accs, cpu_done / cpus)
        cpu_done, acc_left = cpu_done + cpu, acc_left - acc
    return max(acc_left / accs, cpu_done / cpus)


def pigeonhole_bound(form: Form) -> float:
    """Lower bound in ms by the pigeonhole principle: of q k + 1 groups on k accelerators, q + 1 share one. O(g^2).

    Below a load T the CPUs can hold a limited number of the m largest groups. If q k + 1 of them are left to the
    accelerators, one accelerator holds q + 1 of them, so T must be at least the sum of the q + 1 smallest of the m. The
    bound is the least T that violates this for no q and m, found by bisection.
    """
    accs, cpus = form.problem.accelerators, form.problem.cpus
    eligible = np.flatnonzero(form.supported & (form.acc > 0))
    order = eligible[np.argsort(-form.acc[eligible], kind="stable")][:_MOST_COUNTED]
    if not accs or not len(order):
        return 0.0
    sizes = form.acc[order]
    prefix = np.concatenate([[0.0], np.cumsum(sizes)])
    taken = _cumulated_smallest(form.cpu[order]) / cpus if cpus else np.full((len(order), 1), np.inf)
    counts = np.arange((len(order) - 1) // accs + 1)

    def contradicted(load: float) -> bool:
        on_accelerators = np.arange(1, len(order) + 1) - (taken <= load).sum(axis=1)
        on_accelerators_max = np.maximum.accumulate(on_accelerators)
        m = np.searchsorted(on_accelerators_max, counts * accs + 1) + 1
        q = counts[m <= len(order)]
        m = m[m <= len(order)]
        return bool((prefix[m] - prefix[m - q - 1] > load).any())

    low, high = 0.0, float(prefix[-1]) * (1 + 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        if contradicted(middle):
            low = middle
        else:
            high = middle
    return low


def _cumulated_smallest(times: np.ndarray) -> np.ndarray:
    """[m, i] sum of the i + 1 smallest among the first m + 1 times; infinite for i > m."""
    rows = np.full((len(times), len(times)), np.inf)
    for m in range(len(times)):
        rows[m, : m + 1] = np.cumsum(np.sort(times[: m + 1]))
    return rows


def prove(search: Search, bound: float) -> None:
    """Raise the bound of a search, ms; a bound within rounding of the best load is set to that load."""
    search.prove(search.objective if bound >= search.objective * (1 - RELATIVE_TOLERANCE) else bound)


def space(problem: MaxLoadProblem) -> str:
    """The plans that a bound of the problem covers, in words."""
    return "contiguous plans" if problem.contiguous else "all plans"


def canonical(problem: MaxLoadProblem, decision: MaxLoadDecision) -> MaxLoadDecision:
    """The same plan with equal devices numbered in the order of their first node, so that equal plans compare equal."""
    names: dict[int, int] = {}
    next_number = [0, problem.accelerators]
    for device in decision:
        if device not in names:
            kind = int(device >= problem.accelerators)
            names[device] = next_number[kind]
            next_number[kind] += 1
    return tuple(names[d] for d in decision)


def group_devices(form: Form, plan: MaxLoadDecision) -> np.ndarray:
    """int64 [g] device of each group; of a group on several devices, that of its node with the most work."""
    nodes = np.array(plan, dtype=np.int64)
    by_work = np.argsort(form.problem.accelerator_ms, kind="stable")
    device = np.zeros(form.groups, dtype=np.int64)
    device[form.group_of[by_work]] = nodes[by_work]
    return device

"""The max-load problem on groups of nodes that share a device in at least one best plan; all its solvers work on it.

Groups, nets and arcs replace nodes and edges. A *net* is a node's result with its producer and all its readers: every
accelerator that holds some but not all of the net's groups pays the net's cost, which is exactly the published transfer
cost. An *arc* is a forward edge between two groups; it constrains contiguous plans only.

Nodes of one colour, and cycles of forward edges between groups (contiguous plans only), are one group. Two rules that
keep at least one best plan merge groups:

* two groups share a device if separating them would raise some device's load to the incumbent's. This rule keeps plans
  better than the incumbent only: if the reduced problem has none, the incumbent is optimal;
* a light group joins a neighbour if the nets of these two cost more than its own work and all its other nets (not in
  contiguous plans, where the order may forbid it).

The module also holds the lower bounds that need no search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.graph import components
from planner.memory import fits
from planner.published.problems import MaxLoadDecision, MaxLoadProblem
from planner.solvers.cluster_chains.search import NEVER, RELATIVE_TOLERANCE, Deadline, SearchState
from planner.sums import float_sum

_MOST_COUNTED = 600
_SAFE = 1 - 1e-12
"""Factor on bounds that are sums of floats, which covers their rounding."""


@dataclass(frozen=True, eq=False)
class MaxLoadForm:
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


def form_of(problem: MaxLoadProblem) -> MaxLoadForm:
    """Group nodes by colour and, for contiguous plans, by cycles of forward edges; O(nodes + edges)."""
    first: dict[int, int] = {}
    return _grouped(problem, [first.setdefault(int(c), i) if c >= 0 else i for i, c in enumerate(problem.colour)])


def merge_groups(form: MaxLoadForm, into: np.ndarray) -> MaxLoadForm:
    """The form with group v merged into group `into[v]`, int64 [g]; may exclude all best plans."""
    return _grouped(form.problem, into[form.group_of])


def _grouped(problem: MaxLoadProblem, keys: Iterable[int]) -> MaxLoadForm:
    """The form whose groups are the nodes with equal keys; in contiguous plans, cycles of forward edges as well."""
    group_of, arcs = _renumber(keys), np.zeros((0, 2), dtype=np.int64)
    if problem.contiguous:
        forward = problem.edges[~problem.backward[problem.edges].any(axis=1)]
        cycles = np.array(components(int(group_of.max(initial=-1)) + 1, group_of[forward].tolist()), dtype=np.int64)
        group_of = _renumber(cycles[group_of])
        arcs = group_of[forward]
    groups = int(group_of.max(initial=-1)) + 1
    pins: dict[int, set[int]] = {}
    for u, v in problem.edges.tolist():
        pins.setdefault(u, {int(group_of[u])}).add(int(group_of[v]))
    nets: dict[tuple[int, ...], list[float]] = {}
    for u, members in pins.items():
        if problem.transfer_ms[u] > 0 and len(members) > 1:
            nets.setdefault(tuple(sorted(members)), []).append(float(problem.transfer_ms[u]))
    shapes = sorted(nets)
    return MaxLoadForm(
        problem=problem,
        group_of=group_of,
        acc=_sums(problem.accelerator_ms, group_of, groups),
        cpu=_sums(problem.cpu_ms, group_of, groups),
        size=_sums(problem.size_bytes, group_of, groups),
        supported=np.bincount(group_of[~problem.supported], minlength=groups) == 0,
        ordered=np.bincount(group_of[~problem.backward], minlength=groups) > 0,
        nets=tuple(shapes),
        cost=np.array([math.fsum(nets[s]) for s in shapes], dtype=float),
        arcs=tuple(sorted({(a, b) for a, b in arcs.tolist() if a != b})),
    )


def _renumber(keys: Iterable[int]) -> np.ndarray:
    """int64 [n] the keys renumbered from 0 in the order of their first node."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(int(k), len(numbers)) for k in keys], dtype=np.int64)


def _sums(values: np.ndarray, group_of: np.ndarray, groups: int) -> np.ndarray:
    members: list[list[float]] = [[] for _ in range(groups)]
    for value, group in zip(values.tolist(), group_of.tolist(), strict=True):
        members[group].append(value)
    return np.array([math.fsum(m) for m in members], dtype=float)


def reduce_form(form: MaxLoadForm, incumbent_ms: float = math.inf, deadline: Deadline = NEVER) -> MaxLoadForm:
    """Merge groups by the rules above until none applies, or until the deadline (every merge is valid by itself).

    Args:
        form: groups so far.
        incumbent_ms: load of a known plan; the reduced problem keeps a plan below it if one exists.
        deadline: when to stop.

    Complexity: each pass takes O(sum of squares of the nets' sizes); passes are few.
    """
    limit = incumbent_ms * (1 - 1e-12)  # better plans differ by more than rounding
    while not deadline.passed:
        no_acc = ~form.supported | (form.problem.accelerators == 0) | (form.acc >= limit)
        no_cpu = (form.cpu >= limit) | (form.problem.cpus == 0)
        pairs = _inseparable(form, limit, no_acc, no_cpu)
        if not pairs and not form.problem.contiguous:
            pairs = _followers(form, no_acc, no_cpu)
        if not pairs:
            break
        linked = components(form.groups, [*pairs, *((u, v) for v, u in pairs)])
        form = merge_groups(form, np.array(linked, dtype=np.int64))
    return form


def _inseparable(form: MaxLoadForm, limit: float, no_acc: np.ndarray, no_cpu: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of groups with a common net that no plan with loads below the limit has on two devices.

    Args:
        form: the problem on groups.
        limit: in ms.
        no_acc: bool [g] whether a group is on no accelerator in such a plan.
        no_cpu: bool [g] the same of CPUs.
    """
    problem = form.problem
    common: dict[tuple[int, int], float] = {}
    for pins, cost in zip(form.nets, form.cost.tolist(), strict=True):
        for pair in itertools.combinations(pins, 2):
            common[pair] = common.get(pair, 0.0) + cost
    pairs = []
    for (v, u), cost in common.items():
        v_full, u_full = no_acc[v] or form.acc[v] + cost >= limit, no_acc[u] or form.acc[u] + cost >= limit
        on_accelerators = problem.accelerators > 1 and not (v_full or u_full)
        on_cpus = problem.cpus > 1 and not (no_cpu[v] or no_cpu[u])
        on_both = not (no_cpu[v] or u_full) or not (no_cpu[u] or v_full)
        if not (on_accelerators or on_cpus or on_both):
            pairs.append((v, u))
    return pairs


def _followers(form: MaxLoadForm, no_acc: np.ndarray, no_cpu: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (v, u) where moving v to the device of u never raises a load; no group is next to two pairs."""
    nets_of: list[list[int]] = [[] for _ in range(form.groups)]
    for e, pins in enumerate(form.nets):
        for group in pins:
            nets_of[group].append(e)
    neighbours = [sorted({u for e in nets for u in form.nets[e]} - {v}) for v, nets in enumerate(nets_of)]
    pairs, busy = [], np.zeros(form.groups, dtype=bool)
    for v, nets in enumerate(nets_of):
        for u in neighbours[v]:
            shared = float_sum(form.cost[e] for e in nets if form.nets[e] == (min(u, v), max(u, v)))
            other = float_sum(form.cost[e] for e in nets if u not in form.nets[e])
            cpu_ok = form.cpu[v] == 0 or no_cpu[u]
            acc_ok = (form.supported[v] and (form.size[v] == 0 or form.roomy)) or no_acc[u]
            if form.acc[v] + other <= shared * (1 - 1e-12) and cpu_ok and acc_ok and not (busy[v] or busy[u]):
                pairs.append((v, u))
                # The rule reads the neighbours of both groups, so these must not be merged in the same pass.
                busy[[v, u, *neighbours[v], *neighbours[u]]] = True
    return pairs


def simple_bound(form: MaxLoadForm) -> float:
    """The larger of the fluid and the pigeonhole bound, ms; O(g^2)."""
    return max(fluid_bound(form), pigeonhole_bound(form)) * _SAFE


def fluid_bound(form: MaxLoadForm) -> float:
    """Least largest load in ms if groups could be split at will and transfers were free; O(g log g).

    The groups with the smallest ratio of CPU time to accelerator time go to the CPUs, the last of them in part, so that
    both kinds of devices finish together.
    """
    accs, cpus = form.problem.accelerators, form.problem.cpus
    if not accs:
        return float(form.cpu.sum()) / cpus
    free = np.flatnonzero(form.supported & (form.acc > 0))
    if not cpus:
        return float(form.acc[free].sum()) / accs
    order = free[np.argsort(form.cpu[free] / form.acc[free], kind="stable")]
    moved = np.arange(len(order) + 1)
    acc_ms = (form.acc[order].sum() - np.cumsum([0.0, *form.acc[order]])) / accs
    cpu_ms = (form.cpu[~form.supported].sum() + np.cumsum([0.0, *form.cpu[order]])) / cpus
    even = np.interp(0.0, cpu_ms - acc_ms, moved)
    return max(float(np.interp(even, moved, acc_ms)), float(np.interp(even, moved, cpu_ms)))


def pigeonhole_bound(form: MaxLoadForm) -> float:
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


def prove(search: SearchState, bound: float) -> None:
    """Raise the bound of a search, ms; a bound within rounding of the best load is set to that load."""
    search.prove(search.objective if bound >= search.objective * (1 - RELATIVE_TOLERANCE) else bound)


def space(problem: MaxLoadProblem) -> str:
    """The plans that a bound of the problem covers, in words."""
    return "contiguous plans" if problem.contiguous else "all plans"


def canonical(problem: MaxLoadProblem, decision: MaxLoadDecision) -> MaxLoadDecision:
    """The same plan with equal devices numbered in the order of their first node, so that equal plans compare equal."""
    numbers = device_numbers(problem.accelerators, decision)
    return tuple(numbers[d] for d in decision)


def group_devices(form: MaxLoadForm, plan: MaxLoadDecision) -> np.ndarray:
    """int64 [g] device of each group; of a group on several devices, that of its node with the most work."""
    nodes = np.array(plan, dtype=np.int64)
    by_work = np.argsort(form.problem.accelerator_ms, kind="stable")
    device = np.zeros(form.groups, dtype=np.int64)
    device[form.group_of[by_work]] = nodes[by_work]
    return device


def device_numbers(accelerators: int, devices: Iterable[int]) -> dict[int, int]:
    """By device, its number when equal devices are numbered in the order of their first use: accelerators, then CPUs.

    Args:
        accelerators: how many there are; devices from this number on are CPUs.
        devices: the devices in the order of their use, with repetitions.
    """
    next_number = [0, accelerators]
    numbers: dict[int, int] = {}
    for device in devices:
        if device not in numbers:
            kind = int(device >= accelerators)
            numbers[device] = next_number[kind]
            next_number[kind] += 1
    return numbers

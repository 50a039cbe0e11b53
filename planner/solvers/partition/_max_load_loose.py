"""Groups that no order binds (backward nodes without forward twin), as parts of a chain see them.

They hang together with the ordered groups by nets only. A part S of ordered groups takes from each cluster C of loose
groups the set F that suits it best: work(F) + what the cluster's nets cost S and F together. What S pays in any plan
is not less, so a chain priced like this bounds all plans from below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from planner.graph.ideals import bit_row, components, words
from planner.memory import fits
from planner.solvers.partition._max_load_form import Form

_LARGEST = 4
"""Clusters with more groups are left out, their nets shrunk to the ordered groups."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A set F of a cluster's groups: its work, and for each net whether F meets it, and holds all its loose groups."""

    work: float
    meets: tuple[bool, ...]
    holds: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Cluster:
    nets: tuple[int, ...]
    rests: np.ndarray
    near: np.ndarray
    choices: tuple[_Choice, ...]


class LooseGroups:
    """Prices clusters of loose groups.

    Args:
        form: the problem on groups.
        acc: accelerator time of each group in the caller's unit.
        cost: cost of each net in the caller's unit.

    Attributes:
        holds: bool [nets] nets with a loose group, which are priced here and nowhere else.
    """

    def __init__(self, form: Form, acc: np.ndarray, cost: np.ndarray) -> None:
        self.cost = cost
        loose = {v for v in range(form.groups) if not form.ordered[v]}
        self.holds = np.array([bool(loose.intersection(pins)) for pins in form.nets], dtype=bool)
        links = []
        for pins in form.nets:
            own = sorted(loose.intersection(pins))
            links += [pair for a, b in pairwise(own) for pair in ((a, b), (b, a))]
        name = components(form.groups, links)
        members: dict[int, list[int]] = {}
        for v in sorted(loose):
            members.setdefault(name[v], []).append(v)
        nets: dict[int, list[int]] = {}
        for e in np.flatnonzero(self.holds):
            nets.setdefault(name[min(loose.intersection(form.nets[e]))], []).append(int(e))
        self.clusters = [_cluster(form, acc, loose, members[k], nets[k]) for k in sorted(nets)]

    def least(self, done: np.ndarray, bits: np.ndarray, after: np.ndarray) -> np.ndarray:
        """What the clusters cost the parts between one ideal and some larger ones, at least.

        Args:
            done: uint64 [words] the smaller ideal.
            bits: uint64 [ideals, words] all ideals.
            after: rows of `bits` of the larger ones.
        """
        total = np.zeros(len(after))
        if not self.clusters or not len(after):
            return total
        reach = np.bitwise_or.reduce(bits[after], axis=0) & ~done
        for cluster in self.clusters:
            if (cluster.near & reach).any():
                total += self._cluster_cost(cluster, done, bits, after)
        return total

    def _cluster_cost(self, cluster: _Cluster, done: np.ndarray, bits: np.ndarray, after: np.ndarray) -> np.ndarray:
        touched, whole = [], []
        for rest in cluster.rests:
            open_rest = rest & ~done
            met = np.zeros(len(after), dtype=bool)
            full = np.full(len(after), not (rest & done).any())
            for w in np.flatnonzero(open_rest):
                part = bits[after, w] & open_rest[w]
                met |= part != 0
                full &= part == open_rest[w]
            touched.append(met)
            whole.append(full)
        best = np.full(len(after), np.inf)
        for choice in cluster.choices:
            price = np.full(len(after), choice.work)
            for k, e in enumerate(cluster.nets):
                price += self.cost[e] * ((touched[k] | choice.meets[k]) & ~(whole[k] & choice.holds[k]))
            np.minimum(best, price, out=best)
        return best


def _cluster(form: Form, acc: np.ndarray, loose: set[int], members: list[int], nets: list[int]) -> _Cluster:
    width = words(form.groups)
    rests = np.array([bit_row([v for v in form.nets[e] if v not in loose], width) for e in nets], dtype=np.uint64)
    near = np.bitwise_or.reduce(rests, axis=0)
    if len(members) > _LARGEST:
        shrunk = _Choice(0.0, (False,) * len(nets), (True,) * len(nets))
        return _Cluster(tuple(nets), rests, near, (shrunk,))
    choices = []
    able = [v for v in members if form.supported[v]]
    for size in range(len(able) + 1):
        for chosen in combinations(able, size):
            own = [[v for v in form.nets[e] if v in loose] for e in nets]
            if fits(float(form.size[list(chosen)].sum()), form.problem.memory_bytes):
                meets = tuple(any(v in chosen for v in pins) for pins in own)
                holds = tuple(all(v in chosen for v in pins) for pins in own)
                choices.append(_Choice(float(acc[list(chosen)].sum()), meets, holds))
    return _Cluster(tuple(nets), rests, near, tuple(choices))

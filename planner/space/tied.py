"""What it costs to sum the gradients of weights that the first and the last stage of a pipeline both hold.

The first stage has r replicas at device a of the slice, the last one s replicas at its end. With g = gcd(r, s), group q
of a copy has replicas q, q + g, .. of both. Shifting a group by whole children of the outermost level keeps its shape,
so of all copies and groups only the distinct shifts within such a child are looked at, and of places far from the last
stage only those within one child.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.hardware.collectives import Terms, collective_terms
from planner.hardware.span import Span, child_sizes, span_of
from planner.hardware.types import Cluster, Collective


@dataclass(frozen=True, eq=False)
class TiedEnds:
    """Prices of the all-reduce between first and last stages.

    Attributes:
        which: int64 [R, R, W], by last stage, first stage and device of the first: index into `terms`; -1 where the two
            overlap.
        terms: for each index the groups that are at work at the same time; the slowest counts.
    """

    which: np.ndarray
    terms: tuple[tuple[Terms, ...], ...]

    def seconds(self, payload_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """([T, R, W] seconds by class of last stage, [R] class of each last stage), last stages alike in one class."""
        priced = [max(float(terms.seconds(payload_bytes)) for terms in groups) for groups in self.terms]
        table = np.array([*priced, math.inf])[self.which]
        classes, of = np.unique(table.reshape(len(table), -1), axis=0, return_inverse=True)
        return classes.reshape(-1, *table.shape[1:]), of.reshape(-1)


def tied_ends(cluster: Cluster, copies: int, slice_devices: int, replicas: np.ndarray) -> TiedEnds:
    """Price all pairs of first and last stages; O(R^2 child (child + groups)) for children of the outermost level."""
    options = replicas.tolist()
    which = np.full((len(options), len(options), slice_devices), -1, dtype=np.int64)
    pricer = _Pricer(cluster, copies, slice_devices)
    for last, senders in enumerate(options):
        for first, receivers in enumerate(options):
            for a in range(slice_devices - senders - receivers + 1):
                which[last, first, a] = pricer.index(receivers, a, senders)
    return TiedEnds(which, tuple(pricer.terms))


class _Pricer:
    """Numbers distinct sets of groups, and prices each once."""

    def __init__(self, cluster: Cluster, copies: int, width: int) -> None:
        self._cluster, self._copies, self._width = cluster, copies, width
        self._child = child_sizes(cluster)[-2] if cluster.levels else 1
        self._known: dict[tuple[int, int, int], int] = {}
        self._found: dict[tuple[frozenset[Span], int], int] = {}
        self.terms: list[tuple[Terms, ...]] = []

    def index(self, first: int, at: int, last: int) -> int:
        """Index of the groups of `first` replicas at a device and `last` replicas at the end of the slice."""
        far = at + first + self._child <= self._width - last
        key = (first, last, at % self._child if far else at + self._child)
        if key not in self._known:
            self._known[key] = self._price(first, at, last)
        return self._known[key]

    def _price(self, first: int, at: int, last: int) -> int:
        groups = math.gcd(first, last)
        shifts = {
            (copy * self._width + q) % self._child: copy * self._width + q
            for copy in reversed(range(self._copies))
            for q in reversed(range(min(groups, self._child)))
        }
        base = np.concatenate([np.arange(at, at + first, groups), np.arange(self._width - last, self._width, groups)])
        spans = {span_of(self._cluster, base + shift): base + shift for shift in shifts.values()}
        working = self._copies * groups
        found = (frozenset(spans), working)
        if found not in self._found:
            self._found[found] = len(self.terms)
            reduce = Collective.ALL_REDUCE
            self.terms.append(tuple(collective_terms(self._cluster, reduce, m, working) for m in spans.values()))
        return self._found[found]

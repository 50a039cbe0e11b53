"""A device mesh: named axes over consecutive ranks of a cluster, and the cost of collectives along them.

The last axis is innermost: its neighbours are consecutive ranks. A mesh without a cluster prices bytes alone (those of
a ring, at one second a byte), as the published byte counts of tensor-sharding systems do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.hardware import COLUMNS, Cluster, Collective, Terms, collective_terms, moved_bytes, send_terms
from planner.hardware.tiers import child_sizes


class AxisRole(StrEnum):
    """What a mesh axis may do. An axis of one of these names has that role, any other axis is a tensor axis."""

    TENSOR = "tensor"
    """Every operator may be run in any way."""
    CONTEXT = "context"
    """Context parallelism: activations between blocks are cut along the sequence, weights are replicated. Attention
    passes keys and values around a ring, gathers them, or swaps the sequence for heads, whichever is fastest."""
    EXPERT = "expert"
    """Expert parallelism: samples and experts are dealt out over the ranks, all other weights are replicated."""

    @property
    def deals(self) -> bool:
        """Whether ranks along the axis work on different samples or steps with the same weights."""
        return self is not AxisRole.TENSOR


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh.

    Attributes:
        name: its name.
        size: ranks along it.
    """

    name: str
    size: int

    @property
    def role(self) -> AxisRole:
        """The role of the axis."""
        return AxisRole(self.name) if self.name in set(AxisRole) else AxisRole.TENSOR


def axes_text(axes: Iterable[Axis]) -> str:
    """Sizes of the axes of a mesh, outermost first, `2 x 8`; axes that deal out steps or samples with their names."""
    return " x ".join(f"{axis.name} {axis.size}" if axis.role.deals else str(axis.size) for axis in axes)


def roles_of(axes: Iterable[Axis]) -> tuple[AxisRole, ...]:
    """Role of each axis of a mesh; empty where all are tensor axes."""
    roles = tuple(axis.role for axis in axes)
    return roles if any(role.deals for role in roles) else ()


@dataclass(frozen=True, eq=False)
class Mesh:
    """The first ranks of a cluster as a row-major array of the axes' sizes.

    Attributes:
        axes: outermost first; a mesh without axes is a single device.
        cluster: where the ranks are; None for an ideal mesh.
        copies: experts to which each row of an activation is sent, along an expert axis.
        beneath: consecutive ranks at each place of the mesh, as along inner axes that are left out.
    """

    axes: tuple[Axis, ...]
    cluster: Cluster | None = None
    copies: int = 1
    beneath: int = 1
    _terms: dict[tuple[Collective, tuple[int, ...]], Terms] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def device_count(self) -> int:
        """Places of the mesh, its ranks where there is nothing beneath."""
        return math.prod(self.sizes)

    def ranks_along(self, axes: Sequence[int]) -> int:
        """Ranks of one group along the axes (by index)."""
        return math.prod(self.axes[a].size for a in axes)

    def groups(self, axes: Sequence[int]) -> np.ndarray:
        """Rank groups along the axes (by index), int64 [groups, ranks in a group], in order of their first rank."""
        ranks = np.arange(self.device_count * self.beneath).reshape(*self.sizes, self.beneath)
        others = [a for a in range(len(self.axes) + 1) if a not in axes]
        return ranks.transpose([*others, *sorted(axes)]).reshape(-1, self.ranks_along(axes))

    def terms(self, kind: Collective, axes: Sequence[int]) -> Terms:
        """Affine cost of a collective that all groups along the axes (by index) run at the same time.

        If groups cross different links, the slowest group counts. `SEND` is a transfer from every rank to its
        next neighbour in the group at once, the slowest pair counting.
        """
        key = (kind, tuple(sorted(axes)))
        if key not in self._terms:
            self._terms[key] = self._price(kind, key[1])
        return self._terms[key]

    def seconds(self, kind: Collective, axes: Sequence[int], payload_bytes: np.ndarray | float) -> np.ndarray:
        """Seconds of a collective for payloads of any shape (conventions of `planner.hardware.collectives`).

        Seconds that are hidden behind the work of the ranks (`Stack.inner_overlap`) are left out.
        """
        seconds = self.terms(kind, axes).seconds(payload_bytes)
        if self.cluster is None:
            return seconds
        return seconds * (1.0 - self.cluster.stack.hidden_along(self.axes[a].name for a in axes))

    def _price(self, kind: Collective, axes: tuple[int, ...]) -> Terms:
        ranks = self.ranks_along(axes)
        if ranks == 1:
            return _constant(0.0)
        if self.cluster is None:
            return _constant(moved_bytes(kind, 1.0, ranks))
        groups = self.groups(axes)
        if kind is Collective.SEND:
            return _slowest(send_terms(self.cluster, groups.ravel(), np.roll(groups, -1, axis=1).ravel(), groups.size))
        rows = kind is Collective.ALL_TO_ALL and any(self.axes[a].role is AxisRole.EXPERT for a in axes)
        copies = self.copies if rows and self.cluster.stack.rows_once else 1
        distinct = _distinct(groups, self.cluster)
        shapes = [collective_terms(self.cluster, kind, group, len(groups), copies) for group in distinct]
        return _slowest(Terms(np.stack([t.latency_s for t in shapes]), np.stack([t.s_per_byte for t in shapes])))


def _constant(s_per_byte: float) -> Terms:
    latency = np.full(len(COLUMNS), math.inf)
    latency[0] = 0.0
    slope = np.zeros(len(COLUMNS))
    slope[0] = s_per_byte
    return Terms(latency, slope)


def _distinct(groups: np.ndarray, cluster: Cluster) -> np.ndarray:
    """One group of each kind: groups that cross the same boundaries between links cost the same."""
    sizes = np.asarray(child_sizes(cluster))
    first = groups[:, :1, None] // sizes * sizes
    _, keep = np.unique((groups[:, :, None] - first) // sizes, axis=0, return_index=True)
    return groups[np.sort(keep)]


def _slowest(terms: Terms) -> Terms:
    """Terms of the group that is slowest for large payloads, its latency raised to the largest of all groups."""
    best = np.where(np.isfinite(terms.latency_s), terms.s_per_byte, math.inf).min(axis=1)
    worst = int(np.argmax(best))
    lowest = terms.latency_s.min(axis=1)
    return Terms(terms.latency_s[worst] + (lowest.max() - lowest[worst]), terms.s_per_byte[worst])


def _axes(sizes: Mapping[str, int] | Sequence[int]) -> tuple[Axis, ...]:
    pairs = sizes.items() if isinstance(sizes, Mapping) else ((f"axis{i}", n) for i, n in enumerate(sizes))
    axes = tuple(Axis(name, int(size)) for name, size in pairs)
    for axis in axes:
        if axis.size < 1:
            raise UsageError(f"mesh axis {axis.name!r} has {axis.size} ranks", hint="write a positive number of ranks")
    return axes


def mesh_on(cluster: Cluster, sizes: Mapping[str, int] | Sequence[int], copies: int = 1, beneath: int = 1) -> Mesh:
    """A mesh on the first ranks of a cluster.

    Args:
        cluster: the cluster.
        sizes: ranks along each axis, outermost first, by name or in order.
        copies: experts to which each row of an activation is sent.
        beneath: consecutive ranks at each place.

    Raises:
        UsageError: the cluster has too few ranks.
    """
    axes = _axes(sizes)
    count = beneath * math.prod(axis.size for axis in axes)
    if count > cluster.device_count:
        text = " x ".join(str(axis.size) for axis in axes)
        raise UsageError(
            f"a mesh of {text} ranks leaves {cluster.name}, which has {cluster.device_count}",
            hint="use a smaller mesh or more nodes",
        )
    return Mesh(axes, cluster, copies, beneath)


def ideal_mesh(sizes: Mapping[str, int] | Sequence[int]) -> Mesh:
    """A mesh without a cluster: no latency, every rank sends a byte a second, so that seconds are bytes."""
    return Mesh(_axes(sizes))

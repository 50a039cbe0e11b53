"""A device mesh: named axes laid on consecutive ranks of a cluster, and what a collective along them costs.

The last axis is innermost: its neighbours are consecutive ranks. A mesh without a cluster prices traffic alone (ring
counts at one second a byte), which is what the published byte counts of tensor-sharding systems mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.hardware import ALGORITHMS, Cluster, Collective, Terms, collective_terms, moved_bytes, send_terms


class AxisRole(StrEnum):
    """What a mesh axis may do, by its name where that is one of these; any other name stands for a tensor axis."""

    TENSOR = "tensor"
    """Every operator is run in the way that is fastest."""
    CONTEXT = "context"
    """The sequence is dealt out: activations are cut along it between blocks, weights are whole on every rank.
    Attention passes keys and values round, gathers them, or swaps the sequence for heads, whichever is fastest."""
    EXPERT = "expert"
    """Samples are dealt out, weights are whole on every rank but those of experts, which are dealt out too."""

    @property
    def deals(self) -> bool:
        """Whether ranks along the axis work on different samples or steps with the same weights."""
        return self is not AxisRole.TENSOR


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh: its name and how many ranks lie along it."""

    name: str
    size: int

    @property
    def role(self) -> AxisRole:
        """What the axis may do."""
        return AxisRole(self.name) if self.name in set(AxisRole) else AxisRole.TENSOR


def axes_text(axes: Iterable[Axis]) -> str:
    """Sizes of a mesh's axes, outermost first, `2 x 8`; of those that deal out steps or samples with their names."""
    return " x ".join(f"{axis.name} {axis.size}" if axis.role.deals else str(axis.size) for axis in axes)


def roles_of(axes: Iterable[Axis]) -> tuple[AxisRole, ...]:
    """What each axis of a mesh may do; empty where all of them may do anything."""
    found = tuple(axis.role for axis in axes)
    return found if any(role.deals for role in found) else ()


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks `start .. start + device_count - 1` as a row-major array of the axes' sizes.

    Attributes:
        axes: outermost first; a mesh without axes is a single device.
        cluster: where the ranks lie, None for an ideal mesh.
        start: first rank.
        copies: experts that a row of the model goes to, along an expert axis.
    """

    axes: tuple[Axis, ...]
    cluster: Cluster | None = None
    start: int = 0
    copies: int = 1
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
        """Ranks of the mesh."""
        return math.prod(self.sizes)

    def ranks_along(self, axes: Sequence[int]) -> int:
        """Ranks of one group along the axes (by index)."""
        return math.prod(self.axes[a].size for a in axes)

    def groups(self, axes: Sequence[int]) -> np.ndarray:
        """Rank groups along the axes (by index), int64 [groups, ranks in a group], in order of their first rank."""
        ranks = np.arange(self.start, self.start + self.device_count).reshape(self.sizes)
        others = [a for a in range(len(self.axes)) if a not in axes]
        return ranks.transpose([*others, *sorted(axes)]).reshape(-1, self.ranks_along(axes))

    def terms(self, kind: Collective, axes: Sequence[int]) -> Terms:
        """Affine cost of a collective that all groups along the axes (by index) run at the same time.

        Of groups that lie differently on the links the slowest counts. `SEND` is a transfer from every rank to its
        next neighbour in the group at once, the slowest pair counting.
        """
        key = (kind, tuple(sorted(axes)))
        if key not in self._terms:
            self._terms[key] = self._price(kind, key[1])
        return self._terms[key]

    def seconds(self, kind: Collective, axes: Sequence[int], payload_bytes: np.ndarray | float) -> np.ndarray:
        """Seconds of a collective for payloads of any shape (conventions of `planner.hardware.collectives`).

        What the ranks' own work hides (`Stack.inner_overlap`) is left out.
        """
        seconds = self.terms(kind, axes).seconds(payload_bytes)
        return seconds if self.cluster is None else seconds * (1.0 - self._hidden(axes))

    def _hidden(self, axes: Sequence[int]) -> float:
        return self.cluster.stack.hidden_along(self.axes[a].name for a in axes) if self.cluster else 0.0

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
    latency = np.full(len(ALGORITHMS), math.inf)
    latency[0] = 0.0
    slope = np.zeros(len(ALGORITHMS))
    slope[0] = s_per_byte
    return Terms(latency, slope)


def _distinct(groups: np.ndarray, cluster: Cluster) -> np.ndarray:
    """One group of each way to lie on the links: groups that cross the same boundaries cost alike."""
    sizes = np.asarray((1, *cluster.group_sizes()))
    first = groups[:, :1, None] // sizes * sizes
    _, keep = np.unique((groups[:, :, None] - first) // sizes, axis=0, return_index=True)
    return groups[np.sort(keep)]


def _slowest(terms: Terms) -> Terms:
    """Terms of many groups as those of the one slowest for large payloads, its latency raised to the largest."""
    best = np.where(np.isfinite(terms.latency_s), terms.s_per_byte, math.inf).min(axis=1)
    worst = int(np.argmax(best))
    least = terms.latency_s.min(axis=1)
    return Terms(terms.latency_s[worst] + (least.max() - least[worst]), terms.s_per_byte[worst])


def _axes(sizes: Mapping[str, int] | Sequence[int]) -> tuple[Axis, ...]:
    pairs = sizes.items() if isinstance(sizes, Mapping) else ((f"axis{i}", n) for i, n in enumerate(sizes))
    axes = tuple(Axis(name, int(size)) for name, size in pairs)
    for axis in axes:
        if axis.size < 1:
            raise UsageError(f"mesh axis {axis.name!r} has {axis.size} ranks", hint="write a positive number of ranks")
    return axes


def mesh_on(cluster: Cluster, sizes: Mapping[str, int] | Sequence[int], start: int = 0, copies: int = 1) -> Mesh:
    """A mesh on consecutive ranks of a cluster.

    Args:
        cluster: the machine.
        sizes: ranks along each axis, outermost first, by name or in order.
        start: first rank.
        copies: experts that a row of the model goes to.

    Raises:
        UsageError: the mesh is larger than what the cluster has from that rank on.
    """
    axes = _axes(sizes)
    count = math.prod(axis.size for axis in axes)
    if start < 0 or start + count > cluster.device_count:
        text = " x ".join(str(axis.size) for axis in axes)
        raise UsageError(
            f"a mesh of {text} ranks from rank {start} on leaves {cluster.name}, which has {cluster.device_count}",
            hint="use a smaller mesh or more nodes",
        )
    return Mesh(axes, cluster, start, copies=copies)


def ideal_mesh(sizes: Mapping[str, int] | Sequence[int]) -> Mesh:
    """A mesh that is nowhere: no latency, every rank sends a byte in a second; its seconds count traffic."""
    return Mesh(_axes(sizes))

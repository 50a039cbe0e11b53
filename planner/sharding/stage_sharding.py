"""A sharding that stages of a plan may have: the points of all blocks on one mesh, and one choice among them."""

from __future__ import annotations

from dataclasses import dataclass

from planner.sharding.inner import InnerCosts
from planner.sharding.sharded import ShardedCosts


@dataclass(frozen=True, eq=False)
class StageSharding:
    """An entry of the catalogue that a decision's stages choose from.

    Attributes:
        inner: the points of all blocks on the entry's mesh, at the decision's micro-batch size.
        costs: one choice of points, the boundaries lying alike.
    """

    inner: InnerCosts
    costs: ShardedCosts

    @property
    def label(self) -> str:
        """Mesh and boundaries in words: `tensor 8, sequence`."""
        axes = " x ".join(f"{axis.name} {axis.size}" for axis in self.inner.mesh.axes)
        return f"{axes}, {self.costs.label}"

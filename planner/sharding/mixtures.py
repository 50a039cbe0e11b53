"""Mixtures of experts on a mesh: capacity, and dispatch and combine as all-to-alls.

Dispatch turns tokens cut along their groups into tokens cut along their experts: a cut moves from one dimension of the
dispatched tensor `[groups, experts, capacity, width]` to another, which is an all-to-all. Lepikhin et al., ICLR 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.sharding.layout import Part
from planner.sharding.mesh import Mesh
from planner.sharding.reshard import ReshardStep, reshard


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture-of-experts layer.

    Attributes:
        experts: number of experts.
        width: width of a token.
        hidden: inner width of an expert.
        top: experts that each token is sent to.
        capacity_factor: capacity of an expert over the number of tokens that it gets on average.
    """

    experts: int
    width: int
    hidden: int
    top: int = 2
    capacity_factor: float = 1.0

    @property
    def parameters(self) -> int:
        """Weights of all experts of the layer, two matrices each."""
        return self.experts * 2 * self.width * self.hidden

    def capacity(self, tokens: int) -> int:
        """Tokens of a group that an expert takes at most: `top * tokens / experts`, times the factor, rounded up."""
        return math.ceil(self.top * tokens / self.experts * self.capacity_factor)

    def dispatched(self, groups: int, tokens: int) -> tuple[int, int, int, int]:
        """Shape of the dispatched tokens: groups, experts, capacity, width."""
        return groups, self.experts, self.capacity(tokens), self.width


def exchanges(
    mixture: Mixture, mesh: Mesh, groups: int, tokens: int, item_bytes: float
) -> dict[str, tuple[ReshardStep, ...]]:
    """Changes of layout that a mixture needs, by what is moved; gradients move in the opposite direction.

    Args:
        mixture: the layer.
        mesh: a mesh of one axis, over which groups and experts are distributed.
        groups: groups of tokens.
        tokens: tokens a group.
        item_bytes: bytes of an element.
    """
    shape = mixture.dispatched(groups, tokens)
    dispatch = reshard(mesh, shape, item_bytes, (Part(0),), (Part(1),))
    combine = reshard(mesh, shape, item_bytes, (Part(1),), (Part(0),))
    return {"dispatch": dispatch, "combine": combine, "dispatch gradient": combine, "combine gradient": dispatch}


def model_parameters(mixture: Mixture, layers: int, every: int = 2) -> int:
    """Expert weights of a model in which every `every`-th layer is a mixture."""
    return layers // every * mixture.parameters


def sent_bytes(steps: Sequence[ReshardStep]) -> float:
    """Bytes that a rank sends in some changes of layout."""
    return sum(step.sent_bytes for step in steps)

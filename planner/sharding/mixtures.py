"""Mixtures of experts laid on a mesh: capacity, and the all-to-all exchanges that dispatch and combine are.

Dispatch turns tokens cut along their groups into tokens cut along their experts: a cut moves from one dimension of the
dispatched tensor `[groups, experts, capacity, width]` to another, which is an all-to-all. Lepikhin et al., ICLR 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.hardware import Cluster, Collective
from planner.memory import fits
from planner.sharding.layout import Part, TensorLayout
from planner.sharding.mesh import Mesh, factorisations, mesh_on
from planner.sharding.reshard import Step, reshard
from planner.sharding.resting import StateBytes
from planner.units import format_bytes


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer of experts.

    Attributes:
        experts: number of experts.
        width: width of a token.
        hidden: inner width of an expert.
        top: experts a token goes to.
        capacity_factor: room of an expert for each token it gets on average.
        matrices: weight matrices of an expert.
    """

    experts: int
    width: int
    hidden: int
    top: int = 2
    capacity_factor: float = 1.0
    matrices: int = 2

    @property
    def parameters(self) -> int:
        """Weights of all experts of the layer."""
        return self.experts * self.matrices * self.width * self.hidden

    def capacity(self, tokens: int) -> int:
        """Tokens of a group that an expert takes at most: `top * tokens / experts`, times the factor, rounded up."""
        return math.ceil(self.top * tokens / self.experts * self.capacity_factor)

    def dispatched(self, groups: int, tokens: int) -> tuple[int, int, int, int]:
        """Shape of the dispatched tokens: groups, experts, capacity, width."""
        return groups, self.experts, self.capacity(tokens), self.width


def exchanges(
    mixture: Mixture, mesh: Mesh, groups: int, tokens: int, item_bytes: float, axis: int = 0
) -> dict[str, tuple[Step, ...]]:
    """Changes of layout of a layer in training: `dispatch` and `combine`, and the gradients of both.

    Args:
        mixture: the layer.
        mesh: the mesh.
        groups: groups of tokens, cut over the axis.
        tokens: tokens a group.
        item_bytes: bytes an element.
        axis: the mesh axis that holds the experts.
    """
    shape = mixture.dispatched(groups, tokens)
    whole = [Part(-1)] * len(mesh.axes)

    def cut(dim: int) -> TensorLayout:
        return (*whole[:axis], Part(dim), *whole[axis + 1 :])

    there = reshard(mesh, shape, item_bytes, cut(0), cut(1))
    back = reshard(mesh, shape, item_bytes, cut(1), cut(0))
    return {"dispatch": there, "combine": back, "dispatch gradient": back, "combine gradient": there}


def model_parameters(mixture: Mixture, layers: int, every: int = 2) -> int:
    """Expert weights of a model in which every so-many-th layer is a mixture."""
    return layers // every * mixture.parameters


def sent_bytes(steps: Sequence[Step]) -> float:
    """Bytes that a rank sends in some changes of layout."""
    return sum(step.sent_bytes for step in steps)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """One degree of expert parallelism of a layer on some devices.

    Attributes:
        degree: devices over which the experts of a layer are dealt.
        replicas: copies of the layer's experts.
        capacity: places that an expert has for the tokens of one device.
        work_s: seconds of the experts' work a micro-batch, forward and backward, empty places included.
        exchange_s: seconds of dispatch, combine and their gradients a micro-batch.
        gradient_s: seconds in which the replicas' gradients are summed, once a step.
        state_bytes: experts' weights, gradients and optimizer state on a device.
        refusal: why the degree cannot be used, "" when it can.
    """

    degree: int
    replicas: int
    capacity: int
    work_s: float
    exchange_s: float
    gradient_s: float
    state_bytes: float
    refusal: str = ""

    def step_s(self, micro_batches: int) -> float:
        """Seconds of a step of that many micro-batches, nothing overlapping."""
        return micro_batches * (self.work_s + self.exchange_s) + self.gradient_s


def expert_plans(
    mixture: Mixture,
    cluster: Cluster,
    tokens: int,
    *,
    devices: int = 0,
    place_s: float = 0.0,
    micro_batches: int = 1,
    item_bytes: float = 2.0,
    state: StateBytes | None = None,
    memory_bytes: float | None = None,
) -> tuple[ExpertPlan, ...]:
    """Every degree of expert parallelism of a layer, the usable ones first, those by seconds of a step.

    Experts are dealt over neighbouring devices; equal slices of the devices hold copies and sum their gradients.

    Args:
        mixture: the layer.
        cluster: where the devices lie.
        tokens: tokens of a device and micro-batch: a group.
        devices: how many devices; all by default.
        place_s: seconds that one place of an expert takes forward and backward.
        micro_batches: micro-batches a step.
        item_bytes: bytes an element of a token.
        state: bytes a parameter takes.
        memory_bytes: what a device may hold of the layer's experts; None for no limit.

    Complexity: one price of two collectives for each divisor of the number of devices.
    """
    held, count = state or StateBytes(), devices or cluster.device_count
    found = []
    for replicas, degree in factorisations(count, 2):
        mesh = mesh_on(cluster, {"copies": replicas, "experts": degree})
        capacity, share = mixture.capacity(tokens), 1.0 / math.gcd(degree, mixture.experts)
        why = "" if mixture.experts % degree == 0 else f"{mixture.experts} experts are not dealt to {degree} devices"
        weights = mixture.parameters * share
        state_bytes = (held.weight + held.gradient + held.optimizer) * weights
        exchange_s = 0.0
        if not why and degree > 1:
            steps = exchanges(mixture, mesh, degree, tokens, item_bytes, axis=1)
            exchange_s = sum(step.seconds for change in steps.values() for step in change)
        if not why and memory_bytes is not None and not fits(state_bytes, memory_bytes):
            why = f"experts take {format_bytes(state_bytes)} a device, {format_bytes(memory_bytes)} are there"
        found.append(
            ExpertPlan(
                degree,
                replicas,
                capacity,
                place_s * mixture.experts * capacity,
                exchange_s,
                float(mesh.seconds(Collective.ALL_REDUCE, (0,), held.gradient * weights)),
                state_bytes,
                why,
            )
        )
    return tuple(sorted(found, key=lambda p: (bool(p.refusal), p.step_s(micro_batches), p.degree)))

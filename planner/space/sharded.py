"""Costs of a chain whose operators are shared by several ranks, from the points that its blocks picked."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.hardware.types import Collective
from planner.operators import needs_gradient
from planner.sharding.inner import InnerCosts
from planner.sharding.inner_points import Sizes, operand_bytes, rerun_s
from planner.sharding.layout import REPLICATED, shard_elements
from planner.sharding.mesh import AxisRole, axes_text
from planner.sharding.sharded import ShardedCosts
from planner.space.blocks import (
    checkpoint_table,
    head_block,
    head_bytes,
    kept_table,
    tied_parameters,
)
from planner.space.layers import layer_starts
from planner.space.repeats import Reruns, module_prices
from planner.space.types import BlockCosts, InnerReplicas, Selective

_SUMMING = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
"""Collectives of which recipes of gradients and weights are made."""


def sharded_block_costs(inner: InnerCosts, sharded: ShardedCosts, element_s: float, number: int) -> BlockCosts:
    """Costs of one rank for a chain whose blocks are sharded on a mesh.

    Ranks that hold the same tensor at a boundary send equal parts of it, which are gathered on the other side
    (Narayanan et al., SC 2021, section 4.1).

    Args:
        inner: the points of the blocks.
        sharded: the ones that were picked.
        element_s: seconds of the optimizer step a parameter (`update_s_per_element`).
        number: of this sharding among those of the micro-batch size; not 0.

    O(nodes + blocks^2).
    """
    chain = inner.chain
    head, starts = head_block(chain), layer_starts([block.name for block in chain.blocks])
    elements, ties = tied_parameters([own.items() for own in sharded.parameters], _multiplicities(inner, sharded))
    saved = _saved_by_block(inner, sharded)
    inner_replicas = tuple(_inner_replicas(inner, sharded))
    tensors = _boundary_tensors(inner, sharded)
    forward = _crossing(inner, tensors, frozenset(tensors))
    backward = _crossing(inner, tensors, needs_gradient(inner.graph))
    return BlockCosts(
        micro_batch=inner.micro_batch,
        forward_s=sharded.forward_s[None, :],
        backward_s=sharded.backward_s[None, :],
        update_s=element_s * elements[None, :],
        parameter_elements=elements,
        saved_bytes=kept_table(saved),
        checkpoint_bytes=checkpoint_table(chain, {name: size for name, (size, _) in tensors.items()}, starts),
        boundary_bytes=forward[0],
        gradient_boundary_bytes=backward[0],
        workspace_bytes=sharded.workspace_bytes,
        names=tuple(block.name for block in chain.blocks),
        layer_starts=starts,
        ties=ties,
        repeated=None if head < 0 else np.arange(len(chain.blocks)) != head,
        kept_bytes=None if head < 0 else head_bytes(chain, saved[head]),
        ranks=inner.mesh.device_count,
        context=_along(inner, AxisRole.CONTEXT),
        expert=_along(inner, AxisRole.EXPERT),
        sharding=number,
        label=sharding_label(inner, sharded),
        step_s=sharded.step_s,
        group_s=np.stack([sharded.forward_communication_s, sharded.communication_s]),
        gather_s=forward[1],
        gradient_gather_s=backward[1],
        shard_elements=_shard_elements(elements, inner_replicas) if inner_replicas else None,
        inner_replicas=inner_replicas,
        waiting_bytes=sharded.waiting_bytes,
    )


def sharded_weight_grad_s(whole: BlockCosts, sharded: ShardedCosts, device_type: int = 0) -> np.ndarray:
    """[1, n] seconds in which a rank computes gradients of weights.

    They are taken to be the same part of its work in a block as of all work of the block on one device.
    """
    if whole.weight_grad_s is None:
        return sharded.backward_s[None, :] / 2
    work_s = whole.forward_s[device_type] + whole.backward_s[device_type]
    own_s = sharded.forward_s + sharded.backward_s - sharded.communication_s
    of_weights_s = whole.weight_grad_s[device_type] / np.maximum(work_s, 1e-30) * own_s
    return np.asarray(np.minimum(of_weights_s, sharded.backward_s)[None, :])


def _shard_elements(elements: np.ndarray, inner_replicas: Sequence[InnerReplicas]) -> np.ndarray:
    """[n] elements of a rank's shard where ranks that hold the same elements split them."""
    shards = elements.copy()
    for inner in inner_replicas:
        shards -= inner.elements * (1 - 1 / inner.ranks)
    return shards


def _multiplicities(inner: InnerCosts, sharded: ShardedCosts) -> dict[str, int]:
    """By parameter, number of ranks that hold the same elements of it and work on different samples or steps."""
    return {name: inner.mesh.ranks_along(axes) for name, axes in sharded.whole_on.items()}


def _inner_replicas(inner: InnerCosts, sharded: ShardedCosts) -> Iterator[InnerReplicas]:
    """Weights that several ranks of the mesh hold, for every set of axes that split samples or steps."""
    dealing, mesh = inner.setting.options.dealing, inner.mesh
    counts = _multiplicities(inner, sharded)
    for axes in (each for n in range(1, len(dealing) + 1) for each in itertools.combinations(dealing, n)):
        parameters = [
            tuple((name, size) for name, size in held.items() if sharded.whole_on[name] == axes)
            for held in sharded.parameters
        ]
        elements, ties = tied_parameters(parameters, counts)
        yield InnerReplicas(mesh.ranks_along(axes), elements, ties, {kind: mesh.terms(kind, axes) for kind in _SUMMING})


def _along(inner: InnerCosts, role: AxisRole) -> int:
    """Ranks along the axes of a role."""
    return math.prod(axis.size for axis in inner.mesh.axes if axis.role is role)


def sharded_repeats(inner: InnerCosts, sharded: ShardedCosts, reruns: Callable[[], Reruns], types: int) -> Selective:
    """Prices of recomputing modules of a sharded chain, on one rank; the same on `types` device types."""
    seconds: dict[tuple[int, tuple[int, ...]], float] = {}

    def solved(b: int, place: int) -> int:
        """The operator at that place of the block, in the block's sharding problem."""
        members, block = inner.blocks[b].points.block.ends.members, inner.chain.blocks[b]
        return members[len(block.side) + place]

    def forward_s(b: int, places: tuple[int, ...]) -> np.ndarray:
        point, key = sharded.points[b], (id(sharded.points[b]), places)
        if key not in seconds:
            block = inner.blocks[b].points.block
            seconds[key] = rerun_s(block, point, [solved(b, place) for place in places]) if places else 0.0
        return np.full(types, seconds[key])

    def size_of(b: int, place: int, position: int) -> float:
        block = inner.blocks[b].points.block
        return operand_bytes(block, sharded.points[b], solved(b, place), position)

    return module_prices(reruns, functools.partial(_saved_by_block, inner, sharded), forward_s, size_of)


def _saved_by_block(inner: InnerCosts, sharded: ShardedCosts) -> list[Sizes]:
    """By block, the storages that a rank keeps, with their bytes."""
    return [block.named_sizes(point.saved) for block, point in zip(inner.blocks, sharded.points, strict=True)]


def on_all_types(costs: BlockCosts, types: int) -> BlockCosts:
    """Repeat the costs of the first device type for all types."""
    if types == 1:
        return costs
    names = ("forward_s", "backward_s", "update_s", "weight_grad_s")
    known = {name: seconds for name in names if (seconds := getattr(costs, name)) is not None}
    rows: dict[str, Any] = {name: np.repeat(seconds[:1], types, axis=0) for name, seconds in known.items()}
    return replace(costs, **rows)


def sharding_label(inner: InnerCosts, sharded: ShardedCosts) -> str:
    """Mesh and boundary layout in words, `2 x 8, batch/sequence`; all stages of a pipeline have the same."""
    return f"{axes_text(inner.mesh.axes)}, {sharded.label}"


def _crossing(
    inner: InnerCosts, tensors: Mapping[str, tuple[float, tuple[int, ...]]], sent: frozenset[str]
) -> tuple[np.ndarray, np.ndarray]:
    """[n + 1] bytes that a rank sends over each boundary, and seconds of the all-gather of parts after it."""
    chain, mesh = inner.chain, inner.mesh
    by_axes: dict[tuple[int, ...], dict[str, float]] = {}
    for name, (size, axes) in tensors.items():
        if name in sent:
            by_axes.setdefault(axes, {})[name] = size
    part_bytes, gather_s = np.zeros(len(chain.blocks) + 1), np.zeros(len(chain.blocks) + 1)
    for axes, sizes in sorted(by_axes.items()):
        full_bytes = chain.boundary_sums(sizes)
        part_bytes += full_bytes / mesh.ranks_along(axes)
        gather_s += [float(mesh.seconds(Collective.ALL_GATHER, axes, size)) if size else 0.0 for size in full_bytes]
    return part_bytes, gather_s


def _boundary_tensors(inner: InnerCosts, sharded: ShardedCosts) -> dict[str, tuple[float, tuple[int, ...]]]:
    """By tensor that crosses a boundary, bytes on a rank, and the mesh axes on which it is replicated."""
    tensors, sizes = {}, inner.mesh.sizes
    for name in sorted(inner.chain.crossing_tensors):
        tensor = inner.graph.tensors[name]
        layout = sharded.layouts[name]
        axes = tuple(a for a, part in enumerate(layout) if part == REPLICATED)
        tensors[name] = inner.setting.bytes_of(tensor) * shard_elements(tensor.shape, layout, sizes), axes
    return tensors


LEANEST_MARGIN = 0.998
"""Factor on the least memory of the points found: no point that takes less than three times as long is below it."""


def least_costs(floor: BlockCosts, lean: Sequence[BlockCosts], fastest: BlockCosts) -> BlockCosts | None:
    """Lower bounds on time and memory of all shardings with one layout of boundaries; None if the fastest has both.

    Args:
        floor: lower bound, exact for the time of blocks.
        lean: the shardings with the fewest weights and with the fewest activations.
        fastest: the fastest sharding.
    """
    saved_bytes = np.minimum.reduce([each.saved_bytes for each in lean])
    elements = np.minimum.reduce([each.parameter_elements for each in lean])
    if (fastest.saved_bytes <= saved_bytes).all() and (fastest.parameter_elements <= elements).all():
        return None
    shards = [costs.shard_elements for costs in lean if costs.shard_elements is not None]
    waiting = [costs.waiting_bytes for costs in lean if costs.waiting_bytes is not None]
    return replace(
        lean[0],
        forward_s=floor.forward_s,
        backward_s=floor.backward_s,
        update_s=floor.update_s,
        parameter_elements=LEANEST_MARGIN * elements,
        shard_elements=LEANEST_MARGIN * np.minimum.reduce(shards) if shards else None,
        inner_replicas=(),
        saved_bytes=LEANEST_MARGIN * saved_bytes,
        waiting_bytes=LEANEST_MARGIN * np.minimum.reduce(waiting) if waiting else None,
        workspace_bytes=floor.workspace_bytes,
        ties=floor.ties,
        kept_bytes=floor.kept_bytes,
        step_s=None,
        selective=floor.selective,
    )

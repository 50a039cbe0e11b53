"""Sum the prices of a chain's nodes to its blocks, and find the block that computes logits and loss (the head)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner.costs.precision import Precision, update_bytes
from planner.costs.types import Profile
from planner.graph import Chain, Graph, per_graph
from planner.hardware.types import Device
from planner.operators import kept_pairs, needs_gradient
from planner.operators.saved import logits_of
from planner.space.layers import layer_starts
from planner.space.types import BlockCosts, Tie
from planner.sums import float_sum

LOSS_OPS = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})


def loss_outputs(graph: Graph) -> tuple[str, ...]:
    """Outputs that are a training loss: made by a loss operator, or floating-point scalars; () when there is none."""
    return tuple(name for name in graph.outputs if _is_loss(graph, name))


def _is_loss(graph: Graph, name: str) -> bool:
    at = graph.producer.get(name)
    tensor = graph.tensors.get(name)
    if at is None or tensor is None or not tensor.dtype.is_float:
        return False
    node = graph.nodes[at]
    return (node.op in LOSS_OPS and node.outputs[0] == name) or tensor.shape == ()


def head_block(chain: Chain) -> int:
    """The last block, when the loss or the logits that it is computed from are made there; -1 otherwise.

    Training frameworks recompute layers, not the head: its activations are used at once, and its forward is long.
    """
    graph = chain.graph
    ends = {graph.producer[name] for name in (*loss_outputs(graph), logits_of(graph)) if name in graph.producer}
    last = len(chain.blocks) - 1
    return last if last >= 0 and ends.intersection(chain.blocks[last].nodes) else -1


def block_costs(
    chain: Chain,
    graph: Graph,
    profiles: Sequence[Profile],
    devices: Sequence[Device],
    chosen: Precision,
    optimizer: str,
) -> BlockCosts:
    """Sum the prices of a chain's nodes to its blocks.

    Args:
        chain: the blocks.
        graph: the chain's graph at the micro-batch size of the profiles (same node order and tensor names).
        profiles: one for each device type, in the cluster's order.
        devices: the device types.
        chosen: number formats.
        optimizer: name of the optimizer, for its step's time.

    O(nodes + blocks^2).
    """
    n, head = len(chain.blocks), head_block(chain)
    starts = layer_starts([block.name for block in chain.blocks])
    elements, ties = _block_parameters(chain)
    storages = block_storages(chain, profiles[0])
    sizes = {name: wire_bytes(graph, name, chosen) for name in chain.crossing_tensors}
    flows = needs_gradient(graph)
    gradients = {name: size if name in flows else 0.0 for name, size in sizes.items()}
    rates = zip(devices, (p.update_byte_per_s for p in profiles), strict=True)
    step_s = np.array([update_s_per_element(device, chosen, optimizer, own) for device, own in rates])

    def of_backward(seconds: Sequence[np.ndarray]) -> np.ndarray:
        return np.array([[float(own[list(b.nodes)].sum()) for b in chain.blocks] for own in seconds])

    return BlockCosts(
        micro_batch=profiles[0].micro_batch,
        forward_s=np.array([block_seconds(chain, p.forward_s) for p in profiles]),
        backward_s=of_backward([p.backward_s for p in profiles]),
        update_s=step_s[:, None] * elements[None, :],
        parameter_elements=elements,
        saved_bytes=kept_table([own.items() for own in storages]),
        checkpoint_bytes=checkpoint_table(chain, sizes, starts),
        boundary_bytes=chain.boundary_sums(sizes),
        gradient_boundary_bytes=chain.boundary_sums(gradients),
        workspace_bytes=np.array([max(profiles[0].workspace_bytes[list(b.nodes)]) for b in chain.blocks], dtype=float),
        names=tuple(b.name for b in chain.blocks),
        layer_starts=starts,
        ties=ties,
        repeated=None if head < 0 else np.arange(n) != head,
        kept_bytes=None if head < 0 else head_bytes(chain, storages[head].items()),
        weight_grad_s=of_backward([p.weight_grad_s for p in profiles]),
        waiting_bytes=np.array([_waiting_bytes(profiles[0], b.nodes) for b in chain.blocks]),
    )


def wire_bytes(graph: Graph, name: str, chosen: Precision) -> float:
    """Bytes of a tensor as training holds and sends it: floats in the compute type, all else as stored."""
    tensor = graph.tensors[name]
    return tensor.elements * chosen.compute.bits / 8 if tensor.dtype.is_float else float(tensor.byte_count)


def block_seconds(chain: Chain, forward_s: np.ndarray) -> list[float]:
    """Forward seconds of each block from those of the nodes, a side node with the first block that reads it."""
    side_nodes = [sorted(set(b.side) - repeated) for b, repeated in zip(chain.blocks, chain.repeats, strict=True)]
    return [float(forward_s[[*b.nodes, *side]].sum()) for b, side in zip(chain.blocks, side_nodes, strict=True)]


def update_s_per_element(device: Device, chosen: Precision, optimizer: str, measured_byte_per_s: float) -> float:
    """Seconds a parameter of the optimizer step, at a measured rate, or where that is 0 at the memory's."""
    byte_per_s = measured_byte_per_s or device.memory_byte_per_s * device.memory_efficiency.fractions[-1]
    return update_bytes(optimizer, chosen) / byte_per_s


def range_table(uses: Iterable[tuple[float, Sequence[int]]], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables to sum the sizes of what blocks i..j use (weights, storages, tensors), each item counted once.

    Args:
        uses: size of each item, and the blocks that use it, ascending.
        n: number of blocks.

    Returns:
        (by_block, shared): `by_block` [n] is the size of all that a block uses; `shared` [n, n] is what the sum of
        `by_block[i..j]` counts more than once. O(uses + n^2).
    """
    by_block, repeated = [0.0] * n, np.zeros((n, n))
    for size, blocks in uses:
        for b in blocks:
            by_block[b] += size
        for before, b in itertools.pairwise(blocks):
            repeated[before, b] += size
    shared = np.cumsum(np.cumsum(repeated[::-1], axis=0)[::-1], axis=1)
    return np.array(by_block, dtype=float), shared


def range_sums(values: np.ndarray, shared: np.ndarray | float = 0.0) -> np.ndarray:
    """[.., n] to [.., n, n]: the sum over i..j, less what `range_table` says is shared; zero for i > j."""
    prefix = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1, dtype=np.float64)], axis=-1)
    return np.triu(prefix[..., None, 1:] - prefix[..., :-1, None] - shared)


def _users(blocks: Iterable[Iterable[tuple[str, float]]]) -> dict[str, tuple[float, list[int]]]:
    """By name of an item that blocks use, its largest size and the blocks, ascending."""
    users: dict[str, tuple[float, list[int]]] = {}
    for b, named in enumerate(blocks):
        for name, size in named:
            known = users.get(name)
            if known is None:
                users[name] = size, [b]
            else:
                largest, at = known
                users[name] = max(largest, size), at if at[-1] == b else [*at, b]
    return users


def tied_parameters(
    blocks: Sequence[Iterable[tuple[str, float]]], counts: Mapping[str, int]
) -> tuple[np.ndarray, tuple[Tie, ...]]:
    """[n] trainable elements of a rank for each block, and the tied weights among them.

    Args:
        blocks: by block, its parameters and the elements of each that a rank holds.
        counts: by parameter, number of ranks of a replica that hold the same elements; 1 if left out.
    """
    users = _users(blocks)
    shared: dict[tuple[tuple[int, ...], int], float] = {}
    for name, (size, at) in users.items():
        if len(at) > 1:
            key = tuple(at), counts.get(name, 1)
            shared[key] = shared.get(key, 0.0) + size
    own, _ = range_table(users.values(), len(blocks))
    return own, tuple(Tie(size, at, count) for (at, count), size in sorted(shared.items()))


@per_graph
def _block_parameters(chain: Chain) -> tuple[np.ndarray, tuple[Tie, ...]]:
    """[n] trainable elements of each block, and those that several blocks use; the same at every micro-batch size."""
    graph = chain.graph
    used = [dict.fromkeys(i for node in block.nodes for i in graph.node_parameters[node]) for block in chain.blocks]
    sizes = [(p.name, float(p.elements)) if p.trainable else None for p in graph.parameters]
    return tied_parameters([[size for i in own if (size := sizes[i]) is not None] for own in used], {})


def kept_table(blocks: Sequence[Iterable[tuple[str, float]]]) -> np.ndarray:
    """[n, n] bytes of the storages that blocks i..j keep, each counted once.

    Args:
        blocks: by block, names of its storages and their bytes.
    """
    return range_sums(*range_table(_users(blocks).values(), len(blocks)))


def block_storages(chain: Chain, profile: Profile) -> list[dict[str, float]]:
    """By block, the storages that it keeps for the backward pass, and their bytes."""
    return [{name: float(size) for name, size in kept_pairs(profile.saved, b.nodes)} for b in chain.blocks]


def _waiting_bytes(profile: Profile, nodes: Sequence[int]) -> float:
    """Bytes that products with weights need for the gradients of these: other operands, and gradients of results."""
    products = [i for i in nodes if profile.weight_grad_s[i] > 0]
    return sum(dict(kept_pairs(profile.saved, products)).values()) + float(profile.output_bytes[products].sum())


def head_bytes(chain: Chain, saved: Iterable[tuple[str, float]]) -> np.ndarray:
    """[n] activation bytes that the last block keeps beyond the tensors that come into it; 0 for all other blocks.

    Args:
        chain: the blocks, of which the last is the head.
        saved: storages that the head keeps, and their bytes.
    """
    kept_bytes, entering = np.zeros(len(chain.blocks)), set(chain.crossing[len(chain.blocks) - 1])
    kept_bytes[-1] = float_sum(size for storage, size in saved if storage not in entering)
    return kept_bytes


def checkpoint_table(chain: Chain, sizes: Mapping[str, float], starts: np.ndarray) -> np.ndarray:
    """[n, n] bytes of the inputs of the layers of blocks i..j, each tensor counted once: what recomputation keeps.

    Args:
        chain: the blocks.
        sizes: bytes of the tensors that cross boundaries.
        starts: the first block of the layer of each block. A stage that begins inside a layer keeps what enters its
            part of it.
    """
    count = len(chain.blocks)
    uses = (
        (sizes[name], [b for b in readers if made < starts[b]])
        for name, (made, *readers) in chain.crossing_tensors.items()
    )
    table = range_sums(*range_table(uses, count))
    for name, (made, *readers) in chain.crossing_tensors.items():
        for first in range(made + 1, int(np.searchsorted(starts, starts[made], side="right"))):
            later = [b for b in readers if b >= first]
            if later and starts[later[0]] == starts[first]:
                after = next((b for b in later if starts[b] != starts[first]), count)
                table[first, later[0] : after] += sizes[name]
    return table


def repeated_bytes(costs: BlockCosts) -> np.ndarray:
    """[n, n] activation bytes of the largest layer of blocks i..j that a recomputed stage repeats; O(n^2)."""
    n = len(costs.parameter_elements)
    block, starts = np.arange(n), np.arange(n) if costs.layer_starts is None else costs.layer_starts
    within = costs.saved_bytes[np.maximum(block[:, None], starts[None, :]), block]
    repeated = within if costs.repeated is None else np.where(costs.repeated, within, 0.0)
    return np.maximum.accumulate(np.triu(repeated), axis=1)

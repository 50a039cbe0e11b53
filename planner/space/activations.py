"""Bytes of activations that a stage keeps of a micro-batch, by what it recomputes and what moves to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.space.configuration import StageChoice
from planner.space.repeats import BUFFERS, selective_costs
from planner.space.types import BlockCosts
from planner.sums import float_sum


def repeated_blocks(costs: BlockCosts, choice: StageChoice, *, whole_stages: bool) -> list[int]:
    """Blocks whose whole forward the stage recomputes."""
    if not choice.recompute:
        return []
    all_blocks = whole_stages or costs.repeated is None
    repeated = range(choice.start, _kept_from(costs, choice))
    return [b for b in repeated if all_blocks or costs.repeated[b]]  # type: ignore[index]


def _kept_from(costs: BlockCosts, choice: StageChoice) -> int:
    """First of the blocks that a stage keeps whole, behind the layers that it recomputes; its end if there are none."""
    if not choice.layers:
        return choice.stop
    return int(costs.layers.kept_from(choice.start, choice.stop, choice.layers))


def activations(
    costs: BlockCosts, choice: StageChoice, repeated: Sequence[int], *, whole_stages: bool
) -> tuple[float, float, float]:
    """Activation bytes of each micro-batch in flight, further bytes of the one that runs, and bytes in the host's
    memory of each in flight.

    A stage that recomputes modules keeps what these do not produce, and holds the results of one module at a time.
    A stage that recomputes layers keeps the inputs of its layers and all activations of blocks that it does not repeat
    (logits and loss, and layers behind those that are recomputed). These come last, so they are freed by the time a
    layer is repeated. A stage that is recomputed whole keeps its input, and its backward needs all activations at once.
    Of what moves to the host, that of `BUFFERS` blocks is on the device at a time.
    """
    first, last = choice.start, choice.stop - 1
    kept = 0.0 if costs.kept_bytes is None else float_sum(float(b) for b in costs.kept_bytes[first : last + 1])
    if choice.repeats or (choice.offload and not choice.recompute):
        modules = selective_costs(costs, choice.repeats, choice.offload)
        largest = max(float(size) for size in modules.working_bytes[first : last + 1])
        moved = float(modules.moved_bytes[first, last])
        buffered = _buffered(moved, modules.block_moved_bytes[first : last + 1])
        return float(modules.saved_bytes[first, last]), max(0.0, largest - kept) + buffered, moved
    if not choice.recompute:
        return float(costs.saved_bytes[first, last]), 0.0, 0.0
    if whole_stages:
        checkpoints, working = float(costs.boundary_bytes[first]), float(costs.saved_bytes[first, last])
        kept = 0.0
    else:
        starts = range(len(costs.parameter_elements)) if costs.layer_starts is None else costs.layer_starts
        if (behind := _kept_from(costs, choice)) <= last:
            kept, last = float(costs.saved_bytes[behind, last]), behind - 1
        largest = max((float(costs.saved_bytes[max(first, int(starts[b])), b]) for b in repeated), default=0.0)
        checkpoints, working = float(costs.checkpoint_bytes[first, last]), max(0.0, largest - kept)
    if not choice.offload:
        return checkpoints + kept, working, 0.0
    return kept, working + _buffered(checkpoints, costs.checkpoint_bytes.diagonal()[first : last + 1]), checkpoints


def split_activations(
    costs: BlockCosts, choice: StageChoice, unit_bytes: float, working_bytes: float, *, whole_stages: bool
) -> tuple[float, float]:
    """Activation bytes of a micro-batch that waits for the second half of its backward, and the most while the first
    half runs.

    That goes from the last block to the first: blocks behind the one at work wait, those before are as the forward left
    them, and a layer or module that is recomputed is all there while it runs. Offloaded operands count as if they came
    back in the first half.
    """
    if costs.waiting_bytes is None:
        return unit_bytes, unit_bytes + working_bytes
    blocks, again = range(choice.start, choice.stop), choice.recompute and whole_stages
    kept = [_kept_and_made_again(costs, choice, b, whole=again) for b in blocks]
    waiting, turning = 0.0, unit_bytes
    for b in reversed(blocks):
        before = float_sum(own for own, _ in kept[: b - choice.start + 1])
        turning = max(turning, before + kept[b - choice.start][1] + waiting)
        waiting += float(costs.waiting_bytes[b])
    return waiting, max(turning, waiting) + (unit_bytes if again else 0.0)


def _kept_and_made_again(costs: BlockCosts, choice: StageChoice, b: int, *, whole: bool) -> tuple[float, float]:
    """Bytes of a block that are there before its backward, and those that it makes again for it.

    Blocks of one layer are made again together; what enters a layer is kept with its first block. With `whole`, all
    blocks of the stage have been made again before.
    """
    if choice.repeats or (choice.offload and not choice.recompute):
        modules = selective_costs(costs, choice.repeats, choice.offload)
        return float(modules.saved_bytes[b, b]), float(modules.working_bytes[b])
    if whole or not choice.recompute or b >= _kept_from(costs, choice):
        return float(costs.saved_bytes[b, b]), 0.0
    if costs.repeated is not None and not costs.repeated[b]:
        return 0.0 if costs.kept_bytes is None else float(costs.kept_bytes[b]), 0.0
    start = max(choice.start, b if costs.layer_starts is None else int(costs.layer_starts[b]))
    inputs = float(costs.checkpoint_bytes[b, b]) if b == start and not choice.offload else 0.0
    return inputs, float(costs.saved_bytes[start, b])


def _buffered(moved_bytes: float, by_block: np.ndarray) -> float:
    """Bytes on the device of what moves to the host and back: at most those of `BUFFERS` blocks, in a stage."""
    return min(moved_bytes, BUFFERS * float(by_block.max()))

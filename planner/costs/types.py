"""Work priced in seconds: arrays aligned with a graph's nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.graph import Note
from planner.operators.types import Origin, SavedBytes


@dataclass(frozen=True)
class Profile:
    """What each node of a graph costs on one device for one micro-batch.

    All arrays have shape [nodes] and are aligned with `Graph.nodes`.

    Attributes:
        device: name of the device, or of the measurement.
        precision: name of the precision (`planner.costs.precision`).
        micro_batch: samples per execution.
        source: "roofline", "measured" or the name of the imported profile.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass without recomputation (input and weight gradients together).
        weight_grad_s: the part of `backward_s` spent on weight gradients.
        forward_flops: matrix and convolution work, 2 per multiply-add.
        backward_flops: the same, backward.
        moved_bytes: device memory traffic of the forward pass.
        output_bytes: bytes of all outputs in the training precision.
        workspace_bytes: transient bytes while the node's backward runs (gradients of its inputs and outputs).
        origin: how each node was priced.
        saved: per node, the storages it keeps for backward (fused-attention and dropout options applied).
        notes: what the prices assume (a missing data type's stand-in, folded batch normalisation, no dropout nodes).
    """

    device: str
    precision: str
    micro_batch: int
    source: str
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_grad_s: np.ndarray
    forward_flops: np.ndarray
    backward_flops: np.ndarray
    moved_bytes: np.ndarray
    output_bytes: np.ndarray
    workspace_bytes: np.ndarray
    origin: tuple[Origin, ...]
    saved: tuple[tuple[SavedBytes, ...], ...]
    notes: tuple[Note, ...] = ()

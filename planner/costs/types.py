"""Work priced in seconds: arrays aligned with a graph's nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.errors import UsageError
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
        formats: the format that each node's matrix units multiply in; empty where times are not worked out here.
        notes: what the prices assume (a missing data type's stand-in, folded batch normalisation, no dropout nodes).
        update_byte_per_s: measured rate at which an optimizer's step moves its bytes (`update_bytes`); 0 where it is
            not known.
        smaller: what was measured of smaller micro-batches beside it, ascending.
        by_share: seconds of all nodes, forward and backward, when each does that part of its work, its products in so
            many pieces; None where times are known for whole nodes alone. Read it through `at`.
        executed: [2, nodes] part of `forward_flops` and of `backward_flops` that kernels do: without what fused
            attention leaves out under a causal mask, and what fast convolutions save; None for all. Read it through
            `executed_flops`.
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
    saved: Sequence[tuple[SavedBytes, ...]]
    formats: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    update_byte_per_s: float = 0.0
    smaller: tuple[Profile, ...] = ()
    executed: np.ndarray | None = field(default=None, repr=False, compare=False)
    by_share: Callable[[float, int], tuple[np.ndarray, np.ndarray]] | None = field(
        default=None, repr=False, compare=False
    )
    _parts: dict[tuple[float, int], tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def executed_flops(self) -> tuple[np.ndarray, np.ndarray]:
        """[nodes] matrix and convolution work that kernels do, forward and backward, without recomputation."""
        forward, backward = (1.0, 1.0) if self.executed is None else self.executed
        return self.forward_flops * forward, self.backward_flops * backward

    @property
    def executed_total(self) -> float:
        """Matrix and convolution work that kernels do in a step of one micro-batch, without recomputation."""
        forward, backward = self.executed_flops()
        return float(forward.sum() + backward.sum())

    def at(self, share: float, pieces: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of all nodes, forward and backward, when each does that part of its work.

        By the roofline a node has its floating-point operations and traffic scaled, runs at the efficiency of what is
        left, and has as many kernels to launch; never less than the share of its time, never more than all of it.
        Measured times of several micro-batches say what a share of the samples takes, which stands for any share.
        Others are known for whole nodes alone: they scale linearly, which flatters small shares.
        `at(1)` is `forward_s` and `backward_s` themselves.

        Args:
            share: in (0, 1]; 1/8 for a rank that does an eighth of an operator.
            pieces: products that a product is run as, and in backward the one towards its operand; one product that
                is whole is not cut.

        Returns:
            Two float64 arrays of shape [nodes], not to be changed; the same ones for the same arguments.

        Raises:
            UsageError: the share is not in (0, 1].
        """
        if share == 1.0:
            return self.forward_s, self.backward_s
        if (share, pieces) not in self._parts:
            if not 0.0 < share < 1.0:
                raise UsageError(f"no rank does {share:g} of an operator", hint="shares of work are above 0, at most 1")
            linear = share * self.forward_s, share * self.backward_s
            self._parts[share, pieces] = self.by_share(share, pieces) if self.by_share else linear
        return self._parts[share, pieces]

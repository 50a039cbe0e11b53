"""Operators as functions of autograd that keep for their backward what plans count, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * scale; keeps x and a number for each row."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        scale: torch.Tensor,
        dims: tuple[int, ...],
        epsilon: float,
    ) -> torch.Tensor:
        """Normalise over some dimensions; `scale` must broadcast to `x`."""
        inverse = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
        ctx.save_for_backward(x, scale, inverse)
        ctx.dims = dims
        return (x * inverse).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of x and scale."""
        x, scale, inverse = ctx.saved_tensors
        normalised = x * inverse
        of_scale = (gradient * normalised).sum_to_size(scale.shape) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_scale, None, None
        scaled = gradient * scale
        along = (scaled * normalised).mean(ctx.dims, keepdim=True)
        return scaled.sub_(normalised.mul_(along)).mul_(inverse), of_scale, None, None


class CrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(logits)[label] over the rows with a label; keeps the log-softmax, and makes one gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:  # noqa: ANN401
        """The loss of logits [rows, classes] and labels [rows]; rows with the ignored label do not count."""
        logs = torch.log_softmax(logits, 1)
        ctx.save_for_backward(logs, labels)
        ctx.ignored = ignored
        return F.nll_loss(logs, labels, ignore_index=ignored)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """(softmax - one at the label) / rows, for the logits."""
        logs, labels = ctx.saved_tensors
        counted = labels != ctx.ignored
        places = torch.where(counted, labels, torch.zeros_like(labels)).unsqueeze(1)
        shares = logs.exp()
        shares.scatter_add_(1, places, torch.full_like(places, -1, dtype=logs.dtype))
        each = counted.unsqueeze(1) * (gradient / counted.sum())
        return shares.mul_(each), None, None


class Repeated(torch.autograd.Function):
    """Runs a function without keeping what happens inside: its operands are kept, and backward runs it again."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        function: Callable[..., Sequence[torch.Tensor]],
        *operands: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The function's results; it must be deterministic."""
        ctx.function = function
        ctx.save_for_backward(*operands)
        results = tuple(function(*operands))
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of the operands."""
        needs, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
        # A weight whose gradient is being added up gets its part in place, without a tensor of its own.
        adds = [need and x.is_leaf and x.grad is not None for x, need in zip(saved, needs, strict=True)]
        with torch.enable_grad():
            operands = [
                x if added else x.detach().requires_grad_(need)
                for x, added, need in zip(saved, adds, needs, strict=True)
            ]
            results = ctx.function(*operands)
        ends = [(y, g) for y, g in zip(results, gradients, strict=True) if g is not None and y.requires_grad]
        wanted = [x for x, need in zip(operands, needs, strict=True) if need]
        if ends and wanted:
            torch.autograd.backward([y for y, _ in ends], [g for _, g in ends], inputs=wanted)
        return None, *(
            x.grad if need and not added else None for x, added, need in zip(operands, adds, needs, strict=True)
        )


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Mean cross entropy of logits [rows, classes] with labels [rows]."""
    return cast(torch.Tensor, CrossEntropy.apply(logits, labels, ignored))


def repeated(
    function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Results of a function of tensors, of which backward needs the operands alone: it runs the function again."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in operands)):
        return tuple(function(*operands))
    return cast(tuple[torch.Tensor, ...], Repeated.apply(function, *operands))

"""Operators as functions of autograd that keep for their backward what plans count, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812


class RMSNorm(torch.autograd.Function):  # type: ignore[misc]
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


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that autograd does not see."""

    tensor: torch.Tensor


class WeightProduct(torch.autograd.Function):  # type: ignore[misc]
    """x @ w for a matrix of weights, or one for each sample.

    The gradient of the weights is added to what their leaf's `grad` holds, if anything. It has no tensor of its own,
    since the product and the sum are one kernel (as with Megatron's `--gradient-accumulation-fusion`).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, leaf: _Held) -> torch.Tensor:  # noqa: ANN401
        """The product; `w` is a view of `leaf`, or the leaf."""
        ctx.save_for_backward(x, w)
        ctx.leaf = leaf.tensor
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of x and w; none of w where it was added in place."""
        x, w = ctx.saved_tensors
        of_x = gradient @ w.transpose(-1, -2) if ctx.needs_input_grad[0] else None
        if w.dim() == 2:
            x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        turned, total = x.transpose(-1, -2), _total(ctx.leaf, w)
        if total is None:
            return of_x, turned @ gradient, None
        (total.addmm_ if w.dim() == 2 else total.baddbmm_)(turned, gradient)
        return of_x, None, None


class Lookup(torch.autograd.Function):  # type: ignore[misc]
    """Rows of a table of weights; in backward as `WeightProduct`."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, places: torch.Tensor, leaf: _Held) -> torch.Tensor:  # noqa: ANN401
        """The rows; `w` is a view of `leaf`, or the leaf."""
        ctx.save_for_backward(w, places)
        ctx.leaf = leaf.tensor
        return F.embedding(places, w)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """The gradient of w, or none where it was added in place."""
        w, places = ctx.saved_tensors
        total = _total(ctx.leaf, w)
        sums = torch.zeros_like(w) if total is None else total
        sums.index_add_(0, places.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        return (sums if total is None else None), None, None


def _total(leaf: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
    """The part of what a leaf's `grad` holds that belongs to a view of the leaf."""
    total = leaf.grad
    if total is None:
        return None
    return total.as_strided(w.shape, w.stride(), total.storage_offset() + w.storage_offset() - leaf.storage_offset())


class Gated(torch.autograd.Function):  # type: ignore[misc]
    """x / (1 + exp(-x)) * y; keeps x and y, and makes no more in backward than their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """The product of y with the Swish of x, of the same shape."""
        ctx.save_for_backward(x, y)
        return F.silu(x).mul_(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of x and y."""
        x, y = ctx.saved_tensors
        of_y, of_x = F.silu(x).mul_(gradient), gradient * y
        return torch.ops.aten.silu_backward.grad_input(of_x, x, grad_input=of_x), of_y


class CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
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


class Repeated(torch.autograd.Function):  # type: ignore[misc]
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
        needs, saved = ctx.needs_input_grad[1:], [_itself(x) for x in ctx.saved_tensors]
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


def _itself(x: torch.Tensor) -> torch.Tensor:
    """A kept leaf as it was: where hooks keep tensors, autograd gives another tensor of the same storage, which has no
    sum of gradients."""
    if not x.is_leaf or not x.requires_grad:
        return x
    leaf = getattr(torch.autograd.graph.get_gradient_edge(x).node, "variable", x)
    return leaf if leaf.untyped_storage()._cdata == x.untyped_storage()._cdata else x


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w, with the gradient of weights added in place where it can be."""
    alike = x.dim() > 1 if w.dim() == 2 else x.dim() == w.dim() == 3 and len(x) == len(w)
    leaf = leaf_of(w) if alike and torch.is_grad_enabled() else None
    return x @ w if leaf is None else cast(torch.Tensor, WeightProduct.apply(x, w, _Held(leaf)))


def lookup(w: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, with the gradient of weights added in place where it can be."""
    leaf = leaf_of(w) if torch.is_grad_enabled() else None
    return F.embedding(places, w) if leaf is None else cast(torch.Tensor, Lookup.apply(w, places, _Held(leaf)))


_VIEWS = ("PermuteBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0")
"""Functions whose gradient is a view of the one that they are given; others may exchange it between ranks, too."""


def leaf_of(w: torch.Tensor) -> torch.Tensor | None:
    """The contiguous leaf of autograd that a tensor is, or is a view of."""
    node = w.grad_fn
    if node is None:
        leaf: torch.Tensor | None = w if w.requires_grad else None
    else:
        while node.name() in _VIEWS:
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
    if leaf is None or not leaf.is_contiguous() or leaf.untyped_storage()._cdata != w.untyped_storage()._cdata:
        return None
    return leaf


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

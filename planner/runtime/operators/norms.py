"""Normalisations, softmax and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import OperatorCall, rule
from planner.runtime.operators.kernels import RMSNorm, cross_entropy


def _from_axis(x: torch.Tensor, axis: int) -> tuple[int, ...]:
    return tuple(range(axis % x.dim(), x.dim()))


@rule("LayerNormalization", "com.microsoft.LayerNormalization")
def _layer_norm(c: OperatorCall) -> list[torch.Tensor]:
    return _layer_normed(c[0], _from_axis(c[0], int(c.attr("axis", -1))), c[1], c.get(2), c.attr("epsilon", 1e-5))


def _layer_normed(
    x: torch.Tensor, dims: tuple[int, ...], scale: torch.Tensor, shift: torch.Tensor | None, epsilon: float
) -> list[torch.Tensor]:
    """Normalised over the last dimensions, with scale and shift; mean and inverse deviation."""
    shape = x.shape[dims[0] :]
    scale, shift = scale.expand(shape), None if shift is None else shift.expand(shape)
    return list(torch.native_layer_norm(x, list(shape), scale, shift, epsilon))


@rule("RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft.SimplifiedLayerNormalization")
def _rms_norm(c: OperatorCall) -> list[torch.Tensor]:
    dims = _from_axis(c[0], int(c.attr("axis", -1)))
    return _rms_normed(c, c[0], c[1], dims, 1e-5)


def _rms_normed(
    c: OperatorCall, x: torch.Tensor, scale: torch.Tensor, dims: tuple[int, ...], epsilon: float
) -> list[torch.Tensor]:
    """Divided by the root of the mean square, with a scale; and the inverse of that root, where it is asked for."""
    epsilon = c.attr("epsilon", epsilon)
    if c.outputs == 1:
        return [RMSNorm.apply(x, scale, dims, epsilon)]
    inverse = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
    return [x * inverse * scale, inverse]


@rule("com.microsoft.SkipLayerNormalization")
def _skip_layer_norm(c: OperatorCall) -> list[torch.Tensor | None]:
    x = c[0] + c[1] if not c.has(4) else c[0] + c[1] + c[4]
    return [*_layer_normed(x, _from_axis(x, -1), c[2], c.get(3), c.attr("epsilon", 1e-12)), x]


@rule("com.microsoft.SkipSimplifiedLayerNormalization")
def _skip_rms_norm(c: OperatorCall) -> list[torch.Tensor | None]:
    x = c[0] + c[1] if not c.has(3) else c[0] + c[1] + c[3]
    y, *inverse = _rms_normed(c, x, c[2], _from_axis(x, -1), 1e-12)
    return [y, None, *inverse, x]


@rule("BatchNormalization")
def _batch_norm(c: OperatorCall) -> list[torch.Tensor]:
    x, momentum, eps = c[0], c.attr("momentum", 0.9), c.attr("epsilon", 1e-5)
    mean, var = c[3].detach(), c[4].detach()  # a file may store them with scale and bias, where they are equal
    if not c.attr("training_mode", 0):
        return [F.batch_norm(x, mean, var, c[1], c[2], False, 0.0, eps)]
    y, now, _ = torch.native_batch_norm(x, c[1], c[2], None, None, True, 0.0, eps)
    if c.outputs == 1:
        return [y]
    with torch.no_grad():
        shape = (1, -1) + (1,) * (x.dim() - 2)
        spread = (x - now.reshape(shape)).square().mean((0, *range(2, x.dim())))
        return [y, momentum * mean + (1 - momentum) * now, momentum * var + (1 - momentum) * spread]


@rule("InstanceNormalization")
def _instance_norm(c: OperatorCall) -> torch.Tensor:
    return F.group_norm(c[0], c[0].shape[1], c[1], c[2], c.attr("epsilon", 1e-5))


@rule("GroupNormalization")
def _group_norm(c: OperatorCall) -> torch.Tensor:
    groups, x = int(c.attr("num_groups")), c[0]
    scale, bias = c[1], c[2]
    if scale.shape[0] != x.shape[1]:
        scale, bias = (p.repeat_interleave(x.shape[1] // groups) for p in (scale, bias))
    return F.group_norm(x, groups, scale, bias, c.attr("epsilon", 1e-5))


@rule("MeanVarianceNormalization")
def _mean_variance_norm(c: OperatorCall) -> torch.Tensor:
    dims = tuple(c.attr("axes") or (0, 2, 3))
    x = c[0] - c[0].mean(dims, keepdim=True)
    return x / (x.square().mean(dims, keepdim=True).sqrt() + 1e-9)


@rule("LpNormalization")
def _lp_norm(c: OperatorCall) -> torch.Tensor:
    axis = int(c.attr("axis", -1))
    size = c[0].abs().sum(axis, True) if c.attr("p", 2) == 1 else c[0].square().sum(axis, True).sqrt()
    return torch.where(size == 0, torch.zeros_like(c[0]), c[0] / size)


@rule("LRN")
def _local_response_norm(c: OperatorCall) -> torch.Tensor:
    size, x = int(c.attr("size")), c[0]
    square = x.square().transpose(1, -1).unsqueeze(-2)
    before = (size - 1) // 2
    padded = F.pad(square, (before, size - 1 - before))
    summed = padded.unfold(-1, size, 1).sum(-1).squeeze(-2).transpose(1, -1)
    return x / (c.attr("bias", 1.0) + c.attr("alpha", 1e-4) / size * summed) ** c.attr("beta", 0.75)


def _along(c: OperatorCall) -> tuple[torch.Tensor, int]:
    """The operand and the dimension to normalise; old operator sets flatten all dimensions from the axis on."""
    if c.opset >= 13:
        return c[0], int(c.attr("axis", -1))
    axis = int(c.attr("axis", 1)) % c[0].dim()
    return c[0].flatten(axis) if axis < c[0].dim() else c[0], axis


@rule("Softmax")
def _softmax(c: OperatorCall) -> torch.Tensor:
    x, axis = _along(c)
    return torch.softmax(x, axis).reshape(c[0].shape)


@rule("LogSoftmax")
def _log_softmax(c: OperatorCall) -> torch.Tensor:
    x, axis = _along(c)
    return torch.log_softmax(x, axis).reshape(c[0].shape)


@rule("SoftmaxCrossEntropyLoss")
def _cross_entropy(c: OperatorCall) -> list[torch.Tensor]:
    if c.outputs == 1 and c[0].dim() == 2 and not c.has(2) and c.attr("reduction", "mean") == "mean":
        return [cross_entropy(c[0], c[1].long(), int(c.attr("ignore_index", -100)))]
    logs = torch.log_softmax(c[0], 1)
    return [_likelihood(c, logs), logs]


@rule("NegativeLogLikelihoodLoss")
def _nll(c: OperatorCall) -> torch.Tensor:
    return _likelihood(c, c[0])


def _likelihood(c: OperatorCall, logs: torch.Tensor) -> torch.Tensor:
    ignored = c.attr("ignore_index")
    reduction = c.attr("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"unknown reduction {reduction!r} of a loss", where=c.name, hint="use mean, sum or none")
    return F.nll_loss(
        logs, c[1].long(), c.get(2), reduction=reduction, ignore_index=-100 if ignored is None else int(ignored)
    )

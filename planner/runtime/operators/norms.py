"""Normalisations, softmax and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import Call, rule


def _from_axis(x: torch.Tensor, axis: int) -> tuple[int, ...]:
    return tuple(range(axis % x.dim(), x.dim()))


@rule("LayerNormalization", "com.microsoft.LayerNormalization")
def _layer_norm(c: Call) -> list[torch.Tensor]:
    x, dims = c[0], _from_axis(c[0], int(c.attr("axis", -1)))
    mean = x.mean(dims, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + c.attr("epsilon", 1e-5))
    y = (x - mean) * inverse * c[1]
    return [y + c[2] if c.has(2) else y, mean, inverse]


@rule("RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft.SimplifiedLayerNormalization")
def _rms_norm(c: Call) -> list[torch.Tensor]:
    dims = _from_axis(c[0], int(c.attr("axis", -1)))
    inverse = torch.rsqrt(c[0].square().mean(dims, keepdim=True) + c.attr("epsilon", 1e-5))
    return [c[0] * inverse * c[1], inverse]


@rule("com.microsoft.SkipLayerNormalization")
def _skip_layer_norm(c: Call) -> list[torch.Tensor | None]:
    x = c[0] + c[1] if not c.has(4) else c[0] + c[1] + c[4]
    mean = x.mean(-1, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + c.attr("epsilon", 1e-12))
    y = (x - mean) * inverse * c[2]
    return [y + c[3] if c.has(3) else y, mean, inverse, x]


@rule("com.microsoft.SkipSimplifiedLayerNormalization")
def _skip_rms_norm(c: Call) -> list[torch.Tensor | None]:
    x = c[0] + c[1] if not c.has(3) else c[0] + c[1] + c[3]
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + c.attr("epsilon", 1e-12))
    return [x * inverse * c[2], None, inverse, x]


@rule("BatchNormalization")
def _batch_norm(c: Call) -> list[torch.Tensor]:
    x, momentum, eps = c[0], c.attr("momentum", 0.9), c.attr("epsilon", 1e-5)
    mean, var = c[3], c[4]
    shape = (1, -1) + (1,) * (x.dim() - 2)
    results: list[torch.Tensor] = []
    if c.attr("training_mode", 0):
        dims = (0, *range(2, x.dim()))
        now = x.mean(dims)
        spread = (x - now.reshape(shape)).square().mean(dims)
        with torch.no_grad():
            results = [momentum * mean + (1 - momentum) * now, momentum * var + (1 - momentum) * spread]
        mean, var = now, spread
    y = (x - mean.reshape(shape)) * torch.rsqrt(var.reshape(shape) + eps)
    return [y * c[1].reshape(shape) + c[2].reshape(shape), *results]


@rule("InstanceNormalization")
def _instance_norm(c: Call) -> torch.Tensor:
    return F.group_norm(c[0], c[0].shape[1], c[1], c[2], c.attr("epsilon", 1e-5))


@rule("GroupNormalization")
def _group_norm(c: Call) -> torch.Tensor:
    groups, x = int(c.attr("num_groups")), c[0]
    scale, bias = c[1], c[2]
    if scale.shape[0] != x.shape[1]:
        scale, bias = (p.repeat_interleave(x.shape[1] // groups) for p in (scale, bias))
    return F.group_norm(x, groups, scale, bias, c.attr("epsilon", 1e-5))


@rule("MeanVarianceNormalization")
def _mean_variance_norm(c: Call) -> torch.Tensor:
    dims = tuple(c.attr("axes") or (0, 2, 3))
    x = c[0] - c[0].mean(dims, keepdim=True)
    return x / (x.square().mean(dims, keepdim=True).sqrt() + 1e-9)


@rule("LpNormalization")
def _lp_norm(c: Call) -> torch.Tensor:
    axis = int(c.attr("axis", -1))
    size = c[0].abs().sum(axis, True) if c.attr("p", 2) == 1 else c[0].square().sum(axis, True).sqrt()
    return torch.where(size == 0, torch.zeros_like(c[0]), c[0] / size)


@rule("LRN")
def _local_response_norm(c: Call) -> torch.Tensor:
    size, x = int(c.attr("size")), c[0]
    square = x.square().transpose(1, -1).unsqueeze(-2)
    before = (size - 1) // 2
    padded = F.pad(square, (before, size - 1 - before))
    summed = padded.unfold(-1, size, 1).sum(-1).squeeze(-2).transpose(1, -1)
    return x / (c.attr("bias", 1.0) + c.attr("alpha", 1e-4) / size * summed) ** c.attr("beta", 0.75)


def _along(c: Call) -> tuple[torch.Tensor, int]:
    """The operand and the dimension to normalise; old operator sets flatten all dimensions from the axis on."""
    if c.opset >= 13:
        return c[0], int(c.attr("axis", -1))
    axis = int(c.attr("axis", 1)) % c[0].dim()
    return c[0].flatten(axis) if axis < c[0].dim() else c[0], axis


@rule("Softmax")
def _softmax(c: Call) -> torch.Tensor:
    x, axis = _along(c)
    return torch.softmax(x, axis).reshape(c[0].shape)


@rule("LogSoftmax")
def _log_softmax(c: Call) -> torch.Tensor:
    x, axis = _along(c)
    return torch.log_softmax(x, axis).reshape(c[0].shape)


@rule("SoftmaxCrossEntropyLoss")
def _cross_entropy(c: Call) -> list[torch.Tensor]:
    logs = torch.log_softmax(c[0], 1)
    return [_negative_log_likelihood(c, logs), logs]


@rule("NegativeLogLikelihoodLoss")
def _nll(c: Call) -> torch.Tensor:
    return _negative_log_likelihood(c, c[0])


def _negative_log_likelihood(c: Call, logs: torch.Tensor) -> torch.Tensor:
    ignored = c.attr("ignore_index")
    reduction = c.attr("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"unknown reduction {reduction!r} of a loss", where=c.name, hint="use mean, sum or none")
    return F.nll_loss(
        logs, c[1].long(), c.get(2), reduction=reduction, ignore_index=-100 if ignored is None else int(ignored)
    )

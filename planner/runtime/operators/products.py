"""Products: matrices, convolutions, einsum; and pooling, which walks windows in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import RULES, OperatorCall, rule
from planner.runtime.operators.kernels import product

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


RULES.update(
    {
        "GlobalAveragePool": lambda c: c[0].mean(tuple(range(2, c[0].dim())), keepdim=True),
        "GlobalMaxPool": lambda c: c[0].amax(tuple(range(2, c[0].dim())), keepdim=True),
        "Det": lambda c: torch.linalg.det(c[0]),
    }
)


@rule("MatMul", product=True)
def _matmul(c: OperatorCall) -> torch.Tensor:
    return product(c[0], c[1]) if c.context.adds_in_place else torch.matmul(c[0], c[1])


@rule("Gemm", "com.microsoft.FusedGemm", product=True)
def _gemm(c: OperatorCall) -> torch.Tensor:
    a = c[0].T if c.attr("transA", 0) else c[0]
    b = c[1].T if c.attr("transB", 0) else c[1]
    y = product(a, b) if c.context.adds_in_place else a @ b
    y = c.attr("alpha", 1.0) * y if c.attr("alpha", 1.0) != 1.0 else y
    if c.has(2) and c.attr("beta", 1.0) != 0:
        y = y + (c.attr("beta", 1.0) * c[2] if c.attr("beta", 1.0) != 1.0 else c[2])
    return y


@rule("com.microsoft.FusedMatMul", "com.microsoft.TransposeMatMul", product=True)
def _fused_matmul(c: OperatorCall) -> torch.Tensor:
    a = c[0].transpose(-1, -2) if c.attr("transA", 0) else c[0]
    b = c[1].transpose(-1, -2) if c.attr("transB", 0) else c[1]
    return c.attr("alpha", 1.0) * (a @ b)


@rule("Einsum", product=True)
def _einsum(c: OperatorCall) -> torch.Tensor:
    return torch.einsum(c.attr("equation").replace(" ", ""), *[x for x in c.inputs if x is not None])


def _padding(
    c: OperatorCall, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial dimension."""
    auto, n = c.attr("auto_pad", "NOTSET"), len(kernel)
    if auto in ("NOTSET", "VALID"):
        pads = list(c.attr("pads") or [0] * 2 * n) if auto == "NOTSET" else [0] * 2 * n
        return pads[:n], pads[n:]
    before, after = [], []
    for size, k, step, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        whole = max(0, (math.ceil(size / step) - 1) * step + (k - 1) * dilation + 1 - size)
        small = whole // 2
        before.append(small if auto == "SAME_UPPER" else whole - small)
        after.append(whole - before[-1])
    return before, after


def _padded(x: torch.Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> torch.Tensor:
    flat = [p for d in reversed(range(len(before))) for p in (before[d], after[d])]
    return F.pad(x, flat, value=value) if any(flat) else x


@rule("Conv", product=True)
def _conv(c: OperatorCall) -> torch.Tensor:
    x, weight = c[0], c[1]
    n = weight.dim() - 2
    strides, dilations = list(c.attr("strides") or [1] * n), list(c.attr("dilations") or [1] * n)
    before, after = _padding(c, x.shape[2:], weight.shape[2:], strides, dilations)
    if before == after:
        return _CONV[n](x, weight, c.get(2), strides, before, dilations, int(c.attr("group", 1)))
    return _CONV[n](_padded(x, before, after), weight, c.get(2), strides, 0, dilations, int(c.attr("group", 1)))


@rule("ConvTranspose", product=True)
def _conv_transpose(c: OperatorCall) -> torch.Tensor:
    x, weight = c[0], c[1]
    n = weight.dim() - 2
    strides, dilations = list(c.attr("strides") or [1] * n), list(c.attr("dilations") or [1] * n)
    extra = list(c.attr("output_padding") or [0] * n)
    whole = [
        (x.shape[2 + d] - 1) * strides[d] + (weight.shape[2 + d] - 1) * dilations[d] + 1 + extra[d] for d in range(n)
    ]
    auto, wanted = c.attr("auto_pad", "NOTSET"), c.attr("output_shape")
    if wanted or auto.startswith("SAME"):
        sizes = list(wanted or [x.shape[2 + d] * strides[d] for d in range(n)])[-n:]
        cut = [whole[d] - sizes[d] for d in range(n)]
        if min(cut) < 0:
            raise ModelError("ConvTranspose that adds to its result has no torch rule", where=c.name)
        before = [int(k / 2) if auto == "SAME_UPPER" else k - int(k / 2) for k in cut]
        after = [cut[d] - before[d] for d in range(n)]
    else:
        pads = list(c.attr("pads") or [0] * 2 * n)
        before, after = pads[:n], pads[n:]
    y = _CONV_TRANSPOSE[n](x, weight, None, strides, 0, extra, int(c.attr("group", 1)), dilations)
    y = _padded(y, [-p for p in before], [-p for p in after])
    return y if not c.has(2) else y + c[2].reshape(-1, *[1] * n)


def _ceil_end(size: int, kernel: int, step: int, dilation: int, before: int, after: int, up: bool) -> int:
    """Padding behind a dimension that completes the last window where the output size is rounded up."""
    if not up:
        return after
    reach = (kernel - 1) * dilation + 1
    windows = math.ceil((size + before + after - reach) / step) + 1
    if (windows - 1) * step >= size + before:
        windows -= 1
    return max(after, (windows - 1) * step + reach - size - before)


@rule("MaxPool")
def _max_pool(c: OperatorCall) -> torch.Tensor:
    if c.outputs > 1:
        raise ModelError("MaxPool with indices has no torch rule", where=c.name, hint="export without the indices")
    kernel = list(c.attr("kernel_shape"))
    n = len(kernel)
    strides, dilations = list(c.attr("strides") or [1] * n), list(c.attr("dilations") or [1] * n)
    before, after = _padding(c, c[0].shape[2:], kernel, strides, dilations)
    up = bool(c.attr("ceil_mode", 0))
    after = [
        _ceil_end(c[0].shape[2 + d], kernel[d], strides[d], dilations[d], before[d], after[d], up) for d in range(n)
    ]
    if before == after and all(2 * pad <= size for pad, size in zip(before, kernel, strict=True)):
        return _MAX_POOL[n](c[0], kernel, strides, before, dilations)
    return _MAX_POOL[n](_padded(c[0], before, after, -torch.inf), kernel, strides, 0, dilations)


@rule("AveragePool")
def _average_pool(c: OperatorCall) -> torch.Tensor:
    x, kernel = c[0], list(c.attr("kernel_shape"))
    n = len(kernel)
    strides, dilations = list(c.attr("strides") or [1] * n), list(c.attr("dilations") or [1] * n)
    before, given = _padding(c, x.shape[2:], kernel, strides, dilations)
    up = bool(c.attr("ceil_mode", 0))
    after = [_ceil_end(x.shape[2 + d], kernel[d], strides[d], dilations[d], before[d], given[d], up) for d in range(n)]
    ones = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype, device=x.device)
    if c.attr("count_include_pad", 0):
        ones = _padded(ones, before, given, 1.0)
        ones = _padded(ones, [0] * n, [after[d] - given[d] for d in range(n)])
    else:
        ones = _padded(ones, before, after)
    window = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    counts = _CONV[n](ones, window, None, strides, 0, dilations)
    folded = _padded(x, before, after).flatten(0, 1).unsqueeze(1)
    sums = _CONV[n](folded, window, None, strides, 0, dilations)
    return sums.reshape(*x.shape[:2], *sums.shape[2:]) / counts


@rule("CausalConvWithState")
def _causal_conv(c: OperatorCall) -> list[torch.Tensor]:
    x, weight = c[0], c[1]
    length = weight.shape[-1] - 1
    state = c.get(3)
    before = torch.zeros(*x.shape[:2], length, dtype=x.dtype, device=x.device) if state is None else state
    joined = torch.cat([before, x], 2)
    y = F.conv1d(joined, weight, c.get(2), groups=weight.shape[0])
    if c.attr("activation", "none") in ("silu", "swish"):
        y = F.silu(y)
    return [y, joined[:, :, joined.shape[2] - length :]]

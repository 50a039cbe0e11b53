"""Windows that slide over space: convolutions of any rank, and pooling.

Work of a convolution: 2 per multiply-add, `2 n k (c/g) y x r s`, padding counted, as torch counts it. Max pooling keeps
its input and int64 places (twice an fp32 result's bytes), average pooling its input, as torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.graph import Node
from planner.operators.assemble import INT64_BYTES, contraction, keep_extra, keep_inputs, keep_outputs, streaming
from planner.operators.entry import WEIGHT_AND_BIAS, OpCall, Role, Rule
from planner.operators.flow import Flow, along_nests
from planner.operators.nest import dim_names
from planner.operators.rules.matmul import rounded
from planner.operators.types import LoopNest, OpSpec, Saved


def pads_before(
    call: OpCall, kernel: tuple[int, ...], spatial_in: tuple[int, ...], spatial_out: tuple[int, ...]
) -> list[int]:
    """Padding in front of each spatial dimension, from `pads` or `auto_pad`."""
    rank = len(kernel)
    mode = call.str_attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return list(call.ints("pads", (0,) * (2 * rank))[:rank])
    if mode == "VALID":
        return [0] * rank
    before = []
    for size, out, r, stride, dilation in zip(spatial_in, spatial_out, kernel, *_steps(call, rank), strict=True):
        total = max(0, (out - 1) * stride + dilation * (r - 1) + 1 - size)
        before.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
    return before


def _steps(call: OpCall, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides and dilations."""
    return call.ints("strides", (1,) * rank), call.ints("dilations", (1,) * rank)


def window_halos(
    call: OpCall, names: list[str], kernel: tuple[int, ...], spatial_in: tuple[int, ...], spatial_out: tuple[int, ...]
) -> dict[str, int]:
    """Elements that a neighbour supplies on each side when a spatial dimension is split.

    A part that owns `stride` input elements per result reads `pad` elements in front of its own and
    `dilation (kernel - 1) + 1 - stride - pad` behind them; the larger of the two counts for both sides.
    """
    before = pads_before(call, kernel, spatial_in, spatial_out)
    return {
        name: max(pad, dilation * (r - 1) + 1 - stride - pad, 0)
        for name, r, stride, dilation, pad in zip(names, kernel, *_steps(call, len(kernel)), before, strict=True)
    }


def conv_nest(call: OpCall, x: int, w: int) -> LoopNest:
    """`n (g c) (y+r), (g k) c r -> n (g k) y` over any number of spatial dimensions."""
    data, weight, result = call.input(x).shape, call.input(w).shape, call.output().shape
    halos = window_halos(call, dim_names("y", len(weight) - 2), weight[2:], data[2:], result[2:])
    text = f"{x}:n (g c) (y+r).., {w}:(g k) c r.. -> n (g k) y.."
    return call.nest(text, sizes={"g": call.int_attribute("group", 1)}, halos=halos, contraction=True)


def _channel_bias(call: OpCall, position: int, image: str = "y..", *, whole: str = "") -> LoopNest | None:
    """Adds one number a channel; the channel is named as in the convolution's nest."""
    if not call.has(position):
        return None
    sizes, elements = {"g": call.int_attribute("group", 1)}, float(call.output().elements)
    return call.nest(f"{position}:(g k) -> n (g k) {image}", sizes=sizes, whole=whole, vector_flops=elements)


def _by_sample(flow: Flow, i: int, node: Node) -> None:
    """The batch is the first dimension: the number of groups, in which a file may have its samples, is fixed."""
    if any(flow.of(node.inputs[0])[1:2]):
        raise flow.fail(i, "has a group for each sample, and the file fixes the number of groups")
    along_nests(flow, i, node)


@Rule(weights=WEIGHT_AND_BIAS, travel=_by_sample, window=1, heavy=True).of("Conv", "com.microsoft.FusedConv")
def conv(call: OpCall) -> OpSpec:
    """Convolution with groups, strides, dilations and padding."""
    return contraction(call, conv_nest(call, 0, 1), bias=_channel_bias(call, 2))


@Rule(ports=(), weights={1: Role.MATRIX}, window=1, heavy=True, quantised=True).of("ConvInteger")
def conv_integer(call: OpCall) -> OpSpec:
    """Convolution of 8-bit tensors; an inference operator, no gradient passes."""
    return contraction(call, conv_nest(call, 0, 1))


@Rule(ports=(), weights={3: Role.MATRIX, 4: Role.QUANTIZATION, 8: Role.BIAS}, window=3, heavy=True, quantised=True).of(
    "QLinearConv"
)
def qlinear_conv(call: OpCall) -> OpSpec:
    """Convolution of quantised tensors with scales and zero points, its result rounded; no gradient passes."""
    return contraction(call, rounded(conv_nest(call, 0, 3)))


@Rule(weights=WEIGHT_AND_BIAS, travel=_by_sample, window=1, heavy=True).of("ConvTranspose")
def conv_transpose(call: OpCall) -> OpSpec:
    """Transposed convolution: every input element is spread over a window of the result."""
    # a part of the input overlaps its neighbours' results, and padding cuts the ends: space is not split
    text, sizes = "n (g c) y.., (g c) k r.. -> n (g k) (y+r)..", {"g": call.int_attribute("group", 1)}
    nest = call.nest(text, sizes=sizes, whole="y..", contraction=True)
    return contraction(call, nest, bias=_channel_bias(call, 2, "out.."))


@Rule(weights={1: Role.MATRIX, 3: Role.BIAS}, heavy=True).of("DeformConv")
def deform_conv(call: OpCall) -> OpSpec:
    """Convolution over sampled positions: a convolution's matrix work plus bilinear sampling of every tap.

    Torch's counter does not know the operator; its matrix product is counted here all the same.
    """
    weight, result = call.input(1).shape, call.output().shape
    taps = math.prod(weight[2:]) * result[0] * math.prod(result[2:]) * call.input(0).shape[1]
    # offsets reach anywhere in the image and are shared by groups of channels
    nest = call.nest(
        "n (g c) (y+r).., (g k) c r.., n offset y.., ?4:n mask y.. -> n (g k) y..",
        sizes={"g": call.int_attribute("group", 1)},
        whole="y.. r.. g c offset mask",
        matrix_flops=2.0 * taps * weight[0] / call.int_attribute("group", 1),
        vector_flops=8.0 * taps,
    )
    saved = keep_inputs(call, 0, 1, 2, 4) if call.trains else ()
    bias = _channel_bias(call, 3, whole="y.. g")
    base = contraction(call, nest, bias=bias, saved=saved, kernels=2)
    work = nest.matrix_flops
    return replace(
        base,
        input_grad_matrix_flops=work if any(call.need(p) for p in (0, 2, 4)) else 0.0,
        weight_grad_matrix_flops=work if call.need(1) else 0.0,
        backward_vector_flops=12.0 * taps if call.trains else 0.0,
    )


@Rule().of("CausalConvWithState")
def causal_conv(call: OpCall) -> OpSpec:
    """Depthwise causal convolution over time with the last inputs carried as state: `n c (t+r), c 1 r -> n c t`."""
    nest = call.nest(
        "n c (t+r), c 1 r, ?3:n c state -> n c t, ?n c state",
        whole="state t",
        matrix_flops=2.0 * call.input(0).elements * call.input(1).shape[-1],
    )
    bias = None
    if call.has(2):
        bias = call.nest("2:c -> n c t", whole="t", vector_flops=float(call.output().elements))
    return contraction(call, nest, bias=bias)


def _window_nest(call: OpCall, flops: float) -> LoopNest:
    """`n c (y+r) -> n c y`; the result's channels and batch are the input's."""
    x, result = call.input(0).shape, call.output().shape
    kernel = call.ints("kernel_shape", x[2:])
    ys, rs = dim_names("y", len(kernel)), dim_names("r", len(kernel))
    return call.nest(
        "n c (y+r).. -> n c y..",
        sizes=dict(zip(rs, kernel, strict=True)),
        halos=window_halos(call, ys, kernel, x[2:], result[2:]),
        vector_flops=flops,
    )


def _window(call: OpCall) -> int:
    return math.prod(call.ints("kernel_shape", call.input(0).shape[2:]))


@Rule(ports=(0,), window=-1).of("MaxPool")
def max_pool(call: OpCall) -> OpSpec:
    """Largest element of each window; the places are output 1 where asked for, else made."""
    elements = call.output().elements
    places: Saved = keep_extra(0, elements, bits=8 * INT64_BYTES)
    if call.has_output(1):
        (places,) = keep_outputs(1)
    nest = _window_nest(call, float(_window(call) * elements))
    return streaming(call, nest, saved=(*keep_inputs(call, 0), places), backward_flops=float(elements))


@Rule(ports=(0,), window=-1).of("AveragePool", "LpPool")
def pool(call: OpCall) -> OpSpec:
    """Mean, or p-norm, of each window; the input is kept, of a norm the result too."""
    normed = call.op == "LpPool"
    flops = float((3 if normed else 1) * _window(call) * call.output().elements)
    saved = (*keep_inputs(call, 0), *(keep_outputs(0) if normed else ()))
    return streaming(call, _window_nest(call, flops), saved=saved, backward_flops=flops)

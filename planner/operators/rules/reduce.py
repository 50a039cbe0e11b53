"""Reductions and scans along axes; softmax, which keeps its output, as torch does, and the losses built on it."""

from __future__ import annotations

import math

from planner.operators.assemble import (
    elements_like,
    keep_extra,
    keep_inputs,
    keep_letters,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.entry import OpCall, Rule, Statistics, as_first
from planner.operators.rules.elementwise import Unary, broadcast_nest
from planner.operators.types import DimKind, LoopNest, OpSpec, Saved

_ONE = Statistics((1,))
REDUCTIONS = {
    "ReduceL1": Unary(2, 2, "x", adds=True),
    "ReduceL2": Unary(2, 2, "xy", statistics=_ONE),
    "ReduceLogSum": Unary(1, 1, "s", statistics=_ONE),
    "ReduceLogSumExp": Unary(6, 6, "xy", statistics=Statistics((1, 1))),
    "ReduceMax": Unary(1, 1, "xy", statistics=_ONE, folds=True),
    "ReduceMean": Unary(1, 1, adds=True),
    "ReduceMin": Unary(1, 1, "xy", statistics=_ONE, folds=True),
    "ReduceProd": Unary(1, 1, "xy", folds=True),
    "ReduceSum": Unary(1, 1, adds=True, folds=True),
    "ReduceSumSquare": Unary(2, 2, "x", adds=True),
    "GlobalAveragePool": Unary(1, 1, adds=True),
    "GlobalMaxPool": Unary(1, 1, "xy", statistics=_ONE),
    "GlobalLpPool": Unary(2, 2, "xy"),
}


def _reduced_axes(call: OpCall) -> tuple[int, ...] | None:
    """The axes summed over; None when they are computed at run time and the shapes do not show them."""
    x, result = call.input(0), call.output()
    rank = len(x.shape)
    if call.op.startswith("Global"):
        return tuple(range(2, rank))
    if call.op.startswith("Arg"):
        return (call.axis("axis", 0, rank),)
    axes = call.axes("axes", 1, rank)
    if axes:
        return axes
    if axes == () or not call.has(1):
        return () if call.int_attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    if len(result.shape) == rank:
        return tuple(k for k in range(rank) if x.shape[k] != result.shape[k])
    return None


def reduction_nest(call: OpCall, kind: DimKind, flops: float) -> LoopNest:
    """The reduced dimensions are absent from the result, or of size 1 there."""
    x, result = call.input(0), call.output()
    axes = _reduced_axes(call)
    if axes is None:
        return LoopNest((), (), (), vector_flops=flops)
    kept = len(result.shape) == len(x.shape)
    out = ["1" if k in axes else f"d{k}" for k in range(len(x.shape)) if kept or k not in axes]
    along = " ".join(f"d{k}" for k in axes)
    text = f"d.. -> {' '.join(out)}"
    if kind is DimKind.REDUCED:
        return call.nest(text, reduced=along, vector_flops=flops)
    return call.nest(text, coupled=along, vector_flops=flops)


def _reduce(call: OpCall) -> OpSpec:
    entry = REDUCTIONS[call.op]
    x, result = call.input(0), call.output()
    inner = (keep_extra(0, result.elements, result),) if "s" in entry.keeps else ()
    saved = (*keep_letters(call, entry.keeps), *inner)
    nest = reduction_nest(call, DimKind.REDUCED if entry.adds else DimKind.COUPLED, entry.forward * x.elements)
    return streaming(call, nest, saved=saved, backward_flops=float(entry.backward * x.elements))


for _op, _entry in REDUCTIONS.items():
    _axes = () if _op.startswith("Global") else (1,)
    _rule = Rule(ports=(0,), folds=_entry.folds, values=_axes, statistics=_entry.statistics)
    _rule.register(_op, build=_reduce)


@Rule(ports=()).of("ArgMax", "ArgMin")
def arg_extremum(call: OpCall) -> OpSpec:
    """Place of the largest or smallest element along an axis; no gradient."""
    return streaming(call, reduction_nest(call, DimKind.COUPLED, float(call.input(0).elements)))


@Rule(ports=(0,), folds=True, values=(1,)).of("CumSum")
@Rule(ports=(0,)).of("CumProd")
def scan(call: OpCall) -> OpSpec:
    """Running sums or products along an axis; products keep input and output."""
    x = call.input(0)
    axis, rank = call.constant_ints(1), len(x.shape)
    coupled = [axis[0] % rank] if axis and rank else range(rank)
    nest = broadcast_nest(call, (0,), float(x.elements), coupled=coupled)
    saved = (*keep_inputs(call, 0), *keep_outputs(0)) if call.op == "CumProd" else ()
    return streaming(call, nest, saved=saved, backward_flops=float(x.elements))


@Rule().of("Det")
def determinant(call: OpCall) -> OpSpec:
    """Determinant by elimination, 2/3 n^3; keeps input, result and the factors."""
    x = call.input(0)
    n = x.shape[-1]
    flops = 2.0 / 3.0 * n**3 * math.prod(x.shape[:-2])
    nest = call.nest("b.. i j -> b..", coupled="i j", vector_flops=flops)
    saved = (*keep_inputs(call, 0), *keep_outputs(0), keep_extra(0, x.elements, x))
    return streaming(call, nest, saved=saved, backward_flops=3.0 * flops)


SOFTMAX_STATISTICS = Statistics((1, 1), (1,))
"""Maximum, then sum of exponentials; backward the sum of output times its gradient."""
FORWARD_FLOPS = 5.0
"""Per element: maximum, subtract, exponential, sum, divide (each counted one)."""
BACKWARD_FLOPS = 4.0
"""Per element: product with the output, its sum, subtract, product."""


def _coupled_nest(call: OpCall, vector_flops: float) -> LoopNest:
    """The normalised dimension is coupled; before operator set 13 that is every dimension from `axis` on."""
    rank = len(call.input(0).shape)
    if call.opset >= 13:
        coupled = [call.axis("axis", -1, rank)] if rank else []
    else:
        coupled = list(range(call.axis("axis", 1, rank), rank))
    return broadcast_nest(call, (0,), vector_flops, coupled=coupled)


@Rule(statistics=SOFTMAX_STATISTICS).of("Softmax", "LogSoftmax")
def softmax(call: OpCall) -> OpSpec:
    """Exponentials normalised along an axis, or their logarithms."""
    elements = call.input(0).elements
    nest = _coupled_nest(call, FORWARD_FLOPS * elements)
    return streaming(call, nest, saved=keep_outputs(0), backward_flops=BACKWARD_FLOPS * elements)


@Rule(ports=()).of("Hardmax")
def hardmax(call: OpCall) -> OpSpec:
    """One at the first maximum along an axis, else zero; no gradient."""
    return streaming(call, _coupled_nest(call, 2.0 * call.input(0).elements))


@Rule(infer=as_first, statistics=SOFTMAX_STATISTICS).of("com.microsoft.BiasSoftmax")
def bias_softmax(call: OpCall) -> OpSpec:
    """Bias added, then softmax, in one kernel."""
    elements = call.input(0).elements
    nest = broadcast_nest(call, (0,), 6.0 * elements, coupled=[-1])
    return streaming(call, nest, saved=keep_outputs(0), backward_flops=BACKWARD_FLOPS * elements)


def _loss_nest(call: OpCall, vector_flops: float, classes: DimKind) -> LoopNest:
    """`n c s, n s -> ` loss; a mean over rows is a sum of parts, each divided by the whole's number of rows."""
    unreduced = call.output().shape == call.input(1).shape and bool(call.input(1).shape)
    rows, loss = ("n s..", "n s..") if unreduced else ("n s..", "")
    return call.nest(
        f"n c s.., {rows}, ?c -> {loss}, ?n c s..",
        parallel=rows if unreduced else "",
        reduced=("" if unreduced else rows) + (" c" if classes is DimKind.REDUCED else ""),
        coupled="c" if classes is DimKind.COUPLED else "",
        vector_flops=vector_flops,
    )


@Rule(ports=(0,), statistics=Statistics((1, 2))).of("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(call: OpCall) -> OpSpec:
    """Log-softmax of the scores and the mean loss of the labels; `details["loss_elements"]` is the number of scores.

    Ranks that cut the classes exchange the maximum, then the sum of exponentials with the label's score; backward is
    local.

    The log-probabilities are kept: as output 1 where asked for, else made by the operator; so are the labels.
    """
    scores = call.input(0)
    made: tuple[Saved, ...] = keep_outputs(1) if call.has_output(1) else (keep_extra(0, scores.elements, scores),)
    nest = _loss_nest(call, FORWARD_FLOPS * scores.elements, DimKind.COUPLED)
    saved = (*keep_inputs(call, 1), *made)
    # two kernels forward (log-softmax, loss), two backward, with the log-probabilities' gradient written and read
    labels = traffic(call.input(1))
    forward = traffic(scores) + elements_like(scores, scores.elements) + labels
    backward = elements_like(scores, 4.0 * scores.elements) + labels
    return streaming(
        call,
        nest,
        saved=saved,
        forward=forward,
        backward=backward,
        backward_flops=BACKWARD_FLOPS * scores.elements,
        kernels=2,
        backward_kernels=2,
        extra={"loss_elements": float(scores.elements)},
    )


@Rule(ports=(0,)).of("NegativeLogLikelihoodLoss")
def negative_log_likelihood(call: OpCall) -> OpSpec:
    """Mean of the labels' negated log-probabilities; reads one number a row, writes a gradient of full size."""
    scores, labels = call.input(0), call.input(1)
    nest = _loss_nest(call, 2.0 * labels.elements, DimKind.REDUCED)
    forward = elements_like(scores, labels.elements) + traffic(labels, call.output())
    backward = traffic(scores, labels)
    saved = (*keep_inputs(call, 1), keep_extra(0, 1, scores))
    return streaming(call, nest, saved=saved, forward=forward, backward=backward, backward_flops=float(labels.elements))

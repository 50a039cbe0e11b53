"""Operators that compute each result element from the operands' elements at the same place.

One line an operator: flops an element forward and backward, and what is kept, as torch's autograd keeps it: `x` the
input, `y` the output, nothing. Transcendental functions count as the handful of instructions that a GPU's special
function unit and its correction take, so the numbers steer nothing but the rare compute-bound case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.graph import TensorKind
from planner.operators.assemble import (
    keep_extra,
    keep_inputs,
    keep_letters,
    keep_outputs,
    saved_traffic,
    streaming,
    traffic,
)
from planner.operators.entry import OpCall, Role, Rule, Shaped, Statistics, as_first, like
from planner.operators.types import LoopNest, OpSpec, Saved, Traffic


@dataclass(frozen=True, slots=True)
class Unary:
    """A function of one tensor, element by element or along axes.

    Attributes:
        forward: flops an element of the tensor.
        backward: the same backward; without them no gradient flows through it.
        keeps: `x` the tensor, `y` the result, `s` the sum inside a reduction.
        folds: as in `Rule`.
        adds: results of parts along a reduced axis add up to that of the whole.
        statistics: what ranks exchange along a reduced axis where they do not, if that is known.
    """

    forward: float
    backward: float = 0.0
    keeps: str = ""
    folds: bool = False
    adds: bool = False
    statistics: Statistics | None = None


UNARY = {
    "Abs": Unary(1, 2, "x", folds=True),
    "Acos": Unary(8, 5, "x"),
    "Acosh": Unary(10, 5, "x"),
    "Asin": Unary(8, 5, "x"),
    "Asinh": Unary(10, 5, "x"),
    "Atan": Unary(8, 4, "x"),
    "Atanh": Unary(10, 4, "x"),
    "Celu": Unary(8, 8, "x"),
    "Clip": Unary(2, 2, "x"),
    "Cos": Unary(4, 5, "x"),
    "Cosh": Unary(8, 9, "x"),
    "Elu": Unary(7, 7, "x"),
    "Erf": Unary(8, 7, "x"),
    "Exp": Unary(4, 1, "y", folds=True),
    "Gelu": Unary(12, 16, "x"),
    "HardSigmoid": Unary(4, 3, "x"),
    "HardSwish": Unary(5, 5, "x"),
    "LeakyRelu": Unary(2, 2, "x"),
    "Log": Unary(4, 1, "x", folds=True),
    "Mish": Unary(14, 18, "x"),
    "Neg": Unary(1, 1, folds=True),
    "Reciprocal": Unary(2, 3, "y", folds=True),
    "Relu": Unary(1, 1, "y"),
    "Selu": Unary(7, 7, "x"),
    "Shrink": Unary(3, 2, "x"),
    "Sigmoid": Unary(6, 3, "y"),
    "Sin": Unary(4, 5, "x"),
    "Sinh": Unary(8, 9, "x"),
    "Softplus": Unary(8, 7, "x"),
    "Softsign": Unary(3, 5, "x"),
    "Sqrt": Unary(2, 3, "y", folds=True),
    "Swish": Unary(7, 9, "x"),
    "Tan": Unary(8, 3, "y"),
    "Tanh": Unary(6, 3, "y"),
    "ThresholdedRelu": Unary(2, 2, "x"),
    "com.microsoft.FastGelu": Unary(10, 16, "x"),
    "com.microsoft.Gelu": Unary(12, 16, "x"),
    "com.microsoft.QuickGelu": Unary(8, 10, "x"),
    "BitwiseNot": Unary(1),
    "Ceil": Unary(1, folds=True),
    "Floor": Unary(1, folds=True),
    "IsInf": Unary(2),
    "IsNaN": Unary(1, folds=True),
    "Not": Unary(1, folds=True),
    "Round": Unary(1, folds=True),
    "Sign": Unary(2, folds=True),
}

COMPARISONS = (
    "And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor",
)  # fmt: skip
"""Functions of two tensors without a gradient, which exporters compare shapes with."""
BITWISE = ("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")


def broadcast_nest(
    call: OpCall, positions: tuple[int, ...], vector_flops: float, *, coupled: Iterable[int] = ()
) -> LoopNest:
    """Operands aligned from the right, size 1 broadcast, all results of one shape.

    Every dimension is parallel but those of the results, by number, whose points depend on each other.
    """
    outputs = [p for p in range(len(call.outputs)) if call.has_output(p)] or [0]
    rank = len(call.output(outputs[0]).shape)
    text = f"{', '.join(f'{p}:d..' for p in positions)} -> {', '.join(f'{p}:d..' for p in outputs)}"
    return call.nest(text, coupled=" ".join(f"d{k % rank}" for k in coupled), vector_flops=vector_flops)


def _unary(call: OpCall) -> OpSpec:
    entry = UNARY[call.op]
    elements = call.output().elements
    nest = broadcast_nest(call, (0,), entry.forward * elements)
    return streaming(call, nest, saved=keep_letters(call, entry.keeps), backward_flops=entry.backward * elements)


def _comparison(call: OpCall) -> OpSpec:
    return streaming(call, broadcast_nest(call, (0, 1), float(call.output().elements)))


for _op, _entry in UNARY.items():
    _ports = (0,) if _entry.backward else ()
    _fused = Rule(ports=_ports, infer=as_first, keeps_layout=True, weights={1: Role.BIAS})
    _rule = (
        _fused
        if _op.startswith("com.microsoft.")
        else Rule(ports=_ports, folds=_entry.folds, keeps_layout=bool(_ports))
    )
    _rule.register(_op, build=_unary)
Rule(ports=(), folds=True).register(*COMPARISONS, build=_comparison)
Rule(ports=()).register(*BITWISE, build=_comparison)


def _small(call: OpCall, position: int) -> bool:
    return call.input(position).elements < call.output().elements


def _sum_backward(call: OpCall) -> tuple[Traffic, int]:
    """Backward of a sum: an operand of full size shares the result's gradient, a broadcast one is summed up."""
    summed = [p for p in range(len(call.needs)) if call.need(p) and _small(call, p)]
    total = Traffic()
    for position in summed:
        total += traffic(call.output(), call.input(position))
    return total, len(summed)


@Rule(folds=True, keeps_layout=True, weights={0: Role.ADDED, 1: Role.ADDED}, neutral={0: 0.0, 1: 0.0}, linear=True).of(
    "Add"
)
@Rule(folds=True, keeps_layout=True, weights={1: Role.ADDED}, neutral={1: 0.0}, linear=True).of("Sub")
@Rule(folds=True, linear=True).of("Sum")
@Rule().of("Mean")
def add(call: OpCall) -> OpSpec:
    """Sums, differences, means of several tensors; nothing is kept."""
    positions = tuple(p for p in range(len(call.inputs)) if call.has(p))
    elements = call.output().elements
    nest = broadcast_nest(call, positions, float(max(1, len(positions) - 1)) * elements)
    backward, kernels = _sum_backward(call)
    if call.op in ("Sub", "Mean") and call.trains:
        scaled = tuple(p for p in positions if call.need(p) and not _small(call, p))
        if call.op == "Sub":
            scaled = tuple(p for p in scaled if p == 1)
        for position in scaled:
            backward += traffic(call.output(), call.input(position))
            kernels += 1
    return streaming(
        call,
        nest,
        backward=backward,
        backward_kernels=kernels,
        backward_flops=float(elements * kernels),
    )


def _needed_backward(call: OpCall, saved: tuple[Saved, ...]) -> Traffic:
    """One kernel an operand: the result's gradient and what was kept in, the operand's gradient out.

    A broadcast operand's gradient is first made at full size, then summed.
    """
    total = Traffic()
    for position in range(len(call.needs)):
        if not call.need(position):
            continue
        full = call.output()
        total += traffic(full, full if _small(call, position) else call.input(position))
        if _small(call, position):
            total += traffic(full, call.input(position))
    resident = (t for t in call.present() if t.kind in (TensorKind.PARAMETER, TensorKind.CONSTANT))
    return total + saved_traffic(call, saved) + traffic(*resident)


def _binary(
    call: OpCall, keep: tuple[int, ...], forward: float, backward: float, outputs: tuple[int, ...] = ()
) -> OpSpec:
    elements = call.output().elements
    saved = (*keep_inputs(call, *keep), *keep_outputs(*outputs))
    count = sum(call.needs[:2])
    return streaming(
        call,
        broadcast_nest(call, (0, 1), forward * elements),
        saved=saved,
        backward=_needed_backward(call, saved),
        backward_flops=backward * elements * count,
        backward_kernels=count + sum(call.need(p) and _small(call, p) for p in (0, 1)),
    )


@Rule(folds=True, keeps_layout=True, weights={0: Role.SCALE, 1: Role.SCALE}, neutral={0: 1.0, 1: 1.0}).of("Mul")
def multiply(call: OpCall) -> OpSpec:
    """A factor is kept when the other one needs a gradient."""
    return _binary(call, tuple(1 - p for p in (0, 1) if call.need(p)), 1, 1)


@Rule(folds=True, keeps_layout=True, weights={1: Role.SCALE}, neutral={1: 1.0}).of("Div")
def divide(call: OpCall) -> OpSpec:
    """The divisor is kept for either gradient, the dividend for the divisor's."""
    return _binary(call, (0, 1) if call.need(1) else (1,), 1, 2)


@Rule(folds=True, keeps_layout=True, neutral={1: 1.0}).of("Pow")
def power(call: OpCall) -> OpSpec:
    """The base is kept; with an exponent that needs a gradient also exponent and result."""
    if call.need(1):
        return _binary(call, (0, 1), 8, 8, (0,))
    return _binary(call, (0, 1), 8 if _general_power(call) else 2, 9 if _general_power(call) else 3)


def _general_power(call: OpCall) -> bool:
    value = call.constants[1] if len(call.constants) > 1 else None
    return value is None or any(float(v) not in (0.5, 1.0, 2.0, 3.0) for v in value)


@Rule(folds=True).of("Mod")
def modulo(call: OpCall) -> OpSpec:
    """Remainder; only the divisor's gradient needs anything."""
    return _binary(call, (0, 1) if call.need(1) else (), 4, 2)


@Rule(folds=True, keeps_layout=True).of("Max")
@Rule(folds=True, keeps_layout=True).of("Min")
def extremum(call: OpCall) -> OpSpec:
    """Largest or smallest of several tensors; all are kept."""
    positions = tuple(p for p in range(len(call.inputs)) if call.has(p))
    elements = call.output().elements
    return streaming(
        call,
        broadcast_nest(call, positions, float(max(1, len(positions) - 1)) * elements),
        saved=keep_inputs(call, *positions) if len(positions) > 1 else (),
        backward_flops=2.0 * elements * len(positions),
        backward_kernels=len(positions),
    )


@Rule(ports=(1, 2), folds=True, keeps_layout=True).of("Where")
def where(call: OpCall) -> OpSpec:
    """Choice between two tensors; the condition is kept."""
    elements = call.output().elements
    return streaming(
        call,
        broadcast_nest(call, (0, 1, 2), float(elements)),
        saved=keep_inputs(call, 0),
        backward_flops=float(elements * sum(call.needs)),
        backward_kernels=sum(call.needs),
    )


@Rule(keeps_layout=True, weights={1: Role.MATRIX}).of("PRelu")
def prelu(call: OpCall) -> OpSpec:
    """Leaky ReLU with a learned slope; input and slope are kept."""
    return _binary(call, (0, 1), 2, 2)


def _half_results(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    return [like(x, (*x.shape[:-1], x.shape[-1] // 2))]


Rule(infer=as_first, weights={1: Role.BIAS}).register("com.microsoft.BiasAdd")
Rule(infer=_half_results, weights={1: Role.BIAS}).register("com.microsoft.BiasSplitGelu")


@Rule(infer=as_first, keeps_layout=True, weights={1: Role.BIAS}).of("com.microsoft.BiasGelu")
def bias_gelu(call: OpCall) -> OpSpec:
    """Bias added, then GELU, in one kernel; the sum is made and kept."""
    x = call.input(0)
    nest = broadcast_nest(call, (0, 1), 13.0 * x.elements)
    return streaming(
        call, nest, saved=(keep_extra(0, x.elements, x),), backward_flops=17.0 * x.elements, backward_kernels=2
    )


@Rule().of("SwiGLU")
def swiglu(call: OpCall) -> OpSpec:
    """Product of one half with the Swish of the other, both kept."""
    elements = call.output().elements
    positions = tuple(p for p in range(len(call.inputs)) if call.has(p) and call.input(p).dtype.is_float)
    nest = LoopNest((), (), (), vector_flops=8.0 * elements)
    same = all(call.input(p).shape == call.output().shape for p in positions)
    if same:
        nest = broadcast_nest(call, positions, 8.0 * elements)
    return streaming(call, nest, saved=keep_inputs(call, *positions), backward_flops=12.0 * elements)

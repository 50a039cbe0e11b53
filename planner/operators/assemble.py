"""Descriptions of calls put together from loop nests: traffic, gradients' work, what is kept.

Rules declare nests; these functions derive the rest. Traffic counts each tensor once a kernel, read or written, in
its own type; caches are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planner.graph import Tensor, TensorKind
from planner.operators.entry import OpCall
from planner.operators.nest import gradient_nest
from planner.operators.types import LoopNest, OpSpec, Origin, Saved, Traffic

INT64_BYTES = 8
ALIAS = {"alias": 1.0}
"""Among a call's details: where frameworks run eagerly, its results own no storage."""


def traffic(*tensors: Tensor | None) -> Traffic:
    """One pass over each tensor; absent ones cost nothing."""
    total = Traffic()
    for tensor in tensors:
        if tensor is not None:
            total += elements_like(tensor, tensor.elements)
    return total


def elements_like(tensor: Tensor, count: float) -> Traffic:
    """One pass over `count` elements of a tensor's type."""
    byte_count = count * tensor.dtype.bits / 8
    if tensor.dtype.is_float:
        return Traffic(byte_count, count, 0.0)
    return Traffic(byte_count, 0.0, byte_count)


def keep_inputs(call: OpCall, *positions: int) -> tuple[Saved, ...]:
    """Inputs kept for backward. Weights and constants are resident anyway and are left out."""
    return tuple(
        Saved("input", p)
        for p in sorted(set(positions))
        if call.has(p) and call.input(p).kind in (TensorKind.ACTIVATION, TensorKind.INPUT)
    )


def keep_outputs(*positions: int) -> tuple[Saved, ...]:
    """Outputs kept for backward."""
    return tuple(Saved("output", p) for p in positions)


def keep_letters(call: OpCall, letters: str) -> tuple[Saved, ...]:
    """The first input where `x` is among the letters, and the first output where `y` is."""
    return (*(keep_inputs(call, 0) if "x" in letters else ()), *(keep_outputs(0) if "y" in letters else ()))


def keep_extra(
    number: int, elements: float, like: Tensor | None = None, *, bits: int = 32, random: bool = False
) -> Saved:
    """Something the operator makes for its own backward pass.

    Args:
        number: running number among the call's extras.
        elements: how many elements.
        like: tensor whose type it has; None for a type that does not follow the training precision.
        bits: bits an element when `like` is None.
        random: made only when random numbers are drawn.
    """
    width = bits if like is None else like.dtype.bits
    return Saved("extra", number, int(elements * width + 7) // 8, random=random, fixed=like is None)


def saved_traffic(call: OpCall, saved: Iterable[Saved]) -> Traffic:
    """One pass over everything that was kept."""
    total = Traffic()
    for item in saved:
        if item.source == "input":
            total += traffic(call.input(item.position))
        elif item.source == "output":
            total += traffic(call.output(item.position))
        elif item.fixed:
            total += Traffic(item.byte_count, 0.0, item.byte_count)
        else:
            bits = next((t.dtype.bits for t in call.present() if t.dtype.is_float), 32)
            total += Traffic(item.byte_count, item.byte_count * 8 / bits, 0.0)
    return total


def gradient_traffic(call: OpCall, saved: Iterable[Saved]) -> Traffic:
    """Backward traffic of one fused kernel: result gradients and kept tensors in, operand gradients out."""
    total = traffic(*(t for t in call.results() if t.dtype.is_float)) + saved_traffic(call, saved)
    return total + traffic(*(t for p, t in enumerate(call.inputs) if call.need(p)))


def contraction(
    call: OpCall,
    nest: LoopNest,
    *,
    bias: LoopNest | None = None,
    saved: Sequence[Saved] | None = None,
    kernels: int = 1,
) -> OpSpec:
    """A matrix product or convolution: each operand's gradient is the nest transposed, with the same work.

    An operand is kept when another operand's gradient needs it.

    Args:
        call: the operator and its tensors.
        nest: the contraction, its reads in the order of the formula.
        bias: adds one operand to the result, fused into the same kernel.
        saved: what is kept, where it is not the operands.
        kernels: kernels of the forward pass.
    """
    operands = [access.position for access in nest.reads]
    result = call.output(nest.writes[0].position)
    backward = Traffic()
    input_grad = weight_grad = 0.0
    kept: set[int] = set()
    for read, position in enumerate(operands):
        if not call.need(position):
            continue
        others = [p for p in operands if p != position]
        kept.update(others)
        backward += traffic(result, call.input(position), *(call.input(p) for p in others))
        work = gradient_nest(nest, read).matrix_flops
        if call.input(position).kind is TensorKind.PARAMETER:
            weight_grad += work
        else:
            input_grad += work
    gradients = sum(call.need(p) for p in operands)
    vector = 0.0
    if bias is not None and call.need(bias.reads[0].position):
        backward += traffic(result, call.input(bias.reads[0].position))
        vector += result.elements
        gradients += 1
    return streaming(
        call,
        nest if bias is None else (nest, bias),
        saved=keep_inputs(call, *kept) if saved is None else saved,
        backward=backward,
        kernels=kernels,
        backward_kernels=gradients,
        input_grad=input_grad,
        weight_grad=weight_grad,
        backward_flops=vector,
    )


def streaming(
    call: OpCall,
    nests: LoopNest | Sequence[LoopNest],
    *,
    saved: Sequence[Saved] = (),
    backward_flops: float = 0.0,
    input_grad: float = 0.0,
    weight_grad: float = 0.0,
    forward: Traffic | None = None,
    backward: Traffic | None = None,
    kernels: int = 1,
    backward_kernels: int = 1,
    origin: Origin = Origin.RULE,
    extra: Mapping[str, float] | None = None,
) -> OpSpec:
    """One pass over operands and results, and the like in backward; matrix work where it is not a plain contraction's.

    Where no gradient is needed nothing is kept and backward costs nothing.

    Args:
        call: the operator and its tensors.
        nests: its loop nests.
        saved: what backward needs.
        backward_flops: element-wise work of the backward pass.
        input_grad: matrix work of the gradients towards activations.
        weight_grad: matrix work of the gradients towards weights.
        forward: traffic where it is not all inputs plus all outputs.
        backward: traffic where it is not that of one fused kernel.
        kernels: kernels of the forward pass.
        backward_kernels: kernels of the backward pass.
        origin: rule or fallback.
        extra: further details.
    """
    kept = tuple(saved) if call.trains else ()
    forward_traffic = traffic(*call.present(), *call.results()) if forward is None else forward
    backward_traffic = Traffic()
    if call.trains:
        backward_traffic = gradient_traffic(call, kept) if backward is None else backward
    return OpSpec(
        nests=(nests,) if isinstance(nests, LoopNest) else tuple(nests),
        saved=kept,
        kernels=kernels,
        forward=forward_traffic,
        backward=backward_traffic,
        backward_kernels=backward_kernels if call.trains and backward_traffic.byte_count else 0,
        input_grad_matrix_flops=input_grad if call.trains else 0.0,
        weight_grad_matrix_flops=weight_grad if call.trains else 0.0,
        backward_vector_flops=backward_flops if call.trains else 0.0,
        origin=origin,
        details=extra or {},
    )


def view(call: OpCall, nest: LoopNest | None = None) -> OpSpec:
    """A new shape over the same storage: no work, no traffic, nothing kept."""
    nests = () if nest is None else (nest,)
    return OpSpec(nests, view=True, kernels=0, backward_kernels=0)


def plumbing(call: OpCall) -> OpSpec:
    """Shape arithmetic and containers: runs on the host, costs the device nothing."""
    return OpSpec((), kernels=0, backward_kernels=0, origin=Origin.PLUMBING)


def fallback(call: OpCall) -> OpSpec:
    """An operator nobody described: one element-wise pass over all its tensors, every float input kept.

    Its nest has no dimension that may be split.
    """
    elements = max((t.elements for t in (*call.present(), *call.results())), default=0)
    positions = [p for p in range(len(call.inputs)) if call.has(p) and call.input(p).dtype.is_float]
    return streaming(
        call,
        LoopNest((), (), (), vector_flops=float(elements)),
        saved=keep_inputs(call, *positions),
        backward_flops=float(elements),
        origin=Origin.FALLBACK,
    )

"""Dropout, random numbers, tables made on the spot, and quantisation."""

from __future__ import annotations

import numpy as np

from planner.graph import DType, Node
from planner.operators.assemble import keep_extra, streaming, traffic, view
from planner.operators.entry import Array, OpCall, Role, Rule, Shaped, like
from planner.operators.flow import BatchFactor, Flow
from planner.operators.nest import dim_names
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpSpec


def _rate(call: OpCall) -> float | None:
    """Fraction dropped: an attribute before operator set 12, a constant input after; None when unknown."""
    value = call.attributes.get("ratio")
    if isinstance(value, (int, float)):
        return float(value)
    known = call.constants[1] if len(call.constants) > 1 else None
    if call.has(1) and known:
        return float(known[0])
    return None if call.has(1) else 0.5


def _with_mask(call: OpCall) -> list[Shaped | None]:
    return [like(call.input(0)), like(call.input(0), dtype=DType.BOOL)]


Rule(infer=_with_mask).register("com.microsoft.BitmaskDropout")


def _masked(call: OpCall, positions: tuple[int, ...], flops: float, backward_flops: float) -> OpSpec:
    """One kernel that drops elements; what is added before costs a second kernel of the backward pass."""
    x = call.input(0)
    return streaming(
        call,
        broadcast_nest(call, positions, flops * x.elements),
        saved=(keep_extra(0, x.elements, x, random=True),),
        backward_flops=backward_flops * x.elements,
        backward_kernels=1 if positions == (0,) else 2,
        extra={"mask_elements": float(x.elements)},
    )


@Rule(ports=(0,), infer=_with_mask, keeps_layout=True).of("Dropout")
def dropout(call: OpCall) -> OpSpec:
    """Elements zeroed at random and the rest scaled; the mask is kept, in the input's type as eager frameworks do.

    A kernel of its own on GPUs keeps one byte an element instead (`details["mask_elements"]`).
    """
    if _rate(call) == 0.0:
        return view(call, broadcast_nest(call, (0,), 0.0))
    return _masked(call, (0,), 3.0, 1.0)


@Rule(ports=(0, 1, 2), infer=_with_mask, weights={1: Role.BIAS}).of("com.microsoft.BiasDropout")
def bias_dropout(call: OpCall) -> OpSpec:
    """Bias and maybe a residual added, then dropout, in one kernel."""
    return _masked(call, tuple(p for p in (0, 1, 2) if call.has(p)), 5.0, 2.0)


def _made(call: OpCall, flops: float) -> OpSpec:
    """A tensor written from nothing."""
    dims = tuple(Dim(f"d{k}", size, DimKind.PARALLEL) for k, size in enumerate(call.output().shape))
    made = Access(0, tuple((d.name,) for d in dims))
    nest = LoopNest(dims, (), (made,), vector_flops=flops * call.output().elements)
    return streaming(call, nest, forward=traffic(call.output()))


@Rule(ports=(), random=True).of("Bernoulli")
def bernoulli(call: OpCall) -> OpSpec:
    """A random bit for each probability."""
    return streaming(call, broadcast_nest(call, (0,), 20.0 * call.input(0).elements))


@Rule(ports=(), random=True).of("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial")
def random_numbers(call: OpCall) -> OpSpec:
    """Random numbers: about twenty operations each."""
    return _made(call, 20.0)


def _counted(*ends: Array) -> Array:
    return np.arange(*(end.item() for end in ends), dtype=ends[0].dtype)


@Rule(ports=(), values=(0,)).of("ConstantOfShape")
@Rule(ports=(), folds=True, plain=_counted, values=(0, 1, 2)).of("Range")
@Rule(ports=()).of("EyeLike")
def fill(call: OpCall) -> OpSpec:
    """A constant, an identity or a count."""
    return _made(call, 1.0)


@Rule(ports=(), values=(0,)).of("BlackmanWindow", "HammingWindow", "HannWindow")
@Rule(ports=()).of("MelWeightMatrix")
def window_table(call: OpCall) -> OpSpec:
    """A table of a signal-processing window."""
    return _made(call, 8.0)


def _quantised_nest(call: OpCall, vector_flops: float) -> LoopNest:
    """Element by element; the scale is one number, one an index of an axis, or one a block of that axis."""
    x, scale = call.input(0), call.input(1)
    rank = len(x.shape)
    axis = call.axis("axis", 1, rank)
    data, scaled = dim_names("d", rank), ["1"] * len(scale.shape)
    if len(scale.shape) == rank and rank and scale.elements > 1 and scale.shape[axis] != x.shape[axis]:
        scaled = list(data)
        data[axis] = f"({data[axis]} block)" if x.shape[axis] % scale.shape[axis] == 0 else "ragged"
        if data[axis] == "ragged":
            scaled[axis] = "blocks"
    elif len(scale.shape) == rank and rank > 1:
        scaled = list(data)
    elif len(scale.shape) == 1 and rank:
        scaled = [data[axis]]
    terms = ", ".join([" ".join(data), *(f"?{p}:{_scale_terms(call, p, scaled)}" for p in (1, 2))])
    return call.nest(f"{terms} -> ?{' '.join(data)}", whole="ragged blocks block", vector_flops=vector_flops)


def _scale_terms(call: OpCall, position: int, scaled: list[str]) -> str:
    rank = len(call.input(position).shape) if call.has(position) else 0
    return " ".join(scaled if rank == len(scaled) else ["1"] * rank)


def _quantised_results(call: OpCall) -> list[Shaped | None]:
    return [like(call.input(0), dtype=call.input(2).dtype if call.has(2) else DType.UINT8)]


def _restored_results(call: OpCall) -> list[Shaped | None]:
    return [like(call.input(1), call.input(0).shape)]


Rule(infer=_quantised_results).register("com.microsoft.QuantizeLinear")
Rule(infer=_restored_results, rearranges=True).register("com.microsoft.DequantizeLinear")


@Rule(ports=(0,), straight_through=True, rearranges=True).of("QuantizeLinear", "DequantizeLinear")
def quantize(call: OpCall) -> OpSpec:
    """Rounding to few bits, or back to floating point; training passes the gradient straight through where nothing was
    clipped."""
    x = call.input(0)
    flops = 4.0 if call.op == "QuantizeLinear" else 2.0
    return streaming(call, _quantised_nest(call, flops * x.elements), backward_flops=float(x.elements))


@Rule(ports=()).of("DynamicQuantizeLinear")
def dynamic_quantize(call: OpCall) -> OpSpec:
    """Rounding to 8 bits with the range found first: two passes over the input; no gradient."""
    x = call.input(0)
    nest = call.nest("d.. -> ?d.., ?, ?", vector_flops=6.0 * x.elements)
    return streaming(call, nest, forward=traffic(*call.results(), x, x), kernels=2)


def _most_places(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    return [((len(x.shape), x.elements), DType.INT64)]


def _most_values(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    along = "axis" in call.attributes
    count = ((x.shape[call.axis("axis", 0, len(x.shape))] if along else x.elements),)
    return [like(x) if along else like(x, count), *[(count, DType.INT64)] * 3]


def _most_boxes(call: OpCall) -> list[Shaped | None]:
    batch, classes, boxes = call.input(1).shape
    limit = call.constant_ints(2)
    return [((batch * classes * (min(boxes, limit[0]) if limit else boxes), 3), DType.INT64)]


def _places_travel(flow: Flow, i: int, node: Node) -> None:
    """With more samples there are as many more places."""
    count = flow.shape(node.outputs[0])[1]
    if count % flow.batch:
        raise flow.fail(i, f"finds {count} places, which {flow.batch} samples do not share equally")
    flow.set(node.outputs[0], (None, BatchFactor(inner=count // flow.batch)))


@Rule(ports=(), travel=_places_travel, folds=True, most=_most_places).of("NonZero")
@Rule(ports=(), most=_most_values).of("Unique")
@Rule(ports=(), most=_most_boxes, values=(2,)).of("NonMaxSuppression")
def data_dependent(call: OpCall) -> OpSpec:
    """Results whose size depends on the data; no gradient. Non-maximum suppression compares all pairs of boxes."""
    elements = float(sum(t.elements for t in call.present()))
    if call.op == "NonMaxSuppression":
        boxes = call.input(0).shape[-2]
        elements = 10.0 * boxes * call.input(1).elements
    return streaming(call, LoopNest((), (), (), vector_flops=elements))

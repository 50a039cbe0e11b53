"""Dropout, random numbers, tables made on the spot, and quantisation."""

from __future__ import annotations

import numpy as np

from planner.graph import DType, Node
from planner.operators.assemble import keep_extra, streaming, traffic, view
from planner.operators.flow import BatchFactor, Flow
from planner.operators.nest import dim_names
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.site import Array, Role, Rule, Shaped, Site, like
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpSpec


def _rate(site: Site) -> float | None:
    """Fraction dropped: an attribute before operator set 12, a constant input after; None when unknown."""
    value = site.call.attributes.get("ratio")
    if isinstance(value, (int, float)):
        return float(value)
    known = site.call.constants[1] if len(site.call.constants) > 1 else None
    if site.has(1) and known:
        return float(known[0])
    return None if site.has(1) else 0.5


def _with_mask(site: Site) -> list[Shaped | None]:
    return [like(site.input(0)), like(site.input(0), dtype=DType.BOOL)]


Rule(infer=_with_mask).register("com.microsoft.BitmaskDropout")


def _masked(site: Site, positions: tuple[int, ...], flops: float, backward_flops: float) -> OpSpec:
    """One kernel that drops elements; what is added before costs a second kernel of the backward pass."""
    x = site.input(0)
    return streaming(
        site,
        broadcast_nest(site, positions, flops * x.elements),
        saved=(keep_extra(0, x.elements, x, random=True),),
        backward_flops=backward_flops * x.elements,
        backward_kernels=1 if positions == (0,) else 2,
        extra={"mask_elements": float(x.elements)},
    )


@Rule(ports=(0,), infer=_with_mask, keeps_layout=True).of("Dropout")
def dropout(site: Site) -> OpSpec:
    """Elements zeroed at random and the rest scaled; the mask is kept, in the input's type as eager frameworks do.

    A kernel of its own on GPUs keeps one byte an element instead (`details["mask_elements"]`).
    """
    if _rate(site) == 0.0:
        return view(site, broadcast_nest(site, (0,), 0.0))
    return _masked(site, (0,), 3.0, 1.0)


@Rule(ports=(0, 1, 2), infer=_with_mask, weights={1: Role.BIAS}).of("com.microsoft.BiasDropout")
def bias_dropout(site: Site) -> OpSpec:
    """Bias and maybe a residual added, then dropout, in one kernel."""
    return _masked(site, tuple(p for p in (0, 1, 2) if site.has(p)), 5.0, 2.0)


def _made(site: Site, flops: float) -> OpSpec:
    """A tensor written from nothing."""
    dims = tuple(Dim(f"d{k}", size, DimKind.PARALLEL) for k, size in enumerate(site.output().shape))
    made = Access(0, tuple((d.name,) for d in dims))
    nest = LoopNest(dims, (), (made,), vector_flops=flops * site.output().elements)
    return streaming(site, nest, forward=traffic(site.output()))


@Rule(ports=(), random=True).of("Bernoulli")
def bernoulli(site: Site) -> OpSpec:
    """A random bit for each probability."""
    return streaming(site, broadcast_nest(site, (0,), 20.0 * site.input(0).elements))


@Rule(ports=(), random=True).of("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial")
def random_numbers(site: Site) -> OpSpec:
    """Random numbers: about twenty operations each."""
    return _made(site, 20.0)


def _counted(*ends: Array) -> Array:
    return np.arange(*(end.item() for end in ends), dtype=ends[0].dtype)


@Rule(ports=(), values=(0,)).of("ConstantOfShape")
@Rule(ports=(), folds=True, plain=_counted, values=(0, 1, 2)).of("Range")
@Rule(ports=()).of("EyeLike")
def fill(site: Site) -> OpSpec:
    """A constant, an identity or a count."""
    return _made(site, 1.0)


@Rule(ports=(), values=(0,)).of("BlackmanWindow", "HammingWindow", "HannWindow")
@Rule(ports=()).of("MelWeightMatrix")
def window_table(site: Site) -> OpSpec:
    """A table of a signal-processing window."""
    return _made(site, 8.0)


def _quantised_nest(site: Site, vector_flops: float) -> LoopNest:
    """Element by element; the scale is one number, one an index of an axis, or one a block of that axis."""
    x, scale = site.input(0), site.input(1)
    rank = len(x.shape)
    axis = site.axis("axis", 1, rank)
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
    terms = ", ".join([" ".join(data), *(f"?{p}:{_scale_terms(site, p, scaled)}" for p in (1, 2))])
    return site.nest(f"{terms} -> ?{' '.join(data)}", whole="ragged blocks block", vector_flops=vector_flops)


def _scale_terms(site: Site, position: int, scaled: list[str]) -> str:
    rank = len(site.input(position).shape) if site.has(position) else 0
    return " ".join(scaled if rank == len(scaled) else ["1"] * rank)


def _quantised_results(site: Site) -> list[Shaped | None]:
    return [like(site.input(0), dtype=site.input(2).dtype if site.has(2) else DType.UINT8)]


def _restored_results(site: Site) -> list[Shaped | None]:
    return [like(site.input(1), site.input(0).shape)]


Rule(infer=_quantised_results).register("com.microsoft.QuantizeLinear")
Rule(infer=_restored_results, rearranges=True).register("com.microsoft.DequantizeLinear")


@Rule(ports=(0,), straight_through=True, rearranges=True).of("QuantizeLinear", "DequantizeLinear")
def quantize(site: Site) -> OpSpec:
    """Rounding to few bits, or back to floating point; training passes the gradient straight through where nothing was
    clipped."""
    x = site.input(0)
    flops = 4.0 if site.call.op == "QuantizeLinear" else 2.0
    return streaming(site, _quantised_nest(site, flops * x.elements), backward_flops=float(x.elements))


@Rule(ports=()).of("DynamicQuantizeLinear")
def dynamic_quantize(site: Site) -> OpSpec:
    """Rounding to 8 bits with the range found first: two passes over the input; no gradient."""
    x = site.input(0)
    nest = site.nest("d.. -> ?d.., ?, ?", vector_flops=6.0 * x.elements)
    return streaming(site, nest, forward=traffic(*site.results(), x, x), kernels=2)


def _most_places(site: Site) -> list[Shaped | None]:
    x = site.input(0)
    return [((len(x.shape), x.elements), DType.INT64)]


def _most_values(site: Site) -> list[Shaped | None]:
    x = site.input(0)
    along = "axis" in site.call.attributes
    count = ((x.shape[site.axis("axis", 0, len(x.shape))] if along else x.elements),)
    return [like(x) if along else like(x, count), *[(count, DType.INT64)] * 3]


def _most_boxes(site: Site) -> list[Shaped | None]:
    batch, classes, boxes = site.input(1).shape
    limit = site.constant_ints(2)
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
def data_dependent(site: Site) -> OpSpec:
    """Results whose size depends on the data; no gradient. Non-maximum suppression compares all pairs of boxes."""
    elements = float(sum(t.elements for t in site.present()))
    if site.call.op == "NonMaxSuppression":
        boxes = site.input(0).shape[-2]
        elements = 10.0 * boxes * site.input(1).elements
    return streaming(site, LoopNest((), (), (), vector_flops=elements))

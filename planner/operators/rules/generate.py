"""Dropout, random numbers, tables made on the spot, and quantisation."""

from __future__ import annotations

from planner.operators.assemble import keep_extra, streaming, traffic, view
from planner.operators.nest import dim_names, loop_nest
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.site import Site, rule
from planner.operators.types import DimKind, LoopNest, OpSpec


def _rate(site: Site) -> float | None:
    """Fraction dropped: an attribute before operator set 12, a constant input after; None when unknown."""
    value = site.call.attributes.get("ratio")
    if isinstance(value, (int, float)):
        return float(value)
    known = site.call.constants[1] if len(site.call.constants) > 1 else None
    if site.has(1) and known:
        return float(known[0])
    return None if site.has(1) else 0.5


@rule("Dropout", ports=(0,))
def dropout(site: Site) -> OpSpec:
    """Elements zeroed at random and the rest scaled; the mask is kept, in the input's type as eager frameworks do.

    A kernel of its own on GPUs keeps one byte an element instead (`details["mask_elements"]`).
    """
    x = site.input(0)
    nest = broadcast_nest(site, (0,), 3.0 * x.elements)
    if _rate(site) == 0.0:
        return view(site, broadcast_nest(site, (0,), 0.0))
    return streaming(
        site,
        nest,
        saved=(keep_extra(0, x.elements, x, random=True),),
        backward_flops=float(x.elements),
        extra={"mask_elements": float(x.elements)},
    )


@rule("com.microsoft.BiasDropout", ports=(0, 1, 2))
def bias_dropout(site: Site) -> OpSpec:
    """Bias and maybe a residual added, then dropout, in one kernel."""
    x = site.input(0)
    nest = broadcast_nest(site, tuple(p for p in (0, 1, 2) if site.has(p)), 5.0 * x.elements)
    return streaming(
        site,
        nest,
        saved=(keep_extra(0, x.elements, x, random=True),),
        backward_flops=2.0 * x.elements,
        backward_kernels=2,
        extra={"mask_elements": float(x.elements)},
    )


def _made(site: Site, flops: float) -> OpSpec:
    """A tensor written from nothing."""
    names = " ".join(dim_names("d", len(site.output().shape)))
    nest = loop_nest(f" -> {names}", [(0, ())], site.writes(0), vector_flops=flops * site.output().elements)
    nest = LoopNest(nest.dims, (), nest.writes, 0.0, nest.vector_flops)
    return streaming(site, nest, forward=traffic(site.output()))


@rule("Bernoulli", ports=())
def bernoulli(site: Site) -> OpSpec:
    """A random bit for each probability."""
    return streaming(site, broadcast_nest(site, (0,), 20.0 * site.input(0).elements))


@rule("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", ports=())
def random_numbers(site: Site) -> OpSpec:
    """Random numbers: about twenty operations each."""
    return _made(site, 20.0)


@rule("ConstantOfShape", "EyeLike", "Range", ports=())
def fill(site: Site) -> OpSpec:
    """A constant, an identity or a count."""
    return _made(site, 1.0)


@rule("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", ports=())
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
    reads = [0, 1, *((2,) if site.has(2) else ())]
    terms = [" ".join(data)]
    for position in reads[1:]:
        own = len(site.input(position).shape)
        terms.append(" ".join(scaled if own == len(scaled) else ["1"] * own))
    left = ", ".join(terms)
    kinds = dict.fromkeys(("ragged", "blocks", "block"), DimKind.WHOLE)
    text = f"{left} -> {' '.join(data)}"
    return loop_nest(text, site.reads(*reads), site.writes(0), kinds=kinds, vector_flops=vector_flops)


@rule("QuantizeLinear", ports=(0,), straight_through=True)
def quantize(site: Site) -> OpSpec:
    """Rounding to few bits; training passes the gradient straight through where nothing was clipped."""
    x = site.input(0)
    return streaming(site, _quantised_nest(site, 4.0 * x.elements), backward_flops=float(x.elements))


@rule("DequantizeLinear", ports=(0,), straight_through=True)
def dequantize(site: Site) -> OpSpec:
    """Few bits back to floating point."""
    x = site.input(0)
    return streaming(site, _quantised_nest(site, 2.0 * x.elements), backward_flops=float(x.elements))


@rule("DynamicQuantizeLinear", ports=())
def dynamic_quantize(site: Site) -> OpSpec:
    """Rounding to 8 bits with the range found first: two passes over the input; no gradient."""
    x = site.input(0)
    return streaming(site, _whole(6.0 * x.elements), forward=traffic(*site.results(), x, x), kernels=2)


def _whole(flops: float) -> LoopNest:
    return LoopNest((), (), (), vector_flops=flops)


@rule("NonZero", "Unique", "NonMaxSuppression", ports=())
def data_dependent(site: Site) -> OpSpec:
    """Results whose size depends on the data; no gradient. Non-maximum suppression compares all pairs of boxes."""
    elements = float(sum(t.elements for t in site.present()))
    if site.call.op == "NonMaxSuppression":
        boxes = site.input(0).shape[-2]
        elements = 10.0 * boxes * site.input(1).elements
    return streaming(site, _whole(elements))

"""Reductions and scans along axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.operators.assemble import keep_extra, keep_inputs, keep_letters, keep_outputs, streaming
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.site import Rule, Site, Statistics
from planner.operators.types import DimKind, LoopNest, OpSpec


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction: flops an input element, what is kept (`x`, `y`, `s` for the inner sum), whether partial sums add.

    Where they do not, `statistics` says what ranks exchange instead, if that is known.
    """

    flops: float
    keeps: str = ""
    adds: bool = False
    statistics: Statistics | None = None
    folds: bool = False


_ONE = Statistics((1,))
REDUCTIONS = {
    "ReduceL1": Reduction(2, "x", True),
    "ReduceL2": Reduction(2, "xy", statistics=_ONE),
    "ReduceLogSum": Reduction(1, "s", statistics=_ONE),
    "ReduceLogSumExp": Reduction(6, "xy", statistics=Statistics((1, 1))),
    "ReduceMax": Reduction(1, "xy", statistics=_ONE, folds=True),
    "ReduceMean": Reduction(1, "", True),
    "ReduceMin": Reduction(1, "xy", statistics=_ONE, folds=True),
    "ReduceProd": Reduction(1, "xy", folds=True),
    "ReduceSum": Reduction(1, "", True, folds=True),
    "ReduceSumSquare": Reduction(2, "x", True),
    "GlobalAveragePool": Reduction(1, "", True),
    "GlobalMaxPool": Reduction(1, "xy", statistics=_ONE),
    "GlobalLpPool": Reduction(2, "xy"),
}


def _reduced_axes(site: Site) -> tuple[int, ...] | None:
    """The axes summed over; None when they are computed at run time and the shapes do not show them."""
    x, result = site.input(0), site.output()
    rank = len(x.shape)
    if site.call.op.startswith("Global"):
        return tuple(range(2, rank))
    if site.call.op.startswith("Arg"):
        return (site.axis("axis", 0, rank),)
    axes = site.axes("axes", 1, rank)
    if axes:
        return axes
    if axes == () or not site.has(1):
        return () if site.int_attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    if len(result.shape) == rank:
        return tuple(k for k in range(rank) if x.shape[k] != result.shape[k])
    return None


def reduction_nest(site: Site, kind: DimKind, flops: float) -> LoopNest:
    """The reduced dimensions are absent from the result, or of size 1 there."""
    x, result = site.input(0), site.output()
    axes = _reduced_axes(site)
    if axes is None:
        return LoopNest((), (), (), vector_flops=flops)
    kept = len(result.shape) == len(x.shape)
    out = ["1" if k in axes else f"d{k}" for k in range(len(x.shape)) if kept or k not in axes]
    along = " ".join(f"d{k}" for k in axes)
    text = f"d.. -> {' '.join(out)}"
    if kind is DimKind.REDUCED:
        return site.nest(text, reduced=along, vector_flops=flops)
    return site.nest(text, coupled=along, vector_flops=flops)


def _reduce(site: Site) -> OpSpec:
    entry = REDUCTIONS[site.call.op]
    x, result = site.input(0), site.output()
    inner = (keep_extra(0, result.elements, result),) if "s" in entry.keeps else ()
    saved = (*keep_letters(site, entry.keeps), *inner)
    nest = reduction_nest(site, DimKind.REDUCED if entry.adds else DimKind.COUPLED, entry.flops * x.elements)
    return streaming(site, nest, saved=saved, backward_flops=max(1.0, entry.flops) * x.elements)


for _op, _entry in REDUCTIONS.items():
    _axes = () if _op.startswith("Global") else (1,)
    _rule = Rule(ports=(0,), folds=_entry.folds, values=_axes, statistics=_entry.statistics)
    _rule.register(_op, build=_reduce)


@Rule(ports=()).of("ArgMax", "ArgMin")
def arg_extremum(site: Site) -> OpSpec:
    """Place of the largest or smallest element along an axis; no gradient."""
    return streaming(site, reduction_nest(site, DimKind.COUPLED, float(site.input(0).elements)))


@Rule(ports=(0,), folds=True, values=(1,)).of("CumSum")
@Rule(ports=(0,)).of("CumProd")
def scan(site: Site) -> OpSpec:
    """Running sums or products along an axis; products keep input and output."""
    x = site.input(0)
    axis, rank = site.constant_ints(1), len(x.shape)
    coupled = [axis[0] % rank] if axis and rank else range(rank)
    nest = broadcast_nest(site, (0,), float(x.elements), coupled=coupled)
    saved = (*keep_inputs(site, 0), *keep_outputs(0)) if site.call.op == "CumProd" else ()
    return streaming(site, nest, saved=saved, backward_flops=float(x.elements))


@Rule().of("Det")
def determinant(site: Site) -> OpSpec:
    """Determinant by elimination, 2/3 n^3; keeps input, result and the factors."""
    x = site.input(0)
    n = x.shape[-1]
    flops = 2.0 / 3.0 * n**3 * math.prod(x.shape[:-2])
    nest = site.nest("b.. i j -> b..", coupled="i j", vector_flops=flops)
    saved = (*keep_inputs(site, 0), *keep_outputs(0), keep_extra(0, x.elements, x))
    return streaming(site, nest, saved=saved, backward_flops=3.0 * flops)

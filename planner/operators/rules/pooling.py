"""Pooling windows. Max keeps its input and int64 places (twice an fp32 result's bytes), average its input, as torch."""

from __future__ import annotations

import math

from planner.operators.assemble import INT64_BYTES, keep_extra, keep_inputs, keep_outputs, streaming
from planner.operators.nest import dim_names, loop_nest
from planner.operators.rules.conv import window_halos
from planner.operators.site import Rule, Site
from planner.operators.types import LoopNest, OpSpec, Saved


def _window_nest(site: Site, flops: float) -> LoopNest:
    """`n c (y+r) -> n c y`; the result's channels and batch are the input's."""
    x, result = site.input(0).shape, site.output().shape
    kernel = site.ints("kernel_shape", x[2:])
    ys, rs = dim_names("y", len(kernel)), dim_names("r", len(kernel))
    windows = " ".join(f"({y}+{r})" for y, r in zip(ys, rs, strict=True))
    return loop_nest(
        f"n c {windows} -> n c {' '.join(ys)}",
        site.reads(0),
        site.writes(0),
        sizes=dict(zip(rs, kernel, strict=True)),
        halos=window_halos(site, ys, kernel, x[2:], result[2:]),
        vector_flops=flops,
    )


def _window(site: Site) -> int:
    return math.prod(site.ints("kernel_shape", site.input(0).shape[2:]))


@Rule(ports=(0,), window=-1).of("MaxPool")
def max_pool(site: Site) -> OpSpec:
    """Largest element of each window; the places are output 1 where asked for, else made."""
    elements = site.output().elements
    places: Saved = keep_extra(0, elements, bits=8 * INT64_BYTES)
    if site.has_output(1):
        (places,) = keep_outputs(1)
    nest = _window_nest(site, float(_window(site) * elements))
    return streaming(site, nest, saved=(*keep_inputs(site, 0), places), backward_flops=float(elements))


@Rule(ports=(0,), window=-1).of("AveragePool")
def average_pool(site: Site) -> OpSpec:
    """Mean of each window."""
    flops = float(_window(site) * site.output().elements)
    return streaming(site, _window_nest(site, flops), saved=keep_inputs(site, 0), backward_flops=flops)


@Rule(ports=(0,), window=-1).of("LpPool")
def lp_pool(site: Site) -> OpSpec:
    """P-norm of each window; input and result are kept."""
    flops = float(3 * _window(site) * site.output().elements)
    saved = (*keep_inputs(site, 0), *keep_outputs(0))
    return streaming(site, _window_nest(site, flops), saved=saved, backward_flops=flops)

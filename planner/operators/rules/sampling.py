"""Images sampled at computed places, columns of windows summed back, Fourier transforms.

What lies along space or along a transform's axis may be needed anywhere in the result, and is not split.
"""

from __future__ import annotations

import math

from planner.operators.assemble import INT64_BYTES, keep_extra, keep_inputs, streaming
from planner.operators.entry import OpCall, Rule
from planner.operators.nest import dim_names
from planner.operators.types import LoopNest, OpSpec


@Rule(ports=(0, 1)).of("GridSample")
def grid_sample(call: OpCall) -> OpSpec:
    """Bilinear samples at given places: `n c h, n y at -> n c y`; image and places are kept."""
    flops = 12.0 * call.output().elements
    nest = call.nest("n c h.., n y.. at -> n c y..", whole="h.. at", vector_flops=flops)
    return streaming(call, nest, saved=keep_inputs(call, 0, 1), backward_flops=2.0 * flops)


@Rule(ports=(0,), values=(1,)).of("AffineGrid")
def affine_grid(call: OpCall) -> OpSpec:
    """Places of a transformed grid: `n at k -> n y at`."""
    flops = 6.0 * call.output().elements
    nest = call.nest("n at k -> n y.. at", whole="y.. at k", vector_flops=flops)
    return streaming(call, nest, backward_flops=flops)


@Rule(ports=(0,), values=(1, 2)).of("Col2Im")
def col2im(call: OpCall) -> OpSpec:
    """Columns of windows summed back to an image: `n (c r) l -> n c y`."""
    elements = float(call.input(0).elements)
    nest = call.nest("n (c r) l -> n c y..", whole="y.. r l", vector_flops=elements)
    return streaming(call, nest, backward_flops=elements)


@Rule(ports=(0, 1), values=(1, 2)).of("DFT")
@Rule(ports=(0, 1), values=(1, 3)).of("STFT")
def fourier(call: OpCall) -> OpSpec:
    """Fourier transforms: 5 n log2 n operations for each transform of length n; every other dimension may be split."""
    x, result = call.input(0), call.output()
    short = call.op == "STFT"
    if short:
        length = (call.constant_ints(3) or (2 * max(1, result.shape[-2] - 1),))[0]
    else:
        axis = (call.constant_ints(2) or (call.int_attribute("axis", -2),))[0] % len(x.shape)
        length = max(x.shape[axis], result.shape[axis])
    flops = 5.0 * max(1, result.elements // 2) * math.log2(max(2, length))
    nest = LoopNest((), (), (), vector_flops=flops)
    if short or not call.has(2) or call.constant_ints(2) is not None:
        names = dim_names("d", len(x.shape))
        inside = [*names[:-1], "part"]
        outside = ["d0", "frame", "bin", "pair"] if short else [*names[:-1], "pair"]
        mixed = "d1" if short else names[axis]
        if not short:
            outside[axis] = "bin"
        text = f"{' '.join(inside[: len(x.shape)])} -> {' '.join(outside)}"
        nest = call.nest(text, whole=f"{mixed} part pair frame bin", vector_flops=flops)
    window = keep_inputs(call, 0, 2) if short else ()
    return streaming(call, nest, saved=window, backward_flops=flops)


@Rule(ports=(0,), values=(2,)).of("MaxUnpool")
def max_unpool(call: OpCall) -> OpSpec:
    """Elements put back to the places that pooling chose, which count over the whole result; the places are kept."""
    return streaming(call, LoopNest((), (), ()), saved=keep_inputs(call, 1))


def _regions(call: OpCall, regions: str, flops: float) -> LoopNest:
    """Regions and channels are parallel; a region may lie in any image of the batch."""
    return call.nest(f"n c h.., {regions} -> r c y..", whole="h.. y.. box", coupled="n", vector_flops=flops)


@Rule(ports=(0,)).of("MaxRoiPool")
def roi_pool(call: OpCall) -> OpSpec:
    """Largest elements of regions; the regions and int64 places are kept."""
    elements = call.output().elements
    nest = _regions(call, "r box", float(call.input(0).elements))
    saved = (*keep_inputs(call, 1), keep_extra(0, elements, bits=8 * INT64_BYTES))
    return streaming(call, nest, saved=saved, backward_flops=float(elements))


@Rule(ports=(0,)).of("RoiAlign")
def roi_align(call: OpCall) -> OpSpec:
    """Means of bilinear samples in regions; the regions are kept."""
    samples = max(1, call.int_attribute("sampling_ratio", 0)) ** 2
    flops = 8.0 * samples * call.output().elements
    nest = _regions(call, "r box, r", flops)
    return streaming(call, nest, saved=keep_inputs(call, 1, 2), backward_flops=flops)

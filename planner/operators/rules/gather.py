"""Picking and placing elements by index. The indices are kept; only the touched rows are moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from planner.graph import Node, Tensor, TensorKind
from planner.operators.assemble import (
    ALIAS,
    Traffic,
    elements_like,
    keep_inputs,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.flow import BatchFactor, Flow, along_nests, places
from planner.operators.nest import dim_names, loop_nest
from planner.operators.site import Array, Attributes, Role, Rule, Shaped, Site, like
from planner.operators.types import DimKind, LoopNest, OpSpec


def _picked(table: Tensor, indices: Tensor, result: Tensor) -> Traffic:
    return traffic(indices, result) + elements_like(table, result.elements)


def _pick(site: Site, nest: LoopNest, *, kept: tuple[int, ...] = (1,)) -> OpSpec:
    """A gather: touched rows in, result out; backward adds the result's gradient to the touched rows."""
    table, indices, result = site.input(0), site.input(1), site.output()
    backward = _picked(table, indices, result) + elements_like(table, result.elements)
    return streaming(
        site,
        nest,
        saved=keep_inputs(site, *kept),
        forward=_picked(table, indices, result),
        backward=backward,
        backward_flops=float(result.elements),
        extra={"touched_elements": float(result.elements)},
    )


def _gather_travel(flow: Flow, i: int, node: Node) -> None:
    """The axis is replaced by the dimensions of the indices.

    Constant indices that pick every place once follow the batch. Other fixed positions end it, where the rest allows.
    """
    data, indices = flow.of(node.inputs[0]), flow.of(node.inputs[1])
    axis = flow.site(i).axis("axis", 0, len(data))
    mark, picks = data[axis], flow.shape(node.inputs[1])
    if mark is not None and not any(indices):
        fitting = places(mark.inner, flow.batch, picks)
        if fitting and _picks_all(flow, node, axis):
            flow.require(i, node.inputs[1], *fitting[0])
            indices = flow.of(node.inputs[1])
        elif flow.picked is None:
            flow.picked = flow.fail(i, f"picks fixed positions along dimension {axis}, which follows the batch")
    flow.set(node.outputs[0], (*data[:axis], *indices, *data[axis + 1 :]))


def _picks_all(flow: Flow, node: Node, axis: int) -> bool:
    """Whether indices pick every place of an axis once; where their values are unknown, whether there are as many."""
    size, values = flow.shape(node.inputs[0])[axis], flow.graph.constants.get(node.inputs[1])
    if values is None:
        return math.prod(flow.shape(node.inputs[1])) == size
    return sorted(values) == list(range(size))


def _is_selection(site: Site) -> bool:
    """Whether one fixed position of an activation or input is picked by a number: a view, where a list is a copy."""
    fixed = site.has(1) and not site.input(1).shape and site.constant_ints(1) is not None
    return fixed and site.input(0).kind in (TensorKind.ACTIVATION, TensorKind.INPUT)


def _selected_strides(site: Site, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides without the axis that one position is picked of."""
    axis = site.axis("axis", 0, len(strides))
    return (*strides[:axis], *strides[axis + 1 :]) if _is_selection(site) else None


def _quantised_rows(site: Site) -> list[Shaped | None]:
    """Rows of a table of few bits, several to a stored byte, of the scales' type."""
    table, indices, scales = site.input(0), site.input(1), site.input(2)
    axis = site.int_attribute("gather_axis", 0) % len(table.shape)
    shape = [*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :]]
    shape[-1] *= 8 // (site.int_attribute("bits", 4) if table.dtype.bits == 8 else 8)
    return [like(scales, shape)]


Rule(infer=_quantised_rows, weights={0: Role.TABLE, 2: Role.QUANTIZATION}, quantised=True).register(
    "com.microsoft.GatherBlockQuantized"
)


def _gather_value(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    return [np.asarray(np.take(x[0], x[1], axis=int(a.get("axis", 0))))]


_TABLE = Rule(ports=(0,), rearranges=True, weights={0: Role.TABLE})


@replace(_TABLE, travel=_gather_travel, compute=_gather_value, strides=_selected_strides).of("Gather")
def gather(site: Site) -> OpSpec:
    """Rows of a table by index: `v d, b s -> b s d`; a split of v gives partial sums, each row held by one rank."""
    table, indices = site.input(0), site.input(1)
    axis = site.axis("axis", 0, len(table.shape))
    before, after = dim_names("a", axis), dim_names("c", len(table.shape) - axis - 1)
    rows = dim_names("i", len(indices.shape))
    text = f"{' '.join([*before, 'v', *after])}, {' '.join(rows)} -> {' '.join([*before, *rows, *after])}"
    spec = _pick(site, loop_nest(text, site.reads(0, 1), site.writes(0)))
    return replace(spec, details={**spec.details, **ALIAS}) if _is_selection(site) else spec


def _gather_elements_value(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    axis = int(a.get("axis", 0))
    others = [n for i, n in enumerate(x[0].shape) if i != axis % x[0].ndim]
    if others != [n for i, n in enumerate(x[1].shape) if i != axis % x[0].ndim]:
        raise ValueError("an index that leaves out rows")
    return [np.take_along_axis(x[0], np.where(x[1] < 0, x[1] + x[0].shape[axis], x[1]), axis)]


@replace(_TABLE, compute=_gather_elements_value).of("GatherElements")
def gather_elements(site: Site) -> OpSpec:
    """One element for each index along an axis; torch keeps the table too."""
    table = site.input(0)
    axis = site.axis("axis", 0, len(table.shape))
    left, right = [], []
    for k, (size, count) in enumerate(zip(table.shape, site.input(1).shape, strict=True)):
        left.append(f"d{k}" if k != axis and size == count else f"v{k}")
        right.append(f"d{k}")
    kinds = {f"v{k}": DimKind.WHOLE for k in range(len(left)) if k != axis}
    text = f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}"
    return _pick(site, loop_nest(text, site.reads(0, 1), site.writes(0), kinds=kinds), kept=(0, 1))


def _gather_nd_travel(flow: Flow, i: int, node: Node) -> None:
    """Tuples that pick along the batch are one a sample, though a constant may hold them."""
    table, indices = node.inputs[:2]
    start, depth = flow.site(i).int_attribute("batch_dims", 0), flow.shape(indices)[-1]
    if any(flow.of(table)[start : start + depth]) and not any(flow.of(indices)):
        if flow.shape(indices)[0] != flow.batch or len(flow.shape(indices)) < 2:
            raise flow.fail(i, "picks fixed positions along the batch")
        flow.require(i, indices, 0, BatchFactor())
    along_nests(flow, i, node, broadcast=False)


@replace(_TABLE, travel=_gather_nd_travel).of("GatherND")
def gather_nd(site: Site) -> OpSpec:
    """Slices of a table, each found by a tuple of indices."""
    table, indices = site.input(0), site.input(1)
    batch = site.int_attribute("batch_dims", 0)
    depth = indices.shape[-1]
    shared = dim_names("b", batch)
    rows = dim_names("i", len(indices.shape) - 1 - batch)
    tail = dim_names("c", len(table.shape) - batch - depth)
    text = (
        f"{' '.join([*shared, *dim_names('v', depth), *tail])}, {' '.join([*shared, *rows, 'q'])}"
        f" -> {' '.join([*shared, *rows, *tail])}"
    )
    return _pick(site, loop_nest(text, site.reads(0, 1), site.writes(0), kinds={"q": DimKind.WHOLE}))


def _place(site: Site, nest: LoopNest) -> OpSpec:
    """A scatter: the data copied, the updates laid over it; backward copies once more and gathers."""
    data, indices, updates = site.input(0), site.input(1), site.input(2)
    forward = traffic(data, site.output(), indices, updates) + elements_like(data, updates.elements)
    backward = Traffic()
    if site.need(0):
        backward += traffic(site.output(), data, indices)
    if site.need(2):
        backward += traffic(indices, updates, updates)
    return streaming(
        site,
        nest,
        saved=keep_inputs(site, 1),
        forward=forward,
        backward=backward,
        kernels=2,
        backward_kernels=sum(site.needs),
    )


def _scatter_nd_value(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    result = np.array(x[0])
    for index in np.ndindex(x[1].shape[:-1]):
        result[tuple(x[1][index])] = x[2][index]
    return [result]


@Rule(ports=(0, 2), travel=partial(along_nests, broadcast=False), compute=_scatter_nd_value).of("ScatterND")
def scatter_nd(site: Site) -> OpSpec:
    """Slices of a tensor replaced, each found by a tuple of indices; the indexed dimensions may be split."""
    data, indices = site.input(0), site.input(1)
    depth = indices.shape[-1]
    found, tail = dim_names("v", depth), dim_names("c", len(data.shape) - depth)
    rows = dim_names("i", len(indices.shape) - 1)
    text = (
        f"{' '.join([*found, *tail])}, {' '.join([*rows, 'q'])}, {' '.join([*rows, *tail])}"
        f" -> {' '.join([*found, *tail])}"
    )
    kinds = {**dict.fromkeys(rows, DimKind.COUPLED), "q": DimKind.WHOLE}
    return _place(site, loop_nest(text, site.reads(0, 1, 2), site.writes(0), kinds=kinds))


@Rule(ports=(0, 2), travel=partial(along_nests, broadcast=False)).of("ScatterElements", "Scatter")
def scatter_elements(site: Site) -> OpSpec:
    """Elements replaced by index along an axis."""
    data = site.input(0)
    axis = site.axis("axis", 0, len(data.shape))
    left, right = [], []
    for k, (size, count) in enumerate(zip(data.shape, site.input(1).shape, strict=True)):
        left.append(f"d{k}")
        right.append(f"d{k}" if k != axis and size == count else f"i{k}")
    kinds = {f"i{k}": DimKind.COUPLED for k in range(len(left))}
    text = f"{' '.join(left)}, {' '.join(right)}, {' '.join(right)} -> {' '.join(left)}"
    return _place(site, loop_nest(text, site.reads(0, 1, 2), site.writes(0), kinds=kinds))


@Rule(ports=(0, 1)).of("TensorScatter")
def tensor_scatter(site: Site) -> OpSpec:
    """A cache updated in place at a position of its sequence axis."""
    cache, update = site.input(0), site.input(1)
    moved = traffic(update) + elements_like(cache, update.elements)
    names = dim_names("d", len(cache.shape))
    axis = site.axis("axis", -2, len(cache.shape))
    news = ["u" if k == axis else name for k, name in enumerate(names)]
    kinds = {"u": DimKind.WHOLE, names[axis]: DimKind.WHOLE}
    nest = loop_nest(
        *site.line({0: " ".join(names), 1: " ".join(news), 2: names[0]}, {0: " ".join(names)}), kinds=kinds
    )
    return streaming(site, nest, forward=moved, backward=moved + traffic(cache) * 2.0)


@Rule(ports=(), values=(1,)).of("OneHot")
def one_hot(site: Site) -> OpSpec:
    """Ones at the indices' places along a new axis, which may be split."""
    indices, result = site.input(0), site.output()
    rank = len(result.shape)
    axis = site.axis("axis", -1, rank)
    names = dim_names("i", len(indices.shape))
    text = f"{' '.join(names)} -> {' '.join([*names[:axis], 'v', *names[axis:]])}"
    nest = loop_nest(text, site.reads(0), site.writes(0), vector_flops=float(result.elements))
    return streaming(site, nest)


@Rule(
    ports=(0,),
    travel=partial(along_nests, refusal="picks a fixed number of samples of the batch"),
    values=(1,),
).of("TopK")
def top_k(site: Site) -> OpSpec:
    """Largest elements along an axis and their places; the places are kept. Counts one comparison a level of a heap."""
    x = site.input(0)
    axis = site.axis("axis", -1, len(x.shape))
    names = dim_names("d", len(x.shape))
    chosen = ["k" if i == axis else name for i, name in enumerate(names)]
    k = site.results()[0].shape[axis]
    nest = loop_nest(
        *site.line({0: " ".join(names)}, dict.fromkeys((0, 1), " ".join(chosen))),
        kinds={names[axis]: DimKind.COUPLED, "k": DimKind.COUPLED},
        vector_flops=float(x.elements * max(1, k.bit_length())),
    )
    kept = keep_outputs(1) if site.has_output(1) else ()
    return streaming(site, nest, saved=kept)


def _most_slices(site: Site) -> list[Shaped | None]:
    x = site.input(0)
    return [like(x) if "axis" in site.call.attributes else like(x, (x.elements,))]


@Rule(ports=(0,), most=_most_slices).of("Compress")
def compress(site: Site) -> OpSpec:
    """Slices chosen by a mask; the mask is kept. What lies beside the axis may be split."""
    nest = LoopNest((), (), ())
    x = site.input(0)
    if "axis" in site.call.attributes:
        names = dim_names("d", len(x.shape))
        axis = site.axis("axis", 0, len(x.shape))
        known = site.output().shape[axis] != x.shape[axis]
        chosen = ["k" if i == axis and known else name for i, name in enumerate(names)]
        kinds = {names[axis]: DimKind.WHOLE, "m": DimKind.WHOLE, "k": DimKind.WHOLE}
        nest = loop_nest(f"{' '.join(names)}, m -> {' '.join(chosen)}", site.reads(0, 1), site.writes(0), kinds=kinds)
    return streaming(
        site,
        nest,
        saved=keep_inputs(site, 1),
        forward=_picked(site.input(0), site.input(1), site.output()),
        backward=traffic(site.input(0), site.input(1), site.output()),
    )

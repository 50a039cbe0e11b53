"""Picking and placing elements by index. The indices are kept; only the touched rows are moved."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from planner.graph import Node, Tensor, TensorKind
from planner.operators.assemble import (
    ALIAS,
    elements_like,
    keep_inputs,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.entry import OpCall, Role, Rule, Shaped, like
from planner.operators.flow import BatchFactor, Flow, along_nests, places
from planner.operators.types import LoopNest, OpSpec, Traffic


def _picked(table: Tensor, indices: Tensor, result: Tensor) -> Traffic:
    return traffic(indices, result) + elements_like(table, result.elements)


def _pick(call: OpCall, nest: LoopNest, *, kept: tuple[int, ...] = (1,)) -> OpSpec:
    """A gather: touched rows in, result out; backward adds the result's gradient to the touched rows."""
    table, indices, result = call.input(0), call.input(1), call.output()
    backward = _picked(table, indices, result) + elements_like(table, result.elements)
    return streaming(
        call,
        nest,
        saved=keep_inputs(call, *kept),
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
    axis = flow.call(i).axis("axis", 0, len(data))
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


def _is_selection(call: OpCall) -> bool:
    """Whether one fixed position of an activation or input is picked by a number: a view, where a list is a copy."""
    fixed = call.has(1) and not call.input(1).shape and call.constant_ints(1) is not None
    return fixed and call.input(0).kind in (TensorKind.ACTIVATION, TensorKind.INPUT)


def _selected_strides(call: OpCall, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides without the axis that one position is picked of."""
    axis = call.axis("axis", 0, len(strides))
    return (*strides[:axis], *strides[axis + 1 :]) if _is_selection(call) else None


_TABLE = Rule(ports=(0,), rearranges=True, weights={0: Role.TABLE})


@replace(_TABLE, travel=_gather_travel, folds=True, strides=_selected_strides).of("Gather")
def gather(call: OpCall) -> OpSpec:
    """Rows of a table by index: `v d, b s -> b s d`; a split of v gives partial sums, each row held by one rank."""
    table = call.input(0)
    axis = call.axis("axis", 0, len(table.shape))
    spec = _pick(call, call.nest("a.. v c.., i.. -> a.. i.. c..", runs={"a": axis, "c": len(table.shape) - axis - 1}))
    return replace(spec, details={**spec.details, **ALIAS}) if _is_selection(call) else spec


@replace(_TABLE, folds=True).of("GatherElements")
def gather_elements(call: OpCall) -> OpSpec:
    """One element for each index along an axis; torch keeps the table too."""
    table = call.input(0)
    axis = call.axis("axis", 0, len(table.shape))
    left, right = [], []
    for k, (size, count) in enumerate(zip(table.shape, call.input(1).shape, strict=True)):
        left.append(f"d{k}" if k != axis and size == count else f"v{k}")
        right.append(f"d{k}")
    whole = " ".join(f"v{k}" for k in range(len(left)) if k != axis)
    nest = call.nest(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}", whole=whole)
    return _pick(call, nest, kept=(0, 1))


def _gather_nd_travel(flow: Flow, i: int, node: Node) -> None:
    """Tuples that pick along the batch are one a sample, though a constant may hold them."""
    table, indices = node.inputs[:2]
    start, depth = flow.call(i).int_attribute("batch_dims", 0), flow.shape(indices)[-1]
    if any(flow.of(table)[start : start + depth]) and not any(flow.of(indices)):
        if flow.shape(indices)[0] != flow.batch or len(flow.shape(indices)) < 2:
            raise flow.fail(i, "picks fixed positions along the batch")
        flow.require(i, indices, 0, BatchFactor())
    along_nests(flow, i, node, broadcast=False)


@replace(_TABLE, travel=_gather_nd_travel).of("GatherND")
def gather_nd(call: OpCall) -> OpSpec:
    """Slices of a table, each found by a tuple of indices."""
    runs = {"b": call.int_attribute("batch_dims", 0), "v": call.input(1).shape[-1]}
    return _pick(call, call.nest("b.. v.. c.., b.. i.. q -> b.. i.. c..", runs=runs, whole="q"))


def _place(call: OpCall, nest: LoopNest) -> OpSpec:
    """A scatter: the data copied, the updates laid over it; backward copies once more and gathers."""
    data, indices, updates = call.input(0), call.input(1), call.input(2)
    forward = traffic(data, call.output(), indices, updates) + elements_like(data, updates.elements)
    backward = Traffic()
    if call.need(0):
        backward += traffic(call.output(), data, indices)
    if call.need(2):
        backward += traffic(indices, updates, updates)
    return streaming(
        call,
        nest,
        saved=keep_inputs(call, 1),
        forward=forward,
        backward=backward,
        kernels=2,
        backward_kernels=sum(call.needs),
    )


@Rule(ports=(0, 2), travel=partial(along_nests, broadcast=False), folds=True, overlays=True).of("ScatterND")
def scatter_nd(call: OpCall) -> OpSpec:
    """Slices of a tensor replaced, each found by a tuple of indices; the indexed dimensions may be split.

    Where data say how many indices there are, there may be fewer updates than the most.
    """
    indices, updates = call.input(1).shape, call.input(2).shape
    new = "i.." if indices[:-1] == updates[: len(indices) - 1] else "u.."
    runs = {"v": indices[-1], "u": len(indices) - 1}
    nest = call.nest(f"v.. c.., i.. q, {new} c.. -> v.. c..", runs=runs, coupled=f"i.. {new}", whole="q")
    return _place(call, nest)


@Rule(ports=(0, 2), travel=partial(along_nests, broadcast=False), overlays=True).of("ScatterElements", "Scatter")
def scatter_elements(call: OpCall) -> OpSpec:
    """Elements replaced by index along an axis."""
    data = call.input(0)
    axis = call.axis("axis", 0, len(data.shape))
    sizes = enumerate(zip(data.shape, call.input(1).shape, strict=True))
    right = [f"d{k}" if k != axis and size == count else f"i{k}" for k, (size, count) in sizes]
    coupled = " ".join(f"i{k}" for k in range(len(right)))
    rows = " ".join(right)
    return _place(call, call.nest(f"d.., {rows}, {rows} -> d..", coupled=coupled))


@Rule(ports=(0, 1)).of("TensorScatter")
def tensor_scatter(call: OpCall) -> OpSpec:
    """A cache updated in place at a position of its sequence axis."""
    cache, update = call.input(0), call.input(1)
    moved = traffic(update) + elements_like(cache, update.elements)
    axis = call.axis("axis", -2, len(cache.shape))
    news = " ".join("u" if k == axis else f"d{k}" for k in range(len(cache.shape)))
    nest = call.nest(f"d.., {news}, ?d0 -> d..", whole=f"u d{axis}")
    return streaming(call, nest, forward=moved, backward=moved + traffic(cache) * 2.0)


@Rule(ports=(), values=(1,)).of("OneHot")
def one_hot(call: OpCall) -> OpSpec:
    """Ones at the indices' places along a new axis, which may be split."""
    axis = call.axis("axis", -1, len(call.output().shape))
    before = " ".join(f"i{k}" for k in range(axis))
    after = " ".join(f"i{k}" for k in range(axis, len(call.input(0).shape)))
    nest = call.nest(f"i.. -> {before} v {after}", vector_flops=float(call.output().elements))
    return streaming(call, nest)


@Rule(
    ports=(0,),
    travel=partial(along_nests, refusal="picks a fixed number of samples of the batch"),
    values=(1,),
).of("TopK")
def top_k(call: OpCall) -> OpSpec:
    """Largest elements along an axis and their places; the places are kept. Counts one comparison a level of a heap."""
    x = call.input(0)
    axis = call.axis("axis", -1, len(x.shape))
    chosen = " ".join("k" if i == axis else f"d{i}" for i in range(len(x.shape)))
    k = call.results()[0].shape[axis]
    flops = float(x.elements * max(1, k.bit_length()))
    nest = call.nest(f"d.. -> ?{chosen}, ?{chosen}", coupled=f"d{axis} k", vector_flops=flops)
    kept = keep_outputs(1) if call.has_output(1) else ()
    return streaming(call, nest, saved=kept)


def _most_slices(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    return [like(x) if "axis" in call.attributes else like(x, (x.elements,))]


@Rule(ports=(0,), most=_most_slices).of("Compress")
def compress(call: OpCall) -> OpSpec:
    """Slices chosen by a mask; the mask is kept. What lies beside the axis may be split."""
    nest = LoopNest((), (), ())
    x = call.input(0)
    if "axis" in call.attributes:
        axis = call.axis("axis", 0, len(x.shape))
        known = call.output().shape[axis] != x.shape[axis]
        chosen = " ".join("k" if i == axis and known else f"d{i}" for i in range(len(x.shape)))
        nest = call.nest(f"d.., m -> {chosen}", whole=f"d{axis} m k")
    return streaming(
        call,
        nest,
        saved=keep_inputs(call, 1),
        forward=_picked(call.input(0), call.input(1), call.output()),
        backward=traffic(call.input(0), call.input(1), call.output()),
    )

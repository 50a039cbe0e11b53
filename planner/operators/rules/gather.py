"""Picking and placing elements by index. The indices are kept; only the touched rows are moved."""

from __future__ import annotations

from planner.graph import Tensor
from planner.operators.assemble import (
    Traffic,
    elements_like,
    keep_inputs,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.nest import dim_names, loop_nest
from planner.operators.site import Site, rule
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


@rule("Gather", ports=(0,))
def gather(site: Site) -> OpSpec:
    """Rows of a table by index: `v d, b s -> b s d`; a split of v gives partial sums, each row held by one rank."""
    table, indices = site.input(0), site.input(1)
    axis = site.axis("axis", 0, len(table.shape))
    before, after = dim_names("a", axis), dim_names("c", len(table.shape) - axis - 1)
    rows = dim_names("i", len(indices.shape))
    text = f"{' '.join([*before, 'v', *after])}, {' '.join(rows)} -> {' '.join([*before, *rows, *after])}"
    return _pick(site, loop_nest(text, site.reads(0, 1), site.writes(0)))


@rule("GatherElements", ports=(0,))
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


@rule("GatherND", ports=(0,))
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


@rule("ScatterND", ports=(0, 2))
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
    kinds = dict.fromkeys([*rows, "q"], DimKind.WHOLE)
    return _place(site, loop_nest(text, site.reads(0, 1, 2), site.writes(0), kinds=kinds))


@rule("ScatterElements", "Scatter", ports=(0, 2))
def scatter_elements(site: Site) -> OpSpec:
    """Elements replaced by index along an axis."""
    data = site.input(0)
    axis = site.axis("axis", 0, len(data.shape))
    left, right = [], []
    for k, (size, count) in enumerate(zip(data.shape, site.input(1).shape, strict=True)):
        left.append(f"d{k}")
        right.append(f"d{k}" if k != axis and size == count else f"i{k}")
    kinds = {f"i{k}": DimKind.WHOLE for k in range(len(left))}
    text = f"{' '.join(left)}, {' '.join(right)}, {' '.join(right)} -> {' '.join(left)}"
    return _place(site, loop_nest(text, site.reads(0, 1, 2), site.writes(0), kinds=kinds))


@rule("TensorScatter", ports=(0, 1))
def tensor_scatter(site: Site) -> OpSpec:
    """A cache updated in place at a position of its sequence axis."""
    cache, update = site.input(0), site.input(1)
    moved = traffic(update) + elements_like(cache, update.elements)
    names = dim_names("d", len(cache.shape))
    axis = site.axis("axis", -2, len(cache.shape))
    news = ["u" if k == axis else name for k, name in enumerate(names)]
    positions = (0, 1, 2) if site.has(2) else (0, 1)
    reads = ", ".join([" ".join(names), " ".join(news), names[0]][: len(positions)])
    kinds = {"u": DimKind.WHOLE, names[axis]: DimKind.WHOLE}
    nest = loop_nest(f"{reads} -> {' '.join(names)}", site.reads(*positions), site.writes(0), kinds=kinds)
    return streaming(site, nest, forward=moved, backward=moved + traffic(cache) * 2.0)


@rule("OneHot", ports=())
def one_hot(site: Site) -> OpSpec:
    """Ones at the indices' places along a new axis, which may be split."""
    indices, result = site.input(0), site.output()
    rank = len(result.shape)
    axis = site.axis("axis", -1, rank)
    names = dim_names("i", len(indices.shape))
    text = f"{' '.join(names)} -> {' '.join([*names[:axis], 'v', *names[axis:]])}"
    nest = loop_nest(text, site.reads(0), site.writes(0), vector_flops=float(result.elements))
    return streaming(site, nest)


@rule("TopK", ports=(0,))
def top_k(site: Site) -> OpSpec:
    """Largest elements along an axis and their places; the places are kept. Counts one comparison a level of a heap."""
    x = site.input(0)
    axis = site.axis("axis", -1, len(x.shape))
    names = dim_names("d", len(x.shape))
    chosen = ["k" if i == axis else name for i, name in enumerate(names)]
    positions = [p for p in (0, 1) if site.has_output(p)]
    k = site.output(positions[0]).shape[axis]
    text = f"{' '.join(names)} -> {', '.join([' '.join(chosen)] * len(positions))}"
    nest = loop_nest(
        text,
        site.reads(0),
        site.writes(*positions),
        kinds={names[axis]: DimKind.COUPLED, "k": DimKind.COUPLED},
        vector_flops=float(x.elements * max(1, k.bit_length())),
    )
    kept = keep_outputs(1) if site.has_output(1) else ()
    return streaming(site, nest, saved=kept)


@rule("Compress", ports=(0,))
def compress(site: Site) -> OpSpec:
    """Slices chosen by a mask; the mask is kept. What lies beside the axis may be split."""
    nest = LoopNest((), (), ())
    x = site.input(0)
    if "axis" in site.call.attributes:
        names = dim_names("d", len(x.shape))
        axis = site.axis("axis", 0, len(x.shape))
        chosen = ["k" if i == axis else name for i, name in enumerate(names)]
        kinds = {names[axis]: DimKind.WHOLE, "m": DimKind.WHOLE, "k": DimKind.WHOLE}
        nest = loop_nest(f"{' '.join(names)}, m -> {' '.join(chosen)}", site.reads(0, 1), site.writes(0), kinds=kinds)
    return streaming(
        site,
        nest,
        saved=keep_inputs(site, 1),
        forward=_picked(site.input(0), site.input(1), site.output()),
        backward=traffic(site.input(0), site.input(1), site.output()),
    )

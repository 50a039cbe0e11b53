"""Reshapes, slices, concatenations, padding, shape arithmetic, and operators that create tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import RULES, OperatorCall, dims_of, rule
from planner.runtime.operators.elementwise import torch_type

RULES.update(
    {
        "Transpose": lambda c: c[0].permute(c.attr("perm") or list(range(c[0].dim()))[::-1]),
        "Expand": lambda c: c[0].expand(torch.broadcast_shapes(c[0].shape, c.ints(1) or [])),
        "Tile": lambda c: c[0].repeat(c.ints(1) or []),
        "Concat": lambda c: torch.cat([x for x in c.inputs if x is not None], int(c.attr("axis"))),
        "Shape": lambda c: torch.tensor(list(c[0].shape)[c.attr("start", 0) : c.attr("end")], dtype=torch.int64),
        "Size": lambda c: torch.tensor(c[0].numel(), dtype=torch.int64),
    }
)


@rule("Reshape")
def _reshape(c: OperatorCall) -> torch.Tensor:
    shape = c.ints(1, "shape") or []
    if not c.attr("allowzero", 0):
        shape = [c[0].shape[d] if size == 0 else size for d, size in enumerate(shape)]
    return c[0].reshape(shape)


@rule("Flatten")
def _flatten(c: OperatorCall) -> torch.Tensor:
    axis = int(c.attr("axis", 1))
    rows = 1
    for size in c[0].shape[: axis if axis >= 0 else c[0].dim() + axis]:
        rows *= size
    return c[0].reshape(rows, -1 if c[0].numel() else 0)


@rule("Squeeze")
def _squeeze(c: OperatorCall) -> torch.Tensor:
    axes = c.ints(1, "axes")
    gone = {d for d, size in enumerate(c[0].shape) if size == 1} if axes is None else set(dims_of(c[0], axes))
    return c[0].reshape([size for d, size in enumerate(c[0].shape) if d not in gone])


@rule("Unsqueeze")
def _unsqueeze(c: OperatorCall) -> torch.Tensor:
    axes = c.ints(1, "axes") or []
    x, rank = c[0], c[0].dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@rule("Split")
def _split(c: OperatorCall) -> list[torch.Tensor]:
    axis = int(c.attr("axis", 0))
    sizes, whole = c.ints(1, "split"), c[0].shape[axis]
    if sizes is None:
        each = -(-whole // int(c.attr("num_outputs", c.outputs)))
        sizes = [min(each, whole - at) for at in range(0, whole, each)]
    return list(c[0].split(sizes, axis))


@rule("Slice")
def _slice(c: OperatorCall) -> torch.Tensor:
    starts, ends = c.ints(1, "starts") or [], c.ints(2, "ends") or []
    axes = c.ints(3, "axes") or list(range(len(starts)))
    steps = c.ints(4) or [1] * len(starts)
    x = c[0]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if step > 0:
            first, last, _ = slice(start, end).indices(size)
            x = x.narrow(axis, first, max(0, last - first))
            if step > 1:
                x = x[(slice(None),) * (axis % x.dim()) + (slice(None, None, step),)]
        else:
            taken = list(range(size))[slice(start, None if end < -size else end, step)]
            x = x.index_select(axis, torch.tensor(taken, dtype=torch.int64, device=x.device))
    return x


@rule("Pad")
def _pad(c: OperatorCall) -> torch.Tensor:
    x, pads = c[0], c.ints(1, "pads") or []
    axes = dims_of(x, c.ints(3))
    before, after = [0] * x.dim(), [0] * x.dim()
    for k, axis in enumerate(c.ints(3) or axes):
        before[axis], after[axis] = pads[k], pads[len(pads) // 2 + k]
    mode = c.attr("mode", "constant")
    flat = [p for d in reversed(range(x.dim())) for p in (before[d], after[d])]
    if mode == "constant":
        return F.pad(x, flat, value=c.scalar(2, float(c.attr("value", 0.0))))
    for d in range(x.dim()):
        x = _padded_along(x, d, before[d], after[d], mode)
    return x


def _padded_along(x: torch.Tensor, d: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Pad one dimension with its own elements; negative padding removes elements."""
    if not before and not after:
        return x
    size = x.shape[d]
    places = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        places = places.clamp(0, size - 1)
    elif mode == "wrap":
        places = places % size
    else:
        places = places.abs()
        places = torch.where(places >= size, 2 * (size - 1) - places, places)
    return x.index_select(d, places)


@rule("Constant")
def _constant(c: OperatorCall) -> torch.Tensor:
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        if name in c.attributes:
            value = c.attributes[name]
            floats = c.context.float_dtype if name.startswith("value_float") else None
            return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=floats)
    raise ModelError("a Constant without a value that torch knows", where=c.name, hint="repair the model")


@rule("ConstantOfShape")
def _constant_of_shape(c: OperatorCall) -> torch.Tensor:
    value = c.attr("value")
    value = torch.zeros(1, dtype=c.context.float_dtype) if value is None else value
    return value.reshape(()).expand(c.ints(0) or []).clone()


@rule("Range")
def _range(c: OperatorCall) -> torch.Tensor:
    start, limit, step = (v if v is not None else c[i] for i, v in enumerate(c.values or c.inputs))
    if start is None or limit is None or step is None or any(v.is_meta for v in (start, limit, step)):
        raise ModelError("a Range whose length depends on data", where=c.name, hint="export with fixed shapes")
    return torch.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


@rule("EyeLike")
def _eye_like(c: OperatorCall) -> torch.Tensor:
    dtype = c[0].dtype if c.attr("dtype") is None else torch_type(int(c.attr("dtype")), c.context.float_dtype)
    rows, columns = c[0].shape
    offset = int(c.attr("k", 0))
    columns_at, rows_at = (torch.arange(n, device=c[0].device) for n in (columns, rows))
    return (columns_at[None, :] - rows_at[:, None] == offset).to(dtype)


@rule("Trilu", "com.microsoft.Trilu")
def _triangle(c: OperatorCall) -> torch.Tensor:
    offset = int(c.scalar(1, 0))
    return torch.triu(c[0], offset) if c.attr("upper", 1) else torch.tril(c[0], offset)


@rule("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def _random(c: OperatorCall) -> torch.Tensor:
    shape = list(c[0].shape) if c.op.endswith("Like") else list(c.attr("shape"))
    dtype = c.context.float_dtype
    if "Normal" in c.op:
        drawn = c.drawn(torch.randn, shape, dtype=torch.float64)
        return (c.attr("mean", 0.0) + c.attr("scale", 1.0) * drawn).to(dtype)
    low, high = c.attr("low", 0.0), c.attr("high", 1.0)
    return (low + (high - low) * c.drawn(torch.rand, shape, dtype=torch.float64)).to(dtype)


@rule("DepthToSpace")
def _depth_to_space(c: OperatorCall) -> torch.Tensor:
    b, depth, h, w = c[0].shape
    n = int(c.attr("blocksize"))
    if c.attr("mode", "DCR") == "DCR":
        parts = c[0].reshape(b, n, n, depth // n**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = c[0].reshape(b, depth // n**2, n, n, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(b, depth // n**2, h * n, w * n)


@rule("SpaceToDepth")
def _space_to_depth(c: OperatorCall) -> torch.Tensor:
    b, depth, h, w = c[0].shape
    n = int(c.attr("blocksize"))
    order = (0, 3, 5, 1, 2, 4) if c.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    parts = c[0].reshape(b, depth, h // n, n, w // n, n).permute(order)
    return parts.reshape(b, depth * n * n, h // n, w // n)


@rule("SplitToSequence")
def _split_to_sequence(c: OperatorCall) -> list[list[torch.Tensor]]:
    axis, sizes = int(c.attr("axis", 0)), c.ints(1)
    whole = c[0].shape[axis]
    given = c.get(1)
    if sizes is None or given is None or given.dim() == 0:
        each = 1 if sizes is None else sizes[0]
        sizes = [min(each, whole - at) for at in range(0, whole, each)]
    pieces = list(c[0].split(sizes, axis))
    if c.get(1) is None and not c.attr("keepdims", 1):
        pieces = [piece.squeeze(axis) for piece in pieces]
    return [pieces]


@rule("SequenceConstruct")
def _sequence(c: OperatorCall) -> list[list[torch.Tensor]]:
    return [[x for x in c.inputs if x is not None]]


@rule("SequenceAt")
def _sequence_at(c: OperatorCall) -> torch.Tensor:
    return c[0][(c.ints(1) or [0])[0]]


@rule("ConcatFromSequence")
def _concat_from_sequence(c: OperatorCall) -> torch.Tensor:
    pieces, axis = list(c[0]), int(c.attr("axis"))
    return torch.stack(pieces, axis) if c.attr("new_axis", 0) else torch.cat(pieces, axis)

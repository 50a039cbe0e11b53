"""Gathers, scatters and other accesses by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import OperatorCall, rule
from planner.runtime.operators.kernels import lookup


@rule("Gather")
def _gather(c: OperatorCall) -> torch.Tensor:
    axis = int(c.attr("axis", 0)) % c[0].dim()
    places = torch.where(c[1] < 0, c[1] + c[0].shape[axis], c[1]).long()
    if axis == 0 and c[0].dim() == 2 and c[0].is_floating_point():
        return lookup(c[0], places) if c.context.adds_in_place else F.embedding(places, c[0])
    taken = c[0].index_select(axis, places.reshape(-1))
    return taken.reshape((*c[0].shape[:axis], *places.shape, *c[0].shape[axis + 1 :]))


@rule("GatherElements")
def _gather_elements(c: OperatorCall) -> torch.Tensor:
    axis = int(c.attr("axis", 0))
    return c[0].gather(axis, torch.where(c[1] < 0, c[1] + c[0].shape[axis], c[1]).long())


def _flat_places(data: torch.Tensor, places: torch.Tensor, kept: int) -> torch.Tensor:
    """Flatten index tuples (in the last dimension) to row numbers of the data with its indexed dimensions flattened."""
    depth = places.shape[-1]
    sizes = data.shape[kept : kept + depth]
    flat = torch.zeros(places.shape[:-1], dtype=torch.int64, device=places.device)
    for d, size in enumerate(sizes):
        part = places[..., d].long()
        flat = flat * size + torch.where(part < 0, part + size, part)
    for d in range(kept):
        steps = torch.arange(data.shape[d], device=places.device) * data.shape[kept : kept + depth].numel()
        for other in range(d + 1, kept):
            steps = steps * data.shape[other]
        flat = flat + steps.reshape(*(-1 if k == d else 1 for k in range(flat.dim())))
    return flat


@rule("GatherND")
def _gather_nd(c: OperatorCall) -> torch.Tensor:
    kept, depth = int(c.attr("batch_dims", 0)), c[1].shape[-1]
    flat = _flat_places(c[0], c[1], kept)
    rest = c[0].shape[kept + depth :]
    rows = c[0].reshape(-1, *rest)
    return rows.index_select(0, flat.reshape(-1)).reshape((*flat.shape, *rest))


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@rule("ScatterElements", "Scatter")
def _scatter_elements(c: OperatorCall) -> torch.Tensor:
    axis, reduction = int(c.attr("axis", 0)), c.attr("reduction", "none")
    places = torch.where(c[1] < 0, c[1] + c[0].shape[axis], c[1]).long()
    if reduction == "none":
        return c[0].scatter(axis, places, c[2])
    if reduction == "add":
        return c[0].scatter_add(axis, places, c[2])
    return c[0].scatter_reduce(axis, places, c[2], _REDUCE[reduction], include_self=True)


@rule("ScatterND")
def _scatter_nd(c: OperatorCall) -> torch.Tensor:
    depth, reduction = c[1].shape[-1], c.attr("reduction", "none")
    flat = _flat_places(c[0], c[1], 0).reshape(-1)
    rest = c[0].shape[depth:]
    rows, updates = c[0].reshape(-1, *rest), c[2].reshape(-1, *rest)
    if reduction == "none":
        result = rows.index_copy(0, flat, updates)
    elif reduction == "add":
        result = rows.index_add(0, flat, updates)
    else:
        result = rows.index_reduce(0, flat, updates, _REDUCE[reduction])
    return result.reshape(c[0].shape)


@rule("OneHot")
def _one_hot(c: OperatorCall) -> torch.Tensor:
    depth = (c.ints(1) or [0])[0]
    off, on = c[2].unbind(0)
    axis = int(c.attr("axis", -1)) % (c[0].dim() + 1)
    places = torch.where(c[0] < 0, c[0] + depth, c[0]).unsqueeze(axis)
    shape = [depth if d == axis else 1 for d in range(places.dim())]
    hit = places == torch.arange(depth, device=places.device).reshape(shape).to(places.dtype)
    return torch.where(hit, on, off)


@rule("NonZero")
def _non_zero(c: OperatorCall) -> torch.Tensor:
    if c[0].is_meta:
        raise ModelError("NonZero has a shape that depends on data", where=c.name, hint="export without it")
    return c[0].nonzero().T


@rule("ReverseSequence")
def _reverse_sequence(c: OperatorCall) -> torch.Tensor:
    time, batch = int(c.attr("time_axis", 0)), int(c.attr("batch_axis", 1))
    x = c[0].movedim((batch, time), (0, 1))
    steps, lengths = torch.arange(x.shape[1], device=x.device)[None, :], c[1][:, None]
    places = torch.where(steps < lengths, lengths - 1 - steps, steps)
    places = places.reshape(*places.shape, *[1] * (x.dim() - 2)).expand(x.shape)
    return x.gather(1, places).movedim((0, 1), (batch, time))


@rule("Resize", "Upsample")
def _resize(c: OperatorCall) -> torch.Tensor:
    x = c[0]
    mode = c.attr("mode", "nearest")
    way = c.attr("coordinate_transformation_mode", "asymmetric" if c.op == "Upsample" else "half_pixel")
    sizes = c.ints(3) if c.op == "Resize" else None
    given = c.values or c.inputs
    scales = given[2] if c.op == "Resize" and len(given) > 2 else (given[1] if c.op == "Upsample" else None)
    if (
        mode not in ("nearest", "linear", "cubic")
        or c.attr("axes")
        or c.attr("antialias", 0)
        or c.attr("exclude_outside", 0)
        or way not in ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
    ):
        hint = "export nearest, linear or cubic, of all dimensions and without antialiasing"
        aliased = " with antialiasing" if c.attr("antialias", 0) else ""
        raise ModelError(f"Resize by {mode}, {way}{aliased} has no torch rule", where=c.name, hint=hint)
    factors = [float(s) for s in scales.tolist()] if scales is not None and scales.numel() else []
    sizes = sizes or [int(n * f) for n, f in zip(x.shape, factors, strict=True)]
    rounding = "floor" if c.op == "Upsample" else c.attr("nearest_mode", "round_prefer_floor")
    for d, size in enumerate(sizes):
        if size != x.shape[d]:
            factor = factors[d] if factors else size / x.shape[d]
            at = _places(x.shape[d], size, factor, way, x.device)
            x = _nearest(x, d, at, rounding) if mode == "nearest" else _between(x, d, at, _KERNELS[mode](c))
    return x


def _places(before: int, size: int, factor: float, way: str, device: torch.device) -> torch.Tensor:
    """Where the entries of a dimension lie after resizing, in places of before."""
    at = torch.arange(size, dtype=torch.float64, device=device)
    if way.endswith("half_pixel"):
        at = (at + 0.5) / factor - 0.5 if way == "half_pixel" or size > 1 else at
    elif way == "align_corners":
        at = at * (before - 1) / max(1.0, before * factor - 1)
    else:
        at = at / factor
    return at


def _nearest(x: torch.Tensor, d: int, at: torch.Tensor, rounding: str) -> torch.Tensor:
    rounded = {
        "floor": torch.floor(at), "ceil": torch.ceil(at), "round_prefer_floor": torch.ceil(at - 0.5),
        "round_prefer_ceil": torch.floor(at + 0.5),
    }[rounding]  # fmt: skip
    return x.index_select(d, rounded.clamp(0, x.shape[d] - 1).long())


Kernel = Callable[[torch.Tensor], torch.Tensor]
"""Shares of entries by their distance, of as many on each side as it reaches."""


def _between(x: torch.Tensor, d: int, at: torch.Tensor, kernel: tuple[int, Kernel]) -> torch.Tensor:
    """Interpolate along a dimension; beyond its ends lie copies of the last entries."""
    reach, share = kernel
    shape, low, last = [-1 if k == d else 1 for k in range(x.dim())], at.floor(), x.shape[d] - 1
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for step in range(1 - reach, 1 + reach):
        part = share((at - low - step).abs()).to(x.dtype).reshape(shape)
        total = total + part * x.index_select(d, (low + step).clamp(0, last).long())
    return total


def _cubic(c: OperatorCall) -> tuple[int, Kernel]:
    """Cubic convolution (Keys, 1981, equation 4)."""
    a = float(c.attr("cubic_coeff_a", -0.75))

    def share(far: torch.Tensor) -> torch.Tensor:
        near = ((a + 2) * far - (a + 3)) * far**2 + 1
        return torch.where(far <= 1, near, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a)

    return 2, share


_KERNELS: Mapping[str, Callable[[OperatorCall], tuple[int, Kernel]]] = {
    "linear": lambda c: (1, lambda far: 1 - far),
    "cubic": _cubic,
}

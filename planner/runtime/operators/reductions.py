"""Reductions along dimensions, cumulative sums, sorting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.runtime.operators.call import RULES, OperatorCall, dims_of, rule

_Reduction = Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]


def _product(x: torch.Tensor, dims: tuple[int, ...], keep: bool) -> torch.Tensor:
    for d in sorted(dims, reverse=True):
        x = x.prod(d, keepdim=keep)
    return x


def _mean(x: torch.Tensor, dims: tuple[int, ...], keep: bool) -> torch.Tensor:
    return x.mean(dims, keep)


_REDUCTIONS: dict[str, _Reduction] = {
    "ReduceSum": lambda x, dims, keep: x.sum(dims, keep),
    "ReduceMean": _mean,
    "ReduceMax": lambda x, dims, keep: x.amax(dims, keep),
    "ReduceMin": lambda x, dims, keep: x.amin(dims, keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, dims, keep: x.abs().sum(dims, keep),
    "ReduceL2": lambda x, dims, keep: x.square().sum(dims, keep).sqrt(),
    "ReduceSumSquare": lambda x, dims, keep: x.square().sum(dims, keep),
    "ReduceLogSum": lambda x, dims, keep: x.sum(dims, keep).log(),
    "ReduceLogSumExp": torch.logsumexp,
}


def _reduced(c: OperatorCall) -> torch.Tensor:
    axes = c.ints(1, "axes")
    if not axes and c.attr("noop_with_empty_axes", 0):
        return c[0]
    dims = dims_of(c[0], axes or None)
    return _REDUCTIONS[c.op](c[0], dims, bool(c.attr("keepdims", 1))) if dims else c[0]


RULES.update(dict.fromkeys(_REDUCTIONS, _reduced))


@rule("ArgMax", "ArgMin")
def _extreme_place(c: OperatorCall) -> torch.Tensor:
    axis, keep = int(c.attr("axis", 0)), bool(c.attr("keepdims", 1))
    x = c[0] if c.op == "ArgMax" else -c[0]
    if c.attr("select_last_index", 0):
        return x.shape[axis] - 1 - x.flip(axis).argmax(axis, keepdim=keep)
    return x.argmax(axis, keepdim=keep)


@rule("CumSum", "CumProd")
def _cumulative(c: OperatorCall) -> torch.Tensor:
    axis, sums = (c.ints(1) or [0])[0], c.op == "CumSum"
    x = c[0].flip(axis) if c.attr("reverse", 0) else c[0]
    if c.attr("exclusive", 0):
        first = torch.full_like(x.narrow(axis, 0, 1), 0 if sums else 1)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    y = (x.cumsum(axis) if sums else x.cumprod(axis)).to(x.dtype)
    return y.flip(axis) if c.attr("reverse", 0) else y


@rule("TopK")
def _top_k(c: OperatorCall) -> list[torch.Tensor]:
    k = (c.ints(1, "k") or [1])[0]
    axis = int(c.attr("axis", -1))
    order = torch.sort(c[0].detach(), dim=axis, descending=bool(c.attr("largest", 1)), stable=True).indices
    places = order.narrow(axis, 0, k)
    return [c[0].gather(axis, places), places]

"""Tensors on the ranks of a group: which piece a rank has under a layout, and how a tensor changes its layout.

A layout has one part for each axis of the mesh, outermost first: `R` whole, `S1` cut along dimension 1, `P` a partial
sum, `S2~3` each third of dimension 2 cut by itself. Pieces are as equal as they can be, the larger ones first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.errors import PlanError

_PART = re.compile(r"R|P|S([0-9]+)(?:~([0-9]+))?")


class Part(NamedTuple):
    """How a tensor lies along one mesh axis.

    Attributes:
        kind: "R", "S" or "P".
        dim: the dimension that is cut.
        runs: equal runs of that dimension that are cut each by itself; 1 mostly.
    """

    kind: str
    dim: int = -1
    runs: int = 1


Layout = tuple[Part, ...]


def parse(text: str, axes: int) -> Layout:
    """A layout as a plan writes it; "" is whole on every axis.

    Raises:
        PlanError: it is none, or not for so many axes.
    """
    if not text:
        return (Part("R"),) * axes
    words = list(_PART.finditer(text))
    if len(words) != axes or "".join(m[0] for m in words) != text:
        raise PlanError(f"{text!r} is no layout on {axes} axes", where="shardings", hint="plan again")
    return tuple(Part(m[0][0], int(m[1]) if m[1] else -1, int(m[2]) if m[2] else 1) for m in words)


def whole(axes: int) -> Layout:
    """Every rank has all of the tensor."""
    return (Part("R"),) * axes


def gradient_as_read(read: Layout, cuts: Sequence[bool]) -> Layout:
    """The layout in which an operand's gradient comes out of an operator.

    Args:
        read: the layout in which the operand was read.
        cuts: for each axis whether it cuts the operator's work.
    """
    kinds = {"P": "R", "R": "P"}
    return tuple(
        Part(kinds[part.kind]) if part.kind == "P" or (part.kind == "R" and cut) else part
        for part, cut in zip(read, cuts, strict=True)
    )


def gradient_as_written(written: Layout) -> Layout:
    """The layout in which an operator needs the gradient of a result: whole where that was a partial sum."""
    return tuple(Part("R") if part.kind == "P" else part for part in written)


def gradient_at_rest(value: Layout, gradient: Layout) -> Layout:
    """The layout in which gradients of a resting tensor are added up here: pieces as large as those of the value."""
    return tuple(
        g if g == v or (g.kind == "P" and v.kind == "R") else (Part("R") if v.kind == "P" else v)
        for v, g in zip(value, gradient, strict=True)
    )


@dataclass(frozen=True)
class Mesh:
    """The ranks of one group as points of a mesh, seen from one of them.

    Attributes:
        sizes: ranks along each axis.
        place: the rank's place in the group (row-major).
        lines: for each axis the process group of the ranks that differ in that coordinate only.
    """

    sizes: tuple[int, ...] = ()
    place: int = 0
    lines: tuple[Any, ...] = ()

    @property
    def axes(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The rank's coordinates."""
        found, left = [], self.place
        for size in reversed(self.sizes):
            left, at = divmod(left, size)
            found.append(at)
        return tuple(reversed(found))


def _sizes(size: int, count: int) -> list[int]:
    """Sizes of the pieces of a dimension (of each run)."""
    each = -(-size // count)
    return [max(0, min(each, size - at * each)) for at in range(count)]


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Shape of a rank's piece of a tensor."""
    sizes = list(shape)
    for part, count, at in zip(layout, mesh.sizes, mesh.coordinates, strict=True):
        if part.kind == "S":
            sizes[part.dim] = part.runs * _sizes(sizes[part.dim] // part.runs, count)[at]
    return tuple(sizes)


def piece_start(shape: Sequence[int], layout: Layout, mesh: Mesh, dim: int) -> int:
    """The first index of a rank's piece along a dimension that is cut in one run."""
    start, size = 0, shape[dim]
    for part, count, at in zip(layout, mesh.sizes, mesh.coordinates, strict=True):
        if part.kind == "S" and part.dim == dim:
            sizes = _sizes(size, count)
            start, size = start + sum(sizes[:at]), sizes[at]
    return start


def _cut(x: torch.Tensor, part: Part, count: int, at: int) -> torch.Tensor:
    runs = x.chunk(part.runs, part.dim) if part.runs > 1 else [x]
    sizes = _sizes(x.shape[part.dim] // part.runs, count)
    pieces = [run.narrow(part.dim, sum(sizes[:at]), sizes[at]) for run in runs]
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]


def _gather(x: torch.Tensor, part: Part, count: int, size: int, line: Any) -> torch.Tensor:  # noqa: ANN401
    """All pieces along an axis as one; `size` is the dimension's size then."""
    sizes = [part.runs * n for n in _sizes(size // part.runs, count)]
    longest = max(sizes)
    if x.shape[part.dim] < longest:
        pad = list(x.shape)
        pad[part.dim] = longest - x.shape[part.dim]
        x = torch.cat([x, x.new_zeros(pad)], part.dim)
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(pieces, x.contiguous(), group=line)
    pieces = [piece.narrow(part.dim, 0, n) for piece, n in zip(pieces, sizes, strict=True)]
    if part.runs == 1:
        return torch.cat(pieces, part.dim)
    split = [piece.chunk(part.runs, part.dim) for piece in pieces]
    return torch.cat([run[k] for k in range(part.runs) for run in split], part.dim)


def change(x: torch.Tensor, source: Layout, target: Layout, shape: Sequence[int], mesh: Mesh) -> torch.Tensor:
    """The rank's piece of a tensor under another layout. All ranks of the group call it together.

    Partial sums are added up, then what is cut otherwise is gathered (innermost axis first), then cut (outermost
    first).

    Args:
        x: the rank's piece.
        source: its layout.
        target: the layout wanted.
        shape: of the whole tensor.
        mesh: the group.
    """
    if source == target:
        return x
    now = list(source)
    for a, (part, wanted) in enumerate(zip(source, target, strict=True)):
        if part.kind == "P" and wanted.kind != "P":
            x = x.contiguous() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            x = x.clone()
            dist.all_reduce(x, group=mesh.lines[a])
            now[a] = Part("R")
    outermost = {p.dim: a for a, p in reversed(list(enumerate(now))) if p.kind == "S" and p != target[a]}
    for a in reversed(range(mesh.axes)):
        part = now[a]
        if part.kind == "S" and a >= outermost.get(part.dim, mesh.axes):
            now[a] = Part("R")
            size = local_shape(shape, tuple(now), mesh)[part.dim]
            x = _gather(x, part, mesh.sizes[a], size, mesh.lines[a])
    for a, wanted in enumerate(target):
        if wanted.kind == "S" and now[a].kind == "R":
            inner = [k for k in range(a + 1, mesh.axes) if now[k].kind == "S" and now[k].dim == wanted.dim]
            if inner:
                raise PlanError("an inner axis is cut before an outer one", where="shardings", hint="plan again")
            x = _cut(x, wanted, mesh.sizes[a], mesh.coordinates[a])
        elif wanted.kind == "P" and now[a].kind == "R" and mesh.coordinates[a]:
            x = torch.zeros_like(x)
        now[a] = wanted
    return x


class _Change(torch.autograd.Function):  # type: ignore[misc]
    """A change of layout forward, and another one of the gradient backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor, there: tuple[Layout, Layout], back: tuple[Layout, Layout],
        shape: tuple[int, ...], mesh: Mesh,
    ) -> torch.Tensor:  # fmt: skip
        ctx.back, ctx.shape, ctx.mesh = back, shape, mesh
        y = change(x, *there, shape, mesh)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        return change(gradient, ctx.back[0], ctx.back[1], ctx.shape, ctx.mesh), None, None, None, None


def relaid(
    x: torch.Tensor, there: tuple[Layout, Layout], back: tuple[Layout, Layout], shape: Sequence[int], mesh: Mesh
) -> torch.Tensor:
    """A tensor under another layout, its gradient led back.

    Args:
        x: the rank's piece.
        there: layouts of the value before and after.
        back: layouts of the gradient as it arrives and as it goes on.
        shape: of the whole tensor.
        mesh: the group.
    """
    if there[0] == there[1] and (back[0] == back[1] or not x.is_floating_point()):
        return x
    if not x.is_floating_point():
        return change(x, *there, shape, mesh)
    result: torch.Tensor = _Change.apply(x, there, back, tuple(shape), mesh)
    return result

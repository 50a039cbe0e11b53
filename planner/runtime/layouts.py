"""Layouts of tensors on a group of ranks: which piece a rank holds, and how a tensor moves to another layout.

A layout has one entry for each axis of the mesh, outermost first: `R` replicated, `S1` sharded along dimension 1, `P` a
partial sum, `S2~3` each third of dimension 2 sharded by itself. Pieces are as equal as they can be, the larger first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from planner.errors import PlanError
from planner.runtime.groups import RankGroup

_PART = re.compile(r"R|P|S([0-9]+)(?:~([0-9]+))?")


class AxisLayout(NamedTuple):
    """Layout of a tensor along one mesh axis.

    Attributes:
        kind: "R" (replicated), "S" (sharded) or "P" (partial sum).
        dim: the sharded dimension.
        runs: number of equal runs of that dimension, each sharded by itself; mostly 1.
    """

    kind: str
    dim: int = -1
    runs: int = 1


Layout = tuple[AxisLayout, ...]


@functools.cache
def parse(text: str, axes: int) -> Layout:
    """Parse a layout as a plan writes it; "" is replicated on every axis.

    Raises:
        PlanError: the text is no layout, or has another number of axes.
    """
    if not text:
        return (AxisLayout("R"),) * axes
    words = list(_PART.finditer(text))
    if len(words) != axes or "".join(m[0] for m in words) != text:
        raise PlanError(f"{text!r} is no layout on {axes} axes", where="shardings", hint="plan again")
    return tuple(AxisLayout(m[0][0], int(m[1]) if m[1] else -1, int(m[2]) if m[2] else 1) for m in words)


def whole(axes: int) -> Layout:
    """Replicated: every rank holds the full tensor."""
    return (AxisLayout("R"),) * axes


@functools.cache
def gradient_as_read(read: Layout, cuts: tuple[bool, ...]) -> Layout:
    """Layout of an operand's gradient as an operator's backward makes it.

    Args:
        read: the layout in which the operand was read.
        cuts: for each axis whether it cuts the operator's work.
    """
    kinds = {"P": "R", "R": "P"}
    return tuple(
        AxisLayout(kinds[part.kind]) if part.kind == "P" or (part.kind == "R" and cut) else part
        for part, cut in zip(read, cuts, strict=True)
    )


@functools.cache
def gradient_as_written(written: Layout) -> Layout:
    """Layout in which an operator's backward reads a result's gradient: replicated where that is a partial sum."""
    return tuple(AxisLayout("R") if part.kind == "P" else part for part in written)


@functools.cache
def gradient_at_rest(value: Layout, gradient: Layout) -> Layout:
    """Layout in which gradients of a tensor are summed between operators: pieces as large as those of the value."""
    return tuple(
        g if g == v or (g.kind == "P" and v.kind == "R") else (AxisLayout("R") if v.kind == "P" else v)
        for v, g in zip(value, gradient, strict=True)
    )


@dataclass(frozen=True)
class RankMesh:
    """The mesh of a group of ranks, as one of them sees it.

    Attributes:
        sizes: ranks along each axis.
        place: the rank's place in the group (row-major).
        lines: for each axis the ranks that differ in that coordinate only.
    """

    sizes: tuple[int, ...] = ()
    place: int = 0
    lines: tuple[RankGroup, ...] = ()

    @property
    def axes(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The rank's coordinates."""
        coordinates, left = [], self.place
        for size in reversed(self.sizes):
            left, at = divmod(left, size)
            coordinates.append(at)
        return tuple(reversed(coordinates))


def _sizes(size: int, count: int) -> list[int]:
    """Sizes of the pieces of a dimension, or of one run of it."""
    each = -(-size // count)
    return [max(0, min(each, size - at * each)) for at in range(count)]


def local_shape(shape: Sequence[int], layout: Layout, mesh: RankMesh) -> tuple[int, ...]:
    """Shape of a rank's piece of a tensor."""
    sizes = list(shape)
    for part, count, at in zip(layout, mesh.sizes, mesh.coordinates, strict=True):
        if part.kind == "S":
            sizes[part.dim] = part.runs * _sizes(sizes[part.dim] // part.runs, count)[at]
    return tuple(sizes)


def piece_start(shape: Sequence[int], layout: Layout, mesh: RankMesh, dim: int) -> int:
    """The first index of a rank's piece along a dimension that is cut in one run."""
    start, size = 0, shape[dim]
    for part, count, at in zip(layout, mesh.sizes, mesh.coordinates, strict=True):
        if part.kind == "S" and part.dim == dim:
            sizes = _sizes(size, count)
            start, size = start + sum(sizes[:at]), sizes[at]
    return start


def _cut(x: torch.Tensor, part: AxisLayout, count: int, at: int) -> torch.Tensor:
    runs = x.chunk(part.runs, part.dim) if part.runs > 1 else [x]
    sizes = _sizes(x.shape[part.dim] // part.runs, count)
    pieces = [run.narrow(part.dim, sum(sizes[:at]), sizes[at]) for run in runs]
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]


def _gather(x: torch.Tensor, part: AxisLayout, size: int, line: RankGroup) -> torch.Tensor:
    """Gather all pieces along a mesh axis; `size` is the size of the dimension afterwards."""
    sizes = [part.runs * n for n in _sizes(size // part.runs, line.size)]
    longest = max(sizes)
    if x.shape[part.dim] < longest:
        pad = list(x.shape)
        pad[part.dim] = longest - x.shape[part.dim]
        x = torch.cat([x, x.new_zeros(pad)], part.dim)
    pieces = [piece.narrow(part.dim, 0, n) for piece, n in zip(line.gather(x), sizes, strict=True)]
    if part.runs == 1:
        return torch.cat(pieces, part.dim)
    split = [piece.chunk(part.runs, part.dim) for piece in pieces]
    return torch.cat([run[k] for k in range(part.runs) for run in split], part.dim)


def change(x: torch.Tensor, source: Layout, target: Layout, shape: Sequence[int], mesh: RankMesh) -> torch.Tensor:
    """Move a tensor to another layout: this rank's piece of it there. A collective call.

    Partial sums are added up, then dimensions that are sharded otherwise are gathered (innermost axis first), then
    sharded anew (outermost axis first).

    Args:
        x: the rank's piece.
        source: its layout.
        target: the layout wanted.
        shape: of the whole tensor.
        mesh: the group.
    """
    if source == target:
        return x
    now, given = list(source), x
    for a, (part, wanted) in enumerate(zip(source, target, strict=True)):
        if part.kind == "P" and wanted.kind != "P":
            x = x.clone(memory_format=torch.contiguous_format)
            mesh.lines[a].sum(x)
            now[a] = AxisLayout("R")
    for a in range(mesh.axes):
        if _moves_alone(now, target, a, x, mesh):
            x = _exchanged(x, now[a].dim, target[a].dim, mesh.lines[a])
            now[a] = target[a]
    outermost = {p.dim: a for a, p in reversed(list(enumerate(now))) if p.kind == "S" and p != target[a]}
    for a in reversed(range(mesh.axes)):
        part = now[a]
        if part.kind == "S" and a >= outermost.get(part.dim, mesh.axes):
            now[a] = AxisLayout("R")
            size = local_shape(shape, tuple(now), mesh)[part.dim]
            x = _gather(x, part, size, mesh.lines[a])
    for a, wanted in enumerate(target):
        if wanted.kind == "S" and now[a].kind == "R":
            inner = [k for k in range(a + 1, mesh.axes) if now[k].kind == "S" and now[k].dim == wanted.dim]
            if inner:
                raise PlanError("an inner axis is cut before an outer one", where="shardings", hint="plan again")
            piece = _cut(x, wanted, mesh.sizes[a], mesh.coordinates[a])
            # A view would hold all of what was gathered or added up; of a tensor that is there anyway it costs nothing.
            x = piece if x is given else piece.clone(memory_format=torch.contiguous_format)
        elif wanted.kind == "P" and now[a].kind == "R" and mesh.coordinates[a]:
            x = torch.zeros_like(x)
        now[a] = wanted
    return x


def _moves_alone(now: Sequence[AxisLayout], target: Layout, axis: int, x: torch.Tensor, mesh: RankMesh) -> bool:
    """Whether an axis cuts another dimension than before into equal pieces, and no other axis cuts either of them."""
    before, after = now[axis], target[axis]
    if before.kind != "S" or after.kind != "S" or before.dim == after.dim or before.runs * after.runs != 1:
        return False
    others = {part.dim for layout in (now, target) for k, part in enumerate(layout) if part.kind == "S" and k != axis}
    sizes = [mesh.sizes[axis] * x.shape[before.dim], x.shape[after.dim]]
    return others.isdisjoint((before.dim, after.dim)) and all(size % mesh.sizes[axis] == 0 for size in sizes)


def _exchanged(x: torch.Tensor, before: int, after: int, line: RankGroup) -> torch.Tensor:
    """Move a tensor that is cut along one dimension to one that is cut along another, each rank a piece to each."""
    shape = list(x.shape)
    shape[after] //= line.size
    pieces = x.reshape(line.size, *shape) if after == 0 else torch.stack(x.chunk(line.size, after))
    received = line.exchange(pieces)
    return received.flatten(0, 1) if before == 0 else torch.cat(received.unbind(), before)


class _Change(torch.autograd.Function):  # type: ignore[misc]
    """Moves a tensor to another layout in the forward, and its gradient in the backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor, there: tuple[Layout, Layout], back: tuple[Layout, Layout],
        shape: tuple[int, ...], mesh: RankMesh,
    ) -> torch.Tensor:  # fmt: skip
        ctx.back, ctx.shape, ctx.mesh = back, shape, mesh
        y = change(x, *there, shape, mesh)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        return change(gradient, ctx.back[0], ctx.back[1], ctx.shape, ctx.mesh), None, None, None, None


def relaid(
    x: torch.Tensor, there: tuple[Layout, Layout], back: tuple[Layout, Layout], shape: Sequence[int], mesh: RankMesh
) -> torch.Tensor:
    """Move a tensor to another layout such that its gradient moves back in the backward.

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

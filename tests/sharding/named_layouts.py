"""The least layout of a program over named tensors by looking at every map: what the solver is held against."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from planner.errors import InfeasibleError
from planner.sharding.named_layout import LayoutAnswer, NamedProgram, peak_bytes


def brute_force_layout(
    program: NamedProgram, mesh: Mapping[str, int], *, unsplittable: Collection[str] = ()
) -> LayoutAnswer:
    """The layout of least peak, of those the one that splits most, ties to earlier names; (axes + 1) ** dims."""
    dims, tensors = program.dims(), {t.name: t for t in program.tensors}
    groups = [set(t.dims) for t in program.tensors]
    groups += [{d for n in (*op.inputs, *op.outputs) for d in tensors[n].dims} for op in program.operations]
    fixed = {*unsplittable, *(d for op in program.operations for d in op.unsplittable)}
    best: tuple[tuple[float, int, int], dict[str, str]] | None = None
    order = {key: k + 1 for k, key in enumerate(sorted((d, m) for d in dims for m in mesh))}
    for where in itertools.product([None, *mesh], repeat=len(dims)):
        a = {d: m for d, m in zip(dims, where, strict=True) if m is not None}
        legal = all(len({a[d] for d in g if d in a}) == sum(d in a for d in g) for g in groups)
        sizes = [(d, n) for t in program.tensors for d, n in zip(t.dims, t.sizes, strict=True)]
        if not legal or any(d in a and (n % mesh[a[d]] or d in fixed) for d, n in sizes):
            continue
        key = (peak_bytes(program, mesh, a), -len(a), sum(order[item] for item in a.items()))
        if best is None or key < best[0]:
            best = key, a
    if best is None:
        raise InfeasibleError("no layout satisfies the rules", hint="allow more dimensions to split")
    return LayoutAnswer(best[1], best[0][0])

"""Why an axis cannot cut a dimension of an operator, in words."""

from __future__ import annotations

from collections.abc import Sequence

from planner.operators import DimKind, OpCall, OpSpec, rule_of
from planner.sharding.choices import Local, Options, choices, divides, evenly_or_alone
from planner.sharding.equal_parts import named_nests
from planner.sharding.mesh import Mesh


def split_refusals(call: OpCall, spec: OpSpec, ranks: int, options: Options | None = None) -> dict[str, str]:
    """By dimension of an operator's loop nests, why one axis of that many ranks cannot cut it; others are left out."""
    chosen, local = options or Options(), Local(named_nests(call, spec))
    offered = {c.name for c in choices(call, spec, local, ranks, chosen)}
    found = {}
    for dim in {d.name: d for nest in local.nests for d in nest.dims}.values():
        if dim.name not in offered and dim.size > 1:
            found[dim.name] = (
                f"{dim.name} of {dim.size} {_why(call, local, dim.name, dim.size, dim.kind, ranks, chosen)}"
            )
    return found


def _why(call: OpCall, local: Local, name: str, size: int, kind: DimKind, ranks: int, options: Options) -> str:
    if kind is DimKind.WHOLE:
        return "is never cut"
    if name in rule_of(call.op).uncut:
        return "would repeat most of the work on every rank"
    if kind is DimKind.COUPLED and rule_of(call.op).statistics is None:
        return "has points that depend on each other, and no exchange is known that would part them"
    if kind is DimKind.COUPLED and not options.coupled:
        return "has points that depend on each other, and exchanges of statistics are switched off"
    if size % ranks == 0:
        return "leads operands that cannot be cut so"
    if kind is DimKind.COUPLED:
        return f"does not divide by {ranks}, and statistics over padding would be wrong"
    if not divides(size, ranks, padded=True):
        return f"does not divide by {ranks}, and padding would leave a rank empty"
    if not evenly_or_alone(local, name, ranks):
        return f"does not divide by {ranks}, and is a factor of a tensor dimension, which padding would tear apart"
    return f"does not divide by {ranks}; padding is switched off and would cost {padding_text(size, ranks)} more work"


def padding_text(size: int, ranks: int) -> str:
    """How much longer an uneven cut takes than an even one would, as a percentage."""
    return f"{(-(-size // ranks) * ranks / size - 1):.2%}"


def refusals_on(call: OpCall, spec: OpSpec, mesh: Mesh, options: Options | None = None) -> Sequence[str]:
    """The same for every axis of a mesh, as sentences."""
    return [
        f"axis {axis.name!r}: {why}"
        for axis in mesh.axes
        if axis.size > 1
        for why in split_refusals(call, spec, axis.size, options).values()
    ]

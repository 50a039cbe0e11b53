"""Loop nests of operators that cut a tensor into equal parts or join equal parts, the parts named.

A fused query-key-value projection is followed by a `Split` into thirds. Written with the parts as a dimension of its
own, `b s (part d) -> b s d, b s d, b s d`, the nest says that d may be cut if the input is cut in an interleaved way.
"""

from __future__ import annotations

from planner.operators import DimKind, LoopNest, OpCall, OpSpec, loop_nest
from planner.operators.nest import dim_names


def named_nests(call: OpCall, spec: OpSpec) -> tuple[LoopNest, ...]:
    """The nests of an operator, those of `Split` and `Concat` with equal parts rewritten as above."""
    if call.op not in ("Split", "Concat"):
        return spec.nests
    whole, parts = (call.inputs, call.outputs) if call.op == "Split" else (call.outputs, call.inputs)
    present = [(k, t.shape) for k, t in enumerate(parts) if t is not None]
    big = whole[0]
    if big is None or len(present) < 2 or len({shape for _, shape in present}) > 1 or not big.shape:
        return spec.nests
    rank = len(big.shape)
    axis = call.attributes.get("axis", 0)
    place = (int(axis) if isinstance(axis, int) else 0) % rank
    small = present[0][1]
    if len(small) != rank or small[place] * len(parts) != big.shape[place] or len(present) != len(parts):
        return spec.nests
    names = dim_names("d", rank)
    joined = " ".join(f"(part {n})" if k == place else n for k, n in enumerate(names))
    pieces = ", ".join([" ".join(names)] * len(present))
    text, reads, writes = f"{joined} -> {pieces}", [(0, big.shape)], present
    if call.op == "Concat":
        text, reads, writes = f"{pieces} -> {joined}", present, [(0, big.shape)]
    sizes = {"part": len(parts), names[place]: small[place]}
    old = spec.nests[0] if spec.nests else None
    vector = old.vector_flops if old is not None else 0.0
    return (loop_nest(text, reads, writes, sizes=sizes, kinds={"part": DimKind.WHOLE}, vector_flops=vector),)

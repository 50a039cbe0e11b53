"""Mixtures of experts in one operator: each row goes through k of E two- or three-matrix networks.

Matrix work: `2 rows k w` for the w weights of one expert; each of the two gradients takes the same again. Only the
experts that some row chooses are read, at most `rows k` of them.
"""

from __future__ import annotations

import math

from planner.graph import TensorKind
from planner.operators.assemble import elements_like, gradient_traffic, keep_extra, keep_inputs, streaming, traffic
from planner.operators.entry import JointCut, OpCall, Role, Rule, as_first
from planner.operators.nest import dim_names
from planner.operators.types import LoopNest, OpSpec
from planner.sums import float_sum

_MATRICES, _SECOND_BIAS = (2, 4, 6), 5
"""Positions of the experts' matrices, first to third, and of the bias of the second."""


def _nests(call: OpCall, weights: tuple[int, ...], matrix_flops: float, vector_flops: float) -> tuple[LoopNest, ...]:
    """Rows are parallel; experts split into partial sums, each rank adding what its own experts contribute.

    Where the inner width can be read off the shapes it may be cut too: both products, nothing in between being summed.
    The second bias is added once, in a nest of its own.
    """
    rank = len(call.input(0).shape)
    rows = dim_names("m", rank - 1)
    flat = " ".join(rows) if len(call.input(1).shape) == rank else f"({' '.join(rows)})"
    inner = _inner_terms(call, weights)
    own_terms = {p: term for p in _of_experts(call) if (term := _own_terms(call, p, inner)) is not None}
    given = "".join(f", ?{p}:{term}" for p, term in own_terms.items())
    widths = " ".join(f"w{p}_{k}" for p in own_terms for k in range(len(call.input(p).shape) - 1))
    nest = call.nest(
        f"m.. h, {flat} e{given} -> m.. h",
        sizes={"half": 2},
        reduced="e f",
        whole=f"h half {widths}",
        matrix_flops=matrix_flops,
        vector_flops=vector_flops,
    )
    if not (inner and call.has(_SECOND_BIAS)):
        return (nest,)
    return nest, call.nest(f"{_SECOND_BIAS}:e h -> m.. h", reduced="e", whole="h")


def _of_experts(call: OpCall) -> list[int]:
    """Positions of everything that is stored once an expert: matrices, biases, scales."""
    experts = call.input(1).shape[-1]
    given = [p for p in range(2, len(call.inputs)) if call.has(p)]
    return [p for p in given if call.input(p).shape[:1] == (experts,) and len(call.input(p).shape) > 1]


def _inner_terms(call: OpCall, weights: tuple[int, ...]) -> dict[int, str]:
    """Terms of plain matrices and biases with the inner width as `f`; empty where shapes leave it open.

    The first matrix is stored `[e f h]`, in older models `[e h f]`, the second the other way round; a gate fused into
    the first lies beside it (`half f`) or alternates with it (`f half`).
    """
    hidden, first, second = call.input(0).shape[-1], call.input(weights[0]).shape[1:], call.input(weights[1]).shape[1:]
    if len(first) != 2 or len(second) != 2:
        return {}
    turned = first[1] != hidden
    wide, width = (first[1], second[0]) if turned else (first[0], second[1])
    expected = ((hidden, wide), (width, hidden)) if turned else ((wide, hidden), (hidden, width))
    if (first, second) != expected or wide not in (width, 2 * width):
        return {}
    beside = call.int_attribute("swiglu_fusion", 0) == 2
    fused = "f" if wide == width else "(half f)" if beside else "(f half)"
    terms = {weights[0]: f"e h {fused}" if turned else f"e {fused} h", weights[1]: "e f h" if turned else "e h f"}
    terms |= {3: f"e {fused}", _SECOND_BIAS: "e h"}
    if len(weights) > 2:
        terms |= {weights[2]: "e h f" if turned else "e f h", 7: "e f"}
    return terms


def _own_terms(call: OpCall, position: int, inner: dict[int, str]) -> str | None:
    """Dimensions of something stored once an expert; None for what has a nest of its own."""
    if inner:
        return None if position == _SECOND_BIAS else inner.get(position)
    return " ".join(["e", *dim_names(f"w{position}_", len(call.input(position).shape) - 1)])


def _weight(call: OpCall, position: int) -> bool:
    return call.need(position) and call.input(position).kind is TensorKind.PARAMETER


@Rule(
    infer=as_first,
    weights={**dict.fromkeys(_MATRICES, Role.MATRIX), **dict.fromkeys((3, 5, 7), Role.BIAS)},
    ranks={0: (2, 3), 1: (2,), 2: (3,), 4: (3,), 6: (3,)},
    heavy=True,
    joint=JointCut.EXPERTS,
).of("com.microsoft.MoE")
def experts(call: OpCall) -> OpSpec:
    """Rows, router's scores, then matrix and bias of the first, second and (gated networks) third layer."""
    x, router = call.input(0), call.input(1)
    second = call.input(_MATRICES[1])
    weights = tuple(p for p in _MATRICES if call.has(p))
    rows, hidden = math.prod(x.shape[:-1]), x.shape[-1]
    experts = router.shape[-1]
    chosen = min(call.int_attribute("k", 1), experts)
    stored = sum(call.input(p).elements for p in weights)
    work = 2.0 * rows * chosen * stored / max(1, experts)
    inner = second.elements / max(1, experts * hidden)
    widths = stored / max(1, experts * hidden) - inner
    touched = min(1.0, rows * chosen / max(1, experts))
    forward = traffic(x, router, call.output())
    for position in _of_experts(call):
        tensor = call.input(position)
        forward += elements_like(tensor, tensor.elements * touched)
    forward += elements_like(x, 2.0 * rows * chosen * (hidden + widths + inner))
    # rows gathered by expert, what goes into the activation, what comes out of it
    saved = (*keep_inputs(call, 0, 1), keep_extra(0, rows * chosen * (hidden + widths + inner), x))
    weighted = float_sum(
        2.0 * rows * chosen * call.input(p).elements / max(1, experts) for p in weights if _weight(call, p)
    )
    return streaming(
        call,
        _nests(call, weights, work, 10.0 * rows * chosen * inner),
        saved=saved,
        forward=forward,
        backward=gradient_traffic(call, saved) + forward,
        kernels=3 + len(weights),
        backward_kernels=3 + 2 * len(weights),
        backward_flops=15.0 * rows * chosen * inner,
        input_grad=work,
        weight_grad=weighted,
    )

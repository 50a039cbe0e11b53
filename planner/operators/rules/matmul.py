"""Matrix products. Work: 2 per multiply-add, as torch's flop counter counts `mm`, `addmm` and `bmm`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from planner.errors import ModelError
from planner.graph import TensorKind
from planner.operators.assemble import contraction, keep_extra, keep_inputs, keep_outputs, streaming, traffic
from planner.operators.entry import TWO_MATRICES, WEIGHT_AND_BIAS, OpCall, Role, Rule, Shaped, like
from planner.operators.nest import dim_names, loop_nest, result_shapes
from planner.operators.types import DimKind, LoopNest, OpSpec, Saved
from planner.sums import float_sum


def _flag(call: OpCall, name: str) -> bool:
    return bool(call.int_attribute(name, 0))


def _operand(rank: int, batch: list[str], row: str, column: str, transposed: bool) -> str:
    """Dimensions of a matrix operand whose batch dimensions align with the result's from the right."""
    if rank == 1:
        return column if row == "m" else row
    pair = [column, row] if transposed else [row, column]
    return " ".join([*batch[len(batch) - (rank - 2) :], *pair])


def product_line(call: OpCall, a: int, b: int, *, transposed_a: bool = False, transposed_b: bool = False) -> str:
    """`b m k, b k n -> b m n` over any batch dimensions, broadcast as numpy does."""
    rank_a, rank_b = len(call.input(a).shape), len(call.input(b).shape)
    batch = dim_names("b", max(rank_a, rank_b, 2) - 2)
    left = _operand(rank_a, batch, "m", "k", transposed_a)
    right = _operand(rank_b, batch, "k", "n", transposed_b)
    out = [*batch, *(["m"] if rank_a > 1 else []), *(["n"] if rank_b > 1 else [])]
    return f"{left}, {right} -> {' '.join(out)}"


def product_nest(call: OpCall, a: int, b: int) -> LoopNest:
    """The product of two operands."""
    left, right = product_line(call, a, b).split(",")
    return call.nest(f"{a}:{left}, {b}:{right}", contraction=True)


@Rule(weights=TWO_MATRICES, heavy=True).of("MatMul")
def matmul(call: OpCall) -> OpSpec:
    """Batched matrix product."""
    return contraction(call, product_nest(call, 0, 1))


def _fused_line(call: OpCall) -> str:
    """A product's line, its operands transposed on demand."""
    if _flag(call, "transBatchA") or _flag(call, "transBatchB"):
        return _batch_transposed_line(call)
    return product_line(call, 0, 1, transposed_a=_flag(call, "transA"), transposed_b=_flag(call, "transB"))


def _results(call: OpCall, line: Callable[[OpCall], str]) -> list[Shaped | None]:
    """The result that a line says of the first two inputs."""
    return [like(call.input(0), result_shapes(line(call), [call.input(p).shape for p in (0, 1)])[0])]


_fused_results = partial(_results, line=_fused_line)


@Rule(infer=_fused_results, weights=TWO_MATRICES, heavy=True).of(
    "com.microsoft.FusedMatMul", "com.microsoft.TransposeMatMul"
)
def fused_matmul(call: OpCall) -> OpSpec:
    """Batched matrix product of operands that may be transposed, scaled by a constant."""
    return contraction(call, call.nest(_fused_line(call), contraction=True))


def _batch_transposed_line(call: OpCall) -> str:
    """Operands stored as `m b k`: the batch dimensions stand behind the first matrix dimension."""
    batch = dim_names("b", len(call.input(0).shape) - 2)

    def operand(row: str, column: str, swap: bool, moved: bool) -> str:
        first, last = (column, row) if swap else (row, column)
        return " ".join([first, *batch, last] if moved else [*batch, first, last])

    left = operand("m", "k", _flag(call, "transA"), _flag(call, "transBatchA"))
    right = operand("k", "n", _flag(call, "transB"), _flag(call, "transBatchB"))
    return f"{left}, {right} -> {' '.join([*batch, 'm', 'n'])}"


@Rule(weights={0: Role.MATRIX, 1: Role.MATRIX, 2: Role.BIAS}, heavy=True).of("Gemm")
def gemm(call: OpCall) -> OpSpec:
    """`alpha * A' B' + beta * C`; the bias is added in the same kernel."""
    nest = call.nest(_gemm_line(call), contraction=True)
    return contraction(call, nest, bias=bias_nest(call, 2, "m n"))


def _gemm_line(call: OpCall) -> str:
    left = "k m" if _flag(call, "transA") else "m k"
    right = "n k" if _flag(call, "transB") else "k n"
    return f"{left}, {right} -> m n"


def bias_nest(call: OpCall, position: int, result: str) -> LoopNest | None:
    """Adds an operand, aligned with the result's dimensions from the right, to the result; None without one."""
    if not call.has(position):
        return None
    names = result.split()
    last = " ".join(names[len(names) - len(call.input(position).shape) :])
    return call.nest(f"{position}:{last} -> {result}", vector_flops=float(call.output().elements))


@Rule(infer=partial(_results, line=_gemm_line), weights=WEIGHT_AND_BIAS, ranks={0: (2,), 1: (2,)}, heavy=True).of(
    "com.microsoft.FusedGemm"
)
@Rule(infer=partial(_results, line=partial(product_line, a=0, b=1)), weights=WEIGHT_AND_BIAS, heavy=True).of(
    "com.microsoft.GemmFastGelu"
)
def fused_gemm(call: OpCall) -> OpSpec:
    """A product with bias and activation in one kernel; the activation keeps the result."""
    if call.op.endswith("GemmFastGelu"):
        nest = call.nest("m.. k, k n -> m.. n", contraction=True)
        names = dim_names("m", len(call.input(0).shape) - 1)
        base = contraction(call, nest, bias=bias_nest(call, 2, " ".join([*names, "n"])))
    else:
        base = gemm(call)
    return replace(base, saved=(*base.saved, *keep_outputs(0))) if call.trains else base


@Rule(ports=(), weights=TWO_MATRICES, heavy=True, quantised=True).of("MatMulInteger")
def matmul_integer(call: OpCall) -> OpSpec:
    """Product of 8-bit matrices; an inference operator, no gradient passes."""
    return contraction(call, product_nest(call, 0, 1))


def rounded(nest: LoopNest) -> LoopNest:
    """The same nest with its reduced dimensions coupled."""
    coupled = tuple(replace(d, kind=DimKind.COUPLED) if d.kind is DimKind.REDUCED else d for d in nest.dims)
    return replace(nest, dims=coupled)


@Rule(ports=(), weights={3: Role.MATRIX, 4: Role.QUANTIZATION}, heavy=True, quantised=True).of("QLinearMatMul")
def qlinear_matmul(call: OpCall) -> OpSpec:
    """Product of quantised matrices with scales and zero points; no gradient passes.

    The result is rounded again, so partial sums of it do not add up.
    """
    return contraction(call, rounded(product_nest(call, 0, 3)))


def _packed_results(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    return [like(x, (*x.shape[:-1], call.int_attribute("N", 0)))]


@Rule(
    ports=(0,),
    infer=_packed_results,
    weights={1: Role.MATRIX, 2: Role.QUANTIZATION, 3: Role.QUANTIZATION, 5: Role.BIAS},
    heavy=True,
    quantised=True,
).of("com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4")
def matmul_nbits(call: OpCall) -> OpSpec:
    """Product with a weight packed to a few bits; only the activation has a gradient.

    The packed operand's shape says nothing of the product: K and N are attributes.
    """
    k, n = call.int_attribute("K", 0), call.int_attribute("N", 0)
    x = call.input(0)
    if k <= 0 or n <= 0 or not x.shape or x.shape[-1] != k:
        raise ModelError(
            f"{call.op} with K={k}, N={n} does not fit an input of shape {list(x.shape)}", where=call.where
        )
    rows = " ".join(dim_names("m", len(x.shape) - 1))
    operands = [(0, x.shape), (1, (n, k))]
    nest = loop_nest(f"{rows} k, n k -> {rows} n", operands, [(0, call.output().shape)], contraction=True)
    backward = traffic(x, call.output(), call.input(1))
    extra = {"dequantised_elements": float(n * k)}
    return streaming(call, nest, backward=backward, input_grad=nest.matrix_flops, extra=extra)


def _labels(call: OpCall) -> tuple[list[list[str]], list[str]]:
    """Labels of an Einsum's operands and result, an ellipsis spelled out."""
    equation = call.str_attribute("equation", "").replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    spare = 0
    for position, term in enumerate(terms):
        if "..." in term:
            spare = max(spare, len(call.input(position).shape) - len(term.replace("...", "")))

    def spell(term: str, width: int) -> list[str]:
        before, dots, after = term.partition("...")
        middle = dim_names("dots", spare)[spare - width :] if dots else []
        return [*before, *middle, *after]

    operands = [
        spell(term, len(call.input(position).shape) - len(term.replace("...", "")))
        for position, term in enumerate(terms)
    ]
    if "->" in equation:
        return operands, spell(right, spare)
    flat = [label for labels in operands for label in labels if not label.startswith("dots")]
    return operands, [*dim_names("dots", spare), *sorted(label for label in set(flat) if flat.count(label) == 1)]


def _pairwise_flops(operands: list[list[str]], result: list[str], sizes: dict[str, int]) -> list[float]:
    """Matrix work of contracting from left to right, by operand after the first.

    A label is summed as soon as nobody else needs it.
    """
    work = []
    have = set(operands[0])
    for index, labels in enumerate(operands[1:], start=1):
        later = set(result).union(*operands[index + 1 :])
        other = set(labels)
        summed = (have & other) - later
        have_only, other_only = have - other - later, other - have - later
        joined = (have - have_only) | (other - other_only)
        work.append(2.0 * math.prod(sizes[label] for label in joined) if summed else 0.0)
        have = joined - summed
    return work


def _gradients_of_einsum(call: OpCall, work: list[float]) -> tuple[float, float]:
    """Matrix work of the gradients of activations and of parameters, each pairwise product's two by its own work."""
    towards = [0.0, 0.0]
    for position, flops in enumerate(work, start=1):
        made_before = any(call.need(p) for p in range(position))
        for operand, needed in ((position, call.need(position)), (position - 1, made_before)):
            stored = operand in (0, position) and call.input(operand).kind is TensorKind.PARAMETER
            towards[stored] += flops * needed
    return towards[0], towards[1]


def _kept_of_einsum(call: OpCall, operands: list[list[str]], result: list[str]) -> tuple[Saved, ...]:
    """The operands of a product of two, as a batched product reads them.

    Labels of one operand alone that the result has become one dimension; where a label of both lies between them, that
    takes a copy, and the copy is kept.
    """
    kept: list[Saved] = []
    for p, labels in enumerate(operands):
        other = operands[1 - p]
        if not call.need(1 - p):
            continue
        free = [k for k, label in enumerate(labels) if label in result and label not in other]
        between = labels[free[0] : free[-1]] if free else []
        if any(label in other and label in result for label in between):
            kept.append(keep_extra(p, call.input(p).elements, call.input(p)))
        else:
            kept.extend(keep_inputs(call, p))
    return tuple(kept)


@Rule(weights=dict.fromkeys(range(8), Role.MATRIX), heavy=True).of("Einsum")
def einsum(call: OpCall) -> OpSpec:
    """Any product of tensors over labels; a label of two operands that is summed makes it matrix work."""
    operands, result = _labels(call)
    text = f"{', '.join(' '.join(labels) for labels in operands)} -> {' '.join(result)}"
    shape_of = [dict(zip(labels, call.input(p).shape, strict=False)) for p, labels in enumerate(operands)]
    sizes = {label: max(s.get(label, 1) for s in shape_of) for labels in operands for label in labels}
    whole = " ".join(label for labels in (*operands, result) for label in labels if labels.count(label) > 1)
    work = _pairwise_flops(operands, result, sizes)
    if any(work):
        kept = _kept_of_einsum(call, operands, result) if len(operands) == 2 else None
        nest = call.nest(text, whole=whole, matrix_flops=float_sum(work), sizes=sizes)
        base = contraction(call, nest, saved=kept, kernels=len(work))
        towards_inputs, towards_weights = _gradients_of_einsum(call, work)
        return replace(base, input_grad_matrix_flops=towards_inputs, weight_grad_matrix_flops=towards_weights)
    others = {p for p in range(len(operands)) for q in range(len(operands)) if q != p and call.need(q)}
    volume = float(math.prod(sizes.values()))
    nest = call.nest(text, whole=whole, vector_flops=volume, sizes=sizes)
    return streaming(call, nest, saved=keep_inputs(call, *others), backward_flops=volume * sum(call.needs))

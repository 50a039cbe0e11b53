"""Matrix products. Work: 2 per multiply-add, as torch's flop counter counts `mm`, `addmm` and `bmm`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from planner.errors import ModelError
from planner.operators.assemble import contraction, keep_extra, keep_inputs, keep_outputs, streaming, traffic
from planner.operators.nest import dim_names, loop_nest, result_shapes
from planner.operators.site import TWO_MATRICES, WEIGHT_AND_BIAS, Role, Rule, Shaped, Site, like
from planner.operators.types import DimKind, LoopNest, OpSpec, Saved


def _flag(site: Site, name: str) -> bool:
    return bool(site.int_attribute(name, 0))


def _operand(rank: int, batch: list[str], row: str, column: str, transposed: bool) -> str:
    """Dimensions of a matrix operand whose batch dimensions align with the result's from the right."""
    if rank == 1:
        return column if row == "m" else row
    pair = [column, row] if transposed else [row, column]
    return " ".join([*batch[len(batch) - (rank - 2) :], *pair])


def product_line(site: Site, a: int, b: int, *, transposed_a: bool = False, transposed_b: bool = False) -> str:
    """`b m k, b k n -> b m n` over any batch dimensions, broadcast as numpy does."""
    rank_a, rank_b = len(site.input(a).shape), len(site.input(b).shape)
    batch = dim_names("b", max(rank_a, rank_b, 2) - 2)
    left = _operand(rank_a, batch, "m", "k", transposed_a)
    right = _operand(rank_b, batch, "k", "n", transposed_b)
    out = [*batch, *(["m"] if rank_a > 1 else []), *(["n"] if rank_b > 1 else [])]
    return f"{left}, {right} -> {' '.join(out)}"


def product_nest(site: Site, a: int, b: int) -> LoopNest:
    """The product of two operands."""
    left, right = product_line(site, a, b).split(",")
    return site.nest(f"{a}:{left}, {b}:{right}", contraction=True)


@Rule(weights=TWO_MATRICES, heavy=True).of("MatMul")
def matmul(site: Site) -> OpSpec:
    """Batched matrix product."""
    return contraction(site, product_nest(site, 0, 1))


def _fused_line(site: Site) -> str:
    """A product's line, its operands transposed on demand."""
    if _flag(site, "transBatchA") or _flag(site, "transBatchB"):
        return _batch_transposed_line(site)
    return product_line(site, 0, 1, transposed_a=_flag(site, "transA"), transposed_b=_flag(site, "transB"))


def _results(site: Site, line: Callable[[Site], str]) -> list[Shaped | None]:
    """The result that a line says of the first two inputs."""
    return [like(site.input(0), result_shapes(line(site), [site.input(p).shape for p in (0, 1)])[0])]


_fused_results = partial(_results, line=_fused_line)


@Rule(infer=_fused_results, weights=TWO_MATRICES, heavy=True).of(
    "com.microsoft.FusedMatMul", "com.microsoft.TransposeMatMul"
)
def fused_matmul(site: Site) -> OpSpec:
    """Batched matrix product of operands that may be transposed, scaled by a constant."""
    return contraction(site, site.nest(_fused_line(site), contraction=True))


def _batch_transposed_line(site: Site) -> str:
    """Operands stored as `m b k`: the batch dimensions stand behind the first matrix dimension."""
    batch = dim_names("b", len(site.input(0).shape) - 2)

    def operand(row: str, column: str, swap: bool, moved: bool) -> str:
        first, last = (column, row) if swap else (row, column)
        return " ".join([first, *batch, last] if moved else [*batch, first, last])

    left = operand("m", "k", _flag(site, "transA"), _flag(site, "transBatchA"))
    right = operand("k", "n", _flag(site, "transB"), _flag(site, "transBatchB"))
    return f"{left}, {right} -> {' '.join([*batch, 'm', 'n'])}"


@Rule(weights={0: Role.MATRIX, 1: Role.MATRIX, 2: Role.BIAS}, heavy=True).of("Gemm")
def gemm(site: Site) -> OpSpec:
    """`alpha * A' B' + beta * C`; the bias is added in the same kernel."""
    nest = site.nest(_gemm_line(site), contraction=True)
    return contraction(site, nest, bias=bias_nest(site, 2, "m n"))


def _gemm_line(site: Site) -> str:
    left = "k m" if _flag(site, "transA") else "m k"
    right = "n k" if _flag(site, "transB") else "k n"
    return f"{left}, {right} -> m n"


def _plain_line(site: Site) -> str:
    return product_line(site, 0, 1)


def bias_nest(site: Site, position: int, result: str) -> LoopNest | None:
    """Adds an operand, aligned with the result's dimensions from the right, to the result; None without one."""
    if not site.has(position):
        return None
    names = result.split()
    last = " ".join(names[len(names) - len(site.input(position).shape) :])
    return site.nest(f"{position}:{last} -> {result}", vector_flops=float(site.output().elements))


@Rule(infer=partial(_results, line=_gemm_line), weights=WEIGHT_AND_BIAS, ranks={0: (2,), 1: (2,)}, heavy=True).of(
    "com.microsoft.FusedGemm"
)
@Rule(infer=partial(_results, line=_plain_line), weights=WEIGHT_AND_BIAS, heavy=True).of("com.microsoft.GemmFastGelu")
def fused_gemm(site: Site) -> OpSpec:
    """A product with bias and activation in one kernel; the activation keeps the result."""
    if site.call.op.endswith("GemmFastGelu"):
        nest = site.nest("m.. k, k n -> m.. n", contraction=True)
        names = dim_names("m", len(site.input(0).shape) - 1)
        base = contraction(site, nest, bias=bias_nest(site, 2, " ".join([*names, "n"])))
    else:
        base = gemm(site)
    return replace(base, saved=(*base.saved, *keep_outputs(0))) if site.trains else base


@Rule(ports=(), weights=TWO_MATRICES, heavy=True, quantised=True).of("MatMulInteger")
def matmul_integer(site: Site) -> OpSpec:
    """Product of 8-bit matrices; an inference operator, no gradient passes."""
    return contraction(site, product_nest(site, 0, 1))


def rounded(nest: LoopNest) -> LoopNest:
    """The same nest with its reduced dimensions coupled."""
    coupled = tuple(replace(d, kind=DimKind.COUPLED) if d.kind is DimKind.REDUCED else d for d in nest.dims)
    return replace(nest, dims=coupled)


@Rule(ports=(), weights={3: Role.MATRIX, 4: Role.QUANTIZATION}, heavy=True, quantised=True).of("QLinearMatMul")
def qlinear_matmul(site: Site) -> OpSpec:
    """Product of quantised matrices with scales and zero points; no gradient passes.

    The result is rounded again, so partial sums of it do not add up.
    """
    return contraction(site, rounded(product_nest(site, 0, 3)))


def _packed_results(site: Site) -> list[Shaped | None]:
    x = site.input(0)
    return [like(x, (*x.shape[:-1], site.int_attribute("N", 0)))]


@Rule(
    ports=(0,),
    infer=_packed_results,
    weights={1: Role.MATRIX, 2: Role.QUANTIZATION, 3: Role.QUANTIZATION, 5: Role.BIAS},
    heavy=True,
    quantised=True,
).of("com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4")
def matmul_nbits(site: Site) -> OpSpec:
    """Product with a weight packed to a few bits; only the activation has a gradient.

    The packed operand's shape says nothing of the product: K and N are attributes.
    """
    k, n = site.int_attribute("K", 0), site.int_attribute("N", 0)
    x = site.input(0)
    if k <= 0 or n <= 0 or not x.shape or x.shape[-1] != k:
        raise ModelError(
            f"{site.call.op} with K={k}, N={n} does not fit an input of shape {list(x.shape)}", where=site.where
        )
    rows = " ".join(dim_names("m", len(x.shape) - 1))
    operands = [(0, x.shape), (1, (n, k))]
    nest = loop_nest(f"{rows} k, n k -> {rows} n", operands, [(0, site.output().shape)], contraction=True)
    backward = traffic(x, site.output(), site.input(1))
    extra = {"dequantised_elements": float(n * k)}
    return streaming(site, nest, backward=backward, input_grad=nest.matrix_flops, extra=extra)


def _labels(site: Site) -> tuple[list[list[str]], list[str]]:
    """Labels of an Einsum's operands and result, an ellipsis spelled out."""
    equation = site.str_attribute("equation", "").replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    spare = 0
    for position, term in enumerate(terms):
        if "..." in term:
            spare = max(spare, len(site.input(position).shape) - len(term.replace("...", "")))

    def spell(term: str, width: int) -> list[str]:
        before, dots, after = term.partition("...")
        middle = dim_names("dots", spare)[spare - width :] if dots else []
        return [*before, *middle, *after]

    operands = [
        spell(term, len(site.input(position).shape) - len(term.replace("...", "")))
        for position, term in enumerate(terms)
    ]
    if "->" in equation:
        return operands, spell(right, spare)
    flat = [label for labels in operands for label in labels if not label.startswith("dots")]
    return operands, [*dim_names("dots", spare), *sorted(label for label in set(flat) if flat.count(label) == 1)]


def _pairwise_flops(operands: list[list[str]], result: list[str], sizes: dict[str, int]) -> float:
    """Matrix work of contracting from left to right, a label summed as soon as nobody else needs it."""
    total = 0.0
    have = set(operands[0])
    for index, labels in enumerate(operands[1:], start=1):
        later = set(result).union(*operands[index + 1 :])
        other = set(labels)
        summed = (have & other) - later
        have_only, other_only = have - other - later, other - have - later
        joined = (have - have_only) | (other - other_only)
        if summed:
            flops = 2.0
            for label in joined:
                flops *= sizes[label]
            total += flops
        have = joined - summed
    return total


def _kept_of_einsum(site: Site, operands: list[list[str]], result: list[str]) -> tuple[Saved, ...]:
    """The operands of a product of two, as a batched product reads them.

    Labels of one operand alone that the result has become one dimension; where a label of both lies between them, that
    takes a copy, and the copy is kept.
    """
    kept: list[Saved] = []
    for p, labels in enumerate(operands):
        other = operands[1 - p]
        if not site.need(1 - p):
            continue
        free = [k for k, label in enumerate(labels) if label in result and label not in other]
        between = labels[free[0] : free[-1]] if free else []
        if any(label in other and label in result for label in between):
            kept.append(keep_extra(p, site.input(p).elements, site.input(p)))
        else:
            kept.extend(keep_inputs(site, p))
    return tuple(kept)


@Rule(weights=dict.fromkeys(range(8), Role.MATRIX), heavy=True).of("Einsum")
def einsum(site: Site) -> OpSpec:
    """Any product of tensors over labels; a label of two operands that is summed makes it matrix work."""
    operands, result = _labels(site)
    text = f"{', '.join(' '.join(labels) for labels in operands)} -> {' '.join(result)}"
    shape_of = [dict(zip(labels, site.input(p).shape, strict=False)) for p, labels in enumerate(operands)]
    sizes = {label: max(s.get(label, 1) for s in shape_of) for labels in operands for label in labels}
    whole = " ".join(label for labels in (*operands, result) for label in labels if labels.count(label) > 1)
    flops = _pairwise_flops(operands, result, sizes)
    if flops:
        kept = _kept_of_einsum(site, operands, result) if len(operands) == 2 else None
        nest = site.nest(text, whole=whole, matrix_flops=flops, sizes=sizes)
        return contraction(site, nest, saved=kept, kernels=max(1, len(operands) - 1))
    others = {p for p in range(len(operands)) for q in range(len(operands)) if q != p and site.need(q)}
    volume = float(math.prod(sizes.values()))
    nest = site.nest(text, whole=whole, vector_flops=volume, sizes=sizes)
    return streaming(site, nest, saved=keep_inputs(site, *others), backward_flops=volume * sum(site.needs))

"""Loop nests from one line: `"b m k, b k n -> b m n"` plus the operands' shapes.

Reads stand left of the arrow, separated by commas, writes right of it. A token describes one tensor dimension:

- `m`: indexed by the iteration dimension m; a tensor of size 1 there is broadcast;
- `1`: a dimension of size 1 that nothing iterates over;
- `(h d)`: the product of h and d, h outermost;
- `(y+r)`: a window, `y * stride + r * dilation`; r is then never split, and y carries a halo;
- `d..`: a run of dimensions d0, d1, ..., as many as the tensor has besides the others (`OpCall.nest` only).

A tensor without dimensions is written as nothing at all. A part of an operator whose result another part reads has
no writes.

A dimension that indexes the results may be cut: each part computes its share of the results from its share of the
operands that the dimension indexes and from the whole of the others. A reduced dimension may be cut too: each part
then holds a partial sum of the results. Coupled and whole dimensions may not (`planner.sharding.splits`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.errors import ModelError
from planner.operators.types import Access, Dim, DimKind, LoopNest

Operand = tuple[int, tuple[int, ...]]
"""Position among the call's inputs or outputs, and shape."""

_TOKEN = re.compile(r"\(([^()]*)\)|(\w+)")


@dataclass(frozen=True, slots=True)
class Term:
    """How one tensor dimension is indexed: no name (size 1), one, a product, or a window."""

    names: tuple[str, ...]
    window: bool = False


Terms = tuple[tuple[Term, ...], ...]
"""Of each operand, how its dimensions are indexed."""


def _terms(text: str) -> tuple[Term, ...]:
    terms = []
    for group, name in _TOKEN.findall(text):
        if group:
            window = "+" in group
            terms.append(Term(tuple(group.replace("+", " ").split()), window))
        else:
            terms.append(Term(() if name == "1" else (name,)))
    return tuple(terms)


@functools.lru_cache(maxsize=4096)
def parse(expression: str) -> tuple[Terms, Terms]:
    """Terms of a line's reads and of its writes; the same text is parsed once."""
    left, arrow, right = expression.partition("->")
    if not arrow:
        raise ValueError(f"no arrow in loop nest {expression!r}")
    return tuple(map(_terms, left.split(","))), tuple(map(_terms, right.split(",")))


def dim_names(prefix: str, count: int) -> list[str]:
    """`count` names for dimensions of which only the number is known: b0, b1, ..."""
    return [f"{prefix}{i}" for i in range(count)]


_OPERAND_TOKEN = re.compile(r"(\([^()]*\)|\w+)(\.\.)?")


@functools.lru_cache(maxsize=4096)
def spell_runs(
    operands: tuple[tuple[str, int], ...], given: tuple[tuple[str, int], ...] = ()
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Operands' terms with each run of dimensions written out, and the length of each run.

    A run is as long as the largest of its tensors says; a tensor of fewer dimensions has the last names of its runs, as
    in broadcasting.

    Args:
        operands: terms of each operand, and its number of dimensions.
        given: lengths of runs, where a tensor has several.
    """
    tokens = [(_OPERAND_TOKEN.findall(text), rank) for text, rank in operands]
    lengths, found = dict(given), True
    while found:
        spare: dict[str, int] = {}
        for terms, rank in tokens:
            unknown = [_run_name(term) for term, run in terms if run and _run_name(term) not in lengths]
            if len(unknown) == 1:
                rest = sum(lengths.get(_run_name(term), 0) if run else 1 for term, run in terms)
                spare[unknown[0]] = max(spare.get(unknown[0], 0), rank - rest)
        lengths.update(spare)
        found = bool(spare)
    return tuple(_spelled(terms, rank, lengths) for terms, rank in tokens), lengths


def _run_name(term: str) -> str:
    return str(re.findall(r"\w+", term)[0])


def _spelled(terms: Sequence[tuple[str, str]], rank: int, lengths: Mapping[str, int]) -> str:
    surplus = max(0, sum(lengths[_run_name(term)] if run else 1 for term, run in terms) - rank)
    words: list[str] = []
    for term, run in terms:
        length = lengths[_run_name(term)] if run else 0
        left_out = min(surplus, length)
        surplus -= left_out
        words += [re.sub(r"(\w+)", rf"\g<1>{i}", term) for i in range(left_out, length)] if run else [term]
    return " ".join(words)


def _bind(pairs: Iterable[tuple[Term, int]], sizes: dict[str, int]) -> None:
    """Find the size of every iteration dimension: single names first, then the one unknown factor of a product."""
    products = []
    for term, size in pairs:
        if len(term.names) == 1:
            sizes[term.names[0]] = size if sizes.get(term.names[0], 1) == 1 else sizes[term.names[0]]
        elif len(term.names) > 1 and not term.window:
            products.append((term, size))
    for term, size in products:
        unknown = [n for n in term.names if n not in sizes]
        if len(unknown) == 1:
            known = math.prod(sizes[n] for n in term.names if n in sizes)
            sizes[unknown[0]] = size // known if known else 0


def _access(
    terms: tuple[Term, ...], operand: Operand, sizes: Mapping[str, int], halos: Mapping[str, int], text: str
) -> Access:
    position, shape = operand
    if len(terms) != len(shape):
        raise ModelError(
            f"a tensor of shape {list(shape)} where {len(terms)} dimensions are expected",
            hint=f"the operator computes {text}; check the model with onnx.checker",
        )
    dims: list[tuple[str, ...]] = []
    halo = []
    for k, (term, size) in enumerate(zip(terms, shape, strict=True)):
        if term.window:
            if halos.get(term.names[0]):
                halo.append((k, halos[term.names[0]]))
            dims.append(term.names)
            continue
        extent = math.prod(sizes[n] for n in term.names)
        if size == extent:
            dims.append(tuple(n for n in term.names if sizes[n] != 1) or term.names[:1])
        elif size == 1:
            dims.append(())
        else:
            raise ModelError(
                f"dimension {k} of shape {list(shape)} should be {extent}",
                hint=f"the operator computes {text}; check the model with onnx.checker",
            )
    return Access(position, tuple(dims), tuple(halo))


def _kinds(reads: Terms, writes: Terms, given: Mapping[str, DimKind]) -> dict[str, DimKind]:
    """Kind of each dimension: in every write parallel, in none reduced, in some coupled; kernel offsets whole."""
    written = [{n for term in terms for n in term.names} for terms in writes]
    kinds: dict[str, DimKind] = {}
    for terms in (*reads, *writes):
        for term in terms:
            for i, name in enumerate(term.names):
                hits = sum(name in names for names in written)
                kind = DimKind.PARALLEL if hits == len(written) else DimKind.COUPLED if hits else DimKind.REDUCED
                kinds[name] = DimKind.WHOLE if term.window and i else kinds.get(name, kind)
    kinds.update({name: kind for name, kind in given.items() if name in kinds})
    return kinds


def loop_nest(
    text: str,
    reads: Sequence[Operand],
    writes: Sequence[Operand],
    *,
    sizes: Mapping[str, int] | None = None,
    kinds: Mapping[str, DimKind] | None = None,
    halos: Mapping[str, int] | None = None,
    contraction: bool = False,
    matrix_flops: float = 0.0,
    vector_flops: float = 0.0,
) -> LoopNest:
    """Build the loop nest that a line declares.

    Args:
        text: the line (see the module).
        reads: position and shape of each tensor left of the arrow.
        writes: position and shape of each tensor right of it.
        sizes: sizes that the shapes leave open (factors of a product).
        kinds: kinds that differ from what the line implies (a coupled axis).
        halos: elements that a neighbour supplies on each side when the dimension of a window is split.
        contraction: a matrix product or convolution: 2 flops for each point of the nest.
        matrix_flops: matrix work where it is not 2 per point.
        vector_flops: element-wise work.

    Raises:
        ModelError: shapes that contradict the line.
    """
    read, written = parse(text)
    written = written if writes else ()
    bound = dict(sizes or {})
    operands = [*zip(read, reads, strict=True), *zip(written, writes, strict=True)]
    _bind((pair for terms, (_, shape) in operands for pair in zip(terms, shape, strict=False)), bound)
    kinds_by_dim = _kinds(read, written, kinds or {})
    dims = tuple(Dim(name, bound.get(name, 1), kind) for name, kind in kinds_by_dim.items())
    bound.update({d.name: d.size for d in dims})
    access = [_access(terms, operand, bound, halos or {}, text) for terms, operand in operands]
    flops = 2.0 * math.prod(d.size for d in dims) if contraction else matrix_flops
    return LoopNest(dims, tuple(access[: len(reads)]), tuple(access[len(reads) :]), flops, vector_flops)


def result_shapes(
    text: str, reads: Sequence[tuple[int, ...]], sizes: Mapping[str, int] | None = None
) -> list[tuple[int, ...]]:
    """Shapes right of a line's arrow, from those left of it; `sizes` as in `loop_nest`."""
    (read, written), bound = parse(text), dict(sizes or {})
    operands = zip(read, reads, strict=True)
    _bind((pair for terms, shape in operands for pair in zip(terms, shape, strict=True)), bound)
    return [tuple(math.prod(bound.get(n, 1) for n in term.names) for term in terms) for terms in written]


def gradient_nest(nest: LoopNest, read: int) -> LoopNest:
    """The nest that computes the gradient of one operand of a contraction: the same points, transposed.

    The first read of the result is the gradient of the written tensor (its position is that of the output), the
    others are the remaining operands; the write is the operand's gradient (its position is that of the input).
    Dimensions that index the operand become parallel, all others are reduced; coupled and whole ones stay so.

    Args:
        nest: a contraction with one write.
        read: index into `nest.reads`.
    """
    target = nest.reads[read]
    indexed = {name for names in target.dims for name in names}
    fixed = (DimKind.COUPLED, DimKind.WHOLE)
    dims = tuple(
        d if d.kind in fixed else replace(d, kind=DimKind.PARALLEL if d.name in indexed else DimKind.REDUCED)
        for d in nest.dims
    )
    others = tuple(access for i, access in enumerate(nest.reads) if i != read)
    return replace(nest, dims=dims, reads=(nest.writes[0], *others), writes=(target,))

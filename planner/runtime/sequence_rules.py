"""Rules by operator: how results are cut along the sequence, given how the operands are cut.

A part of a micro-batch is a run of consecutive positions. Most operators work on the part's own positions alone.
Attention reads the keys and values of all positions up to the end of the part; that is right where a causal mask hides
the later ones, which is verified on the values of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from planner.errors import ModelError
from planner.runtime.interpreter import Values, run_step
from planner.runtime.local_operators import ELEMENTWISE
from planner.runtime.model_file import Step
from planner.runtime.operators import Context

_MASKED = -5e3
"""Attention scores of this or less give a probability of exactly 0, also in float64."""


class DimCut(NamedTuple):
    """Which positions of the sequence a dimension holds while a part is computed.

    Attributes:
        past: all positions up to the end of the part; otherwise those of the part alone.
        sequences: sequences that lie one after the other in the dimension (samples that a Reshape merged into it).
    """

    past: bool = False
    sequences: int = 1


Cuts = Mapping[int, DimCut]
"""By dimension, how it is cut; other dimensions are not."""


@dataclass(frozen=True, slots=True)
class CutTensor:
    """How a tensor is cut while a part is computed.

    Attributes:
        cuts: by dimension.
        later: values of attention scores or probabilities at positions after the query: "masked" large negative
            numbers, "zero" zeros, "" unknown.
    """

    cuts: Cuts = field(default_factory=dict)
    later: str = ""


class Read(NamedTuple):
    """How an operator reads its operands and how its results are cut, both by position."""

    operands: tuple[Cuts, ...]
    results: tuple[CutTensor, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """An operator that reads a cut tensor, as its rule sees it.

    Attributes:
        step: the operator.
        placed: how its operands are cut, by position.
        length: positions of the whole sequence.
        shapes: of whole tensors, by name.
        constants: values of tensors that depend on no input and no trained weight, by name.
    """

    step: Step
    placed: tuple[CutTensor, ...]
    length: int
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, torch.Tensor]

    def cuts(self, position: int) -> Cuts:
        """The cuts of an operand; none where it is absent."""
        return self.placed[position].cuts if position < len(self.placed) else {}

    def shape(self, position: int) -> tuple[int, ...]:
        """Shape of a whole operand."""
        return self.shapes[self.step.inputs[position]]

    def result_shape(self, position: int = 0) -> tuple[int, ...]:
        """Shape of a whole result."""
        return self.shapes[self.step.outputs[position]]

    def ints(self, position: int, attribute: str) -> list[int] | None:
        """Integers of an operand, or of an attribute; None where both lack."""
        name = self.step.inputs[position] if position < len(self.step.inputs) else ""
        given = self.constants[name].reshape(-1).tolist() if name else self.step.attributes.get(attribute)
        return None if given is None else [int(v) for v in (given if isinstance(given, Sequence) else [given])]

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis`, counted from the first dimension."""
        return int(self.step.attributes.get("axis", default)) % rank

    def refuse(self, why: str) -> ModelError:
        """The error that names the operator."""
        return ModelError(
            f"{self.step.op} cannot be computed part by part of the sequence: {why}", where=self.step.name,
            hint="plan with a --schedule of whole micro-batches, such as 1f1b",
        )  # fmt: skip

    def uncut(self, position: int, dims: Sequence[int]) -> None:
        """Refuse where an operand is cut along one of these dimensions."""
        if set(self.cuts(position)) & set(dims):
            raise self.refuse("it works across positions")

    def as_read(self, *results: CutTensor) -> Read:
        """Operands are read as they lie."""
        return Read(tuple(place.cuts for place in self.placed), results or self.same())

    def same(self) -> tuple[CutTensor, ...]:
        """All results lie as the first operand."""
        return (self.placed[0],) * len(self.step.outputs)


Rule = Callable[[Site], Read]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return add


def read_of(site: Site) -> Read:
    """Apply the rule of an operator.

    Raises:
        ModelError: the operator needs later positions, or has no rule.
    """
    if site.step.op not in _RULES:
        raise site.refuse("it has no rule for cut operands")
    return _RULES[site.step.op](site)


def _joined(site: Site, *cuts: DimCut | None) -> DimCut | None:
    """The cut of a dimension that several operands share; it holds earlier positions if one of the operands does."""
    known = {cut for cut in cuts if cut is not None}
    if len({cut.sequences for cut in known}) > 1:
        raise site.refuse("its operands hold different numbers of sequences")
    return max(known, default=None)


def _broadcast(site: Site, positions: Sequence[int], shape: Sequence[int]) -> tuple[dict[int, Cuts], dict[int, DimCut]]:
    """Cuts of broadcast operands by position, and of their result; dimensions are aligned at the last."""
    joined: dict[int, DimCut] = {}
    for d in range(len(shape)):
        at = [(p, d - len(shape) + len(site.shape(p))) for p in positions]
        cut = _joined(site, *(site.cuts(p).get(dim) for p, dim in at if dim >= 0))
        if cut is not None:
            joined[d] = cut
    operands: dict[int, Cuts] = {}
    for p in positions:
        offset = len(shape) - len(site.shape(p))
        operands[p] = {d - offset: cut for d, cut in joined.items() if d >= offset and site.shape(p)[d - offset] > 1}
    return operands, joined


@_rule(*ELEMENTWISE, "Dropout", "com.microsoft.BitmaskDropout")
def _elementwise(site: Site) -> Read:
    present = [p for p, name in enumerate(site.step.inputs) if name]
    operands, cuts = _broadcast(site, present, site.result_shape())
    result = CutTensor(cuts, _later(site, cuts))
    return Read(
        tuple(operands.get(p, {}) for p in range(len(site.step.inputs))), (result,) * len(site.step.outputs)
    )  # fmt: skip


def _later(site: Site, cuts: Cuts) -> str:
    """What a result of an elementwise operator holds for positions after the query.

    The operator is computed on the values of its constants and on stand-ins for all else: -1, 0 and 1 for numbers, both
    truth values, and what is known of masked scores and probabilities.
    """
    rows = next((d for d, cut in cuts.items() if not cut.past), None)
    columns = next((d for d, cut in cuts.items() if cut.past), None)
    if rows is None or columns is None or any(cut.sequences > 1 for cut in cuts.values()):
        return ""
    if site.step.op in ("Dropout", "com.microsoft.BitmaskDropout"):
        return site.placed[0].later if site.placed[0].later == "zero" else ""
    rank = len(site.result_shape())
    later = torch.ones(site.length, site.length, dtype=torch.bool).triu(1)
    seen = [_trial(site, number, rank, later, (rows, columns)) for number in (-1.0, 0.0, 1.0)]
    hidden = [x.movedim((rows, columns), (-2, -1))[..., later] for x in seen if x is not None]
    if len(hidden) < len(seen):
        return ""
    if any(place.later == "zero" for place in site.placed) and all(bool((x == 0).all()) for x in hidden):
        return "zero"
    return "masked" if all(x.is_floating_point() and bool((x <= _MASKED).all()) for x in hidden) else ""


def _trial(site: Site, number: float, rank: int, later: torch.Tensor, at: tuple[int, int]) -> torch.Tensor | None:
    """The result of an operator where unknown operands are a number; None where it cannot be computed so."""
    values: Values = {}
    for name, place in zip(site.step.inputs, site.placed, strict=True):
        if name in site.constants:
            values[name] = site.constants[name]
        elif name:
            sizes = [1] * rank
            sizes[at[0]] = sizes[at[1]] = site.length
            unknown = torch.full(sizes, number, dtype=torch.float64).movedim(at, (-2, -1))
            if place.later:
                unknown = unknown.masked_fill(later, -1e4 if place.later == "masked" else 0.0)
            values[name] = unknown.movedim((-2, -1), at)
    if site.step.op == "Where" and site.step.inputs[0] not in site.constants:
        values[site.step.inputs[0]] = values[site.step.inputs[0]] > 0
    try:
        result = run_step(site.step, values, Context(torch.float64))[0]
    except ModelError:
        return None
    return result.expand([max(n, site.length) if d in at else n for d, n in enumerate(result.shape)])


@_rule("MatMul")
def _matmul(site: Site) -> Read:
    ranks = [len(site.shape(p)) for p in (0, 1)]
    if min(ranks) < 2:
        raise site.refuse("an operand is a vector")
    left, right = ({d - rank: cut for d, cut in site.cuts(p).items()} for p, rank in enumerate(ranks))
    reads: list[dict[int, DimCut]] = [dict(left), dict(right)]
    inner = _joined(site, left.get(-1), right.get(-2))
    if inner is not None:
        if not inner.past or site.placed[0].later != "zero" or -1 not in left:
            raise site.refuse("it sums over positions that no causal mask hides")
        reads[1][-2] = inner
    results: dict[int, DimCut] = {}
    if -2 in left:
        results[-2] = left[-2]
    if -1 in right:
        results[-1] = reads[1][-1] = right[-1]._replace(past=-2 in left or right[-1].past)
    if results.get(-2, DimCut()).past:
        raise site.refuse("its rows are keys and its columns queries")
    rank = max(ranks)
    for d in range(-rank, -2):
        cut = _joined(site, left.get(d), right.get(d))
        if cut is not None:
            results[d] = cut
            for p in (0, 1):
                if ranks[p] >= -d and site.shape(p)[d] > 1:
                    reads[p][d] = cut
    operands = tuple({d + n: cut for d, cut in own.items()} for own, n in zip(reads, ranks, strict=True))
    return Read(operands, (CutTensor({d + rank: cut for d, cut in results.items()}),))


@_rule("Gemm")
def _gemm(site: Site) -> Read:
    rows = 1 if site.step.attributes.get("transA", 0) else 0
    site.uncut(0, [1 - rows])
    site.uncut(1, [0, 1])
    cut = site.cuts(0)[rows]
    operands: list[Cuts] = [site.cuts(0), {}]
    if len(site.step.inputs) > 2:
        tall = len(site.shape(2)) == 2 and site.shape(2)[0] > 1
        operands.append({0: cut} if tall else {})
    return Read(tuple(operands), (CutTensor({0: cut}),))


@_rule("Transpose")
def _transpose(site: Site) -> Read:
    order = site.step.attributes.get("perm") or list(range(len(site.shape(0))))[::-1]
    return site.as_read(CutTensor({order.index(d): cut for d, cut in site.cuts(0).items()}))


@_rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(site: Site) -> Read:
    """The sequence stays one dimension, perhaps with samples merged into it or divided from it."""
    before, after = site.shape(0), site.result_shape()
    cuts: dict[int, DimCut] = {}
    for d, cut in site.cuts(0).items():
        outside = math.prod(before[:d]) * cut.sequences
        for e, size in enumerate(after):
            ahead = math.prod(after[:e])
            if outside % ahead == 0 and size == outside // ahead * site.length:
                cuts[e] = cut._replace(sequences=outside // ahead)
                break
        else:
            raise site.refuse("it merges positions with what lies inside them, or divides them")
    return site.as_read(CutTensor(cuts))


@_rule("Expand")
def _expand(site: Site) -> Read:
    offset = len(site.result_shape()) - len(site.shape(0))
    return site.as_read(CutTensor({d + offset: cut for d, cut in site.cuts(0).items()}))


@_rule("Split", "Slice", "Concat", "SwiGLU")
def _along_an_axis(site: Site) -> Read:
    """Operators that move elements along some axes, none of which may be the sequence; Concat has several operands."""
    rank = len(site.shape(0))
    axes = [site.axis(-1 if site.step.op == "SwiGLU" else 0, rank)]
    if site.step.op == "Slice":
        named = site.ints(3, "axes")
        axes = list(range(len(site.ints(1, "starts") or []))) if named is None else [a % rank for a in named]
    for p in range(len(site.step.inputs) if site.step.op == "Concat" else 1):
        site.uncut(p, axes)
    if site.step.op != "Concat":
        return site.as_read()
    positions = range(len(site.step.inputs))
    joined = {d: _joined(site, *(site.cuts(p).get(d) for p in positions)) for d in range(rank)}
    cuts = {d: cut for d, cut in joined.items() if cut is not None}
    return Read((cuts,) * len(positions), (CutTensor(cuts),))


@_rule("Gather")
def _gather(site: Site) -> Read:
    axis, places = site.axis(0, len(site.shape(0))), len(site.shape(1))
    site.uncut(0, [axis])
    cuts = {d if d < axis else d + places - 1: cut for d, cut in site.cuts(0).items()}
    cuts.update({axis + d: cut for d, cut in site.cuts(1).items()})
    return site.as_read(CutTensor(cuts))


@_rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL2")
def _reduction(site: Site) -> Read:
    rank, axes = len(site.shape(0)), site.ints(1, "axes")
    gone = sorted({a % rank for a in axes} if axes else range(rank))
    site.uncut(0, gone)
    kept = bool(site.step.attributes.get("keepdims", 1))
    return site.as_read(
        CutTensor({d - (0 if kept else sum(g < d for g in gone)): cut for d, cut in site.cuts(0).items()})
    )


@_rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def _norm(site: Site) -> Read:
    rank = len(site.shape(0))
    site.uncut(0, range(site.axis(-1, rank), rank))
    return site.as_read()


@_rule("Softmax", "LogSoftmax")
def _softmax(site: Site) -> Read:
    rank = len(site.shape(0))
    axis = site.axis(-1 if site.step.opset >= 13 else 1, rank)
    if axis not in site.cuts(0) and site.step.opset >= 13:
        return site.as_read(CutTensor(site.cuts(0)))
    place = site.placed[0]
    if site.step.op != "Softmax" or site.step.opset < 13 or place.later != "masked":
        raise site.refuse("no constant causal mask hides later positions from it")
    return site.as_read(CutTensor(place.cuts, "zero"))


@_rule("RotaryEmbedding")
def _rotary(site: Site) -> Read:
    """Turns each position by angles of its own: tables of [samples, positions], or looked up by position numbers."""
    at = 2 if len(site.shape(0)) == 4 else 1
    if set(site.cuts(0)) != {at}:
        raise site.refuse("its sequence is not where the operator has it")
    by_number = len(site.step.inputs) > 3
    rows = {1: site.cuts(0)[at]}
    operands: list[Cuts] = [site.cuts(0), *([{}, {}] if by_number else [rows, rows])]
    return Read(tuple([*operands, rows] if by_number else operands), (CutTensor(site.cuts(0)),))


@_rule("Attention", "com.microsoft.GroupQueryAttention")
def _attention(site: Site) -> Read:
    """Queries of the part; keys and values up to its end. Without `is_causal` the mask operand must be causal."""
    at = 2 if len(site.shape(0)) == 4 else 1
    grouped = site.step.op != "Attention"
    masked = not grouped and len(site.step.inputs) > 3 and bool(site.step.inputs[3])
    if len(site.step.inputs) < 3 or any(set(site.cuts(p)) != {at} for p in range(3)):
        raise site.refuse("its sequence is not where the operator has it")
    if any(site.step.inputs[3 if grouped else 4 : 5]) or len(site.step.outputs) > 1:
        raise site.refuse("it has a cache")
    causal = grouped or site.step.attributes.get("is_causal", 0)
    if not causal and not (masked and _hides_later(site, 3)):
        raise site.refuse("no constant causal mask hides later positions from it")
    cut = site.cuts(0)[at]
    keys = {at: cut._replace(past=True)}
    operands: list[Cuts] = [{at: cut}, keys, keys]
    if masked:
        rank, shape = len(site.shape(3)), site.shape(3)
        wanted = {rank - 2: cut, rank - 1: cut._replace(past=True)}
        operands.append({d: c for d, c in wanted.items() if shape[d] > 1})
    operands += [{}] * (len(site.step.inputs) - len(operands))
    return Read(tuple(operands), (CutTensor({at: cut}),))


def _hides_later(site: Site, position: int) -> bool:
    """Whether an operand is a constant mask that hides all later positions."""
    mask = site.constants.get(site.step.inputs[position])
    if mask is None or mask.shape[-2:] != (site.length,) * 2:
        return False
    hidden = mask[..., torch.ones(site.length, site.length, dtype=torch.bool).triu(1)]
    return not bool(hidden.any()) if mask.dtype is torch.bool else bool((hidden <= _MASKED).all())

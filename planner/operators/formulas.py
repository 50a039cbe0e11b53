"""Match arithmetic formulas in a graph, such as a LayerNorm spelled out by an exporter.

A formula is Python arithmetic over names: `x / sqrt(mean(x * x) + k) * scale`.
- A name stands for one tensor, the same wherever the name occurs: `scale`, `shift`, `ones`, `zeros` for stored ones
  (weights, tables), `cos`, `sin` for any, other names for computed ones. `k` stands for a number of any value, a number
  for itself.
- `mean(..)` is the mean over the last dimensions, `sqrt(..)` a square root, `shared(..)` a product that is read twice;
  any other function is the ONNX operator of that name, applied to its first operands.
- Factors may stand in any order, as products, quotients, reciprocals, squares or reciprocal square roots; numbers among
  them count only where the product has a `k`. Sums commute. Casts between floating-point types are passed over.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from planner.graph import Graph, Node, TensorKind

_MOST_FACTORS = 8
_STORED = ("scale", "shift", "ones", "zeros")
_ANY = ("cos", "sin")


class Match(NamedTuple):
    """A match of a formula.

    Attributes:
        names: tensor that each name of the formula stands for.
        nodes: indices of the nodes that compute it.
        axes: how many last dimensions the means are over; 0 without a mean.
    """

    names: Mapping[str, str] = MappingProxyType({})
    nodes: frozenset[int] = frozenset()
    axes: int = 0


@functools.cache
def _parsed(formula: str) -> ast.expr:
    """A formula as Python's syntax tree."""
    return ast.parse(formula, mode="eval").body


@functools.cache
def _function(term: ast.expr) -> tuple[str, Sequence[ast.expr]]:
    """A term as a function and its operands: a name, or `+`, `-`, `*`, the last of products and quotients."""
    if isinstance(term, ast.Call) and isinstance(term.func, ast.Name):
        return term.func.id, term.args
    if isinstance(term, ast.BinOp):
        return {ast.Add: "+", ast.Sub: "-"}.get(type(term.op), "*"), (term.left, term.right)
    raise ValueError(f"not part of a formula: {ast.unparse(term)}")


@functools.cache
def _factors(product: ast.expr) -> tuple[tuple[tuple[ast.expr, bool], ...], bool]:
    """Factors of a product, each with whether it divides, and whether constant numbers may be among them."""
    factors: list[tuple[ast.expr, bool]] = []

    def collect(part: ast.expr, divides: bool) -> None:
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult | ast.Div):
            collect(part.left, divides)
            collect(part.right, divides != isinstance(part.op, ast.Div))
        else:
            factors.append((part, divides))

    collect(product, False)
    counted = [factor for factor in factors if not _is_any_number(factor[0])]
    counted.sort(key=lambda factor: isinstance(factor[0], ast.Name))  # what can fail comes first
    return tuple(counted), len(counted) < len(factors)


def _is_any_number(term: ast.expr) -> bool:
    return isinstance(term, ast.Name) and term.id == "k"


def last_operators(formula: str) -> tuple[str, ...]:
    """The operators that the last node of a formula can be."""
    name, _ = _function(_parsed(formula))
    return _LAST.get(name, (name,))


def find(graph: Graph, formula: str, name: str) -> Match | None:
    """The first match of a formula that computes a tensor; None if it does not match."""
    return next(_solve(graph, _parsed(formula), name, Match()), None)


def is_number(graph: Graph, name: str) -> bool:
    """Whether a tensor is one constant number."""
    tensor = graph.tensors.get(name)
    return tensor is not None and tensor.kind is TensorKind.CONSTANT and tensor.elements == 1


def _solve(graph: Graph, term: ast.expr, name: str, match: Match) -> Iterator[Match]:
    if isinstance(term, ast.Name):
        yield from _bind(graph, term.id, name, match)
        return
    if isinstance(term, ast.Constant):
        value = graph.constants.get(name, ())
        if is_number(graph, name) and (not value or float(value[0]) == term.value):
            yield match
        return
    function, operands = _function(term)
    index = graph.producer.get(name)
    if function == "shared":
        yield from _solve(graph, operands[0], name, match)
    elif function == "*" and index is not None:
        yield from _solve_product(graph, term, name, match)
    elif index is not None:
        yield from _solve_node(graph, term, index, match)


def _solve_node(graph: Graph, term: ast.expr, index: int, match: Match) -> Iterator[Match]:
    """Match a function with a node that computes it."""
    (function, operands), node = _function(term), graph.nodes[index]
    cast = node.op == "Cast" and graph.tensors[node.inputs[0]].dtype.is_float
    if not cast and node.op not in _LAST.get(function, (function,)):
        return
    match = match._replace(nodes=match.nodes | {index})
    if cast:
        yield from _solve(graph, term, node.inputs[0], match)
    elif function in _NAMED:
        yield from _NAMED[function](graph, operands, node, match)
    else:
        yield from _solve_all(graph, operands, node.inputs, match)


def _bind(graph: Graph, term: str, name: str, match: Match) -> Iterator[Match]:
    if term == "k":
        if is_number(graph, name):
            yield match
        return
    tensor = graph.tensors.get(name)
    stored = tensor is not None and tensor.kind in (TensorKind.PARAMETER, TensorKind.CONSTANT)
    if tensor is None or match.names.get(term, name) != name:
        return
    if term not in _ANY and (term in _STORED) != stored:
        return
    yield match._replace(names={**match.names, term: name})


def _solve_all(graph: Graph, terms: Sequence[ast.expr], names: Sequence[str], match: Match) -> Iterator[Match]:
    if not terms:
        yield match
        return
    if not names:
        return
    for partial_match in _solve(graph, terms[0], names[0], match):
        yield from _solve_all(graph, terms[1:], names[1:], partial_match)


def _solve_sum(graph: Graph, terms: Sequence[ast.expr], node: Node, match: Match) -> Iterator[Match]:
    yield from _solve_all(graph, terms, node.inputs, match)
    yield from _solve_all(graph, terms, node.inputs[::-1], match)


def _solve_sqrt(graph: Graph, terms: Sequence[ast.expr], node: Node, match: Match) -> Iterator[Match]:
    if node.op == "Sqrt" or _exponent(graph, node) == 0.5:
        yield from _solve(graph, terms[0], node.inputs[0], match)


def _solve_mean(graph: Graph, terms: Sequence[ast.expr], node: Node, match: Match) -> Iterator[Match]:
    if node.op in ("Reshape", "Unsqueeze"):  # dimensions of size one that the mean left out
        at, kept = graph.producer.get(node.inputs[0], -1), graph.tensors[node.outputs[0]].shape
        if at < 0 or len(kept) != len(graph.tensors[graph.nodes[at].inputs[0]].shape) or kept[-1] != 1:
            return
        node, match = graph.nodes[at], match._replace(nodes=match.nodes | {at})
    if node.op in ("Mul", "Div"):  # a sum, times one over the number of its terms
        sums = [name for name in node.inputs if not is_number(graph, name)]
        at = graph.producer.get(sums[0], -1) if len(sums) == 1 else -1
        if at < 0 or graph.nodes[at].op != "ReduceSum":
            return
        node, match = graph.nodes[at], match._replace(nodes=match.nodes | {at})
    elif node.op != "ReduceMean":
        return
    axes = _last_axes(graph, node)
    if axes and match.axes in (0, axes):
        yield from _solve(graph, terms[0], node.inputs[0], match._replace(axes=axes))


_NAMED = {"+": _solve_sum, "sqrt": _solve_sqrt, "mean": _solve_mean}

_LAST = {
    "+": ("Add",),
    "-": ("Sub",),
    "*": ("Mul", "Div"),
    "sqrt": ("Sqrt", "Pow"),
    "mean": ("ReduceMean", "Mul", "Div", "Reshape", "Unsqueeze"),
}
"""Operators that can compute a function last, where that is not the operator of its name; casts are not listed."""


def _last_axes(graph: Graph, node: Node) -> int:
    """How many last dimensions a reduction is over; 0 where it is over others."""
    rank = len(graph.tensors[node.inputs[0]].shape)
    given = node.attributes.get("axes")
    if given is None and len(node.inputs) > 1:
        given = graph.constants.get(node.inputs[1])
    axes = sorted(int(axis) % rank for axis in given) if isinstance(given, tuple) else list(range(rank))
    return len(axes) if axes == list(range(rank - len(axes), rank)) else 0


def _exponent(graph: Graph, node: Node) -> float | None:
    """The number that a power is to, where it is known; None for another operator."""
    value = graph.constants.get(node.inputs[1]) if node.op == "Pow" else None
    return float(value[0]) if value and len(value) == 1 else None


@dataclass(slots=True)
class _Factors:
    """A tensor decomposed into the factors of a product.

    Attributes:
        parts: (tensor, whether it divides, whether its square root is meant).
        nodes: the nodes that multiply.
        numbers: whether numbers other than one are among the factors.
    """

    parts: list[tuple[str, bool, bool]] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
    numbers: bool = False

    def collect(self, graph: Graph, name: str, divides: bool, first: bool) -> None:
        """Add the factors of a tensor that only the product before it reads, else the tensor itself."""
        if is_number(graph, name):
            self.numbers = self.numbers or graph.constants.get(name) != (1.0,)
            return
        index = graph.producer.get(name)
        alone = first or (len(graph.consumers.get(name, ())) == 1 and name not in graph.outputs)
        if index is None or not alone or len(self.parts) + len(self.nodes) > 2 * _MOST_FACTORS:
            self.parts.append((name, divides, False))
            return
        node = graph.nodes[index]
        steps: list[tuple[str, bool, bool]] = []
        exponent = _exponent(graph, node)
        if node.op in ("Mul", "Div"):
            steps = [(node.inputs[0], divides, False), (node.inputs[1], divides != (node.op == "Div"), False)]
        elif node.op == "Reciprocal":
            steps = [(node.inputs[0], not divides, False)]
        elif node.op == "Cast" and graph.tensors[node.inputs[0]].dtype.is_float:
            steps = [(node.inputs[0], divides, False)]
        elif exponent == 2.0:
            steps = [(node.inputs[0], divides, False)] * 2
        elif exponent == -0.5:
            steps = [(node.inputs[0], not divides, True)]
        if not steps:
            self.parts.append((name, divides, False))
            return
        self.nodes.add(index)
        for operand, under, root in steps:
            if root or exponent is not None:
                self.parts.append((operand, under, root))
            else:
                self.collect(graph, operand, under, False)


def _solve_product(graph: Graph, term: ast.expr, name: str, match: Match) -> Iterator[Match]:
    factors, scaled = _factors(term)
    target = _Factors()
    target.collect(graph, name, False, True)
    if not target.nodes or len(target.parts) != len(factors) or (target.numbers and not scaled):
        return
    yield from _assign(graph, factors, target.parts, match._replace(nodes=match.nodes | target.nodes))


def _assign(
    graph: Graph, factors: Sequence[tuple[ast.expr, bool]], parts: list[tuple[str, bool, bool]], match: Match
) -> Iterator[Match]:
    """Match each factor of a formula with one of the multiplied tensors."""
    if not factors:
        yield match
        return
    term, divides = factors[0]
    for k, (name, under, root) in enumerate(parts):
        inner = term
        if under != divides:
            continue
        if root:
            if not isinstance(term, ast.Call) or _function(term)[0] != "sqrt":
                continue
            inner = term.args[0]
        for partial_match in _solve(graph, inner, name, match):
            yield from _assign(graph, factors[1:], parts[:k] + parts[k + 1 :], partial_match)

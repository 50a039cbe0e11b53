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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from planner.graph import Graph, Node, TensorKind

_MOST_FACTORS = 8
_STORED = ("scale", "shift", "ones", "zeros")
_ANY = ("cos", "sin")


@dataclass(frozen=True, slots=True)
class Product:
    """A product: its factors, each with whether it divides, and whether constant numbers may be among them."""

    factors: tuple[tuple[Term, bool], ...]
    scaled: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A function of terms; `+` and `-` are functions of two."""

    name: str
    operands: tuple[Term, ...]


Term = Product | Call | str | float


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
def parse(formula: str) -> Term:
    """A formula's text as a term."""
    return _term(ast.parse(formula, mode="eval").body)


def _term(tree: ast.expr) -> Term:
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
        return float(tree.value)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "shared":
        return _term(tree.args[0])
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return Call(tree.func.id, tuple(map(_term, tree.args)))
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add | ast.Sub):
        return Call("+" if isinstance(tree.op, ast.Add) else "-", (_term(tree.left), _term(tree.right)))
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult | ast.Div):
        return _product(tree)
    raise ValueError(f"not part of a formula: {ast.unparse(tree)}")


def _product(tree: ast.expr) -> Product:
    factors: list[tuple[Term, bool]] = []
    scaled = False

    def collect(part: ast.expr, divides: bool) -> None:
        nonlocal scaled
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult | ast.Div):
            collect(part.left, divides)
            collect(part.right, divides != isinstance(part.op, ast.Div))
            return
        term = _term(part)
        scaled = scaled or term == "k"
        if term != "k":
            factors.append((term, divides))

    collect(tree, False)
    factors.sort(key=lambda factor: isinstance(factor[0], str))  # what can fail comes first
    return Product(tuple(factors), scaled)


def last_operators(formula: str) -> tuple[str, ...]:
    """The operators that the last node of a formula can be."""
    term = parse(formula)
    if isinstance(term, Product):
        return ("Mul", "Div")
    name = term.name if isinstance(term, Call) else ""
    return _LAST.get(name, (name,))


def rare_operators(formula: str) -> frozenset[str]:
    """Operators of which a graph must have one for a formula to be computed in it: all but sums, products and roots."""
    operators: set[str] = set()

    def collect(term: Term) -> None:
        if isinstance(term, Product):
            for factor, _ in term.factors:
                collect(factor)
        elif isinstance(term, Call):
            operators.update(("ReduceMean", "ReduceSum") if term.name == "mean" else (term.name,))
            for operand in term.operands:
                collect(operand)

    collect(parse(formula))
    return frozenset(operators - {"+", "-", "sqrt"})


def find(graph: Graph, formula: str, name: str) -> Match | None:
    """The first match of a formula that computes a tensor; None if it does not match."""
    return next(_solve(graph, parse(formula), name, Match()), None)


def is_number(graph: Graph, name: str) -> bool:
    """Whether a tensor is one constant number."""
    tensor = graph.tensors.get(name)
    return tensor is not None and tensor.kind is TensorKind.CONSTANT and tensor.elements == 1


def _solve(graph: Graph, term: Term, name: str, match: Match) -> Iterator[Match]:
    if isinstance(term, str):
        yield from _bind(graph, term, name, match)
        return
    if isinstance(term, float):
        value = graph.constants.get(name, ())
        if is_number(graph, name) and (not value or float(value[0]) == term):
            yield match
        return
    index = graph.producer.get(name)
    if index is None:
        return
    if isinstance(term, Product):
        yield from _solve_product(graph, term, name, match)
        return
    node = graph.nodes[index]
    if node.op not in _LAST.get(term.name, (term.name,)) and node.op != "Cast":
        return
    with_node = match._replace(nodes=match.nodes | {index})
    if term.name in "+-":
        yield from _solve_sum(graph, term, node, with_node)
    elif term.name in _NAMED:
        yield from _NAMED[term.name](graph, term.operands[0], node, with_node)
    elif node.op == term.name:
        yield from _solve_all(graph, term.operands, node.inputs, with_node)
    if node.op == "Cast" and graph.tensors[node.inputs[0]].dtype.is_float:
        yield from _solve(graph, term, node.inputs[0], with_node)


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


def _solve_all(graph: Graph, terms: tuple[Term, ...], names: tuple[str, ...], match: Match) -> Iterator[Match]:
    if not terms:
        yield match
        return
    if not names:
        return
    for partial_match in _solve(graph, terms[0], names[0], match):
        yield from _solve_all(graph, terms[1:], names[1:], partial_match)


def _solve_sum(graph: Graph, term: Call, node: Node, match: Match) -> Iterator[Match]:
    if node.op != ("Add" if term.name == "+" else "Sub"):
        return
    left, right = node.inputs
    yield from _solve_all(graph, term.operands, (left, right), match)
    if term.name == "+":
        yield from _solve_all(graph, term.operands, (right, left), match)


def _solve_sqrt(graph: Graph, term: Term, node: Node, match: Match) -> Iterator[Match]:
    if node.op == "Sqrt" or (node.op == "Pow" and _exponent(graph, node) == 0.5):
        yield from _solve(graph, term, node.inputs[0], match)


def _solve_mean(graph: Graph, term: Term, node: Node, match: Match) -> Iterator[Match]:
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
        yield from _solve(graph, term, node.inputs[0], match._replace(axes=axes))


_NAMED = {"sqrt": _solve_sqrt, "mean": _solve_mean}

_LAST = {
    "+": ("Add",),
    "-": ("Sub",),
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
    value = graph.constants.get(node.inputs[1])
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
        exponent = _exponent(graph, node) if node.op == "Pow" else None
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


def _solve_product(graph: Graph, term: Product, name: str, match: Match) -> Iterator[Match]:
    target = _Factors()
    target.collect(graph, name, False, True)
    if not target.nodes or len(target.parts) != len(term.factors) or (target.numbers and not term.scaled):
        return
    yield from _assign(graph, term.factors, target.parts, match._replace(nodes=match.nodes | target.nodes))


def _assign(
    graph: Graph, factors: tuple[tuple[Term, bool], ...], parts: list[tuple[str, bool, bool]], match: Match
) -> Iterator[Match]:
    """Match each factor of a formula with one of the multiplied tensors."""
    if not factors:
        yield match
        return
    term, divides = factors[0]
    for k, (name, under, root) in enumerate(parts):
        inner: Term = term
        if under != divides:
            continue
        if root:
            if not (isinstance(term, Call) and term.name == "sqrt"):
                continue
            inner = term.operands[0]
        for partial_match in _solve(graph, inner, name, match):
            yield from _assign(graph, factors[1:], parts[:k] + parts[k + 1 :], partial_match)

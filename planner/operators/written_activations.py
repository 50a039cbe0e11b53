"""GELU and SiLU written out by an exporter as several nodes: one kernel in training, which keeps its input alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.graph import Graph, Node, TensorKind, per_graph
from planner.operators.regions import producer_of


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function written out as several nodes; backward keeps its input only.

    Attributes:
        nodes: indices of its nodes, ascending; the last one makes the output.
        source: the function's argument.
        name: `gelu` or `silu`.
    """

    nodes: tuple[int, ...]
    source: str
    name: str


@per_graph
def find_activations(graph: Graph) -> tuple[Activation, ...]:
    """All written-out GELU and SiLU functions.

    GELU by the error function, or by tanh with the cube as products, is one kernel in eager training. The form with
    `Pow(x, 3)` is left alone: models that have it compute it step by step, and keep every step. O(nodes).
    """
    found = []
    for i, node in enumerate(graph.nodes):
        if node.op in _ENDS:
            region = _ENDS[node.op](graph, i)
            if region is not None:
                found.append(region)
    return tuple(sorted(found, key=lambda r: r.nodes[-1]))


def _silu(graph: Graph, index: int) -> Activation | None:
    """`x * sigmoid(x)`, recognised at the sigmoid."""
    node = graph.nodes[index]
    readers = graph.consumers.get(node.outputs[0], ())
    if len(readers) != 1:
        return None
    product = graph.nodes[readers[0]]
    if product.op != "Mul" or set(product.inputs) != {node.inputs[0], node.outputs[0]}:
        return None
    return Activation((index, readers[0]), node.inputs[0], "silu")


def _gelu(graph: Graph, index: int) -> Activation | None:
    """GELU around its `Erf` or `Tanh`: one argument in, one result out, all steps element-wise."""
    node = graph.nodes[index]
    inner: set[int] = {index}
    source = _common_source(graph, node.inputs[0], inner, cube=node.op == "Tanh")
    if source is None:
        return None
    nodes = _to_product_with(graph, index, source, inner)
    return None if nodes is None else Activation(tuple(sorted(nodes)), source, "gelu")


def _constant_operand(graph: Graph, node: Node) -> bool:
    return any(
        graph.tensors[n].elements == 1 and graph.tensors[n].kind is TensorKind.CONSTANT for n in node.inputs if n
    )


def _common_source(graph: Graph, name: str, inner: set[int], *, cube: bool) -> str | None:
    """The argument `x` that everything before an Erf (`x / sqrt 2`) or Tanh (`a (x + b x x x)`) is computed from."""
    at = producer_of(graph, name)
    if at is None or at[1].op not in ("Mul", "Div") or not _constant_operand(graph, at[1]):
        return None
    inner.add(at[0])
    source = next(n for n in at[1].inputs if graph.tensors[n].kind is not TensorKind.CONSTANT)
    if not cube:
        return source
    total = producer_of(graph, source)
    if total is None or total[1].op != "Add":
        return None
    steps = _products_between(graph, total[1].inputs[0], total[1].inputs[1])
    turned = _products_between(graph, total[1].inputs[1], total[1].inputs[0]) if steps is None else None
    found = steps if steps is not None else turned
    if found is None:
        return None
    inner.update({total[0], *found})
    return total[1].inputs[0] if steps is not None else total[1].inputs[1]


def _products_between(graph: Graph, source: str, name: str) -> set[int] | None:
    """Nodes by which a tensor is computed from `source` with products alone; None where it is not."""
    found: set[int] = set()
    stack = [name]
    while stack:
        current = stack.pop()
        if current == source or graph.tensors[current].kind is TensorKind.CONSTANT:
            continue
        at = producer_of(graph, current)
        if at is None or at[1].op != "Mul" or len(found) > 4:
            return None
        found.add(at[0])
        stack.extend(at[1].inputs)
    return found or None


def _to_product_with(graph: Graph, index: int, source: str, inner: set[int]) -> set[int] | None:
    """From Erf or Tanh on: `1 +`, then products with the argument and constants, to the last of them."""
    nodes = set(inner)
    name = graph.nodes[index].outputs[0]
    used_source = False
    for _ in range(4):
        readers = graph.consumers.get(name, ())
        if len(readers) != 1:
            break
        node = graph.nodes[readers[0]]
        other = [n for n in node.inputs if n != name]
        constant = _constant_operand(graph, node)
        if constant and (node.op == "Mul" or (node.op == "Add" and not used_source)):
            pass
        elif node.op == "Mul" and len(other) == 1 and not used_source:
            if other[0] != source:
                scaled = _products_between(graph, source, other[0])
                if scaled is None:
                    return None
                nodes |= scaled
            used_source = True
        else:
            break
        nodes.add(readers[0])
        name = node.outputs[0]
    return nodes if used_source else None


_ENDS: Mapping[str, Callable[[Graph, int], Activation | None]] = {"Erf": _gelu, "Tanh": _gelu, "Sigmoid": _silu}

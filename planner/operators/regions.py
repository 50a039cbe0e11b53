"""Operators written out by an exporter: nodes that training frameworks run as one operator.

An exporter without the fused operator writes `softmax(q k^T) v` as a dozen nodes (scaling, mask, NaN guard, dropout),
and GELU or SiLU as several. What is kept for backward, and what it costs, follows from the operator that was exported,
not from these nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.graph import Graph, Node, Tensor, TensorKind, per_graph

_MAX_STEPS = 12


@dataclass(frozen=True, slots=True)
class Attention:
    """`softmax(query key^T + mask) value` and the nodes that express it.

    Attributes:
        nodes: indices of its nodes, ascending; the last one makes the output.
        query: tensor before scaling and transposition for the product.
        key: the same.
        value: the same.
        output: the result.
        mask: what is added to or selects among the scores, "" without.
        scores: shape of the score matrix, [..., queries, keys].
        softmax: index of the softmax node; -1 where one node does everything.
        dropout: index of the dropout node on the probabilities; -1 without.
    """

    nodes: tuple[int, ...]
    query: str
    key: str
    value: str
    output: str
    mask: str
    scores: tuple[int, ...]
    softmax: int = -1
    dropout: int = -1


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A product with weights gathered for each token: a mixture of experts written with a copy of its weights.

    Training runs it as one grouped product per expert; the copies are never made.

    Attributes:
        gather: index of the node that copies.
        product: index of the matrix product.
        weight: the stored weights of all experts.
    """

    gather: int
    product: int
    weight: str


@per_graph
def find_expert_products(graph: Graph) -> tuple[ExpertProduct, ...]:
    """All products with weights gathered by computed indices, in graph order. O(nodes)."""
    found = []
    for i, node in enumerate(graph.nodes):
        if node.op not in ("Gather", "GatherND") or graph.tensors[node.inputs[0]].kind is not TensorKind.PARAMETER:
            continue
        weight, readers = graph.tensors[node.inputs[0]], graph.consumers.get(node.outputs[0], ())
        picked = _is_computed(graph, node.inputs[1])
        if len(weight.shape) == 3 and picked and len(readers) == 1 and graph.nodes[readers[0]].op == "MatMul":
            found.append(ExpertProduct(i, readers[0], weight.name))
    return tuple(found)


@per_graph
def find_attention(graph: Graph) -> tuple[Attention, ...]:
    """All attention regions, in order of their last node. O(nodes)."""
    found = []
    for i, node in enumerate(graph.nodes):
        if node.op == "Softmax":
            region = _around_softmax(graph, i)
        elif node.op == "Attention":
            region = _single_node(graph, i)
        else:
            continue
        if region is not None:
            found.append(region)
    return tuple(sorted(found, key=lambda r: r.nodes[-1]))


def _is_computed(graph: Graph, name: str) -> bool:
    tensor = graph.tensors.get(name)
    return tensor is not None and tensor.kind is TensorKind.ACTIVATION


def producer_of(graph: Graph, name: str) -> tuple[int, Node] | None:
    """The node that makes a tensor, with its index; None for what comes from outside."""
    at = graph.producer.get(name)
    return None if at is None else (at, graph.nodes[at])


def _around_softmax(graph: Graph, softmax: int) -> Attention | None:
    node = graph.nodes[softmax]
    scores = graph.tensors[node.inputs[0]]
    axis = node.attributes.get("axis", -1)
    if len(scores.shape) < 3 or axis not in (-1, len(scores.shape) - 1):
        return None
    before = _to_score_product(graph, node.inputs[0], scores)
    after = _to_value_product(graph, node.outputs[0], scores)
    if before is None or after is None:
        return None
    product, inner, mask = before
    last, outer, dropout = after
    query, query_nodes = _unscaled(graph, graph.nodes[product].inputs[0], product)
    key, key_nodes = _unscaled(graph, graph.nodes[product].inputs[1], product)
    key, turn_nodes = _unturned(graph, key, product)
    nodes = {*inner, *outer, *query_nodes, *key_nodes, *turn_nodes, product, softmax, last}
    return Attention(
        tuple(sorted(nodes)),
        query,
        key,
        graph.nodes[last].inputs[1],
        graph.nodes[last].outputs[0],
        mask,
        scores.shape,
        softmax,
        dropout,
    )


def _to_score_product(graph: Graph, name: str, scores: Tensor) -> tuple[int, list[int], str] | None:
    """From the softmax back to the product of queries and keys: its index, the nodes between, the mask."""
    path: list[int] = []
    mask = ""
    for _ in range(_MAX_STEPS):
        at = producer_of(graph, name)
        if at is None:
            return None
        index, node = at
        if node.op == "MatMul":
            both = all(_is_computed(graph, n) for n in node.inputs)
            return (index, path, mask) if both and graph.tensors[name].elements == scores.elements else None
        step = _score_operand(graph, node, scores)
        if step is None:
            return None
        name, side = step
        path.append(index)
        if node.op in ("Add", "Where") and side:
            mask = mask or side
    return None


def _score_operand(graph: Graph, node: Node, scores: Tensor) -> tuple[str, str] | None:
    """The operand of a node between product and softmax that carries the scores, and the other one."""
    if node.op in ("Cast", "Tanh", "Reshape", "Identity"):
        return node.inputs[0], ""
    if node.op not in ("Add", "Sub", "Mul", "Div", "Where"):
        return None
    operands = node.inputs[1:] if node.op == "Where" else node.inputs
    full = [n for n in operands if _is_computed(graph, n) and graph.tensors[n].elements == scores.elements]
    full = [n for n in full if _reaches_product(graph, n)] if len(full) > 1 else full
    if not full:
        return None
    others = [n for n in node.inputs if n != full[0] and graph.tensors[n].elements > 1]
    return full[0], others[0] if others else ""


def _reaches_product(graph: Graph, name: str) -> bool:
    """Whether a product of two activations lies close before a tensor."""
    for _ in range(_MAX_STEPS):
        at = producer_of(graph, name)
        if at is None:
            return False
        if at[1].op == "MatMul":
            return all(_is_computed(graph, n) for n in at[1].inputs)
        computed = [n for n in at[1].inputs if n and _is_computed(graph, n)]
        if not computed:
            return False
        name = computed[0]
    return False


def _to_value_product(graph: Graph, name: str, scores: Tensor) -> tuple[int, list[int], int] | None:
    """From the softmax on to the product with the values: its index, the nodes between, the dropout node."""
    path: list[int] = []
    dropout = -1
    for _ in range(_MAX_STEPS):
        readers = list(graph.consumers.get(name, ()))
        for guard in [r for r in readers if graph.nodes[r].op == "IsNaN"]:
            path.append(guard)
            readers.remove(guard)
        if len(readers) != 1:
            return None
        node = graph.nodes[readers[0]]
        if node.op == "MatMul":
            return (readers[0], path, dropout) if node.inputs[0] == name else None
        if node.op not in ("Cast", "Where", "Dropout", "Mul", "Reshape", "Identity"):
            return None
        if not node.outputs or graph.tensors[node.outputs[0]].elements != scores.elements:
            return None
        dropout = readers[0] if node.op == "Dropout" else dropout
        path.append(readers[0])
        name = node.outputs[0]
    return None


def _unscaled(graph: Graph, name: str, reader: int) -> tuple[str, list[int]]:
    """The operand before it was multiplied with a constant for this reader alone."""
    at = producer_of(graph, name)
    if at is None or at[1].op not in ("Mul", "Div") or graph.consumers.get(name) != (reader,):
        return name, []
    constant = [
        n for n in at[1].inputs if graph.tensors[n].kind is TensorKind.CONSTANT and graph.tensors[n].elements == 1
    ]
    source = [n for n in at[1].inputs if n not in constant]
    return (source[0], [at[0]]) if len(source) == 1 and constant else (name, [])


def _unturned(graph: Graph, name: str, reader: int) -> tuple[str, list[int]]:
    """The keys before their last two dimensions were swapped, through the reshapes an exporter puts around that."""
    path: list[int] = []
    turned = False
    for _ in range(4):
        at = producer_of(graph, name)
        if at is None or len(graph.consumers.get(name, ())) != 1:
            break
        index, node = at
        if node.op == "Transpose" and not turned:
            perm = node.attributes.get("perm")
            rank = len(graph.tensors[name].shape)
            swapped = (*range(rank - 2), rank - 1, rank - 2)
            turned = True
            if perm != swapped:
                break
        elif node.op != "Reshape":
            break
        path.append(index)
        name = node.inputs[0]
    return (name, path) if turned else (name, path) if not path else (graph.nodes[path[0]].outputs[0], [])


def _single_node(graph: Graph, index: int) -> Attention | None:
    node = graph.nodes[index]
    names = [*node.inputs, "", "", "", ""]
    if not all(names[:3]):
        return None
    query, key = graph.tensors[names[0]], graph.tensors[names[1]]
    heads = _integer(node, "q_num_heads")
    past = graph.tensors.get(names[4]) if names[4] else None
    lead = query.shape[:2] if len(query.shape) == 4 else (query.shape[0], max(heads, 1))
    keys = key.shape[-2] + (past.shape[-2] if past is not None else 0)
    scores = (*lead, query.shape[-2], keys)
    return Attention((index,), names[0], names[1], names[2], node.outputs[0], names[3], scores)


def _integer(node: Node, name: str) -> int:
    value = node.attributes.get(name, 0)
    return int(value) if isinstance(value, int) else 0


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

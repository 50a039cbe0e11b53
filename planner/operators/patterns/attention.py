"""Scaled dot-product attention as two products around a softmax.

Between them stand scaling (of the scores, or of queries and keys), masks (added, or selecting), soft capping, guards
against NaN, dropout, casts and reshapes. The keys may come transposed in one step or in three. One kernel does it all,
so that the scores are never in memory. A mask that is a constant and the same for all heads is causal or a window: a
kernel follows it without reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.graph import AttributeValue, ConstantValue, DType, Graph, Node, Tensor, TensorKind
from planner.operators.entry import permutation
from planner.operators.formulas import is_number
from planner.operators.rewriting import PATTERNS, Pattern, Rewrite
from planner.operators.specs import needs_gradient

_MOST_STEPS = 12
_RANKS = (3, 4)


@dataclass(slots=True)
class _Spelling:
    """What is gathered of one attention.

    Attributes:
        nodes: indices of the nodes that go.
        added: nodes that come before the attention.
        tensors: their results.
        constants: their shapes.
        mask: what selects or is added to the scores; "" without.
        attributes: of the attention: whether it is causal, whether probabilities are dropped.
        scaled: queries and keys stay scaled, as no one kernel can be given a mask that is trained.
        heads: samples and heads, where queries and keys come with both in one dimension and values do not.
    """

    nodes: set[int] = field(default_factory=set)
    added: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    constants: dict[str, ConstantValue] = field(default_factory=dict)
    mask: str = ""
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    scaled: bool = False
    heads: tuple[int, ...] = ()

    def tensor(self, graph: Graph, name: str) -> Tensor:
        """A tensor of the graph, or one that was added."""
        return graph.tensors.get(name) or next(t for t in self.tensors if t.name == name)

    def make(self, like: Node, op: str, inputs: Sequence[str], result: Tensor, **attributes: tuple[int, ...]) -> str:
        """Add a node that makes a new tensor; the tensor's name."""
        node = Node(result.name, op, tuple(inputs), (result.name,), attributes, like.module, "", like.repeat)
        self.added.append(node)
        self.tensors.append(result)
        return result.name


def _attention(graph: Graph, index: int) -> Rewrite | None:
    """The attention around a product with values."""
    last = graph.nodes[index]
    spelling = _Spelling({index})
    softmax = _to_softmax(graph, last.inputs[0], spelling)
    if softmax is None:
        return None
    scores = graph.tensors[softmax.inputs[0]]
    value = _separate_heads(graph, last.inputs[1], spelling)
    product = _to_product(graph, softmax.inputs[0], scores, spelling)
    if product is None:
        return None
    query = _without_scale(graph, graph.nodes[product].inputs[0], spelling)
    wanted = _with_heads(graph.tensors[query].shape, spelling)
    query = query if graph.tensors[query].shape == wanted else _reshaped(graph, query, wanted, last, spelling)
    key = _keys(graph, product, last, spelling)
    if not spelling.mask and scores.shape[-2] == scores.shape[-1]:
        key, value = _without_repeats(graph, key, value, spelling)
    operands = [spelling.tensor(graph, name) for name in (query, key, value)]
    mask = spelling.tensor(graph, spelling.mask).shape if spelling.mask else ()
    if not _fit(operands, mask):
        return None
    heads = {"q_num_heads": 1, "kv_num_heads": 1} if len(operands[0].shape) == 3 else {}
    node = replace(
        last,
        op="Attention",
        inputs=(query, key, value, *([spelling.mask] if spelling.mask else [])),
        attributes={**heads, **spelling.attributes},
    )
    nodes = [node]
    if len(graph.tensors[last.outputs[0]].shape) < len(operands[0].shape):
        nodes = _join_heads(graph, node, operands, spelling)
    return Rewrite(frozenset(spelling.nodes), (*spelling.added, *nodes), tuple(spelling.tensors), spelling.constants)


def _separate_heads(graph: Graph, name: str, spelling: _Spelling) -> str:
    """The values as [samples, heads, keys, head], before a reshape joined samples and heads, if there was one."""
    shape = graph.tensors[name].shape
    at = _producer(graph, name)
    if len(shape) == 3 and at is not None and at[1].op == "Reshape" and _alone(graph, name):
        before = graph.tensors[at[1].inputs[0]].shape
        if len(before) == 4 and before[2:] == shape[1:]:
            spelling.nodes.add(at[0])
            name, shape = at[1].inputs[0], before
    spelling.heads = shape[:2] if len(shape) == 4 else ()
    return name


def _join_heads(graph: Graph, node: Node, operands: Sequence[Tensor], spelling: _Spelling) -> list[Node]:
    """The attention over separate heads, and a view of its result with samples and heads joined, if that is read."""
    result = graph.tensors[node.outputs[0]]
    made = replace(result, name=f"{result.name}@heads", shape=(*operands[0].shape[:-1], operands[2].shape[-1]))
    readers = graph.consumers.get(result.name, ())
    reader = graph.nodes[readers[0]] if _alone(graph, result.name) else node
    if reader.op == "Reshape" and graph.tensors[reader.outputs[0]].shape == made.shape:
        spelling.nodes.add(readers[0])
        return [replace(node, key=reader.key, outputs=reader.outputs)]
    sizes = f"{result.name}@sizes"
    spelling.tensors += [made, Tensor(sizes, (3,), DType.INT64, TensorKind.CONSTANT)]
    spelling.constants[sizes] = result.shape
    joined = Node(node.key, "Reshape", (made.name, sizes), node.outputs, {}, node.module, node.name, node.repeat)
    return [replace(node, key=made.name, outputs=(made.name,)), joined]


def _with_heads(shape: tuple[int, ...], spelling: _Spelling) -> tuple[int, ...]:
    """The shape of queries or keys with samples and heads as the values have them."""
    heads = spelling.heads
    joined = bool(heads) and len(shape) == 3 and shape[0] == heads[0] * heads[1]
    return (*heads, *shape[1:]) if joined else shape


def _fit(operands: Sequence[Tensor], mask: tuple[int, ...]) -> bool:
    """Whether query, key and value are one attention's: computed, of rank 3 or 4, heads grouped evenly, one mask."""
    query, key, value = (t.shape for t in operands)
    if len({len(query), len(key), len(value)}) > 1 or len(query) not in _RANKS:
        return False
    if any(t.kind is not TensorKind.ACTIVATION and t.kind is not TensorKind.INPUT for t in operands):
        return False
    heads = len(query) == 3 or (query[1] % max(key[1], 1) == 0 and key[1] == value[1])
    full = (query[0], query[1] if len(query) == 4 else 1, query[-2], key[-2])
    masked = len(mask) <= len(full) and all(
        size in (1, most) for size, most in zip(mask[::-1], full[::-1], strict=False)
    )
    same_batch = query[0] == key[0] == value[0]
    return masked and same_batch and heads and key[-1] == query[-1] and key[-2] == value[-2]


def _producer(graph: Graph, name: str) -> tuple[int, Node] | None:
    index = graph.producer.get(name)
    return None if index is None else (index, graph.nodes[index])


def _to_softmax(graph: Graph, name: str, spelling: _Spelling) -> Node | None:
    """From the probabilities that multiply the values back to the softmax."""
    for _ in range(_MOST_STEPS):
        at = _producer(graph, name)
        if at is None:
            return None
        index, node = at
        spelling.nodes.add(index)
        if node.op == "Softmax":
            rank = len(graph.tensors[name].shape)
            return node if rank >= 3 and node.attributes.get("axis", -1) in (-1, rank - 1) else None
        if node.op == "Where":  # a guard: zero where the row was masked altogether
            guard = _producer(graph, node.inputs[0])
            if guard is None or guard[1].op != "IsNaN" or guard[1].inputs[0] != node.inputs[2]:
                return None
            spelling.nodes.add(guard[0])
            name = node.inputs[2]
        elif node.op in ("Cast", "Dropout", "Reshape", "Identity"):
            if node.op == "Dropout":
                spelling.attributes["dropout"] = 1
            name = node.inputs[0]
        else:
            return None
    return None


def _to_product(graph: Graph, name: str, scores: Tensor, spelling: _Spelling) -> int | None:
    """From the softmax back to the product of queries and keys: its index."""
    for _ in range(_MOST_STEPS):
        at = _producer(graph, name)
        if at is None:
            return None
        index, node = at
        spelling.nodes.add(index)
        if node.op == "MatMul":
            return index if graph.tensors[name].elements == scores.elements else None
        step = _scores_among(graph, node, scores)
        if step is None:
            return None
        name, others = step
        for other in others:
            _add_mask(graph, node, other, spelling)
    return None


def _scores_among(graph: Graph, node: Node, scores: Tensor) -> tuple[str, list[str]] | None:
    """The operand of a node between product and softmax that carries the scores, and what masks them."""
    if node.op in ("Cast", "Tanh", "Reshape", "Identity"):
        return node.inputs[0], []
    if node.op not in ("Add", "Sub", "Mul", "Div", "Where"):
        return None
    values = node.inputs[1:] if node.op == "Where" else node.inputs
    full = [n for n in values if graph.tensors[n].elements == scores.elements and _from_product(graph, n)]
    if len(full) != 1:
        return None
    others = [n for n in node.inputs if n != full[0] and graph.tensors[n].elements > 1]
    if others and node.op in ("Mul", "Div"):
        return None
    return full[0], others


def _from_product(graph: Graph, name: str) -> bool:
    """Whether a product of two computed tensors lies close before a tensor."""
    for _ in range(_MOST_STEPS):
        at = _producer(graph, name)
        if at is None:
            return False
        if at[1].op == "MatMul":
            return all(graph.tensors[n].kind is not TensorKind.PARAMETER for n in at[1].inputs)
        if at[1].op not in ("Cast", "Tanh", "Reshape", "Identity", "Add", "Sub", "Mul", "Div", "Where"):
            return False
        computed = [n for n in at[1].inputs if n and graph.tensors[n].kind is TensorKind.ACTIVATION]
        if not computed:
            return False
        name = max(computed, key=lambda n: graph.tensors[n].elements)
    return False


def _add_mask(graph: Graph, node: Node, name: str, spelling: _Spelling) -> None:
    """Count a mask, unless a kernel follows it by itself; a second one is joined with the first."""
    tensor = graph.tensors[name]
    spelling.scaled = spelling.scaled or name in needs_gradient(graph)
    per_head = len(tensor.shape) > 2 and tensor.shape[-3] > 1
    if tensor.kind is TensorKind.CONSTANT and not per_head:
        if len(tensor.shape) > 1 and tensor.shape[-2] > 1:
            spelling.attributes["is_causal"] = 1
        return
    rank = len(graph.tensors[node.outputs[0]].shape)
    if len(tensor.shape) == 3 and rank == 3:
        joined = _with_heads(tensor.shape, spelling)
        shape = joined if len(joined) == 4 else (tensor.shape[0], 1, *tensor.shape[1:])
        name = _viewed(tensor, shape, node, spelling, "heads")
        tensor = spelling.tensor(graph, name)
    if not spelling.mask:
        spelling.mask = name
        return
    first = spelling.tensor(graph, spelling.mask)
    dtype = first.dtype if first.dtype.is_float else tensor.dtype
    sizes_of_both = _broadcast(first.shape, tensor.shape)
    both = Tensor(f"{name}@both.{node.key}", sizes_of_both, dtype, TensorKind.ACTIVATION)
    spelling.mask = spelling.make(node, "Add", (spelling.mask, name), both)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(one), len(other))
    padded = ((1,) * (rank - len(shape)) + shape for shape in (one, other))
    return tuple(max(pair) for pair in zip(*padded, strict=True))


def _alone(graph: Graph, name: str) -> bool:
    return len(graph.consumers.get(name, ())) == 1 and name not in graph.outputs


def _without_scale(graph: Graph, name: str, spelling: _Spelling) -> str:
    """The operand before it was multiplied by a number for the product alone."""
    at = _producer(graph, name)
    if spelling.scaled or at is None or at[1].op not in ("Mul", "Div") or not _alone(graph, name):
        return name
    source = [n for n in at[1].inputs if not is_number(graph, n)]
    if len(source) != 1:
        return name
    spelling.nodes.add(at[0])
    return source[0]


def _keys(graph: Graph, product: int, last: Node, spelling: _Spelling) -> str:
    """The keys as [..., keys, head], back from where the product reads them as [..., head, keys]."""
    turned = graph.nodes[product].inputs[1]
    rank = len(graph.tensors[turned].shape)
    wanted = _with_heads(_swapped(graph.tensors[turned].shape), spelling)
    name = turned
    for _ in range(_MOST_STEPS):
        name = _without_scale(graph, name, spelling)
        at = _producer(graph, name)
        if at is None or at[1].op not in ("Transpose", "Reshape") or not _alone(graph, name):
            break
        index, node = at
        if node.op == "Transpose":
            before = graph.tensors[node.inputs[0]].shape
            perm = permutation(node.attributes, len(before))
            spelling.nodes.add(index)
            swapped = _swapped(perm)
            if swapped == tuple(range(len(perm))):
                source = _without_scale(graph, node.inputs[0], spelling)
                return _reshaped(graph, source, wanted, node, spelling)
            made = Tensor(f"{name}@turned", wanted, graph.tensors[name].dtype, TensorKind.ACTIVATION)
            if _swapped(graph.tensors[name].shape) == wanted:
                return spelling.make(node, "Transpose", (node.inputs[0],), made, perm=swapped)
            spelling.nodes.discard(index)
            break
        spelling.nodes.add(index)
        name = node.inputs[0]
    back = _swapped(tuple(range(rank)))
    spelling.nodes -= _steps_between(graph, turned, name)
    flat = _swapped(graph.tensors[turned].shape)
    made = Tensor(f"{turned}@turned", flat, graph.tensors[turned].dtype, TensorKind.ACTIVATION)
    name = spelling.make(last, "Transpose", (turned,), made, perm=back)
    return name if flat == wanted else _viewed(made, wanted, last, spelling)


def _steps_between(graph: Graph, name: str, source: str) -> set[int]:
    """Nodes from a tensor back to the one it was reshaped and scaled from."""
    steps: set[int] = set()
    while name != source:
        index = graph.producer[name]
        steps.add(index)
        name = next(n for n in graph.nodes[index].inputs if not is_number(graph, n))
    return steps


def _without_repeats(graph: Graph, key: str, value: str, spelling: _Spelling) -> tuple[str, str]:
    """Keys and values before each head was repeated for its group of queries: a kernel without a mask reads them once.

    With a mask, frameworks repeat them.
    """
    sources: list[str] = []
    steps: list[int] = []
    made = [node for node in spelling.added if node.key == key and node.op == "Reshape"]
    for name, first in ((made[0].inputs[0] if made else key, [] if made else ["Reshape"]), (value, ["Reshape"])):
        for op in (*first, "Expand", "Unsqueeze"):
            at = _producer(graph, name)
            if at is None or at[1].op != op or not _alone(graph, name):
                return key, value
            steps.append(at[0])
            name = at[1].inputs[0]
        sources.append(name)
    spelling.nodes.update(steps)
    spelling.added = [node for node in spelling.added if node not in made]
    return sources[0], sources[1]


def _reshaped(graph: Graph, name: str, wanted: tuple[int, ...], like: Node, spelling: _Spelling) -> str:
    """A tensor in the shape of the keys: itself, what it was reshaped from, or a reshape of that."""
    at = _producer(graph, name)
    if at is not None and at[1].op == "Reshape" and _alone(graph, name):
        spelling.nodes.add(at[0])
        name = at[1].inputs[0]
    return name if graph.tensors[name].shape == wanted else _viewed(graph.tensors[name], wanted, like, spelling)


def _viewed(tensor: Tensor, wanted: tuple[int, ...], like: Node, spelling: _Spelling, what: str = "keys") -> str:
    """Add a reshape of a tensor; the result's name, in which `what` says what it is for."""
    sizes = f"{tensor.name}@sizes.{like.key}"
    spelling.tensors.append(Tensor(sizes, (len(wanted),), DType.INT64, TensorKind.CONSTANT))
    spelling.constants[sizes] = wanted
    made = replace(tensor, name=f"{tensor.name}@{what}.{like.key}", shape=wanted)
    return spelling.make(like, "Reshape", (tensor.name, sizes), made)


def _swapped(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


PATTERNS.register("attention", Pattern(frozenset({"MatMul"}), _attention))

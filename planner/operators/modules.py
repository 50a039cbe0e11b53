"""Modules of a model by the names that training frameworks give them, and operators by name or pattern.

Which operators a module consists of is found from the operators themselves (a product with weights, an activation
function, another product), so that bundled models, configurations and exports are read alike. Only `moe` goes by module
paths: the part of its layer that holds the experts.

A mixture of experts may be written as a product with weights that are gathered for each token (`ExpertProduct`).

The names are those of Megatron-Core's `recompute_modules` and `offload_modules`, and `act`, the activation functions of
all layers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from planner.graph import Graph, Node, TensorKind, per_graph, per_model
from planner.graph.blocks import layer_of


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


@per_model
def find_expert_products(graph: Graph) -> tuple[ExpertProduct, ...]:
    """All products with weights gathered by computed indices, in graph order. O(nodes)."""
    products = []
    for i, node in enumerate(graph.nodes):
        if node.op not in ("Gather", "GatherND") or graph.tensors[node.inputs[0]].kind is not TensorKind.PARAMETER:
            continue
        weight, readers = graph.tensors[node.inputs[0]], graph.consumers.get(node.outputs[0], ())
        picked = graph.tensors[node.inputs[1]].kind is TensorKind.ACTIVATION
        if len(weight.shape) == 3 and picked and len(readers) == 1 and graph.nodes[readers[0]].op == "MatMul":
            products.append(ExpertProduct(i, readers[0], weight.name))
    return tuple(products)


PRODUCTS = frozenset({"MatMul", "Gemm", "com.microsoft.FusedMatMul"})

ACTIVATIONS = frozenset({
    "Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu", "Sigmoid",
    "Softplus", "Swish", "Tanh", "com.microsoft.BiasGelu", "com.microsoft.FastGelu", "com.microsoft.Gelu",
    "com.microsoft.QuickGelu",
})  # fmt: skip

_ELEMENTWISE = ACTIVATIONS | frozenset({
    "Add", "BiasAdd", "Cast", "Clip", "Concat", "Div", "Dropout", "Expand", "Identity", "Max", "Min", "Mul", "Neg",
    "Pow", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze",
})  # fmt: skip
_MOVES = frozenset({"Cast", "Dropout", "Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_ROTARY = frozenset({"RotaryEmbedding", "com.microsoft.RotaryEmbedding", "Cos", "Sin"})


def node_names(node: Node) -> Iterator[str]:
    """Names that a pattern may match: the operator's type, name and first result, and every module that contains it."""
    yield from (name for name in (node.op, node.name, node.key) if name)
    steps = node.module.split(".") if node.module else []
    yield from (".".join(steps[: k + 1]) for k in range(len(steps)))


def is_called(node: Node, pattern: str) -> bool:
    """True if a pattern with shell wildcards (`*`, `?`, `[]`) matches one of the operator's names."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in node_names(node))


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """A kind of module that frameworks can run forward a second time in the backward pass.

    Attributes:
        nodes: indices of the operators of all modules of the kind.
        drops_output: its results are dropped, too, and made again before they are read next (Megatron-Core's
            `CheckpointWithoutOutput`); else what other operators keep of them stays (a plain checkpoint).
        usual: a framework has a name for it; a search that may choose tries such kinds only.
    """

    nodes: Callable[[Graph], frozenset[int]]
    drops_output: bool
    usual: bool = True


@dataclass(frozen=True, slots=True)
class Mlp:
    """Products with weights, activation functions on their results, and the product that reads these.

    Attributes:
        inner: operators between the products.
        nodes: those, the products, and the bias of the last one.
        firsts: the products that the operators between read.
        experts: the products are with the weights of experts.
    """

    inner: frozenset[int]
    nodes: frozenset[int]
    firsts: frozenset[int]
    experts: bool


@per_graph
def mlps(graph: Graph) -> tuple[Mlp, ...]:
    """All MLPs of a model, in graph order."""
    modules: list[Mlp] = []
    if not _acts(graph, range(len(graph.nodes))):
        return ()
    for down in range(len(graph.nodes)):
        if not _is_product(graph, down):
            continue
        inner, ups = _behind(graph, down, _ELEMENTWISE)
        if ups and all(_is_product(graph, up) for up in ups) and _acts(graph, inner):
            members = frozenset({*inner, *ups, down, *_biases(graph, down)})
            experts = any(_is_of_experts(graph, node) for node in (*ups, down))
            modules.append(Mlp(inner, members, ups, experts))
    return tuple(modules)


def _biases(graph: Graph, node: int) -> list[int]:
    """The operator that adds a bias to what an operator makes, if any."""
    return [reader for reader in graph.consumers.get(graph.nodes[node].outputs[0], ()) if _adds_bias(graph, reader)]


def _acts(graph: Graph, nodes: Iterable[int]) -> bool:
    return any(graph.nodes[i].op in ACTIVATIONS for i in nodes)


def _behind(graph: Graph, node: int, through: frozenset[str]) -> tuple[frozenset[int], frozenset[int]]:
    """Operators of some types from which an operator's operands come, and the first others that these read."""
    inner, ends, left = set[int](), set[int](), [node]
    while left:
        node = left.pop()
        for name in set(graph.nodes[node].inputs).difference(_matrices(graph, node)):
            at = graph.producer.get(name, -1)
            if at < 0 or at in inner or graph.tensors[name].kind is not TensorKind.ACTIVATION:
                continue
            if graph.nodes[at].op in through:
                inner.add(at)
                left.append(at)
            else:
                ends.add(at)
    return frozenset(inner), frozenset(ends)


def _is_product(graph: Graph, node: int) -> bool:
    return graph.nodes[node].op in PRODUCTS and bool(_matrices(graph, node))


def _matrices(graph: Graph, node: int) -> tuple[str, ...]:
    """Operands of an operator that are weights, or were picked from those of all experts."""
    picked = _picked_weights(graph)
    return tuple(name for name in graph.nodes[node].inputs if name in graph.sources or name in picked)


@per_model
def _picked_weights(graph: Graph) -> frozenset[str]:
    return frozenset(graph.nodes[found.gather].outputs[0] for found in find_expert_products(graph))


def _is_of_experts(graph: Graph, node: int) -> bool:
    """True if the operator multiplies with a matrix for each expert, or lies in a module of experts."""
    steps = graph.nodes[node].module.lower().split(".")
    if any("shared" in step for step in steps):
        return False
    stacked = any(len(graph.tensors[name].shape) > 2 for name in _matrices(graph, node))
    return stacked or any("expert" in step for step in steps)


@per_graph
def _norms(graph: Graph) -> frozenset[int]:
    ends = ("LayerNormalization", "RMSNormalization")
    return frozenset(i for i, node in enumerate(graph.nodes) if node.op.endswith(ends))


def _activations(graph: Graph) -> frozenset[int]:
    """What MLPs compute between their products, biases of the first ones aside."""
    return frozenset(i for mlp in mlps(graph) for i in mlp.inner if not _adds_bias(graph, i))


def _adds_bias(graph: Graph, node: int) -> bool:
    return graph.nodes[node].op in ("Add", "BiasAdd") and any(n in graph.sources for n in graph.nodes[node].inputs)


def _expert_activations(graph: Graph) -> frozenset[int]:
    return _activations(graph).intersection(i for mlp in mlps(graph) if mlp.experts for i in mlp.inner)


@per_graph
def _attentions(graph: Graph) -> frozenset[int]:
    return frozenset(i for i, node in enumerate(graph.nodes) if node.op.endswith("Attention"))


def _beside_experts(graph: Graph) -> frozenset[int]:
    """Operators of the MLPs that every token goes through, in layers that hold experts, too."""
    routed = {layer_of(graph.nodes[i].module) for mlp in mlps(graph) if mlp.experts for i in mlp.nodes}
    shared = (mlp for mlp in mlps(graph) if not mlp.experts)
    return frozenset(i for mlp in shared if layer_of(graph.nodes[min(mlp.nodes)].module) in routed for i in mlp.nodes)


def _dense(graph: Graph) -> frozenset[int]:
    """Operators of the MLPs in layers without experts."""
    dense_mlps = frozenset(i for mlp in mlps(graph) if not mlp.experts for i in mlp.nodes)
    return dense_mlps - _beside_experts(graph)


def _mixtures(graph: Graph) -> frozenset[int]:
    """Of each layer with experts the submodule that holds them, with router and shared experts, without the sum that
    adds it to the layer's input."""
    modules = {graph.nodes[min(mlp.nodes)].module for mlp in mlps(graph) if mlp.experts}
    submodules = {_submodule(module) for module in modules if _submodule(module) != layer_of(module)}
    inside = {i for i, node in enumerate(graph.nodes) if _submodule(node.module) in submodules}
    return frozenset(inside - {i for i in inside if _joins(graph, i, inside)})


def _submodule(module: str) -> str:
    layer = layer_of(module)
    below = module[len(layer) :].strip(".").partition(".")[0]
    return f"{layer}.{below}" if below else layer


def _joins(graph: Graph, node: int, inside: set[int]) -> bool:
    """True if the operator is a sum with an operand from outside a set of operators."""
    made = [graph.producer.get(name, -1) for name in graph.nodes[node].inputs]
    return graph.nodes[node].op == "Add" and any(at >= 0 and at not in inside for at in made)


def _mla_up_projections(graph: Graph) -> frozenset[int]:
    """Products that bring compressed queries, keys and values of attention to their heads, and what follows up to it.

    Compressed are those that come out of a norm which reads another product's result.
    """
    nodes = set[int]()
    for attention in _attentions(graph):
        inner, ends = _behind(graph, attention, _ELEMENTWISE | _ROTARY)
        ups = {end for end in ends if _is_product(graph, end) and _is_compressed(graph, end)}
        if ups:
            nodes |= inner | ups
    return frozenset(nodes)


def _is_compressed(graph: Graph, product: int) -> bool:
    norms = [end for end in _behind(graph, product, _ELEMENTWISE)[1] if end in _norms(graph)]
    return any(_is_product(graph, end) for norm in norms for end in _behind(graph, norm, frozenset({"Split"}))[1])


def _before(graph: Graph, nodes: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
    """What some operators read, back to the norms of the residual stream: these norms, and the products on the way.

    Norms of queries, keys or compressed values, which read a product's result, are passed.
    """
    norms, products, left = set[int](), set[int](), list(nodes)
    seen = set(left)
    while left:
        for name in graph.nodes[left.pop()].inputs:
            at = graph.producer.get(name, -1)
            if at < 0 or at in seen or graph.tensors[name].kind is not TensorKind.ACTIVATION:
                continue
            seen.add(at)
            if at in _norms(graph) and not all(_is_product(graph, end) for end in _behind(graph, at, _MOVES)[1]):
                norms.add(at)
            elif at not in _attentions(graph):
                products.update((at,) if _is_product(graph, at) else ())
                left.append(at)
    return frozenset(norms), frozenset(products)


@per_graph
def _before_attention(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    return _before(graph, _attentions(graph))


def _attention_norms(graph: Graph) -> frozenset[int]:
    return _before_attention(graph)[0]


def _projections(graph: Graph) -> frozenset[int]:
    """Products that make the queries, keys and values of attention."""
    return _before_attention(graph)[1]


def _output_projections(graph: Graph) -> frozenset[int]:
    """Products with weights that read the results of attention."""
    products = (i for i in range(len(graph.nodes)) if _is_product(graph, i))
    return frozenset(i for i in products if _behind(graph, i, _MOVES)[1] & _attentions(graph))


def _mlp_norms(graph: Graph) -> frozenset[int]:
    return _before(graph, (up for mlp in mlps(graph) for up in mlp.firsts))[0]


def _expert_firsts(graph: Graph) -> frozenset[int]:
    return frozenset(up for mlp in mlps(graph) if mlp.experts for up in mlp.firsts)


MODULE_KINDS: Mapping[str, ModuleKind] = {
    "layernorm": ModuleKind(_norms, drops_output=True),
    "act": ModuleKind(per_graph(_activations), drops_output=True, usual=False),
    "moe_act": ModuleKind(per_graph(_expert_activations), drops_output=True),
    "mla_up_proj": ModuleKind(per_graph(_mla_up_projections), drops_output=True),
    "core_attn": ModuleKind(_attentions, drops_output=False),
    "mlp": ModuleKind(per_graph(_dense), drops_output=False),
    "shared_experts": ModuleKind(per_graph(_beside_experts), drops_output=False),
    "moe": ModuleKind(per_graph(_mixtures), drops_output=False),
    "attn_norm": ModuleKind(per_graph(_attention_norms), drops_output=True, usual=False),
    "qkv_linear": ModuleKind(per_graph(_projections), drops_output=False, usual=False),
    "attn_proj": ModuleKind(per_graph(_output_projections), drops_output=False, usual=False),
    "mlp_norm": ModuleKind(per_graph(_mlp_norms), drops_output=True, usual=False),
    "expert_fc1": ModuleKind(per_graph(_expert_firsts), drops_output=False, usual=False),
}
"""Modules by name."""


def module_nodes(graph: Graph, name: str) -> frozenset[int]:
    """Operators of the modules of a kind, or that go by a pattern (`Gelu`, `Gelu:*`, `*.mlp.*`); none where the model
    has none."""
    if name in MODULE_KINDS:
        return MODULE_KINDS[name].nodes(graph)
    pattern = name.removesuffix(":*")
    return frozenset(i for i, node in enumerate(graph.nodes) if is_called(node, pattern))


def drops_output(name: str) -> bool:
    """True if the results of a kind of module, or of operators by pattern, are dropped with what is inside."""
    return name not in MODULE_KINDS or MODULE_KINDS[name].drops_output

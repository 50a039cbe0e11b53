"""Find the products that multiply in a narrow format, and adjust their traffic and kept activations.

Linear layers and the experts of mixtures multiply in the precision's narrow format. The compute type stays for
attention, for a router (a product from whose columns the largest are picked), for the head (a product with a column for
every class of the loss), for the numbered layers that the precision leaves out, and where a dimension is no multiple of
the format's blocks (Transformer Engine's `Linear` inside Megatron Core's layers; its output layer and router are
plain).

Each product reads operands of the format, and a kernel beside it casts: of the activation x in forward, of the result's
gradient y in backward, both by rows and by columns,

    forward   x + w -> y           : (x + w) e + 16 bit y,           cast x: r x 16 bit + 2 x e
    backward  y, w -> x; y, x -> w : (2 y + w + x) e + 16 bit (x, w), cast y: r y 16 bit + 2 y e

with e bytes of an element and r readings; what backward does not need is not made. The cast activation is kept by
columns alone, which the weight's gradient multiplies; weights are cast at the update. Products that read the same
activation share its cast, as they are one product with joined weights where frameworks run them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import NarrowFormat, Precision
from planner.graph import DType, Graph, Note, NoteLevel, Tensor, TensorKind
from planner.graph.blocks import layer_of
from planner.operators.modules import ExpertProduct, find_expert_products
from planner.operators.saved import logits_of
from planner.operators.site import JointCut, Role, rule_of
from planner.operators.types import OpSpec

_PICKS = "TopK"
"""The operator by which a router picks experts."""
_PEAK_NAMES = {
    DType.FLOAT64: "fp64",
    DType.FLOAT32: "fp32",
    DType.FLOAT16: "fp16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT8: "fp8",
    DType.FLOAT4: "fp4",
    DType.INT8: "int8",
    DType.UINT8: "int8",
}


@dataclass(frozen=True, slots=True)
class Product:
    """A product that multiplies in a narrow format.

    Attributes:
        node: its index.
        reads: the computed operands that are cast; none of a whole mixture in one operator, whose traffic stays as it
            is described.
        weights: elements of the weights that it reads.
    """

    node: int
    reads: tuple[Tensor, ...] = ()
    weights: float = 0.0


@dataclass(frozen=True, slots=True)
class NarrowProducts:
    """All products of a graph that multiply in a narrow format, in graph order."""

    format: NarrowFormat
    products: tuple[Product, ...]

    @property
    def kept_bytes(self) -> dict[int, float]:
        """Bytes an element in which nodes keep their activations for backward."""
        return {product.node: self.format.element_bytes for product in self.products if product.reads}

    def change(
        self, graph: Graph, rows: np.ndarray, beside: np.ndarray, sizes: Mapping[DType, float], launches: float
    ) -> None:
        """Change the work of the products in place, in the formulas and names above. O(products).

        Args:
            graph: the graph.
            rows: [nodes, columns] work, in the order of `planner.costs.work`.
            beside: [2, nodes] traffic of kernels that run beside the nodes' own, forward and backward.
            sizes: bytes an element takes in the compute type, by file type.
            launches: kernels that the launch of one by a library counts for.
        """
        e, r = self.format.element_bytes, self.format.readings
        known: set[str] = set()
        for product in (each for each in self.products if each.reads):
            i, node = product.node, graph.nodes[product.node]
            result = graph.tensors[node.outputs[0]]
            saved, y = sizes[result.dtype] - e, result.elements * node.repeat
            x = sum(t.elements for t in product.reads) * node.repeat
            cast = sum(t.elements for t in product.reads if t.name not in known) * node.repeat
            known.update(t.name for t in product.reads)
            towards, weight = rows[i, 4:6] > 0
            rows[i, 2] -= saved * (x + product.weights)
            rows[i, 3] += launches * r * (cast > 0)
            beside[0, i] += cast * (r * sizes[result.dtype] + (1 + weight) * e)
            if towards or weight:
                copies = int(towards) + int(weight)
                rows[i, 7] -= saved * (copies * y + weight * x + towards * product.weights)
                rows[i, 8] += launches * r
                beside[1, i] += y * (r * sizes[result.dtype] + copies * e)

    def note(self, precision: Precision) -> Note:
        """Which products multiply in the format, to be said to the user."""
        message = (
            f"{len(self.products)} products with weights multiply in {self.format.name}; attention, routers, the head "
            f"and what does not divide into the format's blocks in {precision.format}; every parameter is stored as "
            "those of a linear layer"
        )
        return Note(NoteLevel.INFO, "narrow-products", message)


def product_formats(types: Sequence[DType], precision: Precision, narrow: NarrowProducts | None) -> tuple[str, ...]:
    """The format that each node's matrix units compute in, as devices name it.

    Args:
        types: what each node computes in, but for narrow products.
        precision: the training precision.
        narrow: the products in its narrow format.
    """
    inside = {product.node for product in narrow.products} if narrow else set()
    names = {dtype: _PEAK_NAMES.get(dtype, dtype.value) for dtype in DType} | {precision.compute: precision.format}
    return tuple(narrow.format.name if narrow and i in inside else names[dtype] for i, dtype in enumerate(types))


def narrow_products(graph: Graph, specs: Sequence[OpSpec], precision: Precision) -> NarrowProducts | None:
    """The products of a graph that multiply in the precision's narrow format; None where it has none. O(nodes)."""
    narrow_format = precision.narrow
    if narrow_format is None:
        return None
    wide, (losses, classes) = _left_out(graph, precision), _losses(graph, specs)
    gathered = {e.product: e for e in find_expert_products(graph)}
    products: list[Product] = []
    for i, (node, spec) in enumerate(zip(graph.nodes, specs, strict=True)):
        if not spec.matrix_flops or layer_of(node.module) in wide:
            continue
        if rule_of(node.op).joint is JointCut.EXPERTS:
            products.append(Product(i))
            continue
        product = _product(graph, i, gathered.get(i))
        if product is None or not _divides(graph, product, narrow_format.multiple):
            continue
        result = graph.tensors[node.outputs[0]]
        if not _picked_from(graph, result, losses if result.shape[-1] in classes else frozenset()):
            products.append(product)
    return NarrowProducts(narrow_format, tuple(products))


def _product(graph: Graph, i: int, expert: ExpertProduct | None) -> Product | None:
    """A node as a product of activations with stored matrices; None for any other operator."""
    node, rule = graph.nodes[i], rule_of(graph.nodes[i].op)
    roles = {name: rule.weights.get(p) for p, name in enumerate(node.inputs) if name}
    operands = [graph.tensors[name] for name, role in roles.items() if role is not Role.BIAS]
    made = graph.nodes[expert.gather].outputs[0] if expert else ""
    reads = tuple(t for t in operands if t.kind in (TensorKind.ACTIVATION, TensorKind.INPUT) and t.name != made)
    stored = [t for t in operands if t.kind is TensorKind.PARAMETER and roles[t.name] is Role.MATRIX]
    weights = float(sum(t.elements for t in stored if len(t.shape) > 1))
    if expert:
        weights = float(min(graph.tensors[expert.weight].elements, graph.tensors[made].elements))
    return Product(i, reads, weights) if weights and reads and rule.window is None and rule.heavy else None


def _divides(graph: Graph, product: Product, multiple: int) -> bool:
    """Whether rows, columns and what is summed over are multiples of the format's blocks."""
    node = graph.nodes[product.node]
    tensors = [t for t in (*product.reads, graph.tensors[node.outputs[0]]) if t.shape]
    return not any(t.shape[-1] % multiple or math.prod(t.shape[:-1]) % min(multiple, 8) for t in tensors)


def _left_out(graph: Graph, precision: Precision) -> frozenset[str]:
    """The numbered layers at either end that the precision leaves in the compute type."""
    layers = list(dict.fromkeys(layer for node in graph.nodes if (layer := layer_of(node.module))[-1:].isdigit()))
    return frozenset(layers[: precision.first] + layers[max(0, len(layers) - precision.last) :])


def _losses(graph: Graph, specs: Sequence[OpSpec]) -> tuple[frozenset[str], frozenset[int]]:
    """Names of what losses choose classes by, and their numbers of classes: logits that the graph ends at, or its own.

    Every output with as many columns as the logits is taken to be one more (predictions of tokens further on).
    """
    graph_losses = {graph.nodes[i].inputs[0] for i, spec in enumerate(specs) if "loss_elements" in spec.details}
    columns = {graph.tensors[name].shape[1] for name in graph_losses if len(graph.tensors[name].shape) > 1}
    logits = logits_of(graph)
    if logits:
        columns.add(graph.tensors[logits].shape[-1])
    return frozenset(graph_losses.union(graph.outputs)), frozenset(columns)


def _picked_from(graph: Graph, result: Tensor, losses: frozenset[str]) -> bool:
    """Whether experts or, in a loss, classes are picked by a product's columns, which only operators without a matrix
    of their own change before."""
    names, seen = [result.name], set[str]()
    while names:
        name = names.pop()
        seen.add(name)
        if name in losses:
            return True
        for node in (graph.nodes[r] for r in graph.consumers.get(name, ())):
            rule = rule_of(node.op)
            scores = {_PICKS: 0}.get(node.op, 1 if rule.joint is JointCut.EXPERTS else -1)
            if scores >= 0 and name == node.inputs[scores]:
                return True
            computed = {n for n in node.inputs if n and graph.tensors[n].kind is TensorKind.ACTIVATION}
            if computed == {name} and not rule.heavy:
                alike = (n for n in node.outputs if n in graph.tensors and n not in seen)
                names += [n for n in alike if graph.tensors[n].elements == result.elements]
    return False

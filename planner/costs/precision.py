"""Number formats of training: the type of matrix products, bytes of a parameter in memory and on links, and which
products multiply in a narrow format.

A precision is a table entry with a name; options after a colon change how its parameters are stored and exchanged:
`mxfp8:grads=fp32,last=4`, `bf16:grads=fp32,reduce=bf16`. An optimizer is named alike: `adam:moments=bf16`.

The narrow precisions are the recipes of Transformer Engine as Megatron Core runs them. Activations between operators,
attention, routers, embeddings and the head stay in bf16. Each operand of a product is cast to the narrow format, once
by rows and once by columns: the scales of a block run along the dimension that is summed over, and the gradients sum
over the other one (NVIDIA, Transformer Engine, `Linear` and its recipes `DelayedScaling`, `Float8CurrentScaling`,
`Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`).

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

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import JobError, UsageError
from planner.graph import DType, Graph, Note, NoteLevel, Tensor, TensorKind
from planner.graph.blocks import layer_of
from planner.hardware.types import Device
from planner.operators.entry import JointCut, Role, rule_of
from planner.operators.modules import ExpertProduct, find_expert_products
from planner.operators.saved import logits_of
from planner.operators.types import OpSpec
from planner.registry import chosen, with_options


@dataclass(frozen=True, slots=True)
class NarrowFormat:
    """A format of less than 16 bits in which linear layers multiply.

    Attributes:
        name: as a device states its peak.
        element_bytes: one copy of an element, its part of the block's scales included.
        readings: how often a cast reads the 16-bit values: twice if it needs their maximum first.
        gathered_bytes: bytes a parameter in which ranks gather weights that are stored in the format.
        multiple: every dimension of a product must be a multiple of this.
    """

    name: str
    element_bytes: float
    readings: int
    gathered_bytes: float
    multiple: int = 16

    @property
    def pair_bytes(self) -> float:
        """Bytes of an element's two copies, by rows and by columns."""
        return 2 * self.element_bytes


FP8 = NarrowFormat("fp8", 1.0, 1, 1.0)
"""8 bits with one scale a tensor, known from the steps before (delayed scaling)."""
FP8_CURRENT = NarrowFormat("fp8", 1.0, 2, 1.0)
"""8 bits with one scale a tensor, that of its own largest value (current scaling)."""
FP8_BLOCKS = NarrowFormat("fp8", 1 + 4 / 128, 1, 1.0, 128)
"""8 bits with an fp32 scale for every 128 elements (DeepSeek-V3, section 3.3)."""
MXFP8 = NarrowFormat("mxfp8", 1 + 1 / 32, 1, 2.0, 32)
"""8 bits with an 8-bit scale for every 32 elements (OCP Microscaling). Ranks gather 16 bits and cast on arrival."""
NVFP4 = NarrowFormat("nvfp4", 1 / 2 + 1 / 16, 2, 2.0, 32)
"""4 bits with an 8-bit scale for every 16 elements, and one a tensor from its largest value."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights, gradients and activations are stored and computed.

    Attributes:
        name: what the user writes, options included.
        format: the number format that matrix units compute in, by which a device states its peaks.
        compute: type of activations and of matrix units' inputs.
        weight_bytes: bytes a parameter takes in the working copy, and when ranks gather it.
        gradient_bytes: bytes a parameter's gradient takes when it travels.
        master_bytes: bytes of the fp32 master copy, kept with the optimizer state; 0 without one.
        spare_bytes: bytes of a gradient that stay beside those that travel: one in the compute type, zeroed, not freed,
            or the rest of a wider sum.
        copy_bytes: bytes of a parameter's narrow copies, beside `weight_bytes`. Of weights that are gathered in every
            pass they are made of what was gathered.
        narrow: what linear layers multiply in; None for the compute type.
        first, last: numbered layers at either end that multiply in the compute type.
    """

    name: str
    format: str
    compute: DType
    weight_bytes: float
    gradient_bytes: float
    master_bytes: int
    spare_bytes: float = 0
    copy_bytes: float = 0
    narrow: NarrowFormat | None = None
    first: int = 0
    last: int = 0

    @property
    def loss_bytes(self) -> float:
        """Bytes of an element of the loss: mixed precision computes it in fp32, a pure one in its own type."""
        return 4.0 if self.master_bytes else self.compute.bits / 8

    @property
    def held_gradient_bytes(self) -> float:
        """Bytes of a parameter's gradients in memory; `gradient_bytes` are those that travel."""
        return self.gradient_bytes + self.spare_bytes

    @property
    def held_weight_bytes(self) -> float:
        """Bytes of a parameter's working copies in memory; `weight_bytes` are those that travel."""
        return self.weight_bytes + self.copy_bytes

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that matrix units must compute in."""
        return (self.format, self.narrow.name) if self.narrow else (self.format,)

    def computes_as(self, other: Precision) -> bool:
        """Whether passes take as long as in another precision, and nothing fewer bytes: plans are no faster in it."""
        own, its = (
            (each.weight_bytes, each.gradient_bytes, each.master_bytes, each.spare_bytes, each.copy_bytes)
            for each in (self, other)
        )
        alike = (self.formats, self.compute, self.first, self.last) == (
            other.formats, other.compute, other.first, other.last
        )  # fmt: skip
        return alike and all(mine >= there for mine, there in zip(own, its, strict=True))

    def lacks(self, device: Device) -> tuple[str, ...]:
        """The formats that a device does not compute in."""
        return tuple(name for name in self.formats if name not in device.matrix_flop_per_s)


class Stored(StrEnum):
    """A format in which a parameter's figures are stored or sent; OWN is the precision's usual one."""

    OWN = "own"
    BF16 = "bf16"
    FP32 = "fp32"

    def bytes_or(self, usual: float) -> float:
        """Bytes of one figure, `usual` for the precision's own."""
        return {Stored.OWN: usual, Stored.BF16: 2, Stored.FP32: 4}[self]


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of a precision, written after a colon behind its name.

    Attributes:
        grads: sum of the gradients over micro-batches (Megatron's main gradients).
        reduce: gradients while ranks exchange them; own is that of `grads`.
        weights: working copy of the weights beside the narrow ones; own keeps none where the recipe does without.
        first, last: numbered layers at either end that multiply in bf16.
    """

    grads: Stored = Stored.OWN
    reduce: Stored = Stored.OWN
    weights: Stored = Stored.OWN
    first: int = 0
    last: int = 0

    def applied(self, base: Precision, name: str) -> Precision:
        """A precision of that name with these options.

        Raises:
            UsageError: an option that says nothing about the precision.
        """
        held = self.grads.bytes_or(base.gradient_bytes)
        sent = self.reduce.bytes_or(held)
        spare = max(0.0, held - sent) + base.spare_bytes
        others = [f.name for f in dataclasses.fields(self)[2:] if getattr(self, f.name) != f.default]
        if others and (base.narrow is None or min(self.first, self.last) < 0 or self.weights is Stored.FP32):
            hint = "first=N and last=N with N of 0 or more, and weights=bf16, go with fp8, mxfp8 and nvfp4"
            raise UsageError(f"precision {name!r} cannot have {', '.join(others)} so", hint=hint)
        wide = _recipe(name, base.narrow, alone=False) if base.narrow and self.weights is Stored.BF16 else base
        return dataclasses.replace(
            wide, name=name, gradient_bytes=sent, spare_bytes=spare, first=self.first, last=self.last
        )


def _recipe(name: str, narrow: NarrowFormat, *, alone: bool) -> Precision:
    """A narrow recipe, whose weights are stored in the narrow format alone (Megatron's `--fp8-param-gather`) or beside
    those in bf16."""
    sent = narrow.gathered_bytes if alone else 2
    copies = narrow.pair_bytes - (sent if alone else 0)
    return Precision(name, "bf16", DType.BFLOAT16, sent, 2, 4, copy_bytes=copies, narrow=narrow)


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", "fp32", DType.FLOAT32, 4, 4, 0),
        Precision("tf32", "tf32", DType.FLOAT32, 4, 4, 0),
        Precision("bf16", "bf16", DType.BFLOAT16, 2, 2, 4),
        Precision("fp16", "fp16", DType.FLOAT16, 2, 2, 4),
        Precision("bf16-fp32grad", "bf16", DType.BFLOAT16, 2, 4, 4),
        Precision("bf16-deepspeed", "bf16", DType.BFLOAT16, 2, 4, 4, spare_bytes=2),  # its BF16_Optimizer
        Precision("bf16-pure", "bf16", DType.BFLOAT16, 2, 2, 0),
        _recipe("fp8", FP8, alone=True),
        _recipe("fp8-cs", FP8_CURRENT, alone=True),
        _recipe("fp8-blockwise", FP8_BLOCKS, alone=False),
        _recipe("mxfp8", MXFP8, alone=True),
        _recipe("nvfp4", NVFP4, alone=False),
    )
}

BEST_FIRST = ("bf16", "fp16", "fp32")
"""Default precisions, best first: fp16 needs loss scaling, and fp32 takes twice the memory."""

OPTIMIZER_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0, "momentum": 1, "adafactor": 0, "lamb": 2}
"""Running means that an optimizer keeps of each parameter's gradient, without the master copy."""


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Options of an optimizer, written after a colon behind its name.

    Attributes:
        moments: its running means; own is fp32.
    """

    moments: Stored = Stored.OWN


def precision(name: str) -> Precision:
    """The precision of that name, which may have options: `mxfp8:grads=fp32`.

    Raises:
        UsageError: no precision has that name, or it does not have such options.
    """
    key, _, text = name.partition(":")
    base = chosen("precision", key, PRECISIONS)
    return with_options(FormatOptions(), text, f"precision {key!r}").applied(base, name) if text else base


def best_precision(devices: Sequence[Device]) -> str:
    """The first of `BEST_FIRST` whose format every one of the devices computes in; the first where none is."""
    able = (name for name in BEST_FIRST if not any(map(PRECISIONS[name].lacks, devices)))
    return next(able, BEST_FIRST[0])


def precision_remark(name: str, devices: Sequence[Device]) -> str:
    """Why a precision was chosen where none was asked for: which devices lack a better one; empty for the best."""
    if name not in BEST_FIRST:
        return "as the framework trains"
    better = BEST_FIRST[: BEST_FIRST.index(name)]
    lacking = {p: [d.name for d in devices if PRECISIONS[p].lacks(d)] for p in better}
    return "; ".join(f"no {p} on {', '.join(names)}" for p, names in lacking.items() if names)


def supported_precision(name: str, device: Device) -> Precision:
    """The precision of that name (the best one where it is empty), if the device computes in its formats.

    Raises:
        UsageError: no precision has that name.
        JobError: the device states no rate for one of its formats.
    """
    chosen = precision(name or best_precision([device]))
    lacking = chosen.lacks(device)
    if lacking:
        known = ", ".join(sorted(device.matrix_flop_per_s)) or "none"
        others = [p for p in PRECISIONS.values() if not p.lacks(device)]
        alike = [p for p in others if (p.narrow is None) == (chosen.narrow is None)]
        able = " or ".join(p.name for p in alike or others)
        raise JobError(
            f"{device.name} does not compute in {' and '.join(lacking)}, but in {known}",
            hint=f"use --precision {able}" if able else "add the format's peak to the hardware profile",
        )
    return chosen


def update_bytes(optimizer: str, chosen: Precision) -> float:
    """Bytes a parameter that an update moves: state read and written, gradient read, weight written."""
    return 2 * optimizer_state_bytes(optimizer, chosen) + chosen.gradient_bytes + chosen.held_weight_bytes


def optimizer_state_bytes(optimizer: str, formats: Precision) -> int:
    """Bytes of optimizer state a parameter, master copy included.

    Args:
        optimizer: its name, which may have options: `adam:moments=bf16`.
        formats: the precision, whose master copy stands with the state.

    Raises:
        UsageError: no optimizer has that name, or it does not have such options.
    """
    key, _, text = optimizer.partition(":")
    moments = chosen("optimizer", key, OPTIMIZER_MOMENTS)
    options = with_options(OptimizerOptions(), text, f"optimizer {key!r}") if text else OptimizerOptions()
    return moments * int(options.moments.bytes_or(4)) + formats.master_bytes


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
class NarrowProduct:
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
    products: tuple[NarrowProduct, ...]

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
    products: list[NarrowProduct] = []
    for i, (node, spec) in enumerate(zip(graph.nodes, specs, strict=True)):
        if not spec.matrix_flops or layer_of(node.module) in wide:
            continue
        if rule_of(node.op).joint is JointCut.EXPERTS:
            products.append(NarrowProduct(i))
            continue
        product = _product(graph, i, gathered.get(i))
        if product is None or not _divides(graph, product, narrow_format.multiple):
            continue
        result = graph.tensors[node.outputs[0]]
        if not _picked_from(graph, result, losses if result.shape[-1] in classes else frozenset()):
            products.append(product)
    return NarrowProducts(narrow_format, tuple(products))


def _product(graph: Graph, i: int, expert: ExpertProduct | None) -> NarrowProduct | None:
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
    return NarrowProduct(i, reads, weights) if weights and reads and rule.window is None and rule.heavy else None


def _divides(graph: Graph, product: NarrowProduct, multiple: int) -> bool:
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

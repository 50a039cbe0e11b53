"""What a forward pass keeps in memory for the backward pass, storage by storage.

Each operator's description says which operands, results and extras it keeps; here views are resolved to the storage
they lie in, and weights and inputs (resident anyway) are left out. The same storage kept by several nodes has the same
name, so that a stage counts it once.

Training also does what the file does not show: the loss, dropout, or that nothing of it can be trained.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import ModelError
from planner.graph import DType, Graph, Node, Note, NoteLevel, TensorKind, per_graph, per_model
from planner.operators.modules import find_expert_products
from planner.operators.rewriting import fused_kernels
from planner.operators.specs import nodes_where
from planner.operators.storage import Storages
from planner.operators.types import OpSpec, Saved, SavedBytes
from planner.sums import float_sum

_LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_LINEAR = frozenset({"MatMul", "Gemm", "com.microsoft.FusedMatMul", "com.microsoft.MatMulNBits"})
_HEAD_WRAPPERS = frozenset(
    {"Add", "Reshape", "Softmax", "LogSoftmax", "Cast", "Identity", "Squeeze", "Flatten", "Transpose"}
)
_EMBEDDING_SUM = "Add of embeddings"


def require_trained(graph: Graph) -> None:
    """Refuse a graph that has weights, none of which training changes: a quantised or frozen model.

    Raises:
        ModelError: says how many weights there are.
    """
    if graph.parameters and not any(parameter.trainable for parameter in graph.parameters):
        integers = sum(not parameter.dtype.is_float for parameter in graph.parameters)
        raise ModelError(
            f"none of its {len(graph.parameters)} weights can be trained ({integers} are quantised to integers, the "
            "others are scales or statistics): this is an inference graph, not a training job",
            where=graph.name,
            hint="export the model before quantising it, in floating point",
        )


@per_graph
def logits_of(graph: Graph) -> str:
    """The result that a loss would be computed from: the output of the last linear layer; "" without one."""
    if any(node.op in _LOSSES for node in graph.nodes):
        return ""
    for output in graph.outputs:
        name = output
        while name in graph.producer:
            node = graph.nodes[graph.producer[name]]
            if node.op in _LINEAR and graph.node_parameters[graph.producer[name]]:
                return output if graph.tensors[output].shape else ""
            if node.op not in _HEAD_WRAPPERS:
                break
            computed = [n for n in node.inputs if n and graph.tensors[n].kind is TensorKind.ACTIVATION]
            if len(computed) != 1:
                break
            name = computed[0]
    return ""


def residual_branches(graph: Graph) -> list[tuple[int, str]]:
    """Tensors that transformers apply dropout to: the branch of each residual sum, and the sum of embeddings."""
    places = []
    embedding = -1
    for i, node in enumerate(graph.nodes):
        if node.op != "Add":
            continue
        computed = [n for n in node.inputs if graph.tensors[n].kind is TensorKind.ACTIVATION]
        sources = [_source_op(graph, n) for n in computed]
        if computed and all(op in ("Gather", _EMBEDDING_SUM) for op in sources):
            embedding = i
        elif len(computed) == 2:
            places += [(i, n) for n, op in zip(computed, sources, strict=True) if op in _LINEAR][:1]
    if embedding >= 0:
        places.insert(0, (embedding, graph.nodes[embedding].outputs[0]))
    return places


def _source_op(graph: Graph, name: str) -> str:
    """Operator that a tensor comes from, through views and bias sums that nothing else reads.

    Sums of embeddings have a name of their own; "" for a tensor that has other readers on the way.
    """
    while name in graph.producer and len(graph.consumers.get(name, ())) == 1:
        node = graph.nodes[graph.producer[name]]
        if node.op in ("Reshape", "Identity", "Squeeze", "Unsqueeze"):
            name = node.inputs[0]
            continue
        if node.op != "Add":
            weighted = node.op not in _LINEAR or graph.node_parameters[graph.producer[name]]
            return node.op if weighted else ""
        computed = [n for n in node.inputs if graph.tensors[n].kind is TensorKind.ACTIVATION]
        inner = {graph.nodes[graph.producer[n]].op if n in graph.producer else "" for n in computed}
        if inner == {"Gather"}:
            return _EMBEDDING_SUM
        if len(computed) != 1:
            return node.op
        name = computed[0]
    return ""


@dataclass(frozen=True, slots=True)
class SavedOptions:
    """How the training run computes, as far as it decides what is kept.

    Attributes:
        fused_attention: attention runs as one kernel that keeps query, key, value, result and the log-sum-exp of
            each row, not the score matrix.
        dropout: dropout nodes are active and keep a mask; false treats them as absent.
        assume_dropout: an exported inference graph has no dropout nodes; put their masks where transformers have them
            (embedding sum, attention probabilities, each residual branch).
        dropout_mask_bytes: bytes a mask takes per element: 1 on GPUs, the element's own width in composite kernels.
        loss: where the graph ends at logits, count the log-softmax that the loss keeps.
        loss_bytes: bytes per element of that log-softmax.
        fused: names of the kernels that run several nodes as one (`planner.operators.rewriting.fused_kernels`); what is
            inside is not kept.
    """

    fused_attention: bool = True
    dropout: bool = True
    assume_dropout: bool = False
    dropout_mask_bytes: float = 1.0
    loss: bool = True
    loss_bytes: float = 4.0
    fused: tuple[str, ...] = ()


@per_model
def float_type(graph: Graph) -> DType:
    """The floating-point type in which the model computes: that of most of its weights, else of most activations."""
    weights: Counter[DType] = Counter()
    for each in graph.parameters if any(p.dtype.is_float for p in graph.parameters) else graph.tensors.values():
        if each.dtype.is_float:
            weights[each.dtype] += each.elements
    return max(weights, key=lambda d: (weights[d], d.value)) if weights else DType.FLOAT32


def element_bytes(graph: Graph, width: float) -> Mapping[DType, float]:
    """Bytes an element takes in training, by the type the file says.

    The model's own floating-point type takes `width` bytes; other types (indices, masks, the fp32 islands of a model
    exported in half precision) keep their own.
    """
    sizes = {dtype: dtype.bits / 8 for dtype in DType}
    sizes[float_type(graph)] = width
    return sizes


def saved_for_backward(
    graph: Graph,
    specs: Sequence[OpSpec],
    *,
    width: float | Mapping[DType, float] = 4.0,
    options: SavedOptions | None = None,
    storages: Storages | None = None,
    narrow: Mapping[int, float] | None = None,
) -> tuple[tuple[SavedBytes, ...], ...]:
    """Storages that each node keeps between its forward and its backward pass.

    Args:
        graph: the graph.
        specs: one description a node, aligned with `graph.nodes`, made knowing which gradients are needed.
        width: bytes an element of the model's floating-point type takes in training, or bytes by type.
        options: how the run computes; `SavedOptions()` without.
        storages: `storages_in_training` of the same, where it is known.
        narrow: by node, bytes an element of the casts of its operands that it keeps in their place. A storage that some
            nodes keep as it is and others cast is there in both forms, under one name.

    Returns:
        For each node the storages it keeps; summing over a set of nodes, each name counts once. O(nodes).
    """
    sizes = width if isinstance(width, Mapping) else element_bytes(graph, width)
    chosen_options = options or SavedOptions()
    known_storages = storages or storages_in_training(graph, specs, chosen_options)
    return _Collector(graph, specs, sizes, chosen_options, known_storages, narrow or {}).collect()


def storages_in_training(graph: Graph, specs: Sequence[OpSpec], options: SavedOptions) -> Storages:
    """Which tensors share memory in a training run.

    Dropout that is off hands its input through, expert weights gathered for each token are never made, and attention
    that is not one kernel ends in a product, whose result is row-major.
    """

    def hands_on(i: int) -> bool:
        return graph.nodes[i].op == "Dropout" and not (options.dropout and any(item.random for item in specs[i].saved))

    return Storages(
        graph,
        identity=frozenset(nodes_where(graph, hands_on)),
        dense=frozenset(nodes_where(graph, lambda i: specs[i].scores_in_memory(options.fused_attention))),
        aliases={graph.nodes[e.gather].outputs[0]: e.weight for e in find_expert_products(graph)},
    )


def unique_bytes(saved: Iterable[Iterable[SavedBytes]]) -> int:
    """Bytes of all storages of some nodes, each counted once."""
    return sum({item.storage: item.byte_count for items in saved for item in items}.values())


def saved_notes(graph: Graph, options: SavedOptions | None = None) -> tuple[Note, ...]:
    """What the count of kept activations assumes about the graph, to be said to the user."""
    chosen_options = options or SavedOptions()
    notes = []
    has_dropout = _draws(graph)
    if chosen_options.dropout and not has_dropout and not chosen_options.assume_dropout:
        message = (
            "the graph has no Dropout nodes (an inference export, or a model without): no dropout masks are counted"
        )
        notes.append(Note(NoteLevel.INFO, "no-dropout", message))
    experts = find_expert_products(graph)
    if experts:
        message = (
            f"{len(experts)} products read expert weights that the graph copies for each token; they are priced as "
            "grouped products over the stored weights, without the copies"
        )
        notes.append(Note(NoteLevel.INFO, "experts-grouped", message, graph.nodes[experts[0].product].key))
    logits = logits_of(graph)
    if chosen_options.loss and logits:
        message = (
            "the graph ends at logits; the log-softmax that a cross-entropy loss keeps is counted with the last node"
        )
        notes.append(Note(NoteLevel.INFO, "loss-added", message, logits))
    return tuple(notes)


class _Collector:
    """Collects kept storages node by node; one use."""

    def __init__(
        self,
        graph: Graph,
        specs: Sequence[OpSpec],
        sizes: Mapping[DType, float],
        options: SavedOptions,
        storages: Storages,
        narrow: Mapping[int, float],
    ) -> None:
        self.narrow, self.forms = narrow, dict[str, tuple[float, ...]]()
        self.graph, self.specs, self.sizes, self.options, self.storages = graph, specs, sizes, options, storages
        kernels = fused_kernels(graph, options.fused)
        self.unmade = {output for kernel in kernels for i in kernel[:-1] for output in graph.nodes[i].outputs}
        self.has_dropout = _draws(graph)
        self.kept: defaultdict[int, dict[str, float]] = defaultdict(dict)

    def collect(self) -> tuple[tuple[SavedBytes, ...], ...]:
        for i, spec in enumerate(self.specs):
            if spec.saved:
                self._keep(i, spec)
        attends = bool(nodes_where(self.graph, lambda i: self.specs[i].details.get("score_elements")))
        if self.options.dropout and self.options.assume_dropout and attends and not self.has_dropout:
            self._keep_assumed_dropout()
        if self.options.loss:
            self._keep_loss()
        widths = {name: float_sum(forms) for name, forms in self.forms.items()}
        saved: list[tuple[SavedBytes, ...]] = [()] * len(self.graph.nodes)
        for i, kept in self.kept.items():
            saved[i] = tuple([SavedBytes(name, round(size * widths.get(name, 1.0))) for name, size in kept.items()])
        return tuple(saved)

    # -- what a node keeps

    def _keep(self, i: int, spec: OpSpec) -> None:
        """Keep what a node's description says."""
        node = self.graph.nodes[i]
        scores = spec.scores_in_memory(self.options.fused_attention) / node.repeat
        for item in spec.saved:
            if (item.random and not self.options.dropout) or (item.fused and scores):
                continue
            if item.random:
                elements = self.graph.tensors[node.outputs[0]].elements
                self._keep_own(i, "dropout", elements * self.options.dropout_mask_bytes)
            elif item.source == "extra":
                self._keep_own(i, str(item.position), item.byte_count * (1.0 if item.fixed else self._scale(node)))
            else:
                self._keep_tensor(i, item)
        if scores:
            for what, byte_count in self._probabilities(node, scores):
                self._keep_own(i, what, byte_count)

    def _keep_own(self, node: int, what: str, byte_count: float) -> None:
        """Keep something that a node makes for itself."""
        self.kept[node][f"{self.graph.nodes[node].key}#{what}"] = byte_count * self.graph.nodes[node].repeat

    def _keep_tensor(self, i: int, item: Saved) -> None:
        """Keep the storage that an operand or a result lies in, unless it is resident anyway."""
        node, read = self.graph.nodes[i], item.source == "input"
        names = node.inputs if read else node.outputs
        name = names[item.position] if item.position < len(names) else ""
        root = self.storages.root(name)
        at = self.graph.producer.get(root)
        if at is None or root in self.unmade:
            return
        tensor = self.graph.tensors[root]
        width = self.sizes[tensor.dtype]
        if read:
            width = self.narrow.get(i, width)
        forms = self.forms.setdefault(root, (width,))
        if width not in forms:
            self.forms[root] = (*forms, width)
        self.kept[i][root] = tensor.elements * self.graph.nodes[at].repeat

    def _scale(self, node: Node) -> float:
        """Training width over file width of a node's floating-point tensors."""
        for name in (*node.outputs, *node.inputs):
            tensor = self.graph.tensors.get(name) if name else None
            if tensor is not None and tensor.dtype.is_float:
                return self.sizes[tensor.dtype] * 8 / tensor.dtype.bits
        return 1.0

    def _width(self, name: str) -> float:
        return self.sizes[self.graph.tensors[name].dtype]

    def _probabilities(self, node: Node, elements: float) -> Iterable[tuple[str, float]]:
        """An attention that is not run as one kernel keeps its probabilities, and what dropout makes of them."""
        byte_count = elements * self._width(node.outputs[0])
        yield "probabilities", byte_count
        drops = self.has_dropout or "dropout" in node.attributes or self.options.assume_dropout
        if drops and self.options.dropout:
            yield "dropout", elements * self.options.dropout_mask_bytes
            yield "dropped", byte_count

    # -- what the file does not show

    def _keep_assumed_dropout(self) -> None:
        for i, name in residual_branches(self.graph):
            elements = self.graph.tensors[name].elements
            self._keep_own(i, "dropout", elements * self.options.dropout_mask_bytes)

    def _keep_loss(self) -> None:
        """The log-softmax of the loss: one that the graph holds, or the one assumed after its logits."""
        for i in nodes_where(self.graph, lambda i: self.specs[i].saved and "loss_elements" in self.specs[i].details):
            self.kept[i].clear()
            self._keep_own(i, "loss", self.specs[i].details["loss_elements"] * self.options.loss_bytes)
        logits = logits_of(self.graph)
        if logits:
            elements = self.graph.tensors[logits].elements
            self._keep_own(self.graph.producer[logits], "loss", elements * self.options.loss_bytes)


def _draws(graph: Graph) -> bool:
    """Whether the graph has dropout of its own."""
    return any(node.op == "Dropout" or "dropout" in node.attributes for node in graph.nodes)

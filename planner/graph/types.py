"""The model as a DAG of operators over named tensors, independent of the file format it came from.

Results of functions that depend on a graph alone are cached with the graph object (`per_graph`) and freed with it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
ConstantValue = tuple[int, ...] | tuple[float, ...]


class DType(StrEnum):
    """Element types, by the name that torch and numpy users know."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    FLOAT4 = "float4"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    UINT4 = "uint4"
    UINT2 = "uint2"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    STRING = "string"

    __hash__ = str.__hash__
    """As equal to its name as a string is; also faster than that of an enumeration, in tables by type."""

    @property
    def bits(self) -> int:
        """Bits an element takes in memory (a string counts as 64)."""
        return _BITS[self]

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through a tensor of this type."""
        return self in _FLOATS


_BITS = {
    DType.FLOAT64: 64, DType.FLOAT32: 32, DType.FLOAT16: 16, DType.BFLOAT16: 16, DType.FLOAT8: 8, DType.FLOAT4: 4,
    DType.INT64: 64, DType.INT32: 32, DType.INT16: 16, DType.INT8: 8, DType.INT4: 4, DType.INT2: 2,
    DType.UINT64: 64, DType.UINT32: 32, DType.UINT16: 16, DType.UINT8: 8, DType.UINT4: 4, DType.UINT2: 2,
    DType.BOOL: 8, DType.COMPLEX64: 64, DType.COMPLEX128: 128, DType.STRING: 64,
}  # fmt: skip


_FLOATS = frozenset(dtype for dtype in DType if dtype.value.startswith(("float", "bfloat", "complex")))


class TensorKind(StrEnum):
    """Where a tensor's content comes from."""

    INPUT = "input"
    """Fed from outside at every step (token ids, images, masks, labels)."""
    ACTIVATION = "activation"
    """Computed from an input."""
    PARAMETER = "parameter"
    """A trained weight, or computed from trained weights alone (a transposed copy, a slice, a cast)."""
    CONSTANT = "constant"
    """Fixed: a table, a mask, a scalar, or computed from such alone."""

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array with a known shape."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: TensorKind

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def byte_count(self) -> int:
        """Bytes the tensor takes, sub-byte types packed."""
        return (self.elements * self.dtype.bits + 7) // 8


class ScaledTensors(Mapping[str, Tensor]):
    """Tensors of a model at another batch size, made on demand: few nodes of a class of equal ones are looked at.

    Args:
        tensors: those at a known batch size, and what stays as it is.
        marks: for tensors that follow the batch, what says how; equal marks of equal shapes give equal shapes.
        scaled: the new shape for a shape and its marks.
        further: tensors that are not there at the known batch size.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        marks: Mapping[str, Hashable],
        scaled: Callable[[tuple[int, ...], Any], tuple[int, ...]],
        further: Mapping[str, Tensor],
    ) -> None:
        self._tensors, self._marks, self._scaled = tensors, marks, scaled
        self._made, self._shapes = dict(further), dict[Hashable, tuple[int, ...]]()
        self._further = tuple(further)

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        if made is None:
            made = self._tensors[name]
            if name in self._marks:
                made = self._made[name] = Tensor(name, self.shape_of(name), made.dtype, made.kind)
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self._made

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._tensors, self._further)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._further)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        marks = self._marks.get(name)
        if marks is None:
            return self[name].shape
        key = self._tensors[name].shape, marks
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._scaled(*key)
        return shape


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight tensor as the file stores it.

    Attributes:
        name: the initializer's (or constant's) name in the file; unique.
        label: what a person would call it, `model.layers.7.mlp.up_proj.weight`; equals `name` when
            nothing better is known.
        shape: as stored in the file.
        dtype: as stored in the file.
        module: path of the module that owns it, "" when unknown.
        trainable: false for buffers (batch norm's running statistics, position ids).
        transposed: the file stores the transpose of the module's weight.
        tied_to: name of the parameter this one is a copy of (counted once, gradients summed), else "".
    """

    name: str
    label: str
    shape: tuple[int, ...]
    dtype: DType
    module: str = ""
    trainable: bool = True
    transposed: bool = False
    tied_to: str = ""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of the model.

    Attributes:
        key: name of the first output, unique in the graph; plans refer to nodes by it, since node names may be empty.
        op: ONNX operator type, other domains in front: `MatMul`, `com.microsoft.Gelu`.
        inputs: tensor names by position, "" for an optional input that is absent.
        outputs: tensor names by position, "" for an output nobody asked for.
        attributes: plain Python values by name.
        module: path of the module the exporter says it belongs to, `model.layers.7.self_attn`; "" when unknown.
        name: the node's own name in the file, may be empty.
        repeat: how often it runs in one forward pass (loop bodies; a Loop or Scan is inlined once with its trip count).
    """

    key: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    module: str = ""
    name: str = ""
    repeat: int = 1


class NoteLevel(StrEnum):
    """How much an import note matters."""

    INFO = "info"
    WARNING = "warning"


NO_RULE = "no-rule"
"""Code of the note that operators without a rule make up a large part of the model; it is shown first."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something assumed, dropped or impossible, to be said to the reader by name.

    Attributes:
        level: how much it matters.
        code: its kind, in a word that programs read.
        message: what it is, in a line.
        where: the node, tensor or weight that it is about; left out where there is none.
    """

    level: NoteLevel
    code: str
    message: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What the importer did with the file's nodes.

    `total = nodes left + merged + plumbing + folded + dead`; notes say what was assumed. Merged nodes spelled
    an operator out that one node stands for, less the nodes that were added.
    """

    format: str
    total_nodes: int
    plumbing_nodes: int
    folded_nodes: int
    dead_nodes: int
    notes: tuple[Note, ...] = ()
    merged_nodes: int = 0


@dataclass(frozen=True)
class SourceFile:
    """The file that a model was read from.

    Attributes:
        path: where it lies.
        written: the model with the operators that the file has, where an importer reads several as one.
        open_sizes: by model input, the dimensions whose size the file leaves open.
    """

    path: Path
    written: Graph
    open_sizes: Mapping[str, frozenset[int]]

    @functools.cached_property
    def sha256(self) -> str:
        """sha256 (hex) of the file, weights beside it left out; "" where it is gone since it was read."""
        if not self.path.is_file():
            return ""
        with self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class WeightRead:
    """An operator of the model file that reads a weight of its own from a tensor that others read, too, or not at all.

    Attributes:
        weight: name of the weight.
        stored: the file's tensor; "" for a bias of zeros that the file left out.
        operator: first output of the operator in the file.
        operand: place of the weight, or of what is computed from it alone, among its inputs, from 0.
    """

    weight: str
    stored: str
    operator: str
    operand: int


@dataclass(frozen=True)
class Graph:
    """A model: operators in topological order over named tensors of known shape.

    Attributes:
        name: a short name for people.
        fingerprint: sha256 of the source file's structure (hex), the identity that plans are bound to.
        nodes: cost-bearing operators in topological order; shape plumbing, dead and constant-only nodes are not here.
        tensors: every tensor that a node reads or writes, by name.
        inputs: names of the tensors fed at each step.
        outputs: names of the results.
        parameters: weights, in order of first use.
        sources: for a tensor of kind PARAMETER: names of the parameters it is computed from.
        constants: values of small constant tensors (axes, shapes, epsilons), flattened, by name.
        batch: size of the batch dimension the shapes are for; 0 when unknown.
        opset: version of the default ONNX operator set; 0 for other formats.
        report: what the importer kept, dropped and assumed.
        permuted: for tensors of kind PARAMETER that are one parameter transposed: for each dimension, the parameter's.
        identities: results of operators of the file that hand on their first operand unchanged and are left out here.
        separated: reads of weights that the file stores once for several modules because they were equal at export.
        source: the file; None for a model in memory and for files that hold no operators of their own.
    """

    name: str
    fingerprint: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    sources: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, ConstantValue] = field(default_factory=dict)
    batch: int = 0
    opset: int = 0
    report: ImportReport = field(default_factory=lambda: ImportReport("memory", 0, 0, 0, 0))
    permuted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    identities: tuple[str, ...] = ()
    separated: tuple[WeightRead, ...] = ()
    source: SourceFile | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that writes a tensor; graph inputs, parameters and constants have none."""
        return {out: i for i, node in enumerate(self.nodes) for out in node.outputs if out}

    @functools.cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the nodes that read a tensor, ascending, each once."""
        readers: dict[str, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.inputs):
                if name:
                    readers.setdefault(name, []).append(i)
        return {name: tuple(users) for name, users in readers.items()}

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """Data dependencies as an int64 array of shape [edges, 2] (producer, consumer), each pair once."""
        pairs = {
            (self.producer[name], i)
            for i, node in enumerate(self.nodes)
            for name in node.inputs
            if name in self.producer
        }
        return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)

    @functools.cached_property
    def parameter_index(self) -> Mapping[str, int]:
        """Position of a parameter in `parameters` by name."""
        return {p.name: i for i, p in enumerate(self.parameters)}

    @functools.cached_property
    def node_parameters(self) -> tuple[tuple[int, ...], ...]:
        """For each node, indices of the parameters it uses, ties resolved to the parameter they are a copy of."""
        owner_of = [self.parameter_index[p.tied_to] if p.tied_to else i for i, p in enumerate(self.parameters)]
        result = []
        for node in self.nodes:
            used: dict[int, None] = {}
            for name in node.inputs:
                for source in self.sources.get(name, ()):
                    used[owner_of[self.parameter_index[source]]] = None
            result.append(tuple(used))
        return tuple(result)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not made for it where tensors are made on demand."""
        tensors = self.tensors
        return tensors.shape_of(name) if isinstance(tensors, ScaledTensors) else tensors[name].shape

    def parameter_count(self) -> int:
        """Number of trainable weight elements, a tied copy counted once."""
        return sum(p.elements for p in self.parameters if not p.tied_to and p.trainable)


T = TypeVar("T")
Owner = TypeVar("Owner")


def per_graph(function: Callable[[Owner], T]) -> Callable[[Owner], T]:
    """Make a function compute its result once for each graph object (or chain of blocks).

    The function must depend on the object alone, and nobody may change what it returns.
    """
    return _kept_in(vars, function)


_PER_MODEL_PROPERTIES = ("producer", "parameter_index", "node_parameters")
"""Cached properties that are equal at every batch size of a model."""
_PER_MODEL: set[str] = set()
"""Keys of the `per_model` functions."""
_MODEL_RESULTS = "results per model"
"""Key in a graph's `vars` of the results that it shares with the same model at other batch sizes."""


def per_model(function: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Like `per_graph`, for a result that is the same at every batch size of a model.

    It is computed once for all graphs that `hand_on` joined, on whichever of them asks first.
    """
    _PER_MODEL.add(_key(function))
    return _kept_in(_model_results, function)


def _kept_in(place: Callable[[Any], dict[str, Any]], function: Callable[[Owner], T]) -> Callable[[Owner], T]:
    """The function with its results kept in a dictionary that belongs to its argument."""
    key = _key(function)

    @functools.wraps(function)
    def remembered(owner: Owner) -> T:
        kept = place(owner)
        if key not in kept:
            kept[key] = function(owner)
        result: T = kept[key]
        return result

    return remembered


def remember(graph: Graph, function: Callable[[Graph], T], result: T) -> None:
    """Store the result of a `per_graph` or `per_model` function with a graph, so that it is not computed."""
    key = _key(function)
    (_model_results(graph) if key in _PER_MODEL else vars(graph))[key] = result


def hand_on(source: Graph, target: Graph) -> None:
    """Let a graph share what depends on no sizes with the same model at another batch size, whenever it is found."""
    known, shared = vars(source), _model_results(source)
    for key, result in _model_results(target).items():
        shared.setdefault(key, result)
    vars(target)[_MODEL_RESULTS] = shared
    vars(target).update((key, known[key]) for key in _PER_MODEL_PROPERTIES if key in known)
    if target.nodes is source.nodes and "consumers" in known:
        vars(target)["consumers"] = known["consumers"]


def _model_results(graph: Graph) -> dict[str, Any]:
    results: dict[str, Any] = vars(graph).setdefault(_MODEL_RESULTS, {})
    return results


def _key(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"

"""The importer's working graph: what the passes read and change until it is frozen."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from planner.graph import AttributeValue, DType, Note, NoteLevel, Parameter, WeightRead

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]

MAX_CONSTANT_ELEMENTS = 4096
"""Constants of at most so many elements are kept by value."""

ELEMENT_TYPES: dict[int, DType] = {
    1: DType.FLOAT32, 2: DType.UINT8, 3: DType.INT8, 4: DType.UINT16, 5: DType.INT16, 6: DType.INT32, 7: DType.INT64,
    8: DType.STRING, 9: DType.BOOL, 10: DType.FLOAT16, 11: DType.FLOAT64, 12: DType.UINT32, 13: DType.UINT64,
    14: DType.COMPLEX64, 15: DType.COMPLEX128, 16: DType.BFLOAT16, 17: DType.FLOAT8, 18: DType.FLOAT8,
    19: DType.FLOAT8, 20: DType.FLOAT8, 21: DType.UINT4, 22: DType.INT4, 23: DType.FLOAT4, 24: DType.FLOAT8,
    25: DType.UINT2, 26: DType.INT2,
}  # fmt: skip
"""ONNX element type numbers by DType; the several 8-bit float layouts are one to a planner."""


INT64 = 7
"""ONNX's number of the type of shapes, axes and places."""


class TensorType(NamedTuple):
    """Shape and element type of a value; the ONNX element type number is kept for shape inference."""

    shape: tuple[int, ...]
    element: int

    @property
    def dtype(self) -> DType:
        """The element type."""
        return ELEMENT_TYPES[self.element]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Scope:
    """The exporter's metadata about the module that a node comes from.

    Attributes:
        module: path of the owning module; None when nothing is said.
        module_class: its Python class, "" when unknown.
        torch_op: the operation in the exporting framework, such as `aten.addmm.default`, "" when unknown.
    """

    module: str | None = None
    module_class: str = ""
    torch_op: str = ""


NO_SCOPE = Scope()


@dataclass(slots=True)
class WorkNode:
    """A mutable node of the working graph; `fate` is the reason for which it was removed, "" while it is there."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, AttributeValue]
    name: str = ""
    scope: Scope = NO_SCOPE
    repeat: int = 1
    fate: str = ""

    @property
    def label(self) -> str:
        """How an error names the node."""
        return f"{self.op} {self.name or self.outputs[0]!r}"


@dataclass(slots=True)
class WorkGraph:
    """The model between file and `Graph`.

    Attributes:
        stored: names of tensors that the file holds: initializers, Constant nodes and constant fills.
        kinds: what the exporter's signature says a stored tensor is: PARAMETER, BUFFER, CONSTANT_TENSOR.
        from_torch: whether one of torch's exporters wrote the file.
        signature: what torch's export signature says of each tensor of the module, by name, as in `kinds`.
        origins: for a stored tensor that the exporter computed, the names of what it computed it from.
        values: small known values by tensor name.
        data: stored floating-point tables whose numbers the file holds.
        picked: stored tensors for which the exporter picked or repeated entries of others.
        region: for a tensor computed from stored tensors alone, the node that computes it.
        weights: parameters by stored name, once they are found; insertion order is order of use.
        weight_sources: for a tensor that carries parameters, their names.
        fates: how many nodes left the graph, by reason (plumbing, folded, dead).
        axis_names: symbolic names of each input's axes, "" where the file gives a number.
        identities: results of nodes that handed on their first input unchanged and were taken out.
        separated: reads of weights that the file stores once for several modules.
    """

    name: str
    opset: int
    nodes: list[WorkNode]
    types: dict[str, TensorType]
    values: dict[str, Array]
    stored: dict[str, None]
    kinds: dict[str, str]
    origins: dict[str, tuple[str, ...]]
    inputs: list[str]
    outputs: list[str]
    axis_names: dict[str, tuple[str, ...]]
    total_nodes: int = 0
    region: dict[str, WorkNode] = field(default_factory=dict)
    weights: dict[str, Parameter] = field(default_factory=dict)
    weight_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    separated: list[WeightRead] = field(default_factory=list)
    signature: dict[str, str] = field(default_factory=dict)
    from_torch: bool = False
    data: dict[str, onnx.TensorProto] = field(default_factory=dict)
    picked: set[str] = field(default_factory=set)

    def info(self, code: str, message: str, where: str = "") -> None:
        """Record something the user may want to know."""
        self.notes.append(Note(NoteLevel.INFO, code, message, where))

    def warn(self, code: str, message: str, where: str = "") -> None:
        """Record an assumption that may be wrong, or something lost."""
        self.notes.append(Note(NoteLevel.WARNING, code, message, where))

    def is_constant(self, name: str) -> bool:
        """Whether a tensor does not depend on the model's inputs."""
        return name in self.stored or name in self.region

    def producers(self) -> dict[str, WorkNode]:
        """The node that writes each tensor."""
        return {name: node for node in self.nodes for name in node.outputs if name}

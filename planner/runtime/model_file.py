"""An ONNX file as a program of torch operators: its nodes in order, its weights one by one, its batch as planned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from planner.errors import ModelError
from planner.runtime.operators import RULES, torch_type

_FLOAT_NUMBERS = {1, 10, 11, 16}
_CENTRED_AT_ONE = {
    "LayerNormalization": (1,), "RMSNormalization": (1,), "BatchNormalization": (1, 4), "InstanceNormalization": (1,),
    "GroupNormalization": (1,), "SimplifiedLayerNormalization": (1,),
}  # fmt: skip
"""Operands that scale what a norm makes, and the variance that it divides by: untrained they are 1."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the file.

    Attributes:
        op: its name, with its domain before a dot where that is not the standard's.
        inputs: names of its operands; "" where one is absent.
        outputs: names of its results; "" where one is not asked for.
        attributes: as in the file; tensors as torch tensors.
        opset: version of its domain.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int

    @property
    def name(self) -> str:
        """Its first result, by which plans name it."""
        return self.outputs[0]


@dataclass
class ModelFile:
    """What of a model file is needed to run it.

    Attributes:
        steps: operators, in an order that can be executed.
        inputs: names of what is fed at each step.
        outputs: names of results.
        weights: initializers by name.
        constants: values that take the place of the file's, by name: those that hold another batch than the file's.
        seed: of weights whose data are not in the file.
        folder: where external data lie.
        sha256: of the model without weights that lie elsewhere, hex.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Any]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    seed: int = 0
    folder: Path = Path()
    sha256: str = ""

    def __post_init__(self) -> None:
        self.producer = {name: i for i, step in enumerate(self.steps) for name in step.outputs if name}
        self.input_types: dict[str, tuple[int, tuple[int | None, ...]]] = {}

    def cone(self, wanted: Iterable[str], given: Iterable[str]) -> tuple[Step, ...]:
        """The operators that make some values from others that are at hand, in order.

        Weights and constants are at hand. O(operators of the cone).

        Raises:
            ModelError: a value has no origin.
        """
        known = {*given, *self.weights, *self.constants}
        found: set[int] = set()
        stack = [name for name in wanted if name not in known]
        while stack:
            name = stack.pop()
            if name in known or not name:
                continue
            if name not in self.producer:
                raise ModelError(
                    f"{name!r} is made by no operator and is at hand nowhere", where=name,
                    hint="is this the model that the plan was made for?",
                )  # fmt: skip
            at = self.producer[name]
            if at not in found:
                found.add(at)
                stack += self.steps[at].inputs
        return tuple(self.steps[i] for i in sorted(found))

    def weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The data of an initializer: from the file or its external data, else by name and seed.

        Floats come in the given type, integers in their own.
        """
        from onnx import numpy_helper

        if name in self.constants:
            return self.constants[name]
        proto = self.weights[name]
        wanted = torch_type(proto.data_type, dtype)
        if proto.data_location == proto.EXTERNAL and not self._external(proto).exists():
            return self._initial(name, tuple(proto.dims), wanted)
        values = numpy_helper.to_array(proto, str(self.folder))
        if proto.data_type in (10, 16):
            values = values.astype(np.float32)
        return torch.from_numpy(np.array(values)).to(wanted)

    def trained(self, name: str) -> bool:
        """Whether an initializer holds floats."""
        return name in self.weights and self.weights[name].data_type in _FLOAT_NUMBERS

    def _external(self, proto: Any) -> Path:  # noqa: ANN401
        return self.folder / next((e.value for e in proto.external_data if e.key == "location"), "")

    def _initial(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Reproducible values of a weight without data.

        Matrices are normally distributed with deviation 1 / sqrt(inputs), tables of a lookup with 0.02; scales of
        norms lie around 1, other vectors around 0, both with deviation 0.02.
        """
        made = torch.Generator()
        made.manual_seed(int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:7], "big"))
        drawn = torch.randn(shape, generator=made, dtype=torch.float64)
        readers = [(step.op, p) for step in self.readers(name) for p, read in enumerate(step.inputs) if read == name]
        if any(p in _CENTRED_AT_ONE.get(op, ()) for op, p in readers):
            return (1 + 0.02 * drawn).abs().to(dtype)
        if len(shape) < 2 or any(op == "Gather" for op, _ in readers):
            return (0.02 * drawn).to(dtype)
        inputs = int(np.prod(shape[1:])) if any(op == "Conv" for op, _ in readers) else shape[-2]
        return (drawn / max(1, inputs) ** 0.5).to(dtype)

    def readers(self, name: str) -> list[Step]:
        """Operators that read a value."""
        if not hasattr(self, "_by_read"):
            self._by_read: dict[str, list[Step]] = {}
            for step in self.steps:
                for read in dict.fromkeys(step.inputs):
                    self._by_read.setdefault(read, []).append(step)
        return self._by_read.get(name, [])


def read_model(model: object, *, seed: int = 0) -> ModelFile:
    """Read an ONNX file (or a model in memory) to run it.

    Args:
        model: path of a file, or an `onnx.ModelProto`.
        seed: of weights whose data are not in the file.

    Raises:
        ModelError: the file cannot be read.
    """
    import onnx
    from onnx.inliner import inline_local_functions

    folder, proto = Path(), cast(Any, model)
    if isinstance(model, (str, Path)):
        folder = Path(model).parent
        try:
            proto = onnx.load(str(model), load_external_data=False)
        except Exception as error:
            raise ModelError(
                f"cannot be read as ONNX: {error}", where=str(model), hint="give the plan's ONNX file"
            ) from error
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    if proto.functions:
        proto = inline_local_functions(proto)
    versions = {("" if e.domain == "ai.onnx" else e.domain): e.version for e in proto.opset_import}
    steps = tuple(_step(node, versions) for node in proto.graph.node)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    inputs = tuple(value.name for value in proto.graph.input if value.name not in weights)
    outputs = tuple(value.name for value in proto.graph.output)
    read = ModelFile(steps, inputs, outputs, weights, {}, seed, folder, digest)
    for value in proto.graph.input:
        kind = value.type.tensor_type
        sizes = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
        read.input_types[value.name] = (kind.elem_type, sizes)
    return read


def _step(node: Any, versions: Mapping[str, int]) -> Step:  # noqa: ANN401
    from onnx import AttributeProto, helper, numpy_helper

    attributes = {}
    for entry in node.attribute:
        if entry.type == AttributeProto.TENSOR:
            floats = entry.t.data_type in _FLOAT_NUMBERS
            values = numpy_helper.to_array(entry.t)
            values = values.astype(np.float64) if floats else values
            attributes[entry.name] = torch.from_numpy(np.array(values))
        elif entry.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            value = helper.get_attribute_value(entry)
            attributes[entry.name] = value.decode() if isinstance(value, bytes) else _plain(value)
    domain = "" if node.domain == "ai.onnx" else node.domain
    op = f"{domain}.{node.op_type}" if domain else node.op_type
    return Step(op, tuple(node.input), tuple(node.output), attributes, versions.get(domain, 1))


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, (list, tuple)) or (hasattr(value, "__iter__") and not isinstance(value, str)):
        return [v.decode() if isinstance(v, bytes) else v for v in value]
    return value


def require_rules(steps: Iterable[Step]) -> None:
    """See that every operator has a torch rule.

    Raises:
        ModelError: some have none; all are named.
    """
    missing = sorted({step.op for step in steps if step.op not in RULES})
    if missing:
        raise ModelError(
            f"no torch rule for {', '.join(missing)}", where=next(s.name for s in steps if s.op == missing[0]),
            hint="export the model in operators of planner.runtime.operators",
        )  # fmt: skip

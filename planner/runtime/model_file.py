"""An ONNX file as a program for torch: operators in order, weights by name, at the plan's micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from planner.errors import ModelError
from planner.importers.onnx_graph.read import inlined
from planner.operators import BatchConstants
from planner.plans.model import SeparatedWeight
from planner.runtime.device import seeded
from planner.runtime.operators import RULES, torch_type

_FLOAT_NUMBERS = {1, 10, 11, 16}
_CENTRED_AT_ONE = {
    "LayerNormalization": (1,), "RMSNormalization": (1,), "BatchNormalization": (1, 4), "InstanceNormalization": (1,),
    "GroupNormalization": (1,), "SimplifiedLayerNormalization": (1,),
}  # fmt: skip
"""Operands that scale the result of a norm, or are the variance that it divides by: their initial values are 1."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the file.

    Attributes:
        op: its name, with its domain before a dot where that is not the standard's.
        inputs: names of its operands; "" where one is absent.
        outputs: names of its results; "" where one is not used.
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
        """Its first result, the name that plans have for it."""
        return self.outputs[0]


@dataclass
class ModelFile:
    """The content of a model file that is needed to run it.

    Attributes:
        steps: operators, in an order that can be executed.
        inputs: names of the model's inputs.
        outputs: names of the model's outputs.
        weights: initializers by name.
        constants: values in place of the file's, by name, where the file holds another batch size in constants.
        seed: seed of weights whose data are not in the file.
        folder: folder of external data.
        input_types: of each input the ONNX element type and its fixed sizes.
        resized: for tensors with another number of samples than in the file, sizes by dimension.
        batch: samples that the file's constants are for; 0 where none is resized.
        source: the file as it was read.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Any]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    seed: int = 0
    folder: Path = Path()
    input_types: Mapping[str, tuple[int, tuple[int | None, ...]]] = field(default_factory=dict)
    resized: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    batch: int = 0
    source: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.producer = {name: i for i, step in enumerate(self.steps) for name in step.outputs if name}

    def cone(self, wanted: Iterable[str], given: Iterable[str]) -> tuple[Step, ...]:
        """The operators that compute the wanted values from given ones, in order. O(operators returned).

        Weights and constants need not be among the given values.

        Raises:
            ModelError: no operator computes a value that is needed.
        """
        given_names = {*given, *self.weights, *self.constants}
        needed: set[int] = set()
        stack = [name for name in wanted if name not in given_names]
        while stack:
            name = stack.pop()
            if name in given_names or not name:
                continue
            if name not in self.producer:
                raise ModelError(
                    f"{name!r} is the result of no operator, and no weight or input", where=name,
                    hint="is this the model that the plan was made for?",
                )  # fmt: skip
            at = self.producer[name]
            if at not in needed:
                needed.add(at)
                stack += self.steps[at].inputs
        return tuple(self.steps[i] for i in sorted(needed))

    def apart(self, separated: Iterable[SeparatedWeight], shapes: Mapping[str, Sequence[int]]) -> ModelFile:
        """The model with a weight for each module where an exporter stored equal first values once or left zeros out.

        What the file computes from such a weight alone, such as its transpose, is computed from each anew.

        Args:
            separated: the weights and their readers.
            shapes: of the plan's weights, by name.

        Raises:
            ModelError: the file lacks an operator that reads one of them, or what it reads.
        """
        from onnx.numpy_helper import from_array

        places = {step.name: i for i, step in enumerate(self.steps)}
        steps, weights, made = list(self.steps), dict(self.weights), dict[str, tuple[int, Step]]()
        for own in separated:
            for name in own.operators:
                known = name in places and own.stored in ("", *self.weights)
                reader = steps[places[name]] if known else None
                if reader is not None and not own.stored:
                    given = reader.inputs[: own.operand]
                    absent = ("",) * (own.operand - len(given))
                    steps[places[name]] = replace(reader, inputs=(*given, *absent, own.weight))
                    continue
                if reader is None or own.operand >= len(reader.inputs):
                    message = f"no operand {own.operand} of {name!r}, which reads the weight {own.weight!r}"
                    raise ModelError(message, where=name, hint="is this the model that the plan was made for?")
                inputs = list(reader.inputs)
                again, inputs[own.operand] = self._from_another(inputs[own.operand], own.stored, own.weight)
                for step in again:
                    made[step.name] = (min(places[name], made.get(step.name, (len(steps), step))[0]), step)
                steps[places[name]] = replace(reader, inputs=tuple(inputs))
            zeros = np.zeros(tuple(shapes[own.weight]), np.float32)
            weights[own.weight] = self.weights[own.stored] if own.stored else from_array(zeros, own.weight)
        before: dict[int, list[Step]] = {}
        for place, step in made.values():
            before.setdefault(place, []).append(step)
        ordered = [each for place, step in enumerate(steps) for each in (*before.get(place, ()), step)]
        return replace(self, steps=tuple(ordered), weights=weights)

    def _from_another(self, name: str, stored: str, weight: str) -> tuple[list[Step], str]:
        """What is computed from a stored tensor, from another weight: the operators, and the result's name.

        Sizes of other tensors may be among the operands; they stay as they are.
        """
        named, steps = {stored: weight}, list[Step]()
        for step in self.cone((name,), (stored, *self.inputs)):
            if named.keys().isdisjoint(step.inputs):
                continue
            inputs = tuple(named.get(read, read) for read in step.inputs)
            if step.op == "Identity":
                named[step.name] = inputs[0]
                continue
            named.update((out, f"{out}@{weight}") for out in step.outputs if out)
            steps.append(replace(step, inputs=inputs, outputs=tuple(named.get(out, "") for out in step.outputs)))
        return steps, named[name]

    def with_ties(self, copies: Mapping[str, str]) -> ModelFile:
        """The model in which tied weights that the file stores transposed are computed from those they are copies of.

        Args:
            copies: the weight by the name of its copy.
        """
        turned = {copy: owner for copy, owner in copies.items() if copy in self.weights and owner in self.weights}
        steps = tuple(Step("Transpose", (owner,), (copy,), {"perm": [1, 0]}, 1) for copy, owner in turned.items())
        weights = {name: proto for name, proto in self.weights.items() if name not in turned}
        return replace(self, steps=(*steps, *self.steps), weights=weights)

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether an input may have a shape: it agrees in all sizes that the file fixes."""
        fixed = self.input_types[name][1] if name in self.input_types else ()
        return all(known in (None, size) for known, size in zip(fixed, shape, strict=False))

    def at_batch(self, change: BatchConstants, identities: Iterable[str], batch: int) -> ModelFile:
        """The model at another batch size than the file's.

        Args:
            batch: the file's.
            change: constants that hold the batch size, and their new values.
            identities: operators, by result, that return their first operand unchanged.

        Raises:
            ModelError: the file lacks an operator that reads one of the constants.
        """
        places = {step.name: i for i, step in enumerate(self.steps)}
        steps, constants = list(self.steps), dict(self.constants)
        for (reader, position), values in change.operands.items():
            if reader not in places or position >= len(steps[places[reader]].inputs):
                raise ModelError(
                    f"no operand {position} of {reader!r}, which holds the batch", where=reader,
                    hint="export the model at the plan's micro-batch",
                )  # fmt: skip
            at, name = places[reader], f"{reader}#{position}@batch"
            inputs = list(steps[at].inputs)
            inputs[position] = name
            constants[name] = torch.tensor(values, dtype=torch.int64)
            steps[at] = replace(steps[at], inputs=tuple(inputs))
        for at in (places[name] for name in identities if name in places):
            steps[at] = replace(steps[at], op="Identity", inputs=steps[at].inputs[:1], attributes={})
        return replace(self, steps=tuple(steps), constants=constants, resized=change.samples, batch=batch)

    def weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The data of an initializer: from the file or its external data, else drawn by name and seed.

        Floats come in the given type, integers in their own.
        """
        if name in self.constants:
            return self.constants[name]
        return self.fitted(name, self._stored(name, dtype))

    def shaped(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """As `weight` on the meta device: shape and type without data."""
        proto, resized = self.weights[name], self.resized.get(name, {})
        shape = [resized.get(d, size) for d, size in enumerate(proto.dims)]
        return torch.empty(shape, dtype=torch_type(proto.data_type, dtype), device="meta")

    def fitted(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Resize a value that has an entry for each sample: cut it, or repeat it where those of all samples are equal.

        Integers that grow by the same step from each sample to the next, as places in a flattened batch, go on so.

        Raises:
            ModelError: there are too few entries, and they differ otherwise.
        """
        for d, size in self.resized.get(name, {}).items():
            if value.shape[d] > size:
                value = value.narrow(d, 0, size).contiguous()
            elif value.shape[d] < size:
                each = max(1, value.shape[d] // max(1, self.batch))  # rows of a sample, such as one a head
                samples = value.split(each, d)
                step = self._step(name, samples)
                value = torch.cat([samples[0] + k * step if step else samples[0] for k in range(size // each)], d)
        return value

    def _step(self, name: str, samples: Sequence[torch.Tensor]) -> int:
        """By how much the entries of each sample are larger than those of the one before; 0 where all are equal."""
        first, *others = samples
        if first.is_meta or not others:
            return 0
        counts = not first.is_floating_point() and first.dtype != torch.bool and first.numel()
        step = int((others[0] - first).reshape(-1)[0]) if counts else 0
        if any(not torch.equal(x, first + (k + 1) * step if step else first) for k, x in enumerate(others)):
            raise ModelError("holds another entry for each sample", where=name, hint="export with a symbolic batch")
        return step

    def _stored(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        from onnx import numpy_helper

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
        drawn = torch.randn(shape, generator=seeded(f"{self.seed}/{name}"), dtype=torch.float64)
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

    folder, proto = Path(), cast(Any, model)
    if isinstance(model, (str, Path)):
        folder = Path(model).parent
        try:
            proto = onnx.load(str(model), load_external_data=False)
        except Exception as error:
            raise ModelError(
                f"cannot be read as ONNX: {error}", where=str(model), hint="give the plan's ONNX file"
            ) from error
    source, proto = proto, inlined(proto)
    versions = {("" if e.domain == "ai.onnx" else e.domain): e.version for e in proto.opset_import}
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    weights |= {name: tensor for node in proto.graph.node for name, tensor in _held(node)}
    steps = tuple(_step(node, versions) for node in proto.graph.node if not weights.keys() & {*node.output})
    inputs = tuple(value.name for value in proto.graph.input if value.name not in weights)
    outputs = tuple(value.name for value in proto.graph.output)
    kinds = {value.name: value.type.tensor_type for value in proto.graph.input}
    types = {
        name: (kind.elem_type, tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim))
        for name, kind in kinds.items()
    }
    return ModelFile(steps, inputs, outputs, weights, {}, seed, folder, types, source=source)


def _held(node: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """The name and the tensor of floats that an operator without inputs holds, as a weight may be stored."""
    for entry in node.attribute if node.op_type == "Constant" and not node.domain else ():
        if entry.name == "value" and entry.t.data_type in _FLOAT_NUMBERS and entry.t.dims:
            yield node.output[0], entry.t


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

"""Builds an ONNX graph node by node: names, module paths, shapes, and weights that exist only as shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx

IR_VERSION = 10
WEIGHTS_FILE = "weights.bin"
NAME_SCOPES = "pkg.torch.onnx.name_scopes"

Attribute = int | float | str | Sequence[int] | Sequence[float]


class ModelBuildError(ValueError):
    """A model that does not exist or cannot be built at the size asked for.

    Args:
        message: what is wrong, one line.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message)


class ElementType(IntEnum):
    """Element types by the numbers that ONNX files use."""

    FLOAT = 1
    INT32 = 6
    INT64 = 7
    BOOL = 9


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph under construction."""

    name: str
    shape: tuple[int, ...]
    dtype: ElementType = ElementType.FLOAT

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


class GraphBuilder:
    """A graph under construction.

    Every node carries the path of its module in the form that torch's exporter writes (`name_scopes`), every tensor its
    shape, so that readers need no shape inference. Weights are initializers whose data lies in a file that does not
    exist; with a seed they hold random values instead, for models small enough to run.

    Args:
        name: name of the graph.
        opset: version of the default operator set; `require_opset` raises it.
        source: where the sizes come from, written into the file.
        seed: when given, fill the weights with reproducible random values.
    """

    def __init__(self, name: str, *, opset: int, source: str = "", seed: int | None = None) -> None:
        import onnx

        self._onnx = onnx
        self._model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="shardplan", doc_string=source)
        self._model.opset_import.add(domain="", version=opset)
        self._graph = self._model.graph
        self._graph.name = name
        self._scopes: list[str] = [""]
        self._used: dict[str, int] = {}
        self._parameters: dict[str, Value] = {}
        self._weights_of: tuple[str, str] = ("", "")
        self._constants: dict[tuple[ElementType, tuple[int, ...], bytes], Value] = {}
        self._random: np.random.Generator | None = None
        if seed is not None:
            import numpy as np

            self._random = np.random.default_rng(seed)

    @property
    def module(self) -> str:
        """Path of the current module; "" for the model itself."""
        return self._scopes[-1]

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Enter a module; "layers.7" enters the seventh module of a list in one step, as torch's module stack does."""
        self._scopes.append(f"{self.module}.{name}" if self.module else name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def weights_of(self, module: str) -> Iterator[None]:
        """In the current module, use the weights of another module of the same structure instead of new ones."""
        outer, self._weights_of = self._weights_of, (self.module, module)
        try:
            yield
        finally:
            self._weights_of = outer

    def require_opset(self, version: int) -> None:
        """Raise the version of the default operator set to at least `version`."""
        entry = self._model.opset_import[0]
        entry.version = max(entry.version, version)

    def _unique(self, label: str) -> str:
        """An unused tensor name inside the current module."""
        name = f"{self.module}.{label}" if self.module else label
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return f"{name}_{count}" if count else name

    def input(self, name: str, shape: Sequence[int], dtype: ElementType = ElementType.FLOAT) -> Value:
        """Declare an input of the graph."""
        value = Value(self._claim(name), tuple(shape), dtype)
        self._describe(self._graph.input.add(), value)
        return value

    def output(self, value: Value) -> None:
        """Declare an output of the graph."""
        self._describe(self._graph.output.add(), value)

    def parameter(self, name: str, shape: Sequence[int], *, fill: float | None = None) -> Value:
        """A float32 weight of the current module.

        Args:
            name: its name inside the module, "weight".
            shape: its shape.
            fill: mean of the random values that a seed gives (1 for scales); 0 if None.
        """
        path, (module, source) = f"{self.module}.{name}" if self.module else name, self._weights_of
        if module and path.startswith(f"{module}."):
            return self._parameters[source + path[len(module) :]]
        value = self._parameters[path] = Value(self._claim(path), tuple(shape))
        tensor = self._graph.initializer.add(name=value.name, dims=value.shape, data_type=int(value.dtype))
        if self._random is not None:
            tensor.raw_data = self._random_bytes(self._random, value.shape, fill)
        else:
            tensor.data_location = self._onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=WEIGHTS_FILE)
        return value

    @staticmethod
    def _random_bytes(random: np.random.Generator, shape: tuple[int, ...], fill: float | None) -> bytes:
        import numpy as np

        spread = 0.1 if fill is not None else 1.0 / math.sqrt(max(shape[-1], 1))
        return (random.standard_normal(shape) * spread + (fill or 0.0)).astype(np.float32).tobytes()

    def constant(self, data: Any, dtype: ElementType = ElementType.INT64) -> Value:  # noqa: ANN401
        """A small constant tensor; equal constants are stored once, as exporters do."""
        import numpy as np

        array: np.ndarray = np.asarray(data, dtype=self._onnx.helper.tensor_dtype_to_np_dtype(dtype))
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            value = Value(self._claim(f"const_{len(self._constants)}"), array.shape, dtype)
            self._graph.initializer.add(name=value.name, dims=array.shape, data_type=int(dtype), raw_data=key[2])
            self._constants[key] = value
        return self._constants[key]

    def node(
        self,
        op: str,
        inputs: Sequence[Value | None],
        shape: Sequence[int],
        dtype: ElementType | None = None,
        *,
        label: str = "",
        **attributes: Attribute,
    ) -> Value:
        """Add an operator with one result, of the first input's element type unless another is given."""
        first = inputs[0] if inputs else None
        kind = dtype or (first.dtype if first is not None else ElementType.FLOAT)
        return self.node_with(op, inputs, [(tuple(shape), kind)], label=label, attributes=attributes)[0]

    def node_with(
        self,
        op: str,
        inputs: Sequence[Value | None],
        results: Sequence[tuple[tuple[int, ...], ElementType]],
        *,
        label: str = "",
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[Value, ...]:
        """Add an operator with any number of results, each of a given shape and element type.

        An operator outside the standard's domain is named with its domain: "com.microsoft.GroupQueryAttention".
        """
        domain, _, kind = op.rpartition(".")
        label = label or kind.lower()
        if domain and all(entry.domain != domain for entry in self._model.opset_import):
            self._model.opset_import.add(domain=domain, version=1)
        outputs = tuple(Value(self._unique(label), shape, dtype) for shape, dtype in results)
        node = self._graph.node.add(
            op_type=kind,
            domain=domain or None,
            name=outputs[0].name,
            input=[value.name if value is not None else "" for value in inputs],
            output=[value.name for value in outputs],
        )
        for key, item in (attributes or {}).items():
            node.attribute.append(self._onnx.helper.make_attribute(key, item))
        node.metadata_props.add(key=NAME_SCOPES, value=repr([*self._scopes, label]))
        for value in outputs:
            self._describe(self._graph.value_info.add(), value)
        return outputs

    def finish(self) -> onnx.ModelProto:
        """The finished model."""
        results = {output.name for output in self._graph.output}
        kept = [info for info in self._graph.value_info if info.name not in results]
        del self._graph.value_info[:]
        self._graph.value_info.extend(kept)
        return self._model

    def _claim(self, name: str) -> str:
        if name in self._used:
            raise ValueError(f"two tensors are called {name!r}")
        self._used[name] = 1
        return name

    def _describe(self, info: onnx.ValueInfoProto, value: Value) -> None:
        """Write a value's name, shape and element type.

        Raises:
            ModelBuildError: a size of 2^63 or more, which no file can hold.
        """
        if any(size >= 1 << 63 for size in value.shape):
            message = f"{value.name} would have the shape {list(value.shape)}"
            raise ModelBuildError(message, "give smaller sizes: a dimension of a tensor is below 2^63")
        info.CopyFrom(self._onnx.helper.make_tensor_value_info(value.name, int(value.dtype), value.shape))

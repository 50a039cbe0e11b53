"""An operator's one entry, and what its rule sees: a call, and for which inputs training needs a gradient.

An entry may have an evaluator, which computes results from small known operands: what exporters write to find out
shapes at run time, and constants. It takes the inputs (None where absent), the attributes and the operator set version,
and returns the outputs. Only small tensors get there, so plain numpy is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import ModelError
from planner.graph import DType, Node, Tensor, TensorKind
from planner.operators.nest import Operand
from planner.operators.types import OpCall, OpSpec
from planner.registry import Registry

if TYPE_CHECKING:
    from planner.operators.flow import Flow


@dataclass(frozen=True, slots=True)
class Site:
    """An operator call together with the gradients that training asks of it.

    Attributes:
        call: the operator and its tensors.
        needs: for each input, whether its gradient is needed.
    """

    call: OpCall
    needs: tuple[bool, ...]

    def has(self, position: int) -> bool:
        """Whether that input is present."""
        return position < len(self.call.inputs) and self.call.inputs[position] is not None

    def input(self, position: int) -> Tensor:
        """That input.

        Raises:
            ModelError: the input is absent.
        """
        tensor = self.call.inputs[position] if position < len(self.call.inputs) else None
        if tensor is None:
            raise ModelError(f"{self.call.op} lacks its input {position}", where=self.where, hint="repair the model")
        return tensor

    def has_output(self, position: int) -> bool:
        """Whether that output is asked for."""
        return position < len(self.call.outputs) and self.call.outputs[position] is not None

    def output(self, position: int = 0) -> Tensor:
        """That output.

        Raises:
            ModelError: the output is absent.
        """
        tensor = self.call.outputs[position] if position < len(self.call.outputs) else None
        if tensor is None:
            raise ModelError(f"{self.call.op} lacks its output {position}", where=self.where, hint="repair the model")
        return tensor

    @property
    def where(self) -> str:
        """Name of a tensor by which a person finds the call in the model."""
        return next((t.name for t in (*self.call.outputs, *self.call.inputs) if t is not None), "")

    def reads(self, *positions: int) -> list[Operand]:
        """Inputs as operands of a loop nest."""
        return [(p, self.input(p).shape) for p in positions]

    def writes(self, *positions: int) -> list[Operand]:
        """Outputs as results of a loop nest."""
        return [(p, self.output(p).shape) for p in positions]

    def line(self, reads: Mapping[int, str], writes: Mapping[int, str]) -> tuple[str, list[Operand], list[Operand]]:
        """A loop nest's line over those operands that the call has, and these: the first arguments of `loop_nest`.

        Args:
            reads: what indexes each input, by position.
            writes: what indexes each output, by position.
        """
        given, made = [p for p in reads if self.has(p)], [p for p in writes if self.has_output(p)]
        text = f"{', '.join(reads[p] for p in given)} -> {', '.join(writes[p] for p in made)}"
        return text, self.reads(*given), self.writes(*made)

    def need(self, position: int) -> bool:
        """Whether that input's gradient is needed; false for an absent one."""
        return position < len(self.needs) and self.needs[position]

    @property
    def trains(self) -> bool:
        """Whether any gradient passes through this call."""
        return any(self.needs)

    def present(self) -> tuple[Tensor, ...]:
        """All inputs that are present."""
        return tuple(t for t in self.call.inputs if t is not None)

    def results(self) -> tuple[Tensor, ...]:
        """All outputs that are asked for."""
        return tuple(t for t in self.call.outputs if t is not None)

    def int_attribute(self, name: str, default: int) -> int:
        """An integer attribute, or its default."""
        value = self.call.attributes.get(name, default)
        return int(value) if isinstance(value, (int, float)) else default

    def str_attribute(self, name: str, default: str) -> str:
        """A text attribute, or its default."""
        value = self.call.attributes.get(name, default)
        return value if isinstance(value, str) else default

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A list of integers from an attribute, or its default."""
        value = self.call.attributes.get(name, default)
        return tuple(int(v) for v in value) if isinstance(value, tuple) else default

    def constant_ints(self, position: int) -> tuple[int, ...] | None:
        """The known integer values of an input, None when absent or unknown."""
        value = self.call.constants[position] if position < len(self.call.constants) else None
        return None if value is None or not self.has(position) else tuple(int(v) for v in value)

    def axes(self, attribute: str, position: int, rank: int) -> tuple[int, ...] | None:
        """Axes from an attribute (older operator sets) or a constant input, none negative; None if not given."""
        value = self.call.attributes.get(attribute)
        axes = tuple(int(v) for v in value) if isinstance(value, tuple) else self.constant_ints(position)
        if isinstance(value, int):
            axes = (value,)
        return None if axes is None else tuple(sorted({a % rank for a in axes})) if rank else ()

    def axis(self, name: str, default: int, rank: int) -> int:
        """One axis attribute, not negative."""
        return self.int_attribute(name, default) % rank if rank else 0


RuleFunction = Callable[[Site], OpSpec]
Travel = Callable[["Flow", int, Node], None]
"""Carries the batch through a node, given its index: marks results and operands that follow the batch."""
Shaped = tuple[tuple[int, ...], DType]
"""Shape and element type of a result."""
OutputTypes = Callable[[Site], Sequence[Shaped | None]]
"""Shapes and types of the results of a call, from its inputs alone."""


Array = NDArray[Any]
Attributes = Mapping[str, Any]
Evaluator = Callable[[Sequence[Any], Attributes, int], list[Array]]
"""Results on known operands (None where absent), given the attributes and the operator set version."""


Strides = Callable[[Site, tuple[int, ...]], tuple[int, ...] | None]
"""Strides of a result that is a view of the first input, given the input's strides; None if it must be a copy."""


class Role(StrEnum):
    """Role of a weight among an operator's inputs."""

    MATRIX = "weight"
    BIAS = "bias"
    TABLE = "table"
    ADDED = "added"
    SCALE = "scale"
    MEAN = "running_mean"
    VARIANCE = "running_var"
    QUANTIZATION = "quantization"
    OF_INPUT = "weight_ih"
    OF_STATE = "weight_hh"
    PEEPHOLE = "weight_peephole"
    OTHER = "other"


WEIGHT_AND_BIAS: Mapping[int, Role] = {1: Role.MATRIX, 2: Role.BIAS}
TWO_MATRICES: Mapping[int, Role] = {0: Role.MATRIX, 1: Role.MATRIX}


@dataclass(frozen=True, slots=True)
class Statistics:
    """Reductions that let ranks split a coupled dimension: numbers per row, one entry a collective in order.

    A row is one combination of the dimensions that are not coupled. The numbers are fp32.

    Attributes:
        forward: for instance a maximum, then a sum: (1, 1).
        backward: the same for the gradients.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...] = ()


class JointCut(StrEnum):
    """Two iteration dimensions that an operator lets ranks cut together, though neither alone."""

    RING = "ring"
    """An attention's queries `s` and keys `u`: keys and values go around the ranks in a ring. `e`, the head size of
    values, is not cut: every rank would compute all scores."""
    EXPERTS = "experts"
    """A mixture's rows `m0`, `m1`, ... and experts `e`: each row is sent to the ranks of the experts that it picks, and
    what they make of it comes back. Every expert is taken to be picked equally often; a cut of `e` alone leaves the
    scores (input 1) whole, since a row picks among all of them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """All that is known of one operator.

    Attributes:
        build: describes a call; None for an operator that is priced as one element-wise pass.
        ports: inputs that a gradient can flow to; None means every floating-point input.
        straight_through: integer outputs pass gradients on as if the operator were the identity (quantisation).
        travel: how the batch travels, where the loop nests do not say it.
        compute: results on small known operands, where they may say a shape.
        infer: shape and type of each result by position (None where open), for what ONNX's own inference leaves open.
        most: upper bound of the shapes that `infer` gives, where the size of a result depends on data.
        strides: how its first result lies in the storage of its first input, where frameworks make that a view.
        keeps_layout: results have the order of dimensions in memory of the first operand of their shape.
        hands_on: the result is the first input itself where shape and type are equal.
        neutral: by position of a number that leaves the other operand as it is, that number.
        rearranges: its results hold elements of the first input, moved, picked or in another format.
        random: results differ from run to run.
        values: positions of inputs that hold a shape, an axis, a place or a count: needed by value, never by gradient.
        weights: positions of inputs that take weights, and what a weight there is.
        ranks: numbers of dimensions that an input may have, by position, where ONNX does not check it.
        window: position of the weights of a window that slides over the first input, -1 for one without weights.
        heavy: the cost depends on shapes so strongly that an unknown shape is an error, not a guess.
        quantised: its weights are integers.
        linear: it commutes with sums, so that partial operands give partial results.
        statistics: what cuts of its coupled dimensions exchange; None where no exchange is known.
        joint: dimensions that may be cut together.
    """

    build: RuleFunction | None = None
    ports: tuple[int, ...] | None = None
    straight_through: bool = False
    travel: Travel | None = None
    compute: Evaluator | None = None
    infer: OutputTypes | None = None
    most: OutputTypes | None = None
    strides: Strides | None = None
    keeps_layout: bool = False
    hands_on: bool = False
    neutral: Mapping[int, float] = field(default_factory=dict)
    rearranges: bool = False
    random: bool = False
    values: tuple[int, ...] = ()
    weights: Mapping[int, Role] = field(default_factory=dict)
    ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    window: int | None = None
    heavy: bool = False
    quantised: bool = False
    linear: bool = False
    statistics: Statistics | None = None
    joint: JointCut | None = None

    @property
    def uncut(self) -> frozenset[str]:
        """Dimensions that the nest allows to split but whose split would repeat most of the work on every rank."""
        return frozenset("e" if self.joint is JointCut.RING else ())

    @property
    def whole_reads(self) -> frozenset[tuple[int, str]]:
        """(position, dimension): inputs that stay replicated when that dimension alone is split."""
        return frozenset({(1, "e")} if self.joint is JointCut.EXPERTS else ())

    def of(self, *names: str) -> Callable[[RuleFunction], RuleFunction]:
        """Decorator that registers a function as what describes calls of one or several operators with these facts."""

        def register(build: RuleFunction) -> RuleFunction:
            self.register(*names, build=build)
            return build

        return register

    def register(self, *names: str, build: RuleFunction | None = None) -> None:
        """Register operators with these facts."""
        for name in names:
            RULES.register(name, replace(self, build=build))

    def differentiable(self, position: int) -> bool:
        """Whether a gradient can flow to that input."""
        return self.ports is None or position in self.ports


def like(tensor: Tensor, shape: Sequence[int] | None = None, dtype: DType | None = None) -> Shaped:
    """A result of a tensor's shape and type, or of another shape or type."""
    return tuple(tensor.shape if shape is None else shape), dtype or tensor.dtype


def as_first(site: Site) -> list[Shaped | None]:
    """Results of operators that hand on the shape and type of their first input."""
    return [like(site.input(0))] * len(site.call.outputs)


RULES: Registry[Rule] = Registry("planner.operators.rules", "operator")
_UNKNOWN = Rule()


def rule_of(op: str) -> Rule:
    """The rule of an operator; a rule without facts for an unknown operator."""
    return RULES.find(op) or _UNKNOWN


def default_needs(call: OpCall) -> tuple[bool, ...]:
    """Which inputs need a gradient when the graph around is unknown: floating-point weights and activations."""
    rule = rule_of(call.op)
    return tuple(
        tensor is not None
        and tensor.kind in (TensorKind.PARAMETER, TensorKind.ACTIVATION)
        and tensor.dtype.is_float
        and rule.differentiable(position)
        for position, tensor in enumerate(call.inputs)
    )


def evaluate(
    op: str,
    inputs: Sequence[Array | None],
    attributes: Attributes,
    opset: int,
    dtype: Any,  # noqa: ANN401
) -> list[Array] | None:
    """Outputs of an operator on known values; None when its entry has no evaluator, or that does not apply.

    Args:
        op: the operator.
        inputs: its operands.
        attributes: by name.
        opset: version of the operator set.
        dtype: numpy type of the first output, used by casts.
    """
    compute = rule_of(op).compute
    if compute is None or (compute is converted and dtype is None):
        return None
    try:
        with np.errstate(all="ignore"):
            found = compute(inputs, attributes, opset)
            return [found[0].astype(dtype)] if compute is converted else found
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError):
        return None


def converted(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    """The first operand, to be given the type of the result."""
    return [np.asarray(x[0])]


def integers(value: Any) -> list[int]:  # noqa: ANN401
    """The entries of an operand."""
    return [int(v) for v in np.asarray(value).reshape(-1)]


def axes_of(inputs: Sequence[Any], attributes: Attributes, position: int = 1) -> list[int] | None:
    """Axes by operand or attribute; None where not given."""
    if len(inputs) > position and inputs[position] is not None:
        return integers(inputs[position])
    return list(attributes["axes"]) if "axes" in attributes else None


def plain(function: Callable[..., Any]) -> Evaluator:
    """One result, of the type that numpy gives it."""
    return lambda x, a, v: [np.asarray(function(*x))]


def typed(function: Callable[..., Any]) -> Evaluator:
    """One result of the first operand's type."""
    return lambda x, a, v: [np.asarray(function(*x), dtype=x[0].dtype)]


def folded(function: Callable[[Any, Any], Any]) -> Evaluator:
    """Any number of operands, from left to right."""
    return typed(lambda *x: functools.reduce(function, x))

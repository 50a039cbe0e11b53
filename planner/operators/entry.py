"""An operator's one entry, and the call that its rule sees.

An entry may fold: results are computed from small known operands (`evaluate`), as exporters write to find out shapes at
run time, and constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import ModelError
from planner.graph import AttributeValue, ConstantValue, DType, Graph, Node, Tensor, TensorKind
from planner.operators.nest import Operand, dim_names, loop_nest, spell_runs
from planner.operators.types import DimKind, LoopNest, OpSpec
from planner.registry import Registry

if TYPE_CHECKING:
    from planner.operators.flow import Flow


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operator applied to concrete tensors: all that a rule may look at.

    Attributes:
        op: operator type as in `Node.op`.
        opset: version of the default operator set.
        inputs: by position, None where an optional input is absent.
        outputs: by position, None where nobody reads the output.
        attributes: by name.
        constants: by input position, the flattened value where it is a small known constant, else None.
        needs: for each input, whether training needs its gradient; nothing where nobody asks.
    """

    op: str
    opset: int
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]
    attributes: Mapping[str, AttributeValue]
    constants: tuple[ConstantValue | None, ...]
    needs: tuple[bool, ...] = ()

    @staticmethod
    def of(graph: Graph, node: Node) -> OpCall:
        """The call that a node of a graph makes."""
        return OpCall(
            node.op,
            graph.opset,
            tuple(graph.tensors[name] if name else None for name in node.inputs),
            tuple(graph.tensors.get(name) if name else None for name in node.outputs),
            node.attributes,
            tuple(graph.constants.get(name) if name else None for name in node.inputs),
        )

    def signature(self) -> tuple[object, ...]:
        """What the cost depends on: equal signatures cost the same. Tensor names are left out."""
        return (
            self.op,
            tuple((t.shape, t.dtype, t.kind) if t else None for t in self.inputs),
            tuple((t.shape, t.dtype) if t else None for t in self.outputs),
            tuple(sorted(self.attributes.items(), key=lambda kv: kv[0])),
            self.constants,
        )

    def has(self, position: int) -> bool:
        """Whether that input is present."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def input(self, position: int) -> Tensor:
        """That input.

        Raises:
            ModelError: the input is absent.
        """
        return self._present(self.inputs, position, "input")

    def has_output(self, position: int) -> bool:
        """Whether that output is asked for."""
        return position < len(self.outputs) and self.outputs[position] is not None

    def output(self, position: int = 0) -> Tensor:
        """That output.

        Raises:
            ModelError: the output is absent.
        """
        return self._present(self.outputs, position, "output")

    def _present(self, tensors: Sequence[Tensor | None], position: int, what: str) -> Tensor:
        tensor = tensors[position] if position < len(tensors) else None
        if tensor is None:
            raise ModelError(f"{self.op} lacks its {what} {position}", where=self.where, hint="repair the model")
        return tensor

    @property
    def where(self) -> str:
        """Name of a tensor by which a person finds the call in the model."""
        return next((t.name for t in (*self.outputs, *self.inputs) if t is not None), "")

    def nest(
        self,
        text: str,
        *,
        runs: Mapping[str, int] | None = None,
        parallel: str = "",
        reduced: str = "",
        coupled: str = "",
        whole: str = "",
        sizes: Mapping[str, int] | None = None,
        halos: Mapping[str, int] | None = None,
        contraction: bool = False,
        matrix_flops: float = 0.0,
        vector_flops: float = 0.0,
    ) -> LoopNest:
        """The loop nest of a line over those operands and results that the call has (`planner.operators.nest`).

        Args:
            text: terms of input 0, 1, ... and of output 0, 1, ...; `3:` in front of terms names another position, and
                `?` an operand that may be absent. A line without an arrow is of a part whose result another part reads.
            runs: lengths of runs, where a tensor has several.
            parallel, reduced, coupled, whole: dimensions of that kind where the line implies another, runs as `d..`.
            sizes, halos, contraction, matrix_flops, vector_flops: as of `loop_nest`.
        """
        left, arrow, right = text.partition("->")
        reads = self._operands(left, self.input, self.has)
        writes = self._operands(right, self.output, self.has_output) if arrow else []
        ranks = tuple((terms, len(shape)) for (_, shape), terms in (*reads, *writes))
        terms, lengths = spell_runs(ranks, tuple((runs or {}).items()))
        kinds: dict[str, DimKind] = {}
        for kind, names in zip(DimKind, (parallel, reduced, coupled, whole), strict=True):
            for word in names.split():
                stem = word.removesuffix("..")
                kinds.update(dict.fromkeys([stem] if stem == word else dim_names(stem, lengths.get(stem, 0)), kind))
        return loop_nest(
            f"{', '.join(terms[: len(reads)])} -> {', '.join(terms[len(reads) :])}",
            [operand for operand, _ in reads],
            [operand for operand, _ in writes],
            kinds=kinds,
            sizes=sizes,
            halos=halos,
            contraction=contraction,
            matrix_flops=matrix_flops,
            vector_flops=vector_flops,
        )

    @staticmethod
    def _operands(text: str, of: Callable[[int], Tensor], has: Callable[[int], bool]) -> list[tuple[Operand, str]]:
        """The operands of one side of a line that the call has, with their terms."""
        operands, position = [], -1
        for optional, number, terms in (_OPERAND.findall(part)[0] for part in text.split(",")):
            position = int(number) if number else position + 1
            if not optional or has(position):
                operands.append(((position, of(position).shape), terms))
        return operands

    def need(self, position: int) -> bool:
        """Whether that input's gradient is needed; false for an absent one."""
        return position < len(self.needs) and self.needs[position]

    @property
    def trains(self) -> bool:
        """Whether any gradient passes through this call."""
        return any(self.needs)

    def present(self) -> tuple[Tensor, ...]:
        """All inputs that are present."""
        return tuple(t for t in self.inputs if t is not None)

    def results(self) -> tuple[Tensor, ...]:
        """All outputs that are asked for."""
        return tuple(t for t in self.outputs if t is not None)

    def int_attribute(self, name: str, default: int) -> int:
        """An integer attribute, or its default."""
        value = self.attributes.get(name, default)
        return int(value) if isinstance(value, (int, float)) else default

    def str_attribute(self, name: str, default: str) -> str:
        """A text attribute, or its default."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, str) else default

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A list of integers from an attribute, or its default."""
        value = self.attributes.get(name, default)
        return tuple(int(v) for v in value) if isinstance(value, tuple) else default

    def constant_ints(self, position: int) -> tuple[int, ...] | None:
        """The known integer values of an input, None when absent or unknown."""
        value = self.constants[position] if position < len(self.constants) else None
        return None if value is None or not self.has(position) else tuple(int(v) for v in value)

    def axes(self, attribute: str, position: int, rank: int) -> tuple[int, ...] | None:
        """Axes from an attribute (older operator sets) or a constant input, none negative; None if not given."""
        value = self.attributes.get(attribute)
        axes = tuple(int(v) for v in value) if isinstance(value, tuple) else self.constant_ints(position)
        if isinstance(value, int):
            axes = (value,)
        return None if axes is None else tuple(sorted({a % rank for a in axes})) if rank else ()

    def axis(self, name: str, default: int, rank: int) -> int:
        """One axis attribute, not negative."""
        return self.int_attribute(name, default) % rank if rank else 0


_OPERAND = re.compile(r"\s*(\?)?(?:(\d+):)?(.*)")

RuleFunction = Callable[[OpCall], OpSpec]
Travel = Callable[["Flow", int, Node], None]
"""Carries the batch through a node, given its index: marks results and operands that follow the batch."""
Shaped = tuple[tuple[int, ...], DType]
"""Shape and element type of a result."""
OutputTypes = Callable[[OpCall], Sequence[Shaped | None]]
"""Shapes and types of the results of a call, from its inputs alone."""


Array = NDArray[Any]
Attributes = Mapping[str, Any]

Strides = Callable[[OpCall, tuple[int, ...]], tuple[int, ...] | None]
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
        folds: results of small known operands are computed, since they may say a shape.
        plain: how numpy computes them from operands and attributes; for what the bundled models fold, which spares them
            the 70 ms in which the standard's reference loads.
        infer: shape and type of each result by position (None where open), for what ONNX's own inference leaves open.
        most: upper bound of the shapes that `infer` gives, where the size of a result depends on data.
        strides: how its first result lies in the storage of its first input, where frameworks make that a view.
        keeps_layout: results have the order of dimensions in memory of the first operand of their shape.
        hands_on: the result is the first input itself where shape and type are equal.
        neutral: by position of a number that leaves the other operand as it is, that number.
        rearranges: its results hold elements of the first input, moved, picked or in another format.
        overlays: its result is the first input with the others laid over it, at places that values say.
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
        scans: its heads hand a state from token to token, and share directions in groups (dimension `g`).
    """

    build: RuleFunction | None = None
    ports: tuple[int, ...] | None = None
    straight_through: bool = False
    travel: Travel | None = None
    folds: bool = False
    plain: Callable[..., Any] | None = None
    infer: OutputTypes | None = None
    most: OutputTypes | None = None
    strides: Strides | None = None
    keeps_layout: bool = False
    hands_on: bool = False
    neutral: Mapping[int, float] = field(default_factory=dict)
    rearranges: bool = False
    overlays: bool = False
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
    scans: bool = False

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


def permutation(attributes: Mapping[str, AttributeValue], rank: int) -> tuple[int, ...]:
    """For each dimension of a Transpose's result, the operand's: those in reverse order where the node says nothing."""
    given = attributes.get("perm")
    return tuple(int(dim) for dim in given) if isinstance(given, tuple) else tuple(range(rank))[::-1]


def like(tensor: Tensor, shape: Sequence[int] | None = None, dtype: DType | None = None) -> Shaped:
    """A result of a tensor's shape and type, or of another shape or type."""
    return tuple(tensor.shape if shape is None else shape), dtype or tensor.dtype


def as_first(call: OpCall) -> list[Shaped | None]:
    """Results of operators that hand on the shape and type of their first input."""
    return [like(call.input(0))] * len(call.outputs)


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
    """Outputs of an operator on known values, by the standard's reference; None where its entry does not fold, or that
    fails.

    Args:
        op: the operator.
        inputs: its operands; None where absent.
        attributes: by name.
        opset: version of the operator set.
        dtype: numpy type of the first output; None to leave it as it comes.
    """
    rule = rule_of(op)
    if not rule.folds:
        return None
    try:
        with np.errstate(all="ignore"):
            if rule.plain is not None:
                first, others = rule.plain(*inputs, **attributes), []
            else:
                first, *others = _reference(op.rpartition(".")[2], inputs, attributes, opset)
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError, RuntimeError):
        return None
    return [np.asarray(first, dtype), *map(np.asarray, others)]


def _reference(name: str, inputs: Sequence[Array | None], attributes: Attributes, opset: int) -> Sequence[Any]:
    """Outputs of an operator of the standard by its reference implementation."""
    from onnx.helper import make_node
    from onnx.reference.ops import load_op

    node = make_node(name, ["" if x is None else f"x{k}" for k, x in enumerate(inputs)], ["y"], **attributes)
    settings = {"log": lambda *_: None, "opsets": {"": opset}, "verbose": 0, "new_ops": None}
    outputs: Sequence[Any] = load_op("", name, opset)(node, settings).run(*inputs)
    return outputs

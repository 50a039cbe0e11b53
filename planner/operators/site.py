"""What a rule sees: one operator call, and for which of its inputs training needs a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.errors import ModelError
from planner.graph import Tensor, TensorKind
from planner.operators.nest import Operand
from planner.operators.types import OpCall, OpSpec
from planner.registry import Registry


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
        found = tuple(int(v) for v in value) if isinstance(value, tuple) else self.constant_ints(position)
        if isinstance(value, int):
            found = (value,)
        return None if found is None else tuple(sorted({a % rank for a in found})) if rank else ()

    def axis(self, name: str, default: int, rank: int) -> int:
        """One axis attribute, not negative."""
        return self.int_attribute(name, default) % rank if rank else 0


RuleFunction = Callable[[Site], OpSpec]


@dataclass(frozen=True, slots=True)
class Rule:
    """How calls of one operator are described.

    Attributes:
        build: makes the description of a call.
        ports: inputs that a gradient can flow to; None means every floating-point input.
        straight_through: integer outputs pass gradients on as if the operator were the identity (quantisation).
    """

    build: RuleFunction
    ports: frozenset[int] | None = None
    straight_through: bool = False


RULES: Registry[Rule] = Registry("planner.operators.rules", "operator")


def rule(
    *names: str, ports: tuple[int, ...] | None = None, straight_through: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of one or several operators."""

    def register(build: RuleFunction) -> RuleFunction:
        entry = Rule(build, None if ports is None else frozenset(ports), straight_through)
        for name in names:
            RULES.register(name, entry)
        return build

    return register


def find_rule(op: str) -> Rule | None:
    """The rule of an operator, None when there is none."""
    return RULES.find(op)


def default_needs(call: OpCall) -> tuple[bool, ...]:
    """Which inputs need a gradient when the graph around is unknown: floating-point weights and activations."""
    known = find_rule(call.op)
    ports = known.ports if known is not None else None
    return tuple(
        tensor is not None
        and tensor.kind in (TensorKind.PARAMETER, TensorKind.ACTIVATION)
        and tensor.dtype.is_float
        and (ports is None or position in ports)
        for position, tensor in enumerate(call.inputs)
    )

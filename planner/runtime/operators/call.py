"""One operator call as its torch rule sees it, and the table of rules by operator name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from planner.errors import ModelError
from planner.runtime.device import HOST, seeded

Result: TypeAlias = torch.Tensor | Sequence[Any] | None
"""What a rule returns: one tensor, or one for each output of the operator, in order."""


@dataclass(frozen=True, slots=True)
class Context:
    """Types and seeds that all calls of one pass share.

    Attributes:
        float_dtype: type of all floating-point work; the file's float types (but bool and integers) give way to it.
        seed: of dropout masks and random tensors.
        micro_batch: number of the micro-batch, so that a repeated pass draws the same numbers.
        keeping: gives, by operator, what its rule runs in: where autograd keeps its tensors (`KeptTensors.keeping`).
        saw: told each operator's name, operands and first result (`WaitingProducts.saw`).
        before: told the names that an operator reads, before it runs (`BlocksAtWork.before`).
        after: told these, the names of its results, and the results.
        begin: told what runs next, an operator or several as one, and what gives the tensor of a name that it reads.
        end: told the same when it has run, with what gives the tensor of a name that it made (`KeptTensors`).
        device: where the pass runs.
        adds_in_place: whether a backward adds gradients of weights to those that are there, all at once.
        fitted: gives a result, by its name, the samples of the plan's micro-batch (`ModelFile.fitted`).
    """

    float_dtype: torch.dtype = torch.float32
    seed: int = 0
    micro_batch: int = 0
    keeping: Callable[[str], AbstractContextManager[object]] = nullcontext
    saw: Callable[[str, Sequence[torch.Tensor | None], object], None] = lambda op, operands, result: None
    before: Callable[[Sequence[str]], None] = lambda names: None
    after: Callable[[Sequence[str], Sequence[str], Sequence[object]], None] = lambda names, outputs, results: None
    begin: Callable[[Any, Callable[[str], torch.Tensor]], None] = lambda unit, value: None
    end: Callable[[Any, Callable[[str], torch.Tensor]], None] = lambda unit, value: None
    device: torch.device = HOST
    adds_in_place: bool = False
    fitted: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, value: value

    @property
    def within(self) -> Context:
        """That of the operators that one stands for: that one began, and ends after them."""
        nothing = Context()
        return replace(self, begin=nothing.begin, end=nothing.end)

    @property
    def inside(self) -> Context:
        """That of operators that run again as one: nothing of what happens inside is kept or told of."""
        return replace(self.within, keeping=nullcontext, saw=Context().saw)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator with its operands.

    Attributes:
        op: its name; operators of other domains have the domain before a dot.
        name: its first output.
        inputs: operands by position; None where one is absent.
        attributes: as in the file; tensors as torch tensors.
        outputs: how many outputs are asked for.
        opset: version of the operator's domain.
        context: of the pass.
        values: operands that hold values a rule must read (shapes, axes), where `inputs` has only their shape.
    """

    op: str
    name: str
    inputs: tuple[torch.Tensor | None, ...]
    attributes: Mapping[str, Any]
    outputs: int
    opset: int
    context: Context
    values: tuple[torch.Tensor | None, ...] = ()

    def has(self, position: int) -> bool:
        """Whether that operand is present."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def get(self, position: int) -> torch.Tensor | None:
        """That operand, or None."""
        return self.inputs[position] if position < len(self.inputs) else None

    def __getitem__(self, position: int) -> torch.Tensor:
        value = self.get(position)
        if value is None:
            raise ModelError(f"{self.op} lacks its input {position}", where=self.name, hint="repair the model")
        return value

    def attr(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """An attribute, or the default."""
        return self.attributes.get(name, default)

    def ints(self, position: int, attribute: str = "") -> list[int] | None:
        """Integers of an operand, or of the attribute of older operator sets; None where both are missing."""
        if self.has(position):
            values = self.values[position] if self.values else self.inputs[position]
            if values is None or values.is_meta:
                raise ModelError(
                    f"{self.op} needs the values of its input {position}, which depend on data",
                    where=self.name,
                    hint="export the model with fixed shapes",
                )
            return [int(v) for v in values.reshape(-1).tolist()]
        value = self.attributes.get(attribute)
        if value is None:
            return None
        return [int(v) for v in value] if isinstance(value, Sequence) else [int(value)]

    def scalar(self, position: int, default: float) -> float:
        """The number in an operand of one element; the default where it is absent."""
        if not self.has(position):
            return default
        values = self.values[position] if self.values else self.inputs[position]
        return float(values.reshape(-1)[0]) if values is not None and not values.is_meta else default

    def drawn(self, draw: Callable[..., torch.Tensor], shape: Sequence[int], **options: Any) -> torch.Tensor:  # noqa: ANN401
        """Random numbers of this call, seeded by operator, seed and micro-batch: the same on any rank of a device."""
        device = self.context.device
        generator = seeded(f"{self.context.seed}/{self.context.micro_batch}/{self.name}", device)
        return draw(list(shape), generator=generator, device=device, **options)


Rule = Callable[[OperatorCall], Result]

RULES: dict[str, Rule] = {}
"""Torch rules by operator; names are those of `planner.operators.RULES`."""


PRODUCTS: set[str] = set()
"""Operators whose gradients of operands are products that can be computed apart."""


def rule(*names: str, product: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these operators; true for `product` lists them in `PRODUCTS`."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        PRODUCTS.update(names if product else ())
        return function

    return add


def dims_of(x: torch.Tensor, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Dimensions given by axes, negative ones counted from the end; all dimensions where axes are None."""
    return tuple(range(x.dim())) if axes is None else tuple(sorted(a % x.dim() for a in axes))

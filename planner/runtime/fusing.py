"""Operators of a file that run as one, as a plan counts them: attention, and element-wise work that is done again.

An exporter may write attention as two products around a softmax, an activation or a norm as arithmetic. Run one by
one, each of these operators keeps tensors for its backward. Here attention becomes one kernel. Cheap operators that a
plan has as one of its own, or that its software runs as one kernel, keep their operands alone and run again in
backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from planner.runtime.device import brought
from planner.runtime.interpreter import run
from planner.runtime.model_file import Step
from planner.runtime.operators import Context
from planner.runtime.operators.attention import fused_attention
from planner.runtime.operators.kernels import repeated

_SAME = ("Cast", "Identity")
_FACTORS = ("Mul", "Div")
_HIDDEN = -1e4
"""A score at most this large counts as one that is hidden."""
_CHEAP = frozenset({
    "Abs", "Add", "Cast", "Clip", "Div", "Erf", "Exp", "Gelu", "Identity", "Log", "Max", "Min", "Mul", "Neg", "Pow",
    "Reciprocal", "ReduceMean", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
})  # fmt: skip
"""Operators that take about as long as reading their operands."""
_GATES = ("Gelu", "Swish")


@dataclass(frozen=True, slots=True)
class Repeat:
    """Operators that keep their operands alone and run again in backward.

    Attributes:
        steps: the operators, in order.
        inputs: names of what they read and do not make.
        outputs: results that others read.
    """

    steps: tuple[Kernel, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its first result."""
        return self.outputs[0]

    def results(self, values: Mapping[str, torch.Tensor], context: Context) -> list[torch.Tensor]:
        """The results, from the values of the operands."""
        trained = [name for name in self.inputs if values[name].requires_grad]
        rest = {name: values[name] for name in self.inputs if name not in trained}

        def function(*operands: torch.Tensor) -> list[torch.Tensor]:
            results = run(
                self.steps, {**rest, **dict(zip(trained, operands, strict=True))}, context.inside, wanted=self.outputs
            )
            return [results[name] for name in self.outputs]

        with context.keeping(self.outputs[0]):
            found = list(repeated(function, [values[name] for name in trained]))
        context.saw("", [values[name] for name in self.inputs], found[0])
        return found


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention that is written out: two products around a softmax.

    Attributes:
        steps: the operators, in order.
        inputs: names of what they read and do not make.
        outputs: results of the last one.
        product: the product of queries and keys.
        between: what is done to the scores before the softmax, in order: the operator, and the position of the scores.
        scaled: numbers that multiply queries or keys, by name, and whether they divide.
        value: name of the values.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    product: tuple[str, str]
    between: tuple[tuple[Step, int], ...]
    scaled: tuple[tuple[str, bool], ...]
    value: str

    def results(self, values: Mapping[str, torch.Tensor], context: Context) -> list[torch.Tensor]:
        """The result, by one kernel if the operands are such that it does the same."""
        context.before(self.inputs)
        with context.keeping(self.outputs[0]):
            result = self._by_kernel(values)
        if result is None:
            own = {name: values[name] for name in self.inputs}
            found = run(self.steps, own, context.within, wanted=self.outputs)
            return [found[name] for name in self.outputs]
        context.after(self.inputs, self.outputs, [result])
        context.saw("", [values[name] for name in self.inputs], result)
        return [result]

    def _by_kernel(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        q, k, v = values[self.product[0]], values[self.product[1]].transpose(-1, -2), values[self.value]
        alike = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.shape[-1] == v.shape[-1]
        read = self._scores(values, q)
        if not alike or q.dim() not in (3, 4) or read is None:
            return None
        scale, mask = read
        added = [1] * (4 - q.dim())
        q, k, v = (x.reshape(*added, *x.shape) for x in (q, k, v))
        if mask is not None:
            mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        return fused_attention(q, k, v, mask, scale).squeeze(0) if added else fused_attention(q, k, v, mask, scale)

    def _scores(self, values: Mapping[str, torch.Tensor], q: torch.Tensor) -> tuple[float, torch.Tensor | None] | None:
        """Factor of the scores, and what is added to them; None where more is done to them than that."""
        scale, mask = 1.0, None
        for name, divides in self.scaled:
            if (number := _number(values[name])) is None:
                return None
            scale = scale / number if divides else scale * number
        for step, at in ((step, at) for step, at in self.between if step.op not in _SAME):
            others = [values[name] for p, name in enumerate(step.inputs) if p != at]
            if step.op in _FACTORS:
                number = _number(others[0])
                if number is None or (step.op == "Div" and at):
                    return None
                factor = 1 / number if step.op == "Div" else number
                scale, mask = scale * factor, None if mask is None else mask * factor
                continue
            if any(x.requires_grad or x.dim() > q.dim() for x in others):
                return None
            others = [brought(x, q.device) for x in others]
            if step.op == "Where":
                number = _number(values[step.inputs[3 - at]])
                if number is None or number > _HIDDEN:
                    return None
                seen = others[0] if at == 1 else ~others[0]
                bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, number)
            else:
                bias = others[0].to(q.dtype)
            mask = bias if mask is None else mask + bias
        return scale, mask


Kernel: TypeAlias = Step | Repeat | FusedAttention
"""What runs at once: an operator of the file, or several."""


def fused(
    steps: Sequence[Step], wanted: Collection[str], *, listed: Collection[str] = (), gates: bool = False
) -> tuple[Kernel, ...]:
    """Operators in order, those that run as one in the place of the last of them. O(steps).

    Args:
        steps: operators of the file.
        wanted: results that are read elsewhere.
        listed: operators of the plan, by first output; the others are part of those that read their results.
        gates: whether the plan's software runs the product with an activation as one kernel.
    """
    found = _Fusing(steps, wanted)
    groups = [attention for step in steps if step.op == "Softmax" and (attention := found.attention(step))]
    taken = {step.name for group in groups for step in group.steps}
    at_last: dict[str, Kernel] = {group.steps[-1].name: group for group in groups}
    for step in reversed(steps):
        if step.name in listed and step.op in _CHEAP and step.name not in taken:
            inner = found.cheap(step, listed, gates)
            if inner and taken.isdisjoint(s.name for s in inner):
                taken.update(s.name for s in (*inner, step))
                at_last[step.name] = _as_one((*inner, step))
    return tuple(at_last.get(step.name, step) for step in steps if step.name in at_last or step.name not in taken)


class _Fusing:
    """Finds operators that run as one among some steps."""

    def __init__(self, steps: Sequence[Step], wanted: Collection[str]) -> None:
        self._steps, self._wanted = steps, wanted
        self._producer = {name: step for step in steps for name in step.outputs if name}
        self._order = {step.name: i for i, step in enumerate(steps)}
        self._readers: dict[str, list[Step]] = {}
        for step in steps:
            for name in dict.fromkeys(step.inputs):
                self._readers.setdefault(name, []).append(step)

    def attention(self, softmax: Step) -> FusedAttention | None:
        """The attention around a softmax over the last dimension; None where it is none."""
        if softmax.opset < 13 or int(softmax.attributes.get("axis", -1)) not in (-1, 2, 3):
            return None
        after = self._to_values(softmax)
        before = self._to_product(softmax.inputs[0])
        if after is None or before is None:
            return None
        product, between = before
        scaled, operands, scaling = [], [], []
        for name in product.inputs:
            step = self._producer.get(name)
            number = None if step is None or step.op not in _FACTORS or not self._alone(name) else self._factor(step)
            if step is not None and number is not None:
                scaled.append((number, step.op == "Div"))
                scaling.append(step)
                name = next(n for n in step.inputs if n != number)
            operands.append(name)
        steps = self._in_order((*scaling, product, *(step for step, _ in between), softmax, *after))
        return FusedAttention(
            steps, _operands(steps), steps[-1].outputs[:1], (operands[0], operands[1]), between, tuple(scaled),
            after[-1].inputs[1],
        )  # fmt: skip

    def cheap(self, last: Step, listed: Collection[str], gates: bool) -> tuple[Step, ...]:
        """Operators before a listed one that are part of it or of its kernel, and that nothing else reads."""
        inside = {last.name: last}
        for step in reversed(self._steps[: self._order[last.name]]):
            readers = [r for name in step.outputs for r in self._readers.get(name, ())]
            closed = (
                bool(readers) and all(r.name in inside for r in readers) and not set(step.outputs) & set(self._wanted)
            )
            gate = gates and step.name in listed and last.op == "Mul" and self._activates(step, listed)
            if step.op in _CHEAP and closed and (step.name not in listed or gate):
                inside[step.name] = step
        return self._in_order(step for name, step in inside.items() if name != last.name)

    def _activates(self, step: Step, listed: Collection[str]) -> bool:
        """Whether a listed operator is an activation: by name, or as the product of a tensor with its sigmoid."""
        inner = self._producer.get(step.inputs[-1])
        swish = inner is not None and inner.op == "Sigmoid" and inner.inputs[0] == step.inputs[0]
        return step.op in _GATES or (step.op == "Mul" and swish and inner is not None and inner.name not in listed)

    def _to_values(self, softmax: Step) -> tuple[Step, ...] | None:
        """From a softmax to the product with the values."""
        name, steps = softmax.outputs[0], list[Step]()
        while name not in self._wanted:
            readers = self._readers.get(name, [])
            if len(readers) == 2 and [r.op for r in readers] == ["IsNaN", "Where"] and readers[1].inputs[2] == name:
                steps += readers  # a row that is hidden altogether gives nothing
            elif len(readers) == 1 and readers[0].op in _SAME:
                steps += readers
            elif len(readers) == 1 and readers[0].op == "MatMul" and readers[0].inputs[0] == name:
                return (*steps, readers[0])
            else:
                return None
            name = steps[-1].outputs[0]
        return None

    def _to_product(self, name: str) -> tuple[Step, tuple[tuple[Step, int], ...]] | None:
        """From the operand of a softmax back to the product, and what stands between in order."""
        between: list[tuple[Step, int]] = []
        while (step := self._producer.get(name)) is not None and self._alone(name):
            if step.op == "MatMul":
                return step, tuple(reversed(between))
            if step.op in _SAME:
                positions = [0]
            elif step.op in ("Add", *_FACTORS, "Where"):
                first = 1 if step.op == "Where" else 0
                positions = [p for p, n in enumerate(step.inputs) if p >= first and self._leads_to_product(n)]
            else:
                return None
            if len(positions) != 1:
                return None
            between.append((step, positions[0]))
            name = step.inputs[positions[0]]
        return None

    def _leads_to_product(self, name: str) -> bool:
        """Whether a tensor is a product, or one that has been scaled and masked."""
        step = self._producer.get(name)
        if step is None or not self._alone(name):
            return False
        through = step.op in ("Add", *_FACTORS, "Where", *_SAME)
        return step.op == "MatMul" or (through and any(map(self._leads_to_product, step.inputs)))

    def _factor(self, step: Step) -> str | None:
        """The operand of a product or quotient that no operator makes; None where it is not the only one."""
        made = [n for n in step.inputs if n in self._producer]
        return next((n for n in step.inputs[1 if step.op == "Div" else 0 :] if n not in made and len(made) == 1), None)

    def _alone(self, name: str) -> bool:
        return len(self._readers.get(name, ())) == 1 and name not in self._wanted

    def _in_order(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        return tuple(sorted(steps, key=lambda step: self._order[step.name]))


def _operands(steps: Sequence[Kernel]) -> tuple[str, ...]:
    made = {name for step in steps for name in step.outputs}
    return tuple(dict.fromkeys(n for step in steps for n in step.inputs if n and n not in made))


def _as_one(steps: tuple[Step, ...]) -> Kernel:
    """Cheap operators as one; a tensor times its sigmoid is an operator of its own, and that times another one, too."""
    steps = tuple(_with_swish(steps))
    if len(steps) == 1:
        return steps[0]
    first, last = steps[0], steps[-1]
    if len(steps) == 2 and first.op == "Swish" and last.op == "Mul" and last.inputs.count(first.name) == 1:
        (other,) = (name for name in last.inputs if name != first.name)
        if other not in first.inputs:
            return replace(last, op="SwiGLU", inputs=(*first.inputs, other), attributes={})
    return Repeat(steps, _operands(steps), tuple(name for name in steps[-1].outputs if name))


def _with_swish(steps: Sequence[Step]) -> Iterator[Step]:
    reads = Counter(name for step in steps for name in step.inputs)
    sigmoids = {s.outputs[0]: s.inputs[0] for s in steps if s.op == "Sigmoid" and reads[s.outputs[0]] == 1}
    swish = {s.name: s.inputs[0] for s in steps if s.op == "Mul" and sigmoids.get(s.inputs[1]) == s.inputs[0]}
    gone = {name for name, x in sigmoids.items() if any(y == x for y in swish.values())}
    for step in steps:
        if step.name in swish:
            yield replace(step, op="Swish", inputs=(swish[step.name],), attributes={})
        elif step.name not in gone:
            yield step


def _number(x: torch.Tensor) -> float | None:
    """The number in a tensor of the host that has one; else None."""
    readable = x.numel() == 1 and not x.requires_grad and not x.is_meta
    return float(x.reshape(())) if readable else None

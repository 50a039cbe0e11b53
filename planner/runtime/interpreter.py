"""Runs operators of a model file in torch, one after the other, all under autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from planner.errors import ModelError, ShardplanError
from planner.plans import Plan
from planner.runtime.device import HOST, brought, settled
from planner.runtime.model_file import ModelFile, Step, read_model, require_rules
from planner.runtime.operators import RULES, Context, OperatorCall, torch_type

Values = dict[str, torch.Tensor]


class Reads(Protocol):
    """What runs at once: an operator, or several."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what it reads, and does not make."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its results."""


class Together(Reads, Protocol):
    """Several operators that run as one (`planner.runtime.fusing`)."""

    def results(self, values: Mapping[str, torch.Tensor], context: Context) -> list[torch.Tensor]:
        """Run them."""


_SHAPES_ALONE = ("Shape", "Size")
"""Operators that read the shape of their operand, and give a tensor of the host."""


def run_step(step: Step, values: Mapping[str, torch.Tensor], context: Context) -> list[torch.Tensor]:
    """Run one operator.

    Operands in the host's memory, as shapes, are brought to the device of the others; rules read the values of those
    that they need there. What is computed from the host's memory alone goes to the pass's device unless it is small.

    Raises:
        ModelError: the operator cannot be computed; the message names it.
    """
    inputs = tuple(values[name] if name else None for name in step.inputs)
    try:
        given: tuple[torch.Tensor | None, ...] = ()
        device = next((x.device for x in inputs if isinstance(x, torch.Tensor) and x.device != HOST), HOST)
        if device != HOST and step.op not in _SHAPES_ALONE:
            given = inputs
            inputs = tuple(brought(x, device) if isinstance(x, torch.Tensor) else x for x in inputs)
        attributes = step.attributes
        if any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in attributes.values()):
            attributes = {
                k: v.to(context.float_dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                for k, v in attributes.items()
            }
        outputs = len(step.outputs)
        call = OperatorCall(step.op, step.name, inputs, attributes, outputs, step.opset, context, given)
        with context.keeping(step.name):
            result = RULES[step.op](call)
    except ShardplanError:
        raise
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, NotImplementedError) as error:
        shapes = ", ".join(str(list(x.shape)) if isinstance(x, torch.Tensor) else "-" for x in inputs)
        raise ModelError(
            f"{step.op} of {shapes} cannot be computed: {error}", where=step.name,
            hint="is the file the plan's model, and its batch the plan's micro-batch?",
        ) from error  # fmt: skip
    results = [result] if isinstance(result, torch.Tensor) else list(result or [])
    context.saw(step.op, inputs, results[0] if results else None)
    if context.device == HOST:
        return results
    return [settled(x, context.device) if isinstance(x, torch.Tensor) and x.device == HOST else x for x in results]


def run(
    steps: Sequence[Step | Together],
    values: Values,
    context: Context,
    *,
    wanted: Iterable[str] = (),
) -> Values:
    """Run operators in order.

    Args:
        steps: the operators.
        values: inputs, weights and constants by name. Not changed.
        context: types and seeds of the pass.
        wanted: names of the values to return; all others are dropped after their last reader.

    Returns:
        The wanted values by name; all values where none is named.
    """
    kept = set(wanted)
    reads_left = Counter(name for step in steps for name in step.inputs if name)
    known = dict(values)
    for step in steps:
        context.begin(step, known.__getitem__)
        if isinstance(step, Step):
            context.before(step.inputs)
            results = run_step(step, known, context)
            context.after(step.inputs, step.outputs, results)
        else:
            results = step.results(known, context)
        for name, value in zip(step.outputs, results, strict=False):
            if name and value is not None:
                known[name] = context.fitted(name, value) if isinstance(value, torch.Tensor) else value
        context.end(step, known.__getitem__)
        for name in step.inputs:
            if name and kept:
                reads_left[name] -= 1
                if not reads_left[name] and name not in kept:
                    known.pop(name, None)
    return {name: known[name] for name in kept} if kept else known


def run_graph(model: object, feeds: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Values:
    """The outputs of a whole model.

    Args:
        model: an ONNX file, or a model in memory, read or not.
        feeds: its inputs by name, and weights that take the place of the file's.
        dtype: of all floating-point work.

    Raises:
        ModelError: an operator has no torch rule.
    """
    model_file = model if isinstance(model, ModelFile) else read_model(model)
    steps = model_file.cone(model_file.outputs, model_file.inputs)
    require_rules(steps)
    weights = {name: model_file.weight(name, dtype) for name in (*model_file.weights, *model_file.constants)}
    return run(steps, {**weights, **feeds}, Context(dtype, fitted=model_file.fitted), wanted=model_file.outputs)


def run_without_data(
    plan: Plan, model: ModelFile, known: Callable[[str], bool], dtype: torch.dtype = torch.float32
) -> Values:
    """All full tensors at the plan's micro-batch, by running the model on the meta device.

    Args:
        plan: the plan.
        model: its model.
        known: whether a weight, by name, has its values; inputs and other weights have none, nor what is made of them.
        dtype: type of all floating-point work.
    """
    inputs = [spec.name for spec in plan.model.inputs]
    values: Values = dict(model.constants)
    for spec in plan.model.inputs:
        number = model.input_types[spec.name][0] if spec.name in model.input_types else 1
        values[spec.name] = torch.empty(spec.shape, dtype=torch_type(number, dtype), device="meta")
    for name in model.weights:
        values[name] = (model.weight if known(name) else model.shaped)(name, dtype)
    steps = model.cone([spec.name for spec in plan.model.outputs], inputs)
    made = run(steps, values, Context(dtype, fitted=model.fitted))
    return {name: x for name, x in made.items() if isinstance(x, torch.Tensor)}

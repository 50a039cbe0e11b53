"""Shapes of a model's tensors at the plan's micro-batch, and stages that read no more than a shape of each other."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from planner.operators import rule_of
from planner.plans import Plan
from planner.runtime.interpreter import run_without_data
from planner.runtime.local_operators import Shapes
from planner.runtime.model_file import ModelFile
from planner.runtime.stages import foreign_operators, stage_steps


def whole_shapes(plan: Plan, model: ModelFile) -> Shapes:
    """Shapes of all full tensors at the plan's micro-batch."""
    scales = {name for step in model.steps for p, name in enumerate(step.inputs) if p in rule_of(step.op).values}
    tensors = run_without_data(plan, model, lambda name: name in scales or not model.trained(name))
    return {name: tuple(x.shape) for name, x in tensors.items()}


def with_known_shapes(plan: Plan, model: ModelFile) -> ModelFile:
    """The model with sizes of tensors as constants, where a stage would need another's tensor for its shape alone.

    Exporters let later layers read the size of an image that an earlier one made; plans know such sizes as numbers.

    Raises:
        ModelError: the size of a tensor follows from data.
    """
    steps = (stage_steps(plan, model, stage.index) for stage in plan.stages)
    if not any(foreign_operators(plan, stage.index, own) for stage, own in zip(plan.stages, steps, strict=True)):
        return model
    shapes, constants = whole_shapes(plan, model), dict(model.constants)
    for step in model.steps:
        if step.op in ("Shape", "Size") and step.inputs[0] in shapes:
            shape = list(shapes[step.inputs[0]])
            part = shape[step.attributes.get("start", 0) : step.attributes.get("end")]
            constants[step.name] = torch.tensor(part if step.op == "Shape" else math.prod(shape), dtype=torch.int64)
    return replace(model, constants=constants)

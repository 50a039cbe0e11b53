"""The whole model on one process: what the gradients of a plan are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from planner.plans import Plan
from planner.runtime.data import Data, Loss
from planner.runtime.interpreter import Values, run
from planner.runtime.model_file import ModelFile, require_rules
from planner.runtime.operators import Context


@dataclass(frozen=True, slots=True)
class Reference:
    """The unpartitioned model after one iteration.

    Attributes:
        loss: mean over the global batch.
        gradients: of the mean loss, by parameter.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor]


def reference(
    plan: Plan, model: ModelFile, data: Data, loss: Loss, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Reference:
    """Loss and gradients of the whole graph over one iteration's micro-batches, one after the other.

    O(operators * micro-batches); nothing of the plan but its batch, parameters and ties is read.
    """
    outputs = [spec.name for spec in plan.model.outputs]
    steps = model.cone(outputs, model.inputs)
    require_rules(steps)
    names = {name for step in steps for name in step.inputs if name in model.weights}
    tied: dict[str, str] = {}
    for block in plan.block_table:
        tied.update((p.name, p.tied_to or p.name) for p in block.parameters if p.trainable and p.name in names)
    for shared in plan.shared_parameters:
        tied.update(dict.fromkeys((n for n in shared.names if n in tied), shared.parameter))
    leaves = {p: model.weight(p, dtype).requires_grad_(True) for p in dict.fromkeys(tied.values())}
    values: Values = {name: leaves[tied[name]] if name in tied else model.weight(name, dtype) for name in names}
    total, scale = 0.0, plan.micro_batches.gradient_scale
    for micro_batch in range(plan.micro_batches.count):
        batch = data(0, micro_batch)
        context = Context(dtype, seed, micro_batch)
        given = {**values, **{name: batch[name] for name in model.inputs if name in batch}}
        made = run(steps, given, context, wanted=outputs, constants=model.constants)
        own = loss({name: made[name] for name in outputs}, batch) * scale
        own.backward()
        total += float(own.detach())
    zero = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return Reference(total, {name: zero[name] if leaf.grad is None else leaf.grad for name, leaf in leaves.items()})


def gradient_error(own: torch.Tensor, expected: torch.Tensor, largest: float) -> float:
    """Largest difference of a gradient, as part of its largest element.

    A gradient that is zero but for rounding counts as one ten-thousandth of the largest of all.

    Args:
        own: the gradient.
        expected: the reference's.
        largest: the largest element of all gradients of the reference.
    """
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), 1e-4 * largest, 1e-300)
    return float((own - expected).abs().max()) / scale

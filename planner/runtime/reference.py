"""The unpartitioned model on one process, as the reference for the gradients of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from planner.plans import Plan
from planner.runtime.data import Data, LateBatch, Loss
from planner.runtime.device import TrainingDevice, settled
from planner.runtime.interpreter import Values, run
from planner.runtime.model_file import ModelFile, require_rules
from planner.runtime.operators import Context


@dataclass(frozen=True, slots=True)
class Reference:
    """The unpartitioned model after one iteration.

    Attributes:
        loss: mean over the global batch.
        gradients: gradients of the mean loss, by parameter, in the host's memory.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor]


def reference(
    plan: Plan, model: ModelFile, data: Data, loss: Loss, device: TrainingDevice, *, dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Reference:  # fmt: skip
    """Run all micro-batches of one iteration through the unpartitioned graph, for its loss and gradients.

    O(operators * micro-batches); nothing of the plan but its batch, parameters and ties is read.
    """
    outputs = [spec.name for spec in plan.model.outputs]
    steps = model.cone(outputs, model.inputs)
    require_rules(steps)
    names = {n for step in steps for n in step.inputs if n in model.weights or n in model.constants}
    tied: dict[str, str] = {}
    for block in plan.block_table:
        tied.update((p.name, p.owner) for p in block.parameters if p.trainable and p.name in names)
    for shared in plan.shared_parameters:
        tied.update(dict.fromkeys((n for n in shared.names if n in tied), shared.parameter))
    leaves = {p: device.place(model.weight(p, dtype)).requires_grad_(True) for p in dict.fromkeys(tied.values())}
    values: Values = {
        name: leaves[tied[name]] if name in tied else settled(model.weight(name, dtype), device.name) for name in names
    }
    total, scale = 0.0, plan.micro_batches.gradient_scale
    for micro_batch in range(plan.micro_batches.count):
        batch = LateBatch(data, 0, micro_batch, device)
        context = Context(dtype, seed, micro_batch, device=device.name, fitted=model.fitted)
        given = {**values, **{name: batch[name] for name in model.inputs if name in batch}}
        results = run(steps, given, context, wanted=outputs)
        scaled_loss = loss({name: results[name] for name in outputs}, batch) * scale
        scaled_loss.backward()
        total += device.numbers([scaled_loss])[0]
    gradients = {n: device.to_host(torch.zeros_like(x) if x.grad is None else x.grad) for n, x in leaves.items()}
    device.wait()
    return Reference(total, gradients)


def gradient_error(gradient: torch.Tensor, expected: torch.Tensor, largest: float) -> float:
    """Largest difference of a gradient from the reference, relative to the largest element of the reference.

    The scale is at least 1e-4 of the largest element of all gradients, so that gradients that are zero but for rounding
    do not count as wrong.

    Args:
        gradient: the gradient under the plan.
        expected: the gradient of the reference.
        largest: the largest element of all gradients of the reference.
    """
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), 1e-4 * largest, 1e-300)
    return float((gradient - expected).abs().max()) / scale

"""Training data for each step, and the loss on the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import UsageError
from planner.foreign_files import Door
from planner.plans import Plan
from planner.runtime.device import TrainingDevice, brought, seeded
from planner.runtime.model_file import ModelFile
from planner.runtime.operators import torch_type
from planner.runtime.operators.kernels import cross_entropy

Batch = Mapping[str, torch.Tensor]
"""One micro-batch: model inputs by name, and `labels` where there are any."""

Loss = Callable[[Mapping[str, torch.Tensor], Batch], torch.Tensor]
"""Gives the loss of one micro-batch (a mean over its samples) from the outputs that a stage makes."""


@dataclass(frozen=True, slots=True)
class SampleMean:
    """Cross entropy with labels by row: the mean of its samples' losses where a batch has no labels of its own.

    Ranks that share the samples of a micro-batch, or the words, compute such a loss on theirs.

    Attributes:
        rows: logits [rows, words] of outputs and micro-batch, and their labels [rows]; None where the logits are not
            among the outputs.
    """

    rows: Callable[[Mapping[str, torch.Tensor], Batch], tuple[torch.Tensor, torch.Tensor] | None]

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch, or of some of its samples."""
        rows = self.rows(outputs, batch)
        return _zero(outputs) if rows is None else cross_entropy(*rows, NO_LABEL)

    @staticmethod
    def holds(loss: Loss, batch: Batch) -> bool:
        """Whether a loss is such a mean for a batch."""
        return isinstance(loss, SampleMean) and LABELS not in batch


Data = Callable[[int, int], Batch]
"""Gives the micro-batch of an iteration and number."""

LABELS = "labels"
NO_LABEL = -100
"""The label of a row that does not count."""
_LOOKS_THROUGH = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Slice")


class LateBatch(Mapping[str, torch.Tensor]):
    """A micro-batch on a device, which is drawn or read when a pass first looks at it: backwards mostly do not."""

    def __init__(self, data: Data, iteration: int, micro_batch: int, device: TrainingDevice) -> None:
        self._data, self._number, self._device = data, (iteration, micro_batch), device
        self._held: Batch | None = None

    def _batch(self) -> Batch:
        if self._held is None:
            self._held = {name: self._device.place(x) for name, x in self._data(*self._number).items()}
        return self._held

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._batch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch())

    def __len__(self) -> int:
        return len(self._batch())


def synthetic(plan: Plan, model: ModelFile, dtype: torch.dtype, seed: int = 0) -> Data:
    """Random inputs, the same for the same seed, iteration and micro-batch.

    Floats are normally distributed; integers are random rows of the tables that they index, or ones where they index
    none.
    """
    rows = {spec.name: _rows(model, spec.name) for spec in plan.model.inputs}

    def batch(iteration: int, micro_batch: int) -> Batch:
        inputs = {}
        for spec in plan.model.inputs:
            generator = seeded(f"{seed}/{iteration}/{micro_batch}/{spec.name}")
            number = model.input_types[spec.name][0] if spec.name in model.input_types else 7
            kind = torch_type(number, dtype)
            if kind.is_floating_point:
                inputs[spec.name] = torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(dtype)
            elif kind is torch.bool or not rows[spec.name]:
                inputs[spec.name] = torch.ones(spec.shape, dtype=kind)
            else:
                inputs[spec.name] = torch.randint(rows[spec.name], spec.shape, generator=generator).to(kind)
        return inputs

    return batch


def _rows(model: ModelFile, name: str) -> int:
    """Fewest rows of the tables that an input indexes; 0 where it indexes none."""
    rows, reached, stack = [], {name}, [name]
    while stack:
        tensor = stack.pop()
        for step in model.readers(tensor):
            if step.op == "Gather" and len(step.inputs) > 1 and step.inputs[1] == tensor:
                table = model.weights.get(step.inputs[0])
                axis = int(step.attributes.get("axis", 0))
                if table is not None:
                    rows.append(int(table.dims[axis]))
            elif step.op == "SoftmaxCrossEntropyLoss" and step.inputs[1] == tensor:
                rows.append(2)
            elif step.op in _LOOKS_THROUGH and step.inputs[0] == tensor and step.outputs[0] not in reached:
                reached.add(step.outputs[0])
                stack.append(step.outputs[0])
    return min(rows, default=0)


def data_by_name(name: str | Path, plan: Plan, model: ModelFile, dtype: torch.dtype, seed: int = 0) -> Data:
    """Data by name: "synthetic", or the path of an .npz file.

    Raises:
        UsageError: the file cannot be read, or an input is missing.
    """
    return synthetic(plan, model, dtype, seed) if name == "synthetic" else _from_file(name, plan, dtype)


def _from_file(path: str | Path, plan: Plan, dtype: torch.dtype) -> Data:
    """Samples of an .npz file in order, beginning anew after the last.

    Each array is named after a model input (or `labels`) and has one entry a sample in its first dimension.

    Raises:
        UsageError: the file cannot be read, or an input is missing.
    """
    arrays = Door(str(path), UsageError, "write it by numpy.savez").arrays(path)
    missing = [spec.name for spec in plan.model.inputs if spec.name not in arrays]
    if missing:
        raise UsageError(
            f"has no array {missing[0]!r}, only {', '.join(arrays)}", where=str(path),
            hint="name arrays after the model's inputs",
        )  # fmt: skip
    for name, values in arrays.items():
        if values.ndim == 0 or not len(values) or values.dtype.kind not in _NUMBERS:
            message = f"array {name!r} has the shape {list(values.shape)} and the type {values.dtype}"
            raise UsageError(message, where=str(path), hint="write numbers, with one entry a sample")
    for spec in plan.model.inputs:
        if list(arrays[spec.name].shape[1:]) != list(spec.shape[1:]):
            message = f"samples of {spec.name!r} have the shape {list(arrays[spec.name].shape[1:])}"
            raise UsageError(message, where=str(path), hint=f"the model reads {list(spec.shape[1:])}")
    size, global_batch = plan.micro_batches.size, plan.micro_batches.global_batch
    tensors = {name: torch.from_numpy(_native(values)) for name, values in arrays.items()}

    def batch(iteration: int, micro_batch: int) -> Batch:
        first = iteration * global_batch + micro_batch * size
        inputs = {}
        for name, values in tensors.items():
            samples = values[[(first + k) % len(values) for k in range(size)]]
            inputs[name] = samples.to(dtype) if samples.is_floating_point() else samples
        return inputs

    return batch


_NUMBERS = "biuf"
"""Kinds of numpy types that hold numbers: bool, whole ones with and without a sign, floating ones."""
_WIDE_BYTES = 8


def _native(values: np.ndarray) -> np.ndarray:
    """Values in a type that torch has: this machine's byte order, signed where whole, 8 bytes at the most."""
    kind = values.dtype.newbyteorder("=")
    if kind.kind == "u" and kind.itemsize > 1:
        kind = np.dtype(np.int64)
    elif kind.itemsize > _WIDE_BYTES:
        kind = np.dtype(np.float64)
    return values.astype(kind, copy=False)


def loss_by_name(name: str, plan: Plan) -> Loss:
    """The loss function of that name, on the model's outputs.

    Args:
        name: "graph": the graph computes it, as the output that the plan names; "next-token": cross entropy of the
            last output [batch, sequence, words] with `labels`, or else with the integer input of the same batch and
            sequence one position on; "labels": cross entropy of the last output [batch, classes] with `labels`;
            "squares": half the mean square of each floating output's distance from fixed pseudo-random targets, summed
            over outputs; "auto": the first of these that the model and the batch allow.
        plan: the plan.

    Raises:
        UsageError: there is no such loss.
    """
    losses = {"graph": _graph_loss, "labels": _labels, "squares": _squares}
    name = {"auto": _default_loss(plan)}.get(name, name)
    last = plan.model.outputs[-1].name if plan.model.outputs else ""
    if name == "next-token":
        return SampleMean(lambda outputs, batch: _next_tokens(outputs, batch, last))
    if name not in losses:
        raise UsageError(f"no loss is called {name!r}", hint=f"one of {', '.join(('auto', 'next-token', *losses))}")
    in_graph = plan.model.loss_output or (plan.model.outputs[0].name if plan.model.outputs else "")
    chosen = losses[name]
    return lambda outputs, batch: chosen(outputs, batch, in_graph if chosen is _graph_loss else last)


def _default_loss(plan: Plan) -> str:
    if plan.model.loss.value == "in_graph":
        return "graph"
    last = plan.model.outputs[-1].shape
    tokens = [s for s in plan.model.inputs if s.dtype.startswith("int") and len(last) == 3 and s.shape == last[:2]]
    return "next-token" if tokens else "squares"


def _zero(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    device = next((x.device for x in outputs.values()), None)
    zero = torch.zeros((), device=device)
    for x in outputs.values():
        if x.is_floating_point():
            zero = zero + x.sum() * 0
    return zero


def _graph_loss(outputs: Mapping[str, torch.Tensor], batch: Batch, name: str) -> torch.Tensor:
    return outputs[name].mean() if name in outputs else _zero(outputs)


def _next_tokens(
    outputs: Mapping[str, torch.Tensor], batch: Batch, name: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if name not in outputs:
        return None
    logits = outputs[name]
    labels = batch.get(LABELS)
    if labels is None:
        ids = next(x for x in batch.values() if not x.is_floating_point() and x.shape == logits.shape[:2])
        # The last position has no next token; it is left out by its label, since a slice would copy all logits.
        labels = F.pad(ids[:, 1:].long(), (0, 1), value=NO_LABEL)
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()


def _labels(outputs: Mapping[str, torch.Tensor], batch: Batch, name: str) -> torch.Tensor:
    if name not in outputs:
        return _zero(outputs)
    if LABELS not in batch:
        raise UsageError("the data have no array 'labels'", hint="add it, or choose --loss squares")
    return F.cross_entropy(outputs[name], batch[LABELS].long())


def _squares(outputs: Mapping[str, torch.Tensor], batch: Batch, name: str) -> torch.Tensor:
    total = _zero(outputs)
    for output, x in outputs.items():
        if x.is_floating_point():
            target = torch.randn(x.shape, generator=seeded(f"target/{output}"), dtype=torch.float64).to(x.dtype)
            total = total + 0.5 * (x - brought(target, x.device)).square().mean()
    return total

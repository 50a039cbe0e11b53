"""How a causal model is cut along its sequence: for each tensor the dimensions that hold the positions of one part."""

from __future__ import annotations

import torch

from planner.errors import PlanError
from planner.plans import Plan
from planner.runtime.interpreter import run_without_data
from planner.runtime.model_file import ModelFile
from planner.runtime.sequence_rules import Cuts, CutTensor, DimCut, Read, Site, read_of


class SequenceCuts:
    """Cuts of all tensors of a model, found once before training. O(operators).

    Args:
        plan: a plan whose micro-batches are cut into parts.
        model: its model.
        dtype: type of all floating-point work.

    Attributes:
        parts: number of parts of a micro-batch.
        length: number of positions of the whole sequence.
        shapes: shapes of full tensors, by name.
        constants: values of tensors that depend on no input and no trained weight, by name.
        placed: how tensors that depend on an input are cut, by name.
        read: how operators with cut operands read them, by first output of the operator.

    Raises:
        PlanError: no input has a sequence, or it cannot be divided into so many equal parts.
        ModelError: an operator needs later positions; the message names it.
    """

    def __init__(self, plan: Plan, model: ModelFile, dtype: torch.dtype = torch.float64) -> None:
        self.parts = plan.schedule.parts
        self.length = _sequence_length(plan)
        trained = {p.name for block in plan.block_table for p in block.parameters if p.trainable}
        tensors = run_without_data(plan, model, lambda name: name not in trained, dtype)
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        self.constants = {name: x for name, x in tensors.items() if not x.is_meta}
        self.placed: dict[str, CutTensor] = {
            spec.name: CutTensor({1: DimCut()})
            for spec in plan.model.inputs
            if len(spec.shape) > 1 and spec.shape[1] == self.length
        }
        self.read: dict[str, Read] = {}
        for step in model.cone([spec.name for spec in plan.model.outputs], model.inputs):
            placed = tuple(self.placed.get(name, CutTensor()) for name in step.inputs)
            site = Site(step, placed, self.length, self.shapes, self.constants)
            if step.op.startswith("Random"):
                raise site.refuse("it draws other numbers for each micro-batch")
            if step.name in self.constants or not any(place.cuts for place in placed):
                continue
            read = read_of(site)
            self.read[step.name] = read
            self.placed.update(zip(step.outputs, read.results, strict=False))

    def cuts(self, name: str) -> Cuts:
        """The cuts of a tensor; none where it is whole."""
        return self.placed[name].cuts if name in self.placed else {}

    def span(self, cut: DimCut, part: int) -> tuple[int, int]:
        """First position and number of positions of a part in one sequence of a cut dimension."""
        each = self.length // self.parts
        return (0, (part + 1) * each) if cut.past else (part * each, each)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Shape of a tensor while a part is computed."""
        sizes = list(self.shapes[name])
        for dim, cut in self.cuts(name).items():
            sizes[dim] = cut.sequences * self.span(cut, part)[1]
        return tuple(sizes)

    def taken(self, x: torch.Tensor, dim: int, cut: DimCut, part: int) -> torch.Tensor:
        """Take the positions of a part from a dimension that holds the whole sequence."""
        first, count = self.span(cut, part)
        if cut.sequences == 1:
            return x.narrow(dim, first, count)
        return torch.cat([one.narrow(dim, first, count) for one in x.chunk(cut.sequences, dim)], dim)


def _sequence_length(plan: Plan) -> int:
    """Number of positions of the sequence: size of dimension 1 of the first input that has such a dimension."""
    length = next((spec.shape[1] for spec in plan.model.inputs if len(spec.shape) > 1), 0)
    if not length:
        raise PlanError(
            "no model input has a sequence as its dimension 1, so micro-batches cannot be cut into parts",
            where=f"schedule {plan.schedule.name}", hint="plan with another --schedule, such as 1f1b",
        )  # fmt: skip
    if length % plan.schedule.parts:
        raise PlanError(
            f"a sequence of {length} positions cannot be cut into {plan.schedule.parts} equal parts",
            where=f"schedule {plan.schedule.name}", hint=f"choose splits that divide {length}",
        )  # fmt: skip
    return length

"""Runs a stage on one part of a micro-batch's sequence, with keys and values of the earlier parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from planner.runtime.data import Batch, Loss
from planner.runtime.device import settled
from planner.runtime.interpreter import Values, run_step
from planner.runtime.model_file import Step
from planner.runtime.modules import Module, find_modules
from planner.runtime.operators import Context
from planner.runtime.operators.attention import window
from planner.runtime.sequence_cuts import SequenceCuts
from planner.runtime.sequence_rules import Cuts, DimCut
from planner.runtime.stages import StageProgram

Carried = Mapping[str, Sequence[torch.Tensor]]
"""Tensors of the earlier parts, in order, by name."""


class PartedStage:
    """Runs a stage part by part.

    Attributes:
        carried: names of tensors that later parts of the micro-batch read, too: keys, values, and the model's outputs,
            from which the last part computes the loss of the whole micro-batch.
        modules: operators that run again in backward.
    """

    def __init__(self, cuts: SequenceCuts, program: StageProgram, device: torch.device) -> None:
        self._cuts, self._program = cuts, program
        self._constants = {name: settled(x, device) for name, x in cuts.constants.items()}
        self._outputs = {name: next(iter(cuts.cuts(name)), None) for name in program.outputs}
        carried = dict.fromkeys(name for name, dim in self._outputs.items() if dim is not None)
        for step in program.steps:
            if step.name in cuts.read:
                for name, wanted in zip(step.inputs, cuts.read[step.name].operands, strict=True):
                    own = cuts.cuts(name) if name else {}
                    if any(cut.past and d in own and not own[d].past for d, cut in wanted.items()):
                        carried[name] = None
        self.carried: tuple[str, ...] = tuple(carried)
        self.modules = find_modules(program.steps, program.repeated)

    def run(
        self, values: Values, batch: Batch, loss: Loss, context: Context, part: int, earlier: Carried
    ) -> tuple[Values, torch.Tensor | None, Values]:
        """Run the forward of one part.

        Args:
            values: received tensors of this part, parameters by their name in the file, and constants.
            batch: the whole micro-batch.
            loss: computes the loss from the model's outputs.
            context: types and seeds of the pass.
            part: number of the part.
            earlier: the carried tensors of the earlier parts.

        Returns:
            The tensors to send to other stages; the loss of the micro-batch, if the stage makes outputs and the part is
            the last; the carried tensors of this part.
        """
        known = {**self._constants, **values}
        for name in self._program.fed:
            known[name] = batch[name]
            for dim, cut in self._cuts.cuts(name).items():
                known[name] = self._cuts.taken(known[name], dim, cut, part)
        self._run_steps(self._program.steps, known, context, part, earlier)
        carried = {name: known[name].view_as(known[name]) for name in self.carried}
        sent = {b.tensor: known[b.tensor] for b in self._program.sent}
        if not self._outputs or part < self._cuts.parts - 1:
            return sent, None, carried
        whole = {
            name: known[name] if dim is None else self._joined(name, known[name], dim, earlier)
            for name, dim in self._outputs.items()
        }
        return sent, loss(whole, batch), carried

    def again(self, module: Module[Step], values: Values, context: Context, part: int, earlier: Carried) -> Values:
        """Run a module of a part again, from what it reads."""
        known = {**self._constants, **values}
        self._run_steps(module.units, known, context, part, earlier)
        return {name: known[name] for name in module.wanted}

    def _run_steps(self, steps: Sequence[Step], known: Values, context: Context, part: int, earlier: Carried) -> None:
        for step in steps:
            if step.name in self._cuts.constants:
                continue
            context.begin(step, known.__getitem__)
            context.before(step.inputs)
            results = self._results(step, known, context, part, earlier)
            context.after(step.inputs, step.outputs, results)
            for name, value in zip(step.outputs, results, strict=False):
                if name and value is not None:
                    known[name] = context.fitted(name, value)
            context.end(step, known.__getitem__)

    def _results(self, step: Step, known: Values, context: Context, part: int, earlier: Carried) -> list[torch.Tensor]:
        if step.name not in self._cuts.read:
            return run_step(step, known, context)
        wanted = self._cuts.read[step.name].operands
        operands = [
            self._operand(name, known[name], cuts, part, earlier) if name else None
            for name, cuts in zip(step.inputs, wanted, strict=True)
        ]
        attributes = dict(step.attributes)
        op = step.op
        if op in ("Reshape", "Flatten", "Expand"):
            op = "Expand" if op == "Expand" else "Reshape"
            operands[1:] = [torch.tensor(self._cuts.shape(step.name, part))]
            attributes["allowzero"] = 1
        elif op == "Attention":
            _mask_later(attributes, operands, wanted[0], part, self._cuts)
        elif op in ("Dropout", "com.microsoft.BitmaskDropout") and operands[0] is not None:
            return self._dropped(step, operands, known, context, part)
        names = tuple(f"#{p}" if x is not None else "" for p, x in enumerate(operands))
        given = {f"#{p}": x for p, x in enumerate(operands) if x is not None}
        return run_step(Step(op, names, step.outputs, attributes, step.opset), given, context)

    def _operand(self, name: str, x: torch.Tensor, wanted: Cuts, part: int, earlier: Carried) -> torch.Tensor:
        """An operand cut as the operator reads it."""
        own = self._cuts.cuts(name)
        for dim, cut in wanted.items():
            if dim not in own:
                x = self._cuts.taken(x, dim, cut, part)
            elif cut.past and not own[dim].past:
                x = self._joined(name, x, dim, earlier)
        return x

    def _joined(self, name: str, x: torch.Tensor, dim: int, earlier: Carried) -> torch.Tensor:
        """A carried tensor with the positions of all parts up to this one."""
        sequences = self._cuts.cuts(name)[dim].sequences
        pieces = [piece.chunk(sequences, dim) for piece in (*earlier[name], x)]
        return torch.cat([piece[k] for k in range(sequences) for piece in pieces], dim)

    def _dropped(
        self, step: Step, operands: list[torch.Tensor | None], known: Values, context: Context, part: int
    ) -> list[torch.Tensor]:
        """Apply this part's positions of the dropout mask that the whole sequence has."""
        x = operands[0]
        whole = torch.ones(self._cuts.shapes[step.inputs[0]], dtype=context.float_dtype, device=context.device)
        results = run_step(step, {**known, step.inputs[0]: whole}, context)
        for dim, cut in self._cuts.cuts(step.inputs[0]).items():
            results = [self._cuts.taken(y, dim, cut, part) for y in results]
        return [results[0] * x, *results[1:]]


def _mask_later(
    attributes: dict[str, object], operands: list[torch.Tensor | None], queries: Cuts, part: int, cuts: SequenceCuts
) -> None:
    """Replace causality and windows of an attention by a mask, since its queries do not begin at the first key."""
    after, before = int(str(attributes.pop("right_window_size", -1))), int(str(attributes.pop("left_window_size", -1)))
    if attributes.pop("is_causal", 0):
        after = 0
    if after < 0 and before < 0:
        return
    first, count = cuts.span(next(iter(queries.values()), DimCut()), part)
    device = next((x.device for x in operands if x is not None), None)
    queries_at, keys_at = (torch.arange(at, first + count, device=device) for at in (first, 0))
    seen = window(queries_at, keys_at, before, after)
    operands += [None] * (4 - len(operands))
    mask = operands[3]
    if mask is None or mask.dtype is torch.bool:
        operands[3] = seen if mask is None else mask & seen
    else:
        operands[3] = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)

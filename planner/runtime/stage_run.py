"""One stage on one rank: its weights, and the forward and backward of micro-batches through its operators."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from planner.runtime.data import Batch, Loss
from planner.runtime.device import TrainingDevice
from planner.runtime.host import HostMemory, moved
from planner.runtime.interpreter import Values
from planner.runtime.layouts import RankMesh
from planner.runtime.model_file import ModelFile
from planner.runtime.modules import Again, KeptTensors, Module
from planner.runtime.operators import Context
from planner.runtime.sequence_parts import PartedStage
from planner.runtime.sharded import ShardedStage
from planner.runtime.split_backward import End, gradients_in_place
from planner.runtime.stages import PassState, StageProgram, WholeStage
from planner.runtime.transfers import Unit
from planner.runtime.weights import StageWeights


@dataclass(frozen=True, slots=True)
class PassSettings:
    """What the passes of all stages of a rank have in common.

    Attributes:
        model: the model.
        device: where it computes.
        loss: computes the loss from the model's outputs.
        dtype: type of all floating-point work.
        seed: seed of dropout masks.
        gradient_scale: factor on the loss of a micro-batch.
    """

    model: ModelFile
    device: TrainingDevice
    loss: Loss
    dtype: torch.dtype
    seed: int
    gradient_scale: float


@dataclass
class StageRun:
    """The state of one stage on this rank.

    Attributes:
        settings: of its passes.
        program: operators, inputs and outputs of the stage.
        weights: trained weights that no other stage holds.
        tied: trained weights that other stages hold, too; their gradients are summed over all of these stages.
        constants: initializers that are not trained.
        replica: number of the replica that this rank belongs to.
        mesh: the tensor-parallel group of the replica.
        whole_stage: runs the stage where the rank does all of its work.
        sharded: runs the stage on this rank's pieces of tensors; None in a group of one rank.
        parted: runs the stage on parts of a sequence; None where micro-batches are whole.
        splits: whether orders compute gradients of products' weights apart from those of inputs.
        repeats: whether a forward keeps nothing, and is repeated as a whole from the stage's inputs.
        offloads: whether these inputs wait in the host's memory.
        passes: forwards whose backward is still to come, by micro-batch and part.
    """

    settings: PassSettings
    program: StageProgram
    weights: StageWeights
    tied: StageWeights
    constants: Values
    replica: int
    mesh: RankMesh
    whole_stage: WholeStage
    sharded: ShardedStage | None
    parted: PartedStage | None
    splits: bool
    repeats: bool
    offloads: bool
    passes: dict[Unit, PassState] = field(default_factory=dict)

    def whole(self, name: str, piece: torch.Tensor, shape: Sequence[int], *, gradient: bool = False) -> torch.Tensor:
        """Gather a tensor, or its gradient, from the pieces of the group's ranks (`ShardedStage.whole`)."""
        return piece if self.sharded is None else self.sharded.whole(name, piece, shape, gradient=gradient)

    def piece(self, name: str, x: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        """This rank's piece of a whole tensor, or of its gradient."""
        return x if self.sharded is None else self.sharded.piece(name, x, gradient=gradient)

    def forward(self, current: PassState, batch: Batch, version: int) -> torch.Tensor | None:
        """Run the forward of a micro-batch, or of a part of it.

        Args:
            current: the pass, with what was received for it; notes all that the backward needs.
            batch: the micro-batch.
            version: of the weights that it reads.

        Returns:
            The loss of the micro-batch on the first rank of a group that makes outputs; else None.
        """
        current.parameters = {**self.weights.read(version), **self.tied.read(version)}
        if self.parted is not None:
            current.earlier = self._read_earlier_parts(self.parted, current.unit)
        if self.repeats:
            with torch.no_grad():
                current.results, loss = self._run(current, batch)
            if self.offloads:
                current.on_host = True
                to_host = self.settings.device.to_host
                current.received = {name: moved(x, to_host) for name, x in current.received.items()}
        else:
            loss = self.rerun(current, batch)
        return loss.detach() if loss is not None and self.mesh.place == 0 else None

    def rerun(self, current: PassState, batch: Batch) -> torch.Tensor | None:
        """Run a forward and keep what its backward needs; the stage's inputs may lie in the host's memory."""
        if current.on_host:
            from_host = self.settings.device.from_host
            current.received = {name: moved(x, from_host) for name, x in current.received.items()}
        sent, current.loss = self._run(current, batch)
        current.results = sent
        current.ends = {name: torch.autograd.graph.get_gradient_edge(x) for name, x in sent.items() if x.requires_grad}
        return current.loss

    def _run(self, current: PassState, batch: Batch) -> tuple[Values, torch.Tensor | None]:
        settings, program = self.settings, self.program
        named = {name: current.parameters[parameter] for name, parameter in program.parameters.items()}
        values = {**self.constants, **current.received, **named}
        if self.parted is not None:
            part, earlier = current.unit.part, current.earlier
            again = functools.partial(self.parted.again, part=part, earlier=earlier)
            context = self._context(current, self.parted.modules, again)
            sent, total, current.carried = self.parted.run(values, batch, settings.loss, context, part, earlier)
            return sent, total
        stage = self.sharded or self.whole_stage
        return stage.run(values, batch, settings.loss, self._context(current, stage.modules, stage.again))

    def _context(self, current: PassState, modules: Sequence[Module[Any]], again: Again) -> Context:
        settings, program = self.settings, self.program
        moving = program.offloaded.union(program.repeated.operators if program.repeated.inputs_on_host else ())
        resident = (*current.parameters.values(), *self.constants.values())
        host = HostMemory(moving, resident if moving or modules else (), settings.device)
        context = Context(
            settings.dtype, settings.seed, current.unit.micro_batch, host.keeping, device=settings.device.name,
            adds_in_place=not self.splits, fitted=settings.model.fitted,
        )  # fmt: skip
        if self.splits:
            context = replace(context, saw=current.waiting.saw)
        inside = context.inside
        if (blocks := self.weights.at_work) is not None:
            context = replace(context, before=blocks.before, after=blocks.after)
            inside = replace(inside, before=blocks.again)
        if modules or self.splits:
            boxed = current.waiting.boxed if self.splits else None
            kept = KeptTensors(modules, program.repeated.blocks, again, host, inside, boxed)
            context = replace(context, keeping=kept.keeping, begin=kept.begin, end=kept.end)
        return context

    def backward(self, current: PassState, *, split: bool) -> None:
        """Give each received tensor and those of earlier parts their gradients; add up those of weights, unless split.

        What the pass kept is let go as autograd reaches it, so only tensors that hold nothing of it may outlive this.
        """
        ends, seeds = self._backward_ends(current)
        received = {name: x for name, x in current.received.items() if x.requires_grad}
        earlier = _leaves_of_earlier_parts(current)
        inputs, weights = [*received.values(), *earlier.values()], current.parameters
        if split:
            found = current.waiting.first_half(ends, seeds, inputs, weights)
        else:
            for name, sums in (*self.weights.accumulators().items(), *self.tied.accumulators().items()):
                weights[name].grad = sums
            found = gradients_in_place(ends, seeds, inputs, list(weights.values()))
        of_received = dict(zip(received, found, strict=False))
        current.received = {
            name: _with_gradient(x, of_received[name]) if name in received else x
            for name, x in current.received.items()
        }
        self._add_to_earlier_parts(current, dict(zip(earlier, found[len(received) :], strict=False)))

    def weight_gradients(self, current: PassState) -> None:
        """Add up the gradients of weights that a split backward left."""
        for of_weights in current.waiting.second_half(current.parameters):
            self.weights.add(of_weights)
            self.tied.add(of_weights)

    def _backward_ends(self, current: PassState) -> tuple[list[End], list[torch.Tensor]]:
        """Where a backward begins, and the gradients there."""
        ends: list[End] = []
        seeds = []
        for name, gradient in current.gradients.items():
            if name in current.ends:
                ends.append(current.ends[name])
                seeds.append(gradient)
        for name, gradient in current.carried_gradients.items():
            if current.carried[name].requires_grad:
                ends.append(current.carried[name])
                seeds.append(gradient)
        if current.loss is not None and current.loss.requires_grad:
            ends.append(current.loss)
            seeds.append(torch.full_like(current.loss, self.settings.gradient_scale))
        current.results, current.ends, current.gradients, current.loss = None, {}, {}, None
        return ends, seeds

    def _read_earlier_parts(self, parted: PartedStage, unit: Unit) -> dict[str, list[torch.Tensor]]:
        """Tensors of the earlier parts that a part reads, by name and part, as leaves of the part's autograd graph."""
        before = [self.passes[unit._replace(part=part)].carried for part in range(unit.part)]
        return {
            name: [carried[name].detach().requires_grad_(carried[name].is_floating_point()) for carried in before]
            for name in parted.carried
        }

    def _add_to_earlier_parts(
        self, current: PassState, gradients: Mapping[tuple[str, int], torch.Tensor | None]
    ) -> None:
        """Add a part's gradients of the tensors that it read of earlier parts to the passes of those parts.

        Args:
            current: the pass of the part.
            gradients: by name and part of the tensor.
        """
        for (name, part), gradient in gradients.items():
            if gradient is not None:
                totals = self.passes[current.unit._replace(part=part)].carried_gradients
                totals[name] = gradient if name not in totals else totals[name] + gradient


def _leaves_of_earlier_parts(current: PassState) -> dict[tuple[str, int], torch.Tensor]:
    """Tensors of earlier parts that need a gradient, by name and part."""
    return {
        (name, part): x
        for name, tensors in current.earlier.items()
        for part, x in enumerate(tensors)
        if x.requires_grad
    }


def _with_gradient(x: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A received tensor that holds its gradient until it is sent back."""
    leaf = x.detach().requires_grad_(True)
    leaf.grad = gradient
    return leaf

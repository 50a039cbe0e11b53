"""One rank of a plan: runs its actions in order on torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.plans import Plan
from planner.plans.records import SharedParameter
from planner.runtime.data import Batch, Data, Loss
from planner.runtime.interpreter import Values
from planner.runtime.layouts import Mesh
from planner.runtime.model_file import ModelFile
from planner.runtime.operators import Context
from planner.runtime.orders import sequences, tied_exchanges
from planner.runtime.sequence_cuts import SequenceCuts
from planner.runtime.sequence_parts import PartedStage
from planner.runtime.sharded import ShardedStage, whole_shapes
from planner.runtime.stages import Pass, StageProgram, run_stage, stage_program
from planner.runtime.transfers import Transfers, Unit
from planner.runtime.waves import WaveWeights
from planner.runtime.weights import MakeOptimizer, StageWeights
from planner.schedules import Action, ActionKind, WeightPolicy
from planner.schedules.types import OptimizerScaling, StageCorrection

Report = Callable[[int, str], None]
"""Called before every action with its place in the rank's order and its text."""

_BACK = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


@dataclass
class _Stage:
    """What a rank has of one stage.

    Attributes:
        program: what it runs.
        weights: what it trains.
        tied: weights that other stages hold, too: their gradients are summed in the exchange of these stages.
        constants: initializers that are not trained.
        replica: number of the replica that this rank belongs to.
        mesh: the ranks of its group.
        sharded: how they share the work; None for one rank.
        parted: how it runs parts of micro-batches; None where they run whole.
        passes: micro-batches on their way, by number and part.
    """

    program: StageProgram
    weights: StageWeights
    tied: StageWeights
    constants: Values
    replica: int
    mesh: Mesh
    sharded: ShardedStage | None
    parted: PartedStage | None
    passes: dict[Unit, Pass] = field(default_factory=dict)

    def whole(self, name: str, piece: torch.Tensor, shape: Sequence[int], *, gradient: bool = False) -> torch.Tensor:
        """A tensor, or its gradient, from the pieces of the ranks of the group (`ShardedStage.whole`)."""
        return piece if self.sharded is None else self.sharded.whole(name, piece, shape, gradient=gradient)

    def piece(self, name: str, x: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        """This rank's piece of a whole tensor, or of its gradient."""
        return x if self.sharded is None else self.sharded.piece(name, x, gradient=gradient)


class Worker:
    """One rank of a plan.

    Args:
        plan: the plan.
        model: its model.
        rank: this process; the default process group is ready and has a process for each rank of the plan.
        loss: on outputs.
        make: makes the optimizer of some weights.
        dtype: of all floating-point work.
        seed: of dropout.
        report: told of every action.
        times: how often what goes on for ever is repeated in one call of `iteration`.

    Raises:
        PlanError: the orders block each other, or the plan is not for this model.
        ModelError: an operator has no torch rule.
    """

    def __init__(
        self, plan: Plan, model: ModelFile, rank: int, *, loss: Loss, make: MakeOptimizer,
        dtype: torch.dtype = torch.float32, seed: int = 0, report: Report = lambda at, text: None,
        times: int = 1,
    ) -> None:  # fmt: skip
        self.plan, self.model, self.rank = plan, model, rank
        self._loss, self._make, self._dtype, self._seed, self._report = loss, make, dtype, seed, report
        self._groups: dict[tuple[int, ...], Any] = {}
        self._losses: list[tuple[int, torch.Tensor]] = []
        self._orders, self._times = sequences(plan, times), times
        kinds = {(a.kind, a.stage) for actions in self._orders.values() for a in actions}
        self._explicit = kinds
        self._make_groups()
        self._shapes = whole_shapes(plan, model) if plan.shardings else {}
        self._cuts = SequenceCuts(plan, model, dtype) if plan.schedule.parts > 1 else None
        self._transfers = Transfers(plan, rank, dtype, self._cuts)
        self.stages = {index: self._stage(index) for index in plan.stages_of(rank)}

    def _make_groups(self) -> None:
        """All process groups, made by all ranks in the same order."""
        wanted: dict[tuple[int, ...], None] = {}
        for stage in self.plan.stages:
            for at in range(stage.group_ranks):
                wanted[tuple(sorted(group[at] for group in stage.replicas))] = None
            sharding = self.plan.sharding_of(stage.index)
            for group in stage.replicas if sharding else ():
                for axis in range(len(sharding.sizes) if sharding else 0):
                    for line in _lines(group, sharding.sizes if sharding else (), axis):
                        wanted[line] = None
        for shared in self.plan.shared_parameters:
            ranks = {rank for s in shared.stages for rank in self.plan.stages[s].ranks}
            wanted[tuple(sorted(ranks))] = None
        for ranks_of in wanted:
            if len(ranks_of) > 1:
                self._groups[ranks_of] = dist.new_group(list(ranks_of))

    def _stage(self, index: int) -> _Stage:
        plan, stage = self.plan, self.plan.stages[index]
        program = stage_program(plan, self.model, index)
        replica = next(j for j, group in enumerate(stage.replicas) if self.rank in group)
        mesh = self._mesh(index, stage.replicas[replica])
        sharded = ShardedStage(plan, self.model, program, mesh, self._shapes) if mesh.axes else None
        holders = [group[mesh.place] for group in stage.replicas]
        together = len({self._words(rank) for rank in holders}) == 1
        summed = {s.parameter for s in plan.shared_parameters if s.reduction == "sum"}
        weights_of_stage = {name: self.model.weight(name, self._dtype) for name in program.owned}
        pieces = {name: sharded.piece(name, x) if sharded else x for name, x in weights_of_stage.items()}
        finish = sharded.complete if sharded else lambda name, gradient: gradient
        group = self._groups.get(tuple(sorted(holders)))
        own = {name: x for name, x in pieces.items() if name not in summed}
        tied = {name: x for name, x in pieces.items() if name in summed}
        kind = StageWeights if plan.schedule.clock_distance is None else WaveWeights
        weights = kind(
            own, group=group, ranks=len(holders), place=replica, zero=stage.zero, together=together, make=self._make,
            stash=self._versions(index), finish=finish, corrected=self._corrected(index),
        )  # fmt: skip
        both = StageWeights(tied, group=None, ranks=1, place=0, zero=0, together=True, make=self._make, finish=finish)
        constants = {name: self.model.weight(name, self._dtype) for name in program.constants}
        weights.release()
        parted = PartedStage(self._cuts, self.model, program) if self._cuts else None
        return _Stage(program, weights, both, constants, replica, mesh, sharded, parted)

    def _corrected(self, index: int) -> tuple[StageCorrection, OptimizerScaling | None] | None:
        """What a stage does about the delay of its weights."""
        schedule = self.plan.schedule
        return (schedule.corrections[index], schedule.optimizer) if schedule.corrections else None

    def _versions(self, index: int) -> int:
        """Versions of its weights that a stage keeps apart."""
        schedule = self.plan.schedule
        if WeightPolicy(schedule.weight_policy) in (WeightPolicy.SYNC, WeightPolicy.NEWEST):
            return 1
        return max(2, *schedule.versions)

    def _words(self, rank: int) -> tuple[tuple[object, ...], ...]:
        """A rank's actions without the numbers of micro-batches."""
        return tuple((a.kind, a.stage, a.part) for a in self._orders[rank])

    def _mesh(self, index: int, group: tuple[int, ...]) -> Mesh:
        sharding = self.plan.sharding_of(index)
        if sharding is None or len(group) == 1:
            return Mesh()
        lines = tuple(
            next((self._groups.get(line) for line in _lines(group, sharding.sizes, axis) if self.rank in line), None)
            for axis in range(len(sharding.sizes))
        )
        return Mesh(sharding.sizes, group.index(self.rank), lines)

    def iteration(self, number: int, data: Data, *, update: bool = True) -> list[float]:
        """Run one iteration, or as many as the orders of a pipeline that never drains span.

        Args:
            number: of the iteration.
            data: its micro-batches. Where the pipeline never drains, those of the iterations after it, too.
            update: whether weights are updated; without, `gradients` gives what they would be updated by.

        Returns:
            This rank's part of the mean loss of each iteration that the orders span; the parts of all ranks add up.
        """
        self._losses = []
        left = tied_exchanges(self.plan, self._orders[self.rank])
        for at, action in enumerate(self._orders[self.rank]):
            self._report(at, str(action))
            self._do(action, number, data, update)
            for tie in left.done(action):
                self._exchange_tied(tie)
        for own in self.stages.values():
            own.tied.sum_up()
            if update:
                own.tied.update()
            own.weights.drain()
        self._transfers.wait()
        scale, count = self.plan.micro_batches.gradient_scale, self.plan.micro_batches.count
        found = [0.0] * max(1, self.iterations)
        for micro_batch, loss in self._losses:
            found[micro_batch // count] += float(loss.detach()) * scale
        return found

    @property
    def iterations(self) -> int:
        """Iterations of one call of `iteration`: more than one where the pipeline never drains."""
        last = max((a.micro_batch for a in self._orders[self.rank] if a.kind is ActionKind.FORWARD), default=0)
        return last // self.plan.micro_batches.count + 1

    def _do(self, action: Action, number: int, data: Data, update: bool) -> None:
        own = self.stages[action.stage]
        kind, micro_batch, unit = action.kind, action.micro_batch, Unit(action.micro_batch, action.part)
        if kind in (ActionKind.FORWARD, *_BACK, ActionKind.RECOMPUTE):
            count = self.plan.micro_batches.count
            batch = data(number + micro_batch // count, micro_batch % count)
            own.weights.gather()
            with own.weights.computing(forward=kind is ActionKind.FORWARD):
                if kind is ActionKind.FORWARD:
                    self._forward(own, unit, batch, action.version)
                elif kind is ActionKind.RECOMPUTE:
                    self._again(own, own.passes[unit], batch)
                else:
                    self._backward(own, own.passes[unit], batch, kind)
            own.weights.release()
        elif kind is ActionKind.SEND_ACTIVATION:
            self._send_results(own, own.passes[unit])
        elif kind is ActionKind.RECEIVE_ACTIVATION:
            own.passes[unit] = Pass(unit, self._receive(own, unit), {})
        elif kind is ActionKind.SEND_GRADIENT:
            self._send_gradients(own, own.passes[unit])
        elif kind is ActionKind.RECEIVE_GRADIENT:
            self._receive_gradients(own, own.passes[unit])
        elif kind is ActionKind.LAUNCH_SYNC:
            own.weights.launch(micro_batch)
        elif kind is ActionKind.SYNC:
            own.weights.exchange(micro_batch)
        elif kind is ActionKind.UPDATE and update:
            own.weights.update(self._averaged(action.stage))

    def _averaged(self, stage: int) -> float:
        """By how much summed gradients are multiplied where an update has less than an iteration's micro-batches."""
        averaged = self.plan.schedule.averaged
        return 1.0 / (averaged[stage] * self.plan.micro_batches.gradient_scale) if averaged else 1.0

    def _forward(self, own: _Stage, unit: Unit, batch: Batch, version: int) -> None:
        index = own.program.index
        if (ActionKind.RECEIVE_ACTIVATION, index) not in self._explicit:
            own.passes[unit] = Pass(unit, self._receive(own, unit), {})
        here = own.passes[unit]
        here.parameters = {**own.weights.read(version), **own.tied.read(version)}
        if own.parted is not None:
            here.earlier = _earlier(own, own.parted, unit)
        if self.plan.stages[index].recompute:
            with torch.no_grad():
                sent, loss = self._run(own, here, batch)
            here.results = sent
        else:
            sent, loss = self._run(own, here, batch)
            here.results, here.loss = sent, loss
        if loss is not None and own.mesh.place == 0:
            self._losses.append((unit.micro_batch, loss))
            if not torch.isfinite(loss.detach()):
                raise FloatingPointError(f"the loss of micro-batch {unit.micro_batch} is {float(loss.detach())}")
        if (ActionKind.SEND_ACTIVATION, index) not in self._explicit:
            self._send_results(own, here)

    def _run(self, own: _Stage, here: Pass, batch: Batch) -> tuple[Values, torch.Tensor | None]:
        context = Context(self._dtype, self._seed, here.unit.micro_batch)
        named = {name: here.parameters[parameter] for name, parameter in own.program.parameters.items()}
        values = {**own.constants, **here.received, **named}
        if own.parted is not None:
            sent, total, here.carried = own.parted.run(values, batch, self._loss, context, here.unit.part, here.earlier)
            return sent, total
        if own.sharded is None:
            return run_stage(own.program, self.model, values, batch, self._loss, context)
        return own.sharded.run(values, batch, self._loss, context)

    def _again(self, own: _Stage, here: Pass, batch: Batch) -> None:
        """Repeat a forward whose results were dropped."""
        here.results, here.loss = self._run(own, here, batch)

    def _backward(self, own: _Stage, here: Pass, batch: Batch, kind: ActionKind) -> None:
        index = own.program.index
        first = kind is not ActionKind.WEIGHT_GRAD
        if first:
            dropped = self.plan.stages[index].recompute and (ActionKind.RECOMPUTE, index) not in self._explicit
            if dropped:
                self._again(own, here, batch)
            if (ActionKind.RECEIVE_GRADIENT, index) not in self._explicit:
                self._receive_gradients(own, here)
        ends, seeds = self._ends(own, here)
        received = {name: x for name, x in here.received.items() if x.requires_grad} if first else {}
        earlier = [x for name in here.earlier for x in here.earlier[name]] if first else []
        inputs = [*received.values(), *(x for x in earlier if x.requires_grad)]
        weights = here.parameters if kind is not ActionKind.INPUT_GRAD else {}
        found: list[torch.Tensor | None] = []
        if ends and (inputs or weights):
            found = list(
                torch.autograd.grad(
                    ends, [*inputs, *weights.values()], seeds,
                    retain_graph=kind is ActionKind.INPUT_GRAD, allow_unused=True,
                )
            )  # fmt: skip
        found += [None] * (len(inputs) + len(weights) - len(found))
        if first:
            given = dict(zip(received, found, strict=False))
            here.received = {
                name: _with_gradient(x, given.get(name)) if name in received else x for name, x in here.received.items()
            }
            of_earlier = {id(x): gradient for x, gradient in zip(inputs, found, strict=False)}
            _give_back(own, here, {key: of_earlier.get(key) for key in map(id, earlier)})
            if (ActionKind.SEND_GRADIENT, index) not in self._explicit:
                self._send_gradients(own, here)
        if kind is not ActionKind.INPUT_GRAD:
            made = dict(zip(weights, found[len(inputs) :], strict=True))
            own.weights.add({name: made.get(name) for name in own.weights.shapes})
            own.tied.add({name: made.get(name) for name in own.tied.shapes})
            if (ActionKind.SEND_GRADIENT, index) not in self._explicit:
                del own.passes[here.unit]

    def _ends(self, own: _Stage, here: Pass) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where a backward begins, and the gradients there."""
        ends, seeds = [], []
        for results, gradients in ((here.results or {}, here.gradients), (here.carried, here.carried_gradients)):
            for name, gradient in gradients.items():
                if results[name].requires_grad:
                    ends.append(results[name])
                    seeds.append(gradient)
        if here.loss is not None and here.loss.requires_grad:
            ends.append(here.loss)
            seeds.append(torch.full_like(here.loss, self.plan.micro_batches.gradient_scale))
        return ends, seeds

    def _receive(self, own: _Stage, unit: Unit) -> Values:
        """Tensors from other stages, as this rank holds them."""
        found = {}
        for boundary in own.program.received:
            x = self._transfers.receive(boundary, own.program.index, unit, own.mesh.place)
            x = own.piece(boundary.tensor, x)
            wants = boundary.gradient and x.is_floating_point()
            found[boundary.tensor] = x.detach().requires_grad_(wants)
        return found

    def _send_results(self, own: _Stage, here: Pass) -> None:
        for boundary in own.program.sent:
            x = own.whole(boundary.tensor, (here.results or {})[boundary.tensor].detach(), boundary.shape)
            self._transfers.send(x, boundary, here.unit, own.mesh.place)
        if self.plan.stages[own.program.index].recompute:
            here.results = None

    def _send_gradients(self, own: _Stage, here: Pass) -> None:
        """Gradients of received tensors, back to the stages that made them."""
        for boundary in own.program.received:
            x = here.received[boundary.tensor]
            if not boundary.gradient:
                continue
            gradient = x.grad if x.grad is not None else torch.zeros_like(x)
            gradient = own.whole(boundary.tensor, gradient, boundary.shape, gradient=True)
            self._transfers.send_back(gradient, boundary, own.program.index, here.unit, own.mesh.place)
        if (ActionKind.SEND_GRADIENT, own.program.index) in self._explicit:
            own.passes.pop(here.unit, None)

    def _receive_gradients(self, own: _Stage, here: Pass) -> None:
        """Gradients of sent tensors, summed over the stages that read them."""
        here.gradients = {}
        for boundary in own.program.sent:
            total = self._transfers.receive_back(boundary, here.unit, own.mesh.place) if boundary.gradient else None
            if total is not None:
                here.gradients[boundary.tensor] = own.piece(boundary.tensor, total, gradient=True)

    def _exchange_tied(self, shared: SharedParameter) -> None:
        """Sum the gradients of a weight that several stages hold, each rank's contribution once."""
        here = [self.stages[index] for index in shared.stages if index in self.stages]
        parts = [self._tied_gradient(own, shared.parameter) for own in here]
        total = torch.stack(parts).sum(0)
        ranks = tuple(sorted({rank for s in shared.stages for rank in self.plan.stages[s].ranks}))
        if ranks in self._groups:
            dist.all_reduce(total, group=self._groups[ranks])
        for own in here:
            own.tied.gradients[shared.parameter] = own.piece(shared.parameter, total)

    def _tied_gradient(self, own: _Stage, name: str) -> torch.Tensor:
        """The whole gradient of a weight in a stage; of the ranks of a group the first has it, the others zeros."""
        gradient = own.tied.gradients.pop(name, None)
        if gradient is None:
            gradient = torch.zeros(own.tied.shapes[name], dtype=self._dtype)
        gradient = own.whole(name, gradient, self.whole_shape(name), gradient=True)
        return gradient if own.mesh.place == 0 else torch.zeros_like(gradient)

    def gradients(self) -> Mapping[int, Values]:
        """By stage, the whole gradient of each weight after an iteration without update. All ranks call it together."""
        found = {}
        for index in range(len(self.plan.stages)):
            own = self.stages.get(index)
            if own is None:
                continue
            values = {**own.weights.whole_gradient(), **own.tied.whole_gradient()}
            found[index] = {name: own.whole(name, x, self.whole_shape(name)) for name, x in values.items()}
        return found

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole weight."""
        return tuple(self.model.weights[name].dims)


def _earlier(own: _Stage, parted: PartedStage, unit: Unit) -> dict[str, list[torch.Tensor]]:
    """What a part reads of the parts before it, cut off from their graphs: its backward gives gradients for them."""
    before = [own.passes[unit._replace(part=part)].carried for part in range(unit.part)]
    return {
        name: [carried[name].detach().requires_grad_(carried[name].is_floating_point()) for carried in before]
        for name in parted.carried
    }


def _give_back(own: _Stage, here: Pass, gradients: Mapping[int, torch.Tensor | None]) -> None:
    """Add the gradients of what a part read of earlier parts to those of these parts.

    Args:
        own: the stage.
        here: the pass of the part.
        gradients: by `id` of the tensors in `here.earlier`.
    """
    for name, tensors in here.earlier.items():
        for part, x in enumerate(tensors):
            gradient = gradients.get(id(x))
            if gradient is not None:
                total = own.passes[here.unit._replace(part=part)].carried_gradients
                total[name] = gradient if name not in total else total[name] + gradient


def _with_gradient(x: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A received tensor that carries its gradient until it is sent back."""
    found = x.detach().requires_grad_(True)
    found.grad = gradient
    return found


def _lines(group: tuple[int, ...], sizes: tuple[int, ...], axis: int) -> list[tuple[int, ...]]:
    """The lines of ranks along one axis of a mesh."""
    if not sizes or len(group) != math.prod(sizes):
        raise PlanError("a mesh is not as large as its group", where="shardings", hint="plan again")
    return list(map(tuple, np.moveaxis(np.reshape(group, sizes), axis, -1).reshape(-1, sizes[axis]).tolist()))

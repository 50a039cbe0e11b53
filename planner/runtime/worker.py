"""One rank of a plan: runs its actions in order on torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from planner.errors import PlanError, RunError
from planner.plans import Plan
from planner.plans.records import SharedParameter
from planner.runtime.data import Batch, Data, LateBatch, Loss
from planner.runtime.device import settled
from planner.runtime.groups import Communicator, RankGroup
from planner.runtime.interpreter import Values
from planner.runtime.layouts import RankMesh
from planner.runtime.model_file import ModelFile
from planner.runtime.orders import sequences, tied_exchanges
from planner.runtime.sequence_cuts import SequenceCuts
from planner.runtime.sequence_parts import PartedStage
from planner.runtime.shapes import whole_shapes
from planner.runtime.sharded import ShardedStage
from planner.runtime.stage_run import PassSettings, StageRun
from planner.runtime.stages import PassState, WholeStage, stage_program
from planner.runtime.transfers import StageTransfers, Unit
from planner.runtime.waves import WaveWeights
from planner.runtime.weights import MakeOptimizer, StageWeights
from planner.schedules import Action, ActionKind, WeightPolicy
from planner.schedules.types import OptimizerScaling, StageCorrection

Report = Callable[[int, str], None]
"""Called before every action with its place in the rank's order and its text."""

_BACK = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


class Worker:
    """One rank of a plan.

    Args:
        plan: the plan.
        model: its model.
        exchange: of this rank with the others; knows the device.
        loss: computes the loss from the model's outputs.
        make: makes the optimizer for a list of weights.
        dtype: type of all floating-point work.
        seed: seed of dropout masks.
        report: called before every action.
        times: iterations of the steady state that one call of `iteration` runs, where the pipeline never drains.

    Raises:
        PlanError: the orders block each other, or the plan is not for this model.
        ModelError: an operator has no torch rule.
    """

    def __init__(
        self, plan: Plan, model: ModelFile, exchange: Communicator, *, loss: Loss, make: MakeOptimizer,
        dtype: torch.dtype = torch.float32, seed: int = 0, report: Report = lambda at, text: None,
        times: int = 1,
    ) -> None:  # fmt: skip
        self.plan, self.model, self.rank, self.device = plan, model, exchange.rank, exchange.device
        self._make, self._dtype, self._report, self._exchange = make, dtype, report, exchange
        scale = plan.micro_batches.gradient_scale
        self._settings = PassSettings(model, exchange.device, loss, dtype, seed, scale)
        self._losses: list[tuple[Action, torch.Tensor]] = []
        self._orders, self._times = sequences(plan, times), times
        self._explicit = {(a.kind, a.stage) for actions in self._orders.values() for a in actions}
        self._groups = exchange.groups(self._group_ranks())
        self._shapes = whole_shapes(plan, model) if plan.shardings else {}
        self._cuts = SequenceCuts(plan, model, dtype) if plan.schedule.parts > 1 else None
        self._transfers = StageTransfers(plan, self._orders, exchange, dtype, self._cuts)
        self.stages = {index: self._stage(index) for index in plan.stages_of(self.rank)}

    def _group_ranks(self) -> list[tuple[int, ...]]:
        """Ranks of all groups of the plan; torch wants every rank to create all of them in the same order."""
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
        return [ranks for ranks in wanted if len(ranks) > 1]

    def _stage(self, index: int) -> StageRun:
        plan, stage = self.plan, self.plan.stages[index]
        program = stage_program(plan, self.model, index)
        replica = next(j for j, group in enumerate(stage.replicas) if self.rank in group)
        mesh = self._mesh(index, stage.replicas[replica])
        sharded = ShardedStage(plan, program, mesh, self._shapes) if mesh.axes else None
        holders = [group[mesh.place] for group in stage.replicas]
        together = len({self._unnumbered_actions(rank) for rank in holders}) == 1
        summed = {s.parameter for s in plan.shared_parameters if s.reduction == "sum"}
        stored = self.model.shaped if self.device.name.type == "meta" else self.model.weight
        weights_of_stage = {name: stored(name, self._dtype) for name in program.owned}
        pieces = {name: sharded.piece(name, x) if sharded else x for name, x in weights_of_stage.items()}
        finish = sharded.complete if sharded else lambda name, gradient: gradient
        group = self._groups.get(tuple(sorted(holders)))
        untied_pieces = {name: x for name, x in pieces.items() if name not in summed}
        tied_pieces = {name: x for name, x in pieces.items() if name in summed}
        kind = StageWeights if plan.schedule.clock_distance is None else WaveWeights
        weights = kind(
            untied_pieces, device=self.device, group=group, zero=stage.zero, together=together, make=self._make,
            stash=self._versions(index), finish=finish, corrected=self._corrected(index),
            blocks=program.weights_of_blocks(plan), names=program.parameters,
        )  # fmt: skip
        tied = StageWeights(
            tied_pieces, device=self.device, group=None, zero=0, together=True, make=self._make, finish=finish
        )
        stored_constants = {name: self.model.weight(name, self._dtype) for name in program.constants}
        constants = {name: settled(x, self.device.name) for name, x in stored_constants.items()}
        parted = PartedStage(self._cuts, program, self.device.name) if self._cuts else None
        whole = WholeStage(program)
        return StageRun(
            self._settings, program, weights, tied, constants, replica, mesh, whole, sharded, parted,
            splits=(ActionKind.WEIGHT_GRAD, index) in self._explicit,
            repeats=program.as_whole, offloads=bool(stage.offload),
        )  # fmt: skip

    def _corrected(self, index: int) -> tuple[StageCorrection, OptimizerScaling | None] | None:
        """Corrections for stale weights and optimizer scaling of a stage; None where the plan has none."""
        schedule = self.plan.schedule
        return (schedule.corrections[index], schedule.optimizer) if schedule.corrections else None

    def _versions(self, index: int) -> int:
        """Number of weight versions that a stage keeps as separate copies."""
        schedule = self.plan.schedule
        if WeightPolicy(schedule.weight_policy) in (WeightPolicy.SYNC, WeightPolicy.NEWEST):
            return 1
        return max(2, *schedule.versions)

    def _unnumbered_actions(self, rank: int) -> tuple[tuple[object, ...], ...]:
        """A rank's actions without the numbers of micro-batches."""
        return tuple((a.kind, a.stage, a.part) for a in self._orders[rank])

    def _mesh(self, index: int, group: tuple[int, ...]) -> RankMesh:
        sharding = self.plan.sharding_of(index)
        if sharding is None or len(group) == 1:
            return RankMesh()
        lines = tuple(
            self._line(next(line for line in _lines(group, sharding.sizes, axis) if self.rank in line))
            for axis in range(len(sharding.sizes))
        )
        return RankMesh(sharding.sizes, group.index(self.rank), lines)

    def _line(self, ranks: tuple[int, ...]) -> RankGroup:
        """The group of some ranks; of one rank, a group that exchanges nothing."""
        return self._groups.get(ranks) or self._exchange.single

    def iteration(self, number: int, data: Data, *, update: bool = True) -> list[float]:
        """Run one iteration, or as many as the orders of a pipeline that never drains span.

        Args:
            number: number of the iteration.
            data: gives the micro-batches of this iteration and of those that the orders span after it.
            update: whether weights are updated; if not, `gradients` returns the summed gradients afterwards.

        Returns:
            This rank's share of the mean loss of each iteration that the orders span; the shares of all ranks add up.
        """
        self._losses = []
        pending_ties = tied_exchanges(self.plan, self._orders[self.rank])
        for at, action in enumerate(self._orders[self.rank]):
            self._run_action(at, action, number, data, update)
            for tie in pending_ties.done(action):
                self._exchange_tied(tie)
        for stage in self.stages.values():
            stage.tied.sum_up()
            if update:
                stage.tied.update()
            stage.weights.drain()
        self._transfers.wait()
        self._report(len(self._orders[self.rank]), "")
        return self._mean_losses()

    def _mean_losses(self) -> list[float]:
        """This rank's share of the mean loss of each iteration: the one time that it waits for all that was computed.

        Raises:
            RunError: a loss is not finite.
        """
        scale, count = self.plan.micro_batches.gradient_scale, self.plan.micro_batches.count
        losses = [0.0] * self.iterations
        values = self.device.numbers([loss for _, loss in self._losses])
        for (action, _), value in zip(self._losses, values, strict=True):
            if not math.isfinite(value):
                raise RunError(
                    f"the loss of micro-batch {action.micro_batch} is {value}", where=f"rank {self.rank} at {action}",
                    hint="a lower --learning-rate, or other data",
                )  # fmt: skip
            losses[action.micro_batch // count] += value * scale
        return losses

    @property
    def iterations(self) -> int:
        """Iterations of one call of `iteration`: more than one where the pipeline never drains."""
        forwards = (a.micro_batch for order in self._orders.values() for a in order if a.kind is ActionKind.FORWARD)
        return max(forwards, default=0) // self.plan.micro_batches.count + 1

    def _run_action(self, at: int, action: Action, number: int, data: Data, update: bool) -> None:
        stage = self.stages[action.stage]
        kind, micro_batch, unit = action.kind, action.micro_batch, Unit(action.micro_batch, action.part)
        passes = kind in (ActionKind.FORWARD, *_BACK, ActionKind.RECOMPUTE)
        self._report(at, str(action))
        if passes:
            count = self.plan.micro_batches.count
            batch = LateBatch(data, number + micro_batch // count, micro_batch % count, self.device)
            adds = kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
            with stage.weights.computing(forward=kind not in _BACK, sums=adds):
                if kind is ActionKind.FORWARD:
                    self._forward(stage, action, batch)
                elif kind is ActionKind.RECOMPUTE:
                    stage.rerun(stage.passes[unit], batch)
                else:
                    self._backward(stage, stage.passes[unit], batch, kind)
        elif kind is ActionKind.SEND_ACTIVATION:
            self._send_results(stage, stage.passes[unit])
        elif kind is ActionKind.RECEIVE_ACTIVATION:
            stage.passes[unit] = PassState(unit, self._receive(stage, unit), {})
        elif kind is ActionKind.SEND_GRADIENT:
            self._send_gradients(stage, stage.passes[unit])
        elif kind is ActionKind.RECEIVE_GRADIENT:
            self._receive_gradients(stage, stage.passes[unit])
        elif kind is ActionKind.LAUNCH_SYNC:
            stage.weights.launch(micro_batch)
        elif kind is ActionKind.SYNC:
            stage.weights.exchange(micro_batch)
        elif kind is ActionKind.UPDATE and update:
            stage.weights.update(self._averaged(action.stage))

    def _averaged(self, stage: int) -> float:
        """Factor on summed gradients where an update averages fewer micro-batches than an iteration has; else 1."""
        averaged = self.plan.schedule.averaged
        return 1.0 / (averaged[stage] * self.plan.micro_batches.gradient_scale) if averaged else 1.0

    def _forward(self, stage: StageRun, action: Action, batch: Batch) -> None:
        index, unit = stage.program.index, Unit(action.micro_batch, action.part)
        if (ActionKind.RECEIVE_ACTIVATION, index) not in self._explicit:
            stage.passes[unit] = PassState(unit, self._receive(stage, unit), {})
        loss = stage.forward(stage.passes[unit], batch, action.version)
        if loss is not None:
            self._losses.append((action, loss))
        if (ActionKind.SEND_ACTIVATION, index) not in self._explicit:
            self._send_results(stage, stage.passes[unit])

    def _backward(self, stage: StageRun, current: PassState, batch: Batch, kind: ActionKind) -> None:
        index = stage.program.index
        if kind is ActionKind.WEIGHT_GRAD:
            stage.weight_gradients(current)
        else:
            if stage.repeats and (ActionKind.RECOMPUTE, index) not in self._explicit:
                stage.rerun(current, batch)
            if (ActionKind.RECEIVE_GRADIENT, index) not in self._explicit:
                self._receive_gradients(stage, current)
            stage.backward(current, split=kind is ActionKind.INPUT_GRAD)
            if (ActionKind.SEND_GRADIENT, index) not in self._explicit:
                self._send_gradients(stage, current)
        if kind is not ActionKind.INPUT_GRAD and (ActionKind.SEND_GRADIENT, index) not in self._explicit:
            del stage.passes[current.unit]

    def _receive(self, stage: StageRun, unit: Unit) -> Values:
        """Receive this rank's pieces of the tensors from other stages, as leaves of autograd."""
        pieces = {}
        for boundary in stage.program.received:
            x = self._transfers.receive(boundary, stage.program.index, unit, stage.mesh.place)
            x = stage.piece(boundary.tensor, x)
            needs_gradient = boundary.gradient and x.is_floating_point()
            pieces[boundary.tensor] = x.detach().requires_grad_(needs_gradient)
        return pieces

    def _send_results(self, stage: StageRun, current: PassState) -> None:
        for boundary in stage.program.sent:
            x = stage.whole(boundary.tensor, (current.results or {})[boundary.tensor].detach(), boundary.shape)
            self._transfers.send(x, boundary, current.unit)
        current.results = None

    def _send_gradients(self, stage: StageRun, current: PassState) -> None:
        """Send the gradients of received tensors back to the stages that made them."""
        for boundary in stage.program.received:
            x = current.received[boundary.tensor]
            if not boundary.gradient:
                continue
            gradient = x.grad if x.grad is not None else torch.zeros_like(x)
            gradient = stage.whole(boundary.tensor, gradient, boundary.shape, gradient=True)
            self._transfers.send_back(gradient, boundary, stage.program.index, current.unit)
        current.received = {}
        if (ActionKind.SEND_GRADIENT, stage.program.index) in self._explicit:
            stage.passes.pop(current.unit, None)

    def _receive_gradients(self, stage: StageRun, current: PassState) -> None:
        """Receive the gradients of sent tensors, summed over the stages that read them."""
        current.gradients = {}
        for boundary in stage.program.sent:
            total = (
                self._transfers.receive_back(boundary, current.unit, stage.mesh.place) if boundary.gradient else None
            )
            if total is not None:
                current.gradients[boundary.tensor] = stage.piece(boundary.tensor, total, gradient=True)

    def _exchange_tied(self, shared: SharedParameter) -> None:
        """Sum the gradients of a tied weight over all ranks that hold it; each rank contributes once."""
        stages = [self.stages[index] for index in shared.stages if index in self.stages]
        total = self._tied_gradient(stages[0], shared.parameter)
        for stage in stages[1:]:
            total = total + self._tied_gradient(stage, shared.parameter)
        ranks = tuple(sorted({rank for s in shared.stages for rank in self.plan.stages[s].ranks}))
        if ranks in self._groups:
            self._groups[ranks].sum(total)
        for stage in stages:
            stage.tied.accumulators()[shared.parameter].copy_(stage.piece(shared.parameter, total))

    def _tied_gradient(self, stage: StageRun, name: str) -> torch.Tensor:
        """The full gradient of a tied weight on the first rank of the group, zeros on the others."""
        gradient = stage.whole(name, stage.tied.accumulators()[name], self.whole_shape(name), gradient=True)
        return gradient if stage.mesh.place == 0 else torch.zeros_like(gradient)

    def gradients(self) -> Mapping[int, Values]:
        """By stage, the full gradient of each weight after an iteration without update. A collective call."""
        gradients = {}
        for index in sorted(self.stages):
            stage = self.stages[index]
            values = {**stage.weights.whole_gradient(), **stage.tied.whole_gradient()}
            gradients[index] = {name: stage.whole(name, x, self.whole_shape(name)) for name, x in values.items()}
        return gradients

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole weight."""
        return tuple(self.model.weights[name].dims)


def _lines(group: tuple[int, ...], sizes: tuple[int, ...], axis: int) -> list[tuple[int, ...]]:
    """Groups of ranks that differ in one coordinate of a mesh only."""
    if not sizes or len(group) != math.prod(sizes):
        raise PlanError("a mesh is not as large as its group", where="shardings", hint="plan again")
    return list(map(tuple, np.moveaxis(np.reshape(group, sizes), axis, -1).reshape(-1, sizes[axis]).tolist()))

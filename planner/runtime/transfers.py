"""Tensors between stages: activations to the stages that read them, gradients back to the stage that made them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.plans import Plan
from planner.plans.records import Boundary
from planner.runtime.sequence_cuts import SequenceCuts


class Unit(NamedTuple):
    """What passes through a stage at a time: a micro-batch, or a part of its sequence.

    Attributes:
        micro_batch: its number.
        part: -1 where it is whole.
    """

    micro_batch: int
    part: int = -1


class Transfers:
    """Sends and receives whole boundary tensors for one rank. A rank's messages to itself are put aside.

    Args:
        plan: the plan.
        rank: this process.
        dtype: of all floating-point work.
        cuts: how tensors are cut into parts; None where micro-batches are whole.
    """

    def __init__(self, plan: Plan, rank: int, dtype: torch.dtype, cuts: SequenceCuts | None) -> None:
        self._plan, self._rank, self._dtype, self._cuts = plan, rank, dtype, cuts
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._mail: dict[tuple[str, int, Unit, bool], torch.Tensor] = {}

    def send(self, x: torch.Tensor, boundary: Boundary, unit: Unit, place: int) -> None:
        """Send an activation to all stages that read it; of a group of ranks each serves its share of the readers."""
        width = len(self._plan.ranks_for(boundary.from_stage, unit.micro_batch))
        for to in boundary.to_stages:
            for at, peer in enumerate(self._plan.ranks_for(to, unit.micro_batch)):
                if at % width == place:
                    self._post(x, peer, boundary, to, unit, False)

    def receive(self, boundary: Boundary, to: int, unit: Unit, place: int) -> torch.Tensor:
        """Receive an activation at a stage."""
        sources = self._plan.ranks_for(boundary.from_stage, unit.micro_batch)
        dtype = self._dtype
        if "float" not in boundary.dtype:
            dtype = {"bool": torch.bool, "int32": torch.int32}.get(boundary.dtype, torch.int64)
        return self._take(dtype, sources[place % len(sources)], boundary, to, unit, False)

    def send_back(self, gradient: torch.Tensor, boundary: Boundary, reader: int, unit: Unit, place: int) -> None:
        """Send the gradient of an activation from a stage that read it to the one that made it."""
        width = len(self._plan.ranks_for(reader, unit.micro_batch))
        for at, peer in enumerate(self._plan.ranks_for(boundary.from_stage, unit.micro_batch)):
            if at % width == place:
                self._post(gradient, peer, boundary, reader, unit, True)

    def receive_back(self, boundary: Boundary, unit: Unit, place: int) -> torch.Tensor | None:
        """The gradient of an activation, summed over the stages that read it; None where none did."""
        total: torch.Tensor | None = None
        for to in boundary.to_stages:
            readers = self._plan.ranks_for(to, unit.micro_batch)
            gradient = self._take(self._dtype, readers[place % len(readers)], boundary, to, unit, True)
            total = gradient if total is None else total + gradient
        return total

    def wait(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _tag(self, boundary: Boundary, to: int, unit: Unit, back: bool) -> int:
        schedule = self._plan.schedule
        number = self._plan.boundaries.index(boundary) * len(self._plan.stages) + to
        number = number * self._plan.micro_batches.count * schedule.iterations + unit.micro_batch
        return (number * schedule.parts + max(unit.part, 0)) * 2 + back

    def _post(self, x: torch.Tensor, peer: int, boundary: Boundary, to: int, unit: Unit, back: bool) -> None:
        """Send to another rank without waiting, or put aside for this one."""
        if peer == self._rank:
            self._mail[boundary.tensor, to, unit, back] = x.detach()
            return
        held = x.detach().contiguous()
        held = held.to(torch.uint8) if held.dtype is torch.bool else held
        self._sends.append((dist.isend(held, peer, tag=self._tag(boundary, to, unit, back)), held))

    def _take(self, dtype: torch.dtype, peer: int, boundary: Boundary, to: int, unit: Unit, back: bool) -> torch.Tensor:
        if peer == self._rank:
            return self._mail.pop((boundary.tensor, to, unit, back))
        shape = boundary.shape if self._cuts is None else self._cuts.shape(boundary.tensor, unit.part)
        room = torch.zeros(shape, dtype=torch.uint8 if dtype is torch.bool else dtype)
        dist.recv(room, peer, tag=self._tag(boundary, to, unit, back))
        return room.to(dtype)

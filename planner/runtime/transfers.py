"""Tensors between stages: activations to the stages that read them, gradients back to the stage that made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from planner.errors import ModelError
from planner.plans import Plan
from planner.plans.records import Boundary
from planner.runtime.groups import Communicator
from planner.runtime.sequence_cuts import SequenceCuts
from planner.schedules import Action, ActionKind


class Unit(NamedTuple):
    """What passes through a stage at a time: a micro-batch, or a part of its sequence.

    Attributes:
        micro_batch: its number.
        part: -1 where it is whole.
    """

    micro_batch: int
    part: int = -1


class StageMessage(NamedTuple):
    """A tensor on its way.

    Attributes:
        boundary: its number in the plan.
        reader: the stage that reads the tensor.
        unit: of which it is.
        back: whether it is the gradient, on its way from the reader to the stage that made the tensor.
    """

    boundary: int
    reader: int
    unit: Unit
    back: bool


Kinds = Collection[tuple[ActionKind, int]]
"""Kinds of actions by stage that the plan's orders have; transfers without an action are part of passes."""


def sent_with(plan: Plan, rank: int, action: Action, kinds: Kinds) -> Iterator[tuple[int, StageMessage]]:
    """The messages that a rank sends in an action, with the ranks that they go to, in the order in which they leave."""
    forward = (ActionKind.SEND_ACTIVATION, action.stage)
    backward = (ActionKind.SEND_GRADIENT, action.stage)
    unit = Unit(action.micro_batch, action.part)
    if action.kind is (forward[0] if forward in kinds else ActionKind.FORWARD):
        yield from _messages(plan, rank, action.stage, unit, back=False)
    elif action.kind is backward[0] or (
        backward not in kinds and action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
    ):
        yield from _messages(plan, rank, action.stage, unit, back=True)


def _messages(plan: Plan, rank: int, stage: int, unit: Unit, *, back: bool) -> Iterator[tuple[int, StageMessage]]:
    """Messages of one pass of a stage; of a group of ranks each serves its share of those at the other end."""
    group = plan.ranks_for(stage, unit.micro_batch)
    place = group.index(rank)
    for number, boundary in enumerate(plan.boundaries):
        if back:
            ends = [boundary.from_stage] if stage in boundary.to_stages and boundary.gradient else []
        else:
            ends = list(boundary.to_stages) if boundary.from_stage == stage else []
        for end in ends:
            message = StageMessage(number, stage if back else end, unit, back)
            for at, peer in enumerate(plan.ranks_for(end, unit.micro_batch)):
                if at % len(group) == place:
                    yield peer, message


class StageTransfers:
    """Sends and receives whole boundary tensors for one rank. A rank's messages to itself are put aside.

    Messages have no names on their way: those from one rank are received in the order in which its actions send them,
    ahead of their need where the receiver wants a later one first.

    Args:
        plan: the plan.
        orders: actions by rank, of one iteration.
        exchange: of this rank.
        dtype: of all floating-point work.
        cuts: how tensors are cut into parts; None where micro-batches are whole.
    """

    def __init__(
        self, plan: Plan, orders: Mapping[int, Sequence[Action]], exchange: Communicator, dtype: torch.dtype,
        cuts: SequenceCuts | None,
    ) -> None:  # fmt: skip
        self._plan, self._orders, self._exchange, self._dtype, self._cuts = plan, orders, exchange, dtype, cuts
        self._rank = exchange.rank
        self._kinds = {(a.kind, a.stage) for actions in orders.values() for a in actions}
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._mail: dict[StageMessage, torch.Tensor] = {}
        self._posted: dict[tuple[int, StageMessage], Callable[[], torch.Tensor]] = {}
        sent = {
            rank: [each for action in actions for each in sent_with(plan, rank, action, self._kinds)]
            for rank, actions in orders.items()
        }
        self._incoming = {
            rank: [message for peer, message in messages if peer == self._rank] for rank, messages in sent.items()
        }
        self._expected: dict[int, deque[StageMessage]] = {}
        pairs = {(rank, peer) for rank, messages in sent.items() for peer, _ in messages if peer != rank}
        exchange.connect(sorted(pairs))

    def send(self, x: torch.Tensor, boundary: Boundary, unit: Unit) -> None:
        """Send an activation to the stages that read it; of a group of ranks each serves its share of the readers."""
        self._send(x, boundary, boundary.from_stage, unit, back=False)

    def receive(self, boundary: Boundary, to: int, unit: Unit, place: int) -> torch.Tensor:
        """Receive an activation at a stage."""
        sources = self._plan.ranks_for(boundary.from_stage, unit.micro_batch)
        message = StageMessage(self._plan.boundaries.index(boundary), to, unit, False)
        return self._take(message, sources[place % len(sources)])

    def send_back(self, gradient: torch.Tensor, boundary: Boundary, reader: int, unit: Unit) -> None:
        """Send the gradient of an activation from a stage that read it to the one that made it."""
        self._send(gradient, boundary, reader, unit, back=True)

    def receive_back(self, boundary: Boundary, unit: Unit, place: int) -> torch.Tensor | None:
        """Receive the gradients of an activation from the stages that read it, and add them up; None without any."""
        total: torch.Tensor | None = None
        for to in boundary.to_stages:
            readers = self._plan.ranks_for(to, unit.micro_batch)
            message = StageMessage(self._plan.boundaries.index(boundary), to, unit, True)
            gradient = self._take(message, readers[place % len(readers)])
            total = gradient if total is None else total + gradient
        return total

    def wait(self) -> None:
        """Wait until everything that was sent has left, and begin the messages of an iteration anew."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        self._expected.clear()

    def _send(self, x: torch.Tensor, boundary: Boundary, stage: int, unit: Unit, *, back: bool) -> None:
        """Send to the ranks that this one serves without waiting, or put aside for itself."""
        number = self._plan.boundaries.index(boundary)
        self._sends = [send for send in self._sends if not send[0].is_completed()]
        for peer, message in _messages(self._plan, self._rank, stage, unit, back=back):
            if message.boundary != number:
                continue
            if tuple(x.shape) != (shape := tuple(self._form(message)[0])):
                raise ModelError(
                    f"is {list(x.shape)} between two stages, in the plan {list(shape)}", where=boundary.tensor,
                    hint="its size follows from data, or the file is not the plan's model",
                )  # fmt: skip
            if peer == self._rank:
                self._mail[message] = x.detach()
            elif not self._exchange.alone:
                self._sends.append(self._exchange.send(x, peer))

    def _take(self, message: StageMessage, peer: int) -> torch.Tensor:
        if peer == self._rank:
            return self._mail.pop(message)
        expected = self._expected.setdefault(peer, deque(self._incoming[peer]))
        while (peer, message) not in self._posted:
            first = expected.popleft()
            self._posted[peer, first] = self._exchange.post(*self._form(first), peer)
        return self._posted.pop((peer, message))()

    def _form(self, message: StageMessage) -> tuple[Sequence[int], torch.dtype]:
        """Shape and type of a message."""
        boundary, dtype = self._plan.boundaries[message.boundary], self._dtype
        if "float" not in boundary.dtype:
            dtype = {"bool": torch.bool, "int32": torch.int32}.get(boundary.dtype, torch.int64)
        shape = boundary.shape if self._cuts is None else self._cuts.shape(boundary.tensor, message.unit.part)
        return shape, dtype

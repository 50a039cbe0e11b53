"""The actions of all ranks, ranks that do the same together; `planner.plans.order_text` has the words.

Numbers count the rank's own micro-batches: number k stands for micro-batch `first + step * k`, so that all replicas of
a stage share a line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.plans.order_text import MAX_ACTIONS, MAX_PERIOD, Steady, Steps, decode, encode, steady_steps
from planner.schedules.types import Action, ActionKind

__all__ = [
    "MAX_ACTIONS",
    "MAX_PERIOD",
    "Line",
    "RankOrder",
    "Steady",
    "Steps",
    "decode",
    "encode",
    "encode_line",
    "encode_orders",
    "group_lines",
]

_COUNTED = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC, ActionKind.UPDATE)


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The actions of ranks that all do the same, each on its own micro-batches.

    Attributes:
        ranks: the ranks.
        first: for each of them, the micro-batch that number 0 stands for.
        step: number k stands for micro-batch `first + step * k`.
        actions: the actions in order: `F0.3` is the forward pass (B: backward, I: input gradients, W: weight gradients,
            R: recomputation, SA RA SG RG: send and receive of activations and gradients, E and L: activations moved
            away and back) of stage 0 for number 3, `F0.0-7` are eight of them, `(F0.4 B0.0)*12` repeats with every
            number one higher each time; `S0` synchronises stage 0's gradients (G: begins to), `U0` updates its weights;
            `[...]` repeats as long as training goes on.
        lane: of a rank that does two things side by side, which of its lists of actions this is.
    """

    ranks: tuple[int, ...]
    first: tuple[int, ...]
    step: int
    actions: str
    lane: int = 0

    def expand(self, rank: int, times: int = 1) -> tuple[Action, ...]:
        """The actions of one of the ranks, with the plan's micro-batch numbers.

        Args:
            rank: the rank.
            times: how often what goes on for ever is repeated.

        Raises:
            PlanError: the line cannot be read.
        """
        first, step = self.first[self.ranks.index(rank)], self.step
        return tuple(
            a if _number(a) < 0 or (first == 0 and step == 1) else _renumbered(a, first + step * a.micro_batch)
            for a in decode(self.actions, rank=rank, times=times)
        )

    @property
    def period(self) -> int:
        """Micro-batches by which what goes on for ever is further each time; 0 when nothing does."""
        found = steady_steps(self.actions)
        return found.micro_batch * self.step if found else 0


class Line(NamedTuple):
    """The actions of one rank as text.

    Attributes:
        first: the micro-batch that number 0 stands for.
        gap: micro-batches from one number to the next; 0 when there is one number at the most.
        actions: the text.
    """

    first: int
    gap: int
    actions: str

    def dealt(self, copies: int, copy: int) -> Line:
        """The same for one of several copies that take micro-batches in turn."""
        return Line(self.first * copies + copy, self.gap * copies, self.actions)


def encode_line(actions: Sequence[Action], *, rank: int = 0, steady: Steady | None = None) -> Line:
    """The actions of a rank with numbers of its own; `steady` is the part that repeats as long as training goes on."""
    numbers = sorted({_number(a) for a in actions if _number(a) >= 0})
    first = numbers[0] if numbers else 0
    gap = math.gcd(*(n - first for n in numbers), steady.steps.micro_batch if steady else 0)
    step = gap or 1
    own = [_renumbered(a, (_number(a) - first) // step) if _number(a) >= 0 else a for a in actions]
    if steady:
        steady = steady._replace(steps=steady.steps._replace(micro_batch=steady.steps.micro_batch // step))
    return Line(first, gap, encode(own, rank=rank, steady=steady))


def group_lines(lines: Mapping[int, Line], lane: int = 0) -> tuple[RankOrder, ...]:
    """Ranks with equal lines together, in order of their lowest rank."""
    groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank in sorted(lines):
        line = lines[rank]
        groups.setdefault((line.gap or 1, line.actions), []).append((rank, line.first))
    return tuple(
        RankOrder(tuple(r for r, _ in members), tuple(f for _, f in members), step, text, lane)
        for (step, text), members in groups.items()
    )


def encode_orders(orders: Mapping[int, Sequence[Action]]) -> tuple[RankOrder, ...]:
    """The actions of every rank, ranks with equal lines together, in order of their lowest rank."""
    return group_lines({rank: encode_line(actions, rank=rank) for rank, actions in orders.items()})


def _number(action: Action) -> int:
    """The micro-batch that an action is about, -1 for exchanges and updates, which have numbers of their own."""
    return -1 if action.kind in _COUNTED else action.micro_batch


def _renumbered(action: Action, micro_batch: int) -> Action:
    return dataclasses.replace(action, micro_batch=micro_batch)

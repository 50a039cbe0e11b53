"""A rank's actions as a short line of text: `F0.0-2 (F0.3 B0.0)*13 B0.13-15 S0 U0`.

A word is kind, stage and micro-batch (`F0.3`), or kind and stage alone (`S0`, `U0`). `F0.0-2` counts up (or down)
through the micro-batches; `(...)*n` repeats its words n times, every micro-batch number one higher each time. Numbers
count the rank's own micro-batches: number k stands for micro-batch `first + step * k`, so that all replicas of a stage
share a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.schedules.types import Action, ActionKind

MAX_PERIOD = 8
"""Longest loop body that is looked for."""

MAX_ACTIONS = 2_000_000
"""A line that stands for more is taken for damaged."""

_GRAMMAR = "words look like F0.3, F0.0-7, S0 or (F0.4 B0.0)*12"
_ITEM = re.compile(r"\s*(?:\(([^()]+)\)\*([0-9]+)|([^\s()]+))(?=\s|$)")
_WORD = re.compile(r"([A-Z])([0-9]+)(?:\.([0-9]+)(?:-([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The actions of ranks that all do the same, each on its own micro-batches.

    Attributes:
        ranks: the ranks.
        first: for each of them, the micro-batch that number 0 stands for.
        step: number k stands for micro-batch `first + step * k`.
        actions: the actions in order: `F0.3` is the forward pass (B: backward, I: input gradients, W: weight gradients)
            of stage 0 for number 3, `F0.0-7` are eight of them, `(F0.4 B0.0)*12` repeats with every number one higher
            each time; `S0` synchronises stage 0's gradients, `U0` updates its weights.
    """

    ranks: tuple[int, ...]
    first: tuple[int, ...]
    step: int
    actions: str

    def expand(self, rank: int) -> tuple[Action, ...]:
        """The actions of one of the ranks, with the plan's micro-batch numbers.

        Raises:
            PlanError: the line cannot be read.
        """
        first = self.first[self.ranks.index(rank)]
        return tuple(
            Action(a.kind, a.stage, first + self.step * a.micro_batch if a.micro_batch >= 0 else -1)
            for a in decode(self.actions)
        )


def encode_orders(orders: Mapping[int, Sequence[Action]]) -> tuple[RankOrder, ...]:
    """The actions of every rank, ranks with equal lines together, in order of their lowest rank."""
    groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank in sorted(orders):
        numbers = sorted({a.micro_batch for a in orders[rank] if a.micro_batch >= 0})
        first = numbers[0] if numbers else 0
        step = math.gcd(*(n - first for n in numbers)) or 1
        own = [
            Action(a.kind, a.stage, (a.micro_batch - first) // step if a.micro_batch >= 0 else -1) for a in orders[rank]
        ]
        groups.setdefault((step, encode(own)), []).append((rank, first))
    return tuple(
        RankOrder(tuple(r for r, _ in members), tuple(f for _, f in members), step, line)
        for (step, line), members in groups.items()
    )


def encode(actions: Sequence[Action]) -> str:
    """One line for a list of actions; `decode` gives the list back."""
    words: list[str] = []
    position = 0
    while position < len(actions):
        length, text = _best_item(actions, position)
        words.append(text)
        position += length
    return " ".join(words)


def _best_item(actions: Sequence[Action], start: int) -> tuple[int, str]:
    """The item that covers most actions from `start`: (actions covered, text)."""
    length, text = 1, _word(actions[start])
    for direction in (1, -1):
        count = _repeats(actions, start, 1, direction)
        if count > max(1, length):
            length, text = count, f"{_word(actions[start])}-{actions[start + count - 1].micro_batch}"
    for period in range(2, MAX_PERIOD + 1):
        count = _repeats(actions, start, period, 1)
        if count > 1 and count * period > length:
            body = " ".join(_word(a) for a in actions[start : start + period])
            length, text = count * period, f"({body})*{count}"
    return length, text


def _repeats(actions: Sequence[Action], start: int, period: int, direction: int) -> int:
    """How often the actions from `start` repeat, every micro-batch number one higher (or lower) each time."""
    if any(a.micro_batch < 0 for a in actions[start : start + period]):
        return 1
    position = start + period
    while position < len(actions):
        this, model = actions[position], actions[start + (position - start) % period]
        shift = direction * ((position - start) // period)
        if this != Action(model.kind, model.stage, model.micro_batch + shift):
            break
        position += 1
    return (position - start) // period


def _word(action: Action) -> str:
    return str(action)


def decode(line: str) -> tuple[Action, ...]:
    """The actions that a line stands for.

    Raises:
        PlanError: the line does not follow the grammar.
    """
    actions: list[Action] = []
    position = 0
    text = line.rstrip()
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            raise PlanError(f"cannot read actions at {text[position : position + 20]!r}", hint=_GRAMMAR)
        if item[1] is None:
            actions.extend(_read_word(item[3]))
        else:
            body = [a for word in item[1].split() for a in _read_word(word)]
            _refuse_endless(len(actions) + len(body) * int(item[2]))
            for i in range(int(item[2])):
                actions.extend(Action(a.kind, a.stage, a.micro_batch + i) for a in body)
        position = item.end()
    return tuple(actions)


def _read_word(word: str) -> list[Action]:
    match = _WORD.fullmatch(word)
    if match is None or match[1] not in set(ActionKind):
        raise PlanError(f"cannot read action {word!r}", hint=_GRAMMAR)
    kind, stage = ActionKind(match[1]), int(match[2])
    if (match[3] is None) != (kind in (ActionKind.SYNC, ActionKind.UPDATE)):
        raise PlanError(f"cannot read action {word!r}", hint="F, B, I and W name a micro-batch; S and U do not")
    if match[3] is None:
        return [Action(kind, stage)]
    low, high = int(match[3]), int(match[4] or match[3])
    _refuse_endless(abs(high - low))
    step = 1 if high >= low else -1
    return [Action(kind, stage, number) for number in range(low, high + step, step)]


def _refuse_endless(count: int) -> None:
    if count > MAX_ACTIONS:
        raise PlanError(f"a line stands for {count} actions", hint=f"at most {MAX_ACTIONS} can be read")

"""The actions of all ranks as text: `F0.0-2 (F0.3 B0.0)*13 B0.13-15 S0 U0`, and back; equal ranks share a line.

A word is kind and stage, then where there is one: `.` micro-batch (of S, G and U: number of the exchange or update),
`/` part of the micro-batch, `@` version of the weights that is read, `>` how many ranks further on the rank is that
keeps what is evicted; `+` in front of it when it runs together with the action before. `F0.0-2` counts up (or down).

`(...)*n` repeats n times, each time with micro-batches and the numbers of exchanges and updates one higher and the same
versions. Other steps follow the count: `(...)*n+4s1u4v4` has micro-batches four higher each time, exchanges (s) one,
updates (u) four, versions (v) four. `[...]`, once in a line, with steps behind it, is what repeats for as long as
training goes on; what stands after it drains the pipeline.

Numbers count the rank's own micro-batches: number k stands for micro-batch `first + step * k`, so that all replicas of
a stage share a line.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.errors import PlanError
from planner.schedules import Action, ActionKind

MAX_PERIOD = 512
"""Longest loop body that `encode` tries."""

MAX_ACTIONS = 2_000_000
"""Limit on the actions of a line; longer ones are refused."""

_GRAMMAR = "words look like F0.3, F0.0-7, S0 or (F0.4 B0.0)*12"
_STEPS = r"(?:([+-][0-9]+))?(?:s(-?[0-9]+))?(?:u(-?[0-9]+))?(?:v(-?[0-9]+))?"
_ITEM = re.compile(
    rf"\s*(?:(\()|(\[)|\)\*([0-9]+){_STEPS}(?=[\s)\]]|$)|(\]){_STEPS}(?=\s|$)|([^\s()\[\]]+)(?=[\s)\]]|$))"
)
WORD = re.compile(r"(\+?)([A-Z]+)([0-9]+)(?:\.([0-9]+)(?:-([0-9]+))?)?(?:/([0-9]+))?(?:@([0-9]+))?(?:>([+-][0-9]+))?")
_COMPUTE, _EXCHANGE, _UPDATE = range(3)
_CHANNEL = {
    **dict.fromkeys(ActionKind, _COMPUTE),
    ActionKind.SYNC: _EXCHANGE,
    ActionKind.LAUNCH_SYNC: _EXCHANGE,
    ActionKind.UPDATE: _UPDATE,
}


class Steps(NamedTuple):
    """By how much the numbers rise from one repetition to the next."""

    micro_batch: int = 1
    exchange: int = 1
    update: int = 1
    version: int = 0

    def __str__(self) -> str:
        text = "" if self.micro_batch == 1 else f"{self.micro_batch:+d}"
        named = (("s", self.exchange, 1), ("u", self.update, 1), ("v", self.version, 0))
        return text + "".join(f"{name}{value}" for name, value, usual in named if value != usual)


class Steady(NamedTuple):
    """The part of a list of actions, `start` to `stop`, that repeats as long as training goes on."""

    start: int
    stop: int
    steps: Steps


def raised(action: Action, steps: Steps, times: int) -> Action:
    """The action some repetitions later.

    Raises:
        PlanError: a number falls below 0.
    """
    number = action.micro_batch + times * steps[_CHANNEL[action.kind]] if action.micro_batch >= 0 else -1
    version = action.version + times * steps.version if action.version >= 0 else -1
    if (number < 0) != (action.micro_batch < 0) or (version < 0) != (action.version < 0):
        raise PlanError(f"{action} repeated goes below 0", hint=_GRAMMAR)
    return action._replace(micro_batch=number, version=version)


def steps_between(actions: Sequence[Action], later: Sequence[Action]) -> Steps:
    """By how much numbers rise from some actions to those a repetition later; the first of each kind counts."""
    steps = list(Steps())
    for now, then in reversed(list(zip(actions, later, strict=False))):
        if now.micro_batch >= 0:
            steps[_CHANNEL[now.kind]] = then.micro_batch - now.micro_batch
        if now.version >= 0:
            steps[-1] = then.version - now.version
    return Steps(*steps)


def encode(actions: Sequence[Action], *, rank: int = 0, steady: Steady | None = None) -> str:
    """One line for the actions of a rank; `decode` gives them back. About O(actions), see `MAX_PERIOD`."""
    text = _LineWriter(actions, rank)
    if steady is None:
        return " ".join(text.words(0, len(actions)))
    body = " ".join(text.words(steady.start, steady.stop))
    before, after = text.words(0, steady.start), text.words(steady.stop, len(actions))
    return " ".join([*before, f"[{body}]{steady.steps}", *after])


class _LineWriter:
    """Writes the actions of a rank as text, the shortest that a greedy search finds."""

    def __init__(self, actions: Sequence[Action], rank: int) -> None:
        self._actions, self._rank = actions, rank
        known: dict[tuple[object, ...], int] = {}
        self._heads = [
            known.setdefault((a.kind, a.stage, a.part, a.peer, a.paired, a.micro_batch < 0, a.version < 0), len(known))
            for a in actions
        ]

    def words(self, start: int, stop: int) -> list[str]:
        """The words for the actions from `start` to `stop`."""
        words = []
        while start < stop:
            length, text = self._item(start, stop)
            words.append(text)
            start += length
        return words

    def _item(self, start: int, stop: int) -> tuple[int, str]:
        """Actions and text of the word that covers the most from `start`; at a tie the one with the shortest body."""
        covered, period, best_steps, heads = 1, 0, Steps(), self._heads
        longest = min(MAX_PERIOD, (stop - start) // 2)
        for p in (p for p in range(1, longest + 1) if heads[start + p] == heads[start]):
            last = start + max(2, covered // p + 1) * p - 1  # of the fewest actions that make a better item
            if last >= stop or heads[last] != heads[last - p]:
                continue
            if heads[start : start + p] != heads[start + p : start + 2 * p]:
                continue
            steps = steps_between(self._actions[start : start + p], self._actions[start + p : start + 2 * p])
            matching = 0
            while start + matching < stop - p and self._recurs(start + matching, p, steps):
                matching += 1
            candidate = (1 + matching // p) * p
            if candidate > max(covered, p):
                covered, period, best_steps = candidate, p, steps
        if not period:
            return 1, self._word(start)
        count = covered // period
        straight = best_steps.version == 0 and abs(best_steps.micro_batch) == 1
        first, last_covered = self._actions[start], self._actions[start + covered - 1]
        if period == 1 and straight and _CHANNEL[first.kind] == _COMPUTE and first.micro_batch >= 0:
            return covered, self._word(start, f"-{last_covered.micro_batch}")
        return covered, f"({' '.join(self.words(start, start + period))})*{count}{best_steps}"

    def _word(self, at: int, more: str = "") -> str:
        """The word of one action; `more` follows its number."""
        action = self._actions[at]
        number = f".{action.micro_batch}{more}" if action.micro_batch >= 0 else ""
        return action.spelled(number, f">{action.peer - self._rank:+d}" if action.peer >= 0 else "")

    def _recurs(self, at: int, period: int, steps: Steps) -> bool:
        """True if the action a period later is this one, raised by the steps."""
        now, later = self._actions[at], self._actions[at + period]
        rise = steps[_CHANNEL[now.kind]] if now.micro_batch >= 0 else 0
        aging = steps.version if now.version >= 0 else 0
        same_numbers = later.micro_batch - now.micro_batch == rise and later.version - now.version == aging
        return same_numbers and self._heads[at] == self._heads[at + period]


def decode(line: str, *, rank: int = 0, times: int = 1) -> tuple[Action, ...]:
    """The actions of a rank that a line stands for.

    Args:
        line: the text.
        rank: whose order it is.
        times: repetitions of the part in brackets.

    Raises:
        PlanError: the line does not follow the grammar.
    """
    return _decoded(line, times, rank if ">" in line else 0)


@functools.lru_cache(maxsize=512)
def _decoded(line: str, times: int, rank: int) -> tuple[Action, ...]:
    """See `decode`."""
    stack: list[list[Action]] = [[]]
    opened: list[str] = []
    tail: tuple[Steps, int] | None = None
    position, text = 0, line.rstrip()
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            raise PlanError(f"cannot read actions at {text[position : position + 20]!r}", hint=_GRAMMAR)
        if item[1] or item[2]:
            _refuse(bool(item[2]) and (bool(opened) or tail is not None), "brackets stand once and outside of loops")
            opened.append("(" if item[1] else "[")
            stack.append([])
        elif item[13]:
            stack[-1] += _read_word(item[13], rank)
        else:
            _refuse(not opened or opened.pop() != ("(" if item[3] else "["), f"{item[0].strip()!r} closes nothing")
            body = stack.pop()
            steps = _steps_of(item.groups()[3:7] if item[3] else item.groups()[8:12])
            count = int(item[3]) if item[3] else times
            _refuse_endless(len(stack[-1]) + len(body) * count)
            stack[-1] += [raised(action, steps, i) for i in range(count) for action in body]
            if not item[3]:
                tail = steps, len(stack[-1])
        position = item.end()
    _refuse(bool(opened), "a parenthesis is not closed")
    expanded = stack[0]
    if tail is not None and times != 1:
        steps, start = tail
        expanded[start:] = [raised(action, steps, times - 1) for action in expanded[start:]]
    _refuse_endless(len(expanded))
    return tuple(expanded)


def _steps_of(groups: Iterable[str | None]) -> Steps:
    return Steps(*(usual if text is None else int(text) for text, usual in zip(groups, Steps(), strict=True)))


def _read_word(word: str, rank: int) -> list[Action]:
    match = WORD.fullmatch(word)
    if match is None or match[2] not in set(ActionKind):
        raise PlanError(f"cannot read action {word!r}", hint=_GRAMMAR)
    kind, stage = ActionKind(match[2]), int(match[3])
    if match[4] is None and _CHANNEL[kind] == _COMPUTE:
        raise PlanError(f"cannot read action {word!r}", hint="all but S, G and U name a micro-batch")
    part, version = (-1 if text is None else int(text) for text in (match[6], match[7]))
    peer = -1 if match[8] is None else rank + int(match[8])
    if match[8] is not None and peer < 0:
        raise PlanError(f"{word} evicts to rank {peer}", hint="name another rank, or none for the host")
    low = -1 if match[4] is None else int(match[4])
    high = low if match[5] is None else int(match[5])
    _refuse_endless(abs(high - low))
    step = 1 if high >= low else -1
    return [Action(kind, stage, m, part, version, peer, bool(match[1])) for m in range(low, high + step, step)]


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise PlanError(message, hint=_GRAMMAR)


def _refuse_endless(count: int) -> None:
    if count > MAX_ACTIONS:
        raise PlanError(f"a line stands for {count} actions", hint=f"at most {MAX_ACTIONS} can be read")


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
        """The line of copy `copy`, where copies take micro-batches in turn."""
        return Line(self.first * copies + copy, self.gap * copies, self.actions)


def encode_line(actions: Sequence[Action], *, rank: int = 0, steady: Steady | None = None) -> Line:
    """The actions of a rank with numbers of its own; `steady` is the part that repeats as long as training goes on."""
    numbers = sorted({_number(a) for a in actions if _number(a) >= 0})
    first = numbers[0] if numbers else 0
    gap = math.gcd(*(n - first for n in numbers), steady.steps.micro_batch if steady else 0)
    step = gap or 1
    renumbered = [_renumbered(a, (_number(a) - first) // step) if _number(a) >= 0 else a for a in actions]
    if steady:
        steady = steady._replace(steps=steady.steps._replace(micro_batch=steady.steps.micro_batch // step))
    return Line(first, gap, encode(renumbered, rank=rank, steady=steady))


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
    return action._replace(micro_batch=micro_batch)

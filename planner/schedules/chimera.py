"""Chimera: pipelines in both directions through the same workers, one filling the bubbles of the other.

2f pipelines of D stages, D / 2f micro-batches in each at a time, shifted so that no two want a worker at once (Li and
Hoefler, SC 2021). For N = D the bubble is (D/f - 2) / (2N + D/f - 2) when B = F, and for f = 1 (D-2) / (3N/2 + D-2)
when B = 2F. Each worker holds 2f stages; worker w keeps min(D, D/2 + 1 + min(w, D-1-w)) micro-batches (f = 1).

More micro-batches than D (`over`):
- concat: unit after unit; for B = 2F and N = K D the time is exactly 3N + (K+1)(D-2), as each joint leaves a bubble;
- double: forwards of two micro-batches at a time equal a backward, twice the activations: 3N + 2(D-2) for N = 2 K D;
- halve: the same with backwards of half a micro-batch each: 3N + (D-2) for N = K D.

A stage's gradients are exchanged between the workers that hold it. `eager` launches that as soon as a worker has done
its last backward of the stage, where a bubble follows on that worker (with doubled forwards, where work follows); the
others wait for the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from planner.schedules import SCHEDULES
from planner.schedules._bidirectional import Lines, dealt, doubled, slotted
from planner.schedules._chains import Flow
from planner.schedules._defaults import Facts, finish
from planner.schedules._families import BothWays
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline


class Over(StrEnum):
    """What to do with more micro-batches than stages."""

    CONCAT = "concat"
    DOUBLE = "double"
    HALVE = "halve"


@dataclass(frozen=True, slots=True)
class Chimera(BothWays):
    """Bidirectional pipelines.

    Attributes:
        pairs: f, pairs of pipelines in opposite directions; divides D / 2.
        over: what to do with more micro-batches than stages.
        eager: launch the exchange of gradients in bubbles.
    """

    pairs: int = 1
    over: Over = Over.CONCAT
    eager: bool = True

    key = "chimera"
    facts = Facts(
        decides="2f pipelines in two directions; pairs, over, eager",
        bubble="(p/f-2)/(2m+p/f-2) for B=F, m=p",
        memory="p/2+1 to p micro-batches, 2f stages' weights",
        staleness="0",
        source="Li and Hoefler, SC 2021",
    )

    @property
    def activation_unit(self) -> ActivationUnit:
        """Half a micro-batch where backwards are halved."""
        return ActivationUnit.SUB_SEQUENCE if self.over is Over.HALVE else ActivationUnit.MICRO_BATCH

    def refuses(self, pipeline: Pipeline) -> str:
        """An odd number of stages, pairs that do not divide half of it, an odd number of doubled micro-batches."""
        if pipeline.stages % 2:
            return f"{self.key} needs an even number of stages, not {pipeline.stages}"
        if self.pairs < 1 or pipeline.stages // 2 % self.pairs:
            return f"{self.pairs} pairs of pipelines do not divide half of {pipeline.stages} stages"
        if self.over is Over.DOUBLE and pipeline.micro_batches % 2:
            return f"{pipeline.micro_batches} micro-batches do not make pairs"
        return ""

    @property
    def launches(self) -> bool:
        """Where it is eager."""
        return self.eager

    @property
    def parts(self) -> int:
        """Two where backwards are halved."""
        return 2 if self.over is Over.HALVE else 1

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """1, 2 and 4 pairs; forwards of two micro-batches at a time where little is kept of each."""
        return ({}, {"pairs": 2}, {"pairs": 4}, *([{"over": Over.DOUBLE}] if recompute else []))

    def worthwhile(self, workers: int, micro_batches: int) -> bool:
        """Doubling is for more micro-batches than stages."""
        return self.over is Over.CONCAT or micro_batches > workers

    def lines(self, pipeline: Pipeline) -> Lines:
        """2f pipelines."""
        return Lines(pipeline.stages, self.pairs)

    def dealt(self, pipeline: Pipeline) -> Sequence[int]:
        """Unit after unit, the last as evenly as can be; in turn with doubled forwards."""
        lines, count = self.lines(pipeline), pipeline.micro_batches
        if self.over is Over.CONCAT:
            units, rest = divmod(count, pipeline.stages)
            return [units * (pipeline.stages // lines.count) + more for more in dealt(rest, lines.count)]
        each = 2 if self.over is Over.DOUBLE else 1
        return [each * units for units in dealt(count // each, lines.count)]

    def few(self, pipeline: Pipeline) -> Pipeline:
        """Two units and what is left over, when they come one after another; else as many units as can be under way,
        D / 2f in each of 2f pipelines."""
        most = 2 * pipeline.stages + pipeline.micro_batches % pipeline.stages
        if self.over is not Over.CONCAT:
            most = pipeline.stages * (2 if self.over is Over.DOUBLE else 1)
        return Pipeline(pipeline.replicas, min(most, pipeline.micro_batches))

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """(p/f - 2)(B + (K - 1)(B - F)) for K units; doubled (p - 2) B, halved (p - 2) B / 2, both for B = 2F.

        With m < p micro-batches (p - m)(F + B) + 2B (ceil(m / 2f) - 1).
        """
        waits, count = max(pipeline.stages // self.pairs - 2, 0), pipeline.micro_batches
        if self.over is not Over.CONCAT:
            return (pipeline.stages - 2) * backward_s / self.parts
        if count < pipeline.stages:
            rounds = -(-count // (2 * self.pairs)) - 1
            return (pipeline.stages - count) * (forward_s + backward_s) + 2 * rounds * backward_s
        units = -(-count // pipeline.stages)
        return waits * (backward_s + (units - 1) * max(backward_s - forward_s, 0))

    def flow(self, pipeline: Pipeline) -> Flow:
        """Forwards of two micro-batches at a time where they are doubled, backwards of half where they are halved."""
        double, flow = 1 + (self.over is Over.DOUBLE), BothWays.flow(self, pipeline)
        return replace(flow, forward_step=double, backward_step=1 / self.parts)

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of all workers; stage s runs on each worker that has it, for different micro-batches."""
        lines = self.lines(pipeline)
        if self.over is Over.CONCAT:
            return tuple(tuple(self._closed(own)) for own in slotted(lines, pipeline.micro_batches))
        halves = self.over is Over.HALVE
        units = pipeline.micro_batches if halves else pipeline.micro_batches // 2
        return tuple((*self._launched(own), *finish(_stages(own))) for own in doubled(lines, units, halves))

    def _launched(self, own: Sequence[Action]) -> Iterator[Action]:
        """A worker's order with the exchange of each stage launched after its last backward, when it goes on."""
        last = {action.stage: at for at, action in enumerate(own) if action.kind is ActionKind.BACKWARD}
        for at, action in enumerate(own):
            yield action
            if self.eager and last[action.stage] == at < len(own) - 1:
                yield Action(ActionKind.LAUNCH_SYNC, action.stage)

    def _closed(self, own: Sequence[tuple[int, Action]]) -> Iterator[Action]:
        """A worker's order with its exchanges: launched after a stage's last backward where a free slot follows."""
        end = own[-1][0] if own else 0
        last = {action.stage: slot for slot, action in own if action.kind is ActionKind.BACKWARD}
        taken = [slot for slot, _ in own]
        for slot, action in own:
            yield action
            done = action.kind is ActionKind.BACKWARD and last[action.stage] == slot
            if done and self.eager and end - slot > sum(1 for other in taken if other > slot):
                yield Action(ActionKind.LAUNCH_SYNC, action.stage)
        yield from finish(_stages(action for _, action in own))


def _stages(actions: Iterable[Action]) -> list[int]:
    return sorted({action.stage for action in actions})


def critical_passes(stages: int, micro_batches: int) -> tuple[int, int]:
    """Forwards and backwards on the longest chain for N = D: C_f = N and C_b = N + D - 2."""
    return micro_batches, micro_batches + stages - 2


SCHEDULES.register("chimera", Chimera())

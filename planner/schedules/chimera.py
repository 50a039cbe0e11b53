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
from planner.schedules.bidirectional import BothWays, Lines, dealt, doubled, slotted
from planner.schedules.critical_chains import Flow
from planner.schedules.facts import Facts
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
        source="Li and Hoefler, SC 2021",
        kept="2*p if doubled or halved else p-p/(2*pairs)+1+min(i % (p/pairs), p/pairs-1-i % (p/pairs))",
        kept_bound=True,
        kept_note="for m >= p, with 2 pairs stages' weights",
        idle="(p-2)*B/2 if halved else (p-2)*B if doubled else "
        "(p-m)*(F+B)+2*(ceil(m/(2*pairs))-1)*B if m < p else max(p/pairs-2, 0)*(B+(ceil(m/p)-1)*max(B-F, 0))",
        idle_holds="B == 2*F and m % (2*p if doubled else p) == 0 and pairs < 2 if doubled or halved else "
        "F <= B and (m <= p or m % p == 0)",
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

    def terms(self, pipeline: Pipeline) -> dict[str, Any]:
        """With `doubled` and `halved`: 1 by that choice for more micro-batches than stages, else 0."""
        choice = {"doubled": int(self.over is Over.DOUBLE), "halved": int(self.over is Over.HALVE)}
        return {**BothWays.terms(self, pipeline), **choice}

    def flow(self, pipeline: Pipeline) -> Flow:
        """Forwards of two micro-batches at a time where they are doubled, backwards of half where they are halved."""
        double, flow = 1 + (self.over is Over.DOUBLE), BothWays.flow(self, pipeline)
        return replace(flow, forward_step=double, backward_step=1 / self.parts)

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """The orders of all workers; stage s runs on each worker that has it, for different micro-batches."""
        lines = self.lines(pipeline)
        if self.over is Over.CONCAT:
            return map(self._closed, slotted(lines, pipeline.micro_batches))
        halves = self.over is Over.HALVE
        units = pipeline.micro_batches if halves else pipeline.micro_batches // 2
        return map(self._launched, doubled(lines, units, halves))

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


SCHEDULES.register("chimera", Chimera())

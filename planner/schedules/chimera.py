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
from dataclasses import dataclass
from enum import StrEnum

from planner.schedules import SCHEDULES
from planner.schedules._bidirectional import Lines, doubled, slotted
from planner.schedules._defaults import Defaults, Facts, dealt, finish, follow_on
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, Work


class Over(StrEnum):
    """What to do with more micro-batches than stages."""

    CONCAT = "concat"
    DOUBLE = "double"
    HALVE = "halve"


@dataclass(frozen=True, slots=True)
class Chimera(Defaults):
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

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of all workers; stage s runs on each worker that has it, for different micro-batches."""
        lines = Lines(pipeline.stages, self.pairs)
        if self.over is Over.CONCAT:
            return tuple(tuple(self._closed(own)) for own in slotted(lines, pipeline.micro_batches))
        halves = self.over is Over.HALVE
        units = pipeline.micro_batches if halves else pipeline.micro_batches // 2
        return tuple((*self._launched(own), *finish(_stages(own))) for own in doubled(lines, units, halves))

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders, with two parts to a micro-batch where backwards are halved."""
        orders = follow_on(self.order(pipeline), pipeline.micro_batches, iterations)
        return Work(orders, parts=2 if self.over is Over.HALVE else 1)

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

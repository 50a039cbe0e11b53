"""Seq1F1B: 1F1B over sub-sequences, so that the pipeline fills in steps of 1/k of a micro-batch.

A micro-batch's k sub-sequences go forward in order and backward in reverse, as causal attention wants. Stage i keeps
p - 1 - i + k of them, (p - 1 - i + k) / k micro-batches; the bubble for sub-sequences of equal cost is (p-1)/(km+p-1)
(Sun et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import Flow
from planner.schedules.facts import Facts
from planner.schedules.schedule import Dealt, Line
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, Work


@dataclass(frozen=True, slots=True)
class Seq1F1B(Line, Dealt):
    """1F1B over sub-sequences.

    Attributes:
        splits: k, sub-sequences of a micro-batch.
    """

    splits: int = 2

    key = "seq1f1b"
    facts = Facts(
        decides="1F1B over k sub-sequences of a micro-batch; splits",
        source="Sun et al., 2024",
        kept="min(m*splits, p-1-i+splits)",
        idle="(p-1)*(F+B)/splits",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Fewer than one sub-sequence."""
        return "" if self.splits >= 1 else f"{self.splits} sub-sequences make no micro-batch"

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """2, 4 and 8 sub-sequences."""
        return ({}, {"splits": 4}, {"splits": 8})

    activation_unit = ActivationUnit.SUB_SEQUENCE

    @property
    def parts(self) -> int:
        """k."""
        return self.splits

    def flow(self, pipeline: Pipeline) -> Flow:
        """A sub-sequence at a time."""
        return replace(Line.flow(self, pipeline), forward_step=1 / self.splits, backward_step=1 / self.splits)

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Warm-up, alternation, drain of each stage."""
        kept = self.in_flight(pipeline)
        return (self._stage(stage, pipeline.micro_batches, kept[stage]) for stage in range(pipeline.stages))

    def _stage(self, stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
        total, parts = micro_batches * self.splits, self.splits

        def part(number: int) -> int:
            return number if parts > 1 else -1

        for unit in range(total + ahead - 1):
            if unit < total:
                yield Action(ActionKind.FORWARD, stage, unit // parts, part=part(unit % parts))
            done = unit - ahead + 1
            if done >= 0:
                yield Action(ActionKind.BACKWARD, stage, done // parts, part=part(parts - 1 - done % parts))

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders over sub-sequences, each of which needs those before it."""
        work = Line.work(self, pipeline, iterations)
        return replace(work, causal=self.splits > 1)


SCHEDULES.register("seq1f1b", Seq1F1B())

"""PipeDream: 1F1B without a flush; each micro-batch keeps the weights of its forward for its backward.

A stage updates after every backward (replicas after every round, together). Stage i of p then holds p - i versions, its
gradients are p - 1 - i updates old, and no worker waits once the pipeline is full (Narayanan et al., SOSP 2019).

The pipeline takes in NOAM = ceil(workers / replicas of the first stage) micro-batches for each replica of the first
stage; stage i, with R(i) workers from it to the end, ceil(R(i) / r(i)). With `paced` a stage that feeds a wider one
takes in more, so that nobody starves (see 1F1B). Micro-batches are dealt round-robin, and a backward runs where its
forward ran. With `vertical` every stage uses the version that the first stage had when the micro-batch entered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import Flowing
from planner.schedules._flows import flowing, own_micro_batches, update_every
from planner.schedules._lines import least_warm_up, paced_warm_up
from planner.schedules.types import Action, Pipeline, WeightPolicy


@dataclass(frozen=True, slots=True)
class PipeDream(Flowing):
    """1F1B with weight stashing.

    Attributes:
        vertical: vertical synchronisation.
        paced: a warm-up that keeps wider stages fed, instead of NOAM.
    """

    vertical: bool = False
    paced: bool = False

    key = "pipedream"
    facts = Facts(
        decides="1F1B without flush, update after each backward; vertical, paced",
        bubble="0 when full",
        memory="p-i micro-batches and p-i weight versions at stage i (p with vertical)",
        staleness="p-1-i updates at stage i (p-1 with vertical)",
        source="Narayanan et al., SOSP 2019",
    )

    @property
    def weight_policy(self) -> WeightPolicy:
        """Weight stashing, or vertical synchronisation."""
        return WeightPolicy.VERTICAL if self.vertical else WeightPolicy.STASH

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication; vertical synchronisation equal replicas."""
        if self.vertical and len(set(pipeline.replicas)) > 1:
            return f"vertical synchronisation needs equal replicas, not {pipeline.replicas}"
        return ""

    def warm_up(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Micro-batches that a replica of each stage takes in before its first backward; the first is NOAM."""
        return (paced_warm_up if self.paced else least_warm_up)(pipeline.replicas)

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One for each micro-batch under way; with vertical synchronisation as many as at the first stage."""
        kept = self.warm_up(pipeline)
        return (kept[0],) * pipeline.stages if self.vertical else kept

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Updates of a stage while a micro-batch is under way there."""
        return tuple(versions - 1 for versions in self.weight_versions(pipeline))

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: one for each replica."""
        return math.lcm(*pipeline.replicas)

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """After each micro-batch of a replica, the replicas together."""
        return tuple(pipeline.micro_batches // count for count in pipeline.replicas)

    def lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """1F1B with an update after each backward."""
        forwards = self.warm_up(pipeline)
        ahead = forwards[0] if self.vertical else forwards[stage]
        own = own_micro_batches(pipeline, stage, replica, iterations)
        update = update_every(stage, pipeline.replicas[stage], 1)
        return flowing(stage, own, forwards[stage], lambda j: max(0, j - ahead + 1), update)


SCHEDULES.register("pipedream", PipeDream())

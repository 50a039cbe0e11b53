"""HetPipe: a virtual worker runs a pipeline of Nm concurrent mini-batches; waves of Nm are exchanged between them.

Each replica of the line is one virtual worker. A mini-batch reads, at every stage, the weights that the virtual worker
had when it entered: those with all its updates but the last Nm - 1 (s_local). After Nm mini-batches, a wave, the
aggregated update is pushed; before the last mini-batch of wave c a worker waits until all have pushed wave c - 1 - D, D
being the clock distance, so that it misses at most s_global = (D+1)(s_local+1) + s_local - 1 updates of the others
(Park et al., ATC 2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.schedules import SCHEDULES
from planner.schedules._chains import PassSeconds
from planner.schedules._defaults import Facts
from planner.schedules._families import Flowing
from planner.schedules._flows import flowing, own_micro_batches
from planner.schedules.types import Action, ActionKind, Pipeline, WeightPolicy


@dataclass(frozen=True, slots=True)
class HetPipe(Flowing):
    """Waves with bounded distance.

    Attributes:
        concurrent: Nm, mini-batches under way in a virtual worker; 0: as many as it has stages.
        distance: D, waves by which a virtual worker may run ahead of the slowest.
    """

    concurrent: int = 0
    distance: int = 0

    key = "hetpipe"
    policy = WeightPolicy.VERTICAL
    facts = Facts(
        decides="waves of Nm mini-batches, clock distance D; concurrent, distance",
        bubble="0 when full and Nm >= p",
        memory="min(Nm, p-i) mini-batches (Nm-i where Nm > p) and Nm weight versions",
        staleness="Nm-1 updates of its own, (D+1)Nm+Nm-2 of others",
        source="Park et al., ATC 2020",
    )

    @property
    def launches(self) -> bool:
        """After each wave."""
        return True

    def refuses(self, pipeline: Pipeline) -> str:
        """A count or distance below 0; micro-batches that do not make waves."""
        if self.concurrent < 0 or self.distance < 0:
            return f"{self.concurrent} concurrent mini-batches at distance {self.distance} make no wave"
        wave = self.wave(pipeline)
        if pipeline.micro_batches % wave:
            return f"{pipeline.micro_batches} mini-batches of a virtual worker do not make waves of {wave}"
        return ""

    def wave(self, pipeline: Pipeline) -> int:
        """Mini-batches of a wave, Nm."""
        return self.concurrent or pipeline.stages

    def warm_up(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Mini-batches that each stage takes in before its first backward."""
        wave, stages = self.wave(pipeline), pipeline.stages
        return tuple(wave - i if wave > stages else min(wave, stages - i) for i in range(stages))

    @property
    def clock_distance(self) -> int | None:
        """D."""
        return self.distance

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Nm at every stage."""
        return (self.wave(pipeline),) * pipeline.stages

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """s_local at every stage."""
        return (self.wave(pipeline) - 1,) * pipeline.stages

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: a wave on each replica."""
        return self.wave(pipeline) * pipeline.replicas[0]

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Once a wave of each virtual worker."""
        return (pipeline.micro_batches // pipeline.replicas[0] // self.wave(pipeline),) * pipeline.stages

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """The work of the busiest worker in an iteration; waves are exchanged beside it."""
        return Flowing.chain_s(self, pipeline, replace(times, tail=[0.0] * pipeline.stages))

    def lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """1F1B with an update after each backward, an exchange after each wave."""
        forwards = self.warm_up(pipeline)[stage]
        wave, own = self.wave(pipeline), own_micro_batches(pipeline, stage, replica, iterations)

        def before(j: int) -> Iterator[Action]:
            pulled = (j + 1) // wave - 2 - self.distance
            if (j + 1) % wave == 0 and pulled >= 0:
                yield Action(ActionKind.SYNC, stage, pulled)

        def follow(j: int) -> Iterator[Action]:
            yield Action(ActionKind.UPDATE, stage, j)
            if (j + 1) % wave == 0:
                yield Action(ActionKind.LAUNCH_SYNC, stage, j // wave)

        return flowing(stage, own, forwards, lambda j: max(0, j - wave + 1), follow, before)


def local_staleness(concurrent: int) -> int:
    """s_local = Nm - 1."""
    return concurrent - 1


def global_staleness(concurrent: int, distance: int) -> int:
    """s_global = (D+1)(s_local+1) + s_local - 1."""
    return (distance + 1) * concurrent + local_staleness(concurrent) - 1


SCHEDULES.register("hetpipe", HetPipe())

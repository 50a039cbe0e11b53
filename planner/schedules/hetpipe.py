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
from planner.schedules._defaults import Defaults, Facts, require
from planner.schedules._flows import flowing, own_micro_batches
from planner.schedules.types import Action, ActionKind, Pipeline, WeightPolicy, Work


@dataclass(frozen=True, slots=True)
class HetPipe(Defaults):
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

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The warm-up of each stage."""
        return self.warm_up(pipeline)

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The same by worker."""
        return tuple(k for k in self.warm_up(pipeline) for _ in range(pipeline.replicas[0]))

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Nm at every stage."""
        return (self.wave(pipeline),) * pipeline.stages

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """s_local at every stage."""
        return (self.wave(pipeline) - 1,) * pipeline.stages

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: a wave on each replica."""
        own = replace(pipeline, replicas=(1,) * pipeline.stages)
        return self.wave(own) * pipeline.replicas[0]

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """One iteration, from an empty pipeline to an empty one."""
        return self.work(pipeline).lanes

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """Some iterations without draining in between."""
        require(self, pipeline)
        forwards = self.warm_up(pipeline)
        return Work(
            tuple(
                tuple(self._lane(pipeline, stage, replica, forwards[stage], iterations))
                for stage, replica in pipeline.workers()
            ),
            versions=self.weight_versions(pipeline),
        )

    def _lane(self, pipeline: Pipeline, stage: int, replica: int, forwards: int, iterations: int) -> Iterator[Action]:
        wave, own = self.wave(pipeline), own_micro_batches(pipeline, stage, replica, iterations)

        def before(j: int) -> Iterator[Action]:
            pulled = (j + 1) // wave - 2 - self.distance
            if (j + 1) % wave == 0 and pulled >= 0:
                yield Action(ActionKind.SYNC, stage, pulled)

        def follow(j: int) -> Iterator[Action]:
            yield Action(ActionKind.UPDATE, stage, j)
            if (j + 1) % wave == 0:
                yield Action(ActionKind.LAUNCH_SYNC, stage, j // wave)

        yield from flowing(stage, own, forwards, lambda j: max(0, j - wave + 1), follow, before)


def local_staleness(concurrent: int) -> int:
    """s_local = Nm - 1."""
    return concurrent - 1


def global_staleness(concurrent: int, distance: int) -> int:
    """s_global = (D+1)(s_local+1) + s_local - 1."""
    return (distance + 1) * concurrent + local_staleness(concurrent) - 1


SCHEDULES.register("hetpipe", HetPipe())

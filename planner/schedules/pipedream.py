"""Schedules that never drain and keep several weight versions: PipeDream, PipeDream-2BW and HetPipe.

A worker warms up and then alternates backwards and forwards, with updates in between; each action names the weight
version that it reads. No worker waits once the pipeline is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Protocol

from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import PassSeconds
from planner.schedules.draining import least_warm_up, paced_warm_up
from planner.schedules.orders import in_turn
from planner.schedules.schedule import Schedule, require
from planner.schedules.types import Action, ActionKind, Facts, Pipeline, WeightPolicy, Work

NEWEST = -1


class ContinuousSchedule(Schedule, Protocol):
    """A schedule that updates without a flush, so that no worker waits once the pipeline is full.

    `in_flight` is also the warm-up of a replica, since a run always has enough micro-batches.
    """

    __slots__ = ()

    updates_each: ClassVar[bool] = False
    """True if a stage updates after every round of backwards of its replicas, not once per iteration."""

    def versions_read(self, pipeline: Pipeline, stage: int) -> Callable[[int], int]:
        """The weight version that a replica's j-th micro-batch reads, -1 for the newest."""
        return lambda _: NEWEST

    def before(self, pipeline: Pipeline, stage: int) -> Callable[[int], Iterable[Action]]:
        """Actions before the forward of a replica's j-th micro-batch."""
        return lambda _: ()

    def after(self, pipeline: Pipeline, stage: int) -> Callable[[int], Iterable[Action]]:
        """Actions after its backward: an update after those of an exchange, which replicas have first."""
        count = pipeline.replicas[stage]
        period = pipeline.micro_batches // count // self.exchanges(pipeline)[stage]
        kinds = (ActionKind.SYNC, ActionKind.UPDATE) if count > 1 else (ActionKind.UPDATE,)
        return lambda j: [Action(kind, stage, j // period) for kind in kinds if (j + 1) % period == 0]

    def worker_orders(self, pipeline: Pipeline, iterations: int = 1) -> Iterable[Iterable[Action]]:
        """The order of each worker, exchanges and updates included."""
        return (self._lane(pipeline, stage, replica, iterations) for stage, replica in pipeline.workers())

    def _lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """The order of one worker: a warm-up, alternating backwards and forwards, the remaining backwards."""
        numbered = list(enumerate(pipeline.micro_batches_of(stage, replica, iterations)))
        before, after = self.before(pipeline, stage), self.after(pipeline, stage)
        read = self.versions_read(pipeline, stage)
        forwards = [(*before(j), Action(ActionKind.FORWARD, stage, m, version=read(j))) for j, m in numbered]
        backwards = [(Action(ActionKind.BACKWARD, stage, m, version=read(j)), *after(j)) for j, m in numbered]
        return chain.from_iterable(in_turn(forwards, backwards, self.in_flight(pipeline)[stage]))

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One per micro-batch of a replica, or one per iteration."""
        return tuple(pipeline.micro_batches // count if self.updates_each else 1 for count in pipeline.replicas)

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: one per replica, or those of an iteration."""
        return math.lcm(*pipeline.replicas) if self.updates_each else pipeline.micro_batches

    def exact(self, pipeline: Pipeline) -> bool:
        """False: the closed form counts one update, however many there are."""
        return False

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders of several iterations without draining in between."""
        require(self, pipeline)
        return Work(
            tuple(map(tuple, self.worker_orders(pipeline, iterations))), versions=self.weight_versions(pipeline)
        )


@dataclass(frozen=True, slots=True)
class PipeDream(ContinuousSchedule):
    """PipeDream: 1F1B without a flush; each micro-batch keeps the weights of its forward for its backward.

    A stage updates after every backward (replicas after every round, together). The pipeline takes in NOAM =
    ceil(workers / replicas of the first stage) micro-batches for each replica of the first stage; stage i, with R(i)
    workers from it to the end, ceil(R(i) / r(i)). With `paced` a stage that feeds a wider one takes in more, which
    keeps that one fed (see 1F1B). Micro-batches are dealt round-robin, and a backward runs where its forward ran. With
    `vertical` every stage uses the version that the first stage had when the micro-batch entered.

    Attributes:
        vertical: vertical synchronisation.
        paced: a warm-up that keeps wider stages fed, instead of NOAM.
    """

    vertical: bool = False
    paced: bool = False

    key = "pipedream"
    updates_each = True
    facts = Facts(
        source="Narayanan et al., SOSP 2019",
        kept="p-i",
        idle="0",
        versions="p if vertical else p-i",
        staleness="p-1 if vertical else p-1-i",
    )

    @property
    def weight_policy(self) -> WeightPolicy:
        """Weight stashing, or vertical synchronisation."""
        return WeightPolicy.VERTICAL if self.vertical else WeightPolicy.STASH

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication; with vertical synchronisation only equal replicas."""
        if self.vertical and len(set(pipeline.replicas)) > 1:
            return f"vertical synchronisation needs equal replicas, not {pipeline.replicas}"
        return ""

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Warm-up of a replica of each stage; that of the first stage is NOAM."""
        return (paced_warm_up if self.paced else least_warm_up)(pipeline.replicas)

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One version per micro-batch in flight; with vertical synchronisation as many as at the first stage."""
        kept = self.in_flight(pipeline)
        return (kept[0],) * pipeline.stages if self.vertical else kept

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Updates of a stage while a micro-batch is in flight there: one less than its versions."""
        return tuple(versions - 1 for versions in self.weight_versions(pipeline))

    def versions_read(self, pipeline: Pipeline, stage: int) -> Callable[[int], int]:
        """The newest version at the micro-batch's forward, of this stage or with `vertical` of the first stage."""
        ahead = self.in_flight(pipeline)[0 if self.vertical else stage]
        return lambda j: max(0, j - ahead + 1)


@dataclass(frozen=True, slots=True)
class TwoBufferedWeights(ContinuousSchedule):
    """PipeDream-2BW: 1F1B without a flush, gradients of m micro-batches together, two versions of the weights.

    W(t+1) = W(t) - nu grad f(W(t-1)): the micro-batches of mini-batch t all read version t - 1, at every stage; m must
    be at least p. The released program reads at each forward what is newest there: with `uniform=false` the last stage
    then has no delay, and the others read version t where mini-batch t - 1 was already applied.

    Attributes:
        uniform: all stages read the version before, not each what is newest at the forward.
    """

    uniform: bool = True

    key = "pipedream-2bw"
    facts = Facts(
        source="Narayanan et al., ICML 2021",
        kept="p-i",
        idle="0",
        versions="2",
        staleness="1",
    )

    weight_policy = WeightPolicy.DOUBLE_BUFFER

    def supports(self, pipeline: Pipeline) -> str:
        """Refuses fewer micro-batches per iteration than are in flight at once."""
        for count, forwards in zip(pipeline.replicas, paced_warm_up(pipeline.replicas), strict=True):
            if count * forwards > pipeline.micro_batches:
                return (
                    f"{self.key} needs at least {count * forwards} micro-batches an iteration, "
                    f"as many as are under way, not {pipeline.micro_batches}"
                )
        return ""

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The warm-up of 1F1B."""
        return paced_warm_up(pipeline.replicas)

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Two versions; with `uniform=false` one if nothing is in flight at an update."""
        if self.uniform:
            return (2,) * pipeline.stages
        return tuple(min(2, kept) for kept in self.in_flight(pipeline))

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One update if two versions are kept."""
        return tuple(versions - 1 for versions in self.weight_versions(pipeline))

    def versions_read(self, pipeline: Pipeline, stage: int) -> Callable[[int], int]:
        """The version before that of its mini-batch, or with `uniform=false` the newest at the forward."""
        per_replica, ahead = pipeline.micro_batches // pipeline.replicas[stage], self.in_flight(pipeline)[stage]
        return lambda j: max(0, j // per_replica - 1 if self.uniform else (j - ahead + 1) // per_replica)


@dataclass(frozen=True, slots=True)
class HetPipe(ContinuousSchedule):
    """HetPipe: a virtual worker runs a pipeline of Nm concurrent mini-batches; waves of Nm are exchanged between them.

    Each replica of the line is one virtual worker. A mini-batch reads, at every stage, the weights that the virtual
    worker had when it entered: those with all its updates but the last Nm - 1 (s_local). After Nm mini-batches, a wave,
    the aggregated update is pushed; before the last mini-batch of wave c a worker waits until all have pushed wave
    c - 1 - D, D being the clock distance, so that it misses at most s_global = (D+1)(s_local+1) + s_local - 1 updates
    of the others.

    Attributes:
        concurrent: Nm, mini-batches under way in a virtual worker; 0: as many as it has stages.
        distance: D, waves by which a virtual worker may run ahead of the slowest.
    """

    concurrent: int = 0
    distance: int = 0

    key = "hetpipe"
    facts = Facts(
        source="Park et al., ATC 2020",
        kept="min(concurrent or p, max(concurrent or p, p)-i)",
        idle="0",
        idle_holds="(concurrent or p) >= p",
        versions="concurrent or p",
        staleness="(concurrent or p)-1",
    )

    weight_policy = WeightPolicy.VERTICAL
    launches = True

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses negative options, and micro-batches that do not make whole waves."""
        if self.concurrent < 0 or self.distance < 0:
            return f"{self.concurrent} concurrent mini-batches at distance {self.distance} make no wave"
        wave = self.wave(pipeline)
        if pipeline.micro_batches % wave:
            return f"{pipeline.micro_batches} mini-batches of a virtual worker do not make waves of {wave}"
        return ""

    def wave(self, pipeline: Pipeline) -> int:
        """Mini-batches of a wave, Nm."""
        return self.concurrent or pipeline.stages

    @property
    def clock_distance(self) -> int | None:
        """D."""
        return self.distance

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: one wave on each replica."""
        return self.wave(pipeline) * pipeline.replicas[0]

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One exchange per wave of each virtual worker."""
        return (pipeline.micro_batches // pipeline.replicas[0] // self.wave(pipeline),) * pipeline.stages

    def updates(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One per micro-batch, of the virtual worker's own weights."""
        return (pipeline.micro_batches // pipeline.replicas[0],) * pipeline.stages

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """Work of the busiest worker in an iteration; the exchange of waves overlaps with it."""
        return Schedule.chain_s(self, pipeline, replace(times, tail=[0.0] * pipeline.stages))

    def versions_read(self, pipeline: Pipeline, stage: int) -> Callable[[int], int]:
        """The version that the virtual worker had when the mini-batch entered."""
        wave = self.wave(pipeline)
        return lambda j: max(0, j - wave + 1)

    def before(self, pipeline: Pipeline, stage: int) -> Callable[[int], Iterable[Action]]:
        """The wait for an exchange before the last mini-batch of a wave."""
        wave = self.wave(pipeline)

        def wait(j: int) -> Iterator[Action]:
            pulled = (j + 1) // wave - 2 - self.distance
            if (j + 1) % wave == 0 and pulled >= 0:
                yield Action(ActionKind.SYNC, stage, pulled)

        return wait

    def after(self, pipeline: Pipeline, stage: int) -> Callable[[int], Iterable[Action]]:
        """An update after each backward, and an exchange after each wave."""
        wave = self.wave(pipeline)

        def update(j: int) -> Iterator[Action]:
            yield Action(ActionKind.UPDATE, stage, j)
            if (j + 1) % wave == 0:
                yield Action(ActionKind.LAUNCH_SYNC, stage, j // wave)

        return update


SCHEDULES.register("pipedream", PipeDream())
SCHEDULES.register("pipedream-2bw", TwoBufferedWeights())
SCHEDULES.register("hetpipe", HetPipe())

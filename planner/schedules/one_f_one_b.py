"""1F1B with a flush: warm-up forwards, then one backward and one forward in turn, then the remaining backwards.

Same bubble as GPipe for equal stages, (S-1)/(M+S-1) of total time, with at most S-i micro-batches kept by stage i
(Narayanan et al., SOSP 2019 and ICML 2021; DAPPLE's early backward).

Unequal replication. A stage with r replicas that keeps pace with the pipeline has, in all its replicas together, one
micro-batch in flight for each worker from here to the end: so one replica warms up with ceil(R / r) forwards, R being
the replicas of this and all later stages. The rule never deadlocks: a replica of stage i+1 runs the backward of
micro-batch m once it has the forward of m + (w-1) r (its warm-up w, its replicas r); stage i runs that forward once
it has the backward of a micro-batch that is earlier by its own w' r' >= R' > R > (w-1) r, which is earlier than m. So
each wait is for work of a smaller micro-batch, and the chain ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, WeightPolicy, suffix_replicas


@dataclass(frozen=True, slots=True)
class OneFOneB:
    """One forward, one backward; one weight version; flush at the end of the iteration."""

    name: str = "1f1b"
    weight_policy: WeightPolicy = WeightPolicy.SYNC
    activation_unit: ActivationUnit = ActivationUnit.MICRO_BATCH

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One version of the weights at every stage."""
        return (1,) * pipeline.stages

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """min(M / r, ceil(R / r)), R being the replicas of this and all later stages; S - i for equal replicas."""
        return tuple(
            min(pipeline.micro_batches // count, -(-suffix // count))
            for count, suffix in zip(pipeline.replicas, suffix_replicas(pipeline.replicas), strict=True)
        )

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC, UPDATE, for each worker; O(actions)."""
        warm_up = self.in_flight(pipeline)
        return tuple(
            tuple(_worker(stage, pipeline.micro_batches_of(stage, replica), warm_up[stage]))
            for stage, replica in pipeline.workers()
        )


def _worker(stage: int, micro_batches: range, warm_up: int) -> Iterator[Action]:
    for m in micro_batches[:warm_up]:
        yield Action(ActionKind.FORWARD, stage, m)
    for done, coming in zip(micro_batches, micro_batches[warm_up:], strict=False):
        yield Action(ActionKind.BACKWARD, stage, done)
        yield Action(ActionKind.FORWARD, stage, coming)
    for m in micro_batches[len(micro_batches) - warm_up :]:
        yield Action(ActionKind.BACKWARD, stage, m)
    yield Action(ActionKind.SYNC, stage)
    yield Action(ActionKind.UPDATE, stage)


SCHEDULES.register("1f1b", OneFOneB())

"""PipeDream-2BW: 1F1B without a flush, gradients of m micro-batches together, two versions of the weights.

W(t+1) = W(t) - nu grad f(W(t-1)): the micro-batches of mini-batch t all read version t - 1, at every stage, so that
stage i keeps two versions and p - i micro-batches; m must be at least p (Narayanan et al., ICML 2021). The released
program reads at each forward what is newest there: with `uniform=false` the last stage then has no delay, and the
others read version t where mini-batch t - 1 was already applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import Flowing
from planner.schedules._flows import flowing, own_micro_batches, update_every
from planner.schedules._lines import paced_warm_up
from planner.schedules.types import Action, Pipeline, WeightPolicy


@dataclass(frozen=True, slots=True)
class TwoBufferedWeights(Flowing):
    """1F1B with double-buffered weights.

    Attributes:
        uniform: all stages read the version before, not each what is newest at the forward.
    """

    uniform: bool = True

    key = "pipedream-2bw"
    policy = WeightPolicy.DOUBLE_BUFFER
    facts = Facts(
        decides="1F1B without flush, update every m micro-batches, m >= p; uniform",
        bubble="0 when full",
        memory="p-i micro-batches at stage i and 2 weight versions",
        staleness="1 update (0 at the last stage with uniform=false)",
        source="Narayanan et al., ICML 2021",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """As many micro-batches as are under way at once, or more."""
        for count, forwards in zip(pipeline.replicas, paced_warm_up(pipeline.replicas), strict=True):
            if count * forwards > pipeline.micro_batches:
                return (
                    f"{self.key} needs at least {count * forwards} micro-batches an iteration, "
                    f"as many as are under way, not {pipeline.micro_batches}"
                )
        return ""

    def warm_up(self, pipeline: Pipeline) -> tuple[int, ...]:
        """As 1F1B."""
        return paced_warm_up(pipeline.replicas)

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Two; where nothing is under way at an update, one is enough with `uniform=false`."""
        if self.uniform:
            return (2,) * pipeline.stages
        return tuple(min(2, kept) for kept in self.in_flight(pipeline))

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One update."""
        return tuple(versions - 1 for versions in self.weight_versions(pipeline))

    def lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """1F1B with an update after each iteration's backwards."""
        count, ahead = pipeline.replicas[stage], self.warm_up(pipeline)[stage]
        each = pipeline.micro_batches // count
        read = (lambda j: max(0, j // each - 1)) if self.uniform else (lambda j: max(0, j - ahead + 1) // each)
        own = own_micro_batches(pipeline, stage, replica, iterations)
        return flowing(stage, own, ahead, read, update_every(stage, count, each))


SCHEDULES.register("pipedream-2bw", TwoBufferedWeights())

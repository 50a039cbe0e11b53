"""GEMS: two copies of the model in opposite directions, one micro-batch under way at a time in each worker.

The next micro-batch enters from the other end as soon as the worker there has done its backward, p + 1 steps after the
one before; for F = B = 1 the time is (m-1)(p+1) + 2p. Each worker keeps one micro-batch and two stages' weights (Jain
et al., SC 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from planner.schedules import SCHEDULES
from planner.schedules._chains import PassSeconds
from planner.schedules._defaults import Facts, finish, single
from planner.schedules._families import BothWays
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class Gems(BothWays):
    """Alternating directions, least memory."""

    key = "gems"
    facts = Facts(
        decides="two directions, one micro-batch at a time",
        bubble="1-2m/((m-1)(p+1)+2p) for B=F",
        memory="1 micro-batch, 2 stages' weights",
        staleness="0",
        source="Jain et al., SC 2020",
    )

    def few(self, pipeline: Pipeline) -> Pipeline:
        """One in each direction."""
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, 2))

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """p (F + B) + (m - 1) max(pF + B, F + pB) less the work of m micro-batches."""
        depth, count = pipeline.stages, pipeline.micro_batches
        step = max(depth * forward_s + backward_s, forward_s + depth * backward_s)
        return (depth - count) * (forward_s + backward_s) + (count - 1) * step

    def exact(self, pipeline: Pipeline) -> bool:
        """Always."""
        return True

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """All forwards, a step for each further micro-batch, all backwards; equal to the simulated time. O(stages).

        The forward of the next micro-batch at stage j waits on its worker for the backward of this one at stage
        p-1-j, so that the step between two last forwards is the longest of b[p-1-j] + ... + b[p-1] + f[j] + ... +
        f[p-1].
        """
        depth, count = pipeline.stages, single(pipeline).micro_batches
        ending = [0.0, *accumulate(reversed(times.gradient))]
        going = [0.0, *accumulate(reversed(times.forward))]
        step = max(ending[j + 1] + going[depth - j] for j in range(depth))
        mirrored = [{k, depth - 1 - k} if count > 1 else {k} for k in range(depth)]
        ends = max(ending[depth - k] + sum(times.tail[s] for s in own) for k, own in enumerate(mirrored))
        return going[depth] + (count - 1) * step + ends

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Micro-batches in turn from the first and from the last worker."""
        depth, lines = pipeline.stages, self.lines(pipeline)
        orders: list[list[tuple[int, Action]]] = [[] for _ in range(depth)]
        for m in range(pipeline.micro_batches):
            start = m * (depth + 1)
            for stage in range(depth):
                own = orders[lines.worker(m % 2, stage)]
                own.append((start + stage, Action(ActionKind.FORWARD, stage, m)))
                own.append((start + 2 * depth - 1 - stage, Action(ActionKind.BACKWARD, stage, m)))
        closed = []
        for own in orders:
            actions = [action for _, action in sorted(own, key=lambda entry: entry[0])]
            closed.append((*actions, *finish(sorted({action.stage for action in actions}))))
        return tuple(closed)


SCHEDULES.register("gems", Gems())

"""BaPipe's FBP-AS: forward and backward units of one accelerator work at the same time, each with its share of it.

A forward then takes as long as forward and backward together, and so does a backward. With a stage that begins when its
input is complete the time is (m + 2p - 1)(F + B) and stage i = 1..p keeps 2 (p - i + 1) micro-batches. With
`fill_overlap` a stage passes its result on while it works and the loss follows at once: (m + p - 1)(F + B), the
published time, and p - i + 1 micro-batches (the published figure stays 2 (p - i + 1), Zhao et al., 2020).

Each worker has two lanes, 2i for forwards and 2i + 1 for backwards; a forward waits until the memory that the schedule
claims has room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import PlanError
from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import PassSeconds
from planner.schedules.facts import Facts
from planner.schedules.schedule import Line, finish, replicate, require, single
from planner.schedules.types import Action, ActionKind, Pipeline, Work


@dataclass(frozen=True, slots=True)
class BaPipeFbp(Line):
    """Forward and backward in parallel.

    Attributes:
        fill_overlap: results are passed on while they are made.
    """

    fill_overlap: bool = False

    key = "bapipe-fbp"
    facts = Facts(
        decides="forward and backward units side by side; fill_overlap",
        source="Zhao et al., 2020 (BaPipe)",
        kept="min(m, (1 if fill_overlap else 2)*(p-i))",
        idle="(p-1 if fill_overlap else 2*p-1)*(F+B)",
    )

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Two lanes for each stage."""
        require(self, pipeline)
        own = range(single(pipeline).micro_batches)
        lanes: list[tuple[Action, ...]] = []
        for stage in range(pipeline.stages):
            lanes.append(tuple(Action(ActionKind.FORWARD, stage, m) for m in own))
            lanes.append((*(Action(ActionKind.BACKWARD, stage, m) for m in own), *finish((stage,))))
        return replicate(lanes, pipeline.replicas[0])

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The lanes, which share their worker, with a limit on what is kept.

        Raises:
            PlanError: more than one iteration; the forward lane does not wait for the update on the other.
        """
        if iterations > 1:
            raise PlanError(f"{self.key} gives the order of one iteration, not {iterations}", hint="ask for one")
        count = pipeline.replicas[0]
        lanes = self.order(pipeline)
        return Work(
            lanes,
            workers=tuple(k // (2 * count) * count + k % count for k in range(len(lanes))),
            shared=True,
            streaming=self.fill_overlap,
            limits=self.in_flight(pipeline),
        )

    def exact(self, pipeline: Pipeline) -> bool:
        """Nothing is proven of unequal stages."""
        return False

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """The longest way through one lane of a stage, t = F + B being what an action takes; O(stages).

        All stages before forward, m times t there, all stages after and all stages backward. With `fill_overlap` a
        stage before or after costs only its own F and B, and the loss follows at once.
        """
        both = [f + b - t for f, b, t in zip(times.forward, times.gradient, times.transfer, strict=True)]
        mine = pipeline.micro_batches // pipeline.replicas[0]
        if self.fill_overlap:
            passing = sum(times.forward[:-1]) + sum(times.gradient[1:])
            return passing + (mine - 1) * max(both) + both[0] + times.tail[0]
        return 2 * sum(both) + (mine - 1) * max(both) + times.tail[0]


SCHEDULES.register("bapipe-fbp", BaPipeFbp())

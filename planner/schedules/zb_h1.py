"""ZB-H1: the backward in two parts, the memory of 1F1B, a third of its bubble.

Cost above the ideal (p-1)(F+B-W) for equal stages (Qi et al., ICLR 2024), counted from each worker's first start to
its last end: the next iteration begins where the drain leaves room. F, B and W are forward, input gradient and weight
gradient, W the shortest of them. The order is that of 1F1B with every weight gradient of worker i put off by i
micro-batches, which keeps p on each worker; other limits are met by choosing action by action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts, finish
from planner.schedules._families import SplitBackward
from planner.schedules._lines import one_forward_one_backward
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(SplitBackward):
    """Split backward within p micro-batches.

    Attributes:
        limit: micro-batches that a worker keeps; 0: as many as there are workers.
    """

    limit: int = 0

    key = "zb-h1"
    facts = Facts(
        decides="splits the backward, weight gradients fill gaps; limit",
        bubble="(p-1)(F+B-W) above the ideal, by worker's span",
        memory="at most p micro-batches",
        staleness="0",
        source="Qi et al., ICLR 2024",
    )

    def most(self, stages: int) -> int:
        """The limit, p without one."""
        return self.limit or stages

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """(p - 1)(F + B - W), B the input gradient."""
        return (pipeline.stages - 1) * (forward_s + backward_s - 2 * weight_s)

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """1F1B with weight gradients put off; for other limits than p chosen action by action."""
        stages, count = pipeline.stages, pipeline.micro_batches
        if self.limit not in (0, stages):
            return SplitBackward.line(self, pipeline)
        return tuple((*_put_off(stage, stages, count), *finish((stage,))) for stage in range(stages))


def _put_off(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B of one stage, the weight gradient of a micro-batch after the input gradient of the one `stage` later."""
    for action in one_forward_one_backward(stage, range(micro_batches), stages - stage):
        if action.kind is ActionKind.FORWARD:
            yield action
            continue
        yield Action(ActionKind.INPUT_GRAD, stage, action.micro_batch)
        if action.micro_batch >= stage:
            yield Action(ActionKind.WEIGHT_GRAD, stage, action.micro_batch - stage)
    for m in range(max(micro_batches - stage, 0), micro_batches):
        yield Action(ActionKind.WEIGHT_GRAD, stage, m)


SCHEDULES.register("zb-h1", ZeroBubbleH1())

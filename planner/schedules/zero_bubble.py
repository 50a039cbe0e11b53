"""Zero-bubble orders of one stage a worker: the backward in two parts, weight gradients in the gaps.

A worker takes a forward if it may, else an input gradient, else a weight gradient. It may run a forward while fewer
than 2 (p - i) - 1 of its forwards lack their input gradient (more cannot help: so long is the way to the end and back)
and fewer than `limit` lack their weight gradient (those are what its memory holds). With equal times this gives the
published costs: (p-1)(F+B-W) above the ideal for a limit of p, none for 2p - 1, in between for limits in between.

ZB-H1 keeps the memory of 1F1B, p micro-batches; ZB-H2 keeps up to 2p - 1 and never waits when all parts take equally
long. Times count from each worker's first start to its last end: the next iteration begins where the drain leaves room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

from planner.schedules import SCHEDULES
from planner.schedules.facts import Facts
from planner.schedules.list_scheduler import Task, list_schedule
from planner.schedules.one_f_one_b import one_forward_one_backward
from planner.schedules.schedule import Dealt
from planner.schedules.types import Action, ActionKind, Pipeline

_FORWARD, _INPUT, _WEIGHT = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
_AWAITED = {_FORWARD: ((_FORWARD, -1),), _INPUT: ((_FORWARD, 0), (_INPUT, 1)), _WEIGHT: ((_INPUT, 0),)}
"""By kind, the actions for the same micro-batch that it waits for: kind, and how many stages further."""


@lru_cache(maxsize=8)
def split_backward_order(stages: int, micro_batches: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards, input gradients and weight gradients of each stage, in order; O(actions log actions).

    Args:
        stages: one for each worker.
        micro_batches: of one iteration.
        limit: micro-batches that a worker keeps at the most.
    """
    done: Counter[tuple[ActionKind, int]] = Counter()

    def may_open(action: Action) -> bool:
        stage = action.stage
        ahead = done[_FORWARD, stage] - done[_INPUT, stage] < 2 * (stages - stage) - 1
        return ahead and done[_FORWARD, stage] - done[_WEIGHT, stage] < limit

    def taken(action: Action) -> None:
        done[action.kind, action.stage] += 1

    tasks = []
    for urgency, (kind, awaited) in enumerate(_AWAITED.items()):
        for stage in range(stages):
            for m in range(micro_batches):
                needs = [Action(kind, stage, m - 1), *(Action(other, stage + by, m) for other, by in awaited)]
                tasks.append(Task(Action(kind, stage, m), stage, (urgency, m), needs, kind is _FORWARD))
    return tuple(map(tuple, list_schedule(tasks, stages, may_open, taken)))


class SplitBackward(Dealt, Protocol):
    """One stage a worker, the backward in two parts, within a limit of micro-batches."""

    __slots__ = ()

    spans: ClassVar[bool] = True
    split_backward: ClassVar[bool] = True

    limit: int

    def refuses(self, pipeline: Pipeline) -> str:
        """A limit below one micro-batch."""
        return "" if self.limit >= 0 else f"a limit of {self.limit} micro-batches keeps none"

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Forwards, input and weight gradients."""
        limit = self.by_place(self.facts.kept, pipeline, 1)[0]
        return split_backward_order(pipeline.stages, pipeline.micro_batches, limit)


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(SplitBackward):
    """ZB-H1: split backward within p micro-batches, a third of the bubble of 1F1B.

    The order is that of 1F1B with every weight gradient of worker i put off by i micro-batches, which keeps p on each
    worker; other limits are met by choosing action by action.

    Attributes:
        limit: micro-batches that a worker keeps; 0: as many as there are workers.
    """

    limit: int = 0

    key = "zb-h1"
    facts = Facts(
        decides="splits the backward, weight gradients fill gaps; limit",
        source="Qi et al., ICLR 2024",
        kept="min(m, limit or p)",
        kept_bound=True,
        idle="(p-1)*(F+B-2*W)",
        idle_holds="limit == 0 and W <= min(F, B-W) and m >= p",
        idle_note="by worker's span",
    )

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """1F1B with weight gradients put off; for other limits than p chosen action by action."""
        stages, count = pipeline.stages, pipeline.micro_batches
        if self.limit not in (0, stages):
            return SplitBackward.line(self, pipeline)
        return (_put_off(stage, stages, count) for stage in range(stages))


@dataclass(frozen=True, slots=True)
class ZeroBubbleH2(SplitBackward):
    """ZB-H2: split backward within 2p - 1 micro-batches, forwards so far ahead that no worker ever waits.

    Attributes:
        limit: micro-batches that a worker keeps; 0: 2p - 1.
    """

    limit: int = 0

    key = "zb-h2"
    facts = Facts(
        decides="splits the backward, warms up twice as far; limit",
        source="Qi et al., ICLR 2024",
        kept="min(m, limit or 2*p-1)",
        kept_bound=True,
        idle="(p-1)*max(F+B-3*W, 0)",
        idle_holds="limit == 0 and W <= min(F, B-W) and m >= 2*p-1",
        idle_note="by worker's span",
    )


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
SCHEDULES.register("zb-h2", ZeroBubbleH2())

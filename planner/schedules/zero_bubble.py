"""Zero-bubble schedules: split backwards, with weight gradients that fill the gaps.

The iteration time counts from each worker's first start to its last end, because the next iteration begins while other
workers still drain.

One stage per worker (ZB-H1, ZB-H2). A worker takes a forward if it may, else an input gradient, else a weight gradient.
It may run a forward while fewer than 2 (p - i) - 1 of its forwards lack their input gradient (a micro-batch needs that
many steps to the last stage and back, so more cannot help) and fewer than `limit` lack their weight gradient (these are
what its memory holds). With equal times this gives the published costs: (p-1)(F+B-W) above the ideal for a limit of p,
none for 2p - 1, in between for limits in between. ZB-H1 keeps p micro-batches like 1F1B; ZB-H2 keeps up to 2p - 1 and
never waits if all parts take equally long.

Two stages per worker in a V (ZB-V, V-half, V-min), from a block that repeats every six slots. Worker i of p has stages
i and 2p-1-i, so that a micro-batch returns to the first worker with its loss. A block gives the slots in which each
worker runs the two forwards (0: first stage, 1: second) and the two input gradients (2: second, 3: first) of a
micro-batch; the next micro-batch runs six slots later. The distance between a stage's forward and its backward
determines what a worker keeps (Qi et al., NeurIPS 2024, "Pipeline parallelism with controllable memory"). Repeated
blocks leave gaps while the pipeline fills and drains. If the next action of a worker's pattern is not ready, it takes a
later one that is, within the memory limit, else a weight gradient. Several degrees of eagerness are tried, and the
shortest order with equal times is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from planner.errors import PlanError
from planner.schedules import SCHEDULES
from planner.schedules.chunks import ChunkedSchedule
from planner.schedules.draining import one_forward_one_backward
from planner.schedules.orders import Order, Task, list_schedule, unslotted, waits
from planner.schedules.schedule import Schedule
from planner.schedules.types import Action, ActionKind, Facts, Pipeline

FORWARD, INPUT_GRAD, WEIGHT_GRAD = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD

_PERIOD = 6
_TRIAL_ROUNDS = 4

Block = tuple[tuple[int, int, int, int], ...]
"""By worker, the slots of its four actions for micro-batch 0."""


@lru_cache(maxsize=16)
def block_order(block: Block, micro_batches: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each worker; O(actions) per degree of eagerness, tried on a few micro-batches per worker.

    Args:
        block: slots of micro-batch 0.
        micro_batches: micro-batches of one iteration.
        limit: most chunks whose activations a worker keeps.

    Raises:
        PlanError: the limit is too small for any order.
    """
    # more workers need more free memory, up to a third of their number
    tries = [*((True, spare) for spare in range(max(4, len(block) // 3 + 2))), (False, 0)]
    fill = filling(block, min(micro_batches, _TRIAL_ROUNDS * len(block)), limit)
    best = min(tries, key=lambda eagerness: _span(fill, *eagerness))
    return unslotted(filling(block, micro_batches, limit)(*best))


Filling = Callable[[bool, int], list[Order]]
"""Orders by eagerness: whether input gradients fill gaps, and the chunks of memory that filling forwards leave free."""


def _span(fill: Filling, backwards: bool, spare: int) -> float:
    """Longest span of a worker in slots; infinite if the order gets stuck."""
    try:
        orders = fill(backwards, spare)
    except PlanError:
        return math.inf
    return max(order[-1][0] - order[0][0] + 1 for order in orders)


def filling(block: Block, micro_batches: int, limit: int) -> Filling:
    """The repeated block with its gaps filled, of actions that take equal times.

    A worker takes the next action of its pattern, a later one of the pattern if memory allows, or the weight gradient
    that waits longest. Later ones only before its first stage's first backward or after that stage's last forward.
    """
    workers, length = len(block), len(block[0]) * micro_batches
    tasks: list[Task] = []
    for worker, slots in enumerate(block):
        pattern = _pattern(slots, worker, workers, micro_batches)
        tasks += [(action, worker, (at,)) for at, action in enumerate(pattern)]
    patterned = len(tasks)
    split = [(action, worker) for action, worker, _ in tasks if action.kind is INPUT_GRAD]
    tasks += [(action._replace(kind=WEIGHT_GRAD), worker, (length,)) for action, worker in split]
    needs = waits(tasks)

    def fill(backwards: bool, spare: int) -> list[Order]:
        heads = list(range(0, patterned, length))
        done, kept = bytearray(len(tasks)), [0] * workers
        entered, returned = [0] * workers, [0] * workers

        def may_run(number: int) -> bool:
            action, worker, _ = tasks[number]
            if number >= patterned:
                return True
            while done[heads[worker]]:
                heads[worker] += 1
            room = limit - kept[worker]
            if number == heads[worker]:
                return action.kind is INPUT_GRAD or room > 0
            if returned[worker] and entered[worker] < micro_batches:
                return False
            return backwards if action.kind is INPUT_GRAD else room > spare

        def taken(number: int) -> None:
            action, worker, _ = tasks[number]
            done[number] = 1
            if action.kind is FORWARD:
                kept[worker] += 1
                entered[worker] += action.stage == worker
            elif action.kind is WEIGHT_GRAD:
                kept[worker] -= 1
            else:
                returned[worker] += action.stage == worker

        return list_schedule(tasks, needs, may_run, taken)

    return fill


def _pattern(slots: tuple[int, ...], worker: int, workers: int, micro_batches: int) -> list[Action]:
    """The forwards and input gradients of a worker in the order of the repeated block."""
    second = 2 * workers - 1 - worker
    passes = ((FORWARD, worker), (FORWARD, second), (INPUT_GRAD, second), (INPUT_GRAD, worker))
    timed = sorted((slot + _PERIOD * m, what, m) for what, slot in enumerate(slots) for m in range(micro_batches))
    return [Action(*passes[what], m) for _, what, m in timed]


@dataclass(frozen=True, slots=True)
class FoldedBlock(ChunkedSchedule):
    """A schedule with two chunks per worker in a V, from a repeated block, with split backwards.

    Attributes:
        key: its name.
        facts: its memory and idle time.
        block: gives the slots of the repeated block, by number of workers.
    """

    key: str
    facts: Facts = field(compare=False)
    block: Callable[[int], Block] = field(compare=False)

    spans = split_backward = True
    chunks_per_worker = 2

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """The repeated block with its gaps filled."""
        limit = self.by_place(self.facts.kept, pipeline, 1)[0]
        return block_order(self.block(pipeline.stages // 2), pipeline.micro_batches, limit)


def v_block(workers: int) -> Block:
    """ZB-V: no bubble within the memory of 1F1B; the passes of the block move four and two slots a worker.

    With equal times for forward, input gradient and weight gradient no worker waits between its first start and its
    last end. The two chunks of the block live 12p slots in total, which keeps 2p chunks.
    """
    round_trip = 6 * (workers - 1)
    return tuple(
        (4 * i, round_trip + 1 - 2 * i, round_trip + 2 + 4 * i, 2 * round_trip + 3 - 2 * i) for i in range(workers)
    )


def v_half_block(workers: int) -> Block:
    """V-half: about half the memory of 1F1B, with a smaller bubble; the passes of the block move two and one slots.

    For even numbers of workers the backwards begin 3 slots later.
    """
    gap = 3 if workers % 2 == 0 else 0
    return tuple(
        (2 * i, 3 * workers - i - 2, 3 * workers + gap + 2 * i - 1, 6 * workers + gap - i - 2) for i in range(workers)
    )


def v_min_block(workers: int) -> Block:
    """V-min: a third of the memory of 1F1B.

    All passes of the block move one slot per worker, which is the shortest round trip, so no order keeps less. If three
    divides the workers, the backwards begin 2 slots later.
    """
    gap = 2 if workers % 3 == 0 else 0
    return tuple((i, 2 * workers - i - 1, 2 * workers + gap + i, 4 * workers + gap - i - 1) for i in range(workers))


SCHEDULES.register(
    "zb-v",
    FoldedBlock(
        "zb-v",
        Facts(
            source="Qi et al., ICLR 2024",
            kept="2*p",
            kept_bound=True,
            idle="0",
            idle_holds="F == W and B == 2*W and m >= 2*p",
        ),
        v_block,
    ),
)
SCHEDULES.register(
    "v-half",
    FoldedBlock(
        "v-half",
        Facts(
            source="Qi et al., NeurIPS 2024",
            kept="2*floor((p+2)/2)",
            kept_bound=True,
            idle="max(3*p-(4 if p % 2 else 7), 0)*F",
            idle_holds="F == W and B == 2*W and m >= p and p > 2",
        ),
        v_half_block,
    ),
)
SCHEDULES.register(
    "v-min",
    FoldedBlock(
        "v-min",
        Facts(
            source="Qi et al., NeurIPS 2024",
            kept="2*floor((p+4)/3)",
            kept_bound=True,
            idle="max(4*p-(5 if p % 3 else 7), 0)*F",
            idle_holds="F == W and B == 2*W and m >= p and p > 2",
        ),
        v_min_block,
    ),
)


@lru_cache(maxsize=8)
def split_backward_order(stages: int, micro_batches: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards, input gradients and weight gradients of each stage, in order; O(actions log actions).

    Args:
        stages: one for each worker.
        micro_batches: of one iteration.
        limit: most micro-batches that a worker keeps.
    """
    done: Counter[tuple[ActionKind, int]] = Counter()

    def may_run(number: int) -> bool:
        action, stage, _ = tasks[number]
        if action.kind is not FORWARD:
            return True
        ahead = done[FORWARD, stage] - done[INPUT_GRAD, stage] < 2 * (stages - stage) - 1
        return ahead and done[FORWARD, stage] - done[WEIGHT_GRAD, stage] < limit

    def taken(number: int) -> None:
        action, stage, _ = tasks[number]
        done[action.kind, stage] += 1

    tasks = [
        (Action(kind, stage, m), stage, (urgency, m))
        for urgency, kind in enumerate((FORWARD, INPUT_GRAD, WEIGHT_GRAD))
        for stage in range(stages)
        for m in range(micro_batches)
    ]
    return unslotted(list_schedule(tasks, waits(tasks), may_run, taken))


@dataclass(frozen=True, slots=True)
class SplitBackward(Schedule):
    """A schedule with one stage per worker and split backwards, within a limit of micro-batches.

    ZB-H1 keeps p of them and has a third of the bubble of 1F1B: its order is that of 1F1B with every weight gradient of
    worker i postponed by i micro-batches. ZB-H2 runs forwards so far ahead, within 2p - 1, that no worker ever waits.
    Orders for other limits are list-scheduled.

    Attributes:
        key: its name.
        facts: its memory and idle time.
        postpones: whether the order is that of 1F1B for a limit of p.
        limit: micro-batches that a worker keeps; 0: as many as the schedule is published with.
    """

    key: str
    facts: Facts = field(compare=False)
    postpones: bool = field()
    limit: int = 0

    spans = split_backward = True

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses negative limits."""
        return "" if self.limit >= 0 else f"a limit of {self.limit} micro-batches keeps none"

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """1F1B with postponed weight gradients; list-scheduled where that is not the order or p not the limit."""
        stages, count = pipeline.stages, pipeline.micro_batches
        if self.postpones and self.limit in (0, stages):
            return (_with_postponed_weight_grads(stage, stages, count) for stage in range(stages))
        return split_backward_order(stages, count, self.by_place(self.facts.kept, pipeline, 1)[0])


def _with_postponed_weight_grads(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B of one stage, with each weight gradient postponed by `stage` micro-batches."""
    for action in one_forward_one_backward(stage, range(micro_batches), stages - stage):
        if action.kind is ActionKind.FORWARD:
            yield action
            continue
        yield Action(ActionKind.INPUT_GRAD, stage, action.micro_batch)
        if action.micro_batch >= stage:
            yield Action(ActionKind.WEIGHT_GRAD, stage, action.micro_batch - stage)
    for m in range(max(micro_batches - stage, 0), micro_batches):
        yield Action(ActionKind.WEIGHT_GRAD, stage, m)


SCHEDULES.register(
    "zb-h1",
    SplitBackward(
        "zb-h1",
        Facts(
            source="Qi et al., ICLR 2024",
            kept="min(m, limit or p)",
            kept_bound=True,
            idle="(p-1)*(F+B-2*W)",
            idle_holds="limit == 0 and W <= min(F, B-W) and m >= p",
        ),
        postpones=True,
    ),
)
SCHEDULES.register(
    "zb-h2",
    SplitBackward(
        "zb-h2",
        Facts(
            source="Qi et al., ICLR 2024",
            kept="min(m, limit or 2*p-1)",
            kept_bound=True,
            idle="(p-1)*max(F+B-3*W, 0)",
            idle_holds="limit == 0 and W <= min(F, B-W) and m >= 2*p-1",
        ),
        postpones=False,
    ),
)

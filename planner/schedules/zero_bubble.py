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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from planner.errors import PlanError
from planner.schedules import SCHEDULES
from planner.schedules.chunks import ChunkedSchedule
from planner.schedules.draining import one_forward_one_backward
from planner.schedules.orders import Task, list_schedule
from planner.schedules.schedule import Schedule
from planner.schedules.types import Action, ActionKind, Facts, Pipeline

_PERIOD = 6
_FORWARDS = (0, 1)
_TRIAL_ROUNDS = 4

Block = tuple[tuple[int, int, int, int], ...]
"""By worker, the slots of its four actions for micro-batch 0."""


def even_block(workers: int, steps: tuple[int, int, int, int]) -> Block:
    """A block whose passes move from worker to worker in equal steps, with no two actions in one slot.

    Args:
        workers: p.
        steps: slots from one worker to the next, for each of the four passes; congruent up and down modulo six.
    """
    starts = [0]
    at = 0
    for this in range(1, 4):
        at += steps[this - 1] * (workers - 1) + 1
        shifted = at + (steps[this] * (workers - 1) if this % 2 else 0)
        while any((shifted - s) % _PERIOD == 0 for s in starts):
            shifted += 1
            at += 1
        starts.append(shifted)
    return tuple(
        (
            steps[0] * i,
            starts[1] - steps[1] * i,
            starts[2] + steps[2] * i,
            starts[3] - steps[3] * i,
        )
        for i in range(workers)
    )


Eagerness = tuple[bool, bool, int]
"""How a worker fills a gap: with forwards, with input gradients, and with how many chunks of memory left free."""


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
    trial = min(micro_batches, _TRIAL_ROUNDS * len(block))
    # more workers need more free memory, up to a third of their number
    tries: list[Eagerness] = [(True, True, spare) for spare in range(max(4, len(block) // 3 + 2))]
    tries += [(forwards, not forwards, spare) for forwards in (False, True) for spare in range(4)]
    spans = [_GapFilling(block, trial, limit, eagerness).run() for eagerness in tries]
    best = min((span, number) for number, span in enumerate(spans))[1]
    filling = _GapFilling(block, micro_batches, limit, tries[best])
    if math.isinf(filling.run()):
        raise PlanError(f"{limit} chunks are too few for this order", hint="allow more memory")
    return tuple(tuple(_actions(order, i, len(block))) for i, order in enumerate(filling.orders))


def _actions(order: Sequence[tuple[int, int]], worker: int, workers: int) -> Iterator[Action]:
    """Turn a worker's (kind, micro-batch) pairs into actions."""
    kinds = (ActionKind.FORWARD,) * 2 + (ActionKind.INPUT_GRAD,) * 2 + (ActionKind.WEIGHT_GRAD,) * 2
    second = 2 * workers - 1 - worker
    stages = (worker, second, second, worker, second, worker)
    for what, m in order:
        yield Action(kinds[what], stages[what], m)


class _GapFilling:
    """Simulates the pattern slot by slot with equal times, filling its gaps."""

    def __init__(self, block: Block, micro_batches: int, limit: int, eagerness: Eagerness) -> None:
        self._workers, self._count, self._limit = len(block), micro_batches, limit
        self._fills_forwards, self._fills_backwards, self._spare = eagerness
        self._pattern = [
            [(what, m) for _, what, m in sorted((s + _PERIOD * m, w, m) for w, s in enumerate(slots) for m in _range)]
            for slots in block
            for _range in (range(micro_batches),)
        ]
        self._next = [0] * self._workers
        self._done = [[[-1] * micro_batches for _ in range(4)] for _ in block]
        self._counts = [[0] * 4 for _ in block]
        self._kept = [0] * self._workers
        self._pending: list[list[tuple[int, int]]] = [[] for _ in block]
        self._weight_grads_done = [0] * self._workers
        self.orders: list[list[tuple[int, int]]] = [[] for _ in block]

    def run(self) -> float:
        """Fill the orders; returns the longest span of a worker in slots, infinite if the order gets stuck."""
        left = 6 * self._count * self._workers
        first, last = [-1] * self._workers, [0] * self._workers
        slot = 0
        while left:
            moved = False
            for worker in range(self._workers):
                action = self._choose(worker, slot)
                if action is None:
                    continue
                self._take(worker, action, slot)
                if first[worker] < 0:
                    first[worker] = slot
                last[worker] = slot
                moved = True
                left -= 1
            if not moved:
                return math.inf
            slot += 1
        return max(end - begin + 1 for begin, end in zip(first, last, strict=True))

    def _choose(self, worker: int, slot: int) -> tuple[int, int] | None:
        """The (kind, micro-batch) that a worker runs in a slot; None if nothing is ready."""
        pattern, at, counts = self._pattern[worker], self._next[worker], self._counts[worker]
        while at < len(pattern) and self._done[worker][pattern[at][0]][pattern[at][1]] >= 0:
            at += 1
        self._next[worker] = at
        if at < len(pattern):
            what, m = pattern[at]
            if self._ready(worker, what, m, slot) and (what > 1 or self._kept[worker] < self._limit):
                return what, m
            if counts[3] == 0 or counts[0] == self._count:
                action = self._ahead(worker, at + 1, slot)
                if action is not None:
                    return action
        if self._weight_grads_done[worker] < len(self._pending[worker]):
            return self._pending[worker][self._weight_grads_done[worker]]
        return None

    def _ahead(self, worker: int, at: int, slot: int) -> tuple[int, int] | None:
        """A later action of the pattern that is ready; of each kind only the next micro-batch can be."""
        pattern = self._pattern[worker]
        for what, m in pattern[at : at + 4 * _PERIOD * self._workers]:
            if m != self._counts[worker][what] or not self._ready(worker, what, m, slot):
                continue
            if what > 1 and self._fills_backwards:
                return what, m
            if what < 2 and self._fills_forwards and self._kept[worker] < self._limit - self._spare:
                return what, m
        return None

    def _ready(self, worker: int, what: int, m: int, slot: int) -> bool:
        """True if what an action needs was done in an earlier slot."""
        if self._counts[worker][what] != m:
            return False
        outward = what % 2 == 0
        end = 0 if outward else self._workers - 1
        if worker == end:
            return what == 0 or 0 <= self._done[worker][what - 1][m] < slot
        return 0 <= self._done[worker - 1 if outward else worker + 1][what][m] < slot

    def _take(self, worker: int, action: tuple[int, int], slot: int) -> None:
        """Record an action as done."""
        what, m = action
        self.orders[worker].append(action)
        if what > 3:
            self._weight_grads_done[worker] += 1
            self._kept[worker] -= 1
            return
        self._done[worker][what][m] = slot
        self._counts[worker][what] += 1
        if what in _FORWARDS:
            self._kept[worker] += 1
        else:
            self._pending[worker].append((what + 2, m))


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
    return even_block(workers, (4, 2, 4, 2))


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


_FORWARD, _INPUT, _WEIGHT = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
_NEEDED = {_FORWARD: ((_FORWARD, -1),), _INPUT: ((_FORWARD, 0), (_INPUT, 1)), _WEIGHT: ((_INPUT, 0),)}
"""By kind, the actions of the same micro-batch that it waits for: (kind, number of stages further)."""


@lru_cache(maxsize=8)
def split_backward_order(stages: int, micro_batches: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards, input gradients and weight gradients of each stage, in order; O(actions log actions).

    Args:
        stages: one for each worker.
        micro_batches: of one iteration.
        limit: most micro-batches that a worker keeps.
    """
    done: Counter[tuple[ActionKind, int]] = Counter()

    def may_run(action: Action) -> bool:
        stage = action.stage
        if action.kind is not _FORWARD:
            return True
        ahead = done[_FORWARD, stage] - done[_INPUT, stage] < 2 * (stages - stage) - 1
        return ahead and done[_FORWARD, stage] - done[_WEIGHT, stage] < limit

    def taken(action: Action) -> None:
        done[action.kind, action.stage] += 1

    tasks = []
    for urgency, (kind, awaited) in enumerate(_NEEDED.items()):
        for stage in range(stages):
            for m in range(micro_batches):
                needs = [Action(kind, stage, m - 1), *(Action(other, stage + by, m) for other, by in awaited)]
                tasks.append(Task(Action(kind, stage, m), stage, (urgency, m), needs))
    return tuple(map(tuple, list_schedule(tasks, stages, may_run, taken)))


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

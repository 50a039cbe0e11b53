"""1F1B with a flush: warm-up forwards, then one backward and one forward in turn, then the remaining backwards.

Same bubble as GPipe for equal stages, (S-1)/(M+S-1) of total time, with at most S-i micro-batches kept by stage i
(Narayanan et al., SOSP 2019 and ICML 2021; DAPPLE's early backward).

Unequal replication. Let stage i have r(i) replicas, each with w(i) forwards before its first backward, n(i) = r(i) w(i)
in all. A replica's first backward needs its own w forwards, so every stage before must let n(i) micro-batches pass
before it waits for a gradient itself, and have one more in work on each of its replicas to keep pace:

    w(last) = 1        w(i) = 1 + ceil(n(i+1) / r(i))        (never more than a replica's micro-batches)

For equal replicas this is S - i, and n(i) is the number of workers from stage i to the end. The number of workers
from here to the end, divided by r(i) and rounded up, is the smallest warm-up for which nothing deadlocks, but where
few replicas feed many that feed few it lets the many wait for each other's gradients: with replicas (1, 8, 1) and
balanced stages an iteration then takes four times as long. The rule above keeps within a few per cent of the ideal
(see docs/simulate.md).

No deadlock: stage i+1 runs the backward of micro-batch m after the forward of m + n(i+1) - r(i+1); stage i runs that
forward after the backward of m + n(i+1) - r(i+1) - n(i) < m. Each wait is for work of a smaller micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import OneForwardOneBackward
from planner.schedules._lines import paced_after, paced_warm_up
from planner.schedules.types import Pipeline


@dataclass(frozen=True, slots=True)
class OneFOneB(OneForwardOneBackward):
    """One forward, one backward; one weight version; flush at the end of the iteration."""

    key = "1f1b"
    closed_form = True
    facts = Facts(
        decides="one forward, one backward; flush",
        bubble="(p-1)/(m+p-1)",
        memory="p-i micro-batches at stage i",
        staleness="0",
        source="Narayanan et al., SOSP 2019 and ICML 2021",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication."""
        return ""

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """w of each stage, see above."""
        return paced_warm_up(replicas)

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The same as a recurrence."""
        return paced_after(replicas, passing, micro_batches)


SCHEDULES.register("1f1b", OneFOneB())

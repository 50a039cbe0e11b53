"""The longest chain of waits in a pipeline (`Schedule.critical_s`), as the DP minimises it: a bound of what is played.

A replica of stage i that keeps at most w of its m micro-batches cannot end its last backward before

    sum_{j<i} f_j  +  m t_i  +  (later - (w' - 1) f_i)_+  +  (later - (w - 1) b_i)_+

where `later` is the work of one micro-batch in all stages after it: nothing but w' - 1 forwards (`filling`) can be done
while it waits for the first gradient, nothing but w - 1 backwards while it waits for the last one. Where m <= w the two
may be the same wait, and only the longer counts. From there the last gradient goes down to stage k <= i, which then
synchronises and updates; or the last forward goes on through one micro-batch's work, to a later stage's update.
Every link of these chains is a wait of the simulated order, so no simulation is shorter, whatever the stages.

A suffix carries the end of its first stage's last backward (`pace_s`) and the latest end of all (`end_s`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.solvers._objective import NewStage, Prefix, Suffix
from planner.space.ranges import StageNeeds


@dataclass(frozen=True, slots=True)
class LongestChain:
    """The longest chain of waits."""

    figures: tuple[str, ...] = ("work_s", "reach_s", "pace_s", "end_s")
    counts_passing: bool = True

    def available_s(self, cutoff_s: float, total_s: float, compute_s: np.ndarray) -> float:
        """No device works longer than the iteration lasts."""
        return cutoff_s

    def longest_s(self, cutoff_s: float, total_s: float, before_s: np.ndarray, turns: int) -> np.ndarray:
        """A stage waits for one micro-batch's work before it, and does all its turns."""
        return np.asarray(np.maximum(cutoff_s - before_s, 0.0) / turns)

    def slowest_s(self, stage: NewStage, before: Prefix) -> np.ndarray:
        """Latest end of a stage's last backward, after which the stages before it end theirs.

        The wait for the last gradient is left out, so that this goes for all orders that keep no more micro-batches.
        """
        first_s = np.maximum(stage.later_s - stage.filling * stage.forward_s, 0.0)
        own_s = stage.turns * np.maximum(stage.forward_s + stage.backward_s, stage.work_s) + first_s
        own_s = np.maximum(before.delay_s + own_s, before.path_s + own_s + stage.end_s)
        return np.asarray(np.maximum(before.slowest_s, own_s))

    def total_s(self, delay_s: np.ndarray, slowest_s: np.ndarray) -> np.ndarray:
        """The longer of the two."""
        return np.asarray(np.maximum(delay_s, slowest_s))

    def carried(self, suffix: Suffix, stage_s: np.ndarray, forward_s: np.ndarray) -> Suffix:
        """The stage's own chain aside."""
        return Suffix(
            suffix.work_s + stage_s, suffix.reach_s + forward_s, suffix.pace_s + stage_s, suffix.end_s + forward_s
        )

    def grown(
        self, suffix: Suffix, stage: NewStage, promise: np.ndarray, before: Prefix, counts: tuple[int, ...]
    ) -> Iterator[tuple[int, Suffix, np.ndarray]]:
        """Chains that stay at the new stage, go through it, or leave it after its last forward."""
        own_s, first_s = _own_s(stage)
        work_s = suffix.work_s + stage.work_s
        reach_s = np.maximum(work_s + stage.end_s, suffix.reach_s + stage.forward_s)
        pace_s = np.maximum(suffix.pace_s + stage.work_s, own_s)
        backwards = stage.turns - stage.in_flight
        leave_s = stage.turns * stage.forward_s + backwards * stage.backward_s + first_s + suffix.reach_s
        end_s = np.maximum(np.maximum(suffix.end_s + stage.forward_s, pace_s + stage.end_s), leave_s)
        yield 1, Suffix(work_s, reach_s, pace_s, end_s), np.ones(len(work_s), dtype=bool)

    def bound_s(self, suffix: Suffix, before: Prefix) -> np.ndarray:
        """The longest of the chains on both sides of the cut and over it."""
        back_s = np.maximum(suffix.work_s, suffix.pace_s) + before.delay_s
        there_s = np.maximum(suffix.reach_s, suffix.end_s) + before.path_s
        return np.asarray(np.maximum(np.maximum(back_s, there_s), before.slowest_s))

    def reach_s(self, turns: np.ndarray, needs: StageNeeds, end_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All turns of the stage between the stages before it, or before its update; or one micro-batch's way there."""
        around_s = np.maximum(needs.before_s, needs.forward_before_s + end_s)
        through_s = needs.whole_s - needs.before_s + needs.forward_before_s + end_s
        plain_s, again_s = turns * needs.plain_s, turns * (needs.plain_s + needs.repeat_s)
        return np.maximum(plain_s + around_s, through_s), np.maximum(again_s + around_s, through_s)


def _own_s(stage: NewStage) -> tuple[np.ndarray, np.ndarray]:
    """From a stage's first forward to the end of its last backward, at the least, and of that the wait for the first
    gradient."""
    first_s = np.maximum(stage.later_s - stage.filling * stage.forward_s, 0.0)
    last_s = np.maximum(stage.later_s - (stage.in_flight - 1) * stage.backward_s, 0.0)
    few = stage.in_flight >= stage.turns
    waits_s = np.where(few, np.maximum(first_s, last_s), first_s + last_s)
    return stage.turns * (stage.forward_s + stage.backward_s) + waits_s, np.where(few, 0.0, first_s)

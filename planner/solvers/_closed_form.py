"""The closed form by which decisions are ranked (`planner.space.evaluate`), as the DP minimises it.

With t = f + b of a stage, transfers included, the time of an iteration is Q + M: `reach_s` Q, the longest way through
one micro-batch's work, and `pace_s` M = max (m_i - 1 + late_i) t_i. How late a stage begins depends on the fewest
replicas of all stages before it, which a suffix does not know: it says how many it counts on (`promise`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.solvers._objective import NewStage, Prefix, Suffix
from planner.space.ranges import StageNeeds


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The closed form of the iteration time."""

    figures: tuple[str, ...] = ("work_s", "reach_s", "pace_s")
    counts_passing: bool = False

    def available_s(self, cutoff_s: float, total_s: float, compute_s: np.ndarray) -> np.ndarray:
        """With (m/r - 1) t at most P everywhere, r devices take at most P r / (m - r): m C of work needs P + C."""
        return np.asarray(max(0.0, cutoff_s - total_s) + compute_s)

    def longest_s(self, cutoff_s: float, total_s: float, before_s: np.ndarray, turns: int) -> np.ndarray:
        """(m/r - 1) t is at most what the cutoff leaves beside the work of one micro-batch."""
        most_s = max(0.0, cutoff_s - total_s) / (turns - 1) if turns > 1 else np.inf
        return np.full(before_s.shape, most_s)

    def slowest_s(self, stage: NewStage, before: Prefix) -> np.ndarray:
        """Largest (m_i - 1) t_i; that a stage may begin late is left out."""
        if stage.turns == 1:
            return np.asarray(np.broadcast_to(before.slowest_s, stage.work_s.shape))
        return np.asarray(np.maximum(before.slowest_s, (stage.turns - 1) * stage.work_s))

    def total_s(self, delay_s: np.ndarray, slowest_s: np.ndarray) -> np.ndarray:
        """Q + M."""
        return np.asarray(delay_s + slowest_s)

    def carried(self, suffix: Suffix, stage_s: np.ndarray, forward_s: np.ndarray) -> Suffix:
        """Pace aside."""
        return Suffix(suffix.work_s + stage_s, suffix.reach_s + forward_s, suffix.pace_s, suffix.end_s)

    def grown(
        self, suffix: Suffix, stage: NewStage, promise: np.ndarray, before: Prefix, counts: tuple[int, ...]
    ) -> Iterator[tuple[int, Suffix, np.ndarray]]:
        """One for each useful promise.

        A pace below what the stages before need anyway is raised to it, which makes more labels comparable.
        """
        work_s = suffix.work_s + stage.work_s
        reach_s = np.maximum(work_s + stage.end_s, suffix.reach_s + stage.forward_s)
        slowest_s, turns = np.maximum(suffix.pace_s, before.slowest_s), stage.turns - 1
        useful = np.ones(len(work_s), dtype=bool)
        # The first stage never begins late; any other does unless it is promised as many replicas before it.
        for count in (stage.replicas,) if stage.first else counts:
            if count > stage.replicas:
                break
            own_s = (turns + 1 - count / stage.replicas) * stage.work_s
            pace_s = np.maximum(slowest_s, own_s)
            yield count, Suffix(work_s, reach_s, pace_s, suffix.end_s), useful & (promise <= count)
            # Promising more helps only while this stage is the slowest.
            useful &= (promise > count) | (own_s > slowest_s)

    def bound_s(self, suffix: Suffix, before: Prefix) -> np.ndarray:
        """Q + M, each at the least."""
        reach_s = np.maximum(suffix.work_s + before.delay_s, suffix.reach_s + before.path_s)
        return np.asarray(reach_s + np.maximum(suffix.pace_s, before.slowest_s))

    def reach_s(self, turns: np.ndarray, needs: StageNeeds, end_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pace of the stage, and the two ways through one micro-batch's work: to the last backward, and to the
        stage's update."""
        ways_s = np.maximum(needs.whole_s, needs.whole_s - needs.before_s + needs.forward_before_s + end_s)
        plain_s = (turns - 1) * needs.plain_s + ways_s
        return plain_s, plain_s + turns * needs.repeat_s

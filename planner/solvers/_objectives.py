"""What the exact DP needs to know of a time that it minimises.

The closed form by which decisions are ranked (`planner.space.evaluate`), as the DP minimises it.

With t = f + b of a stage, transfers included, the time of an iteration is Q + M: `reach_s` Q, the longest way through
one micro-batch's work, and `pace_s` M = max (m_i - 1 + late_i) t_i. How late a stage begins depends on the fewest
replicas of all stages before it, which a suffix does not know: it says how many it counts on (`promise`).

The longest chain of waits in a pipeline (`Schedule.critical_s`), as the DP minimises it: a bound of what is played.

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
from typing import Protocol

import numpy as np

from planner.space.ranges import StageNeeds


@dataclass(frozen=True, eq=False)
class Suffix:
    """Times of stages up to the last one, in which a micro-batch enters the first of them at 0; arrays by label.

    Attributes:
        work_s: all work of one micro-batch.
        reach_s: longest way through one micro-batch's work that ends with some stage's synchronisation and update.
        pace_s: what the objective carries of the stage that takes longest for all of its micro-batches.
        end_s: the same with the synchronisation and update that follow, where the objective tells the two apart.
    """

    work_s: np.ndarray
    reach_s: np.ndarray
    pace_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Prefix:
    """Least times of the stages before a cut, each by itself.

    Attributes:
        path_s: forward passes and transfers in, up to the cut: what the first micro-batch needs to get there.
        delay_s: longest of: all work of one micro-batch before the cut, and any path that ends with a stage's end
            there.
        slowest_s: what the objective makes of the stage that takes longest.
    """

    path_s: np.ndarray
    delay_s: np.ndarray
    slowest_s: np.ndarray


@dataclass(frozen=True, eq=False)
class NewStage:
    """A stage, one for each label; arrays that broadcast against each other.

    Attributes:
        replicas: how many it has.
        turns: micro-batches of each of them.
        first: whether no stage comes before it.
        forward_s, backward_s: of one micro-batch, with the transfer in and the one back.
        work_s: of one micro-batch; no less than both together, which may count transfers over different links.
        end_s: synchronisation and update.
        later_s: work of one micro-batch in all stages after it.
        in_flight: micro-batches that a replica keeps.
        filling: forwards that it has left to run while a micro-batch is on its way to the last stage and back.
    """

    replicas: int
    turns: int
    first: bool
    forward_s: np.ndarray
    backward_s: np.ndarray
    work_s: np.ndarray
    end_s: np.ndarray
    later_s: np.ndarray
    in_flight: np.ndarray
    filling: np.ndarray


class Objective(Protocol):
    """A time of complete decisions; it never falls when a time of a prefix or suffix rises."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of those times of a suffix that matter."""

    @property
    def counts_passing(self) -> bool:
        """Whether micro-batches in flight matter for time as well as for memory: labels then compare only where they
        are as many."""

    def available_s(self, cutoff_s: float, total_s: float, compute_s: np.ndarray) -> np.ndarray | float:
        """Seconds that devices have for some blocks of all micro-batches, if decisions are to be below a cutoff.

        Args:
            cutoff_s: the cutoff.
            total_s: compute of all blocks on one micro-batch.
            compute_s: of those blocks.
        """

    def longest_s(self, cutoff_s: float, total_s: float, before_s: np.ndarray, turns: int) -> np.ndarray:
        """Longest compute of one micro-batch that a stage with so many turns has below a cutoff.

        Args:
            cutoff_s: the cutoff.
            total_s: compute of all blocks on one micro-batch.
            before_s: of the blocks before the stage.
            turns: micro-batches of a replica.
        """

    def slowest_s(self, stage: NewStage, before: Prefix) -> np.ndarray:
        """`Prefix.slowest_s` with a stage at the end."""

    def total_s(self, delay_s: np.ndarray, slowest_s: np.ndarray) -> np.ndarray:
        """The objective of all stages as a prefix."""

    def carried(self, suffix: Suffix, stage_s: np.ndarray, forward_s: np.ndarray) -> Suffix:
        """No more than a suffix takes with a stage before it of which only work and forward are known."""

    def grown(
        self, suffix: Suffix, stage: NewStage, promise: np.ndarray, before: Prefix, counts: tuple[int, ...]
    ) -> Iterator[tuple[int, Suffix, np.ndarray]]:
        """A suffix with a new stage before it: for each number of replicas that all stages before that are to have at
        least, the suffix and which labels this number is of use for.

        Args:
            suffix: times so far.
            stage: the new stage.
            promise: numbers that the suffixes count on.
            before: the stages before the new one.
            counts: numbers of replicas that stages may have, ascending.
        """

    def bound_s(self, suffix: Suffix, before: Prefix) -> np.ndarray:
        """No decision that ends with the suffix is faster."""

    def reach_s(self, turns: np.ndarray, needs: StageNeeds, end_s: np.ndarray) -> list[np.ndarray]:
        """No decision with a stage is faster, wherever it lies, for each way to recompute; by last block j and then by
        first. It grows with every block that a stage goes on for.

        Args:
            turns: [R, 1, 1] micro-batches of a replica.
            needs: what stages need.
            end_s: synchronisation and update of the stage.
        """


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

    def reach_s(self, turns: np.ndarray, needs: StageNeeds, end_s: np.ndarray) -> list[np.ndarray]:
        """The pace of the stage, and the two ways through one micro-batch's work: to the last backward, and to the
        stage's update."""
        ways_s = np.maximum(needs.whole_s, needs.whole_s - needs.before_s + needs.forward_before_s + end_s)
        plain_s = (turns - 1) * needs.plain_s + ways_s
        return [plain_s + turns * repeat_s for repeat_s in needs.repeat_s]


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

    def reach_s(self, turns: np.ndarray, needs: StageNeeds, end_s: np.ndarray) -> list[np.ndarray]:
        """All turns of the stage between the stages before it, or before its update; or one micro-batch's way there."""
        around_s = np.maximum(needs.before_s, needs.forward_before_s + end_s)
        through_s = needs.whole_s - needs.before_s + needs.forward_before_s + end_s
        return [np.maximum(turns * (needs.plain_s + each_s) + around_s, through_s) for each_s in needs.repeat_s]


def _own_s(stage: NewStage) -> tuple[np.ndarray, np.ndarray]:
    """From a stage's first forward to the end of its last backward, at the least, and of that the wait for the first
    gradient."""
    first_s = np.maximum(stage.later_s - stage.filling * stage.forward_s, 0.0)
    last_s = np.maximum(stage.later_s - (stage.in_flight - 1) * stage.backward_s, 0.0)
    few = stage.in_flight >= stage.turns
    waits_s = np.where(few, np.maximum(first_s, last_s), first_s + last_s)
    return stage.turns * (stage.forward_s + stage.backward_s) + waits_s, np.where(few, 0.0, first_s)

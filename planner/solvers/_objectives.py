"""The two iteration times that the exact DP minimises: the closed form and the longest chain of waits.

`ClosedForm` is the time by which decisions are ranked (`planner.space.evaluate`). With t = f + b of a stage, transfers
included, it is Q + M: Q (`reach_s`) is the longest path through one micro-batch's work, and M (`pace_s`) is
max (m_i - 1 + late_i) t_i. How late stage i begins depends on the fewest replicas of the stages before it. A suffix
does not know these, so it records how many it relies on (`promise`).

`LongestChain` is the longest chain of waits in a pipeline (`Schedule.critical_s`), a lower bound on the simulated time.
A replica of stage i that keeps at most w of its m micro-batches cannot end its last backward before

    sum_{j<i} f_j  +  m t_i  +  (later - (w' - 1) f_i)_+  +  (later - (w - 1) b_i)_+

where `later` is the work of one micro-batch in all stages after it. While the replica waits for the first gradient, it
can run only w' - 1 forwards (`filling`); while it waits for the last one, only w - 1 backwards. If m <= w, both may be
the same wait, and only the longer counts. From there the last gradient goes down to a stage k <= i, which then
synchronises and updates; or the last forward goes on through one micro-batch's work to the update of a later stage.
Every link of these chains is a wait of the simulated order, so no simulation is shorter. A suffix carries the end of
its first stage's last backward (`pace_s`) and the latest end of all (`end_s`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.space.ranges import StageNeeds


@dataclass(frozen=True, eq=False)
class Suffix:
    """Times of the last stages of a pipeline, arrays by label; a micro-batch enters the first of these stages at 0.

    Attributes:
        work_s: forwards and backwards of one micro-batch.
        reach_s: longest path of one micro-batch that ends with the synchronisation and update of some stage.
        pace_s: the objective's term for the stage that takes longest for all of its micro-batches.
        end_s: the same term with the following synchronisation and update, if the objective distinguishes them.
    """

    work_s: np.ndarray
    reach_s: np.ndarray
    pace_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Prefix:
    """Lower bounds on the times of the stages before a cut, each minimised independently.

    Attributes:
        path_s: forwards and transfers of the first micro-batch up to the cut.
        delay_s: the work of one micro-batch before the cut, or the longest path that ends with a stage's
            synchronisation and update there, whichever is longer.
        slowest_s: the objective's term for the stage that takes longest.
    """

    path_s: np.ndarray
    delay_s: np.ndarray
    slowest_s: np.ndarray


@dataclass(frozen=True, eq=False)
class NewStage:
    """A stage that is put before suffixes, one per label; arrays broadcast against each other.

    Attributes:
        replicas: number of replicas, one for all or by option.
        turns: micro-batches of each replica, likewise.
        first: True if it is the first stage of the pipeline.
        forward_s, backward_s: one micro-batch, with the transfer in and the transfer back.
        work_s: one micro-batch; at least the sum of both, which may count transfers over different links.
        end_s: synchronisation and update.
        later_s: work of one micro-batch in all stages after it.
        in_flight: micro-batches that a replica keeps.
        filling: forwards left to run while a micro-batch is on its way to the last stage and back.
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


class TimeObjective(Protocol):
    """An iteration time to minimise; monotone in the times of prefixes and suffixes."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the `Suffix` times that the objective depends on."""

    @property
    def counts_passing(self) -> bool:
        """True if micro-batches in flight affect the time, so that only labels with the same number compare."""

    def available_s(self, cutoff_s: float, total_s: float, compute_s: np.ndarray) -> np.ndarray | float:
        """Seconds that one device may spend on some blocks, over all micro-batches, in a decision below a cutoff.

        Args:
            cutoff_s: the cutoff.
            total_s: compute of one micro-batch in all blocks.
            compute_s: compute of one micro-batch in these blocks.
        """

    def longest_s(self, cutoff_s: float, total_s: float, before_s: np.ndarray, turns: int) -> np.ndarray:
        """Longest compute of one micro-batch in a stage of a decision below a cutoff.

        Args:
            cutoff_s: the cutoff.
            total_s: compute of one micro-batch in all blocks.
            before_s: compute of one micro-batch in the blocks before the stage.
            turns: micro-batches of a replica.
        """

    def slowest_s(self, stage: NewStage, before: Prefix) -> np.ndarray:
        """`Prefix.slowest_s` after a stage is appended."""

    def total_s(self, delay_s: np.ndarray, slowest_s: np.ndarray) -> np.ndarray:
        """The objective of a prefix that holds all stages."""

    def prepended_bound(self, suffix: Suffix, stage_s: np.ndarray, forward_s: np.ndarray) -> Suffix:
        """Lower bound on the suffix after a stage with this work and forward is put before it."""

    def prepended(
        self, suffix: Suffix, stage: NewStage, promise: np.ndarray, before: Prefix, counts: tuple[int, ...]
    ) -> Iterator[tuple[int, Suffix, np.ndarray]]:
        """Put a stage before suffixes, once for each promise of replicas that may be useful.

        Args:
            suffix: times of the suffixes.
            stage: the new stage.
            promise: fewest replicas before the suffix that each label relies on.
            before: lower bounds on the stages before the new one.
            counts: numbers of replicas that stages may have, ascending.

        Yields:
            Promise of the longer suffix, its times, and a bool mask of the labels for which it is useful.
        """

    def bound_s(self, suffix: Suffix, before: Prefix) -> np.ndarray:
        """Lower bound on the objective of any decision that ends with the suffix."""

    def reach_s(
        self, turns: np.ndarray, needs: StageNeeds, turns_s: Sequence[np.ndarray], end_s: np.ndarray
    ) -> list[np.ndarray]:
        """Lower bound on any decision with a stage of blocks i..j, wherever it lies, per choice of recomputation.

        Arrays are indexed [replicas, last block j, first block i] and grow with every block of the stage.

        Args:
            turns: [R, 1, 1] micro-batches of a replica.
            needs: time and memory needs of stages.
            turns_s: per choice of recomputation, [R or 1, n, n] seconds of one micro-batch in a stage.
            end_s: synchronisation and update of the stage.
        """


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The closed form of the iteration time; see the module."""

    figures: tuple[str, ...] = ("work_s", "reach_s", "pace_s")
    counts_passing: bool = False

    def available_s(self, cutoff_s: float, total_s: float, compute_s: np.ndarray) -> np.ndarray:
        """If (m/r - 1) t <= P for every stage, r devices take at most P r / (m - r), so m C of work needs P + C."""
        return np.asarray(max(0.0, cutoff_s - total_s) + compute_s)

    def longest_s(self, cutoff_s: float, total_s: float, before_s: np.ndarray, turns: int) -> np.ndarray:
        """(m/r - 1) t is at most the cutoff less the work of one micro-batch."""
        most_s = max(0.0, cutoff_s - total_s) / (turns - 1) if turns > 1 else np.inf
        return np.full(before_s.shape, most_s)

    def slowest_s(self, stage: NewStage, before: Prefix) -> np.ndarray:
        """Largest (m_i - 1) t_i, as if no stage began late."""
        return np.asarray(np.maximum(before.slowest_s, (stage.turns - 1) * stage.work_s))

    def total_s(self, delay_s: np.ndarray, slowest_s: np.ndarray) -> np.ndarray:
        """Q + M."""
        return np.asarray(delay_s + slowest_s)

    def prepended_bound(self, suffix: Suffix, stage_s: np.ndarray, forward_s: np.ndarray) -> Suffix:
        """Lower bound that leaves out the new stage's pace."""
        return Suffix(suffix.work_s + stage_s, suffix.reach_s + forward_s, suffix.pace_s, suffix.end_s)

    def prepended(
        self, suffix: Suffix, stage: NewStage, promise: np.ndarray, before: Prefix, counts: tuple[int, ...]
    ) -> Iterator[tuple[int, Suffix, np.ndarray]]:
        """One longer suffix per useful promise.

        A pace below that of the stages before is raised to it, which makes more labels comparable.
        """
        work_s = suffix.work_s + stage.work_s
        reach_s = np.maximum(work_s + stage.end_s, suffix.reach_s + stage.forward_s)
        slowest_s, turns = np.maximum(suffix.pace_s, before.slowest_s), stage.turns - 1
        useful = np.ones(len(work_s), dtype=bool)
        # The first stage never begins late; any other does unless it is promised as many replicas before it.
        for count in (stage.replicas,) if stage.first else counts:
            if count > stage.replicas:
                break
            stage_pace_s = (turns + 1 - count / stage.replicas) * stage.work_s
            pace_s = np.maximum(slowest_s, stage_pace_s)
            yield count, Suffix(work_s, reach_s, pace_s, suffix.end_s), useful & (promise <= count)
            # Promising more helps only while this stage is the slowest.
            useful &= (promise > count) | (stage_pace_s > slowest_s)

    def bound_s(self, suffix: Suffix, before: Prefix) -> np.ndarray:
        """Q + M with the lower bounds of the prefix."""
        reach_s = np.maximum(suffix.work_s + before.delay_s, suffix.reach_s + before.path_s)
        return np.asarray(reach_s + np.maximum(suffix.pace_s, before.slowest_s))

    def reach_s(
        self, turns: np.ndarray, needs: StageNeeds, turns_s: Sequence[np.ndarray], end_s: np.ndarray
    ) -> list[np.ndarray]:
        """The stage's pace plus the longer path of one micro-batch: to the last backward, or to the stage's update."""
        path_s = np.maximum(needs.whole_s, needs.whole_s - needs.before_s + needs.forward_before_s + end_s)
        others_s = path_s - needs.plain_s
        return [turns * turn_s + others_s for turn_s in turns_s]


@dataclass(frozen=True, slots=True)
class LongestChain:
    """The longest chain of waits; see the module."""

    figures: tuple[str, ...] = ("work_s", "reach_s", "pace_s", "end_s")
    counts_passing: bool = True

    def available_s(self, cutoff_s: float, total_s: float, compute_s: np.ndarray) -> float:
        """No device works longer than the iteration lasts."""
        return cutoff_s

    def longest_s(self, cutoff_s: float, total_s: float, before_s: np.ndarray, turns: int) -> np.ndarray:
        """The stage does all its turns after one micro-batch's work in the blocks before it."""
        return np.asarray(np.maximum(cutoff_s - before_s, 0.0) / turns)

    def slowest_s(self, stage: NewStage, before: Prefix) -> np.ndarray:
        """Latest end of any stage's last backward and of the backwards that must follow in the stages before it.

        Leaves out the wait for the last gradient, so that it holds for all schedules that keep no more micro-batches.
        """
        first_s = np.maximum(stage.later_s - stage.filling * stage.forward_s, 0.0)
        turns_s = stage.turns * np.maximum(stage.forward_s + stage.backward_s, stage.work_s) + first_s
        turns_s = np.maximum(before.delay_s + turns_s, before.path_s + turns_s + stage.end_s)
        return np.asarray(np.maximum(before.slowest_s, turns_s))

    def total_s(self, delay_s: np.ndarray, slowest_s: np.ndarray) -> np.ndarray:
        """The longer of the two."""
        return np.asarray(np.maximum(delay_s, slowest_s))

    def prepended_bound(self, suffix: Suffix, stage_s: np.ndarray, forward_s: np.ndarray) -> Suffix:
        """Lower bound that leaves out the chain within the new stage."""
        return Suffix(
            suffix.work_s + stage_s, suffix.reach_s + forward_s, suffix.pace_s + stage_s, suffix.end_s + forward_s
        )

    def prepended(
        self, suffix: Suffix, stage: NewStage, promise: np.ndarray, before: Prefix, counts: tuple[int, ...]
    ) -> Iterator[tuple[int, Suffix, np.ndarray]]:
        """One longer suffix: chains that end in the new stage, pass through it, or leave it after its last forward."""
        turnaround_s, first_s = _turnaround_s(stage)
        work_s = suffix.work_s + stage.work_s
        reach_s = np.maximum(work_s + stage.end_s, suffix.reach_s + stage.forward_s)
        pace_s = np.maximum(suffix.pace_s + stage.work_s, turnaround_s)
        backwards = stage.turns - stage.in_flight
        leave_s = stage.turns * stage.forward_s + backwards * stage.backward_s + first_s + suffix.reach_s
        end_s = np.maximum(np.maximum(suffix.end_s + stage.forward_s, pace_s + stage.end_s), leave_s)
        yield 1, Suffix(work_s, reach_s, pace_s, end_s), np.ones(len(work_s), dtype=bool)

    def bound_s(self, suffix: Suffix, before: Prefix) -> np.ndarray:
        """The longest chain on either side of the cut or across it."""
        backward_chain_s = np.maximum(suffix.work_s, suffix.pace_s) + before.delay_s
        forward_chain_s = np.maximum(suffix.reach_s, suffix.end_s) + before.path_s
        return np.asarray(np.maximum(np.maximum(backward_chain_s, forward_chain_s), before.slowest_s))

    def reach_s(
        self, turns: np.ndarray, needs: StageNeeds, turns_s: Sequence[np.ndarray], end_s: np.ndarray
    ) -> list[np.ndarray]:
        """All turns of the stage with the work before it or its update; or one micro-batch's path to its update."""
        around_s = np.maximum(needs.before_s, needs.forward_before_s + end_s)
        through_s = needs.whole_s - needs.before_s + needs.forward_before_s + end_s
        return [np.maximum(turns * turn_s + around_s, through_s) for turn_s in turns_s]


def _turnaround_s(stage: NewStage) -> tuple[np.ndarray, np.ndarray]:
    """(least time from a stage's first forward to the end of its last backward, its wait for the first gradient)."""
    first_s = np.maximum(stage.later_s - stage.filling * stage.forward_s, 0.0)
    last_s = np.maximum(stage.later_s - (stage.in_flight - 1) * stage.backward_s, 0.0)
    few = stage.in_flight >= stage.turns
    waits_s = np.where(few, np.maximum(first_s, last_s), first_s + last_s)
    return stage.turns * (stage.forward_s + stage.backward_s) + waits_s, np.where(few, 0.0, first_s)

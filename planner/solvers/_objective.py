"""What the exact DP needs to know of a time that it minimises."""

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

    def reach_s(self, turns: np.ndarray, needs: StageNeeds, end_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """No decision with a stage is faster, wherever it lies, without and with recomputation; by last block j and
        then by first. It grows with every block that a stage goes on for.

        Args:
            turns: [R, 1, 1] micro-batches of a replica.
            needs: what stages need.
            end_s: synchronisation and update of the stage.
        """

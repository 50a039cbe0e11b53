"""A point of the space as stages for a given schedule are planned with."""

from __future__ import annotations

from dataclasses import dataclass

from planner.space.types import StageChoice


@dataclass(frozen=True, slots=True)
class Point:
    """What a system decided: a point of the space, and how it is played.

    Attributes:
        stages: blocks and replicas of each stage; with recomputation or not.
        copies: copies of the whole pipeline.
        micro_batch: samples a replica works on at a time.
        micro_batches: in one copy, of one iteration.
        schedule: with its options.
        ranks: the device of each stage, where stages do not take the devices in line; empty otherwise.
        zero: 0, or 1 when the optimizer state is sharded over a stage's replicas.
        played: micro-batches that are simulated, where an iteration of a pipeline that never drains has more.
        slice_devices: devices of one copy's slice; 0 means as many as its stages take.
        whole: stages that recompute keep what enters them alone and repeat all their work at once, as GPipe's cells do,
            instead of block by block.
    """

    stages: tuple[StageChoice, ...]
    copies: int
    micro_batch: int
    micro_batches: int
    schedule: str
    ranks: tuple[int, ...] = ()
    zero: int = 0
    played: int = 0
    slice_devices: int = 0
    whole: bool = False

    @property
    def adjacent(self) -> bool:
        """Whether the copies of each worker are neighbouring devices: rank w * copies + c is worker w of copy c."""
        workers = len(self.ranks) // self.copies
        dealt = tuple(worker * self.copies + copy for copy in range(self.copies) for worker in range(workers))
        return self.copies > 1 and workers > 0 and self.ranks == dealt

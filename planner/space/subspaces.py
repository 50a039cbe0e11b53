"""Parts of the search space: what a published system may choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import InfeasibleError
from planner.play import Transfers
from planner.space.types import Job


class Recompute(StrEnum):
    """Which activation recomputation may be chosen."""

    NEVER = "never"
    BLOCKS = "blocks"
    """Of the stages where it pays or is needed, layer by layer."""

    STAGES = "stages"
    """The same, a stage at once from what enters it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A part of the search space, as a published system has it: changes of a job.

    Attributes:
        schedules: by name; empty for the job's.
        recompute: in order of preference; the next is tried only where nothing fits with the one before.
        transfers: what a transfer between stages occupies.
        zero: ZeRO stages.
        tensor_parallel: numbers of ranks that share operators.
        uniform: as many replicas for every stage.
        copies: whole pipelines may be replicated.
        fewest_stages: of a pipeline.
        stage_a_device: as many stages as there are devices, or blocks if these are fewer.
        micro_batches: sizes; empty for any.
    """

    schedules: tuple[str, ...] = ()
    recompute: tuple[Recompute, ...] = (Recompute.NEVER,)
    transfers: Transfers = Transfers.BLOCKING
    zero: tuple[int, ...] = (0,)
    tensor_parallel: tuple[int, ...] = (1,)
    uniform: bool = True
    copies: bool = True
    fewest_stages: int = 1
    stage_a_device: bool = False
    micro_batches: tuple[int, ...] = ()

    def jobs(self, job: Job, devices: int, blocks: int) -> Iterator[Job]:
        """The job within these limits, once for each kind of recomputation, in order of preference.

        Args:
            job: what is to be trained.
            devices: that may be used.
            blocks: of the model's chain.

        Raises:
            InfeasibleError: the devices or the blocks are too few for a pipeline.
        """
        deepest = min(devices, blocks)
        if deepest < self.fewest_stages:
            raise InfeasibleError(
                f"a pipeline needs {self.fewest_stages} devices and a model of as many blocks",
                hint="use more devices",
            )
        stages = tuple(range(self.fewest_stages, blocks + 1)) if self.fewest_stages > 1 else ()
        changed = replace(
            job,
            schedules=self.schedules or job.schedules,
            transfers=self.transfers,
            zero=self.zero,
            tensor_parallel=self.tensor_parallel,
            uniform=self.uniform,
            pipeline_stages=(deepest,) if self.stage_a_device else stages,
            data_parallel=() if self.copies else (1,),
            micro_batches=self.micro_batches or job.micro_batches,
        )
        for kind in self.recompute:
            choice = "never" if kind is Recompute.NEVER else "layers"
            yield replace(changed, recompute=choice, whole_stages=kind is Recompute.STAGES)

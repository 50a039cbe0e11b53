"""A job as a framework's configuration has it, and what follows for it from the number of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.errors import UsageError
from planner.space.configuration import Structure
from planner.space.named import Degrees


@dataclass(frozen=True, slots=True)
class FrameworkJob:
    """A job as read from a framework's own configuration.

    Attributes:
        degrees: how the job is divided.
        global_batch: samples of an update; None where the file leaves it to the number of ranks.
        precision: number formats, by our name; "" where the file does not say.
        optimizer: by our name; "" where the file does not say.
        overlap: 0 where the file turns off the overlap of communication with computation; None where it does not.
        ignored: settings that would change a prediction but cannot be taken over, each with the direction of its
            effect and the reason.
        sequence: tokens of a sample; 0 where the file does not say.
        between: how tensors lie between layers on tensor-parallel ranks: "sequence", "replicated", "" for either.
        accumulated: micro-batches of a data-parallel rank in an update; 0 where the file does not say.
        micro_open: the micro-batch follows from global batch, ranks and `accumulated`.
        instances: groups of data-parallel ranks each of which holds all state; 1 where all ranks share it.
        data: data-parallel ranks that the file says; 0 where it leaves them to the number of devices.
        drained: samples of a data-parallel rank after which the pipeline drains, where it does so within an update; 0
            where it does not.
        rule: option names for messages: global batch, micro-batch, accumulation.
    """

    degrees: Degrees
    global_batch: int | None = None
    precision: str = ""
    optimizer: str = ""
    overlap: float | None = None
    ignored: tuple[str, ...] = ()
    sequence: int = 0
    between: str = ""
    accumulated: int = 0
    micro_open: bool = False
    instances: int = 1
    data: int = 0
    drained: int = 0
    rule: tuple[str, str, str] = ("global batch", "micro-batch", "accumulation")

    @property
    def structure(self) -> Structure:
        """The limits that the file puts on how ranks share operators (`Job.structure`)."""
        return Structure(between_layers=(self.between,) if self.between else ())

    def on(self, devices: int) -> FrameworkJob:
        """The job on so many devices: with its global batch, micro-batch and the ranks that share state.

        Raises:
            UsageError: the sizes of batches contradict each other, or groups of shards do not come out.
        """
        degrees = self.degrees
        group = degrees.tensor * degrees.pipeline * degrees.context * degrees.replicas
        ranks = degrees.data or max(1, devices // group)
        if self.data and not degrees.data and self.data != ranks:
            problem = f"the file divides the job over {self.data * group} ranks, and there are {devices} devices"
            raise UsageError(problem, hint=f"use --devices {self.data * group} or --nodes, or say --dp")
        each, batch = max(1, self.accumulated), self.global_batch
        if self.micro_open:
            if batch is None or batch % (ranks * each):
                problem = f"{self.rule[0]} {batch} is not divided by {ranks} data-parallel ranks x {each} micro-batches"
                raise UsageError(problem, hint="give --micro-batch and -b")
            degrees = replace(degrees, micro_batch=batch // (ranks * each))
        if batch is None:
            batch = degrees.micro_batch * each * ranks
        elif self.accumulated and batch != degrees.micro_batch * each * ranks:
            named = f"{self.rule[1]} {degrees.micro_batch} x {self.rule[2]} {each} x {ranks} data-parallel ranks"
            raise UsageError(
                f"{self.rule[0]} is {batch}, and {named} are {degrees.micro_batch * each * ranks}",
                hint="take one of the three out of the file, or give -b and --micro-batch",
            )
        if self.instances > 1 and degrees.zero and not degrees.shard_over:
            copies = ranks // max(1, degrees.expert)
            if copies % self.instances:
                problem = f"{self.instances} groups of shards do not divide {copies} replicas"
                raise UsageError(problem, hint="use a number that does, or --shard-over")
            over = copies // self.instances
            degrees = replace(degrees, shard_over=over) if over > 1 else replace(degrees, zero=0)
        drains, notes = batch // (self.drained * ranks) if self.drained else 1, self.ignored
        if drains > 1:
            notes = (*notes, f"{self.rule[0]} {batch}: slower; the pipeline drains {drains} times in a step, here once")
        return replace(self, degrees=degrees, global_batch=batch, ignored=notes)

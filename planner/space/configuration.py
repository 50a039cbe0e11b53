"""How a job runs: the decision that every search makes, the judge prices and every plan holds.

And what training frameworks demand of all decisions that they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.play import Transfers

LAYER_INPUT = "layer_input"
"""In place of modules that are offloaded: all that a stage keeps that recomputes its layers."""


class RecomputeChoice(NamedTuple):
    """One way to keep a stage's activations or to recompute them, as in `StageChoice`."""

    recompute: bool = False
    repeats: tuple[str, ...] = ()
    layers: int = 0
    offload: tuple[str, ...] = ()


KEEP_ALL = RecomputeChoice()
"""Nothing is recomputed, and nothing moves to the host's memory."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage (a chunk, where workers hold several) on `replicas` groups of `ranks` devices.

    Attributes:
        start: its first block.
        stop: the block behind its last one.
        replicas: groups of ranks that take micro-batches in turn, in one copy of the pipeline.
        recompute: the forward of all its layers runs again in the backward pass, or of the first `layers` of them.
        ranks: devices of a group, which share every operator.
        sharding: how they share it: an index into the shardings of the micro-batch size (`BlockCosts.sharding`), 0 for
            none.
        context: ranks of a group that share the sequence (CP).
        expert: ranks of a group to which samples and experts are dealt (EP).
        repeats: names of modules whose forward runs again (`planner.operators.modules`), without `recompute`.
        offload: names of modules whose activations, as far as they are kept for the backward pass and no other module
            keeps them, lie in the host's memory until then; `LAYER_INPUT` where all layers are recomputed, which keep
            nothing else.
        layers: the first layers that are recomputed (`planner.space.layers`); 0 for all.
    """

    start: int
    stop: int
    replicas: int
    recompute: bool = False
    ranks: int = 1
    sharding: int = 0
    context: int = 1
    expert: int = 1
    repeats: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    layers: int = 0

    @property
    def keeping(self) -> RecomputeChoice:
        """What is done with activations."""
        return RecomputeChoice(self.recompute, self.repeats, self.layers, self.offload)

    @property
    def devices(self) -> int:
        """Devices of one copy of the stage."""
        return self.replicas * self.ranks


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything that says how a job runs: indices and numbers only.

    The schedule says which worker holds which stages (`Schedule.placement`): one each, several chunks a worker
    (interleaved, V, wave), or one stage on several workers (bidirectional). `planner.space.lay_workers` gives every
    worker its ranks.

    Attributes:
        stages: in order; together they cover all blocks.
        copies: copies of the whole pipeline.
        micro_batch: samples a replica runs at a time.
        micro_batches: micro-batches per iteration in one copy; each stage's replicas divide it.
        schedule: name of the schedule, with its options.
        zero: ZeRO stage: what is sharded over a stage's replicas.
        shard_over: neighbouring replicas over which a stage's state is sharded, where that is a part of them (HSDP): as
            many replicas hold each shard as there are such groups. 0 for all replicas.
        slice_devices: devices in one copy's slice; 0 means as many as its workers take. Where a slice has more, its
            first devices stay idle.
        adjacent: the copies of each worker are neighbouring devices, instead of the workers of each copy.
        devices: the device of every worker, copy by copy, where devices are not taken in line; empty otherwise.
        whole_stages: recomputation repeats a stage from what enters it, instead of layer by layer.
        transfers: what a transfer between stages occupies.
        exchange: scheme by which gradients travel, with its options; empty for the recipe of the ZeRO stage.
        precision: number formats of weights, activations, gradients and their sums, by name (`Job.precision`); empty
            for the job's.
        overlap: the part of a pass behind which exchanges hide, from 0 to 1; None for the job's.
    """

    stages: tuple[StageChoice, ...]
    copies: int
    micro_batch: int
    micro_batches: int
    schedule: str
    zero: int = 0
    slice_devices: int = 0
    adjacent: bool = False
    devices: tuple[int, ...] = ()
    whole_stages: bool = False
    transfers: Transfers = Transfers.BLOCKING
    exchange: str = ""
    precision: str = ""
    overlap: float | None = None
    shard_over: int = 0


@dataclass(frozen=True, slots=True)
class Structure:
    """Restrictions that a training framework puts on plans, beside the user's own options; none by default.

    Attributes:
        equal_replicas: all stages have the same number of replicas.
        alike: all stages have the same sharding and the same recomputation.
        whole_layers: stages begin where a layer begins.
        axes: allowed roles of mesh axes (`planner.sharding.AxisRole`); tensor axes then split operators as the layers
            of frameworks do (`planner.sharding.limits`). Empty allows anything.
        powers_of_two: mesh axes have 1, 2, 4, 8 .. ranks, as is usual; a search looks at no others.
        head_groups: what the ranks of the tensor axes must divide: "" nothing, "heads" the attention heads, "key-value
            heads" the heads that have keys of their own.
        zero_in_pipelines: allowed ZeRO stages of plans with several pipeline stages; empty for those of the job.
        zero_alone: allowed ZeRO stages of plans with one stage; empty for those of the job.
        between_layers: allowed layouts of tensors between layers on a tensor axis, "replicated" or "sequence"; empty
            for both.
        some_layers: stages may recompute the first of their layers only.
        offloads: what a search may keep in the host's memory: kinds of modules, and `layer_input` of layers that are
            recomputed. Empty for nothing.
        offload_zero: ZeRO stages beside which it may; empty for those of the job.
    """

    equal_replicas: bool = False
    alike: bool = False
    whole_layers: bool = False
    axes: tuple[str, ...] = ()
    powers_of_two: bool = False
    head_groups: str = ""
    zero_in_pipelines: tuple[int, ...] = ()
    zero_alone: tuple[int, ...] = ()
    between_layers: tuple[str, ...] = ()
    some_layers: bool = True
    offloads: tuple[str, ...] = ()
    offload_zero: tuple[int, ...] = ()


UNRESTRICTED = Structure()
"""No restriction at all."""

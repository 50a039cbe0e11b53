"""What a plan is made of beside the model: the cluster, stages, what lies between them, the schedule, the exchange.

Indices count from 0; a range `[a, b]` stands for a, a + 1, ..., b - 1; times are seconds, sizes bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.exchange.fabric import LinkBytes
from planner.plans.orders import RankOrder
from planner.schedules.types import OptimizerScaling as OptimizerScaling
from planner.schedules.types import StageCorrection as StageCorrection
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """Neighbouring ranks of one device type: `count` of them from `first_rank`.

    Attributes:
        device: name of the type.
        first_rank: the first of them.
        count: how many.
        memory_bytes: all memory that a program can see.
        reserve_bytes: context of the runtime and kernels that are loaded.
        neighbour_bytes: communication buffers for each neighbour of a rank in one of its groups; left out where none
            are counted.
    """

    device: str
    first_rank: int
    count: int
    memory_bytes: int
    reserve_bytes: int
    neighbour_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """One tier of links.

    Attributes:
        name: its name in the profile.
        size: groups of the tier below that it joins; devices, for the innermost.
        byte_per_s: bandwidth of a link in one direction, before efficiency.
        device_byte_per_s: the part of it that a device can use alone, likewise.
        latency_s: of a message.
    """

    name: str
    size: int
    byte_per_s: float
    device_byte_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class HardwareSection:
    """The cluster that the plan is for.

    Attributes:
        name: as in the profile.
        fingerprint: sha256 (hex) of the resolved profile.
        device_count: devices of the cluster, also those that the plan leaves idle.
        devices: device type by rank, neighbours together.
        levels: tiers of links, innermost first.
        stack: the software that is assumed to train, by name or file; a part of the fingerprint. "" in plans of before.
        headroom: part of each device's memory that the plan leaves free: capacities of stages are that much smaller.
            Left out where it is 0.
        node_size: devices of a machine; left out where a machine is what the innermost level joins.
        device_order: numbers of a machine's devices, as its driver counts them, in the order of the ranks; left out
            where rank i of a machine runs on device i.
    """

    name: str
    fingerprint: str
    device_count: int
    devices: tuple[DeviceRun, ...]
    levels: tuple[LinkLevel, ...]
    stack: str = ""
    headroom: float = 0.0
    node_size: int = 0
    device_order: tuple[int, ...] = ()

    @property
    def machine_devices(self) -> int:
        """Devices of a machine; 1 for a single device."""
        return self.node_size or (self.levels[0].size if self.levels else 0) or 1

    @property
    def nodes(self) -> int:
        """Machines of the cluster."""
        return self.device_count // self.machine_devices

    @property
    def device_words(self) -> str:
        """The devices of a machine in the order of its ranks, in words."""
        return f"{', '.join(map(str, self.device_order))} (`CUDA_VISIBLE_DEVICES`)"

    def device_of(self, rank: int) -> int:
        """Number of a rank's device on its machine, as the driver counts."""
        place = rank % self.machine_devices
        return self.device_order[place] if self.device_order else place


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """How the global batch is divided.

    Attributes:
        size: samples in a micro-batch.
        count: micro-batches of one iteration over all copies, numbered 0 to count - 1.
        global_batch: samples of one iteration: size * count.
        loss_reduction: how the loss is taken over the samples of a micro-batch.
        gradient_scale: factor of each micro-batch's gradient before all are summed, so that the sum is the gradient of
            the mean loss over the global batch: 1 / count.
    """

    size: int
    count: int
    global_batch: int
    loss_reduction: Literal["mean"]
    gradient_scale: float


@dataclass(frozen=True, slots=True)
class RankReplicas:
    """Weights of which several ranks of a group hold the same, since samples or steps are dealt to them.

    Attributes:
        ranks: that hold the same.
        parameters: trained weight elements that each of them holds so, a tied copy counted once.
    """

    ranks: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        index: its number.
        blocks: range of blocks, `[start, stop]`; their operators and parameters are the stage's.
        modules: the same for people, `model.layers.0-7`.
        inputs: model inputs that the stage reads, also those that only its duplicated operators read.
        outputs: model outputs that it makes.
        replicas: rank groups; each group is one replica of the stage, several ranks in it share its work (tensor
            parallel).
        recompute: activations are dropped after forward and computed again before backward.
        kept_blocks: blocks of a recomputed stage whose activations are kept all the same (logits and loss, and the
            layers behind where only the first ones are recomputed), so that their forward is not repeated.
        zero: ZeRO stage: what is sharded over the replicas (0 nothing, 1 optimizer state, 2 gradients, 3 weights too).
        parameters: trained weight elements of one replica, a tied copy counted once.
        shard_over: neighbouring replicas over which it is sharded, where that is a part of them; left out for all.
        sharding: name of the way in which the ranks of a group share the work; left out for groups of one rank.
        rank_parameters: trained weight elements that one rank of a group holds, a tied copy counted once, and as where
            a rank holds most of it; left out with `sharding`.
        rank_replicas: those of them that ranks of a group hold alike beside a context or expert axis: their gradients
            are summed over these ranks first, and what ZeRO shards is sharded over them too.
        repeats: names of the modules whose forward is run again in the backward pass (`layernorm`, `moe_act`, or
            patterns of operators), where the stage is not recomputed as a whole; left out where none is.
        repeated: operators of these modules in the stage's blocks, by name; left out where there are none.
        dropped: those of them whose results are dropped, too, and made again before they are read next; left out where
            there are none.
        offload: names of the modules whose activations lie in the host's memory from forward to backward, as far as
            they are kept and no other module keeps them; `layer_input` where the stage is recomputed as a whole: what
            that keeps. Left out where none do.
        offloaded: operators of the offloaded modules in the stage's blocks, by name; left out where there are none.
    """

    index: int
    blocks: tuple[int, int]
    modules: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    replicas: tuple[tuple[int, ...], ...]
    recompute: bool
    kept_blocks: tuple[int, ...]
    zero: int
    parameters: int
    sharding: str = ""
    rank_parameters: int = 0
    rank_replicas: tuple[RankReplicas, ...] = ()
    repeats: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    shard_over: int = 0

    @property
    def keeping(self) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
        """What is done with activations: `recompute`, `repeats` and `offload`."""
        return self.recompute, self.repeats, self.offload

    @property
    def group_ranks(self) -> int:
        """Ranks of a replica."""
        return len(self.replicas[0]) if self.replicas else 1

    @property
    def held_parameters(self) -> int:
        """Trained weight elements that one rank holds."""
        return self.rank_parameters if self.sharding else self.parameters

    @property
    def shard_parameters(self) -> float:
        """What is left of these to a rank where those that hold the same share them out."""
        return self.held_parameters - float_sum(own.parameters * (1 - 1 / own.ranks) for own in self.rank_replicas)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the stage, replica by replica."""
        return tuple(rank for group in self.replicas for rank in group)


@dataclass(frozen=True, slots=True)
class Duplicated:
    """Parameter-free operators (masks, rotary tables) that each of some stages computes for itself.

    Attributes:
        nodes: the operators, by the name of their first output, in order.
        stages: the stages, ascending.
    """

    nodes: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that goes from one stage to others, once a micro-batch.

    Attributes:
        tensor: its name.
        from_stage: the stage that makes it.
        to_stages: the stages that read it, ascending.
        shape: at the plan's micro-batch size.
        dtype: as it is sent in training.
        bytes: its size.
        gradient: whether a gradient of the same shape goes back.
        layout: how it lies on the ranks of the group that makes it; left out where that is one rank.
        rank_bytes: what each of them holds; left out with `layout`.
        received: by stage of `to_stages`, how it lies on the ranks of the group that reads it ("" for one rank); left
            out where all are one rank.
    """

    tensor: str
    from_stage: int
    to_stages: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    gradient: bool
    layout: str = ""
    rank_bytes: int = 0
    received: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages hold (tied weights).

    With `reduction` "sum" their gradients are summed before every update, so that the copies stay equal: by each rank
    in the last exchange (`S`) that it runs of these stages. With "none", where the pipeline never drains, each stage
    updates a copy of its own with its own gradient.

    Attributes:
        parameter: its name.
        names: initializers that stand for it: the parameter itself and its tied copies.
        stages: the stages that hold it, ascending.
        reduction: whether the gradients of these stages are summed.
        bytes: of its gradient.
    """

    parameter: str
    names: tuple[str, ...]
    stages: tuple[int, ...]
    reduction: Literal["sum", "none"]
    bytes: int


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file that a plan was made from, by its content: nothing else in the plan says whether it changed since.

    Attributes:
        name: of the file, without folders.
        sha256: of its bytes (hex).
    """

    name: str
    sha256: str

    @classmethod
    def of(cls, path: str | Path, content: bytes) -> FileRead:
        """A file by its path and content."""
        return cls(Path(path).name, hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the plan came to be; not part of the digest.

    Attributes:
        tool: program that wrote it.
        version: of the program.
        command: the command line that wrote a plan of version 0.1; left out since.
        model: the model as the user named it: the name of a bundled model, or of a file without its folders.
        hardware: the hardware as the user named it, likewise.
        dims: sizes that the model was read at, `seq=1024` each, in order of name; left out where none was given.
        nodes: number of nodes that was asked for, or `4x64`; left out where the profile's own was taken.
        changes: figures of the hardware that were set, `network.bandwidth=200Gbit/s` each.
        stack: the stack as the user named it, likewise; left out where none was given.
        costs: the file of seconds of operators, likewise.
        files: further files that the plan was made from: orders of work, a configuration, one of a training framework.
    """

    tool: str
    version: str
    command: tuple[str, ...] = ()
    model: str = ""
    hardware: str = ""
    dims: tuple[str, ...] = ()
    nodes: str = ""
    changes: tuple[str, ...] = ()
    stack: str = ""
    costs: str = ""
    files: tuple[FileRead, ...] = ()


Given = Literal["", "name", "orders", "configuration"]


WORK_FIELDS = ("parts", "causal", "streaming", "limits")
"""Fields with the same name and meaning in `ScheduleSection` and in the schedule's `Work`."""


@dataclass(frozen=True, slots=True)
class ScheduleSection:
    """Who does what in which order. What does not apply is left out of the file.

    Attributes:
        name: name of the schedule, with options.
        weight_policy: which versions of the weights are used: "sync" means one version, updated after a flush; "stash":
            a backward reads the version of its forward; "2bw": two versions, swapped once an iteration; "vertical":
            every stage reads the version that the first had when the micro-batch entered; "newest": what is newest.
        orders: the explicit actions of every rank.
        iterations: iterations that the orders span, what goes on for ever taken once; micro-batches are numbered on.
        parts: parts of a micro-batch (sub-sequences), numbered from 0.
        causal: a part needs those before it in the forward and those after it in the backward.
        side_by_side: a rank runs its lanes at the same time, each at half of its speed.
        streaming: a stage passes its result on while it works.
        spans: an iteration begins on each rank where its last one ended, not when all have ended.
        versions: by stage, versions of its weights that a rank keeps; left out where it is one.
        limits: by stage, micro-batches that a rank may keep; a forward waits for room. Left out where orders see to it.
        staleness: by stage, most updates between the weights that a forward reads and the update that applies its
            gradient; left out where there is none.
        averaged: by stage, micro-batches whose gradients make one update, where that is less than an iteration: each is
            multiplied by one over that, not by `gradient_scale`. Left out where an update has a whole iteration's.
        clock_distance: updates of other copies that a micro-batch may lack, in waves; left out where copies wait for
            each other at every update.
        transfers: what a transfer between stages occupies in the predictions: "blocking" its receiver too, "overlapped"
            the link alone.
        corrections: by stage.
        optimizer: for another batch size.
        given: how the user gave the schedule: "name" where it was asked for by name, "orders" where the orders are the
            user's own and the name only what they are called, "configuration" where the user named all degrees; left
            out where the search or a system chose it.
    """

    name: str
    weight_policy: str
    orders: tuple[RankOrder, ...]
    iterations: int = 1
    parts: int = 1
    causal: bool = False
    side_by_side: bool = False
    streaming: bool = False
    spans: bool = False
    versions: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    staleness: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    clock_distance: int | None = None
    transfers: Literal["blocking", "overlapped"] = "blocking"
    corrections: tuple[StageCorrection, ...] = ()
    optimizer: OptimizerScaling | None = None
    given: Given = ""

    @property
    def continuous(self) -> bool:
        """Whether something goes on for ever: the pipeline does not drain after an iteration."""
        return any("]" in order.actions for order in self.orders)


@dataclass(frozen=True, slots=True)
class SystemSection:
    """The published system whose rules chose the plan.

    Attributes:
        name: the name users choose it by.
        title: as published.
        source: where it was published.
        tells: what a backend must know to run the plan faithfully, by topic.
        notes: what was assumed for this plan.
    """

    name: str
    title: str
    source: str
    tells: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorExchange:
    """Weights whose gradients travel alike.

    Attributes:
        tensors: names of the weights.
        method: how.
        bytes: of all their gradients on one rank.
        shares: the part of each that every server holds: the machines of the group in line, then servers beside them;
            left out where there are no servers.
    """

    tensors: tuple[str, ...]
    method: str
    bytes: int
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FusedMessage:
    """Gradients, or parts of them, that travel together.

    Attributes:
        tensors: names of the weights.
        bytes: on one rank.
    """

    tensors: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeSection:
    """How gradients are exchanged once an iteration.

    Attributes:
        scheme: its name, with options.
        seconds: what it takes when nothing else runs.
        exposed_s: what it adds to the iteration beside forward and backward.
        tensors: by method and servers.
        links: bytes by level, innermost first.
        messages: in the order in which they are sent; left out where every tensor is a message.
        notes: what the price leaves out.
    """

    scheme: str
    seconds: float
    exposed_s: float
    tensors: tuple[TensorExchange, ...]
    links: tuple[LinkBytes, ...]
    messages: tuple[FusedMessage, ...] = ()
    notes: tuple[str, ...] = ()

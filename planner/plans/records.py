"""What a plan is made of: the model, the cluster, micro-batches, stages, and the tensors and weights between them.

Indices count from 0; a range `[a, b]` stands for a, a + 1, ..., b - 1; times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Loss(StrEnum):
    """Where the training loss is."""

    IN_GRAPH = "in_graph"
    AT_OUTPUTS = "at_outputs"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that enters or leaves the model, at the plan's micro-batch size, in the type it is trained in."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The model that the plan is for.

    Attributes:
        name: for people.
        fingerprint: sha256 (hex) of the model's structure; a plan holds for this model only.
        opset: version of the default ONNX operator set; 0 for other formats.
        inputs: fed at each step.
        outputs: results.
        loss: whether the graph computes the loss or ends at outputs that a loss is to be put on.
        operators: operators that the stages divide among themselves.
        parameters: trained weight elements, a tied copy counted once.
    """

    name: str
    fingerprint: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    loss: Loss
    operators: int
    parameters: int


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """Neighbouring ranks of one device type: `count` of them from `first_rank`."""

    device: str
    first_rank: int
    count: int
    memory_bytes: int
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """One tier of links, joining `size` groups of the tier below; one direction, before efficiency."""

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
    """

    name: str
    fingerprint: str
    device_count: int
    devices: tuple[DeviceRun, ...]
    levels: tuple[LinkLevel, ...]

    @property
    def nodes(self) -> int:
        """Groups of the innermost level (machines); 1 for a single device."""
        return self.device_count // self.levels[0].size if self.levels else 1


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
        kept_blocks: blocks of a recomputed stage whose activations are kept all the same (logits and loss), so that
            their forward is not repeated.
        zero: ZeRO stage: what is sharded over the replicas (0 nothing, 1 optimizer state, 2 gradients, 3 weights too).
        parameters: trained weight elements of one replica, a tied copy counted once.
        sharding: name of the way in which the ranks of a group share the work; left out for groups of one rank.
        rank_parameters: trained weight elements that one rank of a group holds, a tied copy counted once, and as where
            a rank holds most of it; left out with `sharding`.
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

    @property
    def group_ranks(self) -> int:
        """Ranks of a replica."""
        return len(self.replicas[0]) if self.replicas else 1

    @property
    def held_parameters(self) -> int:
        """Trained weight elements that one rank holds."""
        return self.rank_parameters if self.sharding else self.parameters

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the stage, replica by replica."""
        return tuple(rank for group in self.replicas for rank in group)


@dataclass(frozen=True, slots=True)
class Duplicated:
    """Parameter-free operators (masks, rotary tables) that each of some stages computes for itself."""

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

    With `reduction` "sum" their gradients are summed before every update, so that the copies stay equal; with "none",
    where the pipeline never drains, each stage updates a copy of its own with its own gradient. `names` are the
    initializers that stand for it: the parameter itself and its tied copies.
    """

    parameter: str
    names: tuple[str, ...]
    stages: tuple[int, ...]
    reduction: Literal["sum", "none"]
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanNote:
    """Something assumed, dropped or impossible, to be said to the reader by name."""

    level: str
    code: str
    message: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the plan came to be; not part of the digest.

    Attributes:
        tool: program that wrote it.
        version: of the program.
        command: the command line, empty when the plan was made by a library call.
        model: the model as the user named it (a path, or the name of a bundled model).
        hardware: the hardware as the user named it.
    """

    tool: str
    version: str
    command: tuple[str, ...] = ()
    model: str = ""
    hardware: str = ""

"""What is asked, what can be decided, and what a decision costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from planner.exchange.types import Step
from planner.hardware import Collective, Terms
from planner.hardware.types import HEADROOM
from planner.play import Transfers
from planner.space.configuration import Configuration, StageChoice

if TYPE_CHECKING:
    from planner.space.schemes import SchemeExchange

__all__ = [
    "BlockCosts",
    "Candidate",
    "Certificate",
    "Configuration",
    "Evaluation",
    "ExchangedStep",
    "InnerReplicas",
    "Job",
    "MemoryBytes",
    "RepeatCosts",
    "Selective",
    "StageChoice",
    "StageTerms",
    "Tie",
    "Violation",
    "WorkerMemory",
]


@dataclass(frozen=True, slots=True)
class Structure:
    """What the plans of a training framework are like, beyond what a user's own options say; free by default.

    Attributes:
        equal_replicas: all stages have the same number of replicas.
        alike: all stages share their operators in the same way and recompute alike.
        whole_layers: stages begin where a layer begins.
        axes: roles that mesh axes may have (`planner.sharding.AxisRole`), tensor axes as in the layers of frameworks
            (`planner.sharding.limits`); empty for anything.
        powers_of_two: a group has 1, 2, 4, 8 .. ranks.
        head_groups: ranks of a tensor axis: "" any number, "heads": they divide the attention heads, "key-value
            heads": those with keys of their own.
        zero_in_pipelines: ZeRO stages of plans with several stages; empty for those of the job.
        between_layers: how tensors between layers may lie on a tensor axis, "replicated" or "sequence"; empty for both.
    """

    equal_replicas: bool = False
    alike: bool = False
    whole_layers: bool = False
    axes: tuple[str, ...] = ()
    powers_of_two: bool = False
    head_groups: str = ""
    zero_in_pipelines: tuple[int, ...] = ()
    between_layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What the user wants trained.

    Attributes:
        global_batch: samples per optimizer step over all devices.
        precision: name in `planner.costs.precision.PRECISIONS`, which may have options (`mxfp8:grads=fp32`); empty
            means the best that all devices that may be used compute in (`planner.space.jobs`).
        optimizer: name in `planner.costs.precision.OPTIMIZER_MOMENTS`, which may have options (`adam:moments=bf16`).
        micro_batches: allowed micro-batch sizes (samples a replica runs at a time); empty means every divisor that
            fits.
        schedules: allowed schedules. Beside those with one stage on each worker that are paced by the slowest (1F1B,
            GPipe) others are looked at where pipelines of these wait for long.
        recompute: what stages may run forward again in their backward pass: "never" nothing, "always" all layers,
            "layers" all layers or nothing, as suits each stage, "auto" also some modules of its layers, else names of
            modules that all stages repeat, "layernorm,moe_act" (`planner.operators.modules`).
        zero: allowed ZeRO stages: what is sharded over a stage's replicas (0: nothing, 1: optimizer state, 2: gradients
            too, 3: weights too).
        max_stages: most pipeline stages; 0 means no limit.
        tensor_parallel: allowed numbers of ranks that share every operator of a replica; empty means any.
        context_parallel: allowed numbers of ranks that share the sequence (CP); empty means any where sequences are
            long (`planner.space.jobs.LONG_STEPS`), 1 elsewhere.
        expert_parallel: allowed numbers of ranks to which samples and experts are dealt (EP); empty means any that
            divide the experts, 1 in models without. The samples of a replica's micro-batch are dealt to them.
        pipeline_stages: allowed numbers of pipeline stages; empty means any.
        data_parallel: allowed numbers of replicas, over all copies of the pipeline, of every stage; empty means any.
        keep: blocks that are to be on a certain stage: name or pattern (`planner.space.cuts`) and the stage's number,
            negative ones counting from the last.
        forbid: splits of operators that are not wanted, `MatMul:k` (`planner.sharding.limits`).
        uniform: all stages have the same number of replicas, as most training frameworks want it.
        meshes: meshes of those ranks to consider, ranks by axis, outermost first; empty means those that suit the
            cluster.
        devices: use at most that many devices of the cluster; 0 means all.
        fused_attention: attention keeps q, k, v and the output, not the score matrix.
        dropout: dropout masks are drawn and kept.
        assume_dropout: put masks where transformers drop out when the graph has no dropout nodes (exports for
            inference have none).
        overlap: fraction of backward work behind which gradient synchronisation can hide (0 to 1); None for that of
            the cluster's stack (`planner.space.jobs.settled`).
        transfers: what a transfer between stages occupies.
        whole_stages: a stage that recomputes repeats all its work from what enters it, instead of layer by layer.
        headroom: part of a device's memory that plans leave free, for what an allocator holds beyond the tensors.
        backends: training frameworks, by name, of which one at least is to take the plan as it is ("any": none needs
            to). Where a job is asked, empty means the usual ones (`planner.systems.usual_backends`); in a plan, that
            none needed to.
        structure: what the plans of these frameworks are like; worked out from `backends` and in no file.
    """

    global_batch: int
    precision: str = ""
    optimizer: str = "adam"
    micro_batches: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved")
    recompute: str = "auto"
    zero: tuple[int, ...] = (0, 1)
    max_stages: int = 0
    tensor_parallel: tuple[int, ...] = ()
    context_parallel: tuple[int, ...] = ()
    expert_parallel: tuple[int, ...] = ()
    pipeline_stages: tuple[int, ...] = ()
    data_parallel: tuple[int, ...] = ()
    keep: tuple[tuple[str, int], ...] = ()
    forbid: tuple[str, ...] = ()
    uniform: bool = False
    meshes: tuple[tuple[int, ...], ...] = ()
    devices: int = 0
    fused_attention: bool = True
    dropout: bool = True
    assume_dropout: bool = False
    overlap: float | None = None
    transfers: Transfers = Transfers.BLOCKING
    whole_stages: bool = False
    headroom: float = HEADROOM
    backends: tuple[str, ...] = ()
    structure: Structure = Structure()


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Memory of one device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserve: float

    @property
    def total(self) -> float:
        """Sum over all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace + self.reserve


@dataclass(frozen=True, slots=True)
class StageTerms:
    """What one stage of a decision costs (times for one micro-batch on one replica, unless said otherwise).

    Attributes:
        forward_s: forward computation.
        backward_s: backward computation, recomputation included. Both contain the communication inside a replica.
        recompute_s: the part of `backward_s` that repeats the forward.
        receive_s: time to receive the stage's input activations from the stage before (0 for the first).
        sync_s: gradient synchronisation per iteration (with ZeRO-1: reduce-scatter plus all-gather), before overlap.
        exposed_sync_s: what of `sync_s` is not hidden behind backward work, and `tied_sync_s`.
        update_s: optimizer step per iteration.
        in_flight: micro-batches whose activations one replica keeps at the most.
        memory: bytes of one device, by kind.
        capacity_bytes: memory of the smallest device that the stage uses, reserve included, headroom left out.
        return_s: time to send the gradient of the stage's input back to the stage before (0 for the first).
        tied_sync_s: per iteration, summing the gradients of weights that later stages hold too. Part of
            `exposed_sync_s`: nothing hides it.
        unit_bytes: activations kept for each micro-batch in flight; what `memory.activations` has beyond `in_flight` of
            these is of the micro-batch whose forward a recomputed stage repeats.
        evict_s: time to move the activations of a micro-batch to the worker that keeps them, or back; 0 where the
            schedule moves none.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    receive_s: float
    sync_s: float
    exposed_sync_s: float
    update_s: float
    in_flight: int
    memory: MemoryBytes
    capacity_bytes: float
    return_s: float = 0.0
    tied_sync_s: float = 0.0
    unit_bytes: float = 0.0
    evict_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Time a replica of the stage spends on one micro-batch."""
        return self.forward_s + self.backward_s + self.receive_s + self.return_s


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What one worker of a configuration holds: the most at any time, on its smallest device.

    Attributes:
        stages: that it holds; workers that hold the same count once.
        memory: bytes by kind, all its stages together.
        capacity_bytes: memory of the smallest of its devices, reserve included, headroom left out.
    """

    stages: tuple[int, ...]
    memory: MemoryBytes
    capacity_bytes: float


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that a decision breaks: `kind` is "memory", "coverage", "devices", "divisibility", "sharding" or
    "option"."""

    kind: str
    stage: int
    message: str
    needed: float = 0.0
    available: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The judge's verdict on one decision.

    Attributes:
        iteration_s: closed form of the iteration time (see `planner.space.evaluate`).
        stages: terms by stage.
        violations: empty when the decision is feasible.
        bottleneck: index of the stage that sets the pace.
        workers: memory by worker; workers that hold the same stages count once.
        exchange: what the configuration's exchange scheme costs; None where it names none.
    """

    iteration_s: float
    stages: tuple[StageTerms, ...]
    violations: tuple[Violation, ...]
    bottleneck: int
    workers: tuple[WorkerMemory, ...] = ()
    exchange: SchemeExchange | None = field(default=None, compare=False)

    @property
    def feasible(self) -> bool:
        """Whether no limit is broken."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is proven about an answer.

    Attributes:
        bound_s: no decision of the space is faster than this.
        gap: (answer - bound) / answer.
        space: in words, what the bound speaks of.
        proven_optimal: the gap is zero up to rounding.
        tried_bound_s: no decision made of the ways to share operators that were worked out is faster; None where that
            is not known, or the same.
        line_bound_s: no pipeline with one stage on each worker, 1F1B or GPipe, is faster; None where there were no
            others, or that is the same.
    """

    bound_s: float
    gap: float
    space: str
    proven_optimal: bool
    tried_bound_s: float | None = None
    line_bound_s: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decision worth showing: the answer, a runner-up, or a trivial plan priced beside it.

    Attributes:
        label: what it is.
        decision: what is decided.
        evaluation: the judge's verdict.
        simulated_s: seconds of an iteration when played out; None where it was not.
    """

    label: str
    decision: Configuration
    evaluation: Evaluation
    simulated_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tie:
    """Weights that several blocks share.

    Attributes:
        elements: trainable elements.
        blocks: two or more, ascending.
        inner_replicas: ranks of a group that hold the same of them (`InnerReplicas`).
    """

    elements: float
    blocks: tuple[int, ...]
    inner_replicas: int = 1

    @property
    def shard_elements(self) -> float:
        """What is left to a rank when those that hold the same share it out."""
        return self.elements / self.inner_replicas


@dataclass(frozen=True, slots=True, eq=False)
class InnerReplicas:
    """Weights that several ranks of one group hold alike, since samples or steps are dealt to them.

    They are replicas of these weights as the replicas of a stage are: gradients are summed over both, and what ZeRO
    shards is cut into as many parts as there are of both together (Megatron's distributed optimizer over DP x CP, and
    of dense weights beside expert parallelism). An exchange goes first among them, then each rank's part of it among
    the equal ranks of the stage's replicas.

    Attributes:
        ranks: that hold the same.
        elements: [n] trainable elements of each block that are held so, a part of `BlockCosts.parameter_elements`.
        ties: those of them that blocks share.
        terms: seconds of a collective among these ranks, all such groups at work at once.
    """

    ranks: int
    elements: np.ndarray
    ties: tuple[Tie, ...]
    terms: Mapping[Collective, Terms]


class ExchangedStep(Protocol):
    """The variables of a model at a micro-batch size, with the times at which their gradients are complete."""

    def __call__(self, device_type: int, micro_batches: int, lookups: int, /) -> Step:
        """One optimizer step of a replica on that device type.

        Args:
            device_type: index of the type.
            micro_batches: whose gradients a replica accumulates.
            lookups: micro-batches whose looked-up rows come together on a machine before they are sent.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RepeatCosts:
    """What it costs stages, and spares them, to run the forward of some modules again in their backward pass.

    Attributes:
        repeats: names of the modules (`planner.operators.modules`).
        repeat_s: [t, n] seconds of each block's backward that run forward work again, communication included.
        saved_bytes: [n, n] `saved_bytes[i, j]`: activation bytes that a stage of blocks i..j then keeps.
        working_bytes: [n] the most that a block brings back at a time.
    """

    repeats: tuple[str, ...]
    repeat_s: np.ndarray
    saved_bytes: np.ndarray
    working_bytes: np.ndarray


class Selective(Protocol):
    """Prices of selective recomputation, worked out when they are asked for."""

    @property
    def offered(self) -> tuple[tuple[str, ...], ...]:
        """Lists of modules that are worth trying, each with the modules of the one before and more."""

    def __call__(self, repeats: tuple[str, ...], /) -> RepeatCosts:
        """The prices of a list of modules.

        Raises:
            JobError: the model has no module of a name.
        """
        ...


@dataclass(frozen=True)
class BlockCosts:
    """One micro-batch size's costs of a chain of blocks, on each device type: what the search works on. Numbers only.

    n blocks, t device types. Boundary p (0..n) lies before block p. Where several ranks share every operator (`ranks`),
    all figures are those of one rank, and times contain the communication among them.

    Attributes:
        micro_batch: samples per micro-batch.
        forward_s: [t, n] seconds.
        backward_s: [t, n] seconds, without recomputation.
        update_s: [t, n] seconds of the optimizer step on the block's parameters, unsharded.
        parameter_elements: [n] trainable elements; tied parameters are charged to every block that uses them.
        saved_bytes: [n, n] `saved_bytes[i, j]`: activation bytes kept by a stage of blocks i..j inclusive (i <= j),
            storages once.
        checkpoint_bytes: [n, n] the inputs of the layers of blocks i..j, each tensor once: what a stage of them keeps
            when it is recomputed.
        boundary_bytes: [n + 1] bytes of the tensors that cross boundary p forward.
        gradient_boundary_bytes: [n + 1] bytes of the gradients that cross it backward.
        workspace_bytes: [n] transient bytes.
        names: block names, for messages.
        layer_starts: int64 [n], the first block of the layer that each block is part of: a recomputed stage keeps the
            inputs of its layers and repeats one layer at a time. None: every block is a layer.
        ties: weights that blocks share. A stage holds them once; where several stages do, their gradients are summed.
        repeated: bool [n], the blocks whose forward a recomputed stage repeats. Of the others (logits and loss) it
            keeps all activations. None means all blocks.
        kept_bytes: [n] activation bytes of a block that is not repeated, beyond its inputs; 0 for other blocks. None
            means zero.
        ranks: devices that share every operator.
        context: ranks of them that share the sequence (CP).
        expert: ranks of them to which samples and experts are dealt (EP).
        sharding: number of the way in which they do, 0 for none; unique among the costs of a micro-batch size.
        label: that way in words.
        step_s: [n] seconds of communication among the ranks once an update, other than what `inner_replicas` exchange.
            None means zero.
        gather_s: [n + 1] seconds to put together on every rank what came over boundary p in parts. None means zero.
        gradient_gather_s: [n + 1] the same of the gradients that go back.
        shard_elements: [n] trainable elements left to a rank where those of a group that hold the same share them out.
            None means all, `parameter_elements`.
        inner_replicas: the weights that ranks of a group hold alike, by the ranks that do.
        steps: what a step of data parallelism exchanges, variable by variable, for exchange schemes (`ExchangedStep`).
            None where that is not known, as where ranks share operators.
        selective: prices of running some modules forward again; None where that is not known.
    """

    micro_batch: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    update_s: np.ndarray
    parameter_elements: np.ndarray
    saved_bytes: np.ndarray
    checkpoint_bytes: np.ndarray
    boundary_bytes: np.ndarray
    gradient_boundary_bytes: np.ndarray
    workspace_bytes: np.ndarray
    names: tuple[str, ...] = field(default=())
    layer_starts: np.ndarray | None = None
    ties: tuple[Tie, ...] = ()
    repeated: np.ndarray | None = None
    kept_bytes: np.ndarray | None = None
    ranks: int = 1
    context: int = 1
    expert: int = 1
    sharding: int = 0
    label: str = ""
    step_s: np.ndarray | None = None
    gather_s: np.ndarray | None = None
    gradient_gather_s: np.ndarray | None = None
    shard_elements: np.ndarray | None = None
    inner_replicas: tuple[InnerReplicas, ...] = ()
    steps: ExchangedStep | None = field(default=None, repr=False, compare=False)
    selective: Selective | None = field(default=None, repr=False, compare=False)

    def stage(
        self, start: int, stop: int, replicas: int = 1, recompute: bool = False, repeats: tuple[str, ...] = ()
    ) -> StageChoice:
        """A stage of some blocks that shares its operators in this way."""
        way = self.ranks, self.sharding, self.context, self.expert
        return StageChoice(start, stop, replicas, recompute, *way, repeats)

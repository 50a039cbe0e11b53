"""The data types of the search: the job, the costs of a model's blocks, and the judge's verdict on a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from planner.exchange.types import Step
from planner.hardware import Collective, Terms
from planner.hardware.types import HEADROOM, Cluster
from planner.play import Transfers
from planner.space.configuration import KEEP_ALL, UNRESTRICTED, Configuration, RecomputeChoice, StageChoice, Structure
from planner.space.layers import Layers
from planner.space.steps import MemoryBytes, StageTerms, WorkerMemory

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
    "Structure",
    "Tie",
    "Violation",
    "WorkerMemory",
]


@dataclass(frozen=True, slots=True)
class Job:
    """What the user wants trained, and the limits on how.

    Attributes:
        global_batch: samples per optimizer step over all devices.
        precision: name in `planner.costs.precision.PRECISIONS`, which may have options (`mxfp8:grads=fp32`); empty
            means the best that all devices that may be used compute in (`planner.space.jobs`).
        optimizer: name in `planner.costs.precision.OPTIMIZER_MOMENTS`, which may have options (`adam:moments=bf16`).
        micro_batches: allowed micro-batch sizes (samples a replica runs at a time); empty means every divisor that
            fits.
        schedules: allowed schedules. Schedules with several stages a worker are searched only where one promises to be
            faster than the best plan with one stage a worker (1F1B, GPipe), or that plan leaves workers idle for long.
        recompute: what stages may run forward again in their backward pass. "never": nothing. "always": all layers.
            "layers": all layers or nothing, chosen by stage. "auto": also the first layers of a stage, as many as
            memory asks for, or single modules of the layers. `layers:4`: the first 4 layers of every stage
            (`planner.space.layers`). Anything else names modules that all stages repeat, `layernorm,moe_act`
            (`planner.operators.modules`).
        zero: allowed ZeRO stages, sharding over a stage's replicas nothing (0), the optimizer state (1), gradients too
            (2), weights too (3).
        max_stages: most pipeline stages; 0 means no limit.
        tensor_parallel: allowed numbers of ranks that share every operator of a replica; empty means any.
        context_parallel: allowed numbers of ranks that share the sequence (CP); empty means any where sequences are
            long (`planner.space.jobs.LONG_STEPS`), 1 elsewhere.
        expert_parallel: allowed numbers of ranks that share the experts and the samples of a replica's micro-batch
            (EP); empty means any that divide the experts, 1 in models without experts.
        pipeline_stages: allowed numbers of pipeline stages; empty means any.
        data_parallel: allowed numbers of replicas, over all copies of the pipeline, of every stage; empty means any.
        keep: blocks pinned to a stage: name or pattern (`planner.space.cuts`) and the stage's number, negative ones
            counting from the last.
        forbid: forbidden splits of operators, `MatMul:k` (`planner.sharding.limits`).
        uniform: all stages have the same number of replicas, as most training frameworks want it.
        meshes: meshes that may share operators, each as ranks by axis, outermost first; empty means those that suit
            the cluster.
        devices: use at most that many devices of the cluster; 0 means all.
        fused_attention: attention keeps q, k, v and the output, not the score matrix.
        dropout: dropout masks are drawn and kept for the backward pass.
        assume_dropout: count the dropout masks of a transformer although the graph has no dropout nodes (exports for
            inference have none).
        overlap: fraction of backward work behind which gradient synchronisation can hide (0 to 1); None for that of
            the cluster's stack (`planner.space.jobs.settled`).
        transfers: what a transfer between stages occupies.
        whole_stages: a stage that recomputes repeats its whole forward from its input, instead of layer by layer.
        headroom: fraction of a device's memory that plans leave free, for what an allocator holds beyond the tensors.
        backends: training frameworks, by name, of which at least one must be able to run the plan ("any": none needs
            to). Empty means the usual ones (`planner.systems.usual_backends`) in a job, none in a plan.
        structure: the restrictions of these frameworks; derived from `backends`, and written to no file.
    """

    global_batch: int
    precision: str = ""
    optimizer: str = "adam"
    micro_batches: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved")
    recompute: str = "auto"
    zero: tuple[int, ...] = (0, 1, 2, 3)
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
    structure: Structure = UNRESTRICTED

    def devices_of(self, cluster: Cluster) -> int:
        """How many devices of a cluster may be used."""
        return min(self.devices or cluster.device_count, cluster.device_count)


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that a configuration breaks.

    Attributes:
        kind: "memory", "host" (the host's memory), "coverage", "devices", "divisibility", "sharding" or "option".
        stage: index of the stage.
        message: in words.
        needed, available: amounts of what is exceeded, bytes or devices; 0 where there is no such amount.
    """

    kind: str
    stage: int
    message: str
    needed: float = 0.0
    available: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The judge's verdict on one configuration.

    Attributes:
        iteration_s: closed form of the iteration time (see `planner.space.evaluate`).
        stages: times and memory by stage.
        violations: empty when the configuration is feasible.
        bottleneck: index of the stage that sets the pace.
        workers: memory by worker; workers that hold the same stages count once.
        exchange: what the configuration's exchange scheme costs; None where it names none. It holds arrays, so two
            verdicts are compared without it.
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
        bound_s: lower bound on the iteration time of every configuration of the space.
        gap: (answer - bound) / answer.
        space: the space that the bound holds for, in words.
        proven_optimal: the gap is zero up to rounding.
        tried_bound_s: lower bound over the shardings that were worked out; None where it is not known or the same.
        line_bound_s: lower bound over pipelines with one stage a worker (1F1B, GPipe); None where no others were
            searched, or it is the same.
    """

    bound_s: float
    gap: float
    space: str
    proven_optimal: bool
    tried_bound_s: float | None = None
    line_bound_s: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration worth showing: the best, a runner-up, or a trivial one priced beside them.

    Attributes:
        label: which of these it is, as it is shown.
        decision: the configuration.
        evaluation: the judge's verdict.
        simulated_s: simulated seconds of an iteration; None where it was not simulated.
    """

    label: str
    decision: Configuration
    evaluation: Evaluation
    simulated_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tie:
    """Weights that several blocks share (tied weights).

    Attributes:
        elements: trainable elements.
        blocks: the blocks that use them, two or more, ascending.
        inner_replicas: ranks of a replica that hold the same elements of them (`InnerReplicas`).
    """

    elements: float
    blocks: tuple[int, ...]
    inner_replicas: int = 1

    @property
    def shard_elements(self) -> float:
        """Elements of a rank's shard when the ranks that hold the same elements split them among themselves."""
        return self.elements / self.inner_replicas


@dataclass(frozen=True, slots=True, eq=False)
class InnerReplicas:
    """Weights of which several ranks of a replica hold the same elements, since their samples or steps differ.

    For these weights the ranks are data-parallel replicas, beside the replicas of the stage: gradients are summed over
    both, and ZeRO shards over both (as Megatron's distributed optimizer does over DP x CP, and for dense weights beside
    expert parallelism). An exchange runs first among these ranks, then, of each rank's shard, among the equal ranks of
    the stage's replicas.

    Attributes:
        ranks: number of ranks that hold the same elements.
        elements: [n] such trainable elements of each block, a part of `BlockCosts.parameter_elements`.
        ties: those of them that blocks share.
        terms: prices of collectives among these ranks, with all such groups communicating at once.
    """

    ranks: int
    elements: np.ndarray
    ties: tuple[Tie, ...]
    terms: Mapping[Collective, Terms]


ExchangedStep = Callable[[int, int, int], Step]
"""Gives one optimizer step of a replica: its variables, with the times at which their gradients are complete.

By index of the device type, number of micro-batches whose gradients a replica accumulates, and number of micro-batches
whose looked-up rows are merged on a machine before they are sent."""


@dataclass(frozen=True, slots=True, eq=False)
class RepeatCosts:
    """Costs and savings of recomputing some modules in the backward pass, and of offloading others.

    Attributes:
        repeats: names of the modules (`planner.operators.modules`).
        repeat_s: [t, n] seconds of recomputation in each block's backward, communication included.
        saved_bytes: [n, n] `saved_bytes[i, j]`: activation bytes that a stage of blocks i..j still keeps.
        working_bytes: [n] largest number of recomputed activation bytes that a block holds at a time.
        moved_bytes: [n, n] `moved_bytes[i, j]`: activation bytes that a stage of blocks i..j keeps in its host.
        block_moved_bytes: [n] those of each block alone.
    """

    repeats: tuple[str, ...]
    repeat_s: np.ndarray
    saved_bytes: np.ndarray
    working_bytes: np.ndarray
    moved_bytes: np.ndarray
    block_moved_bytes: np.ndarray


Modules = tuple[str, ...]
"""Names of modules that are recomputed or offloaded together."""


@dataclass(frozen=True, eq=False)
class Selective:
    """Gives the prices of selective recomputation and offload.

    Attributes:
        lists: gives the lists of modules worth trying, each containing the list before it.
        present: gives those of some kinds of modules that the model has.
        price: gives the prices of modules that are recomputed, and of modules whose kept activations move to the host.
    """

    lists: Callable[[], tuple[Modules, ...]]
    present: Callable[[Modules], Modules]
    price: Callable[[Modules, Modules], RepeatCosts]

    @property
    def offered(self) -> tuple[Modules, ...]:
        """Lists of modules worth trying."""
        return self.lists()

    def __call__(self, repeats: Modules, offload: Modules = ()) -> RepeatCosts:
        """The prices of modules that are recomputed, and of modules whose kept activations move to the host.

        Raises:
            JobError: the model has no module of a name.
        """
        return self.price(repeats, offload)


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Costs of a chain of blocks at one micro-batch size and with one sharding, on each device type.

    n blocks, t device types. Boundary p (0..n) lies before block p. Where several ranks share every operator (`ranks`),
    all figures are those of one rank, and times contain the communication among them.

    Attributes:
        micro_batch: samples per micro-batch.
        forward_s: [t, n] seconds.
        backward_s: [t, n] seconds, without recomputation.
        update_s: [t, n] seconds of the optimizer step on the block's parameters, unsharded.
        parameter_elements: [n] trainable elements; tied parameters are charged to every block that uses them.
        saved_bytes: [n, n] `saved_bytes[i, j]`: activation bytes kept by a stage of blocks i..j inclusive (i <= j),
            each storage counted once.
        checkpoint_bytes: [n, n] bytes of the inputs of the layers of blocks i..j, each tensor counted once: what a
            recomputed stage of them keeps.
        boundary_bytes: [n + 1] bytes of the tensors that cross boundary p forward.
        gradient_boundary_bytes: [n + 1] bytes of the gradients that cross it backward.
        workspace_bytes: [n] transient bytes while a block runs.
        names: block names, for messages.
        layer_starts: int64 [n], the first block of the layer that each block is part of: a recomputed stage keeps the
            inputs of its layers and repeats one layer at a time. None: every block is a layer.
        ties: weights that blocks share. A stage holds them once; where several stages do, their gradients are summed.
        repeated: bool [n], the blocks whose forward a recomputed stage repeats. It keeps all activations of the others
            (logits and loss). None means all blocks.
        kept_bytes: [n] activation bytes, inputs excluded, of a block that is never repeated; 0 for other blocks. None
            means zero.
        ranks: devices that share every operator.
        context: ranks of them that share the sequence (CP).
        expert: ranks of them that share the experts and a micro-batch's samples (EP).
        sharding: number of the sharding, 0 for none; unique among the costs of a micro-batch size.
        label: mesh and boundary layouts of the sharding, in words.
        step_s: [n] seconds of communication among the ranks once an update, without that of `inner_replicas`. None
            means zero.
        group_s: [2, n] the part of a rank's forward, and of its forward and backward, that is communication among the
            ranks of a replica. None means zero.
        gather_s: [n + 1] seconds of the all-gather of tensors that ranks received over boundary p in parts. None means
            zero.
        gradient_gather_s: [n + 1] the same for the gradients that go back.
        shard_elements: [n] trainable elements of a rank's shard where ranks of a replica hold the same elements
            (`inner_replicas`) and split them among themselves. None means `parameter_elements`.
        inner_replicas: the weights that several ranks of a replica hold, by number of ranks.
        steps: variables that data parallelism exchanges, for exchange schemes (`ExchangedStep`). None where they are
            not known, as where ranks share operators.
        selective: prices of selective recomputation; None where they are not known.
        weight_grad_s: [t, n] seconds of `backward_s` that compute gradients of weights; None where they are not known.
        waiting_bytes: [n] operands of products with weights and gradients of their results, which stay until the second
            half of a split backward; None where they are not known: all that is kept stays then.
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
    group_s: np.ndarray | None = None
    gather_s: np.ndarray | None = None
    gradient_gather_s: np.ndarray | None = None
    shard_elements: np.ndarray | None = None
    inner_replicas: tuple[InnerReplicas, ...] = ()
    steps: ExchangedStep | None = field(default=None, repr=False)
    selective: Selective | None = field(default=None, repr=False)
    weight_grad_s: np.ndarray | None = None
    waiting_bytes: np.ndarray | None = None

    @property
    def exchanged_elements(self) -> np.ndarray:
        """[n] trainable elements of each block that a rank exchanges with its equals in other replicas."""
        return self.parameter_elements if self.shard_elements is None else self.shard_elements

    @functools.cached_property
    def layers(self) -> Layers:
        """The layers of the chain, of which a stage may recompute the first ones."""
        starts = np.arange(len(self.parameter_elements)) if self.layer_starts is None else self.layer_starts
        return Layers.of(self.names, starts)

    def stage(self, start: int, stop: int, replicas: int = 1, keeping: RecomputeChoice = KEEP_ALL) -> StageChoice:
        """A stage of blocks `start` to `stop` (exclusive) with the sharding of these costs."""
        shared = self.ranks, self.sharding, self.context, self.expert
        return StageChoice(
            start, stop, replicas, keeping.recompute, *shared, keeping.repeats, keeping.offload, keeping.layers
        )

"""The numbers of a plan: what it is expected to do, what else was priced, how the operators were treated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from planner.costs.errors import MeasuredError

BUBBLE_CONVENTION = "1 - (forward + backward + update time summed over ranks) / (ranks * iteration_s)"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one device of a stage, by kind."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> Mapping[str, int]:
        """Bytes by kind, in the order of the fields."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class StageCollective:
    """A collective that a stage's ranks run once an iteration, or with ZeRO-2 and 3 in every pass.

    Attributes:
        kind: which one.
        of: what it is about; tied gradients are exchanged with the other stages that hold the same weights.
        bytes: payload of one rank.
        ranks: ranks in a group.
        groups: groups that run it side by side.
        each: "forward" or "backward" when it is run in every such pass, block by block; the bytes are those of all
            blocks. "" when it is run once an iteration.
    """

    kind: str
    of: Literal["gradients", "weights", "tied gradients"]
    bytes: int
    ranks: int
    groups: int
    each: Literal["", "forward", "backward"] = ""


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What one stage is expected to take: one micro-batch on one replica, unless said otherwise.

    Attributes:
        forward_s: forward computation.
        backward_s: backward computation, recomputation included.
        recompute_s: the part of `backward_s` that repeats the forward.
        receive_s: transfer of the inputs from the stage before.
        return_s: transfer of their gradients back to it.
        sync_s: gradient synchronisation, per iteration, before overlap.
        exposed_sync_s: the part of `sync_s` not hidden behind backward work, and `tied_sync_s`.
        tied_sync_s: summing the gradients of weights that later stages hold too, per iteration.
        update_s: optimizer step, per iteration.
        in_flight: most micro-batches whose activations one replica keeps at a time.
        unit_bytes: activations of each of these; what `memory` has beyond `in_flight` of them is held only while a
            recomputed stage repeats a forward and runs its backward.
        memory: of one device.
        capacity_bytes: memory of the smallest device that the stage uses.
        collectives: per iteration.
        inside_s: communication among the ranks of a group: the part of forward and backward (without recomputation)
            that it takes; left out for groups of one rank.
        inside_bytes: bytes that a rank sends in it; left out with `inside_s`.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    receive_s: float
    return_s: float
    sync_s: float
    exposed_sync_s: float
    tied_sync_s: float
    update_s: float
    in_flight: int
    unit_bytes: int
    memory: StageMemory
    capacity_bytes: int
    collectives: tuple[StageCollective, ...]
    inside_s: float = 0.0
    inside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Predictions:
    """What the plan is expected to do, and what is proven about it.

    Attributes:
        iteration_s: closed form of the time of one iteration; measured where the schedule has none.
        simulated_iteration_s: the same played out event by event; null when it was not simulated.
        samples_per_s: global batch / iteration_s.
        bubble_fraction: share of device time in which nothing is computed.
        bubble_convention: how that share is defined.
        bottleneck: the stage that sets the pace.
        bound_s: no plan of `space` is faster when it is played out.
        gap: (reached_s - bound_s) / reached_s.
        space: in words, what the bound speaks of.
        proven_optimal: the gap is zero up to rounding.
        stages: by stage.
        tried_bound_s: no plan is faster that shares operators in one of the ways that were worked out; left out where
            that is not known, or the same.
        line_bound_s: no pipeline with one stage on each worker, 1F1B or GPipe, is faster; left out where the search
            looked at no others, or that is the same.
        measured_error: how predictions of such jobs compared with measured runs; left out where no stack is named.
    """

    iteration_s: float
    simulated_iteration_s: float | None
    samples_per_s: float
    bubble_fraction: float
    bubble_convention: str
    bottleneck: int
    bound_s: float
    gap: float
    space: str
    proven_optimal: bool
    stages: tuple[StagePrediction, ...]
    tried_bound_s: float | None = None
    line_bound_s: float | None = None
    measured_error: MeasuredError | None = None

    @property
    def reached_s(self) -> float:
        """The time that bound and gap are about: the simulated one, where it is known."""
        return self.iteration_s if self.simulated_iteration_s is None else self.simulated_iteration_s


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was priced and not chosen: a runner-up or a trivial one.

    Attributes:
        label: what it is: "runner-up", "pure data parallel", ...
        summary: its shape in a line.
        iteration_s: by closed form; null when it has no price.
        memory_bytes: of the fullest device.
        infeasible: reasons why it cannot run; empty when it can.
        copies: copies of the whole pipeline.
        micro_batch: samples in a micro-batch.
        micro_batches: micro-batches per iteration and copy.
        schedule: name of the schedule.
        zero: ZeRO stage.
        starts: first block of each stage.
        replicas: replicas of each stage in one copy.
        recompute: numbers of the stages that recompute.
        ranks: ranks of a replica of each stage; left out where all are one.
        simulated_iteration_s: played out event by event; left out where it was not.
        repeats: modules that each stage repeats, `layernorm,act`, empty for none; left out where no stage repeats any.
        context: ranks of a replica that share the sequence; left out where that is 1.
        expert: ranks of a replica to which samples and experts are dealt; left out where that is 1.
    """

    label: str
    summary: str
    iteration_s: float | None
    memory_bytes: int
    infeasible: tuple[str, ...]
    copies: int
    micro_batch: int
    micro_batches: int
    schedule: str
    zero: int
    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    simulated_iteration_s: float | None = None
    repeats: tuple[str, ...] = ()
    context: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True)
class FreeChoice:
    """The fastest plan where no training framework needs to take it, beside one that is made for frameworks.

    Attributes:
        summary: its shape in a line; empty where it was not searched.
        iteration_s: played out event by event; null where it was not searched.
        bound_s: no plan of any kind is faster; null where it was not searched.
        needs: what it has that none of the frameworks takes; empty where one takes it, too.
        reason: why it was not searched, or why the plan is this one though it is for frameworks.
    """

    summary: str = ""
    iteration_s: float | None = None
    bound_s: float | None = None
    needs: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How the operators of the model file were treated.

    Attributes:
        total: operators in the file.
        by_rule: priced by the rule of their type.
        by_fallback: priced by a generic estimate.
        plumbing: shape arithmetic and the like, not priced and not in any stage.
        folded: computed once from constants, weights or other operators.
        dead: results that nobody reads.
        fallback_ops: number of fallback operators by type.
    """

    total: int
    by_rule: int
    by_fallback: int
    plumbing: int
    folded: int
    dead: int
    fallback_ops: dict[str, int]


def gap_to(bound_s: float, reached_s: float) -> float:
    """How far a bound lies below a time, as a part of that; 0 where it does not."""
    return max(0.0, 1 - bound_s / reached_s) if reached_s > 0 else 0.0

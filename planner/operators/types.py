"""What an operator is: iteration dimensions, operands, work, what backward needs, and how it may be split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """A storage that a node keeps for backward: the same storage kept by two nodes of a stage counts once.

    Attributes:
        storage: name of the tensor that owns the memory (views resolved), or `key#what` for what a node makes itself.
        byte_count: bytes in the training precision.
    """

    storage: str
    byte_count: int


class DimKind(StrEnum):
    """How an iteration dimension may be treated."""

    PARALLEL = "parallel"
    """Indexes a result: a split gives a sharded result."""
    REDUCED = "reduced"
    """Summed over: a split gives partial sums."""
    COUPLED = "coupled"
    """Its points depend on each other (softmax's axis, a recurrence's time): no split without communication inside."""
    WHOLE = "whole"
    """Never split (a kernel window, a tiny axis)."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One iteration dimension of a loop nest."""

    name: str
    size: int
    kind: DimKind


@dataclass(frozen=True, slots=True)
class Access:
    """How a loop nest reads or writes one tensor.

    Attributes:
        position: index of the operand among the call's inputs (for reads) or outputs (for writes).
        dims: for each dimension of the tensor, the iteration dimensions that index it, in order, outermost first:
            `("n",)`; `()` for a broadcast dimension of size 1; `("y", "r")` for a window `y * stride + r` (see `halo`);
            two names without halo mean the tensor dimension is their product (a reshape's split or merge).
        halo: for tensor dimensions indexed by a window: (dimension, elements a neighbour must supply on each side).
    """

    position: int
    dims: tuple[tuple[str, ...], ...]
    halo: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LoopNest:
    """The iteration space of (a part of) an operator.

    `matrix_flops` is 2 per multiply-add over the nest when it is a contraction run by matrix units, else 0;
    `vector_flops` counts element-wise arithmetic.
    """

    dims: tuple[Dim, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    matrix_flops: float = 0.0
    vector_flops: float = 0.0

    def dim(self, name: str) -> Dim:
        """The iteration dimension of that name."""
        return next(d for d in self.dims if d.name == name)


@dataclass(frozen=True, slots=True)
class Saved:
    """Something kept between forward and backward.

    Attributes:
        source: "input", "output" or "extra" (made by the operator itself: a dropout mask, statistics, pool indices).
        position: which input or output; for extras a running number.
        byte_count: bytes kept, for extras; 0 for inputs and outputs, whose own size counts.
        random: kept only when the operator draws random numbers in training (dropout masks).
        fixed: the bytes of an extra do not follow the training precision (integer indices, fp32 statistics).
        fused: kept only where attention runs as one kernel that never has its scores in memory.
    """

    source: str
    position: int
    byte_count: int = 0
    random: bool = False
    fixed: bool = False
    fused: bool = False


class Origin(StrEnum):
    """How an operator's price was found; the coverage report counts these."""

    RULE = "rule"
    FALLBACK = "fallback"
    PLUMBING = "plumbing"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Device memory traffic.

    Attributes:
        byte_count: bytes in the tensors' own types.
        float_elements: floating-point elements among them, which follow the training precision.
        fixed_bytes: bytes of everything else (integers, booleans).
    """

    byte_count: float = 0.0
    float_elements: float = 0.0
    fixed_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.byte_count + other.byte_count,
            self.float_elements + other.float_elements,
            self.fixed_bytes + other.fixed_bytes,
        )

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.byte_count * factor, self.float_elements * factor, self.fixed_bytes * factor)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything the planner knows about one operator call.

    Attributes:
        nests: loop nests in order of execution; most operators have one; views have one without work, plumbing none.
        saved: what backward keeps.
        view: the first output shares the first input's storage (reshape, squeeze): no bytes moved, nothing saved.
        kernels: how many device kernels one forward pass launches.
        forward: device memory traffic of the forward pass, reads plus writes.
        backward: device memory traffic of the backward pass.
        backward_kernels: kernels the backward pass launches.
        input_grad_matrix_flops: matrix work of the gradients with respect to activations.
        weight_grad_matrix_flops: matrix work of the gradients with respect to parameters.
        backward_vector_flops: element-wise work of the backward pass.
        origin: rule or fallback.
        details: further figures by name.
            `library_kernels`, `library_back_kernels`: those of the kernels that one call of a library launches itself.
            `score_elements`: scores of an attention; `own_score_elements`: those that every kernel has in memory;
            `eager_elements`, `eager_kernels` and the same of backward: traffic and kernels that this adds.
    """

    nests: tuple[LoopNest, ...]
    saved: tuple[Saved, ...] = ()
    view: bool = False
    kernels: int = 1
    forward: Traffic = Traffic()
    backward: Traffic = Traffic()
    backward_kernels: int = 2
    input_grad_matrix_flops: float = 0.0
    weight_grad_matrix_flops: float = 0.0
    backward_vector_flops: float = 0.0
    origin: Origin = Origin.RULE
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def matrix_flops(self) -> float:
        """Forward matrix and convolution work, 2 per multiply-add."""
        return float_sum(n.matrix_flops for n in self.nests)

    def scores_in_memory(self, fused: bool) -> float:
        """Elements of the score matrices that an attention has in memory, of all its runs together.

        Args:
            fused: attention runs as one kernel where one can do it.
        """
        return self.details.get("own_score_elements" if fused else "score_elements", 0.0)

    @property
    def vector_flops(self) -> float:
        """Forward element-wise work."""
        return float_sum(n.vector_flops for n in self.nests)

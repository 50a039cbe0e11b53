"""Splits of coupled dimensions: what the ranks must exchange inside an operator so that its points may part.

A loop nest says that the points of a coupled dimension depend on each other, not how. Here stands how, operator by
operator: the numbers a row that are reduced over the ranks, forward and backward, one entry a collective. A row is one
combination of the dimensions that are not coupled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STATISTIC_BYTES = 4.0
"""Statistics travel in fp32."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Numbers a row that are reduced over the ranks, one entry a collective in order.

    Attributes:
        forward: for instance a maximum, then a sum: (1, 1).
        backward: the same for the gradients.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


_SOFTMAX = Statistics((1, 1), (1,))
"""Maximum, then sum of exponentials; backward the sum of output times its gradient."""
_MOMENTS = Statistics((2,), (2,))
"""Sum and sum of squares together; backward the sums of the gradient and of its product with the normalised input."""
_MEAN_SQUARE = Statistics((1,), (1,))

STATISTICS: Mapping[str, Statistics] = {
    "Softmax": _SOFTMAX,
    "LogSoftmax": _SOFTMAX,
    "com.microsoft.BiasSoftmax": _SOFTMAX,
    "SoftmaxCrossEntropyLoss": Statistics((1, 2), ()),
    "LayerNormalization": _MOMENTS,
    "com.microsoft.SkipLayerNormalization": _MOMENTS,
    "com.microsoft.EmbedLayerNormalization": _MOMENTS,
    "BatchNormalization": _MOMENTS,
    "GroupNormalization": _MOMENTS,
    "InstanceNormalization": _MOMENTS,
    "MeanVarianceNormalization": _MOMENTS,
    "RMSNormalization": _MEAN_SQUARE,
    "SimplifiedLayerNormalization": _MEAN_SQUARE,
    "com.microsoft.SimplifiedLayerNormalization": _MEAN_SQUARE,
    "com.microsoft.SkipSimplifiedLayerNormalization": _MEAN_SQUARE,
    "LpNormalization": _MEAN_SQUARE,
    "ReduceMax": Statistics((1,), ()),
    "ReduceMin": Statistics((1,), ()),
    "ReduceL2": Statistics((1,), ()),
    "ReduceLogSum": Statistics((1,), ()),
    "ReduceLogSumExp": Statistics((1, 1), ()),
    "GlobalMaxPool": Statistics((1,), ()),
}
"""Cross-entropy: the maximum, then the sum of exponentials with the label's score; backward is local."""

RING_ATTENTION = ("Attention", "com.microsoft.MultiHeadAttention", "com.microsoft.GroupQueryAttention")
"""Attentions whose queries (`s`) and keys (`u`) may be cut together: keys and values go around the ranks in a ring."""

MIXTURES = ("com.microsoft.MoE", "com.microsoft.QMoE")
"""Mixtures whose rows (`m0`, `m1`, ...) and experts (`e`) may be cut together: each row is sent to the ranks of the
experts that it picks, and what they make of it comes back. Every expert is taken to be picked equally often."""

LINEAR = (
    "Add", "Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Sum",
    "Transpose", "Unsqueeze",
)  # fmt: skip
"""Operators that commute with sums: partial operands give partial results."""

UNCUT_DIMS: Mapping[str, frozenset[str]] = dict.fromkeys(RING_ATTENTION, frozenset({"e"}))
"""Dimensions that a nest lets one cut but that would repeat most of the work on every rank (the scores)."""

WHOLE_READS: Mapping[str, frozenset[tuple[int, str]]] = {op: frozenset({(1, "e")}) for op in MIXTURES}
"""Inputs that a cut of that dimension alone leaves whole: a mixture picks its experts among all scores of a row."""

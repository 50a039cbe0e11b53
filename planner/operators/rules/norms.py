"""Normalisations: statistics over coupled dimensions, then scale and shift.

Kept for backward, as torch keeps it: the input and the statistics (fp32, two a group: mean and inverse deviation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner.graph import DType
from planner.operators.assemble import elements_like, keep_extra, keep_inputs, keep_outputs, streaming, traffic
from planner.operators.entry import WEIGHT_AND_BIAS, OpCall, Role, Rule, Shaped, Statistics, as_first, like
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.types import LoopNest, OpSpec, Saved

MOMENTS = Statistics((2,), (2,))
"""Sum and sum of squares together; backward the sums of the gradient and of its product with the normalised input."""
MEAN_SQUARE = Statistics((1,), (1,))
FORWARD_FLOPS = 8.0
"""Per element: mean and variance (4), subtract, scale by the deviation, scale, shift."""
BACKWARD_FLOPS = 14.0
"""Per element: two reductions (6), the input's gradient (5), scale's and shift's gradients (3)."""


def _nest(call: OpCall, text: str, coupled: str, runs: Mapping[str, int] | None = None, **sizes: int) -> LoopNest:
    """The nest of a line whose first operand is normalised."""
    flops = FORWARD_FLOPS * call.input(0).elements
    return call.nest(text, runs=runs, sizes=sizes, coupled=coupled, vector_flops=flops)


def _spec(call: OpCall, nest: LoopNest, saved: tuple[Saved, ...]) -> OpSpec:
    elements = call.input(nest.reads[0].position).elements
    return streaming(
        call,
        nest,
        saved=saved,
        backward_flops=BACKWARD_FLOPS * elements,
        backward_kernels=2 if any(call.needs[1:]) else 1,
    )


@Rule(
    ports=(0, 1, 2),
    keeps_layout=True,
    weights={**WEIGHT_AND_BIAS, 3: Role.MEAN, 4: Role.VARIANCE},
    statistics=MOMENTS,
).of("BatchNormalization")
def batch_norm(call: OpCall) -> OpSpec:
    """Batch normalisation; statistics over batch and space in training, fixed per channel at inference.

    Planned for training whatever `training_mode` says, since exporters lose it: the input and the batch's mean and
    deviation are kept. Only the nest follows the mode: in training the statistics couple batch and space.
    """
    x = call.input(0)
    data, channel = ("n c s..", "c") if len(x.shape) > 1 else ("n", "1")
    training = call.int_attribute("training_mode", 0) == 1
    read = f"{data}, ?{channel}, ?{channel}, ?{channel}, ?{channel}"
    if training:
        nest = _nest(call, f"{read} -> ?{data}, ?{channel}, ?{channel}", "n s..")
    else:
        nest = _nest(call, f"{read} -> ?{data}", "")
    channels = x.shape[1] if len(x.shape) > 1 else 1
    return _spec(call, nest, (*keep_inputs(call, 0), keep_extra(0, 2 * channels)))


def _row_norm(
    call: OpCall, x: int, scales: list[int], statistics: int, saved: tuple[Saved, ...] | None = None
) -> OpSpec:
    """A norm over the trailing dimensions from `axis` on, with weights of their shape."""
    tensor = call.input(x)
    axis = call.axis("axis", -1, len(tensor.shape))
    row = " ".join(["b..", *["1"] * (len(tensor.shape) - axis)])
    scaled = "".join(f", ?{p}:b.. h.." for p in scales)
    nest = _nest(call, f"b.. h..{scaled} -> ?b.. h.., ?{row}, ?{row}", "h..", {"b": axis})
    rows = math.prod(tensor.shape[:axis])
    kept = keep_inputs(call, x) if saved is None else saved
    return _spec(call, nest, (*kept, keep_extra(0, statistics * rows)))


def _row_results(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    axis = call.axis("axis", -1, len(x.shape))
    row = like(x, (*x.shape[:axis], *[1] * (len(x.shape) - axis)), DType.FLOAT32)
    return [like(x), row, row]


Rule(infer=_row_results).register("com.microsoft.LayerNormalization")


@Rule(weights=WEIGHT_AND_BIAS, statistics=MOMENTS).of("LayerNormalization")
def layer_norm(call: OpCall) -> OpSpec:
    """Normalisation of each row by its mean and deviation."""
    return _row_norm(call, 0, [1, 2], 2)


@Rule(weights={1: Role.MATRIX}, statistics=MEAN_SQUARE).of("RMSNormalization")
def rms_norm(call: OpCall) -> OpSpec:
    """Normalisation of each row by its root mean square; a model that spells it out keeps the normalised input too."""
    kept = keep_inputs(call, 0)
    if call.int_attribute("keeps_normalised", 0) == 1 and call.need(1):
        kept = (*kept, keep_extra(1, call.input(0).elements, call.input(0)))
    return _row_norm(call, 0, [1], 1, kept)


@Rule(infer=_row_results, weights={1: Role.MATRIX}, statistics=MEAN_SQUARE).of(
    "SimplifiedLayerNormalization", "com.microsoft.SimplifiedLayerNormalization"
)
def simplified_layer_norm(call: OpCall) -> OpSpec:
    """Root mean square normalisation under its older name."""
    return _row_norm(call, 0, [1], 1)


def _skip_norm(call: OpCall, scales: list[int], bias: int, statistics: int) -> OpSpec:
    """Input plus skip (plus bias), normalised; the sum is kept: as output 3 where asked for, else made."""
    x = call.input(0)
    kept = keep_outputs(3) if call.has_output(3) else (keep_extra(1, x.elements, x),)
    others = "".join(f", ?{p}:b.. h" for p in (1, *scales, bias))
    nest = _nest(call, f"b.. h{others} -> ?b.. h, ?3:b.. h", "h")
    rows = math.prod(x.shape[:-1])
    return _spec(call, nest, (*kept, keep_extra(0, statistics * rows)))


def _skip_results(call: OpCall) -> list[Shaped | None]:
    x = call.input(0)
    row = like(x, (*x.shape[:-1], 1), DType.FLOAT32)
    return [like(x), row, row, like(x)]


@Rule(infer=_skip_results, weights={2: Role.MATRIX, 3: Role.BIAS, 4: Role.BIAS}, statistics=MOMENTS).of(
    "com.microsoft.SkipLayerNormalization"
)
def skip_layer_norm(call: OpCall) -> OpSpec:
    """Residual sum and layer normalisation in one kernel: input, skip, gamma, beta, bias."""
    return _skip_norm(call, [2, 3], 4, 2)


@Rule(infer=_skip_results, weights={2: Role.MATRIX, 3: Role.BIAS}, statistics=MEAN_SQUARE).of(
    "com.microsoft.SkipSimplifiedLayerNormalization"
)
def skip_rms_norm(call: OpCall) -> OpSpec:
    """Residual sum and root mean square normalisation in one kernel: input, skip, gamma, bias."""
    return _skip_norm(call, [2], 3, 1)


def _embed_results(call: OpCall) -> list[Shaped | None]:
    ids, table = call.input(0), call.input(2)
    embedded = like(table, (*ids.shape, table.shape[1]))
    return [embedded, ((ids.shape[0],), DType.INT32), embedded]


@Rule(
    ports=(2, 3, 4, 5, 6),
    infer=_embed_results,
    weights={**dict.fromkeys((2, 3, 4), Role.TABLE), 5: Role.MATRIX, 6: Role.BIAS},
    ranks=dict.fromkeys((0, 2, 3, 4), (2,)),
    statistics=MOMENTS,
).of("com.microsoft.EmbedLayerNormalization")
def embed_layer_norm(call: OpCall) -> OpSpec:
    """Sum of word, position and segment embeddings, normalised; the sum is kept: as output 2 where asked for.

    Rows are picked, so the tables are cut by width alone; only the touched rows move.
    """
    out = call.output()
    text = "?b s, ?b s, ?v h, ?p h, ?y h, ?h, ?h, ?b s, ?b s -> ?b s h, ?2:b s h"
    nest = call.nest(text, coupled="h", whole="v p y", vector_flops=(FORWARD_FLOPS + 2) * out.elements)
    tables = [call.input(p) for p in (2, 3, 4) if call.has(p)]
    others = traffic(*(call.input(p) for p in (0, 1, 5, 6, 7, 8) if call.has(p)), *call.results())
    touched = elements_like(out, float(out.elements * len(tables)))
    made = () if call.has_output(2) else (keep_extra(1, out.elements, out),)
    saved = (
        *keep_inputs(call, *(p for p in (0, 1, 8) if call.has(p))),
        *(keep_outputs(2) if call.has_output(2) else ()),
        keep_extra(0, 2 * math.prod(out.shape[:-1])),
        *made,
    )
    return streaming(
        call,
        nest,
        saved=saved,
        forward=others + touched,
        backward=traffic(out) * 3.0 + touched * 2.0,
        backward_flops=BACKWARD_FLOPS * out.elements,
        backward_kernels=1 + len(tables),
    )


def _channel_groups(call: OpCall, groups: int, *, by_group: bool = False, last: bool = False) -> OpSpec:
    """A norm over groups of channels and all of space: `n (g c) s -> n (g c) s`, scaled by channel or by group."""
    x = call.input(0)
    data = "n s.. (g c)" if last else "n (g c) s.."
    ones = "".join([" 1"] * (len(call.input(1).shape) - 1)) if call.has(1) else ""
    weight = ("g" if by_group else "(g c)") + ones
    nest = _nest(call, f"{data}, ?{weight}, ?{weight} -> ?{data}", "c s..", g=groups)
    return _spec(call, nest, (*keep_inputs(call, 0), keep_extra(0, 2 * x.shape[0] * groups)))


@Rule(weights=WEIGHT_AND_BIAS, statistics=MOMENTS).of("GroupNormalization")
def group_norm(call: OpCall) -> OpSpec:
    """Normalisation of groups of channels; scales are per group before operator set 21, per channel after."""
    groups = call.int_attribute("num_groups", 1)
    by_group = call.has(1) and call.input(1).elements == groups and groups != call.input(0).shape[1]
    return _channel_groups(call, groups, by_group=by_group)


@Rule(infer=as_first, weights={**WEIGHT_AND_BIAS, 4: Role.BIAS}).of(
    "com.microsoft.GroupNorm", "com.microsoft.SkipGroupNorm"
)
def group_norm_channels_last(call: OpCall) -> OpSpec:
    """Group normalisation of a channels-last tensor, maybe with a SiLU and a residual sum."""
    return _channel_groups(call, call.int_attribute("groups", 1), last=True)


@Rule(weights=WEIGHT_AND_BIAS, statistics=MOMENTS).of("InstanceNormalization")
def instance_norm(call: OpCall) -> OpSpec:
    """Normalisation of each channel of each sample over space."""
    return _channel_groups(call, call.input(0).shape[1])


@Rule().of("LRN")
def local_response_norm(call: OpCall) -> OpSpec:
    """Normalisation by the squares of neighbouring channels; the divisor is made and kept."""
    x = call.input(0)
    window = call.int_attribute("size", 5)
    nest = call.nest("n c s.. -> n c s..", coupled="c", vector_flops=float((2 * window + 4) * x.elements))
    saved = (*keep_inputs(call, 0), keep_extra(0, x.elements, x))
    return streaming(call, nest, saved=saved, backward_flops=float((2 * window + 8) * x.elements))


@Rule(statistics=MEAN_SQUARE).of("LpNormalization")
def lp_norm(call: OpCall) -> OpSpec:
    """Division by the p-norm along an axis; input and norms are kept."""
    x = call.input(0)
    axis = call.axis("axis", -1, len(x.shape))
    nest = broadcast_nest(call, (0,), FORWARD_FLOPS * x.elements, coupled=[axis])
    rows = x.elements // max(1, x.shape[axis])
    return _spec(call, nest, (*keep_inputs(call, 0), keep_extra(0, rows, x)))


@Rule(statistics=MOMENTS).of("MeanVarianceNormalization")
def mean_variance_norm(call: OpCall) -> OpSpec:
    """Zero mean and unit variance over some axes, without weights."""
    x = call.input(0)
    axes = [a % len(x.shape) for a in call.ints("axes", (0, 2, 3))]
    groups = math.prod(size for k, size in enumerate(x.shape) if k not in axes)
    nest = broadcast_nest(call, (0,), FORWARD_FLOPS * x.elements, coupled=axes)
    return _spec(call, nest, (*keep_inputs(call, 0), keep_extra(0, 2 * groups)))

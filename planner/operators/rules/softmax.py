"""Softmax and the losses built on it. Softmax keeps its output, as torch does."""

from __future__ import annotations

from planner.operators.assemble import (
    elements_like,
    keep_extra,
    keep_inputs,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.site import Rule, Site, Statistics, as_first
from planner.operators.types import DimKind, LoopNest, OpSpec, Saved

SOFTMAX_STATISTICS = Statistics((1, 1), (1,))
"""Maximum, then sum of exponentials; backward the sum of output times its gradient."""
FORWARD_FLOPS = 5.0
"""Per element: maximum, subtract, exponential, sum, divide (each counted one)."""
BACKWARD_FLOPS = 4.0
"""Per element: product with the output, its sum, subtract, product."""


def _coupled_nest(site: Site, vector_flops: float) -> LoopNest:
    """The normalised dimension is coupled; before operator set 13 that is every dimension from `axis` on."""
    rank = len(site.input(0).shape)
    if site.call.opset >= 13:
        coupled = [site.axis("axis", -1, rank)] if rank else []
    else:
        coupled = list(range(site.axis("axis", 1, rank), rank))
    return broadcast_nest(site, (0,), vector_flops, coupled=coupled)


@Rule(statistics=SOFTMAX_STATISTICS).of("Softmax", "LogSoftmax")
def softmax(site: Site) -> OpSpec:
    """Exponentials normalised along an axis, or their logarithms."""
    elements = site.input(0).elements
    nest = _coupled_nest(site, FORWARD_FLOPS * elements)
    return streaming(site, nest, saved=keep_outputs(0), backward_flops=BACKWARD_FLOPS * elements)


@Rule(ports=()).of("Hardmax")
def hardmax(site: Site) -> OpSpec:
    """One at the first maximum along an axis, else zero; no gradient."""
    return streaming(site, _coupled_nest(site, 2.0 * site.input(0).elements))


@Rule(infer=as_first, statistics=SOFTMAX_STATISTICS).of("com.microsoft.BiasSoftmax")
def bias_softmax(site: Site) -> OpSpec:
    """Bias added, then softmax, in one kernel."""
    elements = site.input(0).elements
    nest = broadcast_nest(site, (0,), 6.0 * elements, coupled=[-1])
    return streaming(site, nest, saved=keep_outputs(0), backward_flops=BACKWARD_FLOPS * elements)


def _loss_nest(site: Site, vector_flops: float, classes: DimKind) -> LoopNest:
    """`n c s, n s -> ` loss; a mean over rows is a sum of parts, each divided by the whole's number of rows."""
    unreduced = site.output().shape == site.input(1).shape and bool(site.input(1).shape)
    rows, loss = ("n s..", "n s..") if unreduced else ("n s..", "")
    return site.nest(
        f"n c s.., {rows}, ?c -> {loss}, ?n c s..",
        parallel=rows if unreduced else "",
        reduced=("" if unreduced else rows) + (" c" if classes is DimKind.REDUCED else ""),
        coupled="c" if classes is DimKind.COUPLED else "",
        vector_flops=vector_flops,
    )


@Rule(ports=(0,), statistics=Statistics((1, 2))).of("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(site: Site) -> OpSpec:
    """Log-softmax of the scores and the mean loss of the labels; `details["loss_elements"]` is the number of scores.

    Ranks that cut the classes exchange the maximum, then the sum of exponentials with the label's score; backward is
    local.

    The log-probabilities are kept: as output 1 where asked for, else made by the operator; so are the labels.
    """
    scores = site.input(0)
    made: tuple[Saved, ...] = keep_outputs(1) if site.has_output(1) else (keep_extra(0, scores.elements, scores),)
    nest = _loss_nest(site, FORWARD_FLOPS * scores.elements, DimKind.COUPLED)
    saved = (*keep_inputs(site, 1), *made)
    # two kernels forward (log-softmax, loss), two backward, with the log-probabilities' gradient written and read
    labels = traffic(site.input(1))
    forward = traffic(scores) + elements_like(scores, scores.elements) + labels
    backward = elements_like(scores, 4.0 * scores.elements) + labels
    return streaming(
        site,
        nest,
        saved=saved,
        forward=forward,
        backward=backward,
        backward_flops=BACKWARD_FLOPS * scores.elements,
        kernels=2,
        backward_kernels=2,
        extra={"loss_elements": float(scores.elements)},
    )


@Rule(ports=(0,)).of("NegativeLogLikelihoodLoss")
def negative_log_likelihood(site: Site) -> OpSpec:
    """Mean of the labels' negated log-probabilities; reads one number a row, writes a gradient of full size."""
    scores, labels = site.input(0), site.input(1)
    nest = _loss_nest(site, 2.0 * labels.elements, DimKind.REDUCED)
    forward = elements_like(scores, labels.elements) + traffic(labels, site.output())
    backward = traffic(scores, labels)
    saved = (*keep_inputs(site, 1), keep_extra(0, 1, scores))
    return streaming(site, nest, saved=saved, forward=forward, backward=backward, backward_flops=float(labels.elements))

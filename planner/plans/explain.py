"""Explain a plan as data: where time and memory go, which plans were rejected, what is proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.costs import alignment_advice, precision
from planner.errors import PlanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans.explain_shardings import SplitReason, split_reasons
from planner.plans.figures import MFU_CONVENTION, Alternative, gap_to
from planner.plans.model import Loss
from planner.plans.readings import expert_ranks
from planner.plans.rebuild import alternative_configuration
from planner.plans.step import plan_step
from planner.plans.types import Plan
from planner.plans.validate import require_sound
from planner.plans.words import one_or_all, short_list, words_of
from planner.schedules import WeightPolicy
from planner.space.configuration import Configuration
from planner.space.steps import StepView
from planner.units import format_bytes, format_seconds, plural


@dataclass(frozen=True, slots=True)
class Rival:
    """An alternative to the plan that was priced.

    Attributes:
        label: what it is.
        summary: its shape in a line.
        iteration_s: its time, simulated where both were, else by closed form; None when it has none.
        ratio: that over this plan's; None when it has none.
        differs: in what it differs from this plan.
        infeasible: why it cannot run; empty when it can.
    """

    label: str
    summary: str
    iteration_s: float | None
    ratio: float | None
    differs: tuple[str, ...]
    infeasible: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, and what there is to say about it beside what it says itself.

    Attributes:
        plan: the plan.
        step: the step of each device, all its stages together.
        time_parts: seconds of a step by what they go to, the mean over all devices; they add up to it.
        rivals: what else was priced.
        tried_gap: how far the plan may be from the best that shares operators in one of the ways that were tried, as a
            part of its time; None where that is not known.
        assumptions: what the figures rest on.
        reasons: why operators are split as they are; only where model and hardware were given.
        advice: sizes of the model that cost time by themselves; "" where there are none, or model and hardware were not
            given.
    """

    plan: Plan
    step: StepView
    time_parts: Mapping[str, float]
    rivals: tuple[Rival, ...]
    tried_gap: float | None
    assumptions: tuple[str, ...]
    reasons: tuple[SplitReason, ...] = ()
    advice: str = ""


def explain(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> Explanation:
    """Explain a plan.

    Args:
        plan: the plan.
        graph: the model at the plan's micro-batch size; with model and cluster, other splits of operators are priced.
        cluster: the hardware.

    Raises:
        PlanError: its parts contradict each other so far that there is nothing to explain.
        UsageError: the plan is for another model or cluster.
    """
    require_sound(plan)
    tried_s = plan.predictions.tried_bound_s
    reasons, advice = tuple[SplitReason, ...](), ""
    if graph is not None and cluster is not None:
        job, device = plan.options, cluster.devices[0]
        reasons = split_reasons(plan, graph, cluster)
        advice = alignment_advice(graph, device, precision=job.precision, fused_attention=job.fused_attention)
    step = plan_step(plan)
    return Explanation(
        plan,
        step,
        {str(part): seconds for part, seconds in step.seconds.items()},
        rivals=tuple(_rival(plan, alternative) for alternative in plan.alternatives),
        tried_gap=None if tried_s is None else gap_to(tried_s, plan.predictions.reached_s),
        assumptions=tuple(_assumptions(plan)),
        reasons=reasons,
        advice=advice,
    )


def plan_shape(plan: Plan) -> str:
    """`DP 2 x TP 4 x PP 4, micro-batch 1 x 256, 1f1b, ZeRO-1`."""
    return words_of(plan.configuration, plan.schedule.name, expert_ranks(plan))


def _rival(plan: Plan, other: Alternative) -> Rival:
    plan_s, other_s = plan.compared_s(other)
    ratio = None if other_s is None else other_s / plan_s
    configuration = alternative_configuration(other, len(plan.block_table))
    differences = tuple(_differences(plan.configuration, configuration))
    words = words_of(configuration, other.schedule, other.experts)
    return Rival(other.label, words, other_s, ratio, differences, other.infeasible)


def _differences(own: Configuration, other: Configuration) -> Iterator[str]:
    """How an alternative differs from the plan, each difference in a few words."""
    stages = own.stages, other.stages
    counts = [len(each) for each in stages]
    same_count = counts[0] == counts[1]
    moved = sum(a.start != b.start for a, b in zip(*stages, strict=False))
    if not same_count:
        yield f"{plural(counts[1], 'stage')} instead of {counts[0]}"
    elif moved:
        yield f"{plural(moved, 'cut')} elsewhere"
    own_data, other_data = ([each.copies * stage.replicas for stage in each.stages] for each in (own, other))
    if set(own_data) != set(other_data) or (same_count and own_data != other_data):
        yield f"DP {one_or_all(other_data)} instead of {one_or_all(own_data)}"
    if other.micro_batch != own.micro_batch:
        yield f"micro-batch {other.micro_batch} instead of {own.micro_batch}"
    if other.schedule != own.schedule:
        yield f"{other.schedule} instead of {own.schedule}"
    recomputed = [[at for at, stage in enumerate(each) if stage.recompute] for each in stages]
    if len(recomputed[0]) != len(recomputed[1]):
        yield f"recompute in {plural(len(recomputed[1]), 'stage')} instead of {len(recomputed[0])}"
    elif recomputed[0] != recomputed[1] and same_count:
        yield "recompute in other stages"
    layers = [sorted({plural(stage.layers, "layer") for stage in each if stage.layers}) for each in stages]
    if layers[0] != layers[1]:
        own_layers, other_layers = (" and ".join(each) or "all or no layers" for each in layers)
        yield f"recompute {other_layers} of a stage instead of {own_layers}"
    for verb, field, nothing in (("recompute", "repeats", "no module alone"), ("offload", "offload", "nothing")):
        names = [{",".join(getattr(stage, field)) for stage in each} - {""} for each in stages]
        if names[0] != names[1]:
            own_names, other_names = (" and ".join(sorted(each)) or nothing for each in names)
            yield f"{verb} {other_names} instead of {own_names}"
    ranks = [sorted({stage.ranks for stage in each}) for each in stages]
    if ranks[0] != ranks[1]:
        alone = all(stage.context * stage.expert == 1 for each in stages for stage in each)
        word = "TP" if alone else "ranks a replica"
        yield f"{word} {short_list(ranks[1])} instead of {short_list(ranks[0])}"
    if other.zero != own.zero:
        yield f"ZeRO-{other.zero} instead of ZeRO-{own.zero}"


def _assumptions(plan: Plan) -> Iterator[str]:
    """What the plan's figures assume, a sentence each."""
    options, stack = plan.options, plan.hardware.stack
    loss = "the graph computes the loss" if plan.model.loss is Loss.IN_GRAPH else "a loss is put on the model's outputs"
    drawn = (
        ", as transformers do, also where the graph has none" if options.assume_dropout else " where the graph has them"
    )
    yield f"{options.precision} training with {options.optimizer}; {loss}"
    yield from _formats(options.precision)
    yield "attention is fused: scores are not kept" if options.fused_attention else "attention keeps its score matrix"
    yield f"dropout masks are drawn and kept{drawn}" if options.dropout else "no dropout"
    if stack:
        yield f"host times, kernels and overlap are those of the stack {stack}"
    yield _exchange(plan)
    yield from _recomputation(plan)
    yield from _offload(plan)
    yield from _semantics(plan)
    if plan.headline is not None and plan.headline.mfu:
        yield MFU_CONVENTION
    yield f"every micro-batch has {plural(plan.micro_batches.size, 'sample')} of the shapes that the plan lists"


def _formats(name: str) -> tuple[str, ...]:
    """Which products use a format below bf16; empty where none does."""
    try:
        narrow = precision(name).narrow
    except UsageError as error:
        raise PlanError(error.problem.message, where="options.precision", hint=error.problem.hint) from None
    if narrow is None:
        return ()
    return (f"products with weights multiply in {narrow.name}; attention, routers and the head in bf16",)


def _exchange(plan: Plan) -> str:
    """How gradient exchange overlaps with work."""
    if plan.exchange is not None:
        seconds, exposed = (format_seconds(s) for s in (plan.exchange.seconds, plan.exchange.exposed_s))
        return f"gradients travel by {plan.exchange.scheme} for {seconds}, of which {exposed} are not hidden"
    if plan.schedule.continuous and len(plan.stages) > 1:
        return "gradients travel beside later work: the slower of the two counts"
    if plan.options.overlap:
        return f"gradient synchronisation hides behind {plan.options.overlap:.0%} of the backward pass"
    return "gradient synchronisation does not overlap with the backward pass"


def _semantics(plan: Plan) -> Iterator[str]:
    """Rules of a published system, and where training differs from training on one device."""
    if plan.schedule.transfers == "overlapped":
        yield "transfers between stages occupy their link alone, not the ranks at its ends"
    if plan.schedule.weight_policy != WeightPolicy.SYNC:
        updates_old, versions_kept = max(plan.schedule.staleness, default=0), max(plan.schedule.versions, default=1)
        yield (
            f"asynchronous: gradients are up to {plural(updates_old, 'update')} old, up to "
            f"{plural(versions_kept, 'version')} of the weights are kept; how many more samples that takes is not known"
        )
    if plan.system is not None:
        yield f"chosen by the rules of {plan.system.title} ({plan.system.source})"
        yield from (f"{topic.replace('_', ' ')}: {fact}" for topic, fact in sorted(plan.system.tells.items()))
        yield from plan.system.notes


def _recomputation(plan: Plan) -> Iterator[str]:
    """What is recomputed, and what is kept instead."""
    stages = list(zip(plan.stages, plan.configuration.stages, strict=True))
    if any(stage.recompute for stage in plan.stages):
        kept = [plan.block_table[b].name for stage, choice in stages if not choice.layers for b in stage.kept_blocks]
        exception = f"; {kept[0]!r} is kept whole and not repeated" if kept else ""
        words = "a recomputed stage keeps the inputs of its blocks and repeats their forward before their backward"
        yield words + exception
        if some := {choice.layers for _, choice in stages if choice.layers}:
            count = f"the first {short_list(sorted(some))} layers of a stage"
            yield f"{count} are recomputed, and the layers behind are kept"
    if modules := dict.fromkeys(name for stage in plan.stages for name in stage.repeats):
        yield f"{', '.join(modules)} run forward again before their backward; what they read is kept"


def _offload(plan: Plan) -> Iterator[str]:
    """What lies in the host's memory, and the time of the way there."""
    if modules := dict.fromkeys(name for stage in plan.stages for name in stage.offload):
        most = max(plan.predictions.stages, key=lambda terms: terms.host_bytes)
        moved = f"{format_bytes(most.host_bytes)} a micro-batch at most, {format_seconds(most.move_s)} each way"
        hidden = "what the work of a pass does not hide is part of forward and backward"
        yield f"what {', '.join(modules)} keep lies in the host's memory from forward to backward: {moved}; {hidden}"

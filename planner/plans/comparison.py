"""Two plans compared as a person reads them: what changed, what the planner did about it, and what it costs.

`planner.plans.diff` lists every value that differs; this module sums them up by cause: inputs, decisions, costs. Either
side may also be the answer that no plan fits, a document that `shardplan plan --format json` prints and only `diff`
reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import planner.documents as documents
from planner.errors import InfeasibleError
from planner.memory import fits
from planner.plans.diff import Area, Change, diff
from planner.plans.files import digest_of, loads, plain
from planner.plans.matching import (
    BlockMatch,
    Ranges,
    carried_structures,
    decision_words,
    layers_of,
    match_stages,
    structure,
)
from planner.plans.model_changes import ModelChanges, ModelView, model_changes
from planner.plans.records import Provenance
from planner.plans.rules import OFF, RULES, ComparedFigure, Metric, Remark, Severity, severities
from planner.plans.step import plan_step
from planner.plans.types import Plan
from planner.plans.words import module_ranges, summary
from planner.units import format_bytes, format_fraction, format_number, format_rate, format_seconds, plural

NEARLY_FULL = 0.95
"""Share of all memory of a device above which a plan counts as nearly full."""

_TOLD = 3
"""Changes of one kind that a sentence lists at most."""

_OF_IDENTITY = frozenset((Area.MODEL, (name,)) for name in ("name", "fingerprint"))
"""Values that differ between two models that are the same but for names."""


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The differences between two plans.

    Attributes:
        stages: stages of the new plan.
        operators: operators of the new plan's model.
        causes: inputs that differ, a sentence each; empty where all are the same.
        decisions: what the planner decides otherwise, a sentence each; empty where nothing.
        costs: figures of both plans.
        remarks: findings of the rules, the gravest first.
        changes: every value that differs.
        only_names: names of the model changed and, apart from its fingerprint, nothing else that the plans say.
    """

    stages: int
    operators: int
    causes: tuple[str, ...]
    decisions: tuple[str, ...]
    costs: tuple[ComparedFigure, ...]
    remarks: tuple[Remark, ...]
    changes: tuple[Change, ...]
    only_names: bool = False


def compare_plans(
    old: Plan | InfeasibleAnswer,
    new: Plan | InfeasibleAnswer,
    *,
    tolerance: float = 0.0,
    ignore: Iterable[Area] = (),
    rules: Mapping[str, str] | None = None,
) -> PlanComparison:
    """Compare two plans by what changed, what was decided and what it costs; either may be the answer that none fits.

    Args:
        old: the plan before.
        new: the plan after.
        tolerance: predicted numbers that differ by at most this fraction are equal.
        ignore: parts whose values are left out of `changes`.
        rules: severities in place of those of `RULES`, or "off", by rule.

    Raises:
        PlanError: the parts of one of the plans contradict each other.
        UsageError: a rule or severity has no such name.
    """
    levels = severities(rules)
    if isinstance(old, InfeasibleAnswer) or isinstance(new, InfeasibleAnswer):
        return _compared_answers(old, new, levels)
    every, skipped = diff(old, new, tolerance=tolerance), set(ignore)
    changes = tuple(change for change in every if change.area not in skipped)
    model = model_changes(ModelView.of_plan(old), ModelView.of_plan(new))
    inputs = dict(_inputs(old, new, model, every))
    decisions = tuple(_decisions(old, new, model.match))
    costs = costs_of(old, new)
    messages = [
        *((rule, message, -1) for rule, message in inputs.items()),
        *_on_decisions(old, new, decisions, inputs, changes),
        *_on_costs(costs, tolerance),
        *_on_plans(old, new),
    ]
    order = list(Severity)
    remarks = [Remark(r, Severity(levels[r]), message, stage) for r, message, stage in messages if levels[r] != OFF]
    remarks.sort(key=lambda remark: (order.index(remark.severity), list(RULES).index(remark.rule)))
    further = [change for change in every if (change.area, change.path) not in _OF_IDENTITY]
    alone = model.only_names and list(inputs) == ["model-changed"] and not decisions and not further
    return PlanComparison(
        len(new.stages), new.model.operators, tuple(inputs.values()), decisions, costs, tuple(remarks), changes, alone
    )


def _inputs(old: Plan, new: Plan, model: ModelChanges, changes: Sequence[Change]) -> Iterator[tuple[str, str]]:
    """(rule, message) for each input that differs: model, hardware, options, tool."""
    if old.model.fingerprint != new.model.fingerprint:
        words = "; ".join(model.phrases)
        yield "model-changed", words if model.only_names else f"the model changed: {words}"
    if old.hardware.fingerprint != new.hardware.fingerprint or old.hardware.headroom != new.hardware.headroom:
        unseen = f"figures of {new.hardware.name} that a plan does not carry (efficiency, latency of devices, stack)"
        yield "hardware-changed", f"the hardware changed: {_values(changes, Area.HARDWARE) or unseen}"
    if options := _values(changes, Area.OPTIONS):
        yield "options-changed", f"the options changed: {options}"
    if tool := _tool(old.provenance, new.provenance):
        yield "tool-changed", tool


def _tool(old: Provenance, new: Provenance) -> str:
    """That another version of this program made the new document; empty if not."""
    return f"the tool changed: version {old.version} -> {new.version}" if old.version != new.version else ""


def _values(changes: Sequence[Change], area: Area) -> str:
    """The first values of an area that differ, in words."""
    changed_values = [
        f"{' '.join(c.path)} {value_words(c.path[-1], c.old)} -> {value_words(c.path[-1], c.new)}"
        for c in changes
        if c.area == area and c.path not in (("name",), ("fingerprint",))
    ]
    more = [f"and {plural(len(changed_values) - _TOLD, 'value')} more"] if len(changed_values) > _TOLD else []
    return ", ".join([*changed_values[:_TOLD], *more])


def value_words(name: str, value: object) -> str:
    """A value of a plan for people, by the name of its field."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "any"
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("byte_per_s"):
        return format_rate(value)
    if name.endswith("_s") and "per_s" not in name:
        return format_seconds(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    if name in ("gap", "bubble_fraction", "overlap", "headroom"):
        return format_fraction(value)
    return format_number(value, 6) if isinstance(value, float) else f"{value:,}"


def _decisions(old: Plan, new: Plan, match: BlockMatch) -> Iterator[str]:
    """Decisions that differ: degrees and micro-batches in one sentence, stages in another."""
    unchanged, gaps = match_stages(old, new, match)
    before, after = (summary(plan.configuration) for plan in (old, new))
    if before != after:
        yield f"from {before} to {after}"
    summary_tells_all = before != after and not unchanged and len(old.stages) != len(new.stages)
    stage_changes = [] if summary_tells_all else list(_stages_words(old, new, match, gaps))
    unchanged_words = f"{plural(unchanged, 'stage')} unchanged" if unchanged else ""
    if stage_changes:
        yield "; ".join([*stage_changes, unchanged_words] if unchanged_words else stage_changes)
    elif before == after and new.configuration != old.configuration and not (match.added or match.removed):
        yield "stages are the same, and ranks, layouts or orders differ"


def _stages_words(old: Plan, new: Plan, match: BlockMatch, gaps: Sequence[Ranges]) -> Iterator[str]:
    """How the stages that differ changed; stages with the same change share a sentence."""
    stages_by_change: dict[str, list[int]] = {}
    for before, after in gaps:
        if len(before) == len(after):
            for i, j in zip(before, after, strict=True):
                stages_by_change.setdefault(_stage_words(old, new, match, i, j), []).append(j)
        elif before and after:
            yield f"{_span(before)} of the old plan became {_span(after)}"
        else:
            yield f"{plural(len(before or after), 'stage')} {'fewer' if before else 'more'}"
    for words, stages in stages_by_change.items():
        numbers = ", ".join(module_ranges([str(stage) for stage in stages]))
        yield f"{'stages' if len(stages) > 1 else 'stage'} {numbers}: {words}"


def _span(numbers: range) -> str:
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}-{numbers[-1]}"


def _stage_words(old: Plan, new: Plan, match: BlockMatch, i: int, j: int) -> str:
    """How stage `i` of the old plan differs from stage `j` of the new one."""
    blocks = old.stage_blocks(i), new.stage_blocks(j)
    counts = [layers_of(own) for own in blocks]
    changes = []
    if counts[0] != counts[1]:
        changes.append(f"{counts[0]:g} -> {counts[1]:g} layer{'' if counts[1] == 1 else 's'}")
    elif len(blocks[0]) != len(blocks[1]):
        changes.append(f"{len(blocks[0])} -> {plural(len(blocks[1]), 'block')}")
    elif carried_structures(old, new, match, i) != list(map(structure, blocks[1])):
        changes.append("other blocks")
    before, after = decision_words(old, i), decision_words(new, j)
    changes += [f"{name} {before[name]} -> {words}" for name, words in after.items() if words != before[name]]
    return ", ".join(changes) or "other blocks kept while recomputing"


def fullest(plan: Plan) -> tuple[float, float]:
    """Bytes that the fullest device holds, all its stages together, and its capacity."""
    worker = plan_step(plan).fullest
    return worker.memory.total, worker.capacity_bytes


def costs_of(old: Plan, new: Plan) -> tuple[ComparedFigure, ...]:
    """The figures of both plans."""
    before, after, free = _figures(old), _figures(new), new.hardware.headroom
    common = [metric for metric in Metric if metric in before and metric in after]
    return tuple(ComparedFigure(m, before[m][0], after[m][0], before[m][1], after[m][1], free) for m in common)


def _figures(plan: Plan) -> dict[Metric, tuple[float, float | None]]:
    """(value, share of a device's memory for bytes) of each figure of a plan; no price where it is not known."""
    predictions, headline = plan.predictions, plan.headline
    held, capacity = fullest(plan)
    device_bytes = capacity / (1 - plan.hardware.headroom)
    samples, step_s = plan.micro_batches.global_batch, predictions.reached_s
    price = (headline.dollars_per_tera_tokens or headline.dollars_per_mega_samples) if headline else 0.0
    return {
        Metric.STEP_TIME: (step_s, None),
        Metric.THROUGHPUT: (samples / step_s if step_s else math.nan, None),
        Metric.PEAK_MEMORY: (held, held / device_bytes if device_bytes else None),
        Metric.BUBBLE: (plan_step(plan).bubble, None),
        Metric.GAP: (predictions.gap, None),
        **({Metric.PRICE: (price, None)} if price else {}),
    }


RuleMessage = tuple[str, str, int]
"""A rule's name, its message, and the stage that it is about (-1 for none)."""


def _on_decisions(
    old: Plan, new: Plan, decisions: Sequence[str], inputs: Mapping[str, str], changes: Sequence[Change]
) -> Iterator[RuleMessage]:
    if decisions:
        rule = "decision-changed" if inputs else "unexplained-choice"
        yield rule, "; ".join(decisions), -1
    elif changes and not inputs:
        yield "figures-changed", f"{plural(len(changes), 'value')} differ, though inputs and decisions do not", -1
    for flag in sorted(set(new.requires) - set(old.requires)):
        yield "requirement-added", f"the plan now needs {flag}", -1
    for name in sorted(set(old.runs_on) - set(new.runs_on)):
        yield "framework-lost", f"{name} took the old plan as it is and does not take the new one", -1


def _on_costs(costs: Sequence[ComparedFigure], tolerance: float) -> Iterator[RuleMessage]:
    by_metric = {cost.metric: cost for cost in costs}
    step, memory = by_metric[Metric.STEP_TIME], by_metric[Metric.PEAK_MEMORY]
    for cost, more, less in ((step, "slower", "faster"), (memory, "memory-grew", "")):
        change = cost.changed
        rule = "" if not change or abs(change) <= tolerance else more if change > 0 else less
        if rule and change is not None:
            words = f"{cost.words(cost.old, cost.old_share)} -> {cost.words(cost.new, cost.new_share)}"
            yield rule, f"{cost.metric} {words}, {change:+.2%}", -1
    if memory.new_share is not None and memory.new_share > NEARLY_FULL >= (memory.old_share or 0.0):
        free = f"the plan leaves {memory.new_headroom:.1%} of its memory free"
        yield "memory-nearly-full", f"the fullest device is {memory.new_share:.1%} full ({free})", -1


def _on_plans(old: Plan, new: Plan) -> Iterator[RuleMessage]:
    for rule, name, plan in (("old-digest", "old", old), ("digest", "new", new)):
        if digest_of(plan) != plan.digest:
            yield rule, f"the {name} plan was edited by hand: its digest is not that of its content", -1
    lacked = max((terms.memory.total_bytes - terms.capacity_bytes for terms in old.predictions.stages), default=0)
    for stage, terms in zip(new.stages, new.predictions.stages, strict=True):
        needed, capacity = terms.memory.total_bytes, terms.capacity_bytes
        if not fits(needed, capacity):
            rule = "does-not-fit" if needed - capacity > lacked else "still-does-not-fit"
            message = f"stage {stage.index} needs {format_bytes(needed)}, a device has {format_bytes(capacity)}"
            yield rule, message, stage.index
    if old.predictions.proven_optimal and not new.predictions.proven_optimal:
        yield "proof-weaker", f"the old plan was proven optimal, the new one is within {new.predictions.gap:.1%}", -1


INFEASIBLE_FORMAT: Literal["shardplan-infeasible"] = "shardplan-infeasible"
INFEASIBLE_VERSION: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class InfeasibleAnswer:
    """The answer that no plan fits, and why.

    Attributes:
        format: always "shardplan-infeasible".
        version: of this schema.
        provenance: how it came to be.
        model_fingerprint: of the model that has no plan.
        hardware_fingerprint: of the hardware that it does not fit.
        reason: what does not fit.
        hint: what would help.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    format: Literal["shardplan-infeasible"]
    version: Literal[1]
    provenance: Provenance
    model_fingerprint: str
    hardware_fingerprint: str
    reason: str
    hint: str


def infeasible_answer(error: InfeasibleError, model: str, hardware: str, provenance: Provenance) -> InfeasibleAnswer:
    """The document for an error; `model` and `hardware` are fingerprints."""
    problem = error.problem
    return InfeasibleAnswer(
        INFEASIBLE_FORMAT, INFEASIBLE_VERSION, provenance, model, hardware, problem.message, problem.hint
    )


def dump_answer(answer: InfeasibleAnswer) -> str:
    """The answer as JSON text."""
    return documents.pretty(plain(answer)) + "\n"


def load_answer(text: str | bytes, *, name: str = "plan") -> Plan | InfeasibleAnswer:
    """Read a plan, or the answer that there is none.

    Raises:
        PlanError: it is neither.
    """
    content, found = documents.document(text, name)
    if found.get("format") != INFEASIBLE_FORMAT:
        return loads(content, name=name)
    return documents.parse(content, InfeasibleAnswer, INFEASIBLE_FORMAT, INFEASIBLE_VERSION, name=name)


def _compared_answers(
    old: Plan | InfeasibleAnswer, new: Plan | InfeasibleAnswer, levels: Mapping[str, str]
) -> PlanComparison:
    """The comparison of two answers, one of which at least is that no plan fits; `levels` are severities by rule."""
    causes = tuple(_changed_inputs(old, new))
    if isinstance(new, Plan):
        decision = "finds a plan where there was none"
        return PlanComparison(len(new.stages), new.model.operators, causes, (decision,), (), (), ())
    message, level = new.reason + (f" ({new.hint})" if new.hint else ""), levels["infeasible"]
    remarks = () if level == OFF else (Remark("infeasible", Severity(level), message),)
    decision = "finds no plan that fits" + (", as before" if isinstance(old, InfeasibleAnswer) else "")
    return PlanComparison(0, 0, causes, (decision,), (), remarks, ())


def _changed_inputs(old: Plan | InfeasibleAnswer, new: Plan | InfeasibleAnswer) -> list[str]:
    """The inputs that differ, by their fingerprints."""
    before, after = (
        (a.model_fingerprint, a.hardware_fingerprint)
        if isinstance(a, InfeasibleAnswer)
        else (a.model.fingerprint, a.hardware.fingerprint)
        for a in (old, new)
    )
    names = (old.provenance.model, new.provenance.model), (old.provenance.hardware, new.provenance.hardware)
    changes = [
        f"the {what} changed ({' -> '.join(dict.fromkeys(filter(None, pair))) or 'without a name'})"
        for what, pair, a, b in zip(("model", "hardware"), names, before, after, strict=True)
        if a != b
    ]
    return [*changes, *filter(None, [_tool(old.provenance, new.provenance)])]

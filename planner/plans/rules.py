"""The rules of a comparison: their names and severities, and gates that let a comparison fail in CI.

A file of lines `rule: severity` overrides severities; `off` switches a rule off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import UsageError
from planner.foreign_files import Door
from planner.registry import did_you_mean
from planner.units import (
    Dimension,
    format_bytes,
    format_fraction,
    format_number,
    format_seconds,
    is_visible,
    parse,
)


class Severity(StrEnum):
    """How grave a finding is, the gravest first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


OFF = "off"
"""Stands for a severity of rules that are switched off."""

RULES: Mapping[str, tuple[Severity, str]] = {
    "infeasible": (Severity.ERROR, "the new inputs have no plan that fits"),
    "does-not-fit": (
        Severity.ERROR, "a stage of the new plan needs more memory than its devices have, and lacks more than before"),
    "stale": (Severity.ERROR, "the model, hardware or another source of the plan is not the one that it was made for"),
    "unreadable-source": (Severity.ERROR, "a source of the plan is in the repository and cannot be used"),
    "unreadable-plan": (Severity.ERROR, "the plan file cannot be read"),
    "plan-removed": (Severity.ERROR, "the plan is no longer in the repository"),
    "digest": (Severity.ERROR, "the new plan was edited by hand: its digest is not that of its content"),
    "framework-lost": (Severity.ERROR, "a training framework took the old plan and does not take the new one"),
    "unexplained-choice": (
        Severity.WARNING, "model, hardware, options and tool are the same, and the decisions differ"),
    "slower": (Severity.WARNING, "a step takes longer"),
    "memory-grew": (Severity.WARNING, "the fullest device holds more"),
    "memory-nearly-full": (
        Severity.WARNING, "the fullest device is more than 95 % full, headroom counted as free, and was less"),
    "proof-weaker": (Severity.WARNING, "the old plan was proven optimal, the new one is not"),
    "requirement-added": (Severity.WARNING, "the new plan needs what the old one did not need of a training framework"),
    "still-does-not-fit": (
        Severity.WARNING, "a stage of the new plan needs more memory than its devices have, as in the old plan"),
    "plan-added": (Severity.INFO, "the plan is new in the repository"),
    "plan-renamed": (Severity.INFO, "the plan has another file name"),
    "unknown-source": (Severity.INFO, "a source of the plan is not in the repository: whether it changed is not known"),
    "old-digest": (Severity.INFO, "the old plan was edited by hand"),
    "tool-changed": (Severity.INFO, "another version of this program made the plan"),
    "model-changed": (Severity.INFO, "the plan is for another model"),
    "hardware-changed": (Severity.INFO, "the plan is for other hardware"),
    "options-changed": (Severity.INFO, "something else was asked for"),
    "decision-changed": (Severity.INFO, "stages, degrees, micro-batches, schedule or ZeRO differ"),
    "faster": (Severity.INFO, "a step takes less time"),
    "figures-changed": (Severity.INFO, "figures differ though inputs and decisions are the same"),
}  # fmt: skip
"""Severity and meaning by name. Names are stable: the name of a removed rule is not used again."""


FILE_RULES = (
    "unreadable-plan", "plan-removed", "stale", "unreadable-source", "plan-renamed", "plan-added", "unknown-source",
)  # fmt: skip
"""Rules about the file of a plan and its sources in a repository, the gravest first."""

CLOSED = {
    "unreadable-plan": "a plan that can be read",
    "plan-removed": "a plan that exists",
    "stale": "an up-to-date plan",
    "unreadable-source": "sources that can be read",
}
"""Gates that hold beside any others, by the rule of which an error fails them."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A finding of a rule about two plans.

    Attributes:
        rule: its name in `RULES`.
        severity: how grave it is.
        message: one line.
        stage: the stage of the new plan that it is about, -1 for none.
    """

    rule: str
    severity: Severity
    message: str
    stage: int = -1


def severities(document: Mapping[str, str] | None = None, *, name: str = "rules") -> dict[str, str]:
    """The severity of every rule, or `off`.

    Args:
        document: severities in place of the default ones, by rule.
        name: what errors call their source.

    Raises:
        UsageError: there is no such rule or severity.
    """
    levels: dict[str, str] = {rule: severity for rule, (severity, _) in RULES.items()}
    for rule, severity in (document or {}).items():
        if rule not in RULES:
            raise UsageError(f"there is no rule {rule!r}", where=name, hint=did_you_mean(str(rule), RULES))
        if severity not in (*Severity, OFF):
            allowed = (*map(str, Severity), OFF)
            raise UsageError(f"{rule}: {severity!r} is no severity", where=name, hint=f"one of {', '.join(allowed)}")
        levels[rule] = severity
    return levels


def read_rules(text: str | bytes, *, name: str = "rules") -> dict[str, str]:
    """Severities from a file with a line `rule: severity` each; `#` begins a comment.

    Raises:
        UsageError: a line reads otherwise, or a rule stands there twice; or as `severities`.
    """
    levels: dict[str, str] = {}
    content = Door(name, UsageError, "write a rule a line, such as slower: error").text(text)
    entries = {number: line.partition("#")[0].strip() for number, line in enumerate(content.splitlines(), 1)}
    words = {word.strip() for entry in entries.values() for word in entry.split(":")}
    if any(entries.values()) and not words & {*RULES, *Severity, OFF}:  # no file of rules: nothing of it is shown
        raise UsageError("no line is a rule", where=name, hint="write each rule once, such as slower: error")
    for number, entry in entries.items():
        if not entry:
            continue
        rule, colon, severity = (part.strip() for part in entry.partition(":"))
        if not (rule and colon and severity) or rule in levels:
            hint = "write each rule once, such as slower: error"
            raise UsageError(f"{entry!r} cannot be read", where=f"{name}:{number}", hint=hint)
        levels[rule] = severity
    severities(levels, name=name)
    return levels


class Metric(StrEnum):
    """Figures of a plan that a comparison shows and a gate can limit."""

    STEP_TIME = "step_time"
    THROUGHPUT = "throughput"
    PEAK_MEMORY = "peak_memory"
    BUBBLE = "bubble"
    GAP = "gap"
    PRICE = "price"


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of two plans.

    Attributes:
        metric: which.
        old: in the old plan: seconds, samples a second, bytes of the fullest device, a fraction, or US dollars for
            10^12 tokens, for models without tokens 10^6 samples.
        new: in the new plan.
        old_share: of all memory of the device in the old plan, the headroom counted as free; for memory.
        new_share: of all memory of the device in the new plan, likewise.
        new_headroom: part of a device's memory that the new plan leaves free, for memory.
    """

    metric: Metric
    old: float
    new: float
    old_share: float | None = None
    new_share: float | None = None
    new_headroom: float = 0.0

    @property
    def relative(self) -> float | None:
        """(new - old) / old; None where the old one is zero or not finite."""
        if self.old == self.new:
            return 0.0
        return self.new / self.old - 1 if self.old > 0 and math.isfinite(self.old) else None

    @property
    def changed(self) -> float | None:
        """`relative` where it shows in the two decimals of percent that are written; 0 for a smaller change."""
        change = self.relative
        return change if change is None or is_visible(change) else 0.0

    def words(self, value: float, share: float | None) -> str:
        """A value of this metric for people."""
        if self.metric is Metric.STEP_TIME:
            return format_seconds(value, 4)
        if self.metric is Metric.THROUGHPUT:
            return f"{format_number(value)} samples/s"
        if self.metric is Metric.PEAK_MEMORY:
            return format_bytes(value) + (f" ({share:.0%})" if share is not None else "")
        return f"${format_number(value)}" if self.metric is Metric.PRICE else format_fraction(value)


_DIMENSIONS = {Metric.STEP_TIME: Dimension.SECONDS, Metric.PEAK_MEMORY: Dimension.BYTES}
_SHARES = (Metric.PEAK_MEMORY, Metric.BUBBLE, Metric.GAP)
_GATE = re.compile(r"([a-z_]+):\s*([+-]?)(\S.*)")


@dataclass(frozen=True, slots=True)
class Gate:
    """Condition on which a comparison fails.

    Attributes:
        text: as it was given.
        rule: fails on a finding of this rule; "" for none.
        severities: fails on a finding that is as grave as one of these.
        metric: fails on this figure; None for none.
        limit: largest allowed figure (smallest, with `below`): a change relative to the old one, a share, or a value in
            SI units.
        kind: unit of the limit: "change", "share" or "value".
        below: true if the gate fails on figures below the limit.
    """

    text: str
    rule: str = ""
    severities: tuple[Severity, ...] = ()
    metric: Metric | None = None
    limit: float = 0.0
    kind: str = ""
    below: bool = False

    def struck(self, costs: Sequence[ComparedFigure], remarks: Sequence[Remark]) -> str:
        """Why the gate fails, in a line; "" if it passes. A figure that is missing or no number fails it."""
        if self.metric is None:
            finding = next((r for r in remarks if r.rule == self.rule or r.severity in self.severities), None)
            return f"{finding.rule} ({finding.severity}): {finding.message}" if finding else ""
        cost = next((cost for cost in costs if cost.metric is self.metric), None)
        if cost is None:
            return f"{self.metric} is not known"
        share = cost.new_share if self.metric is Metric.PEAK_MEMORY else cost.new
        value = {"change": cost.relative, "share": share, "value": cost.new}[self.kind]
        shown = cost.words(cost.new, cost.new_share)
        if value is None or not math.isfinite(value):
            return f"{self.metric} is {shown}, and was {cost.words(cost.old, cost.old_share)}"
        if value < self.limit if self.below else value > self.limit:
            change = "" if cost.changed is None else f", {cost.changed:+.2%}"
            return f"{self.metric} is {shown}{change if self.kind == 'change' else ''}{self._of_memory(cost)}"
        return ""

    def _of_memory(self, cost: ComparedFigure) -> str:
        """What a share of memory is a share of; empty for other limits."""
        if self.metric is not Metric.PEAK_MEMORY or self.kind != "share":
            return ""
        return f" of all memory of the device; the plan leaves {cost.new_headroom:.1%} free"


DEFAULT_GATES = ("step_time:+3%", "peak_memory:+5%", "error")
"""Gates of `--fail-on default`. All are about changes and grave findings, so that equal plans pass."""


def gates(texts: Sequence[str]) -> tuple[Gate, ...]:
    """Read gates, each once; `default` stands for `DEFAULT_GATES`.

    Raises:
        UsageError: a text is no gate.
    """
    written = [each for text in texts for each in (DEFAULT_GATES if text.strip().lower() == "default" else (text,))]
    return tuple(map(gate, dict.fromkeys(written)))


def gate(text: str) -> Gate:
    """Read `step_time:+3%`, `throughput:-3%`, `peak_memory:+5%`, `peak_memory:70GiB`, `error`, or a rule's name.

    Raises:
        UsageError: it is none of these.
    """
    lowered = text.strip().lower()
    if lowered in (*Severity,):
        order = tuple(Severity)
        return Gate(text, severities=order[: order.index(Severity(lowered)) + 1])
    if lowered in RULES:
        return Gate(text, rule=lowered)
    limit_match = _GATE.fullmatch(lowered)
    if limit_match is None or limit_match[1] not in (*Metric,):
        known = (*map(str, Severity), *RULES, *(f"{metric}:+3%" for metric in Metric))
        metrics = [str(metric) for metric in Metric]
        suggestion = did_you_mean(limit_match[1], metrics) if limit_match else did_you_mean(lowered, known)
        raise UsageError(f"{text!r} is no gate", where="--fail-on", hint=suggestion)
    metric, sign, limit = Metric(limit_match[1]), limit_match[2], text.strip()[limit_match.start(3) :]
    below = metric is Metric.THROUGHPUT
    if sign:
        if below == (sign == "+"):
            better = "-3%" if below else "+3%"
            raise UsageError(f"{text!r} fails on an improvement", where="--fail-on", hint=f"write {metric}:{better}")
        change = parse(limit, Dimension.FRACTION)
        return Gate(text, metric=metric, limit=-change if below else change, kind="change", below=below)
    if limit.endswith("%"):
        if metric not in _SHARES:
            raise UsageError(f"{text!r} names no limit", where="--fail-on", hint=f"write {metric}:+3% for a change")
        return Gate(text, metric=metric, limit=parse(limit, Dimension.FRACTION), kind="share")
    dimension = _DIMENSIONS.get(metric, Dimension.FRACTION)
    bare = metric in (Metric.THROUGHPUT, Metric.PRICE) and re.fullmatch(r"\$?([0-9]+\.?[0-9]*)", limit)
    value = float(bare[1]) if bare else parse(limit, dimension)
    return Gate(text, metric=metric, limit=value, kind="value", below=below)

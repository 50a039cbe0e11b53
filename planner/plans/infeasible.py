"""The answer where nothing fits, as a document: it stands in the place of a plan, so that a comparison can tell it.

`shardplan plan --format json` prints it; it is no plan, and nothing but `diff` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from planner.errors import InfeasibleError
from planner.plans import documents
from planner.plans.comparison import PlanComparison, compare_plans
from planner.plans.diff import Area
from planner.plans.files import loads, plain
from planner.plans.records import Provenance
from planner.plans.rules import OFF, Remark, Severity, severities
from planner.plans.types import Plan

INFEASIBLE_FORMAT: Literal["shardplan-infeasible"] = "shardplan-infeasible"
INFEASIBLE_VERSION: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class InfeasibleAnswer:
    """That no plan fits, and why.

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
    """The answer that an error is; `model` and `hardware` are fingerprints."""
    said = error.problem
    return InfeasibleAnswer(INFEASIBLE_FORMAT, INFEASIBLE_VERSION, provenance, model, hardware, said.message, said.hint)


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
    documents.require_form(found, INFEASIBLE_FORMAT, (INFEASIBLE_VERSION,), name)
    return documents.validated(json.dumps(found), InfeasibleAnswer, name=name, shown=content)


def compare_answers(
    old: Plan | InfeasibleAnswer,
    new: Plan | InfeasibleAnswer,
    *,
    tolerance: float = 0.0,
    ignore: tuple[Area, ...] = (),
    rules: Mapping[str, str] | None = None,
) -> PlanComparison:
    """Compare two plans (`compare_plans`), either of which may be the answer that there is none.

    Raises:
        PlanError, UsageError: as `compare_plans`.
    """
    if isinstance(old, Plan) and isinstance(new, Plan):
        return compare_plans(old, new, tolerance=tolerance, ignore=ignore, rules=rules)
    causes = tuple(_inputs(old, new))
    if isinstance(new, InfeasibleAnswer):
        said = new.reason + (f" ({new.hint})" if new.hint else "")
        level = severities(rules)["infeasible"]
        remarks = () if level == OFF else (Remark("infeasible", Severity(level), said),)
        decision = "finds no plan that fits" + (", as before" if isinstance(old, InfeasibleAnswer) else "")
        return PlanComparison(0, 0, causes, (decision,), (), remarks, ())
    return PlanComparison(
        len(new.stages), new.model.operators, causes, ("finds a plan where there was none",), (), (), ()
    )


def _inputs(old: Plan | InfeasibleAnswer, new: Plan | InfeasibleAnswer) -> list[str]:
    """The inputs that differ, by their fingerprints."""
    before, after = (
        (a.model_fingerprint, a.hardware_fingerprint)
        if isinstance(a, InfeasibleAnswer)
        else (a.model.fingerprint, a.hardware.fingerprint)
        for a in (old, new)
    )
    names = (old.provenance.model, new.provenance.model), (old.provenance.hardware, new.provenance.hardware)
    said = [
        f"the {what} changed ({' -> '.join(dict.fromkeys(filter(None, pair))) or 'without a name'})"
        for what, pair, a, b in zip(("model", "hardware"), names, before, after, strict=True)
        if a != b
    ]
    versions = old.provenance.version, new.provenance.version
    return said + ([f"the tool changed: version {versions[0]} -> {versions[1]}"] if versions[0] != versions[1] else [])

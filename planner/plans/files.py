"""Plans as JSON: strict to read, canonical to write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.files import write_whole
from planner.plans import layout, strict, version1
from planner.plans.blocks import BlockParameter
from planner.plans.figures import Alternative, StageCollective, StagePrediction
from planner.plans.orders import RankOrder
from planner.plans.records import Boundary, PlanNote, Provenance, Stage
from planner.plans.schedule_section import OptimizerScaling, ScheduleSection, StageCorrection
from planner.plans.shardings import ShardedBlock, Sharding, TensorPlace
from planner.plans.sizes import require_sizes
from planner.plans.system_sections import ExchangeSection, SystemSection, TensorExchange
from planner.plans.types import FORMAT, SCHEMA_VERSION, Plan
from planner.space.configuration import Configuration, StageChoice
from planner.space.named import Degrees
from planner.space.types import Job

_SPARSE = (
    Alternative, BlockParameter, Boundary, Configuration, Degrees, ExchangeSection, OptimizerScaling, Plan, PlanNote,
    Provenance, RankOrder, ScheduleSection, ShardedBlock, Sharding, Stage, StageChoice, StageCollective,
    StageCorrection, StagePrediction, SystemSection, TensorExchange, TensorPlace,
)  # fmt: skip
"""Types whose fields are left out of the file when they have their default."""

_JOB_WRITTEN = frozenset(
    (
        "precision", "optimizer", "micro_batches", "schedules", "recompute", "zero", "max_stages", "devices",
        "fused_attention", "dropout", "assume_dropout", "overlap",
    )
)  # fmt: skip
"""Options that are written at their default, too; others are left out then. Of other types all fields are written."""

_LATER = ("line_bound_s",)
"""Fields that files written before do not have: left out at their default, so that the digests of those files hold."""

_UNHASHED = ("digest", "provenance")


def to_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain dicts and lists in the order of the schema."""
    document: dict[str, Any] = plain(plan)
    return document


def plain(value: Any) -> Any:  # noqa: ANN401
    """Dataclasses as dicts, tuples as lists, without the fields that are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not left_out(value, field)
        }
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def left_out(value: object, field: dataclasses.Field[Any]) -> bool:
    """Whether a field of a dataclass is not written, because it has its default."""
    optional = (
        isinstance(value, _SPARSE)
        or field.name in _LATER
        or (isinstance(value, Job) and field.name not in _JOB_WRITTEN)
    )
    return optional and getattr(value, field.name) == field.default


def digest_of(plan: Plan) -> str:
    """sha256 (hex) over everything but the digest itself and the provenance."""
    return _digest(to_document(plan))


def _digest(document: dict[str, Any], unhashed: tuple[str, ...] = ()) -> str:
    body = {key: value for key, value in document.items() if key not in (*_UNHASHED, *unhashed)}
    return hashlib.sha256(layout.compact(body).encode()).hexdigest()


def seal(plan: Plan) -> Plan:
    """The same plan with the digest that belongs to it."""
    return dataclasses.replace(plan, digest=digest_of(plan))


def dumps(plan: Plan) -> str:
    """The plan as JSON text; the same plan gives the same bytes."""
    return layout.pretty(to_document(plan)) + "\n"


def loads(text: str | bytes, *, name: str = "plan") -> Plan:
    """Read a plan from JSON text, also of version 1, which is given as version 2.

    The digest is not compared: `validate` does that.

    Args:
        text: the JSON.
        name: what errors call it (a file name).

    Raises:
        PlanError: not JSON, of another format or version, or not as the schema says; `problems` holds every finding
            with line, column and path.
    """
    content, document = strict.document(text, name)
    strict.require_form(document, FORMAT, (version1.VERSION, SCHEMA_VERSION), name)
    old = document["version"] == version1.VERSION
    body = json.dumps(version1.raised(document, name)) if old else content
    plan = strict.validated(body, Plan, name=name, shown=content)
    require_sizes(plan, name)
    try:
        len(plan.block_table)
        for sharding in plan.shardings:
            for entry in sharding.blocks:
                entry.members()
    except PlanError as error:
        raise PlanError(error.problem.message, where=name, hint=error.problem.hint) from error
    return _lifted(plan) if old else plan


def _lifted(plan: Plan) -> Plan:
    """A plan of version 1 with its configuration; sealed anew where its digest was right."""
    sealed = plan.digest == _digest({**to_document(plan), "version": version1.VERSION}, ("configuration",))
    plan = dataclasses.replace(plan, configuration=version1.configuration_of(plan))
    return seal(plan) if sealed else plan


def read(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, unreadable or not a plan (see `loads`).
    """
    return loads(strict.read_bytes(path), name=str(path))


def write(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(path, dumps(plan))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the plan file, descriptions taken from the types' docstrings."""
    from planner.plans.schema import described

    return described(strict.adapter(Plan).json_schema())

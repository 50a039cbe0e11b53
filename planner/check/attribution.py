"""Attribute the difference between two plans to causes: price the old decisions as inputs change one by one.

Inputs change in a fixed order (tool, hardware, options, model); the remainder is due to other decisions of the planner.
The parts always add up to the whole difference, but another order of changes may split it differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import ShardplanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.named_shardings import NamedConfiguration, with_sharding
from planner.plans import Plan
from planner.plans.comparison import fullest
from planner.plans.findings import Finding
from planner.plans.identity import other_hardware, other_model
from planner.plans.matching import decision_words, match_blocks
from planner.prediction import predict
from planner.space import Configuration


class Cause(StrEnum):
    """Possible causes of a difference between two plans, in the order in which they are applied."""

    TOOL = "tool"
    HARDWARE = "hardware"
    OPTIONS = "options"
    MODEL = "model"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class CauseShare:
    """A part of the difference, with its causes.

    Attributes:
        causes: the cause, or several if the steps between them could not be priced.
        seconds: change of the step time, negative if it is shorter.
        memory_bytes: change of the fullest device's memory.
    """

    causes: tuple[Cause, ...]
    seconds: float
    memory_bytes: float


Attribution = tuple[tuple[CauseShare, ...], tuple[str, ...]]
"""A difference between two plans by cause: its parts in the order of `Cause`, which add up to the whole difference, and
why some causes share a part, a line each."""


def attribute(old: Plan, new: Plan, graphs: Sequence[Graph] = (), clusters: Sequence[Cluster] = ()) -> Attribution:
    """Split the difference in step time and memory between two plans by cause.

    Args:
        old: the plan before.
        new: the plan after.
        graphs: available models; a plan uses the one with its fingerprint.
        clusters: available clusters, likewise.

    Raises:
        UsageError: a model or cluster belongs to neither plan.

    Prices one configuration for each cause but the last.
    """
    for graph in graphs:
        _require_known(f"{graph.name} is the model", [other_model(plan, graph) for plan in (old, new)])
    for cluster in clusters:
        _require_known(f"{cluster.name} is the hardware", [other_hardware(plan, cluster) for plan in (old, new)])
    models = {graph.fingerprint: graph for graph in graphs}
    machines = {cluster.fingerprint: cluster for cluster in clusters}
    causes = list(_causes(old, new))
    parts: list[CauseShare] = []
    unpriced: list[str] = []
    last_figures, pending = _figures(old), list[Cause]()
    for cause in causes:
        pending.append(cause)
        try:
            figures = _figures(new) if cause is causes[-1] else _priced(old, new, cause, models, machines)
        except ShardplanError as error:
            unpriced.append(f"the old decisions after the change of {cause} cannot be priced: {error.problem.message}")
            continue
        parts.append(CauseShare(tuple(pending), figures[0] - last_figures[0], figures[1] - last_figures[1]))
        last_figures, pending = figures, []
    return tuple(parts), tuple(unpriced)


def _require_known(what: str, differing: Sequence[Finding | None]) -> None:
    """Refuse an input that belongs to neither plan, by how it differs from those of the old and of the new one."""
    findings = [finding for finding in differing if finding is not None]
    if len(findings) == len(differing):
        message = "; the new one: ".join(dict.fromkeys(finding.message for finding in findings))
        raise UsageError(f"{what} of neither plan: {message}", hint=findings[-1].hint)


def _causes(old: Plan, new: Plan) -> Iterator[Cause]:
    if old.provenance.version != new.provenance.version:
        yield Cause.TOOL
    if old.hardware.fingerprint != new.hardware.fingerprint:
        yield Cause.HARDWARE
    if old.options != new.options:
        yield Cause.OPTIONS
    if old.model.fingerprint != new.model.fingerprint:
        yield Cause.MODEL
    words = [[decision_words(plan, stage.index) for stage in plan.stages] for plan in (old, new)]
    if carry_over(old, new) != with_sharding(new.configuration, 0) or words[0] != words[1]:
        yield Cause.PLANNER


def carry_over(old: Plan, new: Plan) -> Configuration | None:
    """The old plan's configuration on the new plan's blocks: each stage begins at the same block as before.

    None if a stage would have no blocks. Blocks that only the new model has join the stage before them.
    """
    numbers = match_blocks(old.block_table, new.block_table).new_of()
    starts, end = [0], len(new.block_table)
    for stage in old.configuration.stages[1:]:
        candidates = (numbers[block] for block in range(stage.start, len(old.block_table)) if block in numbers)
        starts.append(next(candidates, end))
    if any(a >= b for a, b in zip(starts, (*starts[1:], end), strict=True)):
        return None
    stages = tuple(
        dataclasses.replace(stage, start=start, stop=stop)
        for stage, start, stop in zip(old.configuration.stages, starts, (*starts[1:], end), strict=True)
    )
    return with_sharding(dataclasses.replace(old.configuration, stages=stages), 0)


def _figures(plan: Plan) -> tuple[float, float]:
    """Step time in seconds and bytes of the fullest device."""
    return plan.predictions.reached_s, fullest(plan)[0]


def _priced(
    old: Plan, new: Plan, cause: Cause, models: dict[str, Graph], machines: dict[str, Cluster]
) -> tuple[float, float]:
    """Step time and peak memory of the old decisions with the new inputs up to a cause.

    Raises:
        ShardplanError: an input is not given, or the decisions are not possible with the inputs.
    """
    done = list(Cause)[: list(Cause).index(cause) + 1]
    model = (new if Cause.MODEL in done else old).model
    hardware = (new if Cause.HARDWARE in done else old).hardware
    job = (new if Cause.OPTIONS in done else old).options
    if model.fingerprint not in models:
        raise UsageError(f"{model.name} is not at hand (--model)")
    if hardware.fingerprint not in machines:
        raise UsageError(f"{hardware.name} with fingerprint {hardware.fingerprint[:12]} is not at hand (--hardware)")
    asked: NamedConfiguration | None = old if Cause.MODEL not in done else carry_over(old, new)
    if asked is None:
        raise UsageError("a stage has no blocks of the new model")
    return _figures(predict(models[model.fingerprint], machines[hardware.fingerprint], job, asked).plan)

"""Which part of a difference comes from which cause: the old decisions priced as the inputs change one by one.

Inputs are set to the new ones in a fixed order (tool, hardware, options, model); what is left is what the planner
decides otherwise. The parts add up to the whole difference, whatever the order; another order may deal them otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import ShardplanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan
from planner.plans.comparison import fullest
from planner.plans.matching import match_blocks, stage_decision
from planner.prediction import Asked, predict
from planner.space import Configuration


class Cause(StrEnum):
    """Where a difference between two plans may come from, in the order in which inputs are set anew."""

    TOOL = "tool"
    HARDWARE = "hardware"
    OPTIONS = "options"
    MODEL = "model"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a difference that some causes make.

    Attributes:
        causes: one, or several where what lies between them could not be priced.
        seconds: that a step takes longer for it; negative where it takes less.
        memory_bytes: that the fullest device holds more for it.
    """

    causes: tuple[Cause, ...]
    seconds: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """A difference in parts.

    Attributes:
        parts: in the order of `Cause`; they add up to the whole.
        unpriced: why causes stand together, a line each.
    """

    parts: tuple[Part, ...]
    unpriced: tuple[str, ...] = ()


def attribute(old: Plan, new: Plan, graphs: Sequence[Graph] = (), clusters: Sequence[Cluster] = ()) -> Attribution:
    """Deal the difference in time and memory between two plans to its causes.

    Args:
        old: the plan before.
        new: the plan after.
        graphs: models at hand; each plan's is the one with its fingerprint.
        clusters: hardware at hand, likewise.

    Raises:
        UsageError: a model or cluster is that of neither plan.

    Takes the pricing of one configuration for each cause but the last; none where there is one cause.
    """
    _require_known("model", {old.model.fingerprint, new.model.fingerprint}, graphs)
    _require_known("hardware", {old.hardware.fingerprint, new.hardware.fingerprint}, clusters)
    models = {graph.fingerprint: graph for graph in graphs}
    machines = {cluster.fingerprint: cluster for cluster in clusters}
    causes = list(_causes(old, new))
    parts: list[Part] = []
    unpriced: list[str] = []
    last, waiting = _figures(old), list[Cause]()
    for cause in causes:
        waiting.append(cause)
        try:
            figures = _figures(new) if cause is causes[-1] else _priced(old, new, cause, models, machines)
        except ShardplanError as error:
            unpriced.append(f"the old decisions after the change of {cause} cannot be priced: {error.problem.message}")
            continue
        parts.append(Part(tuple(waiting), figures[0] - last[0], figures[1] - last[1]))
        last, waiting = figures, []
    return Attribution(tuple(parts), tuple(unpriced))


def _require_known(what: str, fingerprints: set[str], given: Sequence[Graph] | Sequence[Cluster]) -> None:
    for each in given:
        if each.fingerprint not in fingerprints:
            raise UsageError(
                f"{each.name} is the {what} of neither plan", hint="give the sizes, nodes and stack of the plans"
            )


def _causes(old: Plan, new: Plan) -> Iterator[Cause]:
    if old.provenance.version != new.provenance.version:
        yield Cause.TOOL
    if old.hardware.fingerprint != new.hardware.fingerprint:
        yield Cause.HARDWARE
    if old.options != new.options:
        yield Cause.OPTIONS
    if old.model.fingerprint != new.model.fingerprint:
        yield Cause.MODEL
    if not _decided_alike(old, new):
        yield Cause.PLANNER


def _decided_alike(old: Plan, new: Plan) -> bool:
    """Whether the new plan is what becomes of the old one's decisions in the new model."""
    carried = carry_over(old, new)
    words = [[stage_decision(plan, stage.index).words() for stage in plan.stages] for plan in (old, new)]
    return carried == _unnumbered(new.configuration) and words[0] == words[1]


def _unnumbered(configuration: Configuration) -> Configuration:
    """The configuration without the numbers of its shardings, which each plan counts by itself."""
    stages = tuple(dataclasses.replace(stage, sharding=0) for stage in configuration.stages)
    return dataclasses.replace(configuration, stages=stages)


def carry_over(old: Plan, new: Plan) -> Configuration | None:
    """The old plan's configuration on the new plan's blocks: a stage begins at the block that it began at.

    None where a stage would be left without blocks. Blocks that only the new model has join the stage before them.
    """
    numbers = match_blocks(old.block_table, new.block_table).new_of()
    starts, end = [0], len(new.block_table)
    for stage in old.configuration.stages[1:]:
        here = (numbers[block] for block in range(stage.start, len(old.block_table)) if block in numbers)
        starts.append(next(here, end))
    if any(a >= b for a, b in zip(starts, (*starts[1:], end), strict=True)):
        return None
    stages = tuple(
        dataclasses.replace(stage, start=start, stop=stop)
        for stage, start, stop in zip(old.configuration.stages, starts, (*starts[1:], end), strict=True)
    )
    return _unnumbered(dataclasses.replace(old.configuration, stages=stages))


def _figures(plan: Plan) -> tuple[float, float]:
    return plan.predictions.reached_s, fullest(plan)[0]


def _priced(
    old: Plan, new: Plan, cause: Cause, models: dict[str, Graph], machines: dict[str, Cluster]
) -> tuple[float, float]:
    """Seconds and bytes of the old decisions where the inputs up to a cause are the new ones.

    Raises:
        ShardplanError: they are not at hand, or make no sense together.
    """
    done = list(Cause)[: list(Cause).index(cause) + 1]
    model = (new if Cause.MODEL in done else old).model
    hardware = (new if Cause.HARDWARE in done else old).hardware
    job = (new if Cause.OPTIONS in done else old).options
    if model.fingerprint not in models:
        raise UsageError(f"{model.name} is not at hand (--model)")
    if hardware.fingerprint not in machines:
        raise UsageError(f"{hardware.name} with fingerprint {hardware.fingerprint[:12]} is not at hand (--hardware)")
    asked: Asked | None = old if Cause.MODEL not in done else carry_over(old, new)
    if asked is None:
        raise UsageError("a stage has no blocks of the new model")
    return _figures(predict(models[model.fingerprint], machines[hardware.fingerprint], job, asked).plan)

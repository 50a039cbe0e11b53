"""Does a plan say of its stages what follows from their blocks, parameters and options, without model and hardware?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner import schedules
from planner.check.configuration import is_searched, schedule_of
from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import UsageError
from planner.plans import Fault, Finding, Plan
from planner.plans.figures import StagePrediction
from planner.plans.records import Stage
from planner.plans.sections import stage_collectives
from planner.plans.words import module_ranges
from planner.space.limits import forbidden_choices
from planner.space.workers import lay_workers
from planner.units import format_bytes

_AGAIN = "plan again instead of editing the file"


def check_sums(plan: Plan) -> list[Finding]:
    """Findings about what stages hold, exchange and are called, and about the limits of the job; O(parameters)."""
    names = tuple(block.name for block in plan.block_table)
    found = list(_model(plan))
    try:
        schedule = schedule_of(plan)
        for name in plan.options.schedules if plan.schedule.given != "orders" else ():
            schedules.get(name)
        workers = lay_workers(plan.configuration, schedule)
        for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
            found += [*_held(plan, stage, terms, schedule.weight_buffers), *_exchanged(plan, stage, terms)]
            right = module_ranges(names[slice(*stage.blocks)])
            if stage.modules != right:
                message = f"stage {stage.index} is called {', '.join(stage.modules)}; its blocks are {', '.join(right)}"
                found.append(Finding(Fault.PARAMETERS, message, _AGAIN, stage.index))
        broken = forbidden_choices(plan.options, plan.configuration, names, workers) if is_searched(plan) else []
    except UsageError as error:
        return [*found, Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    return [*found, *(Finding(Fault.OPTIONS, each.message, _AGAIN, each.stage) for each in broken)]


def _model(plan: Plan) -> Iterator[Finding]:
    """The blocks hold as many trained parameters as the model is said to have."""
    owners = {p.owner: p.elements for block in plan.block_table for p in block.parameters if p.trainable}
    if sum(owners.values()) != plan.model.parameters:
        message = f"the blocks hold {sum(owners.values())} trained parameters, the model is said to have "
        yield Finding(Fault.MODEL, f"{message}{plan.model.parameters}", _AGAIN)


def _held(plan: Plan, stage: Stage, terms: StagePrediction, buffers: int) -> Iterator[Finding]:
    """Bytes of weights, gradients and optimizer state are those of the stage's parameters; systems may hold otherwise.

    With the optimizer's state stand the buffers, as large as the weights, that the schedule keeps.
    """
    if plan.system is not None:
        return
    chosen, memory, shards = precision(plan.options.precision), terms.memory, len(stage.replicas)
    versions = plan.schedule.versions[stage.index] if plan.schedule.versions else 1
    elements, state = stage.held_parameters, optimizer_state_bytes(plan.options.optimizer, chosen)
    more = buffers * elements * chosen.weight_bytes
    sums = [
        ("weights_bytes", memory.weights_bytes, chosen.weight_bytes * versions, 3, 0),
        ("gradients_bytes", memory.gradients_bytes, chosen.gradient_bytes, 2, 0),
        ("optimizer_bytes", memory.optimizer_bytes, state, 1, more),
    ]
    for what, said, each, zero, beside in sums:
        right = math.ceil(elements * each / (shards if stage.zero >= zero else 1) + beside)
        if not math.isclose(said, right, rel_tol=1e-9, abs_tol=1.0):
            message = (
                f"stage {stage.index} holds {format_bytes(right)} of {what.removesuffix('_bytes')}, the plan says "
            )
            yield Finding(Fault.MEMORY, f"{message}{said} bytes", _AGAIN, stage.index)


def _exchanged(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """A stage's replicas sum the gradients of its parameters."""
    listed = tuple(c for c in terms.collectives if c.of != "tied gradients")
    if plan.exchange is None and listed != stage_collectives(stage, precision(plan.options.precision)):
        message = f"stage {stage.index} does not list what its {len(stage.replicas)} replicas exchange"
        yield Finding(Fault.COLLECTIVE, message, _AGAIN, stage.index)

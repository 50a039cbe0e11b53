"""The program of one stage: which operators it runs on what, and its passes for one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from planner.errors import PlanError
from planner.plans import Plan
from planner.plans.records import Boundary
from planner.runtime.data import Batch, Loss
from planner.runtime.interpreter import Values, run
from planner.runtime.model_file import ModelFile, Step, require_rules
from planner.runtime.operators import Context
from planner.runtime.transfers import Unit


@dataclass(frozen=True)
class StageProgram:
    """What a stage of a plan does.

    Attributes:
        index: its number.
        steps: its operators, duplicated ones and shape arithmetic included, in order.
        received: tensors from other stages.
        sent: tensors to other stages.
        fed: model inputs.
        outputs: model outputs that it makes.
        parameters: trained weights, by the name that the file has for them: the parameter that they are tied to.
        constants: other initializers.
    """

    index: int
    steps: tuple[Step, ...]
    received: tuple[Boundary, ...]
    sent: tuple[Boundary, ...]
    fed: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, str]
    constants: tuple[str, ...]

    @property
    def owned(self) -> tuple[str, ...]:
        """Parameters, tied ones once, in order of first use."""
        return tuple(dict.fromkeys(self.parameters.values()))


def stage_program(plan: Plan, model: ModelFile, index: int) -> StageProgram:
    """The program of a stage: everything that its results need and that no other stage sends.

    Raises:
        PlanError: a result needs an operator of another stage that no boundary brings.
        ModelError: the file lacks a tensor that the plan names, or an operator has no torch rule.
    """
    stage = plan.stages[index]
    received = tuple(b for b in plan.boundaries if index in b.to_stages)
    sent = tuple(b for b in plan.boundaries if b.from_stage == index)
    wanted = dict.fromkeys((*(b.tensor for b in sent), *stage.outputs))
    given = (*(b.tensor for b in received), *model.inputs)
    steps = model.cone(wanted, given)
    require_rules(steps)
    own = set(plan.stage_nodes(index))
    foreign = {node: s.index for s in plan.stages if s.index != index for node in plan.stage_nodes(s.index)}
    for step in steps:
        if step.name in foreign and step.name not in own:
            raise PlanError(
                f"needs {step.name!r} of stage {foreign[step.name]}, which no boundary brings",
                where=f"stage {index}", hint="plan again: the boundaries are not those of the model",
            )  # fmt: skip
    read = dict.fromkeys(name for step in steps for name in step.inputs if name)
    weights = [name for name in read if name in model.weights or name in model.constants]
    trained = {p.name: p.tied_to or p.name for p in plan.stage_parameters(index) if p.trainable}
    aliases = {name: shared.parameter for shared in plan.shared_parameters for name in shared.names}
    parameters = {name: aliases.get(name, trained[name]) for name in weights if name in trained}
    return StageProgram(
        index, steps, received, sent, tuple(name for name in model.inputs if name in read or name in wanted),
        stage.outputs, parameters, tuple(name for name in weights if name not in parameters),
    )  # fmt: skip


@dataclass
class Pass:
    """A micro-batch, or a part of it, on its way through a stage: what its backward needs.

    Attributes:
        unit: the micro-batch and part.
        received: tensors from other stages, leaves of autograd.
        parameters: the weights that the forward read.
        results: tensors to other stages and the loss, with autograd's graph behind them; None where recomputation
            dropped them.
        loss: the loss of the micro-batch, where the stage makes outputs.
        gradients: of results, as they came from other stages.
        earlier: what attention reads of the parts before, by name and part, leaves of autograd.
        carried: what later parts read, by name.
        carried_gradients: of `carried`, summed over the later parts.
    """

    unit: Unit
    received: Values
    parameters: Values
    results: Values | None = None
    loss: torch.Tensor | None = None
    gradients: Values = field(default_factory=dict)
    earlier: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    carried: Values = field(default_factory=dict)
    carried_gradients: Values = field(default_factory=dict)


def run_stage(
    program: StageProgram,
    model: ModelFile,
    values: Values,
    batch: Batch,
    loss: Loss,
    context: Context,
) -> tuple[Values, torch.Tensor | None]:
    """Forward of a stage on one rank that does all of its work.

    Args:
        program: the stage.
        model: the file.
        values: received tensors, parameters by the name that the file reads them under, and constants.
        batch: the micro-batch.
        loss: on outputs.
        context: of the pass.

    Returns:
        What is sent to other stages, by name; the loss, where the stage makes outputs.
    """
    fed = {name: batch[name] for name in program.fed}
    wanted = dict.fromkeys((*(b.tensor for b in program.sent), *program.outputs))
    found = run(program.steps, {**values, **fed}, context, wanted=wanted, fitted=model.fitted)
    made = {name: found[name] for name in program.outputs}
    return {b.tensor: found[b.tensor] for b in program.sent}, loss(made, batch) if made else None

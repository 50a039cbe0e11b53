"""The program of one stage (its operators, inputs and outputs), and the state of a micro-batch between two passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from planner.errors import HardwareError, PlanError
from planner.hardware import load_stack, named_stack
from planner.plans import Plan, Requirement
from planner.plans.records import Boundary
from planner.runtime.data import Batch, Loss
from planner.runtime.fusing import Kernel, fused
from planner.runtime.host import steps_of
from planner.runtime.interpreter import Values, run
from planner.runtime.model_file import ModelFile, Step, require_rules
from planner.runtime.modules import Module, RepeatedOperators, find_modules
from planner.runtime.operators import Context
from planner.runtime.split_backward import WaitingProducts
from planner.runtime.transfers import Unit
from planner.space.layers import layer_starts


@dataclass(frozen=True)
class StageProgram:
    """Operators, inputs and outputs of a stage.

    Attributes:
        index: number of the stage.
        steps: operators in order, with the duplicated ones and shape arithmetic.
        kernels: the same as they run on a rank that does all of the work.
        received: tensors from other stages.
        sent: tensors to other stages.
        fed: model inputs that the stage reads.
        outputs: model outputs that the stage makes.
        parameters: for each trained weight, by its name in the file, the parameter that it is tied to (itself mostly).
        constants: other initializers.
        offloaded: operators, by first output, that keep their tensors in the host's memory.
        repeated: operators whose forward is repeated, by module or by layer.
        as_whole: whether it is repeated as a whole, from the stage's inputs.
    """

    index: int
    steps: tuple[Step, ...]
    received: tuple[Boundary, ...]
    sent: tuple[Boundary, ...]
    fed: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, str]
    constants: tuple[str, ...]
    offloaded: frozenset[str]
    repeated: RepeatedOperators
    kernels: tuple[Kernel, ...]
    as_whole: bool

    @property
    def owned(self) -> tuple[str, ...]:
        """Parameters, tied ones once, in order of first use."""
        return tuple(dict.fromkeys(self.parameters.values()))

    def weights_of_blocks(self, plan: Plan) -> tuple[tuple[str, ...], ...]:
        """Names of `owned` by the first block of the stage that reads them, in order of the blocks."""
        owned, blocks = dict.fromkeys(self.owned), list[tuple[str, ...]]()
        for block in plan.stage_blocks(self.index):
            names = [self.parameters.get(p.name, p.owner) for p in block.parameters]
            blocks.append(tuple(name for name in dict.fromkeys(names) if name in owned))
            owned = {name: None for name in owned if name not in blocks[-1]}
        return (*blocks, tuple(owned))


def stage_program(plan: Plan, model: ModelFile, index: int) -> StageProgram:
    """The program of a stage: all operators that its results need, up to the tensors that other stages send.

    Raises:
        PlanError: a result needs an operator of another stage that no boundary brings.
        ModelError: the file lacks a tensor that the plan names, or an operator has no torch rule.
    """
    stage = plan.stages[index]
    received = tuple(b for b in plan.boundaries if index in b.to_stages)
    sent = tuple(b for b in plan.boundaries if b.from_stage == index)
    wanted = dict.fromkeys((*(b.tensor for b in sent), *stage.outputs))
    steps = stage_steps(plan, model, index)
    require_rules(steps)
    nodes = set(plan.stage_nodes(index))
    for name, owner in foreign_operators(plan, index, steps).items():
        raise PlanError(
            f"needs {name!r} of stage {owner}, which no boundary brings",
            where=f"stage {index}", hint="plan again: the boundaries are not those of the model",
        )  # fmt: skip
    read = dict.fromkeys(name for step in steps for name in step.inputs if name)
    weights = [name for name in read if name in model.weights or name in model.constants]
    trained = {name: p.owner for p in plan.stage_parameters(index) if p.trainable for name in (p.owner, p.name)}
    aliases = {name: shared.parameter for shared in plan.shared_parameters for name in shared.names}
    parameters = {name: aliases.get(name, trained[name]) for name in weights if name in trained}
    kernels = fused(steps, wanted, listed=nodes, gates=runs_gates(plan))
    as_whole = stage.recompute and (plan.options.whole_stages or Requirement.EXPLICIT_RECOMPUTE in plan.requires)
    return StageProgram(
        index, steps, received, sent, tuple(name for name in model.inputs if name in read or name in wanted),
        stage.outputs, parameters, tuple(name for name in weights if name not in parameters),
        steps_of(stage.offloaded, nodes, steps), repeated_operators(plan, index, as_whole), kernels, as_whole,
    )  # fmt: skip


def stage_steps(plan: Plan, model: ModelFile, index: int) -> tuple[Step, ...]:
    """The operators that a stage's results need, up to the model's inputs and the tensors that other stages send."""
    wanted = (*(b.tensor for b in plan.boundaries if b.from_stage == index), *plan.stages[index].outputs)
    return model.cone(wanted, (*(b.tensor for b in plan.boundaries if index in b.to_stages), *model.inputs))


def foreign_operators(plan: Plan, index: int, steps: Iterable[Step]) -> dict[str, int]:
    """Of some operators those that are not a stage's own, by name, with the stage that runs them."""
    own = set(plan.stage_nodes(index))
    others = {node: s.index for s in plan.stages if s.index != index for node in plan.stage_nodes(s.index)}
    return {step.name: others[step.name] for step in steps if step.name in others and step.name not in own}


def repeated_operators(plan: Plan, index: int, as_whole: bool) -> RepeatedOperators:
    """What a stage repeats by layer, or by module (files of before minor version 5 do not list the operators)."""
    stage = plan.stages[index]
    blocks = {node: block for block in range(*stage.blocks) for node in plan.block_table[block].nodes}
    if not stage.recompute or as_whole:
        return RepeatedOperators(blocks, frozenset(stage.repeated), frozenset(stage.dropped))
    starts = layer_starts([block.name for block in plan.block_table]).tolist()
    kept = set(stage.kept_blocks)
    repeated = frozenset(node for node, block in blocks.items() if block not in kept)
    layers = {n: b if b in kept else max(stage.blocks[0], starts[b]) for n, b in blocks.items()}
    return RepeatedOperators(layers, repeated, inputs_on_host=bool(stage.offload))


def runs_gates(plan: Plan) -> bool:
    """Whether the software that the plan assumes runs an activation and the product with it as one kernel."""
    try:
        return "gated_activation" in load_stack(named_stack(plan.hardware.stack)).fused
    except HardwareError:
        return False


@dataclass
class PassState:
    """What the backward of a micro-batch, or of a part of it, needs from its forward in a stage.

    Attributes:
        unit: the micro-batch and part.
        received: tensors from other stages, as leaves of autograd.
        parameters: the weights that the forward read.
        results: tensors sent to other stages; None where recomputation dropped them.
        ends: where the backward begins: the places in the autograd graph of `results` that need a gradient.
        loss: the loss of the micro-batch, where the stage makes outputs.
        gradients: gradients of `results`, as other stages returned them.
        earlier: tensors of earlier parts that this part reads, by name and part, as leaves of autograd.
        carried: tensors of this part that later parts read, by name.
        carried_gradients: gradients of `carried`, summed over the later parts.
        on_host: whether `received` lies in the host's memory until the forward is repeated.
        waiting: products whose weights get their gradients later, where the backward is split.
    """

    unit: Unit
    received: Values
    parameters: Values
    results: Values | None = None
    ends: dict[str, torch.autograd.graph.GradientEdge] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    gradients: Values = field(default_factory=dict)
    earlier: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    carried: Values = field(default_factory=dict)
    carried_gradients: Values = field(default_factory=dict)
    on_host: bool = False
    waiting: WaitingProducts = field(default_factory=WaitingProducts)


class WholeStage:
    """Runs a stage on a rank that does all of its work.

    Attributes:
        modules: operators that run again in backward.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self.modules = find_modules(program.kernels, program.repeated)

    def run(self, values: Values, batch: Batch, loss: Loss, context: Context) -> tuple[Values, torch.Tensor | None]:
        """Run the forward of a micro-batch.

        Args:
            values: received tensors, parameters by their name in the file, and constants.
            batch: the micro-batch.
            loss: computes the loss from the model's outputs.
            context: types and seeds of the pass.

        Returns:
            The tensors to send to other stages, by name; the loss, where the stage makes outputs.
        """
        program, fed = self._program, {name: batch[name] for name in self._program.fed}
        wanted = dict.fromkeys((*(b.tensor for b in program.sent), *program.outputs))
        results = run(program.kernels, {**values, **fed}, context, wanted=wanted)
        outputs = {name: results[name] for name in program.outputs}
        return {b.tensor: results[b.tensor] for b in program.sent}, loss(outputs, batch) if outputs else None

    def again(self, module: Module[Kernel], values: Values, context: Context) -> Values:
        """Run a module again, from what it reads."""
        return run(module.units, values, context, wanted=module.wanted)

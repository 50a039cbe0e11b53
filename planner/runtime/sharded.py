"""A stage that a group of ranks shares: each rank runs the operators on its pieces of the tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from planner.operators import UNNORMALISED
from planner.plans import Plan
from planner.plans.shardings import OperatorSplit
from planner.runtime.data import NO_LABEL, Batch, Loss, SampleMean
from planner.runtime.fusing import Kernel, fused
from planner.runtime.interpreter import Values, run, run_step
from planner.runtime.layouts import (
    AxisLayout,
    Layout,
    RankMesh,
    change,
    gradient_as_read,
    gradient_as_written,
    gradient_at_rest,
    parse,
    piece_start,
    relaid,
    whole,
)
from planner.runtime.local_operators import CutOperator, Shapes, local_form
from planner.runtime.model_file import Step
from planner.runtime.modules import Module, find_modules
from planner.runtime.operators import Context
from planner.runtime.shared_loss import shared_cross_entropy
from planner.runtime.stages import StageProgram


@dataclass(frozen=True, slots=True)
class _RestingTensor:
    """A tensor between two operators: this rank's piece, and the layouts of the value and of its gradient."""

    piece: torch.Tensor
    value: Layout
    gradient: Layout


@dataclass(frozen=True, slots=True)
class _PlannedOperator:
    """One operator of the plan as the operators of the file that it stands for (a fused attention stands for six).

    Attributes:
        steps: the operators of the file; the one that the plan names is the last.
        kernels: the same as they run.
        reads: layouts in which operands are read, by input position; without positions where there are several steps.
        writes: layouts in which results are written, by output position.
        cuts: for each mesh axis, whether it divides the work of the operator.
        listed: whether the plan lists the operator; otherwise it is shape arithmetic that every rank does in full.
    """

    steps: tuple[Step, ...]
    kernels: tuple[Kernel, ...]
    reads: tuple[Layout, ...]
    writes: tuple[Layout, ...]
    cuts: tuple[bool, ...]
    listed: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what it reads."""
        made = {name for step in self.steps for name in step.outputs}
        return tuple(dict.fromkeys(n for step in self.steps for n in step.inputs if n and n not in made))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its results; "" where one is not used."""
        return self.steps[-1].outputs


_Units: TypeAlias = Sequence[tuple[_PlannedOperator, tuple[str, ...]]]


def _with_last_reads(units: Sequence[_PlannedOperator], wanted: Iterable[str]) -> _Units:
    """Each of some operators with the names that none after it reads."""
    kept, found = set(wanted), list[tuple[_PlannedOperator, tuple[str, ...]]]()
    for unit in reversed(units):
        names = {name for name in (*unit.inputs, *unit.outputs) if name}
        found.append((unit, tuple(names - kept)))
        kept |= names
    return found[::-1]


class ShardedStage:
    """Runs a stage on one rank of a group.

    Attributes:
        computed_whole: operators that every rank computes whole though the plan cuts them, by first output.
        modules: operators that run again in backward.
    """

    def __init__(self, plan: Plan, program: StageProgram, mesh: RankMesh, shapes: Shapes) -> None:
        self._plan, self._program, self._mesh = plan, program, mesh
        self._shapes = shapes
        self._whole = whole(mesh.axes)
        self._place = functools.cache(functools.partial(plan.layout_of, stage=program.index))
        self.layouts = functools.cache(self._layouts)
        self.computed_whole: set[str] = set()
        wanted = (*(b.tensor for b in program.sent), *program.outputs)
        self._units = _with_last_reads(tuple(self._divide()), wanted)
        self.modules = find_modules([unit for unit, _ in self._units], program.repeated)
        self._read_at: dict[str, tuple[Layout, Layout]] = {}

    def _layouts(self, tensor: str) -> tuple[Layout, Layout]:
        """Layouts of a tensor and of its gradient between operators; replicated where the plan gives none."""
        place = self._place(tensor)
        if place is None or (tensor in place.parameters and not place.dims):
            return self._whole, self._whole
        value = parse(place.value, self._mesh.axes)
        if any(part.kind == "S" and part.dim >= len(self._shapes.get(tensor, ())) for part in value):
            return self._whole, self._whole
        gradient = parse(place.gradient, self._mesh.axes) if place.gradient else gradient_as_written(value)
        return value, gradient_at_rest(value, gradient)

    def whole(self, name: str, piece: torch.Tensor, shape: Sequence[int], *, gradient: bool = False) -> torch.Tensor:
        """Gather a full tensor, or its gradient, from the pieces of the group's ranks. A collective call.

        Args:
            name: name of the tensor.
            piece: this rank's piece.
            shape: shape of the full tensor.
            gradient: whether the piece is one of the tensor's gradient.
        """
        return change(piece, self.layouts(name)[gradient], self._whole, shape, self._mesh)

    def piece(self, name: str, x: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        """This rank's piece of a whole tensor, or of its gradient."""
        return change(x, self._whole, self.layouts(name)[gradient], x.shape, self._mesh).clone()

    def complete(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Move a weight's gradient to the layout of the weight, adding up partial sums. A collective call."""
        value, layout = self.layouts(name)
        return change(gradient, layout, value, self._shapes[name], self._mesh)

    def _divide(self) -> Iterable[_PlannedOperator]:
        """The stage's operators in order, each with the operators of the file that it stands for."""
        live = {b.tensor for b in self._program.received}
        inner: dict[str, Step] = {}
        for step in self._program.steps:
            split = next((s for name in step.outputs if name and (s := self._split(name)) is not None), None)
            depends = any(name in live or name in inner for name in step.inputs)
            if split is None:
                wanted = {b.tensor for b in self._program.sent} | set(self._program.outputs)
                if depends and not wanted & set(step.outputs):
                    inner.update((name, step) for name in step.outputs if name)
                else:
                    yield self._planned((*self._cone(step, inner), step))
                continue
            live.update(name for name in step.outputs if name)
            cone = self._cone(step, inner)
            product = self._split(f"{step.name}{UNNORMALISED}")
            split = product or split
            reads = tuple(parse(text, self._mesh.axes) for text in split.reads)
            writes = tuple(parse(text, self._mesh.axes) for text in split.writes)
            if product is not None:  # the plan has a norm for the bias, which is added here
                reads = (*reads, tuple(AxisLayout("S", 0) if p == _BY_CHANNEL else AxisLayout("R") for p in writes[0]))
            yield self._planned((*cone, step), reads, writes, tuple(map(bool, split.splits)), listed=True)

    @staticmethod
    def _planned(
        steps: tuple[Step, ...], reads: tuple[Layout, ...] = (), writes: tuple[Layout, ...] = (),
        cuts: tuple[bool, ...] = (), *, listed: bool = False,
    ) -> _PlannedOperator:  # fmt: skip
        last = steps[-1]
        kernels = fused(steps, last.outputs, listed={last.name} if listed else ())
        return _PlannedOperator(steps, kernels, reads, writes, cuts, listed)

    def _split(self, name: str) -> OperatorSplit | None:
        found = self._plan.operator_split(name, self._program.index)
        return found if found is not None and found.operator == name else None

    @staticmethod
    def _cone(step: Step, inner: Mapping[str, Step]) -> tuple[Step, ...]:
        """Operators that the plan does not list and whose results an operator reads, in order."""
        found: dict[str, Step] = {}
        stack = [name for name in step.inputs if name in inner]
        while stack:
            before = inner[stack.pop()]
            if before.name not in found:
                found[before.name] = before
                stack += [name for name in before.inputs if name in inner]
        ranked = list(dict.fromkeys(s.name for s in inner.values()))
        return tuple(sorted(found.values(), key=lambda s: ranked.index(s.name)))

    def run(self, values: Values, batch: Batch, loss: Loss, context: Context) -> tuple[Values, torch.Tensor | None]:
        """Run the forward of the stage on this rank's pieces; arguments and results as of `WholeStage.run`."""
        tensors = {
            name: _RestingTensor(piece, *self.layouts(name)) for name, piece in values.items() if name not in batch
        }
        for name in self._program.fed:
            tensors[name] = _RestingTensor(batch[name], self._whole, self._whole)
        for name in self._program.constants:
            tensors[name] = _RestingTensor(values[name], self._whole, self._whole)
        self._run_units(self._units, tensors, context)
        sent = {}
        for boundary in self._program.sent:
            value, gradient = self.layouts(boundary.tensor)
            held = tensors[boundary.tensor]
            sent[boundary.tensor] = relaid(
                held.piece, (held.value, value), (gradient, held.gradient), self._shapes[boundary.tensor], self._mesh
            )
        return sent, self._total_loss(tensors, batch, loss) if self._program.outputs else None

    def _run_units(self, units: _Units, tensors: dict[str, _RestingTensor], context: Context) -> None:
        """Run operators in order; what none of them reads any longer is dropped."""

        def piece(name: str) -> torch.Tensor:
            self._read_at[name] = tensors[name].value, tensors[name].gradient
            return tensors[name].piece

        for unit, done in units:
            context.begin(unit, piece)
            context.before(unit.inputs)
            self._run_operator(unit, tensors, context)
            made = [tensors[name].piece if name in tensors else None for name in unit.outputs]
            context.after(unit.inputs, unit.outputs, made)
            context.end(unit, piece)
            for name in done:
                tensors.pop(name, None)

    def again(self, module: Module[Any], values: Values, context: Context) -> Values:
        """Run a module again on this rank's pieces of what it reads, with all that its ranks exchange."""
        tensors = {name: _RestingTensor(x, *self._read_at[name]) for name, x in values.items()}
        self._run_units(_with_last_reads(module.units, module.wanted), tensors, context)
        return {name: tensors[name].piece for name in module.wanted}

    def _total_loss(self, tensors: Mapping[str, _RestingTensor], batch: Batch, loss: Loss) -> torch.Tensor:
        """The loss of the micro-batch: of whole outputs, or of those samples and words that each rank has."""
        names = self._program.outputs
        layout, shape = tensors[names[0]].value, self._shapes[names[0]]
        cut = [a for a, part in enumerate(layout) if part.kind != "R"]
        words = [a for a in cut if isinstance(loss, SampleMean) and self._cuts_words(layout[a], a, shape)]
        shared = [a for a in cut if a not in words]
        count = math.prod(self._mesh.sizes[a] for a in shared)
        samples = shape[0] if shared else 0
        by_sample = all(layout[a] == _BY_SAMPLE for a in shared) and samples % count == 0
        apart = not shared or (by_sample and SampleMean.holds(loss, batch))
        if not cut or len(names) > 1 or len(words) > 1 or not apart:
            outputs = {name: self._read(tensors[name], self._whole, self._whole, name) for name in names}
            return loss(outputs, batch)
        outputs = {name: self._read(tensors[name], layout, layout, name) for name in names}
        dealt = tuple(part if a in shared else AxisLayout("R") for a, part in enumerate(layout))
        own_batch = {
            name: change(x, self._whole, dealt, x.shape, self._mesh) if shared and x.shape[:1] == (samples,) else x
            for name, x in batch.items()
        }
        rows = loss.rows(outputs, own_batch) if words and isinstance(loss, SampleMean) else None
        if rows is None:
            own = loss(outputs, own_batch)
        else:
            first = piece_start(shape, layout, self._mesh, len(shape) - 1)
            own = shared_cross_entropy(*rows, NO_LABEL, first, self._mesh.lines[words[0]])
        if not shared:
            return own
        total = own.detach().clone()
        for a in shared:
            self._mesh.lines[a].sum(total)
        return (own + (total - own.detach())) / count

    def _cuts_words(self, part: AxisLayout, axis: int, shape: Sequence[int]) -> bool:
        """Whether a mesh axis cuts the last dimension of logits such that every rank has some words."""
        size, ranks = shape[-1], self._mesh.sizes[axis]
        return part == AxisLayout("S", len(shape) - 1) and len(shape) > 1 and (ranks - 1) * -(-size // ranks) < size

    def _read(self, held: _RestingTensor, layout: Layout, gradient: Layout, name: str) -> torch.Tensor:
        """Move a tensor to the layout in which it is read; its gradient will come back in the layout `gradient`."""
        return relaid(held.piece, (held.value, layout), (gradient, held.gradient), self._shapes[name], self._mesh)

    def _run_operator(self, operator: _PlannedOperator, tensors: dict[str, _RestingTensor], context: Context) -> None:
        last = operator.steps[-1]
        if not operator.listed and self._turn(last, tensors):
            return
        if operator.listed and any(operator.cuts) and len(operator.steps) == 1:
            results = self._run_cut(operator, tensors, context)
        elif operator.listed and any(operator.cuts):
            results = self._run_fused(operator, tensors, context)
        else:
            results = None
        layouts: Sequence[Layout] = operator.writes
        if results is None:
            if any(operator.cuts):
                self.computed_whole.add(last.name)
            results = self._run_whole(operator, tensors, context)
            layouts = (self._whole,) * len(last.outputs)
        for k, (name, value) in enumerate(zip(last.outputs, results, strict=False)):
            if not name or value is None:
                continue
            value = context.fitted(name, value)
            written = layouts[k] if k < len(layouts) else self._whole
            self._settle(name, value, written, tensors)

    def _turn(self, step: Step, tensors: dict[str, _RestingTensor]) -> bool:
        """Transpose a rank's piece of a tensor that the plan does not list the transpose of, as of a weight."""
        held = tensors.get(step.inputs[0]) if step.op == "Transpose" else None
        if held is None or all(part.kind == "R" for part in (*held.value, *held.gradient)):
            return False
        order = list(step.attributes.get("perm") or reversed(range(held.piece.dim())))

        def turned(layout: Layout) -> Layout:
            return tuple(part._replace(dim=order.index(part.dim)) if part.kind == "S" else part for part in layout)

        tensors[step.name] = _RestingTensor(held.piece.permute(order), turned(held.value), turned(held.gradient))
        return True

    def _settle(self, name: str, value: torch.Tensor, written: Layout, tensors: dict[str, _RestingTensor]) -> None:
        """Move a result to its layout between operators, and store it."""
        place = self._place(name)
        at, gradient = self.layouts(name) if place is not None else (gradient_as_written(written),) * 2
        moved = relaid(value, (written, at), (gradient, gradient_as_written(written)), self._shapes[name], self._mesh)
        tensors[name] = _RestingTensor(moved, at, gradient)

    def _run_whole(
        self, operator: _PlannedOperator, tensors: dict[str, _RestingTensor], context: Context
    ) -> list[torch.Tensor]:
        """Compute an operator in full on every rank."""
        values = {name: self._read(tensors[name], self._whole, self._whole, name) for name in operator.inputs}
        return self._results(operator, values, context)

    def _results(self, operator: _PlannedOperator, values: Values, context: Context) -> list[torch.Tensor]:
        *inner, last = operator.kernels
        if inner:
            values = run(inner, values, context.within)
        return run_step(last, values, context) if isinstance(last, Step) else last.results(values, context)

    def _run_cut(
        self, operator: _PlannedOperator, tensors: dict[str, _RestingTensor], context: Context
    ) -> list[torch.Tensor] | None:
        """Compute one operator on this rank's pieces; None where that is not possible."""
        step = operator.steps[0]
        if len(operator.reads) > len(step.inputs):
            return None
        reads = (*operator.reads, *(self._whole for _ in step.inputs[len(operator.reads) :]))
        writes = (*operator.writes[: len(step.outputs)], *(self._whole for _ in step.outputs[len(operator.writes) :]))
        held = tuple(tensors[name].piece if name and self._has_values(tensors[name]) else None for name in step.inputs)
        cut = CutOperator(step, reads, writes, self._shapes, self._mesh, held)
        pieces = [
            self._read(tensors[name], layout, gradient_as_read(layout, operator.cuts), name) if name else None
            for name, layout in zip(step.inputs, reads, strict=True)
        ]
        formed = local_form(cut, pieces)
        if formed is None:
            return None
        local, operands = formed
        if local is step and len(set(step.inputs)) == len(operands):
            return run_step(step, dict(zip(step.inputs, operands, strict=True)), context)
        names = tuple(f"#{p}" if x is not None else "" for p, x in enumerate(operands))
        values = {f"#{p}": x for p, x in enumerate(operands) if x is not None}
        return run_step(Step(local.op, names, local.outputs, local.attributes, local.opset), values, context)

    def _has_values(self, held: _RestingTensor) -> bool:
        """Whether this rank holds all of an integer tensor, which may be a shape or axes."""
        return held.value == self._whole and not held.piece.is_floating_point()

    def _run_fused(
        self, operator: _PlannedOperator, tensors: dict[str, _RestingTensor], context: Context
    ) -> list[torch.Tensor] | None:
        """Compute a fused operator on this rank's pieces, all its steps cut alike; None where that is not possible."""
        layout = operator.writes[0]
        rank = len(self._shapes[operator.steps[-1].name])
        cut = sum(read == layout for read in operator.reads)
        if any(step.op not in _CUT_ALIKE for step in operator.steps) or cut != self._cuttable(operator, layout, rank):
            return None
        if any(read not in (layout, self._whole) for read in operator.reads):
            return None
        across = any(step.op in _ACROSS for step in operator.steps)
        if across and any(part.kind == "S" and part.dim >= rank - 2 for part in layout):
            return None
        values = {}
        for name in operator.inputs:
            size = self._shapes[name]
            fitting = tuple(
                part if part.kind != "S" or (len(size) == rank and size[part.dim] > 1) else whole(1)[0]
                for part in layout
            )
            values[name] = self._read(tensors[name], fitting, gradient_as_read(fitting, operator.cuts), name)
        return self._results(operator, values, context)

    def _cuttable(self, operator: _PlannedOperator, layout: Layout, rank: int) -> int:
        """How many operands of a group can be cut as its result is, of those that resting somewhere by the plan."""
        placed = [n for n in operator.inputs if self._place(n) is not None]
        shapes = [self._shapes[name] for name in placed]
        return sum(len(s) == rank and all(s[p.dim] > 1 for p in layout if p.kind == "S") for s in shapes)


_BY_SAMPLE, _BY_CHANNEL = AxisLayout("S", 0), AxisLayout("S", 1)
_CUT_ALIKE = {
    "Add", "Cast", "CastLike", "Div", "Exp", "Identity", "IsNaN", "MatMul", "Mul", "Softmax", "Sqrt", "Sub", "Tanh",
    "Transpose", "Where", "Neg", "Sigmoid", "Pow", "Reciprocal", "Erf", "Max", "Min",
}  # fmt: skip
"""Operators of the file that may be part of a fused one and that work on each head or sample by itself."""
_ACROSS = ("MatMul", "Softmax", "Transpose")
"""Those of them that need the last two dimensions whole."""

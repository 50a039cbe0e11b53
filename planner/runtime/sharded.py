"""A stage whose work the ranks of a group share: operators on pieces of tensors, as the plan's layouts say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.plans import Plan
from planner.plans.shardings import OperatorSplit
from planner.runtime.data import Batch, Loss
from planner.runtime.interpreter import Values, run, run_step
from planner.runtime.layouts import (
    Layout,
    Mesh,
    change,
    gradient_as_read,
    gradient_as_written,
    gradient_at_rest,
    local_shape,
    parse,
    relaid,
    whole,
)
from planner.runtime.local_operators import Cut, Shapes, local_form
from planner.runtime.model_file import ModelFile, Step
from planner.runtime.operators import Context, torch_type
from planner.runtime.stages import StageProgram


def whole_shapes(plan: Plan, model: ModelFile) -> Shapes:
    """Shapes of all tensors of a model at the plan's micro-batch, by a run without data."""
    context = Context()
    values: Values = {}
    for spec in plan.model.inputs:
        number = model.input_types[spec.name][0] if spec.name in model.input_types else 1
        values[spec.name] = torch.empty(spec.shape, dtype=torch_type(number, context.float_dtype), device="meta")
    values.update(model.constants)
    for name, proto in model.weights.items():
        if not model.trained(name):
            values[name] = model.weight(name, context.float_dtype)
        else:
            values[name] = torch.empty(tuple(proto.dims), device="meta")
    steps = model.cone([spec.name for spec in plan.model.outputs], [spec.name for spec in plan.model.inputs])
    found = run(steps, values, context, fitted=model.fitted)
    return {name: tuple(x.shape) for name, x in found.items() if isinstance(x, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class _Rest:
    """A tensor between operators: this rank's piece, the layouts of its value and of its gradient."""

    piece: torch.Tensor
    value: Layout
    gradient: Layout


@dataclass(frozen=True, slots=True)
class _Unit:
    """An operator of the plan with those of the file that it stands for (a fused attention is six of the file).

    Attributes:
        steps: the operators of the file, the listed one last.
        reads: by input position of the listed operator, the layout; of several operators by no position.
        writes: by output position.
        cuts: for each mesh axis whether it cuts the work.
        listed: whether the plan lists it; else it is plumbing that every rank does whole.
    """

    steps: tuple[Step, ...]
    reads: tuple[Layout, ...]
    writes: tuple[Layout, ...]
    cuts: tuple[bool, ...]
    listed: bool


class ShardedStage:
    """Runs a stage on one rank of a group.

    Attributes:
        computed_whole: operators that every rank computes whole though the plan cuts them, by first output.
    """

    def __init__(self, plan: Plan, model: ModelFile, program: StageProgram, mesh: Mesh, shapes: Shapes) -> None:
        self._plan, self._model, self._program, self._mesh = plan, model, program, mesh
        self._shapes = shapes
        self._whole = whole(mesh.axes)
        self.computed_whole: set[str] = set()
        self._units = tuple(self._divide())

    def layouts(self, tensor: str) -> tuple[Layout, Layout]:
        """Layouts in which a tensor and its gradient rest; whole where the plan says nothing."""
        place = self._plan.layout_of(tensor, self._program.index)
        if place is None or (tensor in place.parameters and not place.dims):
            return self._whole, self._whole
        value = parse(place.value, self._mesh.axes)
        if any(part.kind == "S" and part.dim >= len(self._shapes.get(tensor, ())) for part in value):
            return self._whole, self._whole
        gradient = parse(place.gradient, self._mesh.axes) if place.gradient else gradient_as_written(value)
        return value, gradient_at_rest(value, gradient)

    def whole(self, name: str, piece: torch.Tensor, shape: Sequence[int], *, gradient: bool = False) -> torch.Tensor:
        """A tensor, or its gradient, from the pieces of the ranks of the group; all of them call it together.

        Args:
            name: of the tensor.
            piece: what this rank has.
            shape: of the whole tensor.
            gradient: whether it lies as the tensor's gradient does.
        """
        return change(piece, self.layouts(name)[gradient], self._whole, shape, self._mesh)

    def piece(self, name: str, x: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        """This rank's piece of a whole tensor, or of its gradient."""
        return change(x, self._whole, self.layouts(name)[gradient], x.shape, self._mesh).clone()

    def complete(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """A weight's gradient as the weight lies, partial sums added up; all ranks of the group call it together."""
        value, layout = self.layouts(name)
        return change(gradient, layout, value, self._shapes[name], self._mesh)

    def piece_shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of this rank's piece of a resting tensor."""
        return local_shape(self._shapes[tensor], self.layouts(tensor)[0], self._mesh)

    def _divide(self) -> Iterable[_Unit]:
        """The stage's operators in units, in order."""
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
                    yield _Unit((*self._cone(step, inner), step), (), (), (), False)
                continue
            live.update(name for name in step.outputs if name)
            cone = self._cone(step, inner)
            reads = tuple(parse(text, self._mesh.axes) for text in split.reads)
            writes = tuple(parse(text, self._mesh.axes) for text in split.writes)
            yield _Unit((*cone, step), reads, writes, tuple(map(bool, split.splits)), True)

    def _split(self, name: str) -> OperatorSplit | None:
        found = self._plan.operator_split(name, self._program.index)
        return found if found is not None and found.operator == name else None

    @staticmethod
    def _cone(step: Step, inner: Mapping[str, Step]) -> tuple[Step, ...]:
        """Unlisted operators that an operator reads through, in order."""
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
        """Forward of the stage on this rank's pieces; arguments and results as of `run_stage`, tensors in pieces."""
        rest = {name: _Rest(piece, *self.layouts(name)) for name, piece in values.items() if name not in batch}
        for name in self._program.fed:
            rest[name] = _Rest(batch[name], self._whole, self._whole)
        for name in self._program.constants:
            rest[name] = _Rest(values[name], self._whole, self._whole)
        for unit in self._units:
            self._run_unit(unit, rest, context)
        made = {name: self._read(rest[name], self._whole, self._whole, name) for name in self._program.outputs}
        sent = {}
        for boundary in self._program.sent:
            value, gradient = self.layouts(boundary.tensor)
            held = rest[boundary.tensor]
            sent[boundary.tensor] = relaid(
                held.piece, (held.value, value), (gradient, held.gradient), self._shapes[boundary.tensor], self._mesh
            )
        return sent, loss(made, batch) if made else None

    def _read(self, held: _Rest, layout: Layout, gradient: Layout, name: str) -> torch.Tensor:
        """A resting tensor in the layout that a reader wants, whose gradient comes back in another."""
        return relaid(held.piece, (held.value, layout), (gradient, held.gradient), self._shapes[name], self._mesh)

    def _run_unit(self, unit: _Unit, rest: dict[str, _Rest], context: Context) -> None:
        last = unit.steps[-1]
        if unit.listed and any(unit.cuts) and len(unit.steps) == 1:
            results = self._run_cut(unit, rest, context)
        elif unit.listed and any(unit.cuts):
            results = self._run_fused(unit, rest, context)
        else:
            results = None
        layouts: Sequence[Layout] = unit.writes
        if results is None:
            if any(unit.cuts):
                self.computed_whole.add(last.name)
            results = self._run_whole(unit, rest, context)
            layouts = (self._whole,) * len(last.outputs)
        for k, (name, value) in enumerate(zip(last.outputs, results, strict=False)):
            if not name or value is None:
                continue
            value = self._model.fitted(name, value)
            written = layouts[k] if k < len(layouts) else self._whole
            self._settle(name, value, written, rest)

    def _settle(self, name: str, value: torch.Tensor, written: Layout, rest: dict[str, _Rest]) -> None:
        """Put a result where it rests."""
        place = self._plan.layout_of(name, self._program.index)
        at, gradient = self.layouts(name) if place is not None else (gradient_as_written(written),) * 2
        moved = relaid(value, (written, at), (gradient, gradient_as_written(written)), self._shapes[name], self._mesh)
        rest[name] = _Rest(moved, at, gradient)

    def _operands(self, unit: _Unit) -> list[str]:
        made = {name for step in unit.steps for name in step.outputs}
        return list(dict.fromkeys(n for step in unit.steps for n in step.inputs if n and n not in made))

    def _run_whole(self, unit: _Unit, rest: dict[str, _Rest], context: Context) -> list[torch.Tensor]:
        """Every rank computes the whole unit."""
        values = {name: self._read(rest[name], self._whole, self._whole, name) for name in self._operands(unit)}
        return self._results(unit, values, context)

    def _results(self, unit: _Unit, values: Values, context: Context) -> list[torch.Tensor]:
        inner = unit.steps[:-1]
        if inner:
            values = run(inner, values, context, fitted=self._model.fitted)
        return run_step(unit.steps[-1], values, context)

    def _run_cut(self, unit: _Unit, rest: dict[str, _Rest], context: Context) -> list[torch.Tensor] | None:
        """One operator on pieces; None where it has no form for them."""
        step = unit.steps[0]
        if len(unit.reads) > len(step.inputs):
            return None
        reads = tuple(unit.reads[p] if p < len(unit.reads) else self._whole for p in range(len(step.inputs)))
        held = tuple(
            rest[name].piece if name and rest[name].value == self._whole and not rest[name].piece.is_floating_point()
            else None for name in step.inputs
        )  # fmt: skip
        writes = tuple(unit.writes[k] if k < len(unit.writes) else self._whole for k in range(len(step.outputs)))
        cut = Cut(step, reads, writes, self._shapes, self._mesh, held)
        pieces = [
            self._read(rest[name], layout, gradient_as_read(layout, unit.cuts), name) if name else None
            for name, layout in zip(step.inputs, reads, strict=True)
        ]
        formed = local_form(cut, pieces)
        if formed is None:
            return None
        local, operands = formed
        names = tuple(f"#{p}" if x is not None else "" for p, x in enumerate(operands))
        values = {f"#{p}": x for p, x in enumerate(operands) if x is not None}
        return run_step(Step(local.op, names, local.outputs, local.attributes, local.opset), values, context)

    def _run_fused(self, unit: _Unit, rest: dict[str, _Rest], context: Context) -> list[torch.Tensor] | None:
        """Several operators of the file that the plan has as one, cut alike in all of them."""
        layout = unit.writes[0]
        rank = len(self._shapes[unit.steps[-1].name])
        cut = sum(read == layout for read in unit.reads)
        if any(step.op not in _CUT_ALIKE for step in unit.steps) or cut != self._cuttable(unit, layout, rank):
            return None
        if any(read not in (layout, self._whole) for read in unit.reads):
            return None
        if any(part.kind == "S" and part.dim >= rank - 2 for part in layout):
            return None
        values = {}
        for name in self._operands(unit):
            size = self._shapes[name]
            fitting = tuple(
                part if part.kind != "S" or (len(size) == rank and size[part.dim] > 1) else whole(1)[0]
                for part in layout
            )
            values[name] = self._read(rest[name], fitting, gradient_as_read(fitting, unit.cuts), name)
        return self._results(unit, values, context)

    def _cuttable(self, unit: _Unit, layout: Layout, rank: int) -> int:
        """How many operands of a unit can be cut as its result is, of those that rest somewhere by the plan."""
        placed = [n for n in self._operands(unit) if self._plan.layout_of(n, self._program.index) is not None]
        shapes = [self._shapes[name] for name in placed]
        return sum(len(s) == rank and all(s[p.dim] > 1 for p in layout if p.kind == "S") for s in shapes)


_CUT_ALIKE = {
    "Add", "Cast", "CastLike", "Div", "Exp", "Identity", "IsNaN", "MatMul", "Mul", "Softmax", "Sqrt", "Sub", "Tanh",
    "Transpose", "Where", "Neg", "Sigmoid", "Pow", "Reciprocal", "Erf", "Max", "Min",
}  # fmt: skip
"""Operators that a fused one is made of and that work on each head or sample by itself."""

"""Modules that run again in backward: what they keep is dropped in forward, and made again when it is first needed.

Autograd's hooks on kept tensors do both. An operator of a module leaves marks in place of what it keeps; so does any
operator of the module's block that keeps a result which the plan drops. The first mark that backward comes to runs the
operators of the module again, from what they read of others, and fills all its marks. Tensors that something else keeps
are there still, and are taken in place of those made again.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import networkx
import torch

from planner.errors import RunError
from planner.runtime.host import HostMemory, place_of
from planner.runtime.interpreter import Reads, Values
from planner.runtime.operators import Context
from planner.runtime.operators.kernels import leaf_of
from planner.runtime.split_backward import Box

Unit = TypeVar("Unit", bound=Reads)
Again: TypeAlias = Callable[["Module[Any]", Values, Context], Values]
"""Runs a module from what it reads of others; gives the results that are needed (`Module.wanted`)."""


@dataclass(frozen=True, slots=True)
class RepeatedOperators:
    """What a plan repeats of a stage by module, or by layer.

    Attributes:
        blocks: by listed operator, its block, or the first block of the layer that is repeated.
        operators: that are repeated, by first output.
        dropping: those of them whose results are dropped, too, whoever keeps them.
        inputs_on_host: whether what modules read of others waits in the host's memory.
    """

    blocks: Mapping[str, int] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    dropping: frozenset[str] = frozenset()
    inputs_on_host: bool = False


@dataclass(frozen=True, slots=True)
class Module(Generic[Unit]):
    """Operators of one block that read each other's results and run again together.

    Attributes:
        block: the block.
        last: the last operator of the block, by first output.
        units: the operators in order.
        inputs: names of what they read and do not make.
        dropped: results that are dropped, whoever keeps them.
        inputs_on_host: whether the inputs wait in the host's memory.
        wanted: results that are needed when it has run again.
    """

    block: int
    last: str
    units: tuple[Unit, ...]
    inputs: tuple[str, ...]
    dropped: tuple[str, ...]
    inputs_on_host: bool = False
    wanted: tuple[str, ...] = ()


def find_modules(units: Sequence[Unit], repeated: RepeatedOperators) -> tuple[Module[Unit], ...]:
    """The modules of a stage, each with the operators in between that the plan does not list. O(units).

    Args:
        units: what runs at once, in order.
        repeated: what the plan says of the stage.
    """
    block_of: dict[int, int] = {}
    readers: dict[str, list[int]] = {}
    for at in reversed(range(len(units))):
        unit, name = units[at], units[at].outputs[0]
        own = [reader for output in unit.outputs for reader in readers.get(output, ())]
        blocks = {block_of.get(reader) for reader in own}
        if name in repeated.operators:
            block_of[at] = repeated.blocks[name]
        elif name not in repeated.blocks and len(blocks) == 1 and None not in blocks:
            block_of[at] = next(block for block in blocks if block is not None)
        for read in unit.inputs:
            readers.setdefault(read, []).append(at)
    graph = networkx.Graph()
    graph.add_nodes_from(block_of)
    links = ((at, r) for at in block_of for name in units[at].outputs for r in readers.get(name, ()))
    graph.add_edges_from((at, r) for at, r in links if block_of.get(r) == block_of[at])
    members = sorted(map(sorted, networkx.connected_components(graph)))
    names = (unit.outputs[0] for unit in units)
    last = {repeated.blocks[name]: name for name in names if name in repeated.blocks}
    return tuple(_module([units[at] for at in own], block_of[own[0]], last, repeated) for own in members)


def _module(units: Sequence[Unit], block: int, last: Mapping[int, str], repeated: RepeatedOperators) -> Module[Unit]:
    made = {name for unit in units for name in unit.outputs}
    read = dict.fromkeys(name for unit in units for name in unit.inputs if name and name not in made)
    dropped = (name for unit in units if unit.outputs[0] in repeated.dropping for name in unit.outputs if name)
    return Module(block, last[block], tuple(units), tuple(read), tuple(dropped), repeated.inputs_on_host)


class _Rest(torch.autograd.Function):  # type: ignore[misc]
    """A tensor itself, such that operators do not take it for a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """The tensor."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Its gradient."""
        return gradient


def _back(host: HostMemory, kept: Any) -> torch.Tensor:  # noqa: ANN401
    if isinstance(kept, Box):
        kept = kept.open()
    return kept.tensor() if isinstance(kept, _Mark) else host.back(kept)


def _made(x: torch.Tensor) -> bool:
    """Whether a tensor has an autograd graph that made it; weights and views of them do not count."""
    return x.requires_grad and leaf_of(x) is None


def _held(x: torch.Tensor) -> torch.Tensor:
    """A tensor without the autograd graph that made it."""
    return _rest(x) if _made(x) else x


def _rest(x: torch.Tensor) -> torch.Tensor:
    held: torch.Tensor = _Rest.apply(x.detach().requires_grad_())
    return held


class _Mark:
    """Stands for a kept tensor until that is made again.

    Attributes:
        name: of the operator that keeps it, or of a result of the module.
        number: which of the tensors that the operator keeps; -1 for a result.
    """

    def __init__(self, repeat: _Repeat, name: str, number: int, x: torch.Tensor) -> None:
        self.name, self.number = name, number
        self._repeat, self._tensor = repeat, None
        self._place = x.storage_offset(), x.shape, x.stride()
        self._storage = weakref.ref(x.untyped_storage())

    def fill(self, x: torch.Tensor) -> None:
        """Take the tensor as it was made again, or as it is there still."""
        offset, shape, strides = self._place
        storage = self._storage()
        x = x.detach() if storage is None else x.detach().new_empty(0).set_(storage, offset, shape, strides)
        self._tensor = x.as_strided(shape, strides, offset) if self.number < 0 else x

    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RunError: the module did not keep it when it ran again.
        """
        if self._tensor is None:
            self._repeat.run()
        if self._tensor is None:
            raise RunError(
                "does not keep the same tensors when it runs again", where=f"operator {self.name}",
                hint="plan without --recompute of its module",
            )  # fmt: skip
        return self._tensor


class _Result(NamedTuple):
    """A result of a module: its storage while that is there, the operator by first output, and the result's name."""

    storage: weakref.ref[torch.UntypedStorage]
    unit: str
    name: str


class _Results:
    """What operators of modules made in one pass."""

    def __init__(self) -> None:
        self._made: dict[int, _Result] = {}

    def add(self, unit: Reads, value: Callable[[str], torch.Tensor]) -> None:
        """Note what an operator made, views of what others made apart."""
        for name in filter(None, unit.outputs):
            x = value(name)
            if self.of(x) is None:
                self._made[place_of(x)] = _Result(weakref.ref(x.untyped_storage()), unit.outputs[0], name)

    def of(self, x: torch.Tensor) -> _Result | None:
        """The result that a tensor lies in; None where no module made it."""
        made = self._made.get(place_of(x))
        return made if made is not None and made.storage() is x.untyped_storage() else None


class _Repeat:
    """A module in one pass.

    Attributes:
        finished: whether its block has run in forward, after which nothing more is dropped.
    """

    def __init__(self, module: Module[Any], again: Again, context: Context, host: HostMemory) -> None:
        self._module, self._again, self._context, self._host = module, again, context, host
        self.finished = False
        self._inputs: Values = {}
        self._waiting: dict[str, tuple[torch.Tensor, bool]] = {}
        self._places: set[int] = set()
        self._marks: list[weakref.ref[_Mark]] = []
        self._counts = Counter[str]()
        self._needed: set[str] = set()
        self._wanted: dict[str, None] = {}

    def read(self, unit: Reads, value: Callable[[str], torch.Tensor]) -> None:
        """Hold what an operator reads of others until the module runs again."""
        for name in set(unit.inputs).intersection(self._module.inputs).difference(self._inputs):
            self._inputs[name] = _held(value(name))
            self._places.add(place_of(self._inputs[name]))

    def keeps(self, x: torch.Tensor) -> bool:
        """Whether a tensor stays: a weight, or what the module reads of others, unless that goes to the host."""
        read = not self._module.inputs_on_host and place_of(x) in self._places
        return read or self._host.is_resident(x)

    def marked(self, unit: str, name: str, x: torch.Tensor) -> _Mark:
        """A mark for what one of its operators keeps and none makes."""
        self._counts[name] += 1
        return self.mark(unit, name, self._counts[name] - 1, x)

    def mark(self, unit: str, name: str, number: int, x: torch.Tensor) -> _Mark:
        """A mark in place of a tensor, which `unit` must run again for."""
        mark = _Mark(self, name, number, x)
        self._marks.append(weakref.ref(mark))
        self._needed.add(unit)
        if number < 0:
            self._wanted[name] = None
        return mark

    def finish(self) -> None:
        """Leave out operators that nothing needs again, and what only these read: all of the block has run."""
        units, needed = list[Reads](), self._needed
        read = set[str]()
        for unit in reversed(self._module.units):
            if unit.outputs[0] in needed or not read.isdisjoint(unit.outputs):
                units.append(unit)
                read.update(unit.inputs)
        wanted = tuple(self._wanted) or tuple(unit.outputs[0] for unit in units[:1])
        self.finished = True
        self._module = replace(self._module, units=tuple(units[::-1]), wanted=wanted)
        inputs, self._inputs = self._inputs, {}
        on_host = {name for name, x in inputs.items() if self._module.inputs_on_host and _made(x)}
        operators = {name: self._module.last if name in on_host else "" for name in read.intersection(inputs)}
        self._waiting = {name: self._host.away(operator, inputs[name]) for name, operator in operators.items()}

    def run(self) -> None:
        """Run the module again, and fill all marks that are still there."""
        waiting, self._waiting = self._waiting, {}
        inputs = {n: _rest(self._host.back(kept)) if kept[1] else kept[0] for n, kept in waiting.items()}
        self._places = set(map(place_of, inputs.values()))
        marks = [mark for each in self._marks if (mark := each()) is not None]
        kept_by, counts = {(mark.name, mark.number): mark for mark in marks}, Counter[str]()
        made = _Results()

        def fill(name: str, x: torch.Tensor) -> None:
            if made.of(x) is not None or self.keeps(x):
                return
            if (mark := kept_by.get((name, counts[name]))) is not None:
                mark.fill(x)
            counts[name] += 1

        def keeping(name: str) -> AbstractContextManager[object]:
            hooks: AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(
                functools.partial(fill, name), lambda nothing: nothing
            )
            return hooks

        with torch.enable_grad():
            results = self._again(self._module, inputs, replace(self._context, keeping=keeping, end=made.add))
        for mark in marks:
            if mark.number < 0:
                mark.fill(results[mark.name])


class KeptTensors:
    """What operators of a stage keep in one pass: dropped, moved to the host, or kept as it is.

    Args:
        modules: the modules.
        blocks: by listed operator, its block.
        again: runs one again from its inputs, and gives its wanted results.
        host: keeps what is not dropped.
        context: in which modules run again.
        boxed: puts what is kept into a box that may be emptied later; None where nothing is.
    """

    def __init__(
        self, modules: Sequence[Module[Any]], blocks: Mapping[str, int],
        again: Again, host: HostMemory, context: Context, boxed: Callable[[object], Box] | None = None,
    ) -> None:  # fmt: skip
        self._blocks, self._host, self._boxed = blocks, host, boxed
        self._dropped = {name: module.block for module in modules for name in module.dropped}
        self._repeat_of, self._ending = dict[str, _Repeat](), dict[str, list[_Repeat]]()
        for module in modules:
            repeat = _Repeat(module, again, context, host)
            self._repeat_of.update({unit.outputs[0]: repeat for unit in module.units})
            self._ending.setdefault(module.last, []).append(repeat)
        self._results = _Results()
        self._block, self._unit = -1, ""

    def begin(self, unit: Reads, value: Callable[[str], torch.Tensor]) -> None:
        """Note what runs next, and what it reads."""
        self._unit = unit.outputs[0]
        self._block = self._blocks.get(self._unit, self._block)
        if (repeat := self._repeat_of.get(self._unit)) is not None:
            repeat.read(unit, value)

    def end(self, unit: Reads, value: Callable[[str], torch.Tensor]) -> None:
        """Note what a module made."""
        if unit.outputs[0] in self._repeat_of:
            self._results.add(unit, value)
        for repeat in self._ending.get(unit.outputs[0], ()):
            repeat.finish()
        self._unit = ""

    def keeping(self, operator: str) -> AbstractContextManager[object]:
        """What autograd keeps within is dropped, or stays, or goes to the host."""
        hooks: AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self._put, operator), functools.partial(_back, self._host)
        )
        return hooks

    def _put(self, operator: str, x: torch.Tensor) -> object:
        kept = self._away(operator, x)
        return kept if self._boxed is None else self._boxed(kept)

    def _away(self, operator: str, x: torch.Tensor) -> object:
        made, inside = self._results.of(x), self._repeat_of.get(self._unit)
        if made is not None:
            repeat = self._repeat_of[made.unit]
            if inside is repeat or (self._dropped.get(made.name) == self._block and not repeat.finished):
                return repeat.mark(made.unit, made.name, -1, x)
        if inside is None:
            return self._host.away(operator, x)
        return self._host.away("", x) if inside.keeps(x) else inside.marked(self._unit, operator, x)

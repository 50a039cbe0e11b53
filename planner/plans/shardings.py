"""Tensor shardings as a plan file has them: meshes, where every tensor lies, how every operator is split.

A layout is one part for each mesh axis, outermost first: `R` whole on every rank, `S1` cut along dimension 1, `P` a
partial sum, `S2~3` each third of dimension 2 cut by itself. Ranks of a group are a row-major array of the axes' sizes,
the last axis innermost. Equal blocks share one entry, in the names of the first of them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.errors import PlanError
from planner.plans.model import MAX_BLOCKS, Block, filled
from planner.sharding import Axis, AxisRole


@dataclass(frozen=True, slots=True)
class OperatorSplit:
    """How the ranks of a group share an operator.

    Attributes:
        operator: name of its first output.
        splits: for each axis the iteration dimension that is cut (m, k or n of a product, d1 of element-wise work),
            "" where all ranks do the same work.
        reads: by input position, the layout in which the input is read; "" for an input that is read whole.
        writes: by output position, the layout in which the result comes out; "" for one that comes out whole.
        share: the part of the work that one rank does.
    """

    operator: str
    splits: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    share: float


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor or weight rests between the operators that make and use it.

    Attributes:
        tensor: its name.
        value: layout of its value; of a weight, of its working copy.
        gradient: layout in which its gradient is added up; left out where it has none.
        optimizer: layout of a weight's optimizer state; left out for all else.
        parameters: the parameters that a weight is computed from (a transposed copy); left out where it is one itself.
        dims: of a transposed parameter, for each dimension of the weight that of the parameter; left out otherwise.
    """

    tensor: str
    value: str
    gradient: str = ""
    optimizer: str = ""
    parameters: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupCollective:
    """A collective that the ranks of a group run: a micro-batch's, or once an update where `phase` is "step".

    Attributes:
        of: the tensor whose layout changes, or the operator that exchanges inside.
        reason: "layout", or why the operator exchanges: borders of a window (halo), statistics of a softmax or norm,
            keys and values going around, rows going to their experts and back.
        phase: when. A stage that recomputes repeats those of its forward.
        kind: which collective.
        axes: names of the mesh axes along which it runs, all groups along them at once.
        level: name of the outermost level of links that it crosses.
        payload_bytes: bytes a rank contributes to one of them (receives, for a gather).
        sent_bytes: bytes a rank sends in all of them.
        times: how many follow each other.
        seconds: what all of them take.
    """

    of: str
    reason: Literal["layout", "halo", "statistics", "ring", "experts"]
    phase: Literal["forward", "backward", "step"]
    kind: str
    axes: tuple[str, ...]
    level: str
    payload_bytes: float
    sent_bytes: float
    times: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Holding:
    """Experts, or rows or columns of a table, dealt to ranks: position k along the axes holds k * each and following.

    Attributes:
        what: experts of a mixture, rows or columns of an embedding table.
        weight: the tensor that has them.
        dim: its dimension that counts them.
        axes: names of the mesh axes that deal them, outermost first.
        count: how many there are.
        each: how many a rank holds at the most.
    """

    what: Literal["experts", "rows", "columns"]
    weight: str
    dim: int
    axes: tuple[str, ...]
    count: int
    each: int


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """What a sharded block costs: one rank, one micro-batch.

    Attributes:
        forward_s: forward pass, communication included.
        backward_s: backward pass without recomputation, communication included.
        step_s: communication inside the group once an update.
        communication_s: the communication in `forward_s + backward_s`.
        sent_bytes: bytes that a rank sends in these.
        parameters: trained weight elements that a rank holds.
        saved_bytes: kept for backward.
        checkpoint_bytes: the block's inputs, which recomputation keeps.
        workspace_bytes: transient.
    """

    forward_s: float
    backward_s: float
    step_s: float
    communication_s: float
    sent_bytes: float
    parameters: float
    saved_bytes: float
    checkpoint_bytes: float
    workspace_bytes: float


@dataclass(frozen=True, slots=True)
class BlockSeries:
    """Blocks `first`, `first + step`, ..., `count` of them, that are sharded alike.

    Operators and parameters of two such blocks correspond by their places in the plan's `blocks`. What is not listed
    there (other results of an operator, inputs from other blocks, weights derived from parameters) is named here; with
    `count` above 1 as a template, `{b+si}` standing for b + s * i in the i-th block (0, 1, ...).

    Attributes:
        first: number of the first block.
        step: distance to the next one.
        count: how many.
        names: names of what is not in `blocks`, in an order that is the same for all series of an entry.
    """

    first: int
    step: int
    count: int
    names: tuple[str, ...]

    def named(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(number, further names) of every block.

        Raises:
            PlanError: they are more than any model has.
        """
        if self.count > MAX_BLOCKS:
            raise PlanError(f"a series of {self.count} blocks", where="shardings", hint=f"at most {MAX_BLOCKS}")
        for i in range(self.count):
            fill = self.count > 1
            yield self.first + self.step * i, tuple(filled(name, i) if fill else name for name in self.names)


@dataclass(frozen=True, slots=True)
class ShardedBlock:
    """Blocks that are sharded alike, in the names of the first of them.

    Attributes:
        of: the blocks.
        figures: what each of them costs.
        operators: how each operator is split, duplicated ones that the block reads included.
        tensors: where each tensor and weight rests; model inputs and constants are fed as they are read.
        collectives: what the ranks of a group exchange.
        holdings: experts, rows and columns of tables dealt to the ranks; left out where there are none.
    """

    of: tuple[BlockSeries, ...]
    figures: BlockFigures
    operators: tuple[OperatorSplit, ...]
    tensors: tuple[TensorPlace, ...]
    collectives: tuple[GroupCollective, ...]
    holdings: tuple[Holding, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the entry, each once, in order of first use."""
        places = (p.tensor for p in self.tensors)
        return tuple(dict.fromkeys((*(o.operator for o in self.operators), *places)))

    @property
    def said(self) -> tuple[str, ...]:
        """Every name in the entry, also those of collectives, holdings and parameters."""
        parameters = (name for place in self.tensors for name in place.parameters)
        more = (*(c.of for c in self.collectives), *(h.weight for h in self.holdings))
        return tuple(dict.fromkeys((*self.names, *parameters, *more)))

    @property
    def first(self) -> tuple[int, tuple[str, ...]]:
        """(number, further names) of the block in whose names the entry is written.

        Raises:
            PlanError: the entry is about no block.
        """
        found = next((member for series in self.of for member in series.named()), None)
        if found is None:
            raise PlanError("an entry is about no block", where="shardings", hint="plan again")
        return found

    def members(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(number, further names) of every block that the entry is about, in the order of the file."""
        return tuple(member for series in self.of for member in series.named())

    def renamed(self, names: Mapping[str, str]) -> Iterator[tuple[str, OperatorSplit | TensorPlace | Holding]]:
        """Splits, places and dealt experts and rows with their names in a block, by the entry's names; weights also by
        the names of their parameters.
        """
        for o in self.operators:
            yield names[o.operator], dataclasses.replace(o, operator=names[o.operator])
        for place in self.tensors:
            yield from with_parameters(_place(place, names))
        for h in self.holdings:
            if h.what != "columns":
                yield names[h.weight], dataclasses.replace(h, weight=names[h.weight])


@dataclass(frozen=True, slots=True)
class Sharding:
    """A way to share every operator of a stage among the ranks of a group.

    Attributes:
        name: stages refer to it.
        axes: the mesh, outermost axis first; a group's ranks are its points in row-major order.
        boundaries: for each axis how the tensors between blocks lie: every rank has all of them, or a part of the
            sequence (second of three dimensions) or of the batch (first of two or more), if the axis divides it; or,
            on all axes, "free": each tensor lies where its entries say, which agree.
        padded: whether uneven cuts are allowed.
        blocks: what holds for each kind of block; together all blocks of the stages that have this sharding.
    """

    name: str
    axes: tuple[Axis, ...]
    boundaries: tuple[Literal["replicated", "sequence", "batch", "free"], ...]
    blocks: tuple[ShardedBlock, ...]
    padded: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of a group."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def roles(self) -> tuple[AxisRole, ...]:
        """Role of each axis."""
        return tuple(axis.role for axis in self.axes)

    @property
    def mesh(self) -> str:
        """The mesh in words, `data 2 x tensor 4`."""
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)


def correspondence(entry: ShardedBlock, table: Sequence[Block], block: int, names: Sequence[str]) -> Mapping[str, str]:
    """Names of a block by the names that its entry uses.

    Args:
        entry: the entry.
        table: all blocks of the plan.
        block: number of the block.
        names: its further names, as `ShardedBlock.members` gives them.

    Raises:
        PlanError: the two blocks do not have the same form, or nothing says what a name in the entry is in the block.
    """
    first, entry_names = entry.first
    pairs = [
        (table[first].nodes, table[block].nodes),
        (_parameters(table[first]), _parameters(table[block])),
        (entry_names, names),
    ]
    if any(len(a) != len(b) for a, b in pairs):
        raise PlanError(
            f"block {block} has not the form of block {first}, like which it is said to be sharded",
            where="shardings",
            hint="plan again instead of editing the file",
        )
    name_of = {a: b for before, after in pairs for a, b in zip(before, after, strict=True)}
    missing = next((name for name in entry.said if name not in name_of), None)
    if missing is not None:
        raise PlanError(
            f"nothing says what {missing!r} is called in block {block}",
            where="shardings",
            hint="list it among the names of the entry",
        )
    return name_of


def _parameters(block: Block) -> tuple[str, ...]:
    return tuple(p.name for p in block.parameters)


def dealt(holding: Holding, axes: Sequence[Axis], position: int) -> range:
    """Indices of the experts or rows that a rank holds.

    Args:
        holding: what is dealt.
        axes: the mesh.
        position: the rank's place in its group.
    """
    part, remaining = 0, position
    coordinates: dict[str, int] = {}
    for axis in reversed(axes):
        remaining, coordinates[axis.name] = divmod(remaining, axis.size)
    sizes = {axis.name: axis.size for axis in axes}
    for name in holding.axes:
        part = part * sizes[name] + coordinates[name]
    return range(min(part * holding.each, holding.count), min((part + 1) * holding.each, holding.count))


_CUT = re.compile(r"S([0-9]+)")


def _place(place: TensorPlace, names: Mapping[str, str]) -> TensorPlace:
    """A place under the model's names."""
    parameters = tuple(names[p] for p in place.parameters)
    return dataclasses.replace(place, tensor=names[place.tensor], parameters=parameters)


def with_parameters(place: TensorPlace) -> list[tuple[str, TensorPlace]]:
    """A weight's layouts by its own name and by those of its parameters, transposed if the plan gives `dims`."""
    places = [(place.tensor, place)]
    for parameter in place.parameters:
        if place.dims:
            value, gradient, optimizer = (
                transposed(text, place.dims) for text in (place.value, place.gradient, place.optimizer)
            )
            places.append((parameter, TensorPlace(parameter, value, gradient, optimizer)))
        else:
            places.append((parameter, place))
    return places


def transposed(text: str, dims: Sequence[int]) -> str:
    """A layout in another order of dimensions: `S1` of a matrix is `S0` of its transpose.

    Args:
        text: the layout.
        dims: for each dimension that it is about, the one in the other order.

    Raises:
        PlanError: it cuts a dimension that the matrix has not.
    """
    if any(int(cut[1]) >= len(dims) for cut in _CUT.finditer(text)):
        raise PlanError(f"{text} cuts a dimension that a tensor of {len(dims)} has not", where="shardings")
    return _CUT.sub(lambda match: f"S{dims[int(match[1])]}", text)

"""Every legal way to run an operator on a mesh, with the layouts, work and exchanges of forward and backward.

One axis: a dimension of the loop nests is cut, or every rank does the same work. An operand that the cut dimension
indexes is cut, any other is replicated; a result is cut or, under a cut of a reduced dimension, partial. Gradients
follow by transposition: a replicated operand gets partial gradients (the all-reduce of data parallelism and of
Megatron's first product), a partial result needs its replicated gradient, a cut stays a cut. Several axes: the nests
left after the first axis are split again, so heads beyond the key-value groups, or a batch over two axes, need no
special case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.hardware import Collective, moved_bytes
from planner.operators import DimKind, LoopNest, OpCall, OpSpec, Statistics, rule_of
from planner.sharding.choices import AxisChoice, LocalNest, Options, SplitKind, choices, has
from planner.sharding.layout import (
    PARTIAL,
    REPLICATED,
    Part,
    TensorLayout,
    layout_text,
    refusal,
    shard_shape,
)
from planner.sharding.mesh import Mesh

_STATISTIC_BYTES = 4.0
"""Statistics travel in fp32."""


class Reason(StrEnum):
    """Why ranks exchange data inside an operator."""

    HALO = "halo"
    STATISTICS = "statistics"
    RING = "ring"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class InnerExchange:
    """Data that ranks exchange inside an operator.

    Attributes:
        reason: why they are exchanged.
        collective: which collective.
        axis: index of the mesh axis.
        payload_bytes: bytes that a rank contributes to one collective.
        times: number of collectives, one after the other.
        backward: whether it belongs to the backward pass.
    """

    reason: Reason
    collective: Collective
    axis: int
    payload_bytes: float
    times: int = 1
    backward: bool = False

    @property
    def receivers(self) -> int:
        """Number of ranks that each rank sends its payload to: both neighbours for a halo."""
        return 2 if self.reason is Reason.HALO else 1


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator on a mesh.

    Attributes:
        splits: for each axis the dimension that is cut, `""` where every rank does the same work.
        reads: by input position, the layout that the input must have.
        writes: by output position, the layout that the output gets.
        read_gradients: by input position, the layout in which the gradient of the input comes out.
        share: fraction of the operator's work that one rank does, padding included.
        exchanges: data that ranks exchange inside the operator.
    """

    splits: tuple[str, ...]
    reads: tuple[tuple[int, TensorLayout], ...]
    writes: tuple[tuple[int, TensorLayout], ...]
    read_gradients: tuple[tuple[int, TensorLayout], ...]
    share: float
    exchanges: tuple[InnerExchange, ...] = ()

    @property
    def write_gradients(self) -> tuple[tuple[int, TensorLayout], ...]:
        """By output position, the layout in which the gradient of the output is needed: that of a partial one whole."""
        return tuple(
            (p, tuple(REPLICATED if part == PARTIAL else part for part in layout)) for p, layout in self.writes
        )

    def __str__(self) -> str:
        reads = ", ".join(layout_text(layout) for _, layout in self.reads)
        writes = ", ".join(layout_text(layout) for _, layout in self.writes)
        return f"[{' '.join(s or '-' for s in self.splits)}] {reads} -> {writes}"


def read_gradient(part: Part, kind: SplitKind) -> Part:
    """Part of an operand's gradient on an axis, from the part of the operand."""
    if part == PARTIAL:
        return REPLICATED
    return PARTIAL if part == REPLICATED and kind not in (SplitKind.REPEAT, SplitKind.PARTIAL) else part


def _halos(
    nests: Sequence[LoopNest],
    shapes: Mapping[int, tuple[int, ...]],
    name: str,
    before: Sequence[str],
    axis: int,
    item_bytes: float,
) -> Iterator[InnerExchange]:
    """Exchanges of borders with both neighbours (full duplex), and of the gradients of borders.

    Borders along several dimensions are exchanged one after the other, each with the corners of those before it.
    """
    for nest in nests:
        for access in nest.reads:
            shape = list(shapes[access.position])
            for k, width in access.halo:
                shape[k] += 2 * width if access.dims[k][0] in before else 0
            for k, width in access.halo:
                if access.dims[k][0] == name and width:
                    payload = item_bytes * width * math.prod(shape) / shape[k]
                    for backward in (False, True):
                        yield InnerExchange(Reason.HALO, Collective.SEND, axis, payload, 1, backward)


def _statistics(call: OpCall, nests: Sequence[LoopNest], name: str, axis: int) -> Iterator[InnerExchange]:
    """All-reduces of the statistics of each row that a rank holds."""
    nest = next(n for n in nests if has(n, name))
    rows = math.prod(d.size for d in nest.dims if d.kind not in (DimKind.COUPLED, DimKind.WHOLE))
    known = rule_of(call.op).statistics or Statistics(())
    for backward, numbers in ((False, known.forward), (True, known.backward)):
        for n in numbers:
            payload = rows * n * _STATISTIC_BYTES
            yield InnerExchange(Reason.STATISTICS, Collective.ALL_REDUCE, axis, payload, 1, backward)


def _ring(
    nest: LoopNest, shapes: Mapping[int, tuple[int, ...]], axis: int, ranks: int, item_bytes: float
) -> Iterator[InnerExchange]:
    """Sends of keys and values to the next rank, n - 1 times; in backward their gradients travel with them."""
    keys = [a.position for a in nest.reads if any("u" in names for names in a.dims)]
    payload = item_bytes * sum(math.prod(shapes[p]) for p in keys)
    yield InnerExchange(Reason.RING, Collective.SEND, axis, payload, ranks - 1)
    yield InnerExchange(Reason.RING, Collective.SEND, axis, 2 * payload, ranks - 1, True)


def _dispatch(call: OpCall, shape: tuple[int, ...], axis: int, item_bytes: float) -> Iterator[InnerExchange]:
    """All-to-alls of a copy of each row for each of its experts, there and back; the same for the gradients."""
    picked = call.attributes.get("k", 1)
    payload = item_bytes * math.prod(shape) * (picked if isinstance(picked, int) else 1)
    for backward in (False, True):
        yield InnerExchange(Reason.EXPERTS, Collective.ALL_TO_ALL, axis, payload, 2, backward)


@dataclass(frozen=True)
class _Request:
    """Arguments of one enumeration of strategies; equal for calls of equal signature."""

    call: OpCall
    spec: OpSpec
    sizes: tuple[int, ...]
    item_bytes: float
    options: Options

    @functools.cached_property
    def _identity(self) -> tuple[object, ...]:
        return self.call.signature(), self.spec.nests, self.sizes, self.item_bytes, self.options

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Request) and self._identity == other._identity


def _exchanges(
    request: _Request, axis_choices: Sequence[AxisChoice], reads: Mapping[int, TensorLayout]
) -> tuple[InnerExchange, ...]:
    """Exchanges inside the operator along all axes, at the sizes that are left when all axes are cut."""
    nests = axis_choices[-1].left.nests if axis_choices else ()
    shapes = {
        p: shard_shape(tensor.shape, layout, request.sizes)
        for p, layout in reads.items()
        if (tensor := request.call.inputs[p]) is not None
    }
    exchanges: list[InnerExchange] = []
    for axis, choice in enumerate(axis_choices):
        if choice.kind is SplitKind.CUT:
            before = [c.name for c in axis_choices[:axis]]
            exchanges += _halos(nests, shapes, choice.name, before, axis, request.item_bytes)
        elif choice.kind is SplitKind.STATISTICS:
            exchanges += _statistics(request.call, nests, choice.name, axis)
        elif choice.kind is SplitKind.RING:
            exchanges += _ring(nests[0], shapes, axis, request.sizes[axis], request.item_bytes)
        elif choice.kind is SplitKind.EXPERTS:
            exchanges += _dispatch(request.call, shapes[0], axis, request.item_bytes)
    return tuple(exchanges)


def _assemble(request: _Request, axis_choices: Sequence[AxisChoice]) -> Strategy:
    nests = request.spec.nests
    reads = sorted({a.position for nest in nests for a in nest.reads})
    writes = sorted({a.position for nest in nests for a in nest.writes})
    read_parts = {p: tuple(c.reads.get(p, REPLICATED) for c in axis_choices) for p in reads}
    write_parts = {p: tuple(c.writes.get(p, REPLICATED) for c in axis_choices) for p in writes}
    kinds = [c.kind for c in axis_choices]
    return Strategy(
        tuple(c.name for c in axis_choices),
        tuple(read_parts.items()),
        tuple(write_parts.items()),
        tuple((p, tuple(map(read_gradient, parts, kinds))) for p, parts in read_parts.items()),
        axis_choices[-1].left.share if axis_choices else 1.0,
        _exchanges(request, axis_choices, read_parts),
    )


def _legal(request: _Request, strategy: Strategy) -> bool:
    outputs = request.call.outputs
    pairs = [(request.call.inputs[p], layout) for p, layout in strategy.reads]
    pairs += [(outputs[p] if p < len(outputs) else None, layout) for p, layout in strategy.writes]
    padded = request.options.padded
    return all(t is None or not refusal(t.shape, layout, request.sizes, padded=padded) for t, layout in pairs)


def strategies(
    call: OpCall, spec: OpSpec, mesh: Mesh, item_bytes: float, options: Options | None = None
) -> tuple[Strategy, ...]:
    """All legal ways to run an operator on a mesh, repeated work first; of equal layouts the one with the least work.

    An operator without nests (a fallback) runs in full on every rank.

    Args:
        call: the operator and its tensors.
        spec: description of the operator.
        mesh: the mesh.
        item_bytes: bytes of an element of its operands, for the exchanges inside.
        options: which splits count; by default all even ones.

    Complexity: (iteration dimensions + 1) ** axes.
    """
    return _strategies(_Request(call, spec, mesh.sizes, item_bytes, options or Options()))


@functools.lru_cache(maxsize=8192)
def _strategies(request: _Request) -> tuple[Strategy, ...]:
    prefixes: list[tuple[LocalNest, tuple[AxisChoice, ...]]] = [(LocalNest(request.spec.nests), ())]
    for axis, ranks in enumerate(request.sizes):
        role = request.options.role(axis)
        ways = {
            local: choices(request.call, request.spec, local, ranks, request.options, role)
            for local in dict.fromkeys(local for local, _ in prefixes)
        }
        prefixes = [(choice.left, (*done, choice)) for local, done in prefixes for choice in ways[local]]
    strategies_by_layout: dict[tuple[object, ...], Strategy] = {}
    for _, axis_choices in prefixes:
        strategy = _assemble(request, axis_choices)
        if not _legal(request, strategy):
            continue
        key = (strategy.reads, strategy.writes, strategy.read_gradients, strategy.exchanges)
        if key not in strategies_by_layout or strategy.share < strategies_by_layout[key].share:
            strategies_by_layout[key] = strategy
    return tuple(strategies_by_layout.values())


def exchange_s(mesh: Mesh, strategy: Strategy, *, backward: bool, beside_s: float = 0.0) -> float:
    """Seconds of the exchanges inside an operator in one pass that its own work does not hide.

    Args:
        mesh: the mesh.
        strategy: how the operator is run.
        backward: which pass.
        beside_s: seconds of the operator's work in that pass. A ring of n ranks works on one piece while it receives
            the next, so each of its n - 1 sends hides behind 1/n of the work (Liu et al. 2023). Other exchanges are not
            hidden.
    """
    total = 0.0
    for e in strategy.exchanges:
        if e.backward is backward:
            seconds = float(mesh.seconds(e.collective, (e.axis,), e.payload_bytes))
            hidden_s = beside_s / (e.times + 1) if e.reason is Reason.RING else 0.0
            total += e.times * max(0.0, seconds - hidden_s)
    return total


def exchange_bytes(mesh: Mesh, strategy: Strategy, *, backward: bool) -> float:
    """Bytes that a rank sends in the exchanges inside an operator in one pass; a halo counts both neighbours."""
    total = 0.0
    for e in strategy.exchanges:
        if e.backward is backward:
            sent_bytes = e.receivers * e.times * e.payload_bytes
            total += moved_bytes(e.collective, sent_bytes, mesh.axes[e.axis].size)
    return total

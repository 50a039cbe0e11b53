"""Mesh-TensorFlow: one global map from named dimensions to mesh axes, for all tensors and operations at once.

Rules: a dimension goes to at most one axis; no two dimensions of one tensor or operation go to the same axis; the axis
divides every size of the dimension. Two objectives: the published one, the peak bytes of a schedule
(`planner.sharding.named_layout`), and time, by elimination over the names. Shazeer et al., NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import TensorKind
from planner.operators import OpCall
from planner.sharding.elimination import Factor, minimise
from planner.sharding.forbidden import allowed
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout
from planner.sharding.named_dims import NamedDims, named_dims
from planner.sharding.named_layout import NamedOperation, NamedTensor, Program, best_layout
from planner.sharding.priced import least_within
from planner.sharding.problem import Choice, Facts, Setting
from planner.sharding.reshard import reshard_table
from planner.sharding.resting import resting_as
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.strategies import Strategy, exchange_s, strategies
from planner.units import format_bytes


def program_of(setting: Setting) -> Program:
    """The forward program of a setting's nodes under found names; dimensions an operator cannot cut are said so."""
    graph, timed = setting.graph, _Timed(setting)
    names = timed.names
    tensors: dict[str, NamedTensor] = {}
    operations = []
    for i in setting.members:
        node = graph.nodes[i]
        for name in (*node.inputs, *node.outputs):
            if name and name in graph.tensors and name not in tensors:
                t = graph.tensors[name]
                if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT):
                    continue
                sized = [(d, n) for d, n in zip(names.tensor(name, len(t.shape)), t.shape, strict=True) if d]
                tensors[name] = NamedTensor(
                    name, tuple(d for d, _ in sized), tuple(n for _, n in sized), setting.bytes_of(t)
                )
        reads = tuple(n for n in node.inputs if n in tensors)
        writes = tuple(n for n in node.outputs if n in tensors)
        used = {d for n in (*reads, *writes) for d in tensors[n].dims}
        found = timed.strategies(i)
        cut = {names.nest[i][d] for s in found for d in s.splits if d in names.nest[i]}
        led = Counter(names.nest[i].values())
        twice = {d for n in (*reads, *writes) for d, count in Counter(tensors[n].dims).items() if count > 1}
        twice |= {d for d, count in led.items() if count > 1}
        operations.append(NamedOperation(reads, writes, tuple(sorted(used - cut | twice))))
    return Program(tuple(tensors.values()), tuple(operations))


class _Timed:
    """Costs of a setting's operators under maps of names to axes."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.graph, self.mesh = setting, setting.graph, setting.mesh
        facts = Facts.of(setting)
        self.specs, self.carrying, self.saved, self.forbids = facts.specs, facts.carrying, facts.saved, facts.forbidden
        self.names: NamedDims = named_dims(setting.graph, setting.members, self.specs, setting.tied)
        self.domains = {
            name: [-1, *(a for a, axis in enumerate(self.mesh.axes) if axis.size > 1 and size % axis.size == 0)]
            for name, size in self.names.sizes.items()
        }
        self.order = sorted(self.domains, key=lambda n: int(n[1:]))
        self.index = {name: v for v, name in enumerate(self.order)}
        self._tables: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}
        self._shares: dict[Hashable, tuple[float, ...]] = {}

    def layout(self, tensor: str, where: Mapping[str, int]) -> TensorLayout | None:
        """A tensor's layout under a map; None when two of its dimensions want one axis."""
        parts = [REPLICATED] * len(self.mesh.axes)
        for k, name in enumerate(self.names.tensor(tensor, len(self.graph.tensors[tensor].shape))):
            axis = where.get(name, -1)
            if axis >= 0:
                if parts[axis] != REPLICATED:
                    return None
                parts[axis] = Part(k, self.names.blocks.get((tensor, k), 1))
        return tuple(parts)

    def strategy(self, i: int, where: Mapping[str, int]) -> Strategy | None:
        """The operator's strategy under a map; None when there is none."""
        wanted = [""] * len(self.mesh.axes)
        for dim, name in self.names.nest[i].items():
            axis = where.get(name, -1)
            if axis >= 0:
                if wanted[axis]:
                    return None
                wanted[axis] = dim
        return next((s for s in self.strategies(i) if s.splits == tuple(wanted)), None)

    def _as_fused(self, i: int, chosen: Strategy) -> bool:
        """Whether a strategy cuts fused operands and results by their pieces, and all others plainly."""
        node = self.graph.nodes[i]
        sides = [(node.inputs[p], layout) for p, layout in chosen.reads]
        sides += [(node.outputs[p], layout) for p, layout in chosen.writes]
        return all(
            part.blocks == self.names.blocks.get((name, part.dim), 1)
            for name, layout in sides
            for part in layout
            if part.cuts
        )

    def _blocks(self, i: int) -> tuple[int, ...]:
        """Numbers of pieces in the fused tensors of an operator."""
        node = self.graph.nodes[i]
        names = {name for name in (*node.inputs, *node.outputs) if name}
        return tuple(sorted({count for (name, _), count in self._fused(names)}))

    def _fused(self, names: set[str]) -> list[tuple[tuple[str, int], int]]:
        spots = [(n, k) for n in sorted(names) for k in range(len(self.graph.tensors[n].shape))]
        return [(spot, self.names.blocks[spot]) for spot in spots if spot in self.names.blocks]

    def strategies(self, i: int) -> list[Strategy]:
        """The ways to run an operator that names can mean."""
        call, blocks = OpCall.of(self.graph, self.graph.nodes[i]), self._blocks(i)
        options = replace(self.setting.options, interleaved=bool(blocks), blocks=blocks)
        found = strategies(call, self.specs[i], self.mesh, self.setting.item_bytes, options)
        return [s for s in allowed(found, call, self.forbids[i]) if self._as_fused(i, s)]

    def seconds(self, i: int, where: Mapping[str, int]) -> float:
        """Seconds of one operator: work, exchanges, and sums of partial results and gradients."""
        node, setting = self.graph.nodes[i], self.setting
        chosen = self.strategy(i, where)
        if chosen is None or any(self.layout(n, where) is None for n in (*node.inputs, *node.outputs) if n):
            return math.inf
        total = 0.0
        trains = any(n in self.carrying for n in node.inputs)
        for backward in (False, True)[: 1 + trains]:
            total += exchange_s(self.mesh, chosen, backward=backward)
        for p, layout in chosen.writes:
            total += self.summed(node.outputs[p], layout)
        for p, layout in chosen.read_gradients:
            if node.inputs[p] in self.carrying:
                total += self.summed(node.inputs[p], layout)
        return sum(setting.node_s(i, chosen.share)) + total * node.repeat

    def summed(self, name: str, layout: TensorLayout) -> float:
        """Seconds to sum a tensor's partial values."""
        if PARTIAL not in layout:
            return 0.0
        tensor = self.graph.tensors[name]
        tags = tuple(sorted({part for part in layout if part.blocks > 1}))
        table = reshard_table(self.mesh, tensor.shape, self.setting.bytes_of(tensor), interleaved=tags)
        summed = tuple(REPLICATED if part == PARTIAL else part for part in layout)
        return float(table.seconds[table.position(layout), table.position(summed)])

    def factors(self, i: int) -> tuple[Factor, Factor]:
        """Seconds of one operator over the axes of its names, and bytes that it keeps for backward besides tensors."""
        names = sorted(set(self.names.nest[i].values()), key=self.index.__getitem__)
        extra = sum(s.byte_count for s in self.saved[i] if s.storage not in self.graph.tensors)
        key = self._alike(i, names, extra)
        if key not in self._tables:
            self._tables[key] = self._filled(i, names, extra)
        order = tuple(self.index[n] for n in names)
        seconds, held = self._tables[key]
        return Factor(order, seconds), Factor(order, held)

    def _alike(self, i: int, names: Sequence[str], extra: float) -> Hashable:
        """Equal for operators with equal tables: their call, how names lead their dimensions, and their prices."""
        node, place = self.graph.nodes[i], {n: k for k, n in enumerate(names)}
        call = OpCall.of(self.graph, node)
        like = (call.signature(), id(self.specs[i]), self.forbids[i])
        if like not in self._shares:
            self._shares[like] = tuple(sorted({s.share for s in self.strategies(i)}))
        operands = [n for n in (*node.inputs, *node.outputs) if n]
        return (
            like,
            tuple(sorted((dim, place[n]) for dim, n in self.names.nest[i].items())),
            tuple(tuple(self.domains[n]) for n in names),
            tuple(
                (
                    name in self.carrying,
                    *(place.get(d, -1) for d in self.names.tensor(name, len(tensor.shape))),
                    *((k, count) for (_, k), count in self._fused({name})),
                )
                for name in operands
                for tensor in (self.graph.tensors[name],)
            ),
            tuple(self.setting.node_s(i, share) for share in self._shares[like]),
            extra,
            node.repeat,
        )

    def _filled(self, i: int, names: Sequence[str], extra: float) -> tuple[np.ndarray, np.ndarray]:
        seconds = np.empty([len(self.domains[n]) for n in names])
        held = np.zeros_like(seconds)
        for at in np.ndindex(*seconds.shape):
            where = {n: self.domains[n][c] for n, c in zip(names, at, strict=True)}
            seconds[at] = self.seconds(i, where)
            if extra and (chosen := self.strategy(i, where)) is not None:
                held[at] = chosen.share * extra
        return seconds, held

    def held(self) -> list[Factor]:
        """Bytes of weights with their states and of kept tensors over the axes of their names."""
        whole: dict[str, float] = {}
        for i in self.setting.members:
            for s in self.saved[i]:
                if s.storage in self.graph.tensors:
                    whole[s.storage] = max(whole.get(s.storage, 0.0), s.byte_count)
            for name in self.graph.nodes[i].inputs:
                if name and self.graph.tensors[name].kind is TensorKind.PARAMETER:
                    whole[name] = self._state_bytes(name)
        return [self._cut(name, size) for name, size in whole.items()]

    def _state_bytes(self, name: str) -> float:
        tensor, state = self.graph.tensors[name], self.setting.state
        each = state.weight if tensor.dtype.is_float else tensor.dtype.bits / 8
        return tensor.elements * (each + (state.gradient + state.optimizer) * (name in self.carrying))

    def _cut(self, name: str, size: float) -> Factor:
        """Bytes of a rank's part of a tensor, from those of the whole."""
        dims = self.names.tensor(name, len(self.graph.tensors[name].shape))
        led = sorted({self.index[d] for d in dims if d})
        table = np.asarray(size)
        for v in led:
            cut = [self.mesh.axes[a].size if a >= 0 else 1 for a in self.domains[self.order[v]]]
            table = table[..., None] / np.asarray(cut, dtype=float)
        return Factor(tuple(led), table)


def _summed(factors: Iterable[Factor]) -> list[Factor]:
    """One factor for each set of variables."""
    found: dict[tuple[int, ...], np.ndarray] = {}
    for f in factors:
        found[f.variables] = found[f.variables] + f.table if f.variables in found else f.table
    return [Factor(variables, table) for variables, table in found.items()]


def _decision(timed: _Timed, where: Mapping[str, int]) -> dict[str, Choice]:
    """The plan that a map means: every tensor rests as its names say."""
    decision: dict[str, Choice] = {}
    for i in timed.setting.members:
        node = timed.graph.nodes[i]
        chosen = timed.strategy(i, where)
        if chosen is None:
            raise InfeasibleError(f"{node.key} cannot be split as the layout says", hint="leave a dimension whole")
        decision[f"op:{node.key}"] = chosen
        for name in (*node.inputs, *node.outputs):
            tensor = timed.graph.tensors.get(name) if name else None
            if tensor is None or tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT) or name in timed.setting.tied:
                continue
            layout = timed.layout(name, where)
            if layout is None:
                raise InfeasibleError(f"two dimensions of {name} share a mesh axis", hint="leave a dimension whole")
            decision[name] = resting_as(tensor, layout, gradient=name in timed.carrying)
    return decision


@SEARCHES.entry("mesh-tensorflow")
def mesh_tensorflow(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The fastest global layout; within memory, the fastest that some price on memory finds.

    Raises:
        InfeasibleError: no map is legal, or none was found that fits the memory.
    """
    timed = _Timed(setting)
    sizes = [len(timed.domains[n]) for n in timed.order]
    made = [timed.factors(i) for i in setting.members if timed.names.nest[i]]
    times = _summed(time for time, _ in made)
    if memory_bytes is None:
        _, chosen = minimise(sizes, times)
    else:
        within = least_within(sizes, times, _summed([*timed.held(), *(kept for _, kept in made)]), memory_bytes)
        chosen = within.chosen
        if not chosen:
            raise InfeasibleError(
                f"no layout of named dimensions was found that fits {format_bytes(memory_bytes)} a device",
                hint="use a larger mesh, more recomputation or a smaller micro-batch",
            )
    where = {n: timed.domains[n][c] for n, c in zip(timed.order, chosen, strict=True)}
    method, states = "elimination over names", math.prod(sizes)
    decision = _decision(timed, where)
    return ShardingAnswer.of(setting, decision, memory_bytes, method, states=states, fixed="the fastest layout")


@SEARCHES.entry("mesh-tensorflow-memory")
def mesh_tensorflow_memory(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The global layout of least memory, as published.

    Raises:
        InfeasibleError: an operator cannot follow the layout, or it does not fit the memory.
    """
    timed = _Timed(setting)
    axes = {axis.name: axis.size for axis in setting.mesh.axes if axis.size > 1}
    answer = best_layout(program_of(setting), axes)
    place = {axis.name: a for a, axis in enumerate(setting.mesh.axes)}
    decision = _decision(timed, {d: place[m] for d, m in answer.assignment.items()})
    states = len(timed.order)
    return ShardingAnswer.of(setting, decision, memory_bytes, "CP-SAT", states=states, fixed="the leanest layout")

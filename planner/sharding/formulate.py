"""Formulates a setting as a sharding problem: choices and cost tables.

Operators, tensors and weights that are equal share their tables.

Interleaved cuts are considered for the tensors through which the parts of a fused projection flow. Operators that split
or join a dimension (`Split`, `Concat`, an attention with its projection) need interleaved cuts of their fused tensor.
The need travels along dimensions that operators carry from operand to result unchanged, up to the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import Graph, Node, Tensor, TensorKind, group_leaders
from planner.operators import DimKind, LoopNest, OpCall, OpSpec, call_classes
from planner.sharding.choices import MOST_BLOCKS, expert_dims
from planner.sharding.elimination import Factor
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, indexed
from planner.sharding.limits import allowed, begins_layer, layer_strategies
from planner.sharding.mesh import AxisRole
from planner.sharding.problem import (
    Choice,
    CostTables,
    GraphFacts,
    Load,
    Setting,
    ShardingProblem,
    rest_of,
    weight_gathers,
)
from planner.sharding.reshard import ReshardTable, reshard_table
from planner.sharding.resting import TensorChoice, WeightChoice, summed_along, tensor_choices, weight_choices
from planner.sharding.strategies import Strategy, exchange_s, strategies
from planner.sums import float_sum

MOST_CUTS = 2
"""Interleaved cuts that are kept for one tensor."""

InterleavedCuts = dict[str, set[Part]]

Place = tuple[str, int]
"""A tensor and one of its dimensions."""


def _leading(nests: Sequence[LoopNest]) -> frozenset[str]:
    """Dimensions that are the outermost factor of some operand's or result's dimension."""
    sides = [a for nest in nests for a in (*nest.reads, *nest.writes)]
    return frozenset(names[0] for a in sides for names in a.dims if names)


def _needed_cuts(node: Node, nest: LoopNest, leading: frozenset[str]) -> Iterator[tuple[Place, int]]:
    """Places of fused tensors, with the blocks in which a nest needs them cut so that plain tensors can be cut."""
    sizes = {d.name: d.size for d in nest.dims}
    for tensor, k, names in indexed(node, nest):
        blocks = 1
        for name in names:
            can_be_cut = nest.dim(name).kind in (DimKind.PARALLEL, DimKind.REDUCED) and sizes[name] > 1
            if 1 < blocks <= MOST_BLOCKS and name in leading and can_be_cut:
                yield (tensor, k), blocks
            blocks *= sizes[name]


def _plain_places(node: Node, nest: LoopNest) -> Iterable[list[Place]]:
    """For each iteration dimension that can be cut, the tensor dimensions that it indexes by itself."""
    places_of: dict[str, list[Place]] = {}
    for tensor, k, names in indexed(node, nest):
        if len(names) == 1 and nest.dim(names[0]).kind in (DimKind.PARALLEL, DimKind.REDUCED):
            places_of.setdefault(names[0], []).append((tensor, k))
    return places_of.values()


def interleaved_cuts(graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec]) -> InterleavedCuts:
    """Interleaved cuts worth considering, by tensor name; O(operands)."""
    cuts: InterleavedCuts = {}
    if not any(graph.nodes[i].op in _FUSED for i in nodes):
        return cuts
    alike, needed = list[tuple[Place, Place]](), list[tuple[Place, int]]()
    for i in nodes:
        node = graph.nodes[i]
        if node.op not in ("Split", "Concat", *_CARRIERS) and not specs[i].matrix_flops:
            continue
        for nest in specs[i].nests:
            alike += [(places[0], place) for places in _plain_places(node, nest) for place in places]
            if node.op in _FUSED:
                needed += _needed_cuts(node, nest, _leading(specs[i].nests))
    leader_of = group_leaders([*alike, *((place, place) for place, _ in needed)])
    blocks_of: dict[Place, set[int]] = {}
    for place, blocks in needed:
        blocks_of.setdefault(leader_of[place], set()).add(blocks)
    for (tensor, dim), leader in leader_of.items():
        for blocks in blocks_of.get(leader, ()):
            cuts.setdefault(tensor, set()).add(Part(dim, blocks))
    return {tensor: set(sorted(parts)[:MOST_CUTS]) for tensor, parts in cuts.items()}


_FUSED = (
    "Split", "Concat", "com.microsoft.Attention", "com.microsoft.GroupQueryAttention", "com.microsoft.MoE",
    "com.microsoft.MultiHeadAttention",
)  # fmt: skip
"""Operators with a fused operand or result."""
_CARRIERS = ("Add", "Mul", "Cast", "Identity", "Dropout", "Gelu", "Transpose", "Slice")
"""Operators through which the need for interleaved cuts travels, besides products."""


T = TypeVar("T")
Columns = tuple[np.ndarray, np.ndarray]
"""Seconds and bytes of the choices of a variable."""


class _Builder:
    """Collects the variables of a problem, and what makes its tables."""

    def __init__(self, setting: Setting, facts: GraphFacts) -> None:
        self.setting, self.graph, self.mesh = setting, setting.graph, setting.mesh
        self.specs, self.carrying, self.saved, self.forbids = facts.specs, facts.carrying, facts.saved, facts.forbidden
        self.kept, self.calls = facts.kept(setting.members), call_classes(setting.graph).index
        self.begins = begins_layer(setting.graph)
        self.members = frozenset(setting.members)
        self.tags = interleaved_cuts(setting.graph, setting.members, self.specs) if setting.options.interleaved else {}
        self.experts = self._experts() if AxisRole.EXPERT in setting.options.roles else {}
        self.names: list[str] = []
        self.choices: list[tuple[Choice, ...]] = []
        self.columns: list[Callable[[], Columns]] = []
        self.linked: list[tuple[int, int]] = []
        self.links: list[Callable[[], Factor]] = []
        self.index: dict[str, int] = {}
        self._made: dict[Hashable, Any] = {}

    def _experts(self) -> dict[str, int]:
        """By weight with a piece for each expert, the dimension that counts experts."""
        calls = [(i, OpCall.of(self.graph, self.graph.nodes[i])) for i in self.setting.members]
        expert_dim = {
            self.graph.nodes[i].inputs[p]: dim
            for i, call in calls
            for p, dim in expert_dims(call, self.specs[i].nests).items()
        }
        counts = {self.graph.tensors[name].shape[dim] for name, dim in expert_dim.items()}
        for i, call in calls:  # biases: the first dimension is as long as that of an expert's matrices
            for name, tensor in zip(self.graph.nodes[i].inputs, call.inputs, strict=True):
                beside = tensor is not None and tensor.kind is TensorKind.PARAMETER and not self.specs[i].matrix_flops
                if beside and tensor is not None and len(tensor.shape) > 1 and tensor.shape[0] in counts:
                    expert_dim.setdefault(name, 0)
        return expert_dim

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for equal keys: layers of a model repeat."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def add(self, name: str, choices: tuple[Choice, ...], columns: Callable[[], Columns]) -> int:
        self.index[name] = len(self.names)
        self.names.append(name)
        self.choices.append(choices)
        self.columns.append(columns)
        return self.index[name]

    def tables(self) -> CostTables:
        columns = [make() for make in self.columns]
        links = tuple([make() for make in self.links])
        return tuple([seconds for seconds, _ in columns]), tuple([kept for _, kept in columns]), links

    def table(self, tensor: Tensor) -> ReshardTable:
        return reshard_table(
            self.mesh,
            tensor.shape,
            self.setting.bytes_of(tensor),
            padded=self.setting.options.padded,
            interleaved=self.tags_of(tensor.name),
        )

    def resting(self, name: str) -> int | None:
        """The variable of a tensor or weight, added at its first use; None for inputs and constants."""
        tensor = self.graph.tensors[name]
        if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT):
            return None
        if name not in self.index:
            kind, carries = self.kind_of(tensor), name in self.carrying
            if tensor.kind is TensorKind.PARAMETER:
                key: Hashable = ("weight", kind, carries, self.experts.get(name, -1))
                weights = self.once(key, lambda: self._weight_choices(tensor, carries))
                self.add(name, weights, lambda: self.once(("costs", key), lambda: self._weight(tensor, weights)))
            else:
                kept, ends = self.kept.get(name, 0), self.ends(tensor)
                key = ("tensor", kind, carries, ends)
                rests = self.once(key, lambda: self._tensor_choices(tensor, carries, ends))
                self.add(
                    name, rests, lambda: self.once(("costs", key, kept), lambda: self._tensor(tensor, rests, kept))
                )
        return self.index[name]

    def kind_of(self, tensor: Tensor) -> Hashable:
        """A key, equal for tensors with equal layouts and equal costs of layout changes."""
        return tensor.shape, tensor.dtype, self.tags_of(tensor.name)

    def tags_of(self, name: str) -> tuple[Part, ...]:
        """Interleaved cuts of a tensor that count."""
        return tuple(sorted(self.tags.get(name, ())))

    def ends(self, tensor: Tensor) -> bool:
        """Whether no node reads the tensor, so that it must not stay in partial sums; a scalar loss may."""
        readers = set(self.graph.consumers.get(tensor.name, ())) & self.members
        return not readers and tensor.elements > 1

    def _tensor_choices(self, tensor: Tensor, carries: bool, ends: bool) -> tuple[TensorChoice, ...]:
        sizes, padded = self.mesh.sizes, self.setting.options.padded
        choices = tensor_choices(tensor.shape, sizes, self.tags_of(tensor.name), gradient=carries, padded=padded)
        return tuple([c for c in choices if PARTIAL not in c.value]) if ends else choices

    def _tensor(self, tensor: Tensor, choices: tuple[TensorChoice, ...], kept: float) -> Columns:
        table = self.table(tensor)
        held = kept / max(1, tensor.elements) * table.elements[[table.index[c.value] for c in choices]]
        return np.zeros(len(choices)), held

    def _weight_choices(self, tensor: Tensor, trained: bool) -> tuple[WeightChoice, ...]:
        options, sizes = self.setting.options, self.mesh.sizes
        choices = weight_choices(
            tensor.shape, sizes, self.tags_of(tensor.name), trained=trained, padded=options.padded,
            sharded_states=self.setting.sharded_states, roles=options.roles,
            expert_dim=self.experts.get(tensor.name, -1),
        )  # fmt: skip
        if not choices:
            hint = "use as many ranks of experts as divide them"
            raise InfeasibleError(f"{tensor.name} cannot be dealt to {sizes} ranks", where=tensor.name, hint=hint)
        return choices

    def _weight(self, tensor: Tensor, choices: tuple[WeightChoice, ...]) -> Columns:
        state, table = self.setting.state_of(tensor), self.table(tensor)
        rests = [(table.index[c.weight], table.index[c.gradient], table.index[c.optimizer]) for c in choices]
        weights, gradients, optimizers = np.asarray(rests).T
        summed = [table.index[summed_along(c.gradient, self.setting.options.dealing)] for c in choices]
        held = table.elements[weights] * state.weight
        update = np.zeros(len(choices))
        if tensor.name in self.carrying:
            held = held + (table.elements[gradients] * state.gradient + table.elements[optimizers] * state.optimizer)
            update = table.seconds[summed, optimizers] + table.seconds[optimizers, weights]
        return update / self.setting.micro_batches, held

    @functools.cached_property
    def weight_elements(self) -> int:
        """Number of weight elements that the nodes read."""
        names = {name for i in self.members for name in self.graph.nodes[i].inputs if name}
        weights = (self.graph.tensors[name] for name in names)
        return sum(t.elements for t in weights if t.kind is TensorKind.PARAMETER)

    def expressible(self, node: Node, candidates: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """The strategies whose interleaved cuts count for the tensors too."""

        def fits(names: Sequence[str], layouts: Sequence[tuple[int, TensorLayout]]) -> bool:
            parts = [(names[p], part) for p, layout in layouts if p < len(names) for part in layout]
            return all(part.blocks == 1 or part in self.tags.get(name, ()) for name, part in parts)

        return tuple(s for s in candidates if fits(node.inputs, s.reads) and fits(node.outputs, s.writes))

    def operator(self, i: int) -> None:
        """Add the variable of a node, and links to all tensors that it reads and writes."""
        node = self.graph.nodes[i]
        tags = tuple(self.tags_of(n) for n in (*node.inputs, *node.outputs))
        kind = (int(self.calls[i]), tags, self.forbids[i], self.begins[i])
        choices, loads = self.once(("strategies", kind), lambda: self._strategies(i))
        op_var = self.add(f"op:{node.key}", choices, lambda: self._operator(i, kind, choices, loads))
        for p, name in enumerate(node.inputs):
            tensor_var = self.resting(name) if name else None
            if tensor_var is not None:
                saved = any(s.storage == name for s in self.saved[i])
                weight = self.graph.tensors[name].kind is TensorKind.PARAMETER
                times = weight_gathers(self.specs[i]) if weight else 1.0 + saved
                self._link(op_var, tensor_var, name, p, written=False, times=times, repeat=node.repeat)
        for p, name in enumerate(node.outputs):
            tensor_var = self.resting(name) if name and name in self.graph.tensors else None
            if tensor_var is not None:
                self._link(op_var, tensor_var, name, p, written=True)

    def _strategies(self, i: int) -> tuple[tuple[Strategy, ...], tuple[Load, ...]]:
        """The allowed strategies of a node, and what each leaves a rank to do."""
        node, options = self.graph.nodes[i], self.setting.options
        call = OpCall.of(self.graph, node)
        blocks = tuple(sorted({p.blocks for n in (*node.inputs, *node.outputs) for p in self.tags.get(n, ())}))
        if blocks:
            options = replace(options, interleaved=True, blocks=blocks)
        legal = strategies(call, self.specs[i], self.mesh, self.setting.item_bytes, options)
        legal = allowed(self.expressible(node, legal), call, self.forbids[i])
        sizes, begins = self.mesh.sizes, self.begins[i]
        legal = layer_strategies(legal, call, self.specs[i], options, sizes, self.weight_elements, begins=begins)
        if not legal:
            why = "all ways to run the operator are forbidden" if self.forbids[i] else "the operator cannot be cut"
            hint = "forbid less, or let axes repeat work"
            raise InfeasibleError(why, where=node.name or node.key, hint=hint)
        return legal, tuple([self.setting.load(i, s) for s in legal])

    def _operator(self, i: int, kind: Hashable, legal: tuple[Strategy, ...], loads: tuple[Load, ...]) -> Columns:
        repeat, trains = self.graph.nodes[i].repeat, any(n in self.carrying for n in self.graph.nodes[i].inputs)
        extra = sum(s.byte_count for s in self.saved[i] if s.storage not in self.graph.tensors)
        work = {load: self.setting.rank_s(i, load) for load in dict.fromkeys(loads)}

        def spent_s(strategy: Strategy, load: Load) -> float:
            work_s = work[load]
            total = float_sum(work_s)
            for backward in (False, True)[: 1 + trains if strategy.exchanges else 0]:
                beside_s = self.setting.beside_s(work_s[backward], repeat)
                total += repeat * exchange_s(self.mesh, strategy, backward=backward, beside_s=beside_s)
            return total

        def make() -> Columns:
            seconds = np.asarray([spent_s(s, load) for s, load in zip(legal, loads, strict=True)])
            return seconds, np.asarray([s.share * extra for s in legal])

        return self.once(("operator", kind, tuple(work.values()), trains, extra, repeat), make)

    def _parts(self, op_var: int, p: int, tensor: Tensor, *, written: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By strategy, the index in the tensor's table of the layouts of value and gradient of an operand or result."""

        def make() -> tuple[tuple[int, ...], tuple[int, ...]]:
            replicated, index = (REPLICATED,) * len(self.mesh.axes), self.table(tensor).index
            chosen = [s for s in self.choices[op_var] if isinstance(s, Strategy)]
            sides = [s.writes if written else s.reads for s in chosen]
            backs = [s.write_gradients if written else s.read_gradients for s in chosen]
            values, gradients = (
                tuple([index[dict(layouts).get(p, replicated)] for layouts in each]) for each in (sides, backs)
            )
            return values, gradients

        return self.once(("parts", id(self.choices[op_var]), p, written, self.kind_of(tensor)), make)

    def _rests(self, tensor_var: int, tensor: Tensor, *, gradient: bool) -> np.ndarray:
        """Index in the tensor's table of each resting layout of the value, or of the gradient."""

        def make() -> np.ndarray:
            index, rests = self.table(tensor).index, [rest_of(choice) for choice in self.choices[tensor_var]]
            wanted = [rest.gradient if gradient else rest.value for rest in rests]
            return np.asarray([index[layout] for layout in wanted if layout is not None])

        return self.once(("rests", id(self.choices[tensor_var]), gradient, self.kind_of(tensor)), make)

    def _link(
        self, op_var: int, tensor_var: int, name: str, p: int, *, written: bool, times: float = 1.0, repeat: int = 1
    ) -> None:
        """Add a link of an operator and one of its tensors, lower variable first.

        Args:
            op_var: variable of the operator.
            tensor_var: variable of the tensor.
            name: name of the tensor.
            p: its position among the operator's results or operands.
            written: whether it is a result.
            times: changes of layout of the value for each one of the gradient.
            repeat: runs of the operator.
        """
        self.linked.append((min(op_var, tensor_var), max(op_var, tensor_var)))
        make = functools.partial(self._table, op_var, tensor_var, name, p, written=written, times=times, repeat=repeat)
        self.links.append(make)

    def _table(
        self, op_var: int, tensor_var: int, name: str, p: int, *, written: bool, times: float, repeat: int
    ) -> Factor:
        """The table of a link; equal tables share an array."""
        tensor, carries = self.graph.tensors[name], name in self.carrying
        parts = self._parts(op_var, p, tensor, written=written)

        def make() -> np.ndarray:
            seconds, values, gradients = self.table(tensor).seconds, np.asarray(parts[0]), np.asarray(parts[1])
            rests = self._rests(tensor_var, tensor, gradient=False)
            cost = times * (seconds[np.ix_(values, rests)] if written else seconds[np.ix_(rests, values)].T)
            gathering = self.setting.options.as_layers and tensor.kind is TensorKind.PARAMETER
            if gathering:  # tensor parallel layers never gather a weight
                cost = np.where(cost > 0.0, np.inf, cost)
            if carries:
                rests = self._rests(tensor_var, tensor, gradient=True)
                back = seconds[np.ix_(rests, gradients)].T if written else seconds[np.ix_(gradients, rests)]
                cost = cost + back
            return np.asarray(cost * repeat)

        key = (
            "link",
            id(self.choices[op_var]),
            id(self.choices[tensor_var]),
            parts,
            self.kind_of(tensor),
            carries,
            times,
            repeat,
        )
        if op_var < tensor_var:
            return Factor((op_var, tensor_var), self.once((*key, written), make))
        turned = self.once(("turned", *key, written), lambda: np.ascontiguousarray(make().T))
        return Factor((tensor_var, op_var), turned)


def formulate(setting: Setting, facts: GraphFacts | None = None) -> ShardingProblem:
    """The sharding problem of a setting: all choices and their costs.

    Args:
        setting: what to shard.
        facts: `GraphFacts.of` a setting of the same graph, to save computing them.

    Raises:
        InfeasibleError: no strategy of an operator is allowed.

    Complexity: for each operator its strategies times the layouts of its tensors.
    """
    builder = _Builder(setting, facts or GraphFacts.of(setting))
    for i in setting.members:
        builder.operator(i)
    names, choices, linked = tuple(builder.names), tuple(builder.choices), tuple(builder.linked)
    return ShardingProblem(setting, names, choices, linked, builder.tables)

"""From a setting to choices and tables of costs; operators, tensors and weights that are alike are tabled once.

Which tensors may be cut in an interleaved way: those that a fused projection's parts flow through.

Operators that part or join a dimension (`Split`, `Concat`, an attention with its projection) ask for interleaved cuts
of their fused tensor. The wish travels along dimensions that operators carry from operand to result unchanged, up to
the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import Graph, Node, Tensor, TensorKind
from planner.operators import DimKind, LoopNest, OpCall, OpSpec
from planner.sharding.choices import MOST_BLOCKS, expert_dims
from planner.sharding.elimination import Factor
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, indexed, named_nests
from planner.sharding.limits import allowed, layer_strategies
from planner.sharding.mesh import AxisRole
from planner.sharding.problem import (
    Choice,
    Facts,
    Setting,
    ShardingProblem,
    rest_of,
    weight_gathers,
)
from planner.sharding.reshard import ReshardTable, reshard_table
from planner.sharding.resting import summed_along, tensor_choices, weight_choices
from planner.sharding.strategies import Strategy, exchange_s, strategies

MOST_TAGS = 2
"""Ways to interleave one tensor that are kept."""

Tags = dict[str, set[Part]]


def _leading(nests: Sequence[LoopNest]) -> frozenset[str]:
    """Dimensions that are the outermost factor of some operand's or result's dimension."""
    sides = [a for nest in nests for a in (*nest.reads, *nest.writes)]
    return frozenset(names[0] for a in sides for names in a.dims if names)


def _wishes(node: Node, nest: LoopNest, leading: frozenset[str]) -> Tags:
    """Interleaved cuts that a nest with a plain result (or operand) on the other side asks for."""
    found: Tags = {}
    sizes = {d.name: d.size for d in nest.dims}
    for tensor, k, names in indexed(node, nest):
        blocks = 1
        for name in names:
            free = nest.dim(name).kind in (DimKind.PARALLEL, DimKind.REDUCED) and sizes[name] > 1
            if 1 < blocks <= MOST_BLOCKS and name in leading and free:
                found.setdefault(tensor, set()).add(Part(k, blocks))
            blocks *= sizes[name]
    return found


def _carry(places: Mapping[str, Sequence[tuple[str, int]]], tags: Tags) -> bool:
    """Hand wishes on along plain dimensions, each in some places of tensors; whether anything was new."""
    changed = False
    for spots in places.values():
        blocks = sorted({p.blocks for name, k in spots for p in tags.get(name, ()) if p.dim == k})
        for name, k in spots:
            for n in blocks:
                if len(tags.get(name, ())) < MOST_TAGS and Part(k, n) not in tags.get(name, ()):
                    tags.setdefault(name, set()).add(Part(k, n))
                    changed = True
    return changed


def _plain_places(node: Node, nest: LoopNest) -> dict[str, list[tuple[str, int]]]:
    """By iteration dimension that can be cut, the tensor dimensions that it indexes alone."""
    found: dict[str, list[tuple[str, int]]] = {
        d.name: [] for d in nest.dims if d.kind in (DimKind.PARALLEL, DimKind.REDUCED)
    }
    for tensor, k, names in indexed(node, nest):
        if len(names) == 1 and names[0] in found:
            found[names[0]].append((tensor, k))
    return found


def block_tags(graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec]) -> Tags:
    """Interleaved cuts worth considering, by tensor name; O(rounds * nodes), rounds being few."""
    found: Tags = {}
    work: list[dict[str, list[tuple[str, int]]]] = []
    for i in nodes:
        node = graph.nodes[i]
        if node.op not in ("Split", "Concat", *_CARRIERS) and not specs[i].matrix_flops:
            continue
        nests = named_nests(OpCall.of(graph, node), specs[i])
        for nest in nests:
            work.append(_plain_places(node, nest))
            if node.op in _ASKING:
                for name, parts in _wishes(node, nest, _leading(nests)).items():
                    found.setdefault(name, set()).update(sorted(parts)[:MOST_TAGS])
    changed = True
    while changed:
        changed = False
        for places in work:
            changed |= _carry(places, found)
    return found


_ASKING = (
    "Split", "Concat", "com.microsoft.Attention", "com.microsoft.GroupQueryAttention", "com.microsoft.MoE",
    "com.microsoft.MultiHeadAttention", "com.microsoft.QAttention",
)  # fmt: skip
"""Operators with a fused operand or result whose parts they use side by side."""
_CARRIERS = ("Add", "Mul", "Cast", "Identity", "Dropout", "Gelu", "Transpose", "Slice")
"""Operators through which wishes travel, besides products."""


T = TypeVar("T")
Made = tuple[tuple[Choice, ...], np.ndarray, np.ndarray]
"""Choices of a variable, their seconds, their bytes."""


class _Builder:
    """Collects variables and tables."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        self.setting, self.graph, self.mesh = setting, setting.graph, setting.mesh
        self.specs, self.carrying, self.saved, self.forbids = facts.specs, facts.carrying, facts.saved, facts.forbidden
        self.kept = facts.kept(setting.members)
        self.members = frozenset(setting.members)
        self.tags = block_tags(setting.graph, setting.members, self.specs) if setting.options.interleaved else {}
        self.experts = self._experts() if AxisRole.EXPERT in setting.options.roles else {}
        self.names: list[str] = []
        self.choices: list[tuple[Choice, ...]] = []
        self.seconds: list[np.ndarray] = []
        self.bytes: list[np.ndarray] = []
        self.links: list[Factor] = []
        self.index: dict[str, int] = {}
        self._made: dict[Hashable, Any] = {}

    def _experts(self) -> dict[str, int]:
        """By weight that is stored once an expert, the dimension that counts experts."""
        calls = [(i, OpCall.of(self.graph, self.graph.nodes[i])) for i in self.setting.members]
        found = {
            self.graph.nodes[i].inputs[p]: dim
            for i, call in calls
            for p, dim in expert_dims(call, named_nests(call, self.specs[i])).items()
        }
        counts = {self.graph.tensors[name].shape[dim] for name, dim in found.items()}
        for i, call in calls:  # biases: the first dimension is as long as that of an expert's matrices
            for name, tensor in zip(self.graph.nodes[i].inputs, call.inputs, strict=True):
                beside = tensor is not None and tensor.kind is TensorKind.PARAMETER and not self.specs[i].matrix_flops
                if beside and tensor is not None and len(tensor.shape) > 1 and tensor.shape[0] in counts:
                    found.setdefault(name, 0)
        return found

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once for equal keys: layers of a model repeat."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def add(self, name: str, found: tuple[Choice, ...], seconds: np.ndarray, kept: np.ndarray) -> int:
        self.index[name] = len(self.names)
        self.names.append(name)
        self.choices.append(found)
        self.seconds.append(seconds)
        self.bytes.append(kept)
        return self.index[name]

    def table(self, tensor: Tensor) -> ReshardTable:
        return reshard_table(
            self.mesh,
            tensor.shape,
            self.setting.bytes_of(tensor),
            padded=self.setting.options.padded,
            interleaved=self.tags_of(tensor.name),
        )

    def resting(self, name: str) -> int | None:
        """The variable of a tensor or weight, made at its first use; None for inputs and constants."""
        name = self.setting.tied.get(name, name)
        tensor = self.graph.tensors[name]
        if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT):
            return None
        if name not in self.index:
            look, carries = self.look(tensor), name in self.carrying
            if tensor.kind is TensorKind.PARAMETER:
                expert = self.experts.get(name, -1)
                made = self.once(("weight", look, carries, expert), lambda: self._weight(tensor, carries))
            else:
                kept, ends = self.kept.get(name, 0), self.ends(tensor)
                made = self.once(
                    ("tensor", look, carries, kept, ends), lambda: self._tensor(tensor, carries, kept, ends)
                )
            self.add(name, *made)
        return self.index[name]

    def look(self, tensor: Tensor) -> Hashable:
        """What a tensor's layouts and changes of layout depend on."""
        return tensor.shape, tensor.dtype, self.tags_of(tensor.name)

    def tags_of(self, name: str) -> tuple[Part, ...]:
        """Interleaved cuts that a tensor considers."""
        return tuple(sorted(self.tags.get(name, ())))

    def ends(self, tensor: Tensor) -> bool:
        """Whether nobody here reads the tensor, so that it must be whole or cut; a loss may stay a partial sum."""
        tied = tensor.name in self.setting.tied or tensor.name in self.setting.tied.values()
        readers = set(self.graph.consumers.get(tensor.name, ())) & self.members
        return not readers and not tied and tensor.elements > 1

    def _tensor(self, tensor: Tensor, carries: bool, kept: float, ends: bool) -> Made:
        sizes, padded = self.mesh.sizes, self.setting.options.padded
        found = tensor_choices(tensor.shape, sizes, self.tags_of(tensor.name), gradient=carries, padded=padded)
        if ends:
            found = tuple(c for c in found if PARTIAL not in c.value)
        table = self.table(tensor)
        held = kept / max(1, tensor.elements) * table.elements[[table.index[c.value] for c in found]]
        return found, np.zeros(len(found)), held

    def _weight(self, tensor: Tensor, trained: bool) -> Made:
        padded, states = self.setting.options.padded, self.setting.sharded_states
        state, sizes, table = self.setting.state, self.mesh.sizes, self.table(tensor)
        tags, options = self.tags_of(tensor.name), self.setting.options
        found = weight_choices(
            tensor.shape, sizes, tags, trained=trained, sharded_states=states, padded=padded, roles=options.roles,
            expert_dim=self.experts.get(tensor.name, -1),
        )  # fmt: skip
        if not found:
            hint = "use as many ranks of experts as divide them"
            raise InfeasibleError(f"{tensor.name} cannot be dealt to {sizes} ranks", where=tensor.name, hint=hint)
        rests = [(table.index[c.weight], table.index[c.gradient], table.index[c.optimizer]) for c in found]
        weights, gradients, optimizers = np.asarray(rests).T
        summed = [table.index[summed_along(c.gradient, options.dealing)] for c in found]
        each = state.weight if tensor.dtype.is_float else tensor.dtype.bits / 8
        held = table.elements[weights] * each
        update = np.zeros(len(found))
        if trained:
            held = held + (table.elements[gradients] * state.gradient + table.elements[optimizers] * state.optimizer)
            update = table.seconds[summed, optimizers] + table.seconds[optimizers, weights]
        return found, update / self.setting.micro_batches, held

    @functools.cached_property
    def weight_elements(self) -> int:
        """Weights that the nodes read."""
        names = {name for i in self.members for name in self.graph.nodes[i].inputs if name}
        weights = (self.graph.tensors[name] for name in names)
        return sum(t.elements for t in weights if t.kind is TensorKind.PARAMETER)

    def expressible(self, node: Node, found: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Strategies whose interleaved cuts its tensors consider too."""

        def fits(names: Sequence[str], layouts: Sequence[tuple[int, TensorLayout]]) -> bool:
            parts = [(names[p], part) for p, layout in layouts if p < len(names) for part in layout]
            return all(part.blocks == 1 or part in self.tags.get(name, ()) for name, part in parts)

        return tuple(s for s in found if fits(node.inputs, s.reads) and fits(node.outputs, s.writes))

    def operator(self, i: int) -> None:
        """One node: its strategies, and links to everything it reads and writes."""
        node, call = self.graph.nodes[i], OpCall.of(self.graph, self.graph.nodes[i])
        trains = any(n in self.carrying for n in node.inputs)
        extra = sum(s.byte_count for s in self.saved[i] if s.storage not in self.graph.tensors)
        tags = tuple(self.tags_of(n) for n in (*node.inputs, *node.outputs))
        alike = (call.signature(), id(self.specs[i]), tags, self.forbids[i])
        found, shares = self.once(("strategies", alike), lambda: self._strategies(i, call))
        work = tuple(self.setting.node_s(i, share) for share in shares)
        key = ("operator", alike, work, trains, extra, node.repeat)
        made = self.once(key, lambda: self._operator(i, found, dict(zip(shares, work, strict=True)), trains, extra))
        own = self.add(f"op:{node.key}", *made)
        for p, name in enumerate(node.inputs):
            other = self.resting(name) if name else None
            if other is not None:
                again = any(s.storage == name for s in self.saved[i])
                weight = self.graph.tensors[name].kind is TensorKind.PARAMETER
                times = weight_gathers(self.specs[i]) if weight else 1.0 + again
                self._link(own, other, name, p, written=False, times=times, repeat=node.repeat)
        for p, name in enumerate(node.outputs):
            other = self.resting(name) if name and name in self.graph.tensors else None
            if other is not None:
                self._link(own, other, name, p, written=True)

    def _strategies(self, i: int, call: OpCall) -> tuple[tuple[Strategy, ...], tuple[float, ...]]:
        """Strategies of a node that are not forbidden, and the shares of its work that they leave a rank."""
        node, options = self.graph.nodes[i], self.setting.options
        blocks = tuple(sorted({p.blocks for n in (*node.inputs, *node.outputs) for p in self.tags.get(n, ())}))
        if blocks:
            options = replace(options, interleaved=True, blocks=blocks)
        found = self.expressible(node, strategies(call, self.specs[i], self.mesh, self.setting.item_bytes, options))
        found = allowed(found, call, self.forbids[i])
        found = layer_strategies(found, call, self.specs[i], options, self.mesh.sizes, self.weight_elements)
        if not found:
            why = "all ways to run the operator are forbidden" if self.forbids[i] else "the operator cannot be cut"
            hint = "forbid less, or let axes repeat work"
            raise InfeasibleError(why, where=node.name or node.key, hint=hint)
        return found, tuple(dict.fromkeys(s.share for s in found))

    def _operator(
        self, i: int, found: tuple[Strategy, ...], work: Mapping[float, tuple[float, float]], trains: bool, extra: float
    ) -> Made:
        repeat = self.graph.nodes[i].repeat

        def spent_s(strategy: Strategy) -> float:
            own_s = work[strategy.share]
            total = sum(own_s)
            for backward in (False, True)[: 1 + trains if strategy.exchanges else 0]:
                beside_s = self.setting.beside_s(own_s[backward], repeat)
                total += repeat * exchange_s(self.mesh, strategy, backward=backward, beside_s=beside_s)
            return total

        seconds = np.asarray([spent_s(s) for s in found])
        return found, seconds, np.asarray([s.share * extra for s in found])

    def _parts(self, own: int, p: int, tensor: Tensor, *, written: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By strategy, places in the tensor's table of one operand's or result's value and gradient."""

        def make() -> tuple[tuple[int, ...], tuple[int, ...]]:
            whole, index = (REPLICATED,) * len(self.mesh.axes), self.table(tensor).index
            sides = self._layouts(own, written=written)
            values = tuple(index[value.get(p, whole)] for value, _ in sides)
            return values, tuple(index[gradient.get(p, whole)] for _, gradient in sides)

        return self.once(("parts", id(self.choices[own]), p, written, self.look(tensor)), make)

    def _layouts(self, own: int, *, written: bool) -> list[tuple[dict[int, TensorLayout], dict[int, TensorLayout]]]:
        """By strategy, layouts by position of an operator's operands or results, and of their gradients."""
        made = [choice for choice in self.choices[own] if isinstance(choice, Strategy)]
        return self.once(
            ("layouts", id(self.choices[own]), written),
            lambda: [
                (dict(s.writes), dict(s.write_gradients)) if written else (dict(s.reads), dict(s.read_gradients))
                for s in made
            ],
        )

    def _rests(self, other: int, tensor: Tensor, *, gradient: bool) -> np.ndarray:
        """Places in the tensor's table where its value, or its gradient, may rest."""

        def make() -> np.ndarray:
            index, rests = self.table(tensor).index, [rest_of(choice) for choice in self.choices[other]]
            wanted = [rest.gradient if gradient else rest.value for rest in rests]
            return np.asarray([index[layout] for layout in wanted if layout is not None])

        return self.once(("rests", id(self.choices[other]), gradient, self.look(tensor)), make)

    def _link(
        self, own: int, other: int, name: str, p: int, *, written: bool, times: float = 1.0, repeat: int = 1
    ) -> None:
        """A table over an operator and one of its tensors, lower variable first; equal tables are one array.

        Args:
            own: the operator's variable.
            other: the tensor's.
            name: the tensor.
            p: its position among the operator's results or operands.
            written: whether it is a result.
            times: how often the value changes its layout for each gradient that does.
            repeat: runs of the operator.
        """
        tensor, carries = self.graph.tensors[name], name in self.carrying
        parts = self._parts(own, p, tensor, written=written)

        def make() -> np.ndarray:
            seconds, values, gradients = self.table(tensor).seconds, np.asarray(parts[0]), np.asarray(parts[1])
            rests = self._rests(other, tensor, gradient=False)
            cost = times * (seconds[np.ix_(values, rests)] if written else seconds[np.ix_(rests, values)].T)
            gathering = self.setting.options.as_layers and tensor.kind is TensorKind.PARAMETER
            if gathering:  # which no tensor parallel layer does
                cost = np.where(cost > 0.0, np.inf, cost)
            if carries:
                rests = self._rests(other, tensor, gradient=True)
                back = seconds[np.ix_(rests, gradients)].T if written else seconds[np.ix_(gradients, rests)]
                cost = cost + back
            return np.asarray(cost * repeat)

        key = ("link", id(self.choices[own]), id(self.choices[other]), parts, self.look(tensor), carries, times, repeat)
        if own < other:
            self.links.append(Factor((own, other), self.once((*key, written), make)))
        else:
            turned = self.once(("turned", *key, written), lambda: np.ascontiguousarray(make().T))
            self.links.append(Factor((other, own), turned))


def formulate(setting: Setting, facts: Facts | None = None) -> ShardingProblem:
    """All choices and costs of a setting.

    Args:
        setting: what to shard.
        facts: `Facts.of` a setting of the same graph, to spare finding them again.

    Raises:
        InfeasibleError: an operator is left no way to run.

    Complexity: for each operator its strategies times the layouts of its tensors.
    """
    builder = _Builder(setting, facts or Facts.of(setting))
    for i in setting.members:
        builder.operator(i)
    return ShardingProblem(
        setting,
        tuple(builder.names),
        tuple(builder.choices),
        tuple(builder.seconds),
        tuple(builder.bytes),
        tuple(builder.links),
    )

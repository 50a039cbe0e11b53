"""Mesh-TensorFlow: one global map from named dimensions to mesh axes, for all tensors and operations at once.

Rules: a dimension goes to at most one axis; no two dimensions of one tensor or operation go to the same axis; the axis
divides every size of the dimension. Two objectives: the published one, the peak bytes of a schedule
(`planner.sharding.named_layout`), and time, by elimination over the names. Shazeer et al., NeurIPS 2018.

Mesh-TensorFlow programs name their dimensions; here the names are derived: two dimensions that one loop nest iterates
together share a name. A dimension that is a product (heads times head size) has the name of its outermost factor, which
a cut would cut. The dimension of a fused projection, which a `Split` cuts into equal pieces, has the name of the
pieces: it is cut in as many blocks, each like a piece.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import Graph, Node, TensorKind, group_leaders
from planner.operators import DimKind, LoopNest, OpSpec
from planner.sharding.elimination import Factor
from planner.sharding.formulate import formulate
from planner.sharding.layout import REPLICATED, Part, indexed
from planner.sharding.named_layout import NamedOperation, NamedProgram, NamedTensor, best_layout
from planner.sharding.problem import Choice, GraphFacts, Setting
from planner.sharding.resting import resting_as
from planner.sharding.searches import SEARCHES, ShardingAnswer, fastest_choices
from planner.sharding.strategies import Strategy

Place = tuple[str, int]
"""A tensor and one of its dimensions."""


@dataclass
class NamedDims:
    """Names of tensor dimensions.

    Attributes:
        of: by tensor and dimension, its name.
        sizes: by name, the greatest common divisor of the sizes of its dimensions.
        nest: by node index, the name of each iteration dimension that has one.
        blocks: by dimension of a fused tensor, the number of pieces that it joins.
    """

    of: dict[Place, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    nest: dict[int, dict[str, str]] = field(default_factory=dict)
    blocks: dict[Place, int] = field(default_factory=dict)

    def tensor(self, name: str, rank: int) -> tuple[str, ...]:
        """Names of the dimensions of a tensor; "" for a dimension of size 1."""
        return tuple(self.of.get((name, k), "") for k in range(rank))


def _places(node: Node, nest: LoopNest) -> dict[str, list[Place]]:
    """By iteration dimension, the tensor dimensions of which it is the outermost factor.

    The sliced dimensions of a `Slice` keep names of their own, since it cannot be cut along them.
    """
    dims_of: dict[str, list[Place]] = {}
    for tensor, k, names in indexed(node, nest):
        if names and not (node.op == "Slice" and nest.dim(names[0]).kind is DimKind.WHOLE):
            dims_of.setdefault(names[0], []).append((tensor, k))
    return dims_of


def named_dims(graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec]) -> NamedDims:
    """Names of all dimensions of the tensors of some nodes, `d0`, `d1`, ... in order of first use; O(operands).

    Args:
        graph: the model.
        nodes: indices of the nodes.
        specs: descriptions, aligned with the graph's nodes.
    """
    pairs, led = list[tuple[Place, Place]](), {}
    for i in nodes:
        node = graph.nodes[i]
        led[i] = [(nest, _places(node, nest)) for nest in specs[i].nests]
        for _, places in led[i]:
            pairs += [(spots[0], spot) for spots in places.values() for spot in spots]
    root = group_leaders(pairs)
    pieces = _pieces(root, [entry for entries in led.values() for entry in entries])
    result = NamedDims()
    known: dict[Place, str] = {}
    for i in nodes:
        result.nest[i] = {}
        for nest, places in led[i]:
            for dim, spots in places.items():
                fused = root[spots[0]]
                group, count = pieces.get(fused, (fused, 1))
                parting = count > 1 and nest.dim(dim).kind is DimKind.WHOLE
                name = known.setdefault(group, f"d{len(known)}")
                if not parting:
                    result.nest[i][dim] = name
                for tensor, k in spots:
                    size = graph.tensors[tensor].shape[k]
                    result.of[tensor, k] = name
                    sizes = (size // count,) if parting else (size // count, nest.dim(dim).size // count)
                    result.sizes[name] = math.gcd(result.sizes.get(name, 0), *sizes)
                    if count > 1:
                        result.blocks[tensor, k] = count
    return result


def _pieces(
    root: Mapping[Place, Place], led: Sequence[tuple[LoopNest, Mapping[str, list[Place]]]]
) -> dict[Place, tuple[Place, int]]:
    """By fused dimension that a nest splits, the dimension and the number of its pieces; without ambiguous ones."""
    pieces_of: dict[Place, set[tuple[Place, int]]] = {}
    for nest, places in led:
        for access in (*nest.reads, *nest.writes):
            for names in access.dims:
                if len(names) < 2 or nest.dim(names[0]).kind is not DimKind.WHOLE or names[1] not in places:
                    continue
                (fused,) = {root[spot] for spot in places[names[0]]}
                pieces_of.setdefault(fused, set()).add((root[places[names[1]][0]], nest.dim(names[0]).size))
    unique = {fused: next(iter(pieces)) for fused, pieces in pieces_of.items() if len(pieces) == 1}
    return {fused: (piece, count) for fused, (piece, count) in unique.items() if piece not in pieces_of and count > 1}


Implied = tuple[tuple[int, ...], np.ndarray]
"""Names, ascending, and the choice that follows from their axes: int64, one dimension a name, -1 for no choice."""


class _NamedProblem:
    """A sharding problem in which every choice follows from the mesh axis of each named dimension.

    Attributes:
        order: the names.
        domains: by name, the axes that may cut it, -1 (uncut) first.
    """

    def __init__(self, setting: Setting) -> None:
        facts = GraphFacts.of(setting)
        self.setting, self.graph, self.carrying = setting, setting.graph, facts.carrying
        self.problem = formulate(setting, facts)
        self.names = named_dims(setting.graph, setting.members, facts.specs)
        axes = [(a, axis.size) for a, axis in enumerate(setting.mesh.axes) if axis.size > 1]
        self.order = sorted(self.names.sizes, key=lambda n: int(n[1:]))
        self.domains = [[-1, *(a for a, ranks in axes if self.names.sizes[n] % ranks == 0)] for n in self.order]
        self._index = {name: v for v, name in enumerate(self.order)}
        self._tables: dict[Hashable, np.ndarray] = {}
        nodes = {f"op:{setting.graph.nodes[i].key}": i for i in setting.members}
        self.operators = {nodes[name]: v for v, name in enumerate(self.problem.names) if name in nodes}
        self._implied = [
            self._of_operator(nodes[name]) if name in nodes else self._of_tensor(name, v)
            for v, name in enumerate(self.problem.names)
        ]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of options of each name: the axes that may cut it, and none."""
        return tuple(map(len, self.domains))

    def strategies(self, i: int) -> dict[tuple[str, ...], int]:
        """Choices of an operator by splits; only those that cut fused tensors in blocks like their pieces."""
        node, choice_of = self.graph.nodes[i], dict[tuple[str, ...], int]()
        for c, choice in enumerate(self.problem.choices[self.operators[i]]):
            if isinstance(choice, Strategy):
                sides = [(node.inputs[p], layout) for p, layout in choice.reads]
                sides += [(node.outputs[p], layout) for p, layout in choice.writes]
                cuts = [(name, part) for name, layout in sides for part in layout if part.cuts]
                if all(part.blocks == self.names.blocks.get((name, part.dim), 1) for name, part in cuts):
                    choice_of.setdefault(choice.splits, c)
        return choice_of

    def _implied_by(self, dims: Sequence[str], key: Hashable, choice_at: Callable[[list[int]], int]) -> Implied:
        """The choices that follow from the axes of some dimensions (by name, "" for none); equal keys share a table."""
        names = tuple(sorted({self._index[d] for d in dims if d}))
        places = [names.index(self._index[d]) if d else -1 for d in dims]
        domains = [self.domains[n] for n in names]
        key = (key, tuple(places), tuple(map(tuple, domains)))
        if key not in self._tables:
            choices = [choice_at([at[p] if p >= 0 else -1 for p in places]) for at in itertools.product(*domains)]
            self._tables[key] = np.asarray(choices, dtype=np.int64).reshape([len(d) for d in domains])
        return names, self._tables[key]

    def _of_operator(self, i: int) -> Implied:
        nest, axes = self.names.nest[i], len(self.setting.mesh.axes)
        offered = self.strategies(i)

        def choice_at(where: list[int]) -> int:
            splits = [""] * axes
            for dim, axis in zip(nest, where, strict=True):
                if axis >= 0 and splits[axis]:
                    return -1
                if axis >= 0:
                    splits[axis] = dim
            return offered.get(tuple(splits), -1)

        return self._implied_by(list(nest.values()), (tuple(offered.items()), tuple(nest)), choice_at)

    def _of_tensor(self, name: str, v: int) -> Implied:
        tensor, choices, axes = self.graph.tensors[name], self.problem.choices[v], len(self.setting.mesh.axes)
        carries, rank = name in self.carrying, len(tensor.shape)
        blocks = tuple(self.names.blocks.get((name, k), 1) for k in range(rank))

        def choice_at(where: list[int]) -> int:
            parts = [REPLICATED] * axes
            for k, axis in enumerate(where):
                if axis >= 0 and parts[axis].cuts:
                    return -1
                if axis >= 0:
                    parts[axis] = Part(k, blocks[k])
            choice = resting_as(tensor, tuple(parts), gradient=carries)
            return choices.index(choice) if choice in choices else -1

        return self._implied_by(self.names.tensor(name, rank), (id(choices), blocks, carries), choice_at)

    def times(self) -> list[Factor]:
        """Tables over the names: seconds of operators, of weight updates and of changes of layout."""
        own_tables = (self._own_table(v, table, math.inf) for v, table in enumerate(self.problem.seconds))
        return _summed([*own_tables, *map(self._link, self.problem.links)])

    def held(self) -> list[Factor]:
        """Tables over the names: bytes that a rank holds."""
        return _summed(self._own_table(v, table, 0.0) for v, table in enumerate(self.problem.bytes))

    def _own_table(self, v: int, table: np.ndarray, otherwise: float) -> Factor:
        names, choices = self._implied[v]
        key = (id(table), id(choices), otherwise)
        if key not in self._tables:
            self._tables[key] = np.where(choices < 0, otherwise, table[choices])
        return Factor(names, self._tables[key])

    def _link(self, link: Factor) -> Factor:
        sides = [self._implied[v] for v in link.variables]
        names = tuple(sorted({n for side, _ in sides for n in side}))
        key = (id(link.table), *((id(choices), tuple(map(names.index, side))) for side, choices in sides))
        if key not in self._tables:
            first, second = (
                choices.reshape([len(self.domains[n]) if n in side else 1 for n in names]) for side, choices in sides
            )
            self._tables[key] = np.where((first < 0) | (second < 0), math.inf, link.table[first, second])
        return Factor(names, self._tables[key])

    def decision(self, at: Sequence[int]) -> dict[str, Choice]:
        """The decision that follows from one option of each name.

        Raises:
            InfeasibleError: an operator or a tensor has no choice that follows from it.
        """
        choices = [int(choice_at[tuple(at[n] for n in names)]) for names, choice_at in self._implied]
        for name, c in zip(self.problem.names, choices, strict=True):
            if c < 0:
                key, operator = name.removeprefix("op:"), name.startswith("op:")
                what = f"{key} cannot be split" if operator else f"{key} cannot be cut"
                raise InfeasibleError(f"{what} as the layout says", where=key, hint="leave a dimension whole")
        return self.problem.decision(choices)


def _summed(factors: Iterable[Factor]) -> list[Factor]:
    """The factors, with tables over the same names added up."""
    table_of: dict[tuple[int, ...], np.ndarray] = {}
    for f in factors:
        table_of[f.variables] = table_of[f.variables] + f.table if f.variables in table_of else f.table
    return [Factor(variables, table) for variables, table in table_of.items()]


def program_of(named: _NamedProblem) -> NamedProgram:
    """The forward program of a setting's nodes, with the dimensions that each operation cannot split."""
    setting, graph, names = named.setting, named.graph, named.names
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
        cut = {names.nest[i][d] for splits in named.strategies(i) for d in splits if d in names.nest[i]}
        led = Counter(names.nest[i].values())
        twice = {d for n in (*reads, *writes) for d, count in Counter(tensors[n].dims).items() if count > 1}
        twice |= {d for d, count in led.items() if count > 1}
        operations.append(NamedOperation(reads, writes, tuple(sorted(used - cut | twice))))
    return NamedProgram(tuple(tensors.values()), tuple(operations))


@SEARCHES.entry("mesh-tensorflow")
def mesh_tensorflow(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The fastest global layout; under a memory limit, the fastest that a price on memory finds.

    Raises:
        InfeasibleError: no layout is legal, or none was found that fits.
    """
    named = _NamedProblem(setting)
    axes = fastest_choices(named.sizes, named.times(), named.held(), memory_bytes, "layout of named dimensions")
    return ShardingAnswer.of(setting, named.decision(axes), memory_bytes)


@SEARCHES.entry("mesh-tensorflow-memory")
def mesh_tensorflow_memory(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The global layout of least memory, as published.

    Raises:
        InfeasibleError: an operator cannot follow the layout.
    """
    named = _NamedProblem(setting)
    axes = {axis.name: axis.size for axis in setting.mesh.axes if axis.size > 1}
    assignment = best_layout(program_of(named), axes).assignment
    place = {axis.name: a for a, axis in enumerate(setting.mesh.axes)}
    axis_of = [place[assignment[name]] if name in assignment else -1 for name in named.order]
    decision = named.decision([domain.index(a) for domain, a in zip(named.domains, axis_of, strict=True)])
    return ShardingAnswer.of(setting, decision, memory_bytes)

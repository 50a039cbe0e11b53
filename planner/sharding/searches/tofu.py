"""Tofu: every tensor is cut, one mesh axis after another, with the fewest bytes fetched and reduced.

Partition-n-reduce: an operator is cut along one dimension of its loop nest; a worker fetches the missing parts of its
operands and, where the dimension is reduced, partial results are added. One step cuts everything in p parts; the next
step cuts each part again. Step i costs `groups_i * delta_i` bytes,
groups being the parts made so far. Taking the best step each time is optimal where these never fall from step to step
(Wang, Huang, Li, EuroSys 2019, theorem 1).

Coarsening: a tensor and its gradient are cut alike, so forward and backward are one group; tensors that an element-wise
operator joins are cut alike; so are those of equal operators that share a weight (unrolled time steps). What is left is
nearly a chain, and its dynamic program is the elimination of one variable after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.graph import Graph, Tensor, TensorKind, group_leaders
from planner.operators import DimKind, LoopNest, OpCall, OpSpec, gradient_nest, graph_specs, needs_gradient
from planner.sharding.choices import shrink, splits
from planner.sharding.elimination import Factor, factor, minimise
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout
from planner.sharding.limits import allowed
from planner.sharding.problem import Choice, GraphFacts, Setting
from planner.sharding.resting import resting_as
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.strategies import Strategy, strategies
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class Pass:
    """One loop nest of training: an operator's forward pass, or the gradient of one operand.

    Attributes:
        key: the node's key, with `#` and the operand's number for a gradient.
        nests: loop nests whose accesses are numbered in order of `reads` and `writes`.
        reads: names of the tensors read (a gradient goes by its tensor's name).
        writes: names of the tensors written.
    """

    key: str
    nests: tuple[LoopNest, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TofuCut:
    """One cut of a pass: the dimension ("" repeats the work), and the part of each operand and result."""

    dim: str
    reads: tuple[Part, ...]
    writes: tuple[Part, ...]
    halo_bytes: float = 0.0


def _numbered(nest: LoopNest, reads: Sequence[int], writes: Sequence[int]) -> LoopNest:
    """The nest with its accesses numbered by their place in those lists."""
    return replace(
        nest,
        reads=tuple(replace(a, position=reads.index(a.position)) for a in nest.reads),
        writes=tuple(replace(a, position=writes.index(a.position)) for a in nest.writes),
    )


def _gradients(nest: LoopNest, names: Sequence[str], out: str, wanted: frozenset[str], key: str) -> list[Pass]:
    """One pass for each operand of a nest whose gradient is wanted."""
    passes = []
    for r, access in enumerate(nest.reads):
        target = names[access.position]
        if target not in wanted:
            continue
        back = gradient_nest(nest, r)
        others = [names[a.position] for i, a in enumerate(nest.reads) if i != r]
        reads = tuple(replace(a, position=i) for i, a in enumerate(back.reads))
        writes = (replace(back.writes[0], position=0),)
        passes.append(Pass(f"{key}#{r}", (replace(back, reads=reads, writes=writes),), (out, *others), (target,)))
    return passes


def passes_of(graph: Graph, i: int, spec: OpSpec, wanted: frozenset[str]) -> list[Pass]:
    """The forward pass of a node, and the passes of the gradients that training needs."""
    node = graph.nodes[i]
    nests = [n for n in spec.nests if n.reads or n.writes]
    if not nests:
        return []
    reads = sorted({a.position for n in nests for a in n.reads})
    writes = sorted({a.position for n in nests for a in n.writes})
    forward = tuple(_numbered(n, reads, writes) for n in nests)
    names, outs = tuple(node.inputs[p] for p in reads), tuple(node.outputs[p] for p in writes)
    passes = [Pass(node.key, forward, names, outs)]
    if outs[0] in wanted:
        for nest in forward:
            passes += _gradients(nest, names, outs[0], wanted, node.key)
    return passes


def cuts_of(op: Pass, ranks: int, item_bytes: float) -> list[TofuCut]:
    """All cuts of a pass in `ranks` parts; repeated work only where there is none."""
    cuts = []
    sizes = {d.name: d.size for n in op.nests for d in n.dims}
    widths = {(a.position, k): width for nest in op.nests for a in nest.reads for k, width in a.halo}
    for dim, (reads, writes) in splits(op.nests).items():
        if sizes[dim] % ranks:
            continue
        halo = 0.0
        for p, part in reads.items():
            surface = operand_elements(op, p, sizes) / sizes[dim]
            halo += 2 * (ranks - 1) * widths.get((p, part.dim), 0) * surface * item_bytes
        parts = [
            tuple(side.get(p, REPLICATED) for p in range(count))
            for side, count in ((reads, len(op.reads)), (writes, len(op.writes)))
        ]
        cuts.append(TofuCut(dim, parts[0], parts[1], halo))
    if not cuts:
        cuts.append(TofuCut("", (REPLICATED,) * len(op.reads), (REPLICATED,) * len(op.writes)))
    return cuts


def operand_elements(op: Pass, read: int, sizes: Mapping[str, int], *, written: bool = False) -> float:
    """Elements of an operand in one group: the product of the dimensions that index it, windows by their results."""
    for nest in op.nests:
        for access in nest.writes if written else nest.reads:
            if access.position == read:
                whole = {d.name for d in nest.dims if d.kind is DimKind.WHOLE}
                windows = {k for k, _ in access.halo}
                return float(math.prod(
                    sizes[n] for k, names in enumerate(access.dims) for n in names
                    if not (k in windows and n in whole)
                ))  # fmt: skip
    return 0.0


def moved_bytes(rest: Part, used: Part, ranks: int, byte_count: float, *, written: bool = False) -> float:
    """Bytes that all ranks fetch to use a tensor that rests as `rest` as `used`, or to bring a result to rest."""
    if written and used == PARTIAL:
        return byte_count * (ranks - 1) * (1 if rest.cuts else 2)
    have, want = (used, rest) if written else (rest, used)
    if not have.cuts or have == want:
        return 0.0
    return byte_count * (ranks - 1) / (ranks if want.cuts else 1)


def cut_bytes(op: Pass, cut: TofuCut, rests: Sequence[Part], ranks: int, item_bytes: float) -> float:
    """Bytes that all ranks move in one pass, given how its tensors rest (reads first, then writes)."""
    sizes = {d.name: d.size for n in op.nests for d in n.dims}
    total = cut.halo_bytes
    for p, used in enumerate(cut.reads):
        total += moved_bytes(rests[p], used, ranks, item_bytes * operand_elements(op, p, sizes))
    for p, used in enumerate(cut.writes):
        elements = operand_elements(op, p, sizes, written=True)
        total += moved_bytes(rests[len(op.reads) + p], used, ranks, item_bytes * elements, written=True)
    return total


@dataclass(frozen=True, slots=True)
class TofuStep:
    """One step of the recursion.

    Attributes:
        ranks: number of parts that the step makes of each part.
        groups: number of parts before the step.
        bytes: bytes that one group moves.
        rests: by tensor name, its part.
        cuts: by pass key, the dimension that is cut.
    """

    ranks: int
    groups: int
    bytes: float
    rests: Mapping[str, Part]
    cuts: Mapping[str, str]

    @property
    def total_bytes(self) -> float:
        """Bytes that all groups move."""
        return self.groups * self.bytes


@dataclass(frozen=True, slots=True)
class TofuPlan:
    """The result of the recursion.

    Attributes:
        steps: the steps in order.
    """

    steps: tuple[TofuStep, ...]

    @property
    def total_bytes(self) -> float:
        """Bytes moved in one forward and backward pass by all workers together."""
        return float_sum(step.total_bytes for step in self.steps)

    def layout(self, name: str) -> TensorLayout:
        """Layout of a tensor, one part a step; a tensor that the recursion does not know is replicated."""
        return tuple(step.rests.get(name, REPLICATED) for step in self.steps)


def prime_factors(ranks: int) -> tuple[int, ...]:
    """Prime factors of a number of workers, smallest first.

    >>> prime_factors(12)
    (2, 2, 3)
    """
    factors, left, p = [], ranks, 2
    while left > 1:
        while left % p == 0:
            factors.append(p)
            left //= p
        p += 1
    return tuple(factors)


def _elementwise(op: Pass) -> bool:
    """Whether all full-size operands and results are indexed alike by plain dimensions."""
    if len(op.nests) != 1 or op.nests[0].matrix_flops:
        return False
    nest = op.nests[0]
    dims = nest.writes[0].dims
    plain = all(len(names) == 1 for names in dims) and all(d.kind is DimKind.PARALLEL for d in nest.dims)
    return plain and len(nest.dims) == len(dims)


def coarsen(graph: Graph, forward: Mapping[int, Pass]) -> dict[str, str]:
    """The group of each tensor: one for an element-wise operator, or for equal operators that share a weight."""
    pairs: list[tuple[str, str]] = []
    shared: dict[tuple[object, ...], Pass] = {}
    for i, op in forward.items():
        pairs += [(name, name) for name in (*op.reads, *op.writes)]
        if _elementwise(op):
            nest = op.nests[0]
            same_index = [op.reads[a.position] for a in nest.reads if a.dims == nest.writes[0].dims]
            names = [n for n in (*same_index, *op.writes) if graph.tensors[n].kind is not TensorKind.CONSTANT]
            pairs += [(names[0], name) for name in names[1:]]
        weights = tuple(n for n in op.reads if graph.tensors[n].kind is TensorKind.PARAMETER)
        if weights:
            key = (graph.nodes[i].op, weights, tuple(graph.tensors[n].shape for n in (*op.reads, *op.writes)))
            first = shared.setdefault(key, op)
            pairs += zip((*first.reads, *first.writes), (*op.reads, *op.writes), strict=True)
    return group_leaders(pairs)


class _Recursion:
    """The shapes and loop nests of one part after the steps so far."""

    def __init__(self, graph: Graph, passes: list[Pass], groups: Mapping[str, str], item_bytes: float) -> None:
        self.passes, self.item_bytes = passes, item_bytes
        names = sorted({n for op in passes for n in (*op.reads, *op.writes)})
        self.free = {n for n in names if graph.tensors[n].kind in (TensorKind.INPUT, TensorKind.CONSTANT)}
        self.shapes = {n: list(graph.tensors[n].shape) for n in names}
        self.root = {n: groups.get(n, n) for n in names}
        self.roots = sorted({self.root[n] for n in names if n not in self.free})
        self.index = {r: v for v, r in enumerate(self.roots)}

    def rests(self, root: str, ranks: int) -> list[Part]:
        """Cuts that all tensors of a group allow; replicated only where there is none."""
        members = [n for n, r in self.root.items() if r == root and n not in self.free]
        rank = min(len(self.shapes[n]) for n in members)
        parts = [Part(d) for d in range(rank) if all(self.shapes[n][d] % ranks == 0 for n in members)]
        return parts or [REPLICATED]

    def table(self, op: Pass, ranks: int, rests: Mapping[str, list[Part]]) -> tuple[Factor, np.ndarray, list[TofuCut]]:
        """Least bytes of a pass for each combination of its tensors' parts, and the cut that reaches it."""
        cuts = cuts_of(op, ranks, self.item_bytes)
        names = [*op.reads, *op.writes]
        bound = [self.root[n] for n in names if n not in self.free]
        shape = [len(rests[r]) for r in bound]
        best, which = np.full(shape, math.inf), np.zeros(shape, dtype=np.int64)
        for at in np.ndindex(*shape):
            picked = iter(at)
            given = [None if n in self.free else rests[self.root[n]][next(picked)] for n in names]
            for c, cut in enumerate(cuts):
                wanted = [p if p is not None else u for p, u in zip(given, (*cut.reads, *cut.writes), strict=True)]
                cost = cut_bytes(op, cut, wanted, ranks, self.item_bytes)
                if cost < best[at]:
                    best[at], which[at] = cost, c
        return factor([self.index[r] for r in bound], best), which, cuts

    def step(self, ranks: int, groups: int) -> TofuStep:
        """Take the best step and shrink shapes and nests to one part."""
        rests = {r: self.rests(r, ranks) for r in self.roots}
        sizes = [len(rests[r]) for r in self.roots]
        tables = [self.table(op, ranks, rests) for op in self.passes]
        total, choices = minimise(sizes, [t for t, _, _ in tables])
        part_of = {n: rests[r][choices[self.index[r]]] for n, r in self.root.items() if n not in self.free}
        cuts, left = {}, []
        for op, (_, which, options) in zip(self.passes, tables, strict=True):
            at = tuple(choices[self.index[self.root[n]]] for n in (*op.reads, *op.writes) if n not in self.free)
            cut = options[int(which[at])]
            cuts[op.key] = cut.dim
            left.append(replace(op, nests=tuple(shrink(n, cut.dim, ranks) for n in op.nests)) if cut.dim else op)
        for name, part in part_of.items():
            if part.cuts:
                self.shapes[name][part.dim] //= ranks
        self.passes = left
        return TofuStep(ranks, groups, total, part_of, cuts)


def tofu_plan(
    graph: Graph, ranks: int | Sequence[int], *, nodes: Sequence[int] | None = None, item_bytes: float = 4.0
) -> TofuPlan:
    """Tofu's recursion on a graph or some of its nodes.

    Args:
        graph: the model.
        ranks: workers (cut by their prime factors), or the parts of each step.
        nodes: indices of the nodes, all by default.
        item_bytes: bytes an element.
    """
    members = list(range(len(graph.nodes))) if nodes is None else list(nodes)
    specs, wanted = graph_specs(graph), needs_gradient(graph)
    forward: dict[int, Pass] = {}
    passes: list[Pass] = []
    for i in members:
        node_passes = passes_of(graph, i, specs[i], wanted)
        if node_passes:
            forward[i] = node_passes[0]
            passes += node_passes
    recursion = _Recursion(graph, passes, coarsen(graph, forward), item_bytes)
    steps: list[TofuStep] = []
    for p in prime_factors(ranks) if isinstance(ranks, int) else ranks:
        steps.append(recursion.step(p, math.prod(s.ranks for s in steps)))
    return TofuPlan(tuple(steps))


def _nearest(candidates: Sequence[Strategy], wanted: Sequence[str]) -> Strategy:
    """The strategy with the wanted cuts, else the one that agrees on the most axes."""
    return max(
        candidates,
        key=lambda s: (sum(bool(a == b) for a, b in zip(s.splits, wanted, strict=True)), -candidates.index(s)),
    )


@SEARCHES.entry("tofu")
def tofu(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Tofu's plan on the axes of a mesh, priced like any other decision; a gradient is cut like its tensor."""
    graph, mesh = setting.graph, setting.mesh
    plan = tofu_plan(graph, mesh.sizes, nodes=setting.members, item_bytes=setting.item_bytes)
    facts, decision = GraphFacts.of(setting), dict[str, Choice]()
    for i in setting.members:
        node = graph.nodes[i]
        wanted = [step.cuts.get(node.key, "") for step in plan.steps]
        options = replace(setting.options, interleaved=False)
        call = OpCall.of(graph, node)
        candidates = allowed(
            strategies(call, facts.specs[i], mesh, setting.item_bytes, options), call, facts.forbidden[i]
        )
        decision[f"op:{node.key}"] = _nearest(candidates, wanted)
        for name in (*node.inputs, *node.outputs):
            if name:
                _rest(decision, graph.tensors[name], plan, name in facts.carrying)
    return ShardingAnswer.of(setting, decision, memory_bytes)


def _rest(decision: dict[str, Choice], tensor: Tensor, plan: TofuPlan, gradient: bool) -> None:
    if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT) or tensor.name in decision:
        return
    decision[tensor.name] = resting_as(tensor, plan.layout(tensor.name), gradient=gradient)

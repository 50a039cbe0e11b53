"""Tofu: every tensor cut, one mesh axis after another, so that the bytes fetched and reduced are fewest.

Partition-n-reduce: an operator is cut along one dimension of its loop nest; a worker fetches what it lacks of its
operands and, where the dimension was reduced, partial results are added. One step cuts everything in p parts; the next
step does the same inside each part, on what the operators of one part work on. Step i costs `groups_i * delta_i` bytes,
groups being the parts made so far. Taking the best step each time is optimal where these never fall from step to step
(Wang, Huang, Li, EuroSys 2019, theorem 1); `TofuPlan.monotone` says whether they do.

Coarsening: a tensor and its gradient are cut alike, so forward and backward are one group; tensors that an element-wise
operator joins are cut alike; so are those of equal operators that share a weight (unrolled time steps). What is left is
nearly a chain, and its dynamic program is the elimination of one variable after another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.graph import Graph, Tensor, TensorKind
from planner.operators import DimKind, OpCall, graph_specs, needs_gradient
from planner.sharding.choices import shrink
from planner.sharding.elimination import Factor, factor, minimise
from planner.sharding.layout import REPLICATED, Part, TensorLayout
from planner.sharding.limits import allowed
from planner.sharding.named_dims import Groups
from planner.sharding.passes import (
    Cut,
    Pass,
    cut_bytes,
    cuts_of,
    passes_of,
)
from planner.sharding.problem import Choice, Facts, Setting
from planner.sharding.resting import resting_as
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.strategies import Strategy, strategies


@dataclass(frozen=True, slots=True)
class TofuStep:
    """One step of the recursion.

    Attributes:
        ranks: parts that everything is cut in.
        groups: parts there were before.
        bytes: bytes that one group moves.
        rests: how each tensor is cut, by name.
        cuts: dimension that each pass is cut along, by key.
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
    """What the recursion found.

    Attributes:
        steps: in order.
        groups: variables left after coarsening.
        tensors: tensors before it.
    """

    steps: tuple[TofuStep, ...]
    groups: int
    tensors: int

    @property
    def total_bytes(self) -> float:
        """Bytes moved in one forward and backward pass by all workers together."""
        return sum(step.total_bytes for step in self.steps)

    @property
    def monotone(self) -> bool:
        """Whether no step moves less than the one before, the condition under which the plan is optimal."""
        totals = [step.total_bytes for step in self.steps]
        return all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(totals))

    def layout(self, name: str) -> TensorLayout:
        """Layout of a tensor, one part a step; one that the recursion does not know is whole."""
        return tuple(step.rests.get(name, REPLICATED) for step in self.steps)


def prime_factors(ranks: int) -> tuple[int, ...]:
    """Prime factors of a number of workers, smallest first.

    >>> prime_factors(12)
    (2, 2, 3)
    """
    found, left, p = [], ranks, 2
    while left > 1:
        while left % p == 0:
            found.append(p)
            left //= p
        p += 1
    return tuple(found)


def _elementwise(one: Pass) -> bool:
    """Whether all full-size operands and results are indexed alike by plain dimensions."""
    if len(one.nests) != 1 or one.nests[0].matrix_flops:
        return False
    nest = one.nests[0]
    dims = nest.writes[0].dims
    plain = all(len(names) == 1 for names in dims) and all(d.kind is DimKind.PARALLEL for d in nest.dims)
    return plain and len(nest.dims) == len(dims)


def coarsen(graph: Graph, forward: Mapping[int, Pass]) -> Groups[str]:
    """Joins tensors of element-wise operators, and of equal operators that share a weight."""
    groups = Groups[str]()
    shared: dict[tuple[object, ...], Pass] = {}
    for i, one in forward.items():
        for name in (*one.reads, *one.writes):
            groups.root(name)
        if _elementwise(one):
            nest = one.nests[0]
            alike = [one.reads[a.position] for a in nest.reads if a.dims == nest.writes[0].dims]
            names = [n for n in (*alike, *one.writes) if graph.tensors[n].kind is not TensorKind.CONSTANT]
            for name in names[1:]:
                groups.join(names[0], name)
        weights = tuple(n for n in one.reads if graph.tensors[n].kind is TensorKind.PARAMETER)
        if weights:
            key = (graph.nodes[i].op, weights, tuple(graph.tensors[n].shape for n in (*one.reads, *one.writes)))
            first = shared.setdefault(key, one)
            for a, b in zip((*first.reads, *first.writes), (*one.reads, *one.writes), strict=True):
                groups.join(a, b)
    return groups


class _Recursion:
    """Sizes left after the steps done."""

    def __init__(self, graph: Graph, passes: list[Pass], groups: Groups[str], item_bytes: float) -> None:
        self.passes, self.item_bytes = passes, item_bytes
        names = sorted({n for one in passes for n in (*one.reads, *one.writes)})
        self.free = {n for n in names if graph.tensors[n].kind in (TensorKind.INPUT, TensorKind.CONSTANT)}
        self.shapes = {n: list(graph.tensors[n].shape) for n in names}
        self.root = {n: groups.root(n) for n in names}
        self.roots = sorted({self.root[n] for n in names if n not in self.free})
        self.index = {r: v for v, r in enumerate(self.roots)}

    def rests(self, root: str, ranks: int) -> list[Part]:
        """Cuts of a group that all its tensors allow; whole only where none is."""
        members = [n for n, r in self.root.items() if r == root and n not in self.free]
        rank = min(len(self.shapes[n]) for n in members)
        parts = [Part(d) for d in range(rank) if all(self.shapes[n][d] % ranks == 0 for n in members)]
        return parts or [REPLICATED]

    def table(self, one: Pass, ranks: int, rests: Mapping[str, list[Part]]) -> tuple[Factor, np.ndarray, list[Cut]]:
        """Least bytes of a pass for every way its tensors may rest, and which cut that is."""
        cuts = cuts_of(one, ranks, self.item_bytes)
        names = [*one.reads, *one.writes]
        bound = [self.root[n] for n in names if n not in self.free]
        shape = [len(rests[r]) for r in bound]
        best, which = np.full(shape, math.inf), np.zeros(shape, dtype=np.int64)
        for at in np.ndindex(*shape):
            picked = iter(at)
            given = [None if n in self.free else rests[self.root[n]][next(picked)] for n in names]
            for c, cut in enumerate(cuts):
                wanted = [p if p is not None else u for p, u in zip(given, (*cut.reads, *cut.writes), strict=True)]
                cost = cut_bytes(one, cut, wanted, ranks, self.item_bytes)
                if cost < best[at]:
                    best[at], which[at] = cost, c
        return factor([self.index[r] for r in bound], best), which, cuts

    def step(self, ranks: int, groups: int) -> TofuStep:
        """The best step, after which sizes are what one part has."""
        rests = {r: self.rests(r, ranks) for r in self.roots}
        sizes = [len(rests[r]) for r in self.roots]
        tables = [self.table(one, ranks, rests) for one in self.passes]
        total, chosen = minimise(sizes, [t for t, _, _ in tables])
        rest = {n: rests[r][chosen[self.index[r]]] for n, r in self.root.items() if n not in self.free}
        cuts, left = {}, []
        for one, (_, which, options) in zip(self.passes, tables, strict=True):
            at = tuple(chosen[self.index[self.root[n]]] for n in (*one.reads, *one.writes) if n not in self.free)
            cut = options[int(which[at])]
            cuts[one.key] = cut.dim
            left.append(replace(one, nests=tuple(shrink(n, cut.dim, ranks) for n in one.nests)) if cut.dim else one)
        for name, part in rest.items():
            if part.cuts:
                self.shapes[name][part.dim] //= ranks
        self.passes = left
        return TofuStep(ranks, groups, total, rest, cuts)


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
        found = passes_of(graph, i, specs[i], wanted)
        if found:
            forward[i] = found[0]
            passes += found
    recursion = _Recursion(graph, passes, coarsen(graph, forward), item_bytes)
    steps: list[TofuStep] = []
    for p in prime_factors(ranks) if isinstance(ranks, int) else ranks:
        steps.append(recursion.step(p, math.prod(s.ranks for s in steps)))
    return TofuPlan(tuple(steps), len(recursion.roots), len(recursion.shapes) - len(recursion.free))


def _nearest(found: Sequence[Strategy], wanted: Sequence[str]) -> Strategy:
    """The strategy with those cuts, else the one that agrees on most axes."""
    return max(found, key=lambda s: (sum(a == b for a, b in zip(s.splits, wanted, strict=True)), -found.index(s)))


@SEARCHES.entry("tofu")
def tofu(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Tofu's plan on the axes of a mesh, priced like every other plan; a gradient follows its forward cut.

    Raises:
        InfeasibleError: the plan does not fit the memory.
    """
    graph, mesh = setting.graph, setting.mesh
    plan = tofu_plan(graph, mesh.sizes, nodes=setting.members, item_bytes=setting.item_bytes)
    facts, decision = Facts.of(setting), dict[str, Choice]()
    for i in setting.members:
        node = graph.nodes[i]
        wanted = [step.cuts.get(node.key, "") for step in plan.steps]
        options = replace(setting.options, interleaved=False)
        call = OpCall.of(graph, node)
        found = allowed(strategies(call, facts.specs[i], mesh, setting.item_bytes, options), call, facts.forbidden[i])
        decision[f"op:{node.key}"] = _nearest(found, wanted)
        for name in (*node.inputs, *node.outputs):
            if name:
                _rest(decision, graph.tensors[setting.tied.get(name, name)], plan, name in facts.carrying)
    return ShardingAnswer.of(setting, decision, memory_bytes, "recursion", states=plan.groups, fixed="Tofu's plan")


def _rest(decision: dict[str, Choice], tensor: Tensor, plan: TofuPlan, gradient: bool) -> None:
    if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT) or tensor.name in decision:
        return
    decision[tensor.name] = resting_as(tensor, plan.layout(tensor.name), gradient=gradient)

"""Context parallelism for long sequences: one mesh axis cuts the steps of every activation, attention included.

The axis is the one called `context`, else the last. On it every activation that has steps is cut along them and no
weight is cut while it is used, so that products, norms and sums need nothing from other ranks. Attention either hands
keys and values around in a ring or gathers them, whichever is faster (`context`), or always uses the ring
(`context-ring`): both send the same bytes, the ring in more and smaller messages, but it never holds more than two
pieces of keys and values, and its messages can hide behind work, which is not modelled. Weights' gradients are summed
over the axis, or their states cut over it. All other axes are free. Liu et al. 2023 (ring attention); Korthikanti et
al., MLSys 2023 is what it is compared with: there the tensor axis cuts steps outside of the products only.

Causal masks: the prices of `planner.costs` count the whole score matrix, and each rank is charged for all of its rows.
That is the work of the busiest rank of contiguous chunks, the last one, up to half a block. `busiest_share` says what
kernels that skip masked blocks would make of it, with contiguous chunks and with chunks dealt in pairs.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from planner.errors import InfeasibleError, UsageError
from planner.graph import TensorKind
from planner.operators import JointCut, OpCall, graph_specs, rule_of
from planner.sharding.choices import Means
from planner.sharding.forbidden import split_refusals
from planner.sharding.formulate import formulate
from planner.sharding.layout import TensorLayout
from planner.sharding.named_dims import NamedDims, named_dims
from planner.sharding.problem import Choice, Setting
from planner.sharding.resting import TensorChoice
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.ilp import fastest
from planner.sharding.strategies import Strategy

AXIS = "context"
"""Name of the mesh axis that cuts the steps, where the mesh has one of that name."""


class CausalOrder(StrEnum):
    """Which steps a rank of the ring holds."""

    CONTIGUOUS = "contiguous"
    """Rank r of n the r-th of n chunks."""
    PAIRED = "paired"
    """Rank r of n the r-th and the r-th last of 2 n chunks: every rank has early and late steps."""


def busiest_share(ranks: int, order: CausalOrder) -> float:
    """Part of the score matrix that a causal ring takes as long as, masked blocks skipped, ranks in lockstep.

    Contiguous: the diagonal block is half full, at each later hop some rank has a full block: (n - 1/2) / n^2.
    Paired: two of four quarters at every hop: 1 / (2 n), which is the even share of the half below the diagonal.

    Raises:
        UsageError: fewer than one rank.
    """
    if ranks < 1:
        raise UsageError(f"a ring of {ranks} ranks", hint="write a positive number of ranks")
    return (ranks - 0.5) / ranks**2 if order is CausalOrder.CONTIGUOUS else 0.5 / ranks


def context_axis(setting: Setting) -> int:
    """Index of the axis that cuts the steps."""
    names = setting.mesh.names
    return names.index(AXIS) if AXIS in names else len(names) - 1


def steps_dim(setting: Setting, dims: NamedDims) -> str:
    """The name that the dimension of steps goes by: what most activations `[batch, steps, width]` have second.

    Raises:
        InfeasibleError: no activation has such a dimension.
    """
    graph = setting.graph
    found: Counter[str] = Counter()
    for i in setting.members:
        for name in graph.nodes[i].outputs:
            if name in graph.tensors and len(graph.tensors[name].shape) == 3:
                found[dims.of.get((name, 1), "")] += 1
    found.pop("", None)
    if not found:
        raise InfeasibleError(
            "no activation has a dimension of steps to cut", hint="context parallelism is for sequence models"
        )
    return found.most_common(1)[0][0]


class _Rule:
    """What the context axis may do."""

    def __init__(self, setting: Setting, ring: bool) -> None:
        self.setting, self.graph, self.axis = setting, setting.graph, context_axis(setting)
        self.ring = ring
        self.specs = graph_specs(setting.graph)
        self.dims = named_dims(setting.graph, setting.members, self.specs, setting.tied)
        self.steps = steps_dim(setting, self.dims)

    def cut(self, name: str) -> int:
        """The dimension of an activation that the axis cuts: its first one of steps (queries, of scores); -1 if none.

        Steps that do not divide are not cut.
        """
        tensor, ranks = self.graph.tensors[name], self.setting.mesh.sizes[self.axis]
        names = self.dims.tensor(name, len(tensor.shape))
        for k, (dim, size) in enumerate(zip(names, tensor.shape, strict=True)):
            if dim == self.steps and size > 1 and (size % ranks == 0 or self.setting.options.padded):
                return k
        return -1

    def strategy(self, i: int, strategy: Strategy) -> bool:
        """Whether an operator follows: results cut along steps, weights whole."""
        node = self.graph.nodes[i]
        if self.ring and rule_of(node.op).joint is JointCut.RING and strategy.splits[self.axis] != Means.RING:
            return False
        for p, layout in strategy.writes:
            if p < len(node.outputs) and node.outputs[p] in self.graph.tensors:
                want = self.cut(node.outputs[p])
                if (layout[self.axis].dim != want) if want >= 0 else layout[self.axis].cuts:
                    return False
        reads = ((node.inputs[p], layout) for p, layout in strategy.reads if p < len(node.inputs) and node.inputs[p])
        return not any(
            self.graph.tensors[name].kind is TensorKind.PARAMETER and layout[self.axis].cuts for name, layout in reads
        )

    def reasons(self, i: int) -> str:
        """What speaks against cuts of an operator on the axis."""
        call = OpCall.of(self.graph, self.graph.nodes[i])
        found = split_refusals(call, self.specs[i], self.setting.mesh.sizes[self.axis], self.setting.options)
        return f" ({'; '.join(found.values())})" if found else ""

    def rests(self, name: str, layout: TensorLayout) -> bool:
        """Whether an activation rests cut along its steps."""
        want = self.cut(name)
        return layout[self.axis].dim == want if want >= 0 else True


@SEARCHES.entry("context")
def context(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The fastest layouts within memory in which one axis cuts the steps; the bound holds for such layouts.

    Raises:
        InfeasibleError: no dimension of steps, an operator that cannot be cut along it, or too little memory.
    """
    return _search(setting, memory_bytes, ring=False)


@SEARCHES.entry("context-ring")
def context_ring(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The same with every fused attention on the axis as a ring; attention written out gathers its keys all the same.

    Raises:
        InfeasibleError: as `context`, and an attention that has no ring (a cache, keys of another length).
    """
    return _search(setting, memory_bytes, ring=True)


def _search(setting: Setting, memory_bytes: float | None, *, ring: bool) -> ShardingAnswer:
    rule = _Rule(setting, ring)
    by_key = {f"op:{setting.graph.nodes[i].key}": i for i in setting.members}

    def allows(name: str, choice: Choice) -> bool:
        if isinstance(choice, Strategy):
            return rule.strategy(by_key[name], choice)
        return not isinstance(choice, TensorChoice) or rule.rests(name, choice.value)

    def refused(name: str) -> InfeasibleError:
        key, reasons = name.removeprefix("op:"), rule.reasons(by_key[name]) if name in by_key else ""
        return InfeasibleError(
            f"{key} cannot be cut along its steps on {setting.mesh.sizes[rule.axis]} ranks{reasons}",
            where=key,
            hint="use a context axis that divides the number of steps",
        )

    return fastest(
        setting,
        formulate(setting).narrowed(allows, refused),
        memory_bytes,
        method="steps cut on one axis",
        what="layout with the steps cut",
        hint="cut weights on another axis, or allow sharded states",
    )

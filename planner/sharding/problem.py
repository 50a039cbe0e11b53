"""Sharding of a graph, or of a block of one, on a mesh: a choice for each operator, tensor and weight.

An operator chooses a strategy. A tensor chooses one resting layout for its value and one for its gradient. The producer
brings the tensor to its resting layout and each reader takes it from there, so three readers that need it replicated
gather it once, and three partial gradients are added before they are reduced. A weight chooses resting layouts of its
working copy, its gradient and its optimizer state: replicated, cut as the operator cuts it (tensor parallelism), cut
and gathered when needed (ZeRO-3), only gradient and state cut (ZeRO-2), only the state cut (ZeRO-1). All costs are read
off the tables of layout changes; nothing below depends on these names.

Time is the sum of work, exchanges inside operators and changes of layout. Nothing overlaps but the sends of ring
attention on a context axis. An operand that backward needs rests in the layout of its tensor and is brought to the
layout of the operator again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from planner.graph import Graph, Tensor, TensorKind
from planner.operators import OpSpec, SavedOptions, graph_specs, kept_pairs, needs_gradient, saved_for_backward
from planner.operators.types import SavedBytes
from planner.sharding.choices import Options
from planner.sharding.elimination import Factor
from planner.sharding.layout import PARTIAL, REPLICATED
from planner.sharding.limits import forbidden_dims
from planner.sharding.mesh import Mesh
from planner.sharding.resting import StateBytes, TensorChoice, WeightChoice
from planner.sharding.strategies import Strategy
from planner.sums import float_sum

Choice = Strategy | TensorChoice | WeightChoice


WorkSeconds = Callable[[float, int], tuple[np.ndarray, np.ndarray]]
"""Float64 [nodes] seconds, forward and backward, at a share of each node's work and in pieces (`Profile.at`)."""

CostTables = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], tuple[Factor, ...]]
"""Costs of a sharding problem: by variable, float64 [choices] seconds of its own and bytes that a rank keeps; tables of
seconds over two variables."""


class Load(NamedTuple):
    """What a rank does of an operator: a share of its work, the products of a pass in so many pieces."""

    share: float
    forward: int = 1
    backward: int = 1


@dataclass(frozen=True)
class Setting:
    """A sharding task: graph, mesh, prices and limits.

    Attributes:
        graph: the model.
        mesh: the mesh.
        nodes: indices of the nodes to shard, in order; all by default.
        forward_s: forward seconds of each node of the graph on one device, summed over the runs of a node that repeats;
            None where only communication counts.
        backward_s: backward seconds of each node, likewise.
        saved: by node of the graph, what it keeps for backward (`Profile.saved`); by default what its description says.
        item_bytes: bytes of a floating-point element of an activation or weight.
        state: bytes of a parameter.
        micro_batches: forward and backward passes a step; the update of the weights is paid once a step.
        options: which splits count.
        sharded_states: whether weights may rest in other layouts than operators use (ZeRO).
        annotations: layouts that the user asks for, by tensor name or pattern (`planner.sharding.searches.gshard`);
            read by the GShard searches only.
        work_s: seconds of each node, forward and backward, when each does a share of its work in pieces
            (`Profile.at`); it agrees with `forward_s` and `backward_s` at share 1. By default times are proportional to
            the share.
        forbidden: splits that are ruled out (`planner.sharding.limits`).
    """

    graph: Graph
    mesh: Mesh
    nodes: tuple[int, ...] = ()
    forward_s: np.ndarray | None = None
    backward_s: np.ndarray | None = None
    saved: Sequence[tuple[SavedBytes, ...]] | None = None
    item_bytes: float = 2.0
    state: StateBytes = field(default_factory=StateBytes)
    micro_batches: int = 1
    options: Options = field(default_factory=Options)
    sharded_states: bool = True
    annotations: Mapping[str, str] = field(default_factory=dict)
    work_s: WorkSeconds | None = None
    forbidden: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes to shard."""
        return self.nodes or tuple(range(len(self.graph.nodes)))

    def bytes_of(self, tensor: Tensor) -> float:
        """Bytes of an element of a tensor."""
        return self.item_bytes if tensor.dtype.is_float else tensor.dtype.bits / 8

    def state_of(self, tensor: Tensor) -> StateBytes:
        """Bytes of an element of a weight; the working copy of an integer weight has the bits of its type."""
        return self.state if tensor.dtype.is_float else replace(self.state, weight=tensor.dtype.bits / 8)

    def nodes_s(self, share: float, pieces: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each node of the graph, forward and backward, when each does a share of its work in pieces."""
        if self.work_s is not None and share != 1.0:
            return self.work_s(share, pieces)
        none = np.zeros(len(self.graph.nodes))
        forward, backward = (none if a is None else a for a in (self.forward_s, self.backward_s))
        return (forward, backward) if share == 1.0 else (share * forward, share * backward)

    def rank_s(self, i: int, load: Load) -> tuple[float, float]:
        """Seconds of one node, forward and backward, on a rank that does so much of it. O(1) where work is known."""
        forward, backward = self.nodes_s(load.share, load.forward)[0], self.nodes_s(load.share, load.backward)[1]
        return float(forward[i]), float(backward[i])

    def load(self, i: int, strategy: Strategy) -> Load:
        """What a rank does of a node under a strategy.

        A product with a weight that ranks share is run in pieces where the software does so (`Stack.product_pieces`):
        forward beside the gather of its operand or the scatter of its result, the product towards its operand beside
        the gather of the result's gradient. Others run whole beside what they hide. (Transformer Engine,
        `module/base.py`, `initialize_ub`: ring exchange and pipeline against bulk.)
        """
        most = self.mesh.cluster.stack.product_pieces if self.mesh.cluster else 1
        node = self.graph.nodes[i]
        if most == 1 or not graph_specs(self.graph)[i].matrix_flops:
            return Load(strategy.share)
        weights = [layout for p, layout in strategy.reads if self._is_weight(node.inputs[p])]
        cut = [
            a for a, parts in enumerate(zip(*weights, strict=True))
            if not self.mesh.axes[a].role.deals and any(part != REPLICATED for part in parts)
        ]  # fmt: skip
        gathered = min(self.mesh.ranks_along(cut), most)
        if any(layout[a] == PARTIAL for _, layout in strategy.writes for a in cut):
            return Load(strategy.share, most, gathered)
        return Load(strategy.share, gathered)

    def _is_weight(self, name: str) -> bool:
        return bool(name) and self.graph.tensors[name].kind is TensorKind.PARAMETER

    def beside_s(self, work_s: float, repeat: int) -> float:
        """Seconds of one run of an operator behind which the sends of a ring can hide.

        Only a mesh with axes that deal out steps overlaps them with work; elsewhere it is 0.
        """
        return work_s / max(1, repeat) if self.options.roles else 0.0


@dataclass(frozen=True)
class ShardingProblem:
    """The choices of each variable, and their costs as tables, which are made when one is asked for.

    Attributes:
        setting: the sharding task.
        names: names of the variables: `op:` and the key of a node, or the name of a tensor.
        choices: by variable.
        linked: the two variables of each link, ascending.
        make: makes the tables.
    """

    setting: Setting
    names: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    linked: tuple[tuple[int, int], ...]
    make: Callable[[], CostTables]

    @functools.cached_property
    def _tables(self) -> CostTables:
        return self.make()

    @property
    def seconds(self) -> tuple[np.ndarray, ...]:
        """By variable, float64 [choices] of its own time."""
        return self._tables[0]

    @property
    def bytes(self) -> tuple[np.ndarray, ...]:
        """By variable, float64 [choices] of memory that a rank keeps."""
        return self._tables[1]

    @property
    def links(self) -> tuple[Factor, ...]:
        """Tables of seconds over two variables, in the order of `linked`."""
        return self._tables[2]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each variable."""
        return tuple(map(len, self.choices))

    def restricted(self, keep: Mapping[int, np.ndarray]) -> ShardingProblem:
        """The problem with only some choices of some variables.

        Args:
            keep: by variable index, the indices of the choices to keep.
        """

        def part(values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(a[keep[v]] if v in keep else a for v, a in enumerate(values))

        def cut(f: Factor) -> Factor:
            table = f.table
            for at, v in enumerate(f.variables):
                table = np.take(table, keep[v], axis=at) if v in keep else table
            return Factor(f.variables, table)

        def tables() -> CostTables:
            links = (f if keep.keys().isdisjoint(f.variables) else cut(f) for f in self.links)
            return part(self.seconds), part(self.bytes), tuple(links)

        choices = (tuple([c[i] for i in keep[v].tolist()]) if v in keep else c for v, c in enumerate(self.choices))
        return replace(self, choices=tuple(choices), make=tables)

    def factors(self, price_s_per_byte: float = 0.0) -> list[Factor]:
        """All costs as tables; memory counts at a price in seconds a byte."""
        table_of: dict[tuple[int, int], np.ndarray] = {}
        own_tables = []
        for v, (time, kept) in enumerate(zip(self.seconds, self.bytes, strict=True)):
            key = (id(time), id(kept))
            if key not in table_of:
                table_of[key] = time + price_s_per_byte * kept
            own_tables.append(Factor((v,), table_of[key]))
        return own_tables + list(self.links)

    def memory(self, choices: Sequence[int]) -> float:
        """Bytes that a rank keeps under one choice of each variable."""
        return float(float_sum(kept[c] for kept, c in zip(self.bytes, choices, strict=True)))

    def decision(self, choices: Sequence[int]) -> dict[str, Choice]:
        """The choice of each variable, by name."""
        return {name: options[c] for name, options, c in zip(self.names, self.choices, choices, strict=True)}


def rest_of(choice: Choice) -> TensorChoice | WeightChoice:
    """The resting layouts that a choice of a tensor or weight says.

    Raises:
        TypeError: the choice is a strategy of an operator.
    """
    if isinstance(choice, Strategy):
        raise TypeError("an operator rests nowhere")
    return choice


def weight_gathers(spec: OpSpec) -> float:
    """How often an operator needs a weight in a forward and a backward pass: a product needs it in both."""
    return 2.0 if spec.matrix_flops else 1.0


@dataclass(frozen=True)
class GraphFacts:
    """Facts of a graph that many settings share (equal graph and kept storages).

    Attributes:
        specs: description of each node.
        carrying: names of the tensors that carry a gradient.
        saved: by node, what it keeps for backward.
        forbidden: by node, dimensions that must not be cut.
    """

    specs: tuple[OpSpec, ...]
    carrying: frozenset[str]
    saved: Sequence[tuple[SavedBytes, ...]]
    forbidden: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(setting: Setting) -> GraphFacts:
        """The facts of a setting's graph; O(nodes of the graph)."""
        specs = graph_specs(setting.graph)
        forbidden = forbidden_dims(setting.graph, setting.forbidden)
        saved = setting.saved
        if saved is None:
            saved = saved_for_backward(setting.graph, specs, width=setting.item_bytes, options=SavedOptions(loss=False))
        return GraphFacts(specs, needs_gradient(setting.graph), saved, forbidden)

    def kept(self, nodes: Sequence[int]) -> dict[str, int]:
        """Bytes of each storage that some nodes keep; the largest size that any of them says."""
        bytes_by_storage: dict[str, int] = {}
        for storage, byte_count in kept_pairs(self.saved, nodes):
            bytes_by_storage[storage] = max(bytes_by_storage.get(storage, 0), byte_count)
        return bytes_by_storage

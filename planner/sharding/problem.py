"""Sharding a graph, or a block of one, on a mesh as a choice for each operator, tensor and weight.

Operators choose a strategy. A tensor chooses one layout to rest in, for its value and for its gradient; it comes there
from its producer and goes from there to each reader, so three readers that want it whole gather it once, and three
partial gradients are added before they are reduced. A weight chooses where its working copy, its gradient and its
optimizer state rest: whole, cut like the operator cuts it (tensor parallelism), cut and gathered when needed (ZeRO-3),
only gradient and state cut (ZeRO-2), only the state (ZeRO-1). What all this costs is read off the tables of layout
changes alone; nothing below knows these names.

Time is the sum of work, exchanges inside operators and changes of layout: nothing is assumed to overlap but the sends
of a ring of attention on a context axis. An operand that backward needs rests in its tensor's layout and is brought to
the operator's again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.graph import Graph, Tensor
from planner.operators import OpSpec, graph_specs, needs_gradient
from planner.operators.types import SavedBytes
from planner.sharding.choices import Options
from planner.sharding.elimination import Factor
from planner.sharding.limits import forbidden_dims
from planner.sharding.mesh import Mesh
from planner.sharding.resting import StateBytes, TensorChoice, WeightChoice
from planner.sharding.strategies import Strategy

Choice = Strategy | TensorChoice | WeightChoice


@dataclass(frozen=True)
class Setting:
    """What a sharding problem is about.

    Attributes:
        graph: the model.
        mesh: the mesh.
        nodes: indices of the nodes to shard, in order; all by default.
        forward_s: seconds of each node of the graph run whole on one device, all runs of a node that repeats together;
            None where only communication counts.
        backward_s: the same for backward.
        saved: by node of the graph, what it keeps for backward (`Profile.saved`); by default what its description says.
        item_bytes: bytes a floating-point element of an activation or weight takes.
        state: bytes a parameter takes.
        micro_batches: forward and backward passes a step; the weights' update is paid once a step.
        options: which splits count.
        tied: results that must rest like another tensor (a block's output like its input, when blocks repeat).
        sharded_states: whether weights may rest otherwise than they are used (ZeRO).
        annotations: layouts wished by the user, by tensor name or pattern (`planner.sharding.annotations`); only the
            searches that say so look at them.
        work_s: seconds of each node, forward and backward, when each does a share of its work (`Profile.at`); it
            agrees with `forward_s` and `backward_s` at share 1. By default times are proportional to the share.
        forbidden: splits that are ruled out (`planner.sharding.limits`).
    """

    graph: Graph
    mesh: Mesh
    nodes: tuple[int, ...] = ()
    forward_s: np.ndarray | None = None
    backward_s: np.ndarray | None = None
    saved: tuple[tuple[SavedBytes, ...], ...] | None = None
    item_bytes: float = 2.0
    state: StateBytes = field(default_factory=StateBytes)
    micro_batches: int = 1
    options: Options = field(default_factory=Options)
    tied: Mapping[str, str] = field(default_factory=dict)
    sharded_states: bool = True
    annotations: Mapping[str, str] = field(default_factory=dict)
    work_s: Callable[[float], tuple[np.ndarray, np.ndarray]] | None = None
    forbidden: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes to shard."""
        return self.nodes or tuple(range(len(self.graph.nodes)))

    def bytes_of(self, tensor: Tensor) -> float:
        """Bytes an element of a tensor takes."""
        return self.item_bytes if tensor.dtype.is_float else tensor.dtype.bits / 8

    def nodes_s(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """[nodes of the graph] seconds, forward and backward, when each node does a share of its work."""
        if self.work_s is not None and share != 1.0:
            return self.work_s(share)
        none = np.zeros(len(self.graph.nodes))
        forward, backward = (none if a is None else share * a for a in (self.forward_s, self.backward_s))
        return forward, backward

    def node_s(self, i: int, share: float) -> tuple[float, float]:
        """Seconds of one node, forward and backward, on a rank that does a share of it. O(1) where work is known."""
        if self.work_s is not None and share != 1.0:
            forward, backward = self.work_s(share)
            return float(forward[i]), float(backward[i])
        whole = self.forward_s, self.backward_s
        forward_s, backward_s = (0.0 if a is None else share * float(a[i]) for a in whole)
        return forward_s, backward_s

    def beside_s(self, work_s: float, repeat: int) -> float:
        """Of an operator's work in a pass, what a run of it can hide a ring's sends behind: on a mesh whose axes deal
        out steps kernels work piece by piece; other searches let nothing overlap."""
        return work_s / max(1, repeat) if self.options.roles else 0.0


@dataclass(frozen=True)
class ShardingProblem:
    """Choices and what they cost.

    Attributes:
        setting: what it is about.
        names: of the variables: `op:` and a node's key, or a tensor's name.
        choices: of each variable.
        seconds: float64 [choices] of each variable, its own time.
        bytes: float64 [choices] of each variable, what it keeps in memory.
        links: tables of seconds over two variables.
    """

    setting: Setting
    names: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    seconds: tuple[np.ndarray, ...]
    bytes: tuple[np.ndarray, ...]
    links: tuple[Factor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each variable."""
        return tuple(map(len, self.choices))

    def restricted(self, keep: Mapping[int, np.ndarray]) -> ShardingProblem:
        """The problem with only those choices of some variables, by variable index."""

        def part(values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(a[keep[v]] if v in keep else a for v, a in enumerate(values))

        def cut(f: Factor) -> Factor:
            table = f.table
            for at, v in enumerate(f.variables):
                table = np.take(table, keep[v], axis=at) if v in keep else table
            return Factor(f.variables, table)

        return replace(
            self,
            choices=tuple(
                tuple(c[i] for i in keep[v].tolist()) if v in keep else c for v, c in enumerate(self.choices)
            ),
            seconds=part(self.seconds),
            bytes=part(self.bytes),
            links=tuple(f if keep.keys().isdisjoint(f.variables) else cut(f) for f in self.links),
        )

    def factors(self, price_s_per_byte: float = 0.0) -> list[Factor]:
        """All costs as tables; memory at a price."""
        known: dict[tuple[int, int], np.ndarray] = {}
        own = []
        for v, (time, kept) in enumerate(zip(self.seconds, self.bytes, strict=True)):
            alike = (id(time), id(kept))
            if alike not in known:
                known[alike] = time + price_s_per_byte * kept
            own.append(Factor((v,), known[alike]))
        return own + list(self.links)

    def memory(self, chosen: Sequence[int]) -> float:
        """Bytes that a rank keeps under a choice of each variable."""
        return float(sum(kept[c] for kept, c in zip(self.bytes, chosen, strict=True)))

    def decision(self, chosen: Sequence[int]) -> dict[str, Choice]:
        """The choices by variable name."""
        return {name: options[c] for name, options, c in zip(self.names, self.choices, chosen, strict=True)}


def rest_of(choice: Choice) -> TensorChoice | WeightChoice:
    """Where a tensor or weight rests, if that is what a choice is about."""
    if isinstance(choice, Strategy):
        raise TypeError("an operator rests nowhere")
    return choice


def weight_gathers(spec: OpSpec) -> float:
    """How often an operator needs a weight in one forward and backward pass: a product needs it in both."""
    return 2.0 if spec.matrix_flops else 1.0


def _carrying(setting: Setting) -> frozenset[str]:
    """Names of the tensors that carry a gradient; one that rests like another carries one if the other does."""
    found = needs_gradient(setting.graph)
    if setting.tied:
        found |= {other for name, other in setting.tied.items() if name in found}
        found |= {name for name, other in setting.tied.items() if other in found}
    return found


def _saved(setting: Setting, specs: Sequence[OpSpec]) -> tuple[tuple[SavedBytes, ...], ...]:
    """What each node of the graph keeps for backward, by storage."""
    if setting.saved is not None:
        return setting.saved
    found = []
    for node, spec in zip(setting.graph.nodes, specs, strict=True):
        kept = []
        for s in spec.saved:
            if s.source == "extra":
                kept.append(SavedBytes(f"{node.key}#{s.position}", s.byte_count))
                continue
            name = (node.inputs if s.source == "input" else node.outputs)[s.position]
            if name:
                tensor = setting.graph.tensors[name]
                kept.append(SavedBytes(name, int(tensor.elements * setting.bytes_of(tensor))))
        found.append(tuple(kept))
    return tuple(found)


@dataclass(frozen=True)
class Facts:
    """What a graph says of itself, found once for many settings of the same graph, tied tensors and kept storages.

    Attributes:
        specs: description of each node.
        carrying: names of the tensors that carry a gradient.
        saved: by node, what it keeps for backward.
        forbidden: by node, dimensions that must not be cut.
    """

    specs: tuple[OpSpec, ...]
    carrying: frozenset[str]
    saved: tuple[tuple[SavedBytes, ...], ...]
    forbidden: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(setting: Setting) -> Facts:
        """The facts of a setting's graph; O(nodes of the graph)."""
        specs = graph_specs(setting.graph)
        forbidden = forbidden_dims(setting.graph, setting.forbidden)
        return Facts(specs, _carrying(setting), _saved(setting, specs), forbidden)

    def kept(self, nodes: Sequence[int]) -> dict[str, int]:
        """Bytes of each storage that some nodes keep, the most that any of them says."""
        found: dict[str, int] = {}
        for i in nodes:
            for s in self.saved[i]:
                found[s.storage] = max(found.get(s.storage, 0), s.byte_count)
        return found

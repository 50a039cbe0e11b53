"""Sharding a graph, or a block of one, on a mesh as a choice for each operator, tensor and weight.

Operators choose a strategy. A tensor chooses one layout to rest in, for its value and for its gradient; it comes there
from its producer and goes from there to each reader, so three readers that want it whole gather it once, and three
partial gradients are added before they are reduced. A weight chooses where its working copy, its gradient and its
optimizer state rest: whole, cut like the operator cuts it (tensor parallelism), cut and gathered when needed (ZeRO-3),
only gradient and state cut (ZeRO-2), only the state (ZeRO-1). What all this costs is read off the tables of layout
changes alone; nothing below knows these names.

Time is the sum of work, exchanges inside operators and changes of layout: nothing is assumed to overlap. An operand
that backward needs rests in its tensor's layout and is brought to the operator's again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.graph import Graph, Node, Tensor, TensorKind
from planner.operators import OpCall, OpSpec, graph_specs, needs_gradient
from planner.operators.types import SavedBytes
from planner.sharding.block_tags import block_tags
from planner.sharding.choices import Options
from planner.sharding.elimination import Factor, factor
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, shard_elements
from planner.sharding.mesh import Mesh
from planner.sharding.reshard import ReshardTable, reshard_table
from planner.sharding.resting import StateBytes, TensorChoice, WeightChoice, tensor_choices, weight_choices
from planner.sharding.strategies import Strategy, exchange_s, strategies

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

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes to shard."""
        return self.nodes or tuple(range(len(self.graph.nodes)))

    def bytes_of(self, tensor: Tensor) -> float:
        """Bytes an element of a tensor takes."""
        return self.item_bytes if tensor.dtype.is_float else tensor.dtype.bits / 8


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
        chosen = [keep.get(v, np.arange(n)) for v, n in enumerate(self.sizes)]
        return replace(
            self,
            choices=tuple(tuple(c[i] for i in k) for c, k in zip(self.choices, chosen, strict=True)),
            seconds=tuple(t[k] for t, k in zip(self.seconds, chosen, strict=True)),
            bytes=tuple(b[k] for b, k in zip(self.bytes, chosen, strict=True)),
            links=tuple(
                f if keep.keys().isdisjoint(f.variables)
                else Factor(f.variables, f.table[np.ix_(*(chosen[v] for v in f.variables))])
                for f in self.links
            ),
        )  # fmt: skip

    def factors(self, price_s_per_byte: float = 0.0, tilt: float = 0.0) -> list[Factor]:
        """All costs as tables; memory at a price, which rises by the fraction `tilt` from first to last variable."""
        count = max(1, len(self.names))
        own = [
            Factor((v,), time + price_s_per_byte * (1 + tilt * (v / count - 0.5)) * kept)
            for v, (time, kept) in enumerate(zip(self.seconds, self.bytes, strict=True))
        ]
        return own + list(self.links)

    def memory(self, chosen: Sequence[int]) -> float:
        """Bytes that a rank keeps under a choice of each variable."""
        return float(sum(kept[c] for kept, c in zip(self.bytes, chosen, strict=True)))

    def decision(self, chosen: Sequence[int]) -> dict[str, Choice]:
        """The choices by variable name."""
        return {name: options[c] for name, options, c in zip(self.names, self.choices, chosen, strict=True)}


def resting_value(choice: Choice) -> TensorLayout:
    """The layout in which readers find a tensor or weight."""
    if isinstance(choice, WeightChoice):
        return choice.weight
    if isinstance(choice, TensorChoice):
        return choice.value
    raise TypeError("an operator rests nowhere")


def resting_gradient(choice: Choice) -> TensorLayout:
    """The layout in which the gradients of all readers are added up."""
    if isinstance(choice, (TensorChoice, WeightChoice)) and choice.gradient is not None:
        return choice.gradient
    raise TypeError("no gradient rests here")


def weight_gathers(spec: OpSpec) -> float:
    """How often an operator needs a weight in one forward and backward pass: a product needs it in both."""
    return 2.0 if spec.matrix_flops else 1.0


def carrying_of(setting: Setting) -> frozenset[str]:
    """Names of the tensors that carry a gradient; one that rests like another carries one if the other does."""
    found = set(needs_gradient(setting.graph))
    found |= {other for name, other in setting.tied.items() if name in found}
    return frozenset(found | {name for name, other in setting.tied.items() if other in found})


def saved_of(setting: Setting, specs: Sequence[OpSpec]) -> tuple[tuple[SavedBytes, ...], ...]:
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
    """

    specs: tuple[OpSpec, ...]
    carrying: frozenset[str]
    saved: tuple[tuple[SavedBytes, ...], ...]

    @staticmethod
    def of(setting: Setting) -> Facts:
        """The facts of a setting's graph; O(nodes of the graph)."""
        specs = graph_specs(setting.graph)
        return Facts(specs, carrying_of(setting), saved_of(setting, specs))

    def kept(self, nodes: Sequence[int]) -> dict[str, int]:
        """Bytes of each storage that some nodes keep, the most that any of them says."""
        found: dict[str, int] = {}
        for i in nodes:
            for s in self.saved[i]:
                found[s.storage] = max(found.get(s.storage, 0), s.byte_count)
        return found


class _Builder:
    """Collects variables and tables."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        self.setting, self.graph, self.mesh = setting, setting.graph, setting.mesh
        self.specs, self.carrying, self.saved = facts.specs, facts.carrying, facts.saved
        self.kept = facts.kept(setting.members)
        self.members = frozenset(setting.members)
        self.tags = block_tags(setting.graph, setting.members, self.specs) if setting.options.interleaved else {}
        self.names: list[str] = []
        self.choices: list[tuple[Choice, ...]] = []
        self.seconds: list[np.ndarray] = []
        self.bytes: list[np.ndarray] = []
        self.links: list[Factor] = []
        self.index: dict[str, int] = {}
        self.gathers: dict[str, float] = {}

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
            interleaved=tuple(sorted(self.tags.get(tensor.name, ()))),
        )

    def resting(self, name: str) -> int | None:
        """The variable of a tensor or weight, made at its first use; None for inputs and constants."""
        name = self.setting.tied.get(name, name)
        tensor = self.graph.tensors[name]
        if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT):
            return None
        if name not in self.index:
            tags = sorted(self.tags.get(name, ()))
            if tensor.kind is TensorKind.PARAMETER:
                self._weight(tensor, tags)
            else:
                self._tensor(tensor, tags)
        return self.index[name]

    def ends(self, tensor: Tensor) -> bool:
        """Whether nobody here reads the tensor, so that it must be whole or cut; a loss may stay a partial sum."""
        tied = tensor.name in self.setting.tied or tensor.name in self.setting.tied.values()
        readers = set(self.graph.consumers.get(tensor.name, ())) & self.members
        return not readers and not tied and tensor.elements > 1

    def _tensor(self, tensor: Tensor, tags: Sequence[Part]) -> None:
        carries, padded = tensor.name in self.carrying, self.setting.options.padded
        found = tensor_choices(tensor.shape, self.mesh.sizes, tuple(tags), gradient=carries, padded=padded)
        if self.ends(tensor):
            found = tuple(c for c in found if PARTIAL not in c.value)
        each = self.kept.get(tensor.name, 0) / max(1, tensor.elements)
        sizes = self.mesh.sizes
        held = np.asarray([each * shard_elements(tensor.shape, c.value, sizes) for c in found])
        self.add(tensor.name, found, np.zeros(len(found)), held)

    def _weight(self, tensor: Tensor, tags: Sequence[Part]) -> None:
        trained = tensor.name in self.carrying
        padded, states = self.setting.options.padded, self.setting.sharded_states
        found = weight_choices(
            tensor.shape, self.mesh.sizes, tuple(tags), trained=trained, sharded_states=states, padded=padded
        )
        state, sizes, table = self.setting.state, self.mesh.sizes, self.table(tensor)

        def elements(layout: TensorLayout) -> int:
            return shard_elements(tensor.shape, layout, sizes)

        each = state.weight if tensor.dtype.is_float else tensor.dtype.bits / 8
        held = np.asarray([
            elements(c.weight) * each
            + (elements(c.gradient) * state.gradient + elements(c.optimizer) * state.optimizer) * trained
            for c in found
        ])  # fmt: skip
        update = np.zeros(len(found))
        if trained:
            place = table.index
            ends = [(place[c.gradient], place[c.optimizer], place[c.weight]) for c in found]
            update = np.asarray([table.seconds[g, o] + table.seconds[o, w] for g, o, w in ends])
        self.add(tensor.name, found, update / self.setting.micro_batches, held)

    def expressible(self, node: Node, found: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Strategies whose interleaved cuts its tensors consider too."""
        known = {n: {Part(p.dim, p.blocks) for p in self.tags.get(n, ())} for n in (*node.inputs, *node.outputs)}

        def fits(names: Sequence[str], layouts: Sequence[tuple[int, TensorLayout]]) -> bool:
            parts = [(names[p], part) for p, layout in layouts if p < len(names) for part in layout]
            return all(part.blocks == 1 or part in known[name] for name, part in parts)

        return tuple(s for s in found if fits(node.inputs, s.reads) and fits(node.outputs, s.writes))

    def operator(self, i: int) -> None:
        """One node: its strategies, and links to everything it reads and writes."""
        node, spec, setting = self.graph.nodes[i], self.specs[i], self.setting
        call = OpCall.of(self.graph, node)
        blocks = tuple(sorted({p.blocks for n in (*node.inputs, *node.outputs) for p in self.tags.get(n, ())}))
        options = setting.options
        if blocks:
            options = Options(options.padded, options.coupled, options.partial, options.replicate, True, blocks)
        found = self.expressible(node, strategies(call, spec, self.mesh, setting.item_bytes, options))
        work = sum(float(a[i]) for a in (setting.forward_s, setting.backward_s) if a is not None)
        trains = any(n in self.carrying for n in node.inputs)
        seconds = np.asarray([
            s.share * work
            + node.repeat * exchange_s(self.mesh, s, backward=False)
            + (node.repeat * exchange_s(self.mesh, s, backward=True) if trains else 0.0)
            for s in found
        ])  # fmt: skip
        extra = sum(s.byte_count for s in self.saved[i] if s.storage not in self.graph.tensors)
        own = self.add(f"op:{node.key}", found, seconds, np.asarray([s.share * extra for s in found]))
        whole = (REPLICATED,) * len(self.mesh.axes)
        for p, name in enumerate(node.inputs):
            other = self.resting(name) if name else None
            if other is not None:
                parts = [(dict(s.reads).get(p, whole), dict(s.read_gradients).get(p, whole)) for s in found]
                self._link_read(own, other, name, i, parts, spec)
        for p, name in enumerate(node.outputs):
            other = self.resting(name) if name and name in self.graph.tensors else None
            if other is not None:
                parts = [(dict(s.writes).get(p, whole), dict(s.write_gradients).get(p, whole)) for s in found]
                self._link_write(own, other, name, parts)

    def _link_read(
        self, own: int, other: int, name: str, i: int, parts: list[tuple[TensorLayout, TensorLayout]], spec: OpSpec
    ) -> None:
        tensor = self.graph.tensors[name]
        table, rests = self.table(tensor), self.choices[other]
        place = table.index
        reads, gradients = [place[r] for r, _ in parts], [place[g] for _, g in parts]
        again = any(s.storage == name for s in self.saved[i])
        times = weight_gathers(spec) if tensor.kind is TensorKind.PARAMETER else 1.0 + again
        values = [place[layout] for layout in map(resting_value, rests)]
        cost = times * table.seconds[np.ix_(values, reads)].T
        if name in self.carrying:
            ends = [place[layout] for layout in map(resting_gradient, rests)]
            cost = cost + table.seconds[np.ix_(gradients, ends)]
        self.links.append(factor((own, other), cost * self.graph.nodes[i].repeat))

    def _link_write(self, own: int, other: int, name: str, parts: list[tuple[TensorLayout, TensorLayout]]) -> None:
        table, rests = self.table(self.graph.tensors[name]), self.choices[other]
        place = table.index
        values = [place[layout] for layout in map(resting_value, rests)]
        cost = table.seconds[np.ix_([place[w] for w, _ in parts], values)]
        if name in self.carrying:
            starts = [place[layout] for layout in map(resting_gradient, rests)]
            cost = cost + table.seconds[np.ix_(starts, [place[g] for _, g in parts])].T
        self.links.append(factor((own, other), cost))


def formulate(setting: Setting, facts: Facts | None = None) -> ShardingProblem:
    """All choices and costs of a setting.

    Args:
        setting: what to shard.
        facts: `Facts.of` a setting of the same graph, to spare finding them again.

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

"""One block to be sharded, and what a decision about it costs (a point); points that nothing else beats."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import Block, Chain, Graph
from planner.sharding.formulate import formulate
from planner.sharding.judge import Checked, Communication, evaluate
from planner.sharding.layout import PARTIAL, REPLICATED, TensorLayout, shard_elements
from planner.sharding.problem import Choice, Facts, Setting, ShardingProblem
from planner.sharding.resting import Boundaries, TensorChoice, WeightChoice, canonical_layout
from planner.sharding.strategies import Strategy


@dataclass(frozen=True)
class InnerPoint:
    """One way to shard a block, a micro-batch on one rank.

    Attributes:
        boundary: how the block's boundary tensors lie.
        forward_s: seconds of the forward pass, communication included.
        backward_s: seconds of the backward pass without recomputation, communication included.
        step_s: seconds of communication once an update.
        communication_s: of forward and backward together, what is communication.
        sent_bytes: bytes that a rank sends, forward and backward.
        parameter_elements: elements of trained weight tensors that a rank holds.
        saved_bytes: bytes that a rank keeps for backward.
        checkpoint_bytes: bytes of the block's inputs on a rank: what recomputation keeps.
        workspace_bytes: transient bytes of the operator that needs most.
        decision: strategy of each operator (`op:` and its key), layouts of each tensor and weight.
        communication: every change of layout that moves something; exchanges inside operators are in the strategies.
        saved: storages kept and their bytes on a rank.
        checkpoints: input tensors and their bytes on a rank.
        weights: trained weight tensors and the part of each that a rank holds.
    """

    boundary: Boundaries
    forward_s: float
    backward_s: float
    step_s: float
    communication_s: float
    sent_bytes: float
    parameter_elements: float
    saved_bytes: float
    checkpoint_bytes: float
    workspace_bytes: float
    decision: Mapping[str, Choice]
    communication: tuple[Communication, ...]
    saved: tuple[tuple[str, float], ...]
    checkpoints: tuple[tuple[str, float], ...]
    weights: tuple[tuple[str, float], ...]

    @property
    def figures(self) -> tuple[float, ...]:
        """What points are compared by, all the smaller the better."""
        return (self.forward_s, self.backward_s, self.step_s, self.parameter_elements, self.saved_bytes)


@dataclass(frozen=True)
class BlockView:
    """A block as the inner search sees it.

    Attributes:
        members: its nodes, side nodes first.
        inputs: tensors it reads that other blocks write.
        outputs: tensors it writes that later blocks read.
        names: names of its tensors and kept storages in order of first use.
    """

    members: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    names: tuple[str, ...]

    @staticmethod
    def of(chain: Chain, graph: Graph, b: int, facts: Facts) -> BlockView:
        """The view of block b; O(its nodes)."""
        block = chain.blocks[b]
        members = (*block.side, *block.nodes)
        used = dict.fromkeys(n for i in members for n in (*graph.nodes[i].inputs, *graph.nodes[i].outputs) if n)
        made = {n for i in members for n in graph.nodes[i].outputs}
        inputs = tuple(n for n in chain.crossing[b] if n in used and n not in made)
        outputs = tuple(n for n in chain.crossing[b + 1] if n in made)
        kept = [s for i in members for s in facts.saved[i]]
        names = tuple(dict.fromkeys([*used, *(s.storage for s in kept)]))
        return BlockView(members, inputs, outputs, names)

    def key(
        self, block: Block, graph: Graph, facts: Facts, trained: Mapping[str, Sequence[tuple[str, int]]]
    ) -> tuple[object, ...]:
        """Equal for blocks that are the same problem but for the seconds of their operators (`PriceMarks`).

        Args:
            block: the block of the view.
            graph, facts: as for `of`.
            trained: by weight tensor, the parameters it comes from and their elements.
        """
        members = self.members
        number = {name: k for k, name in enumerate(self.names)}
        places = {graph.nodes[i].key: k for k, i in enumerate(members)}
        used = [name for name in self.names if name in graph.tensors]
        parameters: dict[str, int] = {}

        def mark(storage: str) -> object:
            owner, _, what = storage.rpartition("#")
            return (places[owner], what) if owner in places else number[storage]

        return (
            block.signature,
            len(block.side),
            tuple([number[n] for n in self.inputs]),
            tuple([number[n] for n in self.outputs]),
            tuple([n in facts.carrying for n in used]),
            tuple([graph.tensors[n].shape for n in used]),
            tuple([(mark(s.storage), s.byte_count) for i in members for s in facts.saved[i]]),
            tuple([facts.forbidden[i] for i in members]),
            tuple([(parameters.setdefault(p, len(parameters)), n) for w in used for p, n in trained.get(w, ())]),
        )


@dataclass(frozen=True)
class BlockProblem:
    """A block to be sharded.

    Attributes:
        setting: its nodes on the mesh.
        facts: of the whole graph.
        ends: the block, with its boundary tensors.
        workspace: [nodes of the graph] transient bytes of each node run whole.
        checked: strategies that the judge found legal so far.
    """

    setting: Setting
    facts: Facts
    ends: BlockView
    workspace: np.ndarray
    checked: set[Checked] = field(default_factory=set)

    @functools.cached_property
    def free(self) -> ShardingProblem:
        """The problem without fixed boundaries."""
        return formulate(self.setting, self.facts)

    def forget_tables(self) -> None:
        """Free the memory of the tables; they are made anew where they are asked for."""
        self.__dict__.pop("free", None)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of an operator's work that strategies leave a rank, largest first."""
        chosen = {id(each): each for each in self.free.choices}.values()
        return tuple(sorted({c.share for each in chosen for c in each if isinstance(c, Strategy)}, reverse=True))

    def canonical(self, name: str, boundary: Boundaries) -> TensorLayout:
        """Where a boundary tensor lies."""
        tensor, padded = self.setting.graph.tensors[name], self.setting.options.padded
        return canonical_layout(tensor, boundary, self.setting.mesh.sizes, padded=padded)

    def lies(self, name: str, boundary: Boundaries, decision: Mapping[str, Choice]) -> TensorLayout:
        """Where a tensor that comes from another block lies: as decided, or canonically if no operator reads it."""
        rest = decision.get(name)
        return rest.value if isinstance(rest, TensorChoice) else self.canonical(name, boundary)

    def ends_under(self, boundaries: Sequence[Boundaries]) -> dict[int, np.ndarray]:
        """By variable of a boundary tensor, its choice under each treatment: value and gradient lie canonically."""
        found = {}
        place = {name: v for v, name in enumerate(self.free.names)}
        for name in (*self.ends.inputs, *self.ends.outputs):
            if name in place:
                layouts = [self.canonical(name, boundary) for boundary in boundaries]
                wanted = [TensorChoice(at, at if name in self.facts.carrying else None) for at in layouts]
                offered = self.free.choices[place[name]]
                found[place[name]] = np.asarray([offered.index(choice) for choice in wanted])
        return found


def undominated(found: Sequence[InnerPoint]) -> list[InnerPoint]:
    """Points that no other is at least as good as in every figure; of equal ones the first."""
    figures = np.asarray([p.figures for p in found])
    slack = 1e-9 * np.abs(figures).max(axis=0)
    kept = []
    for i, own in enumerate(figures):
        no_worse = np.all(figures <= own + slack, axis=1)
        better = no_worse & np.any(figures < own - slack, axis=1)
        if not better.any() and not no_worse[:i].any():
            kept.append(found[i])
    return kept


def point(block: BlockProblem, boundary: Boundaries, decision: Mapping[str, Choice]) -> InnerPoint:
    """What a decision makes of a block.

    Raises:
        InfeasibleError: the judge finds it illegal, which is a defect.
    """
    setting, graph = block.setting, block.setting.graph
    sizes = setting.mesh.sizes
    verdict = evaluate(setting, decision, facts=block.facts, checked=block.checked)
    if verdict.violations:
        raise InfeasibleError(f"a sharded block is not legal: {verdict.violations[0]}", hint="report this as a defect")
    weights = tuple(
        (name, shard_elements(graph.tensors[name].shape, choice.weight, sizes) / max(1, graph.tensors[name].elements))
        for name, choice in decision.items()
        if isinstance(choice, WeightChoice) and name in block.facts.carrying
    )
    saved = _saved(block, boundary, decision)
    checkpoints = tuple((n, _bytes_at(setting, n, block.lies(n, boundary, decision))) for n in block.ends.inputs)
    moves_s = sum(c.seconds for c in verdict.communication if c.phase != "step")
    step_bytes = sum(c.sent_bytes for c in verdict.communication if c.phase == "step")
    return InnerPoint(
        boundary=boundary,
        forward_s=verdict.forward_s,
        backward_s=verdict.backward_s,
        step_s=verdict.step_s * setting.micro_batches,
        communication_s=verdict.exchange_s + moves_s,
        sent_bytes=verdict.sent_bytes - step_bytes,
        parameter_elements=sum(part * graph.tensors[name].elements for name, part in weights),
        saved_bytes=sum(size for _, size in saved),
        checkpoint_bytes=sum(size for _, size in checkpoints),
        workspace_bytes=_workspace(block, decision),
        decision=decision,
        communication=tuple(verdict.communication),
        saved=saved,
        checkpoints=checkpoints,
        weights=weights,
    )


def rerun_s(block: BlockProblem, point: InnerPoint, members: Sequence[int]) -> float:
    """Seconds that some operators of a sharded block take when they run forward again, with the exchanges inside them,
    the changes of layout of what they read and make, and the sums of results that others read in parts."""
    setting, graph, run = replace(block.setting, nodes=tuple(members)), block.setting.graph, set(members)
    names = {name for i in members for name in (*graph.nodes[i].inputs, *graph.nodes[i].outputs)}
    names = {setting.tied.get(name, name) for name in names} | {f"op:{graph.nodes[i].key}" for i in members}
    part = {name: choice for name, choice in point.decision.items() if name in names}
    again = evaluate(setting, part, facts=block.facts, checked=block.checked)
    made = (name for i in members for name in graph.nodes[i].outputs)
    left = {name for name in made if not run.intersection(graph.consumers.get(name, ()))}
    in_parts = {name for name in left if _in_parts(point.decision.get(name))}
    summed_s = sum(c.seconds for c in point.communication if c.phase == "forward" and c.tensor in in_parts)
    return again.forward_s + summed_s


def _in_parts(rest: Choice | None) -> bool:
    return isinstance(rest, TensorChoice) and PARTIAL in rest.value


def operand_bytes(block: BlockProblem, point: InnerPoint, node: int, position: int) -> float:
    """Bytes on a rank of a tensor that an operator of a sharded block reads."""
    name = block.setting.graph.nodes[node].inputs[position]
    return _bytes_at(block.setting, name, block.lies(name, point.boundary, point.decision))


def _bytes_at(setting: Setting, name: str, layout: TensorLayout) -> float:
    tensor = setting.graph.tensors[name]
    return setting.bytes_of(tensor) * shard_elements(tensor.shape, layout, setting.mesh.sizes)


def _saved(block: BlockProblem, boundary: Boundaries, decision: Mapping[str, Choice]) -> tuple[tuple[str, float], ...]:
    """Storages that a rank keeps. One that lies in another block goes by the boundary tensor that is a view of it."""
    graph, sizes = block.setting.graph, block.setting.mesh.sizes
    owners: dict[str, float] = {}
    for i in block.setting.members:
        chosen = decision[f"op:{graph.nodes[i].key}"]
        for s in block.facts.saved[i]:
            owners[s.storage] = chosen.share if isinstance(chosen, Strategy) else 1.0

    def part(storage: str) -> float:
        if storage not in graph.tensors:
            return owners[storage]
        tensor, rest = graph.tensors[storage], decision.get(storage)
        if isinstance(rest, TensorChoice):
            return shard_elements(tensor.shape, rest.value, sizes) / max(1, tensor.elements)
        for name in block.ends.inputs:
            view = graph.tensors[name]
            if view.elements == tensor.elements:
                held = shard_elements(view.shape, block.lies(name, boundary, decision), sizes)
                return held / max(1, view.elements)
        return 1.0

    return tuple((s, size * part(s)) for s, size in block.facts.kept(block.setting.members).items())


def _workspace(block: BlockProblem, decision: Mapping[str, Choice]) -> float:
    """Transient bytes of a rank: what the whole operator needs, in proportion to the operands and results it holds."""
    graph, sizes = block.setting.graph, block.setting.mesh.sizes
    most = 0.0
    for i in block.setting.members:
        node, chosen = graph.nodes[i], decision[f"op:{graph.nodes[i].key}"]
        if not block.workspace[i] or not isinstance(chosen, Strategy):
            continue
        reads, writes, whole = dict(chosen.reads), dict(chosen.writes), (REPLICATED,) * len(sizes)
        placed = itertools.chain(
            ((name, reads.get(p, whole)) for p, name in enumerate(node.inputs)),
            ((name, writes.get(p, whole)) for p, name in enumerate(node.outputs)),
        )
        held, total = 0, 0
        for name, layout in placed:
            if name in graph.tensors:
                held += shard_elements(graph.tensors[name].shape, layout, sizes)
                total += graph.tensors[name].elements
        most = max(most, float(block.workspace[i]) * held / max(1, total))
    return most

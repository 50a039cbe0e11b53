"""One block to be sharded, the cost of a decision about it (a point), and the points that no other dominates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import Chain, ChainBlock, Graph
from planner.operators import kept_pairs
from planner.sharding.formulate import formulate
from planner.sharding.judge import Communication, evaluate
from planner.sharding.layout import PARTIAL, REPLICATED, TensorLayout, shard_elements
from planner.sharding.problem import Choice, GraphFacts, Setting, ShardingProblem
from planner.sharding.resting import Boundaries, TensorChoice, WeightChoice, canonical_layout
from planner.sharding.strategies import Strategy
from planner.sums import float_sum

Sizes = tuple[tuple[str, float], ...]
"""Names of tensors or storages, with the size or fraction of each that a rank holds."""


@dataclass(frozen=True)
class InnerPoint:
    """One sharding of a block; figures are of one rank and one micro-batch.

    Attributes:
        boundary: layout of the boundary tensors of the block.
        forward_s: seconds of the forward pass, communication included.
        backward_s: seconds of the backward pass without recomputation, communication included.
        step_s: seconds of communication of an update.
        communication_s: seconds of communication in forward and backward.
        forward_communication_s: those in forward.
        sent_bytes: bytes that a rank sends, forward and backward.
        parameter_elements: elements of trained weight tensors that a rank holds.
        saved_bytes: bytes that a rank keeps for backward.
        waiting_bytes: bytes that stay until the second half of a split backward (`BlockCosts.waiting_bytes`).
        checkpoint_bytes: bytes of the inputs of the block on a rank, which recomputation keeps.
        workspace_bytes: transient bytes of the operator that needs the most.
        decision: strategy of each operator (`op:` and its key), layouts of each tensor and weight.
        communication: every change of layout that moves data; exchanges inside operators are in the strategies.
        saved: storages that are kept, with their bytes on a rank.
        checkpoints: input tensors, with their bytes on a rank.
        weights: trained weight tensors, with the fraction of each that a rank holds.
    """

    boundary: Boundaries
    forward_s: float
    backward_s: float
    step_s: float
    communication_s: float
    forward_communication_s: float
    sent_bytes: float
    parameter_elements: float
    saved_bytes: float
    waiting_bytes: float
    checkpoint_bytes: float
    workspace_bytes: float
    decision: Mapping[str, Choice]
    communication: tuple[Communication, ...]
    saved: Sizes
    checkpoints: Sizes
    weights: Sizes

    @property
    def figures(self) -> tuple[float, ...]:
        """The figures by which points are compared; smaller is better."""
        return (self.forward_s, self.backward_s, self.step_s, self.parameter_elements, self.saved_bytes)


@dataclass(frozen=True)
class BlockView:
    """A block for the inner search.

    Attributes:
        members: its nodes, side nodes first.
        inputs: tensors that it reads and other blocks write.
        outputs: tensors that it writes and later blocks read.
        names: names of its tensors and kept storages, in order of first use.
    """

    members: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    names: tuple[str, ...]

    @staticmethod
    def of(chain: Chain, graph: Graph, b: int, facts: GraphFacts) -> BlockView:
        """The view of block b; O(its nodes)."""
        block = chain.blocks[b]
        members = (*block.side, *block.nodes)
        used = dict.fromkeys(n for i in members for n in (*graph.nodes[i].inputs, *graph.nodes[i].outputs) if n)
        written = {n for i in members for n in graph.nodes[i].outputs}
        inputs = tuple(n for n in chain.crossing[b] if n in used and n not in written)
        outputs = tuple(n for n in chain.crossing[b + 1] if n in written)
        kept = kept_pairs(facts.saved, members)
        names = tuple(dict.fromkeys([*used, *(storage for storage, _ in kept)]))
        return BlockView(members, inputs, outputs, names)

    def key(
        self, block: ChainBlock, graph: Graph, facts: GraphFacts, trained: Mapping[str, Sequence[tuple[str, int]]]
    ) -> tuple[object, ...]:
        """A key that is equal for blocks with equal problems, but for the seconds of operators (`RoundedPrices`).

        Args:
            block: the block of the view.
            graph, facts: as for `of`.
            trained: by weight tensor, the parameters it comes from, with their elements.
        """
        members = self.members
        number = {name: k for k, name in enumerate(self.names)}
        places = {graph.nodes[i].key: k for k, i in enumerate(members)}
        used = [name for name in self.names if name in graph.tensors]
        parameters: dict[str, int] = {}

        def storage_key(storage: str) -> object:
            known = number[storage]
            if storage in graph.tensors:
                return known
            owner, _, position = storage.rpartition("#")
            return (places[owner], position) if owner in places else known

        return (
            block.signature,
            len(block.side),
            tuple(map(number.__getitem__, self.inputs)),
            tuple(map(number.__getitem__, self.outputs)),
            tuple(map(facts.carrying.__contains__, used)),
            tuple(map(graph.shape_of, used)),
            tuple([(storage_key(storage), size) for storage, size in kept_pairs(facts.saved, members)]),
            tuple(map(facts.forbidden.__getitem__, members)),
            tuple([(parameters.setdefault(p, len(parameters)), n) for w in used for p, n in trained.get(w, ())]),
        )


@dataclass(frozen=True)
class BlockProblem:
    """A block to be sharded.

    Attributes:
        setting: the setting with the nodes of the block.
        facts: facts of the full graph.
        ends: the block with its boundary tensors.
        workspace: [nodes of the graph] transient bytes of each node when it is not cut.
    """

    setting: Setting
    facts: GraphFacts
    ends: BlockView
    workspace: np.ndarray

    @functools.cached_property
    def free(self) -> ShardingProblem:
        """The problem with free boundary layouts."""
        return formulate(self.setting, self.facts)

    @property
    def shares(self) -> tuple[tuple[float, int], ...]:
        """Shares of work that the strategies leave a rank and the pieces in which it does them, largest first."""
        named = zip(self.free.names, self.free.choices, strict=True)
        distinct = {id(choices): (name, choices) for name, choices in named}.values()
        node_of = {f"op:{self.setting.graph.nodes[i].key}": i for i in self.setting.members}
        loads = {
            self.setting.load(node_of[name], c)
            for name, choices in distinct
            for c in choices
            if isinstance(c, Strategy)
        }
        return tuple(sorted({(load.share, n) for load in loads for n in load[1:]}, reverse=True))

    def canonical(self, name: str, boundary: Boundaries) -> TensorLayout:
        """Canonical layout of a boundary tensor."""
        tensor, padded = self.setting.graph.tensors[name], self.setting.options.padded
        return canonical_layout(tensor, boundary, self.setting.mesh.sizes, padded=padded)

    def layout_of(self, name: str, boundary: Boundaries, decision: Mapping[str, Choice]) -> TensorLayout:
        """Layout of a tensor from another block: as decided, or canonical if no operator reads it."""
        rest = decision.get(name)
        return rest.value if isinstance(rest, TensorChoice) else self.canonical(name, boundary)

    def ends_under(self, boundaries: Sequence[Boundaries]) -> dict[int, np.ndarray]:
        """By variable of a boundary tensor, its choice under each boundary layout: value and gradient are canonical."""
        choices_of = {}
        index = {name: v for v, name in enumerate(self.free.names)}
        for name in (*self.ends.inputs, *self.ends.outputs):
            if name in index:
                layouts = [self.canonical(name, boundary) for boundary in boundaries]
                wanted = [TensorChoice(layout, layout if name in self.facts.carrying else None) for layout in layouts]
                offered = self.free.choices[index[name]]
                choices_of[index[name]] = np.asarray([offered.index(choice) for choice in wanted])
        return choices_of


def undominated(points: Sequence[InnerPoint]) -> list[InnerPoint]:
    """The points that no other point dominates (is at least as good in every figure); of equal ones the first."""
    figures = np.asarray([p.figures for p in points])
    slack = 1e-9 * np.abs(figures).max(axis=0)
    kept = []
    for i, row in enumerate(figures):
        no_worse = np.all(figures <= row + slack, axis=1)
        better = no_worse & np.any(figures < row - slack, axis=1)
        if not better.any() and not no_worse[:i].any():
            kept.append(points[i])
    return kept


def point(block: BlockProblem, boundary: Boundaries, decision: Mapping[str, Choice]) -> InnerPoint:
    """The point of a decision about a block.

    Raises:
        InfeasibleError: the judge finds the decision illegal, which is a defect.
    """
    setting, graph = block.setting, block.setting.graph
    sizes = setting.mesh.sizes
    verdict = evaluate(setting, decision, facts=block.facts)
    if verdict.violations:
        raise InfeasibleError(f"a sharded block is not legal: {verdict.violations[0]}", hint="report this as a defect")
    weights = tuple(
        (name, shard_elements(graph.tensors[name].shape, choice.weight, sizes) / max(1, graph.tensors[name].elements))
        for name, choice in decision.items()
        if isinstance(choice, WeightChoice) and name in block.facts.carrying
    )
    saved = _saved(block, boundary, decision)
    checkpoints = tuple((n, _bytes_at(setting, n, block.layout_of(n, boundary, decision))) for n in block.ends.inputs)
    moves_s = float_sum(c.seconds for c in verdict.communication if c.phase != "step")
    step_bytes = float_sum(c.sent_bytes for c in verdict.communication if c.phase == "step")
    return InnerPoint(
        boundary=boundary,
        forward_s=verdict.forward_s,
        backward_s=verdict.backward_s,
        step_s=verdict.step_s * setting.micro_batches,
        communication_s=verdict.exchange_s + moves_s,
        forward_communication_s=verdict.forward_communication_s,
        sent_bytes=verdict.sent_bytes - step_bytes,
        parameter_elements=float_sum(part * graph.tensors[name].elements for name, part in weights),
        saved_bytes=float_sum(size for _, size in saved),
        waiting_bytes=_waiting_bytes(block, boundary, decision, dict(saved)),
        checkpoint_bytes=float_sum(size for _, size in checkpoints),
        workspace_bytes=_workspace(block, decision),
        decision=decision,
        communication=tuple(verdict.communication),
        saved=saved,
        checkpoints=checkpoints,
        weights=weights,
    )


def rerun_s(block: BlockProblem, point: InnerPoint, members: Sequence[int]) -> float:
    """Seconds in which some operators of a sharded block run forward again.

    They include exchanges inside the operators, the changes of layout of operands and results, and the reduction of
    results that other operators read as partial sums.
    """
    setting, graph, run = replace(block.setting, nodes=tuple(members)), block.setting.graph, set(members)
    names = {name for i in members for name in (*graph.nodes[i].inputs, *graph.nodes[i].outputs)}
    names |= {f"op:{graph.nodes[i].key}" for i in members}
    part = {name: choice for name, choice in point.decision.items() if name in names}
    rerun = evaluate(setting, part, facts=block.facts)
    results = (name for i in members for name in graph.nodes[i].outputs)
    passed_on = {name for name in results if not run.intersection(graph.consumers.get(name, ()))}
    partial = {name for name in passed_on if _is_partial(point.decision.get(name))}
    summed_s = float_sum(c.seconds for c in point.communication if c.phase == "forward" and c.tensor in partial)
    return rerun.forward_s + summed_s


def _is_partial(rest: Choice | None) -> bool:
    return isinstance(rest, TensorChoice) and PARTIAL in rest.value


def operand_bytes(block: BlockProblem, point: InnerPoint, node: int, position: int) -> float:
    """Bytes on a rank of a tensor that an operator of a sharded block reads."""
    name = block.setting.graph.nodes[node].inputs[position]
    return _bytes_at(block.setting, name, block.layout_of(name, point.boundary, point.decision))


def _bytes_at(setting: Setting, name: str, layout: TensorLayout) -> float:
    tensor = setting.graph.tensors[name]
    return setting.bytes_of(tensor) * shard_elements(tensor.shape, layout, setting.mesh.sizes)


def _saved(block: BlockProblem, boundary: Boundaries, decision: Mapping[str, Choice]) -> Sizes:
    """Storages that a rank keeps, with their bytes; one of another block counts as the boundary tensor viewing it."""
    graph, sizes = block.setting.graph, block.setting.mesh.sizes
    owners: dict[str, float] = {}
    for i in block.setting.members:
        strategy = decision[f"op:{graph.nodes[i].key}"]
        for s in block.facts.saved[i]:
            owners[s.storage] = strategy.share if isinstance(strategy, Strategy) else 1.0

    def part(storage: str) -> float:
        if storage not in graph.tensors:
            return owners[storage]
        tensor, rest = graph.tensors[storage], decision.get(storage)
        if isinstance(rest, TensorChoice):
            return shard_elements(tensor.shape, rest.value, sizes) / max(1, tensor.elements)
        for name in block.ends.inputs:
            view = graph.tensors[name]
            if view.elements == tensor.elements:
                held = shard_elements(view.shape, block.layout_of(name, boundary, decision), sizes)
                return held / max(1, view.elements)
        return 1.0

    return tuple((s, size * part(s)) for s, size in block.facts.kept(block.setting.members).items())


def _waiting_bytes(
    block: BlockProblem, boundary: Boundaries, decision: Mapping[str, Choice], saved: Mapping[str, float]
) -> float:
    """Bytes that a rank's products with weights need for the gradients of these."""
    facts, nodes = block.facts, block.setting.graph.nodes
    products = [i for i in block.setting.members if facts.specs[i].weight_grad_matrix_flops]
    operands = {storage for storage, _ in kept_pairs(facts.saved, products)}
    results = (name for i in products for name in nodes[i].outputs if name)
    gradients = (_bytes_at(block.setting, n, block.layout_of(n, boundary, decision)) for n in results)
    return float_sum(saved[storage] for storage in sorted(operands)) + float_sum(gradients)


def _workspace(block: BlockProblem, decision: Mapping[str, Choice]) -> float:
    """Transient bytes of a rank: those of the uncut operator times the fraction of operands and results it holds."""
    graph, sizes = block.setting.graph, block.setting.mesh.sizes
    peak_bytes = 0.0
    for i in block.setting.members:
        node, strategy = graph.nodes[i], decision[f"op:{graph.nodes[i].key}"]
        if not block.workspace[i] or not isinstance(strategy, Strategy):
            continue
        reads, writes, replicated = dict(strategy.reads), dict(strategy.writes), (REPLICATED,) * len(sizes)
        placed = itertools.chain(
            ((name, reads.get(p, replicated)) for p, name in enumerate(node.inputs)),
            ((name, writes.get(p, replicated)) for p, name in enumerate(node.outputs)),
        )
        held, total = 0, 0
        for name, layout in placed:
            if name in graph.tensors:
                held += shard_elements(graph.tensors[name].shape, layout, sizes)
                total += graph.tensors[name].elements
        peak_bytes = max(peak_bytes, float(block.workspace[i]) * held / max(1, total))
    return peak_bytes

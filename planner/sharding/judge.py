"""The judge of a sharding: its cost and legality, recomputed step by step from the layouts alone.

It shares no table with the searches: every change of layout is priced step by step, and the work and memory of each
operator, tensor and weight are added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graph import Node, Tensor, TensorKind
from planner.hardware import Collective, moved_bytes
from planner.memory import fits
from planner.operators import OpCall, needs_gradient
from planner.sharding.layout import PARTIAL, REPLICATED, TensorLayout, layout_text, refusal, shard_elements
from planner.sharding.limits import allowed
from planner.sharding.mesh import Mesh
from planner.sharding.problem import Choice, GraphFacts, Setting, weight_gathers
from planner.sharding.reshard import ReshardStep, reshard
from planner.sharding.resting import TensorChoice, WeightChoice, summed_along
from planner.sharding.strategies import Strategy, exchange_bytes, exchange_s, strategies
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class Communication:
    """One change of layout of a sharding.

    Attributes:
        tensor: name of the tensor.
        phase: "forward", "backward" or "step" (once an update).
        steps: the collectives, in order.
        times: changes in one forward and backward pass; for "step" the fraction of an update that a micro-batch has.
    """

    tensor: str
    phase: str
    steps: tuple[ReshardStep, ...]
    times: float = 1.0

    @property
    def seconds(self) -> float:
        """Seconds a micro-batch."""
        return self.times * float_sum(step.seconds for step in self.steps)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends a micro-batch."""
        return self.times * float_sum(step.sent_bytes for step in self.steps)


@dataclass
class Verdict:
    """The cost of a sharding.

    Attributes:
        compute_s: seconds of work of one rank, a micro-batch.
        exchange_s: seconds of exchanges inside operators.
        reshard_s: seconds of changes of layout.
        forward_s: seconds of the forward pass, work and communication.
        backward_s: seconds of the backward pass.
        step_s: seconds of communication of an update, the fraction that a micro-batch has.
        forward_communication_s: the part of `forward_s` that is communication.
        sent_bytes: bytes that a rank sends in all of them.
        weight_bytes: weights, gradients and optimizer state that a rank holds.
        activation_bytes: bytes that a rank keeps for backward, a micro-batch.
        violations: what is not legal, as messages.
        communication: every change of layout that moves something.
    """

    compute_s: float = 0.0
    exchange_s: float = 0.0
    reshard_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    forward_communication_s: float = 0.0
    sent_bytes: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    violations: list[str] = field(default_factory=list)
    communication: list[Communication] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch, nothing overlapping."""
        return self.compute_s + self.exchange_s + self.reshard_s

    @property
    def memory_bytes(self) -> float:
        """Weights, states and activations that a rank holds."""
        return self.weight_bytes + self.activation_bytes


class _Judge:
    def __init__(self, setting: Setting, decision: Mapping[str, Choice], facts: GraphFacts) -> None:
        self.setting, self.decision, self.graph = setting, decision, setting.graph
        self.specs, self.carrying, self.saved, self.forbids = facts.specs, facts.carrying, facts.saved, facts.forbidden
        self.kept = facts.kept(setting.members)
        self.figures: defaultdict[str, float] = defaultdict(float)
        self.violations: list[str] = []
        self.communication: list[Communication] = []
        self.replicated = (REPLICATED,) * len(setting.mesh.axes)

    def verdict(self) -> Verdict:
        """All that was added."""
        return Verdict(**self.figures, violations=self.violations, communication=self.communication)

    def add_seconds(self, phase: str, figure: str, seconds: float) -> None:
        """Add seconds of communication to a figure and to a phase: "forward", "backward" or "step"."""
        self.figures[figure] += seconds
        self.figures[f"{phase}_s"] += seconds
        self.figures["forward_communication_s"] += seconds if phase == "forward" else 0.0

    def rest(self, name: str) -> TensorChoice | WeightChoice | None:
        """Resting layouts of a tensor; None for inputs and constants, which have any layout."""
        if self.graph.tensors[name].kind in (TensorKind.INPUT, TensorKind.CONSTANT):
            return None
        rest = self.decision.get(name)
        if not isinstance(rest, (TensorChoice, WeightChoice)):
            self.violations.append(f"{name} has no layout")
            return None
        return rest

    def change_layout(
        self, tensor: Tensor, phase: str, before: TensorLayout, after: TensorLayout, times: float
    ) -> None:
        """Add the costs of `times` changes of layout in a phase."""
        sizes = self.setting.mesh.sizes
        for layout in (before, after)[before == after :]:
            why = refusal(tensor.shape, layout, sizes, padded=self.setting.options.padded)
            if why:
                self.violations.append(f"{tensor.name} as {layout_text(layout)}: {why}")
                return
        if before == after:
            return
        item_bytes, padded = self.setting.bytes_of(tensor), self.setting.options.padded
        steps = reshard(self.setting.mesh, tensor.shape, item_bytes, before, after, padded=padded)
        entry = Communication(tensor.name, phase, steps, times)
        self.add_seconds(phase, "reshard_s", entry.seconds)
        self.figures["sent_bytes"] += entry.sent_bytes
        if entry.sent_bytes:
            self.communication.append(entry)

    def node(self, i: int) -> None:
        """Add the costs of one node, of its operands and of its results."""
        node, setting, figures = self.graph.nodes[i], self.setting, self.figures
        strategy = self.decision.get(f"op:{node.key}")
        if not isinstance(strategy, Strategy):
            self.violations.append(f"{node.key} has no strategy")
            return
        work = setting.rank_s(i, setting.load(i, strategy))
        trains = any(n in self.carrying for n in node.inputs)
        figures["compute_s"] += float_sum(work)
        for phase, seconds in zip(("forward_s", "backward_s"), work, strict=True):
            figures[phase] += seconds
        for backward in (False, True)[: 1 + trains]:
            beside_s = setting.beside_s(work[backward], node.repeat)
            inside = exchange_s(setting.mesh, strategy, backward=backward, beside_s=beside_s) * node.repeat
            self.add_seconds("backward" if backward else "forward", "exchange_s", inside)
            figures["sent_bytes"] += exchange_bytes(setting.mesh, strategy, backward=backward) * node.repeat
        own_bytes = sum(s.byte_count for s in self.saved[i] if s.storage not in self.graph.tensors)
        figures["activation_bytes"] += strategy.share * own_bytes
        self._operands(i, strategy)
        self._results(i, strategy)
        self._legal(i, strategy)

    def _operands(self, i: int, strategy: Strategy) -> None:
        """Add the changes of layout of a node's operands and of their gradients."""
        node = self.graph.nodes[i]
        reads, gradients = dict(strategy.reads), dict(strategy.read_gradients)
        for p, name in enumerate(node.inputs):
            rest = self.rest(name) if name else None
            if rest is None:
                continue
            tensor = self.graph.tensors[name]
            wanted, back = reads.get(p, self.replicated), gradients.get(p, self.replicated)
            saved = any(s.storage == name for s in self.saved[i])
            gathers = weight_gathers(self.specs[i]) if isinstance(rest, WeightChoice) else 1.0 + saved
            self.change_layout(tensor, "forward", rest.value, wanted, node.repeat)
            if gathers > 1:
                again = (gathers - 1) * node.repeat
                self.change_layout(tensor, "backward", rest.value, wanted, again)
            if name in self.carrying and rest.gradient is not None:
                self.change_layout(tensor, "backward", back, rest.gradient, node.repeat)

    def _legal(self, i: int, strategy: Strategy) -> None:
        """Check that the strategy is one that the loop nests of the operator allow."""
        node, setting = self.graph.nodes[i], self.setting
        tags = {part.blocks for _, layout in (*strategy.reads, *strategy.writes) for part in layout} - {1}
        options = replace(setting.options, blocks=tuple(sorted(tags)))
        call = OpCall.of(self.graph, node)
        if strategy not in strategies(call, self.specs[i], setting.mesh, setting.item_bytes, options):
            self.violations.append(f"{node.key} cannot be split as {strategy}")
        if not allowed((strategy,), call, self.forbids[i]):
            self.violations.append(f"{node.key} is split as {strategy}, which is forbidden")

    def _results(self, i: int, strategy: Strategy) -> None:
        node, writes, gradients = self.graph.nodes[i], dict(strategy.writes), dict(strategy.write_gradients)
        for p, name in enumerate(node.outputs):
            if not name or name not in self.graph.tensors:
                continue
            rest = self.rest(name)
            if isinstance(rest, TensorChoice):
                tensor, made = self.graph.tensors[name], writes.get(p, self.replicated)
                self.change_layout(tensor, "forward", made, rest.value, 1.0)
                if name in self.carrying and rest.gradient is not None:
                    back = gradients.get(p, self.replicated)
                    self.change_layout(tensor, "backward", rest.gradient, back, 1.0)

    def fits(self, tensor: Tensor, choice: TensorChoice | WeightChoice) -> bool:
        """Whether a tensor can have its resting layouts; a result that no node reads must not stay in partial sums."""
        padded = self.setting.options.padded
        for layout in choice.layouts:
            why = refusal(tensor.shape, layout, self.setting.mesh.sizes, padded=padded)
            if why:
                self.violations.append(f"{tensor.name} as {layout_text(layout)}: {why}")
                return False
        read = bool(self.graph.consumers.get(tensor.name))
        if isinstance(choice, TensorChoice) and PARTIAL in choice.value and tensor.elements > 1 and not read:
            self.violations.append(f"{tensor.name} is a result and stays in partial sums")
        return True

    def resting(self, name: str, choice: TensorChoice | WeightChoice) -> None:
        """Add the memory of a tensor or weight, and the update of a weight."""
        tensor, sizes = self.graph.tensors[name], self.setting.mesh.sizes
        if not self.fits(tensor, choice):
            return
        if isinstance(choice, TensorChoice):
            held = self.kept.get(name, 0) * shard_elements(tensor.shape, choice.value, sizes) / max(1, tensor.elements)
            self.figures["activation_bytes"] += held
            return
        state = self.setting.state_of(tensor)
        held = state.weight * shard_elements(tensor.shape, choice.weight, sizes)
        if tensor.name in self.carrying:
            held = state.held(tensor.shape, choice, sizes)
            share = 1.0 / self.setting.micro_batches
            gradient = summed_along(choice.gradient, self.setting.options.dealing)
            self.change_layout(tensor, "step", gradient, choice.optimizer, share)
            self.change_layout(tensor, "step", choice.optimizer, choice.weight, share)
        self.figures["weight_bytes"] += held


def evaluate(
    setting: Setting,
    decision: Mapping[str, Choice],
    *,
    memory_bytes: float | None = None,
    facts: GraphFacts | None = None,
) -> Verdict:
    """The cost of a decision, and what is not legal about it.

    Args:
        setting: what is sharded.
        decision: strategy of each operator (`op:` and its key), resting layouts of each tensor and weight.
        memory_bytes: bytes that a rank may hold; None for no limit.
        facts: `GraphFacts.of` a setting of the same graph, to save computing them.
    """
    judge = _Judge(setting, decision, facts or GraphFacts.of(setting))
    for i in setting.members:
        judge.node(i)
    for name, choice in decision.items():
        if isinstance(choice, (TensorChoice, WeightChoice)):
            judge.resting(name, choice)
    verdict = judge.verdict()
    if memory_bytes is not None and not fits(verdict.memory_bytes, memory_bytes):
        verdict.violations.append(f"a rank holds {verdict.memory_bytes:.0f} bytes, {memory_bytes:.0f} are there")
    return verdict


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """The use of one collective in a sharding.

    Attributes:
        subject: the tensor whose layout changes, or the operator that exchanges inside.
        reason: "layout", or why the operator exchanges ("halo", "statistics", "ring", "experts").
        phase: "forward", "backward" or "step".
        kind: which collective.
        axes: names of the mesh axes along which it runs.
        payload_bytes: bytes that a rank contributes to one run (receives, for a gather).
        sent_bytes: bytes that a rank sends in all runs, a micro-batch; for "step" the fraction of a micro-batch.
        times: runs, a micro-batch; for "step" the fraction of a micro-batch.
        seconds: seconds of all runs, a micro-batch.
    """

    subject: str
    reason: str
    phase: str
    kind: Collective
    axes: tuple[str, ...]
    payload_bytes: float
    sent_bytes: float
    times: float
    seconds: float


def collective_uses(
    setting: Setting, decision: Mapping[str, Choice], communication: Sequence[Communication]
) -> tuple[CollectiveUse, ...]:
    """Every collective of a decision, those inside operators first, in the decision's order; O(operators + tensors).

    Args:
        setting: what is sharded.
        decision: strategy of each operator (`op:` and its key), layouts of each tensor and weight.
        communication: the changes of layout, of an `InnerPoint` or a `Verdict`.
    """
    graph, mesh, carrying = setting.graph, setting.mesh, needs_gradient(setting.graph)
    inside: list[CollectiveUse] = []
    for name, choice in decision.items():
        if isinstance(choice, Strategy) and choice.exchanges:
            node = graph.nodes[graph.producer[name.removeprefix("op:")]]
            trains = any(n in carrying for n in node.inputs)
            inside += _exchanges(mesh, node, choice, trains)
    return (*inside, *(use for change in communication for use in _moves(mesh, change)))


def _exchanges(mesh: Mesh, node: Node, strategy: Strategy, trains: bool) -> Iterator[CollectiveUse]:
    for e in strategy.exchanges:
        if e.backward and not trains:
            continue
        times = float(e.times * node.repeat)
        yield CollectiveUse(
            node.key,
            e.reason.value,
            "backward" if e.backward else "forward",
            e.collective,
            (mesh.names[e.axis],),
            e.payload_bytes,
            moved_bytes(e.collective, e.receivers * times * e.payload_bytes, mesh.axes[e.axis].size),
            times,
            times * float(mesh.seconds(e.collective, (e.axis,), e.payload_bytes)),
        )


def _moves(mesh: Mesh, change: Communication) -> Iterator[CollectiveUse]:
    for step in change.steps:
        if step.collective is not None:
            yield CollectiveUse(
                change.tensor,
                "layout",
                change.phase,
                step.collective,
                tuple(mesh.names[a] for a in step.axes),
                step.payload_bytes,
                change.times * step.sent_bytes,
                change.times,
                change.times * step.seconds,
            )

"""A block's sharding in words and numbers for a plan file: what is cut where, and every collective with its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.graph import Node
from planner.hardware import Collective, moved_bytes
from planner.sharding.judge import Communication
from planner.sharding.layout import TensorLayout, layout_text
from planner.sharding.mesh import Mesh
from planner.sharding.problem import Choice, Facts, Setting
from planner.sharding.strategies import Reason, Strategy


@dataclass(frozen=True, slots=True)
class OperatorLayout:
    """How an operator is split: its key, the dimension cut on each mesh axis ("" for none), layouts by position."""

    operator: str
    splits: tuple[str, ...]
    reads: tuple[tuple[int, str], ...]
    writes: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class RestingLayout:
    """Where a tensor rests; gradient and optimizer are "" where there is none, optimizer for all but weights."""

    tensor: str
    value: str
    gradient: str = ""
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """One collective of a plan.

    Attributes:
        subject: the tensor whose layout changes, or the operator that exchanges inside.
        reason: "layout", or why the operator exchanges ("halo", "statistics", "ring", "experts").
        phase: "forward", "backward" or "step".
        kind: which collective.
        axes: names of the mesh axes along which it runs.
        payload_bytes: bytes that a rank contributes to one of them (receives, for a gather).
        sent_bytes: bytes that a rank sends in all of them, a micro-batch; of a step its share.
        times: how many a micro-batch; of a step its share.
        seconds: what all of them take a micro-batch.
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


@dataclass(frozen=True, slots=True)
class ShardingText:
    """A sharding as a plan file has it, in the order of the decision."""

    operators: tuple[OperatorLayout, ...]
    tensors: tuple[RestingLayout, ...]
    collectives: tuple[CollectiveUse, ...]


def describe(
    setting: Setting,
    decision: Mapping[str, Choice],
    communication: Sequence[Communication],
    carrying: frozenset[str] | None = None,
) -> ShardingText:
    """A decision and its changes of layout in words and numbers; O(operators + tensors).

    Args:
        setting: what was sharded.
        decision: strategy of each operator (`op:` and its key), layouts of each tensor and weight.
        communication: the changes of layout, of an `InnerPoint` or a `Verdict`.
        carrying: names of the tensors that carry a gradient (`Facts.carrying`), found anew where absent.
    """
    graph, mesh = setting.graph, setting.mesh
    differentiable = Facts.of(setting).carrying if carrying is None else carrying
    operators = tuple(
        OperatorLayout(name.removeprefix("op:"), choice.splits, _texts(choice.reads), _texts(choice.writes))
        for name, choice in decision.items()
        if isinstance(choice, Strategy)
    )
    tensors = tuple(
        RestingLayout(name, *map(layout_text, choice.layouts))
        for name, choice in decision.items()
        if not isinstance(choice, Strategy)
    )
    inside: list[CollectiveUse] = []
    for name, choice in decision.items():
        if isinstance(choice, Strategy) and choice.exchanges:
            node = graph.nodes[graph.producer[name.removeprefix("op:")]]
            trains = any(n in differentiable for n in node.inputs)
            inside += _exchanges(mesh, node, choice, trains)
    moves = [use for each in communication for use in _moves(mesh, each)]
    return ShardingText(operators, tensors, (*inside, *moves))


def _texts(layouts: Sequence[tuple[int, TensorLayout]]) -> tuple[tuple[int, str], ...]:
    return tuple((p, layout_text(layout)) for p, layout in layouts)


def _exchanges(mesh: Mesh, node: Node, strategy: Strategy, trains: bool) -> Iterator[CollectiveUse]:
    for e in strategy.exchanges:
        if e.backward and not trains:
            continue
        times = float(e.times * node.repeat)
        sides = 2 if e.reason is Reason.HALO else 1
        yield CollectiveUse(
            node.key,
            e.reason.value,
            "backward" if e.backward else "forward",
            e.collective,
            (mesh.names[e.axis],),
            e.payload_bytes,
            moved_bytes(e.collective, sides * times * e.payload_bytes, mesh.axes[e.axis].size),
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

"""Types of orders of work: actions, pipelines, and the corrections of training with delayed weights.

Facts about schedules are short expressions, which are evaluated, printed and tested.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from planner.errors import PlanError

Terms = Mapping[str, Any]
"""Values of the names in an expression."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}
_NAMES = {"__builtins__": {}, **_FUNCTIONS}
_READ = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod,
    ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.BoolOp, ast.And, ast.Or, ast.IfExp, ast.Call,
)  # fmt: skip
"""Syntax nodes that an expression may have; only `_FUNCTIONS` may be called."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a schedule with p workers, m micro-batches and equal stages.

    Expressions may use p, m, the worker or stage i = 0..p-1, and the options of the schedule. `idle` may also use F, B
    and W: seconds of the forward, the whole backward and its weight gradient of one stage for one micro-batch.

    Attributes:
        source: its publication.
        kept: most activation units that worker i keeps.
        kept_bound: `kept` is an upper bound that some worker may stay below.
        idle: idle seconds of the busiest worker in an iteration; the bubble is idle / (work + idle).
        idle_holds: condition on times and micro-batches under which `idle` is exact; empty for always.
        versions: weight versions that stage i keeps.
        staleness: updates between reading the weights in a forward and applying the gradient, at stage i.
    """

    source: str
    kept: str
    kept_bound: bool = False
    idle: str = "(p-1)*(F+B)"
    idle_holds: str = ""
    versions: str = "1"
    staleness: str = "0"


def evaluate(text: str, terms: Terms) -> Any:  # noqa: ANN401
    """Evaluate an expression.

    Args:
        text: numbers, names, + - * / %, comparisons, min, max, ceil, floor, `a or b`, `a and b`, `a if b else c`.
        terms: the value of each name.

    Raises:
        PlanError: the text has other syntax, or a name without a value.
    """
    try:
        return eval(_compiled(text), _NAMES, terms)  # Safe: `_compiled` admits only the nodes in `_READ`.
    except NameError as error:
        raise PlanError(f"{error.name!r} has no value in {text!r}", hint=f"use {', '.join(terms)}") from error


def printed(text: str) -> str:
    """Format an expression for print: `2*(p-i)` as 2(p-i), `p % 2` as p mod 2."""
    text = text.replace(" == ", "=").replace(" <= ", "<=").replace(" >= ", ">=").replace(" and ", ", ")
    spaced = re.sub(r"(?<=[a-z]{2})\*|\*(?=[a-z]{2})", " ", text.replace(" % ", " mod "))
    return spaced.replace("*", "")


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """Parse, check and compile an expression."""
    tree = ast.parse(text, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        is_integer = not isinstance(node, ast.Constant) or isinstance(node.value, int)
        is_allowed_call = id(node) not in called or (isinstance(node, ast.Name) and node.id in _FUNCTIONS)
        if not isinstance(node, _READ) or not is_integer or not is_allowed_call:
            message = f"cannot read {ast.unparse(node) or text!r} in {text!r}"
            hint = "use numbers, names, + - * / %, comparisons, min, max, ceil, floor, and, or, if"
            raise PlanError(message, hint=hint)
    return compile(tree, text, "eval")


class OrderError(PlanError):
    """An order that cannot run, with the lane and the action at fault.

    Args:
        message: what is wrong.
        lane: number of the lane.
        index: place of the action in the lane, from 0.
        where: worker and action in words.
        hint: the remedy.
    """

    def __init__(self, message: str, *, lane: int, index: int, where: str = "", hint: str = "") -> None:
        super().__init__(message, where=where, hint=hint)
        self.lane = lane
        self.index = index


class ActionKind(StrEnum):
    """What a worker does in one step; the value is the token used in plan files.

    BACKWARD is the whole backward; a schedule that splits it uses INPUT_GRAD (what the stage before waits for) and
    WEIGHT_GRAD (which nobody waits for) instead. Transfers between stages need no actions; an order that says when they
    happen uses SEND and RECEIVE. SYNC waits for a stage's gradients to be exchanged, LAUNCH_SYNC begins that without
    waiting. EVICT moves the activations of a micro-batch to another worker, LOAD brings them back; neither waits.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SYNC = "S"
    UPDATE = "U"
    RECOMPUTE = "R"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    EVICT = "E"
    LOAD = "L"
    LAUNCH_SYNC = "G"


class WeightPolicy(StrEnum):
    """Which version of its weights a stage computes with."""

    SYNC = "sync"
    """One version; the pipeline drains before every update."""

    STASH = "stash"
    """Each micro-batch in flight keeps the version that its forward used."""

    DOUBLE_BUFFER = "2bw"
    """Two versions, swapped once per iteration."""

    VERTICAL = "vertical"
    """Each micro-batch uses at every stage the version that the first stage had when it entered."""

    NEWEST = "newest"
    """One version; forward and backward each read the newest, so they may differ."""

    @property
    def synchronous(self) -> bool:
        """True if training gives the same result as without a pipeline."""
        return self is WeightPolicy.SYNC


class ActivationUnit(StrEnum):
    """The unit that `Schedule.in_flight` counts; different units compare only by their bytes."""

    MICRO_BATCH = "micro-batch"
    CHUNK = "chunk"
    SUB_SEQUENCE = "sub-sequence"


class Action(NamedTuple):
    """One step of a worker: `F2.5` is the forward of stage 2 for micro-batch 5.

    Attributes:
        kind: what the worker does.
        stage: stage (chunk) of the model.
        micro_batch: its number; for SYNC, LAUNCH_SYNC and UPDATE the number of the exchange, -1 if there is only one.
        part: sub-sequence of the micro-batch (`F2.5/0`), -1 for the whole micro-batch.
        version: version of the stage's weights that it reads (`F2.5@3`: after three updates), -1 for the newest.
        peer: worker that receives what EVICT moves away (`E2.5>1`), -1 for the host.
        paired: runs as one with the action before it (`+B2.5`).
    """

    kind: ActionKind
    stage: int
    micro_batch: int = -1
    part: int = -1
    version: int = -1
    peer: int = -1
    paired: bool = False

    def __str__(self) -> str:
        number = f".{self.micro_batch}" if self.micro_batch >= 0 else ""
        return self.spelled(number, f">{self.peer}" if self.peer >= 0 else "")

    def spelled(self, number: str, peer: str) -> str:
        """The action with its number and its peer as the texts given."""
        text = f"{'+' if self.paired else ''}{self.kind.value}{self.stage}{number}"
        text += f"/{self.part}" if self.part >= 0 else ""
        text += f"@{self.version}" if self.version >= 0 else ""
        return text + peer


@dataclass(frozen=True, slots=True)
class Work:
    """The orders of all workers, with the conditions under which they run.

    Attributes:
        lanes: the actions of each lane, in order; a worker that runs two actions at a time has two lanes.
        workers: the worker of each lane; empty if lane i is worker i.
        parts: sub-sequences of a micro-batch.
        causal: a sub-sequence needs those before it in the forward and those after it in the backward.
        shared: the lanes of a worker share its compute: an action takes as long as forward and backward together.
        streaming: a stage passes its result on while it works, as does the loss; only with `shared`.
        versions: by stage, weight versions that a worker can hold; empty for as many as are read.
        limits: by stage, micro-batches that a worker may keep; a forward on a separate lane waits for them. Empty if
            the orders respect memory by themselves.
    """

    lanes: tuple[tuple[Action, ...], ...]
    workers: tuple[int, ...] = ()
    parts: int = 1
    causal: bool = False
    shared: bool = False
    streaming: bool = False
    versions: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    @property
    def lane_workers(self) -> tuple[int, ...]:
        """The worker of each lane."""
        return self.workers or tuple(range(len(self.lanes)))

    def by_worker(self) -> list[list[Action]]:
        """The lanes of each worker, concatenated."""
        lanes: list[list[Action]] = [[] for _ in range(max(self.lane_workers, default=-1) + 1)]
        for worker, lane in zip(self.lane_workers, self.lanes, strict=True):
            lanes[worker] += lane
        return lanes


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in a line, each with its own number of replicas, and micro-batches that are dealt to these round-robin.

    Micro-batch `m` runs on replica `m % replicas[s]` of stage `s`. Every entry of `replicas` divides `micro_batches`.
    Workers are numbered stage by stage: the replicas of stage 0 first, then those of stage 1, and so on.

    Raises:
        PlanError: no stage, no micro-batch, or replicas that do not divide the micro-batches.
    """

    replicas: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        if not self.replicas or min(self.replicas) < 1 or self.micro_batches < 1:
            raise PlanError(
                f"a pipeline needs stages, replicas and micro-batches; got replicas {self.replicas} "
                f"and {self.micro_batches} micro-batches",
                hint="use at least one of each",
            )
        for count in dict.fromkeys(self.replicas):
            if self.micro_batches % count:
                raise PlanError(
                    f"{count} replicas do not divide {self.micro_batches} micro-batches",
                    where=f"stage {self.replicas.index(count)}",
                    hint="choose a number of micro-batches that every stage's replicas divide",
                )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    def workers(self) -> list[tuple[int, int]]:
        """(stage, replica) of each worker in worker order."""
        return [(s, r) for s, count in enumerate(self.replicas) for r in range(count)]

    def micro_batches_of(self, stage: int, replica: int, iterations: int = 1) -> range:
        """Micro-batches that one replica of a stage runs in one or several iterations."""
        return range(replica, self.micro_batches * iterations, self.replicas[stage])


@dataclass(frozen=True, slots=True)
class StageCorrection:
    """Corrections of one stage for training with delayed weights; the defaults correct nothing.

    Attributes:
        forward_delay: updates between the weights that a forward reads and the update that applies its gradient, on
            average.
        backward_delay: the same for the weights that the backward reads.
        learning_rate_factor: factor of the learning rate at the first step, annealed to 1 (PipeMare's T1: delay to the
            power -(1 - step / steps), at most 1).
        annealing_steps: updates after which the factor is 1; 0 leaves it to the trainer.
        velocity_decay: a backward reads w - (forward delay - backward delay) * d, about what its forward read, with
            d <- g d + (1 - g) (new w - old w) at every update; this is g (PipeMare's T2).
        synchronous_epochs: number of first epochs that are trained with a flush after every update (T3).
        forward_horizon: a forward reads weights predicted by so many updates: w - rate * horizon * velocity.
        backward_horizon: the same for the backward.
        velocity_factor: the update is w - rate * (a velocity + b gradient); this is a (spike compensation).
        gradient_factor: b.
    """

    forward_delay: float
    backward_delay: float = 0.0
    learning_rate_factor: float = 1.0
    velocity_decay: float = 0.0
    synchronous_epochs: int = 0
    forward_horizon: int = 0
    backward_horizon: int = 0
    velocity_factor: float = 1.0
    gradient_factor: float = 0.0
    annealing_steps: int = 0


@dataclass(frozen=True, slots=True)
class OptimizerScaling:
    """Momentum and learning rate adapted to a batch other than the one that they were chosen for.

    Attributes:
        reference_batch: samples of an update that they were chosen for.
        batch: samples of an update of the schedule.
        reference_momentum: momentum for the reference batch.
        momentum: momentum for the schedule's batch.
        learning_rate_factor: factor of the learning rate.
    """

    reference_batch: int
    batch: int
    reference_momentum: float
    momentum: float
    learning_rate_factor: float

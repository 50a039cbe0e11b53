"""The searches by name, and what one of them finds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from planner.space.types import Candidate, MemoryBytes, StageChoice
from planner.systems._bench import Bench
from planner.systems._play import Played
from planner.systems.types import LinkBytes, System


@dataclass(frozen=True, slots=True)
class Found:
    """What the search of a system came to.

    Attributes:
        plan: the decision in words; empty when nothing was found.
        iteration_s: time of the global batch, infinite when nothing was found.
        memory, capacity_bytes: of the fullest device.
        bubble: over total time of the used devices.
        sent_bytes: by all devices in an iteration.
        weight_versions, staleness: the most of any stage.
        devices: used.
        micro_batch: samples a replica works on at a time.
        reason: why nothing was found.
        tells: what a backend must know of this very plan.
        notes: assumptions.
        changes_semantics: the plan is asynchronous (of a search that may choose either).
        links: bytes over the links by level.
        played: the point and what playing it found, where the system is a pipeline on one kind of slice.
        candidate: the judged decision, where groups of ranks share operators.
        alters: in what its updates differ from those of the other synchronous systems.
    """

    plan: str = ""
    iteration_s: float = math.inf
    memory: MemoryBytes | None = None
    capacity_bytes: float = 0.0
    bubble: float = 0.0
    sent_bytes: float = 0.0
    weight_versions: int = 1
    staleness: int = 0
    devices: int = 0
    micro_batch: int = 0
    reason: str = ""
    tells: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changes_semantics: bool = False
    links: tuple[LinkBytes, ...] = ()
    played: Played | None = None
    alters: str = ""
    candidate: Candidate | None = None


SystemSearch = Callable[[Bench, System], Found]
SEARCHES: dict[str, SystemSearch] = {}
"""Filled by the modules `_sweep`, `_published`, `_pool`, `_exchanged`, `_sharded` and `_auto`."""


def search(name: str) -> Callable[[SystemSearch], SystemSearch]:
    """Register a search."""

    def put(function: SystemSearch) -> SystemSearch:
        SEARCHES[name] = function
        return function

    return put


def found_of(played: Played, *, tells: dict[str, str] | None = None, notes: tuple[str, ...] = ()) -> Found:
    """What was played as the result of a search."""
    return Found(
        plan=words(played),
        iteration_s=played.iteration_s if played.feasible else math.inf,
        memory=played.memory,
        capacity_bytes=played.capacity_bytes,
        bubble=played.bubble,
        sent_bytes=played.sent_bytes,
        weight_versions=played.weight_versions,
        staleness=played.staleness,
        devices=played.devices,
        micro_batch=played.point.micro_batch,
        reason=played.reason,
        tells=tells or {},
        notes=notes,
        played=played,
    )


def best_of(candidates: Iterable[Played]) -> Played | None:
    """The fastest that can run; else one that cannot; None without candidates."""
    every = list(candidates)
    running = [c for c in every if c.feasible]
    if running:
        return min(running, key=lambda c: (c.iteration_s, len(c.point.stages)))
    return every[-1] if every else None


def words(played: Played) -> str:
    """A point in a few words."""
    point = played.point
    count = len(point.stages)
    replicas = [s.replicas for s in point.stages]
    again = sum(s.recompute for s in point.stages)
    if count == 1:
        total = replicas[0] * point.copies
        text = f"{total} replicas" if total > 1 else "1 device"
    else:
        text = f"{count} stages"
        if len(set(replicas)) > 1:
            text += f" of {_runs(replicas)} replicas"
        elif replicas[0] > 1:
            text += f" x {replicas[0]} replicas"
        text += f" x {point.copies} copies" if point.copies > 1 else ""
    own = point.micro_batches // replicas[0] if count == 1 else point.micro_batches
    text += f", micro-batch {point.micro_batch} x {own}"
    way = "recompute whole stages" if point.whole else "recompute"
    text += f", {way}" if again == count else f", recompute {again} stages" if again else ""
    text += f", ZeRO-{point.zero}" if point.zero else ""
    return text


def _runs(replicas: list[int]) -> str:
    groups = [(value, len(list(same))) for value, same in itertools.groupby(replicas)]
    shown = [str(value) if times == 1 else f"{times}x{value}" for value, times in groups]
    return "-".join(shown if len(shown) <= 8 else [*shown[:6], "..", shown[-1]])


def stages_of(marks: Iterable[int], *, replicas: int = 1, recompute: bool = False) -> tuple[StageChoice, ...]:
    """Stages between boundaries."""
    return tuple(StageChoice(a, b, replicas, recompute) for a, b in itertools.pairwise(marks))

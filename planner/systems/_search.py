"""The searches by name, and what one of them finds."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable

from planner.space.asked import PRICED, refuse_others
from planner.space.types import StageChoice
from planner.systems._bench import Bench
from planner.systems._found import Found, Played
from planner.systems.types import System

SystemSearch = Callable[[Bench, System], Found]
SEARCHES: dict[str, tuple[SystemSearch, frozenset[str]]] = {}
"""Filled by the modules below; with each search the fields of a job that it follows."""

_MODULES = ("_sweep", "_published", "_pool", "_exchanged", "_sharded", "_auto")


def search(name: str, takes: frozenset[str] = PRICED) -> Callable[[SystemSearch], SystemSearch]:
    """Register a search, and which fields of a job it follows."""

    def put(function: SystemSearch) -> SystemSearch:
        SEARCHES[name] = function, takes
        return function

    return put


def ask(bench: Bench, system: System) -> Found:
    """Let a system decide by its own rules.

    Raises:
        UsageError: the job asks for something that the system decides itself.
        ShardplanError: it cannot.
    """
    for module in _MODULES:
        importlib.import_module(f"planner.systems.{module}")
    own_search, takes = SEARCHES[system.search]
    refuse_others(
        bench.job, takes, f"the rules of {system.title}", "leave it out, or plan without --system to have it followed"
    )
    return own_search(bench, system)


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
        text += ", placed stage by stage" if point.adjacent else ""
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

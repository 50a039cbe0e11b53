"""Every system asked what it would do with one model on one cluster, and the answers in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import InfeasibleError, UsageError
from planner.hardware.types import Cluster
from planner.solvers import search
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job, Structure
from planner.systems import SYSTEMS, get
from planner.systems.backends import BACKENDS, Backend, backend_names, within_limits
from planner.systems.runner import Decided, decide, row_of
from planner.systems.types import Semantics, Setting, System, SystemRow

WORDS: Mapping[str, str] = {
    "equal_replicas": "unequal replicas",
    "alike": "stages unlike in sharing and recomputation",
    "whole_layers": "layers divided between stages",
    "axes": "any layout inside groups",
    "powers_of_two": "groups of any number of ranks",
    "head_groups": "ranks that do not divide the heads",
    "zero_in_pipelines": "any ZeRO stage in pipelines",
    "between_layers": "tensors between layers whole or cut by the sequence",
}
"""What the plans are allowed where a field of `Structure` is lifted."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """A limit lifted, or all of them.

    Attributes:
        words: what plans are allowed then.
        iteration_s: of the fastest; None where none fits.
    """

    words: str
    iteration_s: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, the ones that count first.

    Attributes:
        model, hardware: names.
        global_batch: samples of an iteration.
        semantics: whether asynchronous rows take part in the ranking.
        rows: fastest first. Asynchronous rows stand behind all synchronous ones unless any semantics is allowed; what
            does not fit stands last.
        notes: what holds for all rows.
        precision: number formats of all rows.
        freedoms: what the limits of some training frameworks cost, if that was asked for.
        price: of a device and hour in US dollars, in place of the profile's.
        setting, decisions: what the systems were asked about and what each came to, for their plans (`plans_of`).
    """

    model: str
    hardware: str
    global_batch: int
    semantics: str
    rows: tuple[SystemRow, ...]
    notes: tuple[str, ...] = ()
    precision: str = ""
    freedoms: tuple[Freedom, ...] = ()
    price: float | None = None
    setting: Setting | None = field(default=None, repr=False, compare=False)
    decisions: tuple[tuple[System, Decided], ...] = field(default=(), repr=False, compare=False)


def compare_systems(
    prices: Pricer,
    cluster: Cluster,
    job: Job,
    *,
    systems: Sequence[str] = (),
    semantics: str = "sync",
    freed: Sequence[str] = (),
) -> Comparison:
    """Ask every system what it would do.

    Args:
        prices: the model's prices (`planner.Pricer(graph, cluster, job)`).
        cluster: the machine.
        job: global batch, precision, optimizer.
        systems: which, or which training frameworks; all when empty. One that takes the best of all takes the best of
            those that are asked.
        semantics: "sync": asynchronous systems are listed, behind the others; "any": they are ranked with them.

        freed: training frameworks whose limits are lifted one by one, to see what they cost.

    Raises:
        UsageError: no system has one of the names.
        JobError: no micro-batch size divides the global batch.
    """
    if semantics not in ("sync", "any"):
        raise UsageError(f"unknown semantics {semantics!r}", hint="use sync or any")
    chosen = [get(name) for name in tuple(dict.fromkeys(systems)) or (*SYSTEMS.names(), *backend_names())]
    setting = Setting(prices, cluster, job, changes_semantics=semantics == "any")
    last = {system.key: system.best_of_all for system in chosen}
    in_turn = sorted(chosen, key=lambda system: system.best_of_all)
    decisions = [(system, decide(setting, system)) for system in in_turn]
    rows = [row_of(setting, system, decided) for system, decided in decisions]

    def order(row: SystemRow) -> tuple[bool, bool, float, bool, str]:
        behind = semantics == "sync" and row.semantics is Semantics.ASYNC
        return not row.feasible, behind, row.iteration_s, not last[row.system], row.system

    rows.sort(key=order)
    takers = [BACKENDS.get(name) for name in dict.fromkeys(freed)]
    lifted = freedoms(setting, takers) if takers else ()
    said = (setting.notes, setting.job.precision, lifted, None, setting, tuple(decisions))
    return Comparison(setting.name, cluster.name, job.global_batch, semantics, tuple(rows), *said)


def freedoms(setting: Setting, backends: Sequence[Backend]) -> tuple[Freedom, ...]:
    """The fastest plan within the limits of some frameworks, then with each limit lifted alone, then with all.

    A search each: limits that a structure does not have are left out.
    """
    job = within_limits(setting.job, backends)
    return tuple(Freedom(words, _fastest_s(setting, freer)) for words, freer in _lifted(job, setting.job))


def _lifted(job: Job, free: Job) -> Iterator[tuple[str, Job]]:
    """What is allowed in words, and the job with that."""
    yield "none lifted", job
    for limit in dataclasses.fields(Structure):
        if getattr(job.structure, limit.name) != limit.default:
            lifted: dict[str, Any] = {limit.name: limit.default}
            yield WORDS[limit.name], dataclasses.replace(job, structure=dataclasses.replace(job.structure, **lifted))
    yield "all lifted", free


def _fastest_s(setting: Setting, job: Job) -> float | None:
    prices = Pricer(setting.prices.graph, setting.cluster, job, like=setting.prices)
    try:
        found = search(setting.costs, setting.cluster, job, shardings=prices, simulated_s=played_s)
    except InfeasibleError:
        return None
    return found.best.simulated_s

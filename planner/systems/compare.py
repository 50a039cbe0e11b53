"""Every system asked what it would do with one model on one cluster, and the answers in one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import ShardplanError, UsageError
from planner.hardware.types import Cluster
from planner.space.types import Job
from planner.systems import SYSTEMS, get
from planner.systems._bench import Bench, Prices
from planner.systems._found import Found
from planner.systems._search import ask
from planner.systems.types import LinkBytes, Semantics, System, SystemRow

AUTO = "auto"


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
    """

    model: str
    hardware: str
    global_batch: int
    semantics: str
    rows: tuple[SystemRow, ...]
    notes: tuple[str, ...] = ()
    precision: str = ""


Keep = Callable[[Bench, System, Found], None]
"""Told what a system found that found something."""


def run_system(system: System, bench: Bench, keep: Keep | None = None) -> SystemRow:
    """Let a system decide by its own rules, and play what it decides.

    A system that cannot express the model, fit it or follow the job's limits gives a row that says why. Where one is
    found, `keep` is told.
    """
    try:
        found = ask(bench, system)
    except ShardplanError as error:
        found = Found(reason=str(error))
    if system.key != AUTO and (system.semantics is Semantics.SYNC or "any" in bench.allowed):
        bench.results[system.key] = replace(found, changes_semantics=system.semantics is Semantics.ASYNC)
    if keep is not None and not found.reason and math.isfinite(found.iteration_s):
        keep(bench, system, found)
    return _row(system, bench, found)


def _row(system: System, bench: Bench, found: Found) -> SystemRow:
    feasible = not found.reason and math.isfinite(found.iteration_s)
    asynchronous = found.changes_semantics or (system.semantics is Semantics.ASYNC and found.staleness > 0)
    semantics = (
        Semantics.ASYNC if asynchronous or (system.semantics is Semantics.ASYNC and not feasible) else Semantics.SYNC
    )
    return SystemRow(
        system=system.key,
        title=system.title,
        semantics=semantics,
        feasible=feasible,
        reason=found.reason,
        plan=found.plan if feasible else "",
        iteration_s=found.iteration_s if feasible else 0.0,
        throughput=bench.job.global_batch / found.iteration_s if feasible else 0.0,
        memory=found.memory if feasible else None,
        capacity_bytes=found.capacity_bytes if feasible else 0.0,
        bubble=found.bubble if feasible else 0.0,
        sent_bytes=found.sent_bytes if feasible else 0.0,
        weight_versions=found.weight_versions if feasible else 0,
        staleness=found.staleness if feasible else 0,
        devices=found.devices if feasible else 0,
        available=bench.devices,
        micro_batch=found.micro_batch if feasible else 0,
        tells={**system.backend, **found.tells},
        notes=found.notes,
        links=_links(bench, found) if feasible else (),
        alters=found.alters if feasible else "",
    )


def _links(bench: Bench, found: Found) -> tuple[LinkBytes, ...]:
    if found.links or found.played is None:
        return found.links
    from planner.systems._links import links_of, point_traffic

    return links_of(point_traffic(bench, found.played.point, np.asarray(found.played.exchanges)))


def compare_systems(
    prices: Prices,
    cluster: Cluster,
    job: Job,
    *,
    systems: Sequence[str] = (),
    semantics: str = "sync",
    keep: Keep | None = None,
) -> Comparison:
    """Ask every system what it would do.

    Args:
        prices: the model's prices (`planner.Pricer(graph, cluster, job)`).
        cluster: the machine.
        job: global batch, precision, optimizer.
        systems: which; all when empty. `auto` takes the best of its own search and of the others that are asked.
        semantics: "sync": asynchronous systems are listed, behind the others; "any": they are ranked with them.
        keep: told what each system found, to make plan files of it (`plan_keeper`).

    Raises:
        UsageError: no system has one of the names.
        JobError: no micro-batch size divides the global batch.
    """
    if semantics not in ("sync", "any"):
        raise UsageError(f"unknown semantics {semantics!r}", hint="use sync or any")
    wanted = tuple(dict.fromkeys(systems)) or SYSTEMS.names()
    chosen = [get(name) for name in wanted]
    bench = Bench(prices, cluster, job, allowed=("any",) if semantics == "any" else ())
    rows = [run_system(system, bench, keep) for system in sorted(chosen, key=lambda s: s.key == AUTO)]
    rows.sort(key=lambda row: _order(row, semantics))
    name = prices.chain.graph.name
    return Comparison(name, cluster.name, job.global_batch, semantics, tuple(rows), bench.notes, bench.job.precision)


def _order(row: SystemRow, semantics: str) -> tuple[bool, bool, float, bool, str]:
    behind = semantics == "sync" and row.semantics is Semantics.ASYNC
    return not row.feasible, behind, row.iteration_s, row.system != AUTO, row.system

"""Diagnose jobs without a plan: the closest infeasible plan, changes that would fit, and limits that exclude all plans.

Changes are verified by solving, one by one. Limits are lifted one at a time, then two at a time, until a plan exists.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import InfeasibleError, ModelError
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.solvers import chain_dp
from planner.solvers._account import either
from planner.solvers._candidates import plain_schedule
from planner.solvers.types import CostsFor
from planner.space import evaluate
from planner.space.formulate import Formulator
from planner.space.job_options import as_written, given, in_words, without
from planner.space.jobs import precision_of
from planner.space.problem import StageProblem
from planner.space.ranges import Ranges
from planner.space.types import BlockCosts, Configuration, Evaluation, Job, StageTerms

_GIB = 2**30
_MORE_DEVICES = (2, 4, 8, 16, 32, 64)
_MOST_DEVICES = 1024
_MAX_STEPS = 60
_MAX_SIZES = 2
_NEGLIGIBLE = 0.01
_LEAN_OPTIMIZER = "adafactor"
_ROUNDING = 1e-12
_MAX_COUNTED_STAGES = 8
"""Most stages for which the least memory is computed by their exact number."""


def infeasible(priced: Sequence[BlockCosts], cluster: Cluster, job: Job, costs_for: CostsFor) -> InfeasibleError:
    """The error to raise if no decision of a job fits.

    The message names the fullest stage of the closest infeasible plan, what it needs, what its device offers and what
    fills it. The hint lists changes that were verified to fit, cheapest first.
    """
    closest = _closest(priced, cluster, job)
    changes = list(_changes(priced, cluster, job, costs_for))
    if closest is None:
        message = "no plan fits, however much memory the devices have"
        return InfeasibleError(message, hint=_would_fit(changes) or "allow more stages, devices or micro-batch sizes")
    costs, decision, evaluation = closest
    excesses = sorted(
        (v for v in evaluation.violations if v.kind == "memory"), key=lambda v: (v.available - v.needed, v.stage)
    )
    device = cluster.devices[int(np.argmin([abs(d.capacity_bytes - excesses[0].available) for d in cluster.devices]))]
    needed = math.ceil(max(v.needed for v in excesses) / (1 - device.headroom) / _GIB * 100) / 100
    free = f" below a headroom of {device.headroom:.1%}" if device.headroom else ""
    changes.append(f"devices with {needed:.2f} GiB of memory")
    terms, stage = evaluation.stages[excesses[0].stage], excesses[0].stage
    message = (
        f"no plan fits: at best {_named(costs, decision, stage)} needs {terms.memory.total / _GIB:.2f} GiB, "
        f"{device.name} has {terms.capacity_bytes / _GIB:.2f} GiB{free} ({_memory_parts(terms)}; "
        f"{', '.join(_memory_savings(decision, terms, stage, len(excesses)))})"
    )
    return InfeasibleError(message, hint=_would_fit(changes))


def _would_fit(changes: Sequence[str]) -> str:
    """The hint that lists changes that fit; empty without any."""
    return f"this would fit: {either(changes)}" if changes else ""


def _named(costs: BlockCosts, decision: Configuration, index: int) -> str:
    """A stage in words, by its first and last block."""
    stage, count = decision.stages[index], len(decision.stages)
    names = costs.names or tuple(f"block {k}" for k in range(len(costs.parameter_elements)))
    if stage.stop - stage.start == 1:
        return f"block {names[stage.start]!r} alone"
    if count == 1:
        return f"the whole model ({names[0]!r} to {names[-1]!r})"
    return f"stage {index} of {count} ({names[stage.start]!r} to {names[stage.stop - 1]!r})"


def _memory_parts(terms: StageTerms) -> str:
    """The kinds of memory that fill a device in GiB, largest first; negligible ones are left out."""
    kinds = ("weights", "gradients", "optimizer", "activations", "workspace", "reserve")
    sizes = {kind: getattr(terms.memory, kind) for kind in kinds}
    shown = [kind for kind in kinds if sizes[kind] > _NEGLIGIBLE * terms.memory.total]
    return ", ".join(f"{kind} {sizes[kind] / _GIB:.2f}" for kind in sorted(shown, key=lambda kind: -sizes[kind]))


def _memory_savings(decision: Configuration, terms: StageTerms, index: int, over: int) -> Iterator[str]:
    """How the closest infeasible plan saves memory, and how many of its stages do not fit even so."""
    stage, count = decision.stages[index], len(decision.stages)
    replicas = decision.copies * stage.replicas
    yield f"micro-batch {decision.micro_batch}"
    if stage.ranks > 1:
        yield f"shared by {stage.ranks} ranks"
    if terms.memory.activations > _NEGLIGIBLE * terms.memory.total:
        yield f"{terms.in_flight} in flight"
    if stage.recompute or stage.repeats:
        yield " ".join([*stage.repeats, "recomputed"])
    if decision.zero and replicas > 1:
        yield f"ZeRO-{decision.zero} over {replicas}"
    if over > 1:
        yield f"{'all' if over == count else f'{over} of'} {count} stages too large"


def _leanest(costs: BlockCosts, cluster: Cluster, job: Job) -> StageProblem:
    """The problem that can save most memory: one copy with any number of replicas, 1F1B and ZeRO if allowed."""
    schedule = "1f1b" if "1f1b" in job.schedules else plain_schedule(job)
    return Formulator(cluster, job).problem(costs, copies=1, schedule=schedule, zero=max(job.zero))


def may_fit(problem: StageProblem) -> bool:
    """False only if no decision of a problem fits, by a DP over memory alone, which is far faster than a search."""
    return fits(least_memory_factor(problem) * (1 - _ROUNDING), 1.0)


def least_memory_factor(problem: StageProblem) -> float:
    """Least multiple of the device memory with which some decision fits, by a DP over the fullest stage.

    Exact, except that it is only a lower bound if stages may keep more than it counts (1F1B with unequal replicas), if
    blocks are pinned, or if the number of stages is limited to more than
    `_MAX_COUNTED_STAGES`. Infinite if there is no cut.
    O(R n^2 W), times the number of stages if that is limited.
    """
    n, width = problem.blocks, problem.slice_devices
    allowed = problem.stage_counts.tolist() or [*range(1, problem.max_stages + 1)]
    least = np.full((n + 1, width + 1), np.inf)
    least[0] = 0.0
    if not allowed or max(allowed) > _MAX_COUNTED_STAGES or max(allowed) >= min(n, width):
        _one_more_stage(problem, least, least)
        return float(least[n, width])
    by_count = dict[int, float]()
    for count in range(1, max(allowed) + 1):
        before, least = least, np.full_like(least, np.inf)
        _one_more_stage(problem, before, least)
        by_count[count] = float(least[n, width])
    return min(by_count[count] for count in allowed)


def _one_more_stage(problem: StageProblem, before: np.ndarray, after: np.ndarray) -> None:
    """Relax `after` with every cut of `before` extended by one stage.

    Args:
        problem: the problem.
        before: [n + 1, W + 1], memory fraction of the fullest stage, by block and device where the new stage begins.
        after: the same by block and device where the new stage ends; `before` itself for any number of stages.
    """
    n, width = problem.blocks, problem.slice_devices
    for i in range(n):
        if not np.isfinite(before[i]).any():
            continue
        for o, r in enumerate(problem.replicas.tolist()):
            at = np.flatnonzero(np.isfinite(before[i, : width - r + 1]))
            if len(at):
                at = np.arange(at[0], at[-1] + 1)
                fraction = _fractions(problem, o, at, i, slice(i, n)).min(axis=0)
                fraction = np.maximum(fraction, before[i, at][:, None])
                target = after[i + 1 :, at[0] + r : at[-1] + r + 1]
                np.minimum(target, fraction.T, out=target)


def _fractions(problem: StageProblem, o: int, at: np.ndarray, i: int, last: slice) -> np.ndarray:
    """[ways, places, stops] part of the memory that stages of blocks i..j need on replicas[o] from devices `at`."""
    place, behind = problem.place[o, at], problem.slice_devices - at - int(problem.replicas[o])
    in_flight = problem.in_flight[o, np.minimum(behind, problem.in_flight.shape[1] - 1)][:, None]
    kind = problem.place_kind[place]
    by_way = in_flight * problem.saved_bytes[:, kind, i, last] + problem.working_bytes[:, kind, i, last]
    return np.asarray((by_way + problem.resident_bytes[place, i, last]) / problem.capacity_bytes[kind][:, None])


def _solved(problem: StageProblem, costs: BlockCosts, cluster: Cluster, job: Job) -> Configuration | None:
    """The fastest decision of the problem that fits; None if none does."""
    solution = chain_dp.solve(problem, lambda decision: evaluate(costs, cluster, job, decision), keep=1)
    return solution.decisions[0][0] if solution.decisions else None


def _closest(
    priced: Sequence[BlockCosts], cluster: Cluster, job: Job
) -> tuple[BlockCosts, Configuration, Evaluation] | None:
    """The decision that exceeds memory by least, found by solving with more and more memory; None if there is none."""
    cases = [(costs, _leanest(costs, cluster, job)) for costs in priced[:_MAX_SIZES]]
    factors = [least_memory_factor(problem) for _, problem in cases]
    first = int(np.argmin(factors))
    costs, problem = cases[first]
    factor = factors[first]
    if not math.isfinite(factor):
        return None
    for step in range(1, _MAX_STEPS):
        ample = dataclasses.replace(problem, capacity_bytes=problem.capacity_bytes * factor)
        decision = _solved(ample, costs, _with_memory(cluster, factor), job)
        if decision is not None:
            return costs, decision, evaluate(costs, cluster, job, decision)
        factor *= 1 + 0.01 * step
    return None


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with `factor` times the usable memory on every device."""
    devices = tuple(
        dataclasses.replace(d, memory_bytes=d.reserve_bytes + math.ceil(d.usable_bytes * factor), headroom=0.0)
        for d in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


def _with_devices(cluster: Cluster, times: int) -> Cluster:
    """The cluster with `times` as many groups of its outermost level."""
    *inner, outer = cluster.levels
    levels = (*inner, dataclasses.replace(outer, size=outer.size * times))
    return dataclasses.replace(cluster, levels=levels, device_types=np.tile(cluster.device_types, times))


def _fits(costs: BlockCosts, cluster: Cluster, job: Job) -> bool:
    """True if some decision of the leanest problem fits."""
    if not state_fits(costs, cluster, job):
        return False
    leanest = _leanest(costs, cluster, job)
    return may_fit(leanest) and _solved(leanest, costs, cluster, job) is not None


def state_fits(costs: BlockCosts, cluster: Cluster, job: Job) -> bool:
    """False if weights, gradients and optimizer state alone are more than all devices hold together."""
    formats = precision_of(job, cluster)
    held_bytes = formats.weight_bytes + formats.gradient_bytes + optimizer_state_bytes(job.optimizer, formats)
    groups = job.devices_of(cluster) // costs.ranks
    elements = float(Ranges(costs).elements[0, -1])
    return bool(fits(elements * held_bytes / max(1, groups), cluster.largest_bytes))


def _single_samples(costs: BlockCosts, costs_for: CostsFor) -> BlockCosts:
    """Costs of micro-batches of one sample, or the given costs if the model's batch size is fixed."""
    try:
        return costs if costs.micro_batch == 1 else costs_for(1)
    except ModelError:
        return costs


def _changes(priced: Sequence[BlockCosts], cluster: Cluster, job: Job, costs_for: CostsFor) -> Iterator[str]:
    """Changes that make the job fit, in words, cheapest first; each is verified by solving."""
    costs = priced[0]
    smallest = _single_samples(costs, costs_for)
    options: list[tuple[str, bool, dict[str, Any]]] = [
        (f"micro-batch {smallest.micro_batch}", smallest is not costs, {"micro_batches": (1,)}),
        ("recompute=auto", job.recompute != "auto", {"recompute": "auto"}),
        ("the 1f1b schedule", "1f1b" not in job.schedules, {"schedules": (*job.schedules, "1f1b")}),
        ("ZeRO-1", max(job.zero) < 1, {"zero": (*job.zero, 1)}),
        ("ZeRO-3", max(job.zero) < 3, {"zero": (*job.zero, 3)}),
        ("no limit on stages", job.max_stages > 0, {"max_stages": 0}),
        (f"all {cluster.device_count} devices", 0 < job.devices < cluster.device_count, {"devices": 0}),
    ]
    state_bytes = [optimizer_state_bytes(name, precision(job.precision)) for name in (job.optimizer, _LEAN_OPTIMIZER)]
    possible = [(words, change) for words, applies, change in options if applies]
    any_fits = False
    for words, change in possible:
        if _fits(smallest if "micro_batches" in change else costs, cluster, dataclasses.replace(job, **change)):
            any_fits = True
            yield words
    all_changes: dict[str, Any] = {key: value for _, change in possible for key, value in change.items()}
    if not any_fits and len(possible) > 1 and _fits(smallest, cluster, dataclasses.replace(job, **all_changes)):
        yield " with ".join([possible[0][0], " and ".join(words for words, _ in possible[1:])])
    lean_job = dataclasses.replace(job, optimizer=_LEAN_OPTIMIZER)
    if state_bytes[1] < state_bytes[0] and _fits(costs, cluster, lean_job):
        yield f"{_LEAN_OPTIMIZER} instead of {job.optimizer}"
    if cluster.levels:
        for times in _MORE_DEVICES:
            count = cluster.device_count * times
            if count <= _MOST_DEVICES and _fits(
                costs, _with_devices(cluster, times), dataclasses.replace(job, devices=0)
            ):
                yield f"{count} devices instead of {job.devices_of(cluster)}"
                return


Attempt = Callable[[Job], float | None]
"""Iteration time of some plan of a job in seconds; None if it has no plan."""

_USER_LIMITS = (
    "tensor_parallel",
    "meshes",
    "pipeline_stages",
    "data_parallel",
    "keep",
    "forbid",
    "uniform",
    "backends",
)
"""Limits that the diagnosis of memory ignores."""


def limited(job: Job) -> bool:
    """True if the job has at least one user limit (`--tp`, `--pp`, ...) that the conflict search can lift."""
    return bool(given(job, _USER_LIMITS))


def conflict(job: Job, attempt: Attempt) -> InfeasibleError | None:
    """The error to raise if a job with limits has no plan; None if lifting up to two of them does not help.

    Args:
        job: the job with its limits.
        attempt: searches a plan of a job with fewer limits.
    """
    limits = in_words(job)
    for count in (1, 2):
        remedies = []
        for names in itertools.combinations(given(job), count):
            seconds = attempt(without(job, names))
            if seconds is not None:
                words = " and ".join(as_written(job, name) for name in names)
                remedies.append(f"without {words} ({seconds:.3g} s an iteration, say)")
        if remedies:
            return InfeasibleError(f"no plan has all of {limits}", hint=f"there are some {' or '.join(remedies)}")
    return None

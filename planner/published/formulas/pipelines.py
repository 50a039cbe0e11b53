"""Closed forms of pipeline schedules, from the facts of each schedule, and formulas of single systems.

Every schedule has the same figures: `formulas.chimera_bubble(8, 8, pairs=2)` is its bubble,
`formulas.schedule_figures("chimera:pairs=2", 8, 8)` has all figures. Tests hold each equal to the simulation of the
schedule (`planner.measure_schedule`). Stages are counted from 0, where the literature counts from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.errors import PlanError, UsageError, divides, positive, whole
from planner.exchange.formulas import all_reduce_bytes
from planner.registry import chosen
from planner.schedules import ActivationUnit, Pipeline, Schedule, evaluate, get, names, printed
from planner.solvers.cluster_chains.stages import equal_shares, paired_types
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """A schedule's closed forms for equal stages; times in the unit of those given.

    Attributes:
        schedule: the schedule.
        pipeline: stages, each with one replica, and micro-batches.
        times: F, B and W of one stage: forward, whole backward and the weight gradient in it, for one micro-batch.
    """

    schedule: Schedule
    pipeline: Pipeline
    times: dict[str, float]

    @property
    def _workers(self) -> int:
        """Number of workers."""
        return self.schedule.workers(self.pipeline)

    @property
    def _work_s(self) -> float:
        """Busy time of a worker in an iteration."""
        share = self.pipeline.stages // self._workers
        return self.pipeline.micro_batches * share * (self.times["F"] + self.times["B"])

    @property
    def idle_s(self) -> float:
        """Idle time of the busiest worker in an iteration.

        Raises:
            UsageError: the closed form does not hold for such times or micro-batches.
        """
        facts, forms = self.schedule.facts, {**self.schedule.terms(self.pipeline), **self.times}
        if facts.idle_holds and not evaluate(facts.idle_holds, forms):
            name = self.schedule.name
            raise UsageError(
                f"the closed form of {name} holds for {printed(facts.idle_holds)}",
                hint=f"simulate it: planner.measure_schedule({name!r}, ...)",
            )
        return self.schedule.idle_s(self.pipeline, self.times["F"], self.times["B"], self.times["W"])

    @property
    def makespan_s(self) -> float:
        """Time of an iteration; of one worker's if iterations overlap."""
        return self._work_s + self.idle_s

    @property
    def bubble(self) -> float:
        """Idle time over total time."""
        return self.idle_s / self.makespan_s

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over the time of the work."""
        return self.idle_s / self._work_s

    @property
    def speedup(self) -> float:
        """Throughput of all workers over that of one worker."""
        return self._workers * self._work_s / self.makespan_s

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Peak number of micro-batches in flight on each worker, counted in activations of a p-th of the model."""
        peak_counts = self.schedule.held(self.pipeline)
        units = {
            ActivationUnit.CHUNK: self.pipeline.stages // self._workers,
            ActivationUnit.SUB_SEQUENCE: self.schedule.parts,
        }
        units_per_micro_batch = units.get(self.schedule.activation_unit, 1)
        if units_per_micro_batch == 1:
            return peak_counts
        return tuple(count / units_per_micro_batch for count in peak_counts)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Weight versions that each stage keeps."""
        return self.schedule.weight_versions(self.pipeline)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights that each worker keeps, in p-ths of the model's weights."""
        versions, share = self.weight_versions, self.pipeline.stages // self._workers
        return tuple(sum(versions[s] for s in stages) / share for stages in self.schedule.placement(self.pipeline))

    @property
    def weight_copies(self) -> float:
        """Weights that all workers keep together, in copies of the model."""
        return float_sum(self.weights) / self._workers

    @property
    def staleness(self) -> tuple[int, ...]:
        """Maximum number of updates between a forward and the update that applies its gradient, by stage."""
        return self.schedule.staleness(self.pipeline)


def schedule_figures(
    schedule: str,
    workers: int,
    micro_batches: int,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_grad_s: float | None = None,
) -> ScheduleFigures:
    """Closed forms of any schedule: idle time, iteration, bubble, activations, weights, staleness.

    Args:
        schedule: any name of `planner.schedules.names()`, with options (`chimera:pairs=2`).
        workers: p, each with one replica of its stages.
        micro_batches: m of one iteration.
        forward_s: forward time of a p-th of the model for one micro-batch.
        backward_s: backward time of the same, weight gradients included.
        weight_grad_s: the part of `backward_s` that computes weight gradients; half of it if None.

    >>> found = formulas.schedule_figures("interleaved", 4, 8)
    >>> found.makespan_s, found.bubble_over_ideal, found.in_flight
    (28.5, 0.1875, (5.5, 4.5, 3.5, 2.5))
    >>> formulas.schedule_figures("chimera", 4, 4).in_flight, formulas.schedule_figures("pipedream", 4, 8).weight_copies
    ((3, 4, 4, 3), 2.5)

    Raises:
        UsageError: the schedule is unknown.
        PlanError: the schedule does not support such a pipeline; says why.
    """
    whole(workers=workers, micro_batches=micro_batches)
    positive(work_s=forward_s + backward_s)
    registered = get(schedule)
    counts = registered.stage_counts(workers)
    pipeline = Pipeline((1,) * counts[0], micro_batches)
    reason = registered.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the workers, the micro-batches, or the schedule")
    share = pipeline.stages // workers
    weight_s = backward_s / 2 if weight_grad_s is None else weight_grad_s
    return ScheduleFigures(
        registered, pipeline, {"F": forward_s / share, "B": backward_s / share, "W": weight_s / share}
    )


FUNCTION_NAMES = {"1f1b": "one_f_one_b"}
"""By schedule whose name is no Python identifier: the name in functions."""

FIGURES = tuple(
    name for name, member in vars(ScheduleFigures).items() if isinstance(member, property) and name[0] != "_"
)
"""Figures that every schedule has a formula for."""


def schedule_formulas() -> dict[str, Callable[..., Any]]:
    """One function for each schedule and figure, by name: `gpipe_bubble`, ..."""
    functions: dict[str, Callable[..., Any]] = {}
    for schedule in names():
        system = FUNCTION_NAMES.get(schedule, schedule.replace("-", "_"))
        for figure in FIGURES:
            functions[f"{system}_{figure}"] = _formula(schedule, figure, f"{system}_{figure}")
    return functions


def _formula(schedule: str, figure: str, name: str) -> Callable[..., Any]:
    def formula(
        workers: int,
        micro_batches: int,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        weight_grad_s: float | None = None,
        **options: object,
    ) -> object:
        option_text = ",".join(f"{option}={value}".lower() for option, value in options.items())
        key = f"{schedule}:{option_text}" if option_text else schedule
        return getattr(schedule_figures(key, workers, micro_batches, forward_s, backward_s, weight_grad_s), figure)

    formula.__name__ = formula.__qualname__ = name
    formula.__doc__ = f'`{figure}` of `schedule_figures("{schedule}", ...)`; options by name.'
    return formula


def gpipe_activation_bytes(
    layers: int, stages: int, micro_batches: int, layer_bytes: float, *, recompute: bool = True
) -> float:
    """Activation bytes of a worker: N + L/K N/M with recomputation (stage inputs and one micro-batch), N L/K without.

    `layer_bytes` is N, the output of one layer for a mini-batch.

    >>> [formulas.gpipe_activation_bytes(48, 8, 32, 64.0, recompute=r) for r in (True, False)]
    [76.0, 384.0]
    """
    whole(layers=layers, stages=stages, micro_batches=micro_batches)
    share = layers / stages
    return layer_bytes * (1 + share / micro_batches) if recompute else layer_bytes * share


def seq1f1b_lengths(sequence: int, splits: int, hidden: int) -> tuple[int, ...]:
    """Tokens of k sub-sequences of nearly equal work under causal attention; t tokens take 24 h^2 t + 2 h t^2.

    The first sub-sequences are the longest, since later tokens attend to all tokens before.

    >>> formulas.seq1f1b_lengths(8192, 4, hidden=1024), formulas.seq1f1b_lengths(8192, 4, hidden=1 << 20)
    ((2783, 2102, 1761, 1546), (2049, 2048, 2048, 2047))
    """
    whole(sequence=sequence, splits=splits, hidden=hidden)
    if splits > sequence:
        raise UsageError(f"{sequence} tokens do not make {splits} sub-sequences", hint="use fewer")
    linear, pairs = 12 * hidden, 1.0
    total = linear * sequence + pairs * sequence**2
    ends = [0]
    for part in range(1, splits + 1):
        end = (math.sqrt(linear**2 + 4 * pairs * total * part / splits) - linear) / (2 * pairs)
        ends.append(min(max(round(end), ends[-1] + 1), sequence - (splits - part)))
    return tuple(b - a for a, b in pairwise(ends))


def chimera_iteration_s(
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float = 0.0,
    exposed_sync_s: float = 0.0,
) -> float:
    """Chimera's performance model: (F + C) C_f + (B + C) C_b plus the exchange that is not overlapped.

    The critical path has C_f = N forwards and C_b = N + D - 2 backwards, for N = D.

    >>> [formulas.chimera_iteration_s(6, 6, 1, 2, transfer_s=c, exposed_sync_s=3) for c in (0, 0.5)]
    [29, 37.0]
    """
    whole(stages=stages, micro_batches=micro_batches)
    forwards, backwards = micro_batches, micro_batches + stages - 2
    return (forward_s + transfer_s) * forwards + (backward_s + transfer_s) * backwards + exposed_sync_s


def gems_survey_bubble(stages: int) -> float:
    """The figure of Guan et al.'s survey (JCST 2024), (D-1)/(D+1/2): no micro-batch enters before the last has left.

    >>> round(formulas.gems_survey_bubble(4), 4)
    0.6667
    """
    whole(stages=stages)
    return (stages - 1) / (stages + 0.5)


def dualpipe_bubble_s(workers: int, pair_s: float, backward_s: float, weight_grad_s: float) -> float:
    """DualPipe's bubble, (PP/2-1)(F&B + B - 3W), the worst worker's when a pair is faster than its halves.

    B is the whole backward. DualPipeV over PP/2 workers has the same. Exact for an input gradient B - W as long as the
    forward, W no longer (simulate others).

    >>> [formulas.dualpipe_bubble_s(pp, pair_s=3, backward_s=2, weight_grad_s=1) for pp in (4, 8, 16)]
    [2.0, 6.0, 14.0]
    """
    whole(workers=workers)
    divides("workers", workers, "directions", 2)
    return (workers / 2 - 1) * (pair_s + backward_s - 3 * weight_grad_s)


def pipedream_stage_s(
    compute_s: float, weight_bytes: float, replicas: int, byte_per_s: float, cost: str = "published"
) -> float:
    """Time per mini-batch of a stage with m replicas: the longer of work and exchange, in the released program the sum.

    published max(compute, 2(m-1) w/B)/m, released (compute + 4(m-1) w/(m B))/m.

    >>> formulas.pipedream_stage_s(10, 0.7, 3, 4.0), formulas.pipedream_stage_s(10, 0.7, 3, 4.0, cost="released")
    (3.3333333333333335, 3.488888888888889)
    """
    whole(replicas=replicas)
    positive(byte_per_s=byte_per_s)
    table = {
        "published": max(compute_s, 2 * (replicas - 1) * weight_bytes / byte_per_s),
        "released": compute_s + 2 * all_reduce_bytes(weight_bytes, replicas) / byte_per_s,
    }
    return chosen("cost", cost, table) / replicas


def pipedream_stashes(behind: int, replicas: int, *, released: bool = False) -> int:
    """Mini-batches whose weights and activations a replica stashes, with `behind` workers on later stages.

    ceil((behind + replicas)/replicas); the released program ceil(behind/replicas), nothing on the last stage.

    >>> formulas.pipedream_stashes(3, 2), formulas.pipedream_stashes(3, 2, released=True)
    (3, 2)
    """
    whole(0, behind=behind)
    whole(replicas=replicas)
    return math.ceil((behind if released else behind + replicas) / replicas)


def pipedream_2bw_stage_bytes(
    weight_bytes: float,
    activation_bytes: float,
    input_bytes: float,
    stages: int,
    *,
    schedule: str = "2bw",
    micro_batches: int | None = None,
    recompute: bool = False,
) -> float:
    """Bytes of weights and activations of the fullest of d equal stages, in the memory model of 2BW's planner.

    v W/d + n A/d, with recomputation v W/d + A/d + n A_in: v versions (2bw 2, dream d, flush and gpipe 1), n
    micro-batches (d; gpipe all m).

    Args:
        weight_bytes: W of the whole model.
        activation_bytes: A of the whole model for one micro-batch.
        input_bytes: A_in, the input of a stage for one micro-batch, which recomputation keeps.
        stages: d.
        schedule: 2bw, flush, gpipe or dream.
        micro_batches: m; required for gpipe, else d by default.
        recompute: True if activations are recomputed.

    >>> [formulas.pipedream_2bw_stage_bytes(8, 12, 0.5, 4, recompute=r) for r in (False, True)]
    [16.0, 9.0]
    >>> formulas.pipedream_2bw_stage_bytes(8, 12, 0.5, 4, schedule="gpipe", micro_batches=16)
    50.0
    """
    whole(stages=stages)
    kept = {"2bw": (2, stages), "dream": (stages, stages), "flush": (1, stages), "gpipe": (1, micro_batches or 0)}
    versions, count = chosen("schedule", schedule, kept)
    whole(micro_batches=count)
    kept_bytes = activation_bytes / stages + count * input_bytes if recompute else count * activation_bytes / stages
    return versions * weight_bytes / stages + kept_bytes


def pipemare_throughput(stages: int, micro_batches: int, synchronous_share: float) -> float:
    """Throughput with T3 relative to one without bubble: a share of the epochs runs synchronously, at rate N/(N+P-1).

    >>> round(formulas.pipemare_throughput(8, 4, synchronous_share=10 / 100), 6)
    0.851064
    """
    whole(stages=stages, micro_batches=micro_batches)
    drained = (micro_batches + stages - 1) / micro_batches
    return 1.0 / (synchronous_share * drained + 1.0 - synchronous_share)


def fill_drain_utilisation(stages: int, samples: int) -> float:
    """Utilisation of the workers if the pipeline drains after N samples, with F and B in parallel: N/(N+2S-2).

    >>> round(formulas.fill_drain_utilisation(4, 128), 6)
    0.955224
    """
    whole(stages=stages, samples=samples)
    return samples / (samples + 2 * stages - 2)


def fill_drain_bound(stages: int, samples: int) -> float:
    """The published lower bound of `fill_drain_utilisation`: N/(N+2S).

    >>> round(formulas.fill_drain_bound(4, 128), 6)
    0.941176
    """
    whole(stages=stages, samples=samples)
    return samples / (samples + 2 * stages)


def hetpipe_allocation(devices: Mapping[str, int], policy: str, size: int | None = None) -> tuple[tuple[str, ...], ...]:
    """Devices of each virtual worker: one type (NP), an equal share of every type (ED), or a fast and a slow type (HD).

    Args:
        devices: devices of each type, the fastest type first; NP takes each type for a node.
        policy: NP, ED or HD.
        size: devices of a virtual worker for NP and HD; by default the number of devices of the rarest type.

    >>> pool = {"V": 4, "R": 4, "G": 4, "Q": 4}
    >>> formulas.hetpipe_allocation(pool, "ED")[0], ["".join(w) for w in formulas.hetpipe_allocation(pool, "HD")]
    (('V', 'R', 'G', 'Q'), ['VVQQ', 'VVQQ', 'RRGG', 'RRGG'])

    Raises:
        UsageError: the policy is unknown, or the devices do not divide into virtual workers.
    """
    for kind, count in devices.items():
        whole(**{f"devices of type {kind}": count})
    chosen("policy", policy, dict.fromkeys(("NP", "ED", "HD")))
    types = {kind: (kind,) * count for kind, count in devices.items()}
    wide = min(devices.values()) if size is None else size
    whole(size=wide)
    if policy == "ED":
        workers = equal_shares(list(types.values()))
    elif policy == "HD":
        workers = paired_types(types, wide)
    else:
        workers = [worker for kind, own in types.items() for worker in paired_types({kind: own}, wide)]
    return tuple(map(tuple, workers))

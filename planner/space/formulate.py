"""Turn block costs, cluster and job into the tables of a `StageProblem`, which solvers work on."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner import schedules
from planner.costs.precision import optimizer_state_bytes
from planner.errors import JobError, UsageError
from planner.exchange import Phase, recipe_of
from planner.hardware.collectives import Terms
from planner.hardware.types import Cluster, neighbours
from planner.memory import fits
from planner.space.configuration import RecomputeChoice
from planner.space.cuts import pinned_blocks, stage_starts
from planner.space.exchange_tables import ExchangeTables, TiedEnds
from planner.space.jobs import overlap_of, precision_of
from planner.space.layers import Layers
from planner.space.placement import Placement, Placements
from planner.space.problem import StageProblem
from planner.space.ranges import Ranges, StageNeeds, StageWay, range_maxima, stage_needs
from planner.space.recompute_choices import allows_some_layers, rungs, ways_of
from planner.space.types import BlockCosts, Job
from planner.sums import float_sum

ALL_DIVISORS_UP_TO = 64
"""Slices of at most that many devices may use any number of replicas; larger ones powers of two and all devices."""

_CACHED_COSTS = 64
_ANY = 2**30
_USABLE = operator.attrgetter("usable_bytes")


class Formulator:
    """Formulates the stage problems of one job; tables that several problems share are computed once.

    Args:
        cluster: the machine.
        job: what is to be trained.
        some_layers: stages may recompute the first of their layers, where the job allows that.

    Attributes:
        placements: by ranks of a replica, the places where stages can lie.
        ranges: by costs, those of ranges of blocks; of the last few costs they are kept.
        needs: by costs and ZeRO stage, lower bounds on time and memory of stages of blocks i..j at any place; likewise.
    """

    def __init__(self, cluster: Cluster, job: Job, *, some_layers: bool = False) -> None:
        self._cluster, self._job = cluster, job
        self._offload: RecomputeChoice | None = None
        self._some_layers = some_layers and allows_some_layers(job)
        self._precision, self.overlap = precision_of(job, cluster), overlap_of(job, cluster)
        self._exchanges = ExchangeTables(self._precision, optimizer_state_bytes(job.optimizer, self._precision))
        self._tied: dict[tuple[int, int, int, tuple[int, ...]], TiedEnds] = {}
        self._used = job.devices_of(cluster)
        self.placements = functools.cache(functools.partial(Placements, cluster))
        self.ranges = functools.lru_cache(_CACHED_COSTS)(Ranges)
        self.needs = functools.lru_cache(_CACHED_COSTS)(self._stage_needs)

    def offloading(self, choice: RecomputeChoice) -> Formulator:
        """A formulator whose stages may also keep activations in the host's memory in one way, the slowest of theirs.

        Where all stages must be alike, all do.
        """
        other = copy.copy(self)
        other._offload, other._some_layers = choice, False
        other.needs = functools.lru_cache(_CACHED_COSTS)(other._stage_needs)
        return other

    def devices(self, ranks: int = 1) -> int:
        """Number of devices that the job may use; each group of `ranks` counts as one."""
        return self._used // ranks

    def replica_options(self, micro_batches: int, copies: int, slice_devices: int) -> tuple[int, ...]:
        """Allowed numbers of replicas of a stage in one copy.

        They divide the micro-batches; in large slices only powers of two and the largest divisor are tried.
        """
        fitting = [r for r in range(1, min(slice_devices, micro_batches) + 1) if micro_batches % r == 0]
        if slice_devices > ALL_DIVISORS_UP_TO:
            fitting = [r for r in fitting if r & (r - 1) == 0 or r == fitting[-1]]
        allowed = self._job.data_parallel
        return tuple(r for r in fitting if not allowed or r * copies in allowed)

    def problem(
        self,
        costs: BlockCosts,
        *,
        copies: int,
        schedule: str,
        zero: int,
        slice_devices: int | None = None,
    ) -> StageProblem:
        """The problem of one micro-batch size (that of the costs), number of copies, schedule and ZeRO stage.

        Args:
            costs: the chain's costs.
            copies: copies of the pipeline, to which the job's devices are dealt in equal slices.
            schedule: "1f1b" or "gpipe".
            zero: ZeRO stage.
            slice_devices: devices of one copy; by default as many as the job's devices allow.

        Raises:
            JobError: the copies and micro-batches do not divide the global batch, or outnumber the devices.
            UsageError: unknown precision, optimizer, recompute choice, or a schedule without a closed form.

        O(places * blocks^2), see `planner.space.placement` for the number of places.
        """
        job = self._job
        width, micro_batches = self._slice_share(costs, copies, slice_devices)
        options = self.replica_options(micro_batches, copies, width)
        placement, ranges = self.placements(costs.ranks).lay_out(copies, width, options), self.ranges(costs)
        piped = 0 if zero in (job.structure.zero_in_pipelines or job.zero) else 1
        in_flight, passing, filling = warm_up_tables(schedule, placement.replicas, width, micro_batches)
        return StageProblem(
            micro_batch=costs.micro_batch,
            micro_batches=micro_batches,
            copies=copies,
            slice_devices=width,
            schedule=schedule,
            zero=zero,
            max_stages=min(n for n in (job.max_stages, max(job.pipeline_stages, default=0), piped, _ANY) if n) % _ANY,
            pins=np.array(pinned_blocks(job, costs.names), dtype=np.int64).reshape(-1, 2),
            stage_counts=np.array(_stage_counts(job, zero, len(costs.parameter_elements)), dtype=np.int64),
            overlap=self.overlap,
            replicas=placement.replicas,
            shardings=np.full(len(placement.replicas), costs.sharding, dtype=np.int64),
            place=placement.place,
            place_kind=placement.place_kind,
            in_flight=in_flight,
            passing=passing,
            filling=filling,
            link=placement.link,
            receive_s=_transfers(placement.sends, costs.boundary_bytes, costs.gather_s),
            return_s=_transfers(placement.sends, costs.gradient_boundary_bytes, costs.gradient_gather_s),
            **self._work_tables(costs, placement, ranges, copies, zero),
            **self._way_tables([ranges.way(each) for each in self._ways(costs)], placement),
            host_bytes=self._cluster.host_memory_bytes / max(1, self._cluster.node_size) or math.inf,
            **self._tied_tables(placement, costs),
            ranks=costs.ranks,
            context=costs.context,
            expert=costs.expert,
            uniform=job.uniform or job.structure.equal_replicas,
            alike=job.structure.alike,
            layers=self._layers(costs),
        )

    def _slice_share(self, costs: BlockCosts, copies: int, slice_devices: int | None) -> tuple[int, int]:
        """Devices and micro-batches of one copy of the pipeline.

        Raises:
            JobError: the copies do not divide the global batch, or a copy gets no device.
        """
        most = self.devices(costs.ranks) // copies if copies > 0 else 0
        width = most if slice_devices is None else min(slice_devices, most)
        micro_batches, rest = divmod(self._job.global_batch, max(1, copies * costs.micro_batch))
        if width < 1 or rest or micro_batches < 1:
            raise JobError(
                f"{copies} copies with micro-batches of {costs.micro_batch} samples cannot share a global batch of "
                f"{self._job.global_batch} on {self._used} devices",
                hint="copies times micro-batch must divide the global batch, and each copy needs a device",
            )
        return width, micro_batches

    def _work_tables(
        self, costs: BlockCosts, placement: Placement, ranges: Ranges, copies: int, zero: int
    ) -> dict[str, Any]:
        """Times and bytes of stages by kind and place.

        ZeRO shards over all replicas of a stage, and over the ranks of a replica that hold the same elements.
        """
        kinds = [np.asarray(kind) for kind in placement.kinds]

        def slowest(values: np.ndarray) -> np.ndarray:
            return np.stack([values[kind].max(axis=0) for kind in kinds])

        shards_of, group = placement.parts.__getitem__, recipe_of(zero).optimizer
        update_shards = ranges.parts(shards_of(group), group)
        forward_s, backward_s = self._exchanges.in_passes(placement, costs, zero)
        return {
            "sync_s": self._exchanges.at_end(placement, costs, ranges, zero),
            "exchange_forward_s": forward_s,
            "exchange_backward_s": backward_s,
            "forward_s": slowest(ranges.forward_s),
            "backward_s": slowest(ranges.backward_s),
            "least_s": _least_prefix_s(costs, sorted({t for kind in placement.kinds for t in kind})),
            "capacity_bytes": np.array(
                [min(self._cluster.devices[t].usable_bytes for t in kind) for kind in placement.kinds], float
            ),
            "update_s": slowest(ranges.update_s)[placement.place_kind] / update_shards + ranges.step_s,
            "resident_bytes": self._exchanges.resident(ranges, range_maxima(costs.parameter_elements), shards_of, zero)
            + self._buffers(placement, costs)
            + np.where(self._allowed_stages(costs), 0.0, np.inf),
        }

    def _ways(self, costs: BlockCosts) -> tuple[RecomputeChoice, ...]:
        """The ways to keep or to recompute activations that stages choose from, fastest first."""
        if self._offload is None:
            return ways_of(self._job.recompute, costs)
        alike = self._job.structure.alike
        return (self._offload,) if alike else rungs(self._offload, costs, self._job.recompute)

    def _way_tables(self, ways: Sequence[StageWay], placement: Placement) -> dict[str, Any]:
        """Tables by way to keep or to recompute activations."""
        kinds = [list(kind) for kind in placement.kinds]
        size, devices = len(kinds), self._cluster.devices
        moved = [way.moved_bytes for way in ways if way.moved_bytes is not None]
        tables = [np.zeros_like(moved[0]) if way.moved_bytes is None else way.moved_bytes for way in ways if moved]

        def of_kinds(tables: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([np.stack([table] * size) for table in tables])

        return {
            "ways": tuple(way.choice for way in ways),
            "repeat_s": np.stack([np.stack([way.repeat_s[kind].max(axis=0) for kind in kinds]) for way in ways]),
            "saved_bytes": of_kinds([way.saved_bytes for way in ways]),
            "working_bytes": of_kinds([way.working_bytes for way in ways]),
            "moved_bytes": of_kinds(tables) if tables else np.zeros((0, size, *ways[0].saved_bytes.shape)),
            "host_byte_per_s": np.array([min(devices[t].host_byte_per_s for t in kind) for kind in kinds]),
        }

    def _allowed_stages(self, costs: BlockCosts) -> np.ndarray:
        """bool [n, n], whether blocks i..j may be a stage: only whole layers, if the job requires those."""
        starts = stage_starts(costs, self._job)
        return np.asarray(starts[:-1][:, None] & starts[1:][None, :])

    def _buffers(self, placement: Placement, costs: BlockCosts) -> np.ndarray:
        """[P, n, n] bytes of communication buffers of a rank, by place and blocks i..j."""
        devices = [min((self._cluster.devices[t] for t in kind), key=_USABLE) for kind in placement.kinds]
        peer_bytes = np.array([device.neighbour_bytes for device in devices], float)[placement.place_kind]
        piped = np.ones((len(costs.parameter_elements),) * 2, bool)
        piped[0, -1] = False
        data = (placement.copies * placement.place_replicas)[:, None, None]
        return np.asarray(peer_bytes[:, None, None] * neighbours(costs.ranks, data, piped))

    def _layers(self, costs: BlockCosts) -> Layers | None:
        """The layers of which a stage may recompute the first ones; None where it recomputes all or none."""
        return costs.layers if self._some_layers and len(costs.layers.ends) else None

    def exceeds(self, costs: BlockCosts, zero: int) -> bool:
        """True if a device cannot hold its share of all state and what a micro-batch keeps in all blocks."""
        ranges = self.ranges(costs)
        held_bytes = self._least_resident(ranges, zero, costs.ranks) + ranges.saved_bytes
        return not fits(held_bytes[0, -1], self._cluster.largest_bytes)

    def _stage_needs(self, costs: BlockCosts, zero: int) -> StageNeeds:
        """Lower bounds on time and memory of stages of blocks i..j, at any place."""
        ranges, capacity_bytes = self.ranges(costs), self._cluster.largest_bytes
        resident = self._least_resident(ranges, zero, costs.ranks)
        nearest_sends = [self.placements(costs.ranks).nearest_send()]
        transfer_s = _transfers(nearest_sends, costs.boundary_bytes, costs.gather_s)[0, :-1]
        transfer_s += _transfers(nearest_sends, costs.gradient_boundary_bytes, costs.gradient_gather_s)[0, :-1]
        transfer_s[0] = 0.0
        activations = ranges.least_needs(self._ways(costs), self._layers(costs))
        return stage_needs(ranges, resident, capacity_bytes, activations, transfer_s, recipe_of(zero).optimizer)

    def least_exchange(
        self, ranks: int, slices: tuple[int, int, int], replicas: Sequence[int], phase: Phase
    ) -> np.ndarray:
        """[R, 2] lower bound on the exchanges of a stage: seconds at start-up, and seconds an element.

        Args:
            ranks: devices of a replica, which count as one.
            slices: copies of the pipeline, devices of one copy, ZeRO stage.
            replicas: allowed numbers of replicas of a stage.
            phase: the end of an iteration, or a pass, in which every block starts an exchange of its own.
        """
        return self._exchanges.least_terms(self.placements(ranks), slices, replicas, phase)

    def _least_resident(self, ranges: Ranges, zero: int, ranks: int) -> np.ndarray:
        """[n, n] bytes of weights, gradients, optimizer state and workspace, ZeRO sharding over all devices."""
        devices = self.devices(ranks)
        return self._exchanges.resident(ranges, 0.0, lambda group: np.asarray(devices if group else 1), zero)

    def _tied_tables(self, placement: Placement, costs: BlockCosts) -> dict[str, Any]:
        """Seconds to sum the gradients of weights that the first and the last block share.

        `tied_elsewhere` says whether other blocks share weights too, which only the judge prices.
        """
        ends = (0, len(costs.saved_bytes) - 1)
        tied_elsewhere = any(tie.blocks != ends for tie in costs.ties)
        shard_elements = float_sum(tie.shard_elements for tie in costs.ties if tie.blocks == ends)
        key = (costs.ranks, placement.copies, placement.slice_devices, tuple(placement.replicas.tolist()))
        if not shard_elements:
            table, class_of = np.zeros((0, *placement.place.shape)), np.zeros(len(placement.replicas), dtype=np.int64)
            return {"tied_s": table, "tied_class": class_of, "tied_elsewhere": tied_elsewhere}
        if key not in self._tied:
            slices = placement.copies, placement.slice_devices
            self._tied[key] = TiedEnds(self._cluster, *slices, placement.replicas, costs.ranks)
        table, class_of = self._tied[key].seconds(shard_elements * self._precision.gradient_bytes)
        return {"tied_s": table, "tied_class": class_of, "tied_elsewhere": tied_elsewhere}


def _least_prefix_s(costs: BlockCosts, types: Sequence[int]) -> np.ndarray:
    """[n + 1] prefix sums of each block's forward and backward seconds on the fastest of some device types."""
    fastest_s = (costs.forward_s + costs.backward_s)[list(types)].min(axis=0)
    return np.concatenate([[0.0], np.cumsum(fastest_s)])


def warm_up_tables(
    schedule: str, replicas: np.ndarray, slice_devices: int, micro_batches: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number of micro-batches that a stage keeps in flight, for a search that adds stages from the last to the first.

    In 1F1B a replica keeps what it runs forward before its first backward, 1 + ceil(x / r) but at most m / r, when x
    micro-batches pass the next stage before that one's first backward; r times that then pass this one. GPipe keeps all
    m / r; its backwards begin at the last stage when each of the x replicas there has run its last forward.

    Returns:
        (in_flight, passing, filling): int64 [R, X + 1] each, by x; `filling` are the forwards that a replica has left
        to run while a micro-batch goes to the last stage and the first gradient comes back from it. Rounding up adds
        less than r a stage, so x stays below twice the devices; beyond m it makes no difference. X is the lesser of
        these.

    Raises:
        UsageError: the schedule's count does not follow from the later stages in this way.
    """
    coming = np.arange(min(micro_batches, 2 * slice_devices) + 1)[None, :]
    counts = schedules.get(schedule).warm_up_after(replicas[:, None], coming, micro_batches)
    if counts is None:
        raise UsageError(f"schedule {schedule!r} cannot be searched over stages", hint="use 1f1b or gpipe")
    return counts[0], np.minimum(counts[1], coming[0, -1]), counts[2]


def _stage_counts(job: Job, zero: int, blocks: int) -> list[int]:
    """Numbers of stages that a job allows with a ZeRO stage, ascending; empty for any."""
    counts = sorted(set(job.pipeline_stages))
    if not job.structure.zero_alone or zero in job.structure.zero_alone:
        return counts
    return [count for count in counts or range(2, blocks + 1) if count > 1]


def _transfers(sends: Sequence[Terms], payload_bytes: np.ndarray, gather_s: np.ndarray | None) -> np.ndarray:
    """[classes, n + 1] seconds of the slowest transfer over each boundary; zero for zero bytes."""
    if not sends:
        return np.zeros((1, len(payload_bytes)))
    seconds = np.stack([terms.seconds(payload_bytes[:, None]).max(axis=1) for terms in sends])
    return np.where(payload_bytes > 0, seconds + (0.0 if gather_s is None else gather_s), 0.0)

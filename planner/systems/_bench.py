"""What all searches of the systems read: prices by micro-batch size, sizes worth trying, memory of a stage."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from planner.costs.precision import optimizer_state_bytes, precision
from planner.costs.types import Profile
from planner.errors import ModelError
from planner.graph import Chain, Graph
from planner.hardware.types import Cluster
from planner.solvers import micro_batch_sizes
from planner.space.settled import settled
from planner.space.types import BlockCosts, Job

MOST_SIZES = 9
"""Micro-batch sizes that are priced at the most."""

SMALL_GRAPH, MOST_SIZES_SMALL = 200, 13
"""The same for graphs of few operators."""


class Prices(Protocol):
    """A model's prices by micro-batch size (`planner.Pricer`)."""

    chain: Chain

    def costs(self, micro_batch: int, /) -> BlockCosts:
        """Costs of the chain's blocks."""
        ...

    def graph_at(self, micro_batch: int, /) -> Graph:
        """The model at that size."""
        ...

    def profiles(self, micro_batch: int, /) -> tuple[Profile, ...]:
        """Prices of its operators, one profile a device type."""
        ...


@dataclass(frozen=True, slots=True)
class StageRule:
    """What a stage keeps beside its parameters.

    Attributes:
        kept: micro-batches in flight.
        versions: of the weights.
        states: copies of weights, gradients and optimizer state (several stages on one device).
    """

    kept: float
    versions: int = 1
    states: int = 1


class Bench:
    """A model, a cluster and a job, ready to be asked by many systems.

    Args:
        prices: the model's prices.
        cluster: the machine.
        job: what is to be trained.
        allowed: "any" where asynchronous systems may be taken for the best.
    """

    def __init__(self, prices: Prices, cluster: Cluster, job: Job, *, allowed: tuple[str, ...] = ()) -> None:
        job = settled(job, cluster)
        self.prices, self.cluster, self.job = prices, cluster, job
        self.precision = precision(job.precision)
        self.state_bytes = optimizer_state_bytes(job.optimizer, self.precision)
        self.devices = min(job.devices or cluster.device_count, cluster.device_count)
        self.costs = functools.cache(prices.costs)
        self.tables = functools.cache(self._tables)
        self.notes: tuple[str, ...] = ()
        self.fixed = False
        self.sizes = self._sizes()
        self.allowed = allowed

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return len(self.prices.chain.blocks)

    def open_job(self, global_batch: int) -> Job:
        """The job with every limit that a named system sets itself lifted."""
        return replace(
            self.job,
            global_batch=global_batch,
            schedules=("1f1b",),
            recompute="auto",
            zero=(0, 1),
            micro_batches=(),
            max_stages=0,
        )

    def _sizes(self) -> tuple[int, ...]:
        """Powers of two that divide the global batch, as far as the model can be set to them, smallest first.

        Where there are too many, the smallest and the largest stay.
        """
        job = self.job
        chosen = [b for b in micro_batch_sizes(job) if job.micro_batches or b & (b - 1) == 0]
        most = MOST_SIZES_SMALL if len(self.prices.chain.graph.nodes) <= SMALL_GRAPH else MOST_SIZES
        largest = max(device.usable_bytes for device in self.cluster.devices)
        found: list[int] = []
        for size in chosen:
            try:
                costs = self.costs(size)
            except ModelError as error:
                own = self.prices.chain.graph.batch or 1
                if found:
                    self.notes += (f"micro-batches stop at {found[-1]}: {error}",)
                    break
                return self._fixed(own, error)
            if found and float(np.diagonal(costs.saved_bytes).max()) > largest:
                break
            found.append(size)
        return tuple(found if len(found) <= most else [found[0], *found[1 - most :]])

    def _fixed(self, size: int, reason: ModelError) -> tuple[int, ...]:
        job, message, where = self.job, reason.problem.message, reason.problem.where
        if job.global_batch % size:
            raise ModelError(message, where=where, hint=f"use a global batch that {size} divides, as exported")
        if job.micro_batches and size not in job.micro_batches:
            raise ModelError(message, where=where, hint=f"allow micro-batches of {size}, as exported")
        self.notes += (f"micro-batches of {size} sample(s) only: {reason}",)
        self.fixed = True
        return (size,)

    def _tables(self, micro_batch: int) -> Tables:
        return Tables(self, self.costs(micro_batch))


class Tables:
    """Sums over runs of blocks i..j-1 of one micro-batch size, float64 [n + 1, n + 1], infinite where i >= j."""

    def __init__(self, bench: Bench, costs: BlockCosts) -> None:
        self.bench, self.costs = bench, costs
        n = len(costs.parameter_elements)
        self.real = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]
        forward, backward = costs.forward_s.mean(axis=0), costs.backward_s.mean(axis=0)
        self.work_s = _runs(forward + backward)
        repeated = np.ones(n, bool) if costs.repeated is None else costs.repeated
        self.repeat_s = _runs(np.where(repeated, forward, 0.0))
        self.elements = _runs(costs.parameter_elements)
        for tie in costs.ties:
            first, last = tie.blocks[0], tie.blocks[-1]
            both = np.zeros((n + 1, n + 1))
            both[: first + 1, last + 1 :] = tie.elements * (len(tie.blocks) - 1)
            self.elements = self.elements - both
        kept = np.zeros(n) if costs.kept_bytes is None else costs.kept_bytes
        self.saved = _framed(costs.saved_bytes)
        self.checkpoint = _framed(costs.checkpoint_bytes) + _runs(kept)
        own = np.where(repeated, np.diagonal(costs.saved_bytes), 0.0)
        self.working = np.maximum(_maxima(own) - _runs(kept), 0.0)
        self.forward_s = _runs(forward)
        self.entering = np.repeat(costs.boundary_bytes[:, None], n + 1, axis=1)
        self.workspace = _maxima(costs.workspace_bytes)

    def needed(self, rule: StageRule, *, recompute: bool, whole: bool = False) -> np.ndarray:
        """[n + 1, n + 1] bytes of a device with that run of blocks, the runtime's reserve left out.

        `recompute` keeps the inputs of every block and repeats block by block (logits and loss kept); with `whole` only
        what enters the stage is kept, and all of it is repeated at once.
        """
        bench, chosen = self.bench, self.bench.precision
        a_state = chosen.weight_bytes * rule.versions + chosen.gradient_bytes + bench.state_bytes
        fixed = rule.states * a_state * self.elements + self.workspace
        if recompute:
            kept, working = self.again(whole=whole)
            return np.asarray(fixed + rule.kept * kept + working)
        return np.asarray(fixed + rule.kept * self.saved)

    def again(self, *, whole: bool) -> tuple[np.ndarray, np.ndarray]:
        """[n + 1, n + 1] bytes that recomputation keeps of a micro-batch in flight, and of the one it repeats."""
        return (self.entering, self.saved) if whole else (self.checkpoint, self.working)

    def stage_s(self, *, recompute: bool, whole: bool = False) -> np.ndarray:
        """[n + 1, n + 1] forward and backward of a run of blocks, on a device of mean speed; infinite where empty."""
        total = self.work_s
        if recompute:
            total = total + (self.forward_s if whole else self.repeat_s)
        return np.where(self.real, total, np.inf)


def _runs(values: np.ndarray) -> np.ndarray:
    prefix = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(np.maximum(prefix[None, :] - prefix[:, None], 0.0))


def _framed(values: np.ndarray) -> np.ndarray:
    """[n, n] over i..j inclusive to [n + 1, n + 1] over i..j-1."""
    n = len(values)
    framed = np.zeros((n + 1, n + 1))
    framed[:n, 1:] = values
    return framed


def _maxima(values: np.ndarray) -> np.ndarray:
    n = len(values)
    spread = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], -np.inf)
    return _framed(np.triu(np.maximum.accumulate(spread, axis=1)))

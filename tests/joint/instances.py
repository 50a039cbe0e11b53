"""Random chains on random machines, with random ways to share the operators among 2 and 4 ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from planner.hardware import COLUMNS, Cluster, Collective, Terms
from planner.space import BlockCosts, InnerReplicas, Job
from planner.space.pricer import FloorKey, Floors
from planner.space.types import Structure
from tests.space.instances import chain, cluster

PER_RANK = ("parameter_elements", "saved_bytes", "checkpoint_bytes", "workspace_bytes")
CROSSING = ("boundary_bytes", "gradient_boundary_bytes", "gather_s", "gradient_gather_s")


class Ways:
    """Made-up shardings: every number of ranks has one floor, refined to three ways.

    Attributes:
        plain: costs of single devices by micro-batch size.
        sharded: costs of groups.
        shelves: all of them by micro-batch size and number.
    """

    def __init__(self, plain: dict[int, BlockCosts], sharded: dict[int, tuple[BlockCosts, ...]]) -> None:
        self.plain, self.sharded = plain, sharded
        self.shelves = {b: {c.sharding: c for c in (plain[b], *sharded[b])} for b in plain}

    def only(self, ranks: Collection[int]) -> Ways:
        """Those with certain numbers of ranks, all where none is given: a job's limit is the pricer's to keep."""
        return Ways(
            self.plain, {b: tuple(c for c in ways if not ranks or c.ranks in ranks) for b, ways in self.sharded.items()}
        )

    def in_words(self) -> str:
        """Groups by number of ranks."""
        return f"groups of {sorted({c.ranks for ways in self.sharded.values() for c in ways})} devices"

    @property
    def fewest_samples(self) -> int:
        """Any size has all groups."""
        return 1

    def costs(self, micro_batch: int) -> BlockCosts:
        """Of single devices."""
        return self.plain[micro_batch]

    def floors(self, micro_batch: int) -> Sequence[tuple[BlockCosts, FloorKey]]:
        """The least of every figure over the ways with as many ranks."""
        found = []
        for ranks in sorted({c.ranks for c in self.sharded[micro_batch]}):
            found.append((_least(self._of(micro_batch, ranks)), (ranks,)))
        return found

    def even_split(self, micro_batch: int) -> Sequence[BlockCosts]:
        """The first two ways."""
        return self.sharded[micro_batch][:2]

    def closest(self, floors: Floors) -> Floors:
        """None are closer."""
        return floors

    def refine(
        self, micro_batch: int, key: FloorKey
    ) -> tuple[Sequence[tuple[BlockCosts, FloorKey]], Sequence[BlockCosts]]:
        """A floor's ways."""
        return (), self._of(micro_batch, key[0])

    def least(self, micro_batch: int, key: FloorKey) -> None:
        """The ways are all there are."""

    def finer(self, micro_batch: int, number: int) -> Sequence[BlockCosts]:
        """None beside them."""
        return ()

    def _of(self, micro_batch: int, ranks: object) -> list[BlockCosts]:
        return [c for c in self.sharded[micro_batch] if c.ranks == ranks]


def _least(ways: Sequence[BlockCosts]) -> BlockCosts:
    first, n = ways[0], len(ways[0].parameter_elements)
    names = ("forward_s", "backward_s", "update_s", *PER_RANK)
    least = {name: np.min([getattr(w, name) for w in ways], axis=0) for name in names}
    left = [w.parameter_elements if w.shard_elements is None else w.shard_elements for w in ways]
    nothing = {"step_s": None, "inner_replicas": (), **{name: np.zeros(n + 1) for name in CROSSING}}
    nothing["shard_elements"] = np.min(left, axis=0)
    return dataclasses.replace(first, **least, **nothing, sharding=0)


def shared(rng: np.random.Generator, costs: BlockCosts, ranks: int, first: int) -> tuple[BlockCosts, ...]:
    """The same chain with operators shared in three ways, two of which hand over tensors alike.

    An uneven part of everything is on each rank, and communication comes on top.
    """
    n = len(costs.parameter_elements)
    found = []
    for label, count in (("alike", 2), ("else", 1)):
        crossing = {
            "boundary_bytes": costs.boundary_bytes / ranks,
            "gradient_boundary_bytes": costs.gradient_boundary_bytes / ranks,
            "gather_s": rng.uniform(0, 0.1, n + 1) * (costs.boundary_bytes > 0),
            "gradient_gather_s": rng.uniform(0, 0.1, n + 1) * (costs.gradient_boundary_bytes > 0),
        }
        for _ in range(count):
            part, talk_s = rng.uniform(1 / ranks, 1.3 / ranks, n), rng.uniform(0, 0.2, n)
            held = {name: getattr(costs, name) * float(rng.uniform(1 / ranks, 1.2 / ranks)) for name in PER_RANK}
            way = dataclasses.replace(
                costs,
                **held,
                **crossing,
                forward_s=costs.forward_s[:1] * part + talk_s,
                backward_s=costs.backward_s[:1] * part + talk_s,
                update_s=costs.update_s[:1] / ranks,
                ranks=ranks,
                sharding=first + len(found),
                label=f"{ranks}, {label}",
                step_s=rng.uniform(0, 0.1, n),
            )
            found.append(way)
    dealt = np.random.default_rng(int(1000 * costs.forward_s.sum()) + ranks)
    return tuple(map(dealt_out, itertools.repeat(dealt), found)) if dealt.random() < 0.5 else tuple(found)


def dealt_out(rng: np.random.Generator, way: BlockCosts) -> BlockCosts:
    """The same way where all ranks of a group hold a part of its weights alike."""
    alike = way.parameter_elements * rng.uniform(0, 1, len(way.parameter_elements))
    slow, fast = rng.uniform(0, 0.1), rng.uniform(0, 0.01)
    terms = {kind: free_terms(slow, fast) for kind in Collective}
    left = way.parameter_elements - alike * (1 - 1 / way.ranks)
    return dataclasses.replace(
        way, shard_elements=left, inner_replicas=(InnerReplicas(way.ranks, alike, (), terms),), ties=()
    )


def free_terms(latency_s: float, s_per_byte: float) -> Terms:
    """One algorithm of that cost."""
    latency, slope = np.full(len(COLUMNS), np.inf), np.zeros(len(COLUMNS))
    latency[0], slope[0] = latency_s, s_per_byte
    return Terms(latency, slope)


def random_joint(seed: int) -> tuple[Ways, Cluster, Job]:
    """A chain of 2 to 4 blocks on 2, 4 or 8 equal devices, micro-batches of one and two samples."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 5))
    sizes = [(2,), (4,), (2, 2), (4, 2)][int(rng.integers(4))]
    whole = lambda low, high, size=n: rng.integers(low, high, size).astype(float).tolist()  # noqa: E731
    one = chain(
        rng.uniform(0.1, 3.0, n),
        elements=whole(0, 50),
        saved=whole(0, 200),
        checkpoint=whole(0, 40),
        boundary=whole(0, 30, n + 1),
        workspace=whole(0, 30),
        update_s=rng.uniform(0, 0.5, n).tolist(),
    )
    plain = {1: one, 2: _twice(one)}
    counts = [ranks for ranks in (2, 4) if ranks <= int(np.prod(sizes)) and ranks <= sizes[0]]
    ways = {
        size: tuple(way for k, ranks in enumerate(counts) for way in shared(rng, costs, ranks, 3 * k + 1))
        for size, costs in plain.items()
    }
    machine = cluster(
        sizes,
        tuple(float(b) for b in rng.choice([5.0, 30.0, 300.0, 1e6], len(sizes))),
        latency_s=float(rng.choice([0.0, 0.01, 0.3])),
        memory_bytes=(int(rng.choice([250, 500, 1200, 10**6]) * rng.uniform(0.6, 1.4)),),
    )
    job = Job(
        schedules=("1f1b", "gpipe"),
        global_batch=int(rng.choice([2, 4, 8])),
        precision=str(rng.choice(["fp32", "bf16"])),
        recompute=str(rng.choice(["never", "always", "auto"])),
        micro_batches=(1, 2),
        max_stages=int(rng.choice([0, 0, 2, 3])),
        overlap=float(rng.choice([0.0, 0.5])),
        zero=tuple(sorted(rng.choice(4, 2, replace=False).tolist())),
        structure=Structure(some_layers=False),  # enumeration recomputes whole stages
    )
    return Ways(plain, ways), machine, job


def _twice(costs: BlockCosts) -> BlockCosts:
    """Two samples at a time: 1.7 times the time, twice the memory."""
    kinds = ("saved_bytes", "checkpoint_bytes", "boundary_bytes", "gradient_boundary_bytes", "workspace_bytes")
    doubled = {name: getattr(costs, name) * 2 for name in kinds}
    times = {name: getattr(costs, name) * 1.7 for name in ("forward_s", "backward_s")}
    return dataclasses.replace(costs, micro_batch=2, **times, **doubled)

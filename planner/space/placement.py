"""Where stages can lie in a slice, and what communication costs there: everything that does not depend on the blocks.

A stage with r replicas at device a of the slice is, over all copies, the ranks `c W + a .. c W + a + r - 1`. Hundreds
of such places differ only in which levels they span and which device types they hold, so prices are kept by distinct
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.collectives import Terms, collective_terms, send_terms
from planner.hardware.span import span_of
from planner.hardware.types import Cluster, Collective


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of a slice and the boundaries between them.

    Attributes:
        copies: copies of the pipeline, each on its own slice.
        slice_devices: devices of a slice, W.
        replicas: int64 [R] allowed replicas.
        place: int64 [R, W]; -1 where the stage does not fit.
        place_replicas: int64 [P] replicas of a place in one copy.
        place_kind: int64 [P].
        kinds: device types of each kind, ascending.
        all_reduce, reduce_scatter, all_gather: prices by place.
        link: int64 [R, R, W + 1] boundary classes; -1 where the stages do not fit.
        sends: for each boundary class, the prices of its transfers; the slowest counts.
    """

    copies: int
    slice_devices: int
    replicas: np.ndarray
    place: np.ndarray
    place_replicas: np.ndarray
    place_kind: np.ndarray
    kinds: tuple[tuple[int, ...], ...]
    all_reduce: tuple[Terms, ...]
    reduce_scatter: tuple[Terms, ...]
    all_gather: tuple[Terms, ...]
    link: np.ndarray
    sends: tuple[Terms, ...]


def lay_out(cluster: Cluster, copies: int, slice_devices: int, replicas: Sequence[int]) -> Placement:
    """List the places of a slice and price what happens there; O(R * ranks + R^2 * slice * pairs)."""
    options = np.asarray(replicas, dtype=np.int64)
    place, keys = _places(cluster, copies, slice_devices, options)
    kinds = sorted({types for _, _, types, _ in keys})
    link, sends = _links(cluster, copies, slice_devices, options)

    def priced(kind: Collective) -> tuple[Terms, ...]:
        return tuple(collective_terms(cluster, kind, np.asarray(ranks), shared) for _, shared, _, ranks in keys)

    return Placement(
        copies=copies,
        slice_devices=slice_devices,
        replicas=options,
        place=place,
        place_replicas=np.array([count for count, *_ in keys], dtype=np.int64),
        place_kind=np.array([kinds.index(types) for _, _, types, _ in keys], dtype=np.int64),
        kinds=tuple(kinds),
        all_reduce=priced(Collective.ALL_REDUCE),
        reduce_scatter=priced(Collective.REDUCE_SCATTER),
        all_gather=priced(Collective.ALL_GATHER),
        link=link,
        sends=sends,
    )


_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _places(cluster: Cluster, copies: int, width: int, options: np.ndarray) -> tuple[np.ndarray, list[_Key]]:
    """Index of each stage's place, and of each place: replicas, groups that share its ports, device types, ranks."""
    place = np.full((len(options), width), -1, dtype=np.int64)
    found: dict[object, int] = {}
    keys: list[_Key] = []
    starts = np.arange(copies)[:, None] * width
    period = _period(cluster, copies, width)
    for o, count in enumerate(options.tolist()):
        for a in range(width - count + 1):
            if a >= period:
                place[o, a] = place[o, a - period]
                continue
            ranks = (starts + a + np.arange(count)).ravel()
            types = tuple(np.unique(cluster.device_types[ranks]).tolist())
            key = (count, types, span_of(cluster, ranks))
            if key not in found:
                found[key] = len(found)
                keys.append((count, max(1, width // count), types, tuple(ranks.tolist())))
            place[o, a] = found[key]
    return place, keys


def _period(cluster: Cluster, copies: int, width: int) -> int:
    """Devices after which places repeat: one child of the outermost level, if all copies begin alike in theirs."""
    child = (1, *cluster.group_sizes())[-2] if cluster.levels else 1
    repeats = len(cluster.devices) == 1 and (copies == 1 or width % child == 0)
    return child if repeats else width


def _links(cluster: Cluster, copies: int, width: int, options: np.ndarray) -> tuple[np.ndarray, tuple[Terms, ...]]:
    """Classes of boundaries: which levels the pairs that talk are joined by, and how many send at once."""
    count = len(options)
    link = np.full((count, count, width + 1), -1, dtype=np.int64)
    found: dict[tuple[int, int], int] = {}
    sends: list[Terms] = []
    sizes = np.asarray((1, *cluster.group_sizes()))
    for before, senders in enumerate(options.tolist()):
        for after, receivers in enumerate(options.tolist()):
            at = np.arange(senders, width - receivers + 1)
            if not len(at):
                continue
            depths = _depths(at, copies, width, senders, receivers, sizes)
            shared = min(senders, receivers)
            for key in np.unique(depths).tolist():
                if (key, shared) not in found:
                    found[key, shared] = len(found)
                    sends.append(_send_terms(cluster, key, shared, sizes))
                link[before, after, at[depths == key]] = found[key, shared]
    return link, tuple(sends)


def _depths(at: np.ndarray, copies: int, width: int, senders: int, receivers: int, sizes: np.ndarray) -> np.ndarray:
    """For each boundary, the set of depths at which its pairs are joined, as bits; [len(at)] int64."""
    turns = np.arange(int(np.lcm(senders, receivers)))
    bits = np.zeros(len(at), dtype=np.int64)
    for copy in range(copies):
        here = copy * width + at[:, None]
        source, target = here - senders + turns % senders, here + turns % receivers
        depth = np.zeros(source.shape, dtype=np.int64)
        for size in sizes.tolist():
            depth += source // size != target // size
        bits |= np.bitwise_or.reduce(1 << depth, axis=1)
    return bits


def _send_terms(cluster: Cluster, bits: int, shared: int, sizes: np.ndarray) -> Terms:
    """Prices of one transfer at each depth of the set; ranks 0 and `sizes[d - 1]` are joined at depth d."""
    targets = [int(sizes[d - 1]) for d in range(1, len(sizes) + 1) if bits >> d & 1]
    return send_terms(cluster, 0, np.asarray(targets), shared)

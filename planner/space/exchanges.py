"""What replicas exchange at each place, and what each of them holds: tables over stages of blocks i..j."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.costs.precision import Precision
from planner.hardware.collectives import Terms
from planner.hardware.types import Collective
from planner.space.placement import Placement, Placements
from planner.space.ranges import Ranges, range_maxima, range_sums

_CACHED_BYTES = 2**27
_WHOLE_BLOCKS = 2


class Exchanges:
    """Tables of one job's exchanges, those of equal weights worked out once.

    Args:
        precision: number formats.
        state_bytes: of the optimizer, a parameter.
    """

    def __init__(self, precision: Precision, state_bytes: float) -> None:
        self._precision, self._state_bytes = precision, state_bytes
        self._known: dict[tuple[int, int, bytes], np.ndarray] = {}

    def at_end(self, placement: Placement, elements: np.ndarray, zero: int) -> np.ndarray:
        """[P, n, n] seconds at the end of an iteration: all-reduce, its two halves, the second of them, or nothing."""
        if zero > 2:
            return np.zeros((len(placement.place_kind), *elements.shape))
        key = (id(placement), zero, elements.tobytes())
        if key not in self._known:
            tables = [self._end_s(placement, p, elements, zero) for p in range(len(placement.all_reduce))]
            while self._known and sum(t.nbytes for t in self._known.values()) > _CACHED_BYTES:
                del self._known[next(iter(self._known))]
            self._known[key] = np.stack(tables)
        return self._known[key]

    def _end_s(self, placement: Placement, place: int, elements: np.ndarray, zero: int) -> np.ndarray:
        chosen = self._precision
        if zero == 0:
            seconds = _least(placement.all_reduce[place], elements * chosen.gradient_bytes)
        else:
            seconds = _least(placement.all_gather[place], elements * chosen.weight_bytes)
        if zero == 1:
            seconds = seconds + _least(placement.reduce_scatter[place], elements * chosen.gradient_bytes)
        return np.where(elements > 0, seconds, 0.0)

    def in_passes(self, placement: Placement, own: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
        """([P, n, n] seconds in a forward, the same in a backward pass), block by block; none below ZeRO-2.

        Args:
            placement: the places.
            own: [n] elements of each block.
            zero: ZeRO stage.
        """
        count = len(placement.place_kind) if zero >= 2 else 0
        forward, backward = np.zeros((2, count, len(own), len(own)))
        for p in range(count):
            scatter = _least(placement.reduce_scatter[p], own * self._precision.gradient_bytes)
            gather = _least(placement.all_gather[p], own * self._precision.weight_bytes)
            scatter, gather = np.where(own > 0, scatter, 0.0), np.where(own > 0, gather, 0.0)
            if zero >= 3:
                forward[p] = range_sums(gather)
            backward[p] = forward[p] + range_sums(scatter)
        return forward, backward

    def resident(self, ranges: Ranges, own: np.ndarray, shards: np.ndarray, zero: int) -> np.ndarray:
        """[.., n, n] bytes of weights, gradients, optimizer state and workspace, in so many shards [..]."""
        chosen = self._precision
        each = chosen.weight_bytes / (shards if zero >= 3 else 1) + chosen.gradient_bytes / (shards if zero >= 2 else 1)
        each = np.asarray(each + self._state_bytes / (shards if zero else 1))
        whole = (zero >= 2) * chosen.gradient_bytes + (zero >= 3) * _WHOLE_BLOCKS * chosen.weight_bytes
        beside = np.where(shards > 1, whole, 0.0)[..., None, None] * range_maxima(own)
        return np.asarray(each[..., None, None] * ranges.elements + beside + ranges.workspace_bytes)

    def least(self, placements: Placements, task: tuple[int, int, int], replicas: Sequence[int]) -> np.ndarray:
        """[R, 2] seconds at the end of an iteration at the least, without parameters and for each of them.

        Args:
            placements: where stages may lie.
            task: copies, devices of one copy, ZeRO stage.
            replicas: what a stage may have.
        """
        copies, width, zero = task

        def least(kind: Collective, element_bytes: float) -> np.ndarray:
            return np.asarray(placements.least(copies, width, replicas, kind) * [1.0, element_bytes])

        if zero > 2:
            return np.zeros((len(replicas), 2))
        if zero == 0:
            return least(Collective.ALL_REDUCE, self._precision.gradient_bytes)
        gather = least(Collective.ALL_GATHER, self._precision.weight_bytes)
        return gather if zero == 2 else gather + least(Collective.REDUCE_SCATTER, self._precision.gradient_bytes)


def _least(terms: Terms, payload_bytes: np.ndarray) -> np.ndarray:
    """The cheapest algorithm at each payload, looking only at those that apply."""
    applies = np.flatnonzero(np.isfinite(terms.latency_s))
    first, *others = [terms.latency_s[k] + terms.s_per_byte[k] * payload_bytes for k in applies]
    for seconds in others:
        np.minimum(first, seconds, out=first)
    return np.asarray(first)

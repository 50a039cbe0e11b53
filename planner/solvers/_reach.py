"""Whether a problem can hold a decision faster than a cutoff, by compute, memory and synchronisation: a look before it
is solved.

Nothing here knows where stages lie: transfers are free, every stage runs on the fastest and the largest device, shards
what it can over all devices and synchronises where that is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solvers._objective import Objective
from planner.solvers._relaxation import most_passing
from planner.space.formulate import warm_up_tables
from planner.space.ranges import StageNeeds

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Share:
    """What one copy of the pipeline has to work with.

    Attributes:
        schedule: name of the schedule.
        devices: devices of the copy.
        micro_batches: micro-batches of the copy.
        replicas: int64 [R], what a stage may have, ascending.
        sync_s: [R] seconds that synchronising a stage takes at the least, without its bytes.
        sync_s_per_element: [R] and for each of its parameters.
        update_share: [R] part of the optimizer step that one replica takes.
        overlap: fraction of a backward behind which synchronisation hides.
    """

    schedule: str
    devices: int
    micro_batches: int
    replicas: np.ndarray
    sync_s: np.ndarray
    sync_s_per_element: np.ndarray
    update_share: np.ndarray
    overlap: float


class Reach:
    """Least times of one problem by an objective, to be held against any number of cutoffs; O(R n^2) to prepare."""

    def __init__(self, needs: StageNeeds, share: Share, objective: Objective) -> None:
        self._needs, self._share = needs, share
        column = (slice(None), None, None)
        turns = share.micro_batches // share.replicas[column]
        sync_s = share.sync_s[column] + share.sync_s_per_element[column] * needs.elements
        sync_s = np.where(needs.elements > 0, sync_s, 0.0)
        step_s = share.update_share[column] * needs.update_s
        end_s = np.maximum(sync_s - share.overlap * needs.hiding_s, 0.0) + step_s
        self._plain_s, self._again_s = objective.reach_s(turns, needs, end_s)
        tables = warm_up_tables(share.schedule, share.replicas, share.devices, share.micro_batches)
        self._in_flight, passing, self._filling = tables
        self._passing = np.zeros(0, dtype=np.int64)
        if objective.counts_passing:
            self._passing = most_passing(share.replicas, passing, share.devices)[::-1]

    def possible(self, cutoff_s: float) -> bool:
        """Whether stages that are fast enough one by one fit in memory and take no more devices than there are.

        With x devices the last stages hold as many blocks as possible: fewer blocks before them are served by the
        others no worse, and x is what their micro-batches in flight are counted from. O(R n (n + devices)).
        """
        share, needs = self._share, self._needs
        most_s = cutoff_s * (1 + _ROUNDING)
        plain, again = _first(self._plain_s <= most_s), _first(self._again_s <= most_s)
        n, options = needs.plain_limit.shape[0], np.arange(len(share.replicas))
        first = np.full(share.devices + 1, n)
        for x in range(int(share.replicas[0]), share.devices + 1):
            count = int(np.searchsorted(share.replicas, x, side="right"))
            o, behind = options[:count], x - share.replicas[:count]
            last = first[behind] - 1
            kept = self._in_flight[o, np.minimum(behind, self._in_flight.shape[1] - 1)][:, None]
            start = np.minimum(
                np.maximum(plain[o, last], _first(needs.plain_limit[last] >= kept)),
                np.maximum(again[o, last], _first(needs.again_limit[last] >= kept)),
            )
            if len(self._passing):
                start = np.maximum(start, self._after_wait(o, last, behind, most_s))
            first[x] = min(first[x - 1], int(np.minimum(start, last + 1).min()))
            if first[x] == 0:
                return True
        return False

    def _after_wait(self, o: np.ndarray, last: np.ndarray, behind: np.ndarray, most_s: float) -> np.ndarray:
        """First block of the longest stages that keep below a time with their transfers and the wait for the first
        gradient."""
        needs = self._needs
        later_s = needs.whole_s - np.append(needs.before_s, needs.whole_s)[last + 1]
        filling = self._filling[o, self._passing[behind]]
        wait_s = np.maximum(later_s[:, None] - filling[:, None] * needs.forward_s[last], 0.0)
        turns = (self._share.micro_batches // self._share.replicas[o])[:, None]
        return _first(needs.before_s + turns * (needs.plain_s[last] + needs.transfer_s) + wait_s <= most_s)


def _first(holds: np.ndarray) -> np.ndarray:
    """Index of the first true along the last axis; its length where there is none."""
    return np.asarray(np.where(holds.any(axis=-1), holds.argmax(axis=-1), holds.shape[-1]))

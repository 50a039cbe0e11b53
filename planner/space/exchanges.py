"""What replicas exchange at each place, and what each of them holds: tables over stages of blocks i..j.

All of it is read off the recipe of the ZeRO stage (`planner.exchange.recipe_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.costs.precision import Precision
from planner.exchange import ExchangeStep, Group, Phase, kept_bytes, recipe_of
from planner.hardware.collectives import Terms
from planner.space.placement import Placement, Placements
from planner.space.ranges import Ranges, range_maxima, range_sums

_CACHED_BYTES = 2**27


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
        """[P, n, n] seconds of what a stage exchanges once, at the end of an iteration."""
        steps = recipe_of(zero).during(Phase.END)
        places = range(len(placement.place_kind))
        if not steps:
            return np.zeros((len(places), *elements.shape))
        key = (id(placement), zero, elements.tobytes())
        if key not in self._known:
            tables = [sum(self._step_s(placement, p, elements, step) for step in steps) for p in places]
            while self._known and sum(t.nbytes for t in self._known.values()) > _CACHED_BYTES:
                del self._known[next(iter(self._known))]
            self._known[key] = np.stack(tables)
        return self._known[key]

    def in_passes(self, placement: Placement, own: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
        """([P, n, n] seconds in a forward, the same in a backward pass), block by block; P is 0 where there are none.

        Args:
            placement: the places.
            own: [n] elements of each block.
            zero: ZeRO stage.
        """
        recipe = recipe_of(zero)
        count = len(placement.place_kind) if recipe.during(Phase.FORWARD, Phase.BACKWARD) else 0
        forward, backward = np.zeros((2, count, len(own), len(own)))
        for p in range(count):
            for table, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
                for step in recipe.during(phase):
                    table[p] += range_sums(self._step_s(placement, p, own, step))
        return forward, backward

    def _step_s(self, placement: Placement, place: int, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        seconds = _least(placement.exchanges[step.way][place], elements * step.payload(self._precision))
        return np.where(elements > 0, seconds, 0.0)

    def resident(
        self, ranges: Ranges, own: np.ndarray, parts: Callable[[Group | None], np.ndarray], zero: int
    ) -> np.ndarray:
        """[.., n, n] bytes of weights, gradients, optimizer state and workspace, in so many parts [..] by group."""
        kept = kept_bytes(recipe_of(zero), self._precision, self._state_bytes, parts)
        each = np.asarray(kept.weights + kept.gradients + kept.optimizer + kept.gathered)
        beside = np.asarray(kept.transient)[..., None, None] * range_maxima(own)
        return np.asarray(each[..., None, None] * ranges.elements + beside + ranges.workspace_bytes)

    def least(self, placements: Placements, task: tuple[int, int, int], replicas: Sequence[int]) -> np.ndarray:
        """[R, 2] seconds at the end of an iteration at the least, without parameters and for each of them.

        Args:
            placements: where stages may lie.
            task: copies, devices of one copy, ZeRO stage.
            replicas: what a stage may have.
        """
        copies, width, zero = task
        found = np.zeros((len(replicas), 2))
        for step in recipe_of(zero).during(Phase.END):
            found += placements.least(copies, width, replicas, step) * [1.0, step.payload(self._precision)]
        return found


def _least(terms: Terms, payload_bytes: np.ndarray) -> np.ndarray:
    """The cheapest algorithm at each payload, looking only at those that apply."""
    applies = np.flatnonzero(np.isfinite(terms.latency_s))
    first, *others = [terms.latency_s[k] + terms.s_per_byte[k] * payload_bytes for k in applies]
    for seconds in others:
        np.minimum(first, seconds, out=first)
    return np.asarray(first)

"""What replicas exchange and hold, as tables over stages of blocks i..j and the places where stages can lie.

All of it is read off the recipe of the ZeRO stage (`planner.exchange.recipe_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from planner.costs.precision import Precision
from planner.exchange import ExchangeStep, Phase, RankGroup, Recipe, kept_bytes, recipe_of
from planner.hardware.collectives import Terms
from planner.hardware.types import Collective
from planner.space.blocks import range_sums
from planner.space.placement import Placement, Placements
from planner.space.ranges import Ranges
from planner.space.types import BlockCosts

_CACHED_BYTES = 2**27


class ExchangeTables:
    """Builds the exchange and memory tables of one job, and keeps those of equal weights for the next call.

    Args:
        precision: number formats.
        state_bytes: bytes of optimizer state a parameter.
    """

    def __init__(self, precision: Precision, state_bytes: float) -> None:
        self._precision, self._state_bytes = precision, state_bytes
        self._cache: dict[tuple[int, int, bytes], np.ndarray] = {}

    def at_end(self, placement: Placement, costs: BlockCosts, ranges: Ranges, zero: int) -> np.ndarray:
        """[P, n, n] seconds of a stage's exchanges at the end of an iteration, by place and blocks i..j."""
        among = self._among_replicas(placement, ranges.shard_elements, zero)
        inner = [(inner.terms, elements) for inner, elements in zip(costs.inner_replicas, ranges.inner, strict=True)]
        return among + self._inner_s(inner, recipe_of(zero), Phase.END) if inner else among

    def _inner_s(
        self, inner: Sequence[tuple[Mapping[Collective, Terms], np.ndarray]], recipe: Recipe, phase: Phase
    ) -> np.ndarray:
        """Seconds of a phase's exchanges among ranks of one replica that hold the same elements."""
        total_s = np.zeros(inner[0][1].shape)
        for step in (step for step in recipe.among_inner if step.phase is phase):
            for terms, elements in inner:
                total_s += self._seconds(terms[step.collective], elements, step)
        return total_s

    def _among_replicas(self, placement: Placement, elements: np.ndarray, zero: int) -> np.ndarray:
        steps = recipe_of(zero).during(Phase.END)
        places = range(len(placement.place_kind))
        if not steps:
            return np.zeros((len(places), *elements.shape))
        key = (id(placement), zero, elements.tobytes())
        if key not in self._cache:
            tables = [sum(self._step_s(placement, p, elements, step) for step in steps) for p in places]
            while self._cache and sum(t.nbytes for t in self._cache.values()) > _CACHED_BYTES:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = np.stack(tables)
        return self._cache[key]

    def in_passes(self, placement: Placement, costs: BlockCosts, zero: int) -> tuple[np.ndarray, np.ndarray]:
        """[P, n, n] seconds of exchanges in a forward pass, and the same in a backward pass; P is 0 if there are none.

        Args:
            placement: the places.
            costs: of the blocks.
            zero: ZeRO stage.
        """
        recipe = recipe_of(zero)
        elements = costs.exchanged_elements
        inner = [(inner.terms, inner.elements) for inner in costs.inner_replicas]
        count = len(placement.place_kind) if recipe.during(Phase.FORWARD, Phase.BACKWARD) else 0
        forward, backward = np.zeros((2, count, len(elements), len(elements)))
        for p in range(count):
            for table, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
                for step in recipe.during(phase):
                    table[p] += range_sums(self._step_s(placement, p, elements, step))
                if inner:
                    table[p] += range_sums(self._inner_s(inner, recipe, phase))
        return forward, backward

    def _step_s(self, placement: Placement, place: int, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        return self._seconds(placement.exchanges[step.way][place], elements, step)

    def _seconds(self, terms: Terms, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        return np.where(elements > 0, _cheapest_s(terms, elements * step.payload(self._precision)), 0.0)

    def resident(
        self, ranges: Ranges, largest: np.ndarray | float, parts: Callable[[RankGroup | None], np.ndarray], zero: int
    ) -> np.ndarray:
        """[.., n, n] bytes of weights, gradients, optimizer state and workspace of a stage's device.

        Args:
            ranges: sums over blocks i..j.
            largest: [n, n] elements of the largest block of a stage, which sets the transient buffers.
            parts: [..] number of shards that a group makes.
            zero: ZeRO stage.
        """
        kept = kept_bytes(
            recipe_of(zero),
            self._precision,
            self._state_bytes,
            lambda group: ranges.parts(parts(group), group),
            spare_bytes=self._precision.spare_bytes,
            copy_bytes=self._precision.copy_bytes,
        )
        element_bytes = kept.weights + kept.gradients + kept.optimizer
        return np.asarray(element_bytes * ranges.elements + kept.transient * largest + ranges.workspace_bytes)

    def least_terms(
        self, placements: Placements, task: tuple[int, int, int], replicas: Sequence[int], phase: Phase
    ) -> np.ndarray:
        """[R, 2] lower bound on the exchanges of a phase: seconds at start-up, and seconds an element.

        In a pass, every block with weights starts an exchange of its own.

        Args:
            placements: where stages may lie.
            task: copies, devices of one copy, ZeRO stage.
            replicas: allowed numbers of replicas of a stage.
            phase: the end of an iteration, or a pass.
        """
        copies, width, zero = task
        terms = np.zeros((len(replicas), 2))
        for step in recipe_of(zero).during(phase):
            terms += placements.least_terms(copies, width, replicas, step) * [1.0, step.payload(self._precision)]
        return terms


def _cheapest_s(terms: Terms, payload_bytes: np.ndarray) -> np.ndarray:
    """Seconds of the fastest algorithm at each payload, of those that the cluster can run."""
    applies = np.flatnonzero(np.isfinite(terms.latency_s))
    first, *others = [terms.latency_s[k] + terms.s_per_byte[k] * payload_bytes for k in applies]
    for seconds in others:
        np.minimum(first, seconds, out=first)
    return np.asarray(first)

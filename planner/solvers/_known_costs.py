"""Costs that a search has asked for: of micro-batch sizes on single devices, and of the shardings of refined floors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.hardware.types import Cluster
from planner.solvers._candidates import TrivialPlans
from planner.solvers._frontier import compute_s
from planner.solvers.sizes import any_block_fits
from planner.solvers.types import CostsFor
from planner.space.pricer import FloorKey, Floors, Pricer, Refinement, counts_some_axes
from planner.space.types import BlockCosts


class KnownCosts:
    """Costs by micro-batch size and number of the sharding, 0 for single devices; floors have negative numbers.

    Args:
        shardings: prices them; None where every replica is one device.
        most: floors that may be refined, each mesh's first ones as one (`counts_some_axes`).

    Attributes:
        by_size: the costs.
        refined: what floors were refined to, by micro-batch size and key.
    """

    def __init__(self, shardings: Pricer | None, most: float = math.inf) -> None:
        self._shardings, self._left = shardings, most
        self.by_size: dict[int, dict[int, BlockCosts]] = {}
        self.refined: dict[tuple[int, FloorKey], Refinement] = {}

    def add(self, micro_batch: int, costs: Sequence[BlockCosts]) -> None:
        """Make shardings known to the judge."""
        self.by_size.setdefault(micro_batch, {}).update((sharding.sharding, sharding) for sharding in costs)

    @property
    def priced(self) -> list[BlockCosts]:
        """All that are no floors."""
        return [costs for known in self.by_size.values() for number, costs in known.items() if number >= 0]

    def of(self, numbers: Sequence[tuple[int, int]]) -> list[BlockCosts]:
        """Those of some micro-batch sizes and numbers."""
        return [self.by_size[size][number] for size, number in numbers]

    def price(
        self, sizes: Sequence[int], costs_for: CostsFor, cluster: Cluster, trivial: TrivialPlans
    ) -> tuple[list[BlockCosts], float]:
        """Price micro-batch sizes with their trivial plans until larger ones cannot win.

        Returns:
            Their costs, and a lower bound on the time of plans of the sizes left out as too slow, in seconds.
        """
        priced: list[BlockCosts] = []
        for size in sizes:
            costs = costs_for(size)
            if priced and compute_s(costs) >= trivial.best_s():
                return priced, trivial.best_s()
            if priced and not any_block_fits(cluster, costs):
                break
            priced.append(costs)
            self.add(size, [costs])
            trivial.add(costs)
        return priced, math.inf

    @property
    def all_refined(self) -> bool:
        """True if as many floors were refined as may be."""
        return self._left <= 0

    def refine(self, micro_batch: int, key: FloorKey) -> Refinement | None:
        """Price the shardings of a floor, once; None if no further ones may be."""
        if self._shardings is not None and (micro_batch, key) not in self.refined and not self.all_refined:
            self._left -= not counts_some_axes(key)
            self.refined[micro_batch, key] = _, priced = self._shardings.refine(micro_batch, key)
            self.add(micro_batch, priced)
        return self.refined.get((micro_batch, key))

    def refine_or_drop(self, micro_batch: int, key: FloorKey) -> Refinement:
        """`refine`, with nothing in place of a floor that may not be refined."""
        return self.refine(micro_batch, key) or ((), ())

    def even_splits(self, sizes: Sequence[int], near_s: float, trivial: TrivialPlans) -> list[BlockCosts]:
        """Price even splits of some micro-batch sizes with their trivial plans, until one of these is near enough."""
        priced: list[BlockCosts] = []
        for size in sizes:
            if self._shardings is None or trivial.best_s() <= near_s:
                break
            for costs in self._shardings.even_split(size):
                self.add(size, [costs])
                trivial.add_sharded(costs)
                priced.append(costs)
        return priced

    def leanest(self, micro_batch: int) -> list[BlockCosts]:
        """The known sharding or even split of a size that keeps the fewest weights and activations; none without."""
        sharded = [costs for costs in self.by_size.get(micro_batch, {}).values() if costs.sharding > 0]
        if self._shardings is not None:
            sharded += [costs for costs in self._shardings.even_split(micro_batch) if costs.ranks > 1]
            self.add(micro_batch, sharded)
        return sorted(sharded, key=lambda c: (float(c.parameter_elements.sum()), float(c.saved_bytes[0, -1])))[:1]

    def floors(self, sizes: Sequence[int], cluster: Cluster, limit_s: float) -> tuple[Floors, bool]:
        """Floors of shardings with their keys, by micro-batch size, and whether any is left out as too slow.

        Args:
            sizes: of micro-batches, smallest first; a family that is too slow or large at one is left out beyond it.
            cluster: the cluster.
            limit_s: seconds of a micro-batch from which on a floor is too slow.
        """
        by_size: list[tuple[BlockCosts, FloorKey]] = []
        ended, any_slow, shardings = set[FloorKey](), False, self._shardings
        if shardings is None:
            return by_size, any_slow
        for size in sizes:
            floors = [(f, key) for f, key in shardings.floors(size) if key not in ended]
            slow = {key for f, key in floors if compute_s(f) >= limit_s}
            any_slow |= bool(slow)
            ended |= slow | {key for f, key in floors if not any_block_fits(cluster, f)}
            by_size += [(f, key) for f, key in floors if key not in ended]
            if size >= shardings.fewest_samples and all(key in ended for _, key in floors):
                break
        return by_size, any_slow

"""Layer-wise strategies exactly, by Pareto labels along the layers.

A label is a strategy of each of the first layers; it has a last strategy, memory and time. It dominates another if it
needs no more memory and no more time, even with the costliest switch to the other's strategy. At a price p of memory, a
chain DP gives the least (time + p memory) of the remaining layers, which bounds every label from below; a label whose
bound is not below the best plan is dropped. The work depends on the number of labels, not on the size of the memory.
"""

from __future__ import annotations

import numpy as np

from planner.memory import fits, room_bytes
from planner.published.problems import LayerChoice, LayerDecision
from planner.published.solvers import PARTITION_SOLVERS, RELATIVE_TOLERANCE, PartitionSolver, SearchState

_LABEL_STEP = 1e-11
_SAME = 1e-13
"""Relative rounding error of times."""
_MOST_LABELS = 10_000
"""Most labels of a layer; those with the highest bounds are dropped."""
_PRICE_STEPS = 40


def solve_layerwise(search: SearchState) -> None:
    """Find the least time under the memory and prove it.

    O(L S^2) for each price of memory that is tried, and O(L n S) for n labels kept a layer.
    """
    problem: LayerChoice = search.problem
    search.space = "all strategies of every layer"
    usable_bytes = np.where(np.isfinite(problem.time_s), problem.fixed_bytes, np.inf)
    least_bytes = np.append(np.cumsum(usable_bytes.min(axis=1)[::-1])[::-1], 0.0)
    most_bytes = float(problem.fixed_bytes.max(axis=1).sum())
    room = min(room_bytes(problem.memory_bytes), most_bytes * (1 + RELATIVE_TOLERANCE))
    if least_bytes[0] > room * (1 + _SAME):
        search.prove(np.inf)
        return
    price, bound = _best_price(search, room)
    labelling = _Labelling(search, room, least_bytes, price)
    if bound < search.objective * (1 - _LABEL_STEP) and not search.deadline.passed:
        bound = max(bound, labelling.run())
    search.count(labels=labelling.labels, widest=labelling.widest)
    search.prove(min(bound, search.objective * (1 - _LABEL_STEP)))


def _remaining(problem: LayerChoice, price: float) -> np.ndarray:
    """[L, S] least time + price * memory of the layers after l if layer l runs by s, switches included."""
    ahead = np.zeros((problem.layers, problem.strategies))
    for layer in range(problem.layers - 1, 0, -1):
        cost = problem.time_s[layer] + price * problem.fixed_bytes[layer] + ahead[layer]
        ahead[layer - 1] = (problem.switch_before(layer) + cost).min(axis=1)
    return ahead


def _cheapest(problem: LayerChoice, price: float) -> tuple[float, np.ndarray]:
    """Least time + price * memory of all layers, and the strategies with it."""
    costs = problem.time_s + price * problem.fixed_bytes + _remaining(problem, price)
    strategies = np.zeros(problem.layers, dtype=np.int64)
    strategies[0] = int(np.argmin(costs[0]))
    for layer in range(1, problem.layers):
        strategies[layer] = int(np.argmin(problem.switch_before(layer)[strategies[layer - 1]] + costs[layer]))
    return float(costs[0].min()), strategies


def _best_price(search: SearchState, room: float) -> tuple[float, float]:
    """The price of memory with the best Lagrangian bound, and that bound; offers the feasible plans on the way."""
    problem: LayerChoice = search.problem
    positive = problem.fixed_bytes[problem.fixed_bytes > 0]
    scale = max(room, float(positive.min(initial=np.inf))) if len(positive) else 1.0
    low, high = 0.0, float(problem.time_s[np.isfinite(problem.time_s)].sum()) / scale + 1e-300
    price, fitting = 0.0, False
    best = (0.0, 0.0)
    for _ in range(_PRICE_STEPS):
        total, strategies = _cheapest(problem, price)
        best = max(best, (price, total - price * room), key=lambda entry: entry[1])
        if problem.fixed_bytes[np.arange(problem.layers), strategies].sum() <= room:
            search.offer(tuple(strategies.tolist()))
            high, fitting = price, True
        else:
            low, high = price, high if fitting or price < high else price * 16
        if search.deadline.passed or (fitting and high - low <= 1e-9 * high):
            break
        price = (low + high) / 2 if fitting else high
    return best


class _Labelling:
    """Pareto labels of strategies along the layers.

    Attributes:
        search: the problem, its best plan and bound.
        room: memory of a device in bytes.
        least_memory: [L + 1] least memory of the layers from l on.
        price: seconds per byte, for the bound on what a label can still become.
        ahead: `_remaining` at that price.
        labels: kept so far.
        widest: most labels of a layer.
    """

    def __init__(self, search: SearchState, room: float, least_memory: np.ndarray, price: float) -> None:
        self.search, self.room, self.least_memory = search, room, least_memory
        self.problem: LayerChoice = search.problem
        self.price, self.ahead = price, _remaining(self.problem, price)
        self.labels = self.widest = 0

    def run(self) -> float:
        """Extend labels layer by layer and offer the best plan; returns a lower bound on the time."""
        search, proven = self.search, np.inf
        memory = seconds = np.zeros(1)
        state = np.zeros(1, dtype=np.int64)
        trail: list[tuple[np.ndarray, np.ndarray]] = []
        for layer in range(self.problem.layers):
            memory, seconds, state, source, bounds = self._extended(layer, memory, seconds, state)
            kept = self._undominated(layer, memory, seconds, state)
            if len(kept) > _MOST_LABELS:
                order = np.argsort(bounds[kept], kind="stable")
                proven = min(proven, float(bounds[kept[order[_MOST_LABELS]]]))
                kept = np.sort(kept[order[:_MOST_LABELS]])
            memory, seconds, state = memory[kept], seconds[kept], state[kept]
            self.labels += len(kept)
            self.widest = max(self.widest, len(kept))
            trail.append((state, source[kept]))
            if not len(kept):
                return min(proven, search.objective)
            if search.deadline.passed:
                return min(proven, float(bounds[kept].min()))
        best = int(np.argmin(seconds))
        search.offer(_strategies(trail, best), float(seconds[best]))
        return min(proven, search.objective)

    def _extended(
        self, layer: int, memory: np.ndarray, seconds: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Labels after one more layer that fit and may win: memory, time, strategy, previous label, lower bound."""
        problem = self.problem
        switch = problem.switch_before(layer)[state] if layer else 0.0
        wide_memory = memory[:, None] + problem.fixed_bytes[layer]
        wide_seconds = seconds[:, None] + (switch + problem.time_s[layer])
        bounds = wide_seconds + self.ahead[layer] - self.price * (self.room - wide_memory)
        may_fit = fits(wide_memory, problem.memory_bytes)
        may_fit &= wide_memory + self.least_memory[layer + 1] <= self.room * (1 + _SAME)
        better = np.isfinite(wide_seconds) & (bounds < self.search.objective * (1 - _LABEL_STEP))
        source, strategy = np.nonzero(may_fit & better)
        at = source, strategy
        return wide_memory[at], wide_seconds[at], strategy, source, bounds[at]

    def _undominated(self, layer: int, memory: np.ndarray, seconds: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Positions of the labels that are not dominated."""
        count = self.problem.strategies
        worst_extra_s = np.zeros((count, count))
        if layer + 1 < self.problem.layers:
            switch = self.problem.switch_before(layer + 1)
            with np.errstate(invalid="ignore"):
                extra_s = switch[:, None, :] - switch[None, :, :]  # of switching from the first index, not the second
            worst_extra_s = np.where(np.isinf(switch)[None, :, :], -np.inf, extra_s).max(axis=2)
        order = np.lexsort((seconds, memory))
        best_s = np.full((len(order) + 1, count), np.inf)
        best_s[1:] = seconds[order, None] + worst_extra_s[state[order]]
        np.minimum.accumulate(best_s, axis=0, out=best_s)
        before_s = best_s[np.arange(len(order)), state[order]]
        return np.sort(order[before_s > seconds[order] * (1 + _SAME)])


def _strategies(trail: list[tuple[np.ndarray, np.ndarray]], label: int) -> LayerDecision:
    """The strategies of a label of the last layer."""
    strategies = []
    for state, source in reversed(trail):
        strategies.append(int(state[label]))
        label = int(source[label])
    return tuple(strategies[::-1])


PARTITION_SOLVERS.register("layerwise", PartitionSolver(LayerChoice, solve_layerwise))

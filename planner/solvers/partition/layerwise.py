"""Layer-wise strategies exactly, by Pareto labels along the layers.

A label is a strategy of each of the first layers; it has a last strategy, memory and time. It dominates another if it
needs no more memory and no more time, even with the costliest switch to the other's strategy. At a price p of memory, a
chain DP gives the least (time + p memory) of the remaining layers, which bounds every label from below; a label whose
bound is not below the best plan is dropped. The work depends on the number of labels, not on the size of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from planner.memory import fits, room_bytes
from planner.solvers.partition import PARTITION_SOLVERS, RELATIVE_TOLERANCE, PartitionSolver, Search
from planner.space.partition import LayerChoice

_LABEL_STEP = 1e-11
_SAME = 1e-13
"""Relative rounding error of times."""
_WIDTHS = (300, 10_000, 1_000_000)
"""Limits on the labels of a layer: first few, for a good plan to prune by; more while undecided labels are dropped."""
_PRICE_STEPS = 60


@dataclass
class _Labelling:
    search: Search
    room: float
    least_memory: np.ndarray
    """[L + 1] least memory of the layers from l on."""
    labels: int = 0
    widest: int = 0

    @property
    def problem(self) -> LayerChoice:
        """What is solved."""
        return cast(LayerChoice, self.search.problem)

    def offer(self, strategies: np.ndarray) -> None:
        """Offer the plan with these strategies."""
        self.search.offer(tuple(int(s) for s in strategies))


def solve_layerwise(search: Search) -> None:
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
    labelling = _Labelling(search, room, least_bytes)
    price, bound = _best_price(labelling)
    ahead = _remaining(problem, price)
    for width in _WIDTHS:
        if bound >= search.objective * (1 - _LABEL_STEP) or search.deadline.passed:
            break
        bound = max(bound, _labels(labelling, price, ahead, width))
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
    ahead = _remaining(problem, price)
    first = problem.time_s[0] + price * problem.fixed_bytes[0] + ahead[0]
    strategies = np.zeros(problem.layers, dtype=np.int64)
    strategies[0] = int(np.argmin(first))
    for layer in range(1, problem.layers):
        cost = problem.time_s[layer] + price * problem.fixed_bytes[layer] + ahead[layer]
        strategies[layer] = int(np.argmin(problem.switch_before(layer)[strategies[layer - 1]] + cost))
    return float(first.min()), strategies


def _best_price(labelling: _Labelling) -> tuple[float, float]:
    """The price of memory with the best Lagrangian bound, and that bound; offers the feasible plans on the way."""
    problem = labelling.problem
    bound, strategies = _cheapest(problem, 0.0)
    if _fits(labelling, strategies):
        labelling.offer(strategies)
        return 0.0, bound
    positive = problem.fixed_bytes[problem.fixed_bytes > 0]
    scale = max(labelling.room, float(positive.min()))  # not empty: without memory the fastest plan fits
    low, high = 0.0, float(problem.time_s[np.isfinite(problem.time_s)].sum()) / scale + 1e-300
    best, found = (0.0, bound), False
    for _ in range(4 * _PRICE_STEPS):
        price = (low + high) / 2 if found else high
        total, strategies = _cheapest(problem, price)
        best = max(best, (price, total - price * labelling.room), key=lambda entry: entry[1])
        if _fits(labelling, strategies):
            labelling.offer(strategies)
            high, found = price, True
        else:
            low, high = price, high if found else price * 16
        if labelling.search.deadline.passed or high > 1e200 or (found and high - low <= 1e-9 * high):
            break
    return best


def _fits(labelling: _Labelling, strategies: np.ndarray) -> bool:
    layers = np.arange(labelling.problem.layers)
    return bool(labelling.problem.fixed_bytes[layers, strategies].sum() <= labelling.room)


def _labels(labelling: _Labelling, price: float, ahead: np.ndarray, limit: int) -> float:
    """Extend labels layer by layer, keep at most `most` per layer, offer the best plan; a lower bound on the time.

    Args:
        labelling: the problem and its best plan.
        price: seconds per byte, for the bound on what a label can still become.
        ahead: `_remaining` at that price.
        most: labels kept per layer.
    """
    problem = labelling.problem
    state = np.flatnonzero(np.isfinite(problem.time_s[0]) & _may_fit(labelling, 0, problem.fixed_bytes[0]))
    memory, seconds = problem.fixed_bytes[0, state], problem.time_s[0, state]
    source = np.zeros(len(state), dtype=np.int64)
    bounds = seconds + ahead[0][state] - price * (labelling.room - memory)
    proven = np.inf
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for layer in range(problem.layers):
        if layer:
            memory, seconds, state, source, bounds = _extended(labelling, layer, memory, seconds, state, price, ahead)
        kept = np.flatnonzero(bounds < labelling.search.objective * (1 - _LABEL_STEP))
        kept = kept[_undominated(problem, layer, memory[kept], seconds[kept], state[kept])]
        if len(kept) > limit:
            order = np.argsort(bounds[kept], kind="stable")
            proven = min(proven, float(bounds[kept[order[limit]]]))
            kept = np.sort(kept[order[:limit]])
        memory, seconds, state, source = memory[kept], seconds[kept], state[kept], source[kept]
        labelling.labels += len(kept)
        labelling.widest = max(labelling.widest, len(kept))
        trail.append((state, source))
        if not len(kept):
            return min(proven, labelling.search.objective)
        if labelling.search.deadline.passed:
            return min(proven, float(bounds[kept].min()))
    best = int(np.argmin(seconds))
    expected = float(seconds[best])
    labelling.offer(_strategies(trail, best))
    if labelling.search.objective > expected * (1 + RELATIVE_TOLERANCE):
        raise RuntimeError(f"the search and the judge disagree: {expected} against {labelling.search.objective}")
    return min(proven, labelling.search.objective)


def _strategies(trail: list[tuple[np.ndarray, np.ndarray]], label: int) -> np.ndarray:
    strategies = []
    for state, source in reversed(trail):
        strategies.append(int(state[label]))
        label = int(source[label])
    return np.array(strategies[::-1])


def _extended(
    labelling: _Labelling,
    layer: int,
    memory: np.ndarray,
    seconds: np.ndarray,
    state: np.ndarray,
    price: float,
    ahead: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Labels after one more layer that fit and may still win: memory, time, strategy, previous label, lower bound."""
    problem = labelling.problem
    parts = []
    step = max(4_000_000 // problem.strategies, 1)
    for begin in range(0, len(state), step):
        part = slice(begin, begin + step)
        wide_memory = memory[part, None] + problem.fixed_bytes[layer]
        wide_seconds = seconds[part, None] + (problem.switch_before(layer)[state[part]] + problem.time_s[layer])
        bound = wide_seconds + ahead[layer] - price * (labelling.room - wide_memory)
        possible = _may_fit(labelling, layer, wide_memory)
        row, column = np.nonzero(
            possible & (bound < labelling.search.objective * (1 - _LABEL_STEP)) & np.isfinite(wide_seconds)
        )
        parts.append((wide_memory[row, column], wide_seconds[row, column], column, row + begin, bound[row, column]))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _may_fit(labelling: _Labelling, layer: int, memory: np.ndarray) -> np.ndarray:
    """True for labels with so much memory in layers 0..layer that fit and leave room for the later layers."""
    rest_fits = memory + labelling.least_memory[layer + 1] <= labelling.room * (1 + _SAME)
    return np.asarray(fits(memory, labelling.problem.memory_bytes) & rest_fits)


def _undominated(
    problem: LayerChoice, layer: int, memory: np.ndarray, seconds: np.ndarray, state: np.ndarray
) -> np.ndarray:
    """Positions of the labels that are not dominated."""
    order = np.lexsort((seconds, memory))
    if layer + 1 < problem.layers:
        switch = problem.switch_before(layer + 1)
        with np.errstate(invalid="ignore"):
            extra_s = switch[:, None, :] - switch[None, :, :]  # of switching from the first index, not the second
        worst_extra_s = np.where(np.isinf(switch)[None, :, :], -np.inf, extra_s).max(axis=2)
    else:
        worst_extra_s = np.zeros((problem.strategies, problem.strategies))
    undominated = np.ones(len(order), dtype=bool)
    floor = np.full(problem.strategies, np.inf)
    step = max(4_000_000 // problem.strategies, 1)
    for begin in range(0, len(order), step):
        part = order[begin : begin + step]
        best_s = np.concatenate([floor[None, :], seconds[part, None] + worst_extra_s[state[part]]])
        np.minimum.accumulate(best_s, axis=0, out=best_s)
        undominated[begin : begin + step] = best_s[np.arange(len(part)), state[part]] > seconds[part] * (1 + _SAME)
        floor = best_s[-1]
    return np.sort(order[undominated])


PARTITION_SOLVERS.register("layerwise", PartitionSolver(LayerChoice, solve_layerwise))

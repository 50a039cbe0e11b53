"""Layer-wise strategies under memory, exactly: Pareto labels along the chain, pruned by a Lagrangian bound.

A label is a way to run the first layers: its last strategy, memory and time. One label beats another when it takes no
more memory and no more time even after the worst change of layout to the other's strategy. What the remaining layers
take at the least comes from pricing memory: for any price p, the cheapest way to finish by (time + p memory) is a
chain DP, and bounds every label from below; labels that cannot beat a plan already known are dropped. The work depends
on how many labels are worth keeping, not on the size of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from planner.memory import fits, room_bytes
from planner.solvers.partition import RELATIVE_TOLERANCE, Search
from planner.space.partition import LayerChoice, LayerDecision

_STEP = 1e-11
_SAME = 1e-13
"""Relative difference of two times that counts as rounding."""
_WIDTHS = (300, 10_000, 1_000_000)
"""Labels kept a layer: first few, for a good plan to prune by; more while labels that may win had to be dropped."""
_PRICE_STEPS = 60
_SPREAD = (1.0, 0.9, 1.1, 0.7, 1.4, 0.4, 2.5, 0.0)
"""Prices of memory, relative to the best one, that bound labels."""


@dataclass
class _Labelling:
    search: Search
    room: float
    least_memory: np.ndarray
    """[L + 1] memory that the layers from l on take at the least."""
    labels: int = 0
    widest: int = 0

    @property
    def problem(self) -> LayerChoice:
        """What is solved."""
        return cast(LayerChoice, self.search.problem)

    def offer(self, strategies: np.ndarray) -> None:
        """Judge a plan and keep it if it is feasible and the best."""
        self.search.offer(LayerDecision(tuple(int(s) for s in strategies)))


def solve_one_stage(search: Search) -> None:
    """The least time within the memory.

    O(L S^2) for each price of memory, and O(L n S) for n labels kept a layer.
    """
    problem: LayerChoice = search.problem
    search.space = "all strategies of every layer"
    usable = np.where(np.isfinite(problem.time_s), problem.fixed_bytes, np.inf)
    least = np.append(np.cumsum(usable.min(axis=1)[::-1])[::-1], 0.0)
    most = float(problem.fixed_bytes.max(axis=1).sum())
    room = min(room_bytes(problem.memory_bytes), most * (1 + RELATIVE_TOLERANCE))
    if least[0] > room * (1 + _SAME):
        search.prove(np.inf)
        return
    labelling = _Labelling(search, room, least)
    price, bound = _dual(labelling)
    for width in _WIDTHS:
        if bound >= search.objective * (1 - _STEP) or search.deadline.passed:
            break
        prices = [price * factor for factor in _SPREAD]
        ahead = [_remaining(problem, p) for p in prices]
        bound = max(bound, _labels(labelling, prices, ahead, width))
    search.count(labels=labelling.labels, widest=labelling.widest)
    search.prove(min(bound, search.objective * (1 - _STEP)))


def _remaining(problem: LayerChoice, price: float) -> np.ndarray:
    """[L, S] least time + price * memory of the layers after l when layer l runs by s, the switches included."""
    ahead = np.zeros((problem.layers, problem.strategies))
    for layer in range(problem.layers - 1, 0, -1):
        cost = problem.time_s[layer] + price * problem.fixed_bytes[layer] + ahead[layer]
        ahead[layer - 1] = (problem.switch_before(layer) + cost).min(axis=1)
    return ahead


def _cheapest(problem: LayerChoice, price: float) -> tuple[float, np.ndarray]:
    """Least time + price * memory of the whole chain, and the strategies that take it."""
    ahead = _remaining(problem, price)
    first = problem.time_s[0] + price * problem.fixed_bytes[0] + ahead[0]
    chosen = np.zeros(problem.layers, dtype=np.int64)
    chosen[0] = int(np.argmin(first))
    for layer in range(1, problem.layers):
        cost = problem.time_s[layer] + price * problem.fixed_bytes[layer] + ahead[layer]
        chosen[layer] = int(np.argmin(problem.switch_before(layer)[chosen[layer - 1]] + cost))
    return float(first.min()), chosen


def _dual(labelling: _Labelling) -> tuple[float, float]:
    """The price of memory with the best bound, and that bound; feasible plans met on the way are offered."""
    problem = labelling.problem
    total, chosen = _cheapest(problem, 0.0)
    bound = total
    each = np.arange(problem.layers)
    if problem.fixed_bytes[each, chosen].sum() <= labelling.room:
        labelling.offer(chosen)
        return 0.0, bound
    positive = problem.fixed_bytes[problem.fixed_bytes > 0]
    scale = max(labelling.room, float(positive.min()))  # something takes memory, or the fastest plan would have fitted
    low, high = 0.0, float(problem.time_s[np.isfinite(problem.time_s)].sum()) / scale + 1e-300
    best = (0.0, bound)
    ends: list[np.ndarray] = [chosen, chosen]  # plans that take too much, and that fit
    for step in range(4 * _PRICE_STEPS):
        price = high if step == 0 or not _fits(labelling, ends[1]) else (low + high) / 2
        total, chosen = _cheapest(problem, price)
        best = max(best, (price, total - price * labelling.room), key=lambda entry: entry[1])
        if _fits(labelling, chosen):
            labelling.offer(chosen)
            high, ends[1] = price, chosen
        elif not _fits(labelling, ends[1]):
            low, high, ends[0] = price, price * 16, chosen
            if price > 1e200:
                break
        else:
            low, ends[0] = price, chosen
        if labelling.search.deadline.passed or (high - low <= 1e-9 * high and _fits(labelling, ends[1])):
            break
    _splice(labelling, ends[0], ends[1])
    return best


def _fits(labelling: _Labelling, chosen: np.ndarray) -> bool:
    each = np.arange(labelling.problem.layers)
    return bool(labelling.problem.fixed_bytes[each, chosen].sum() <= labelling.room)


def _splice(labelling: _Labelling, over: np.ndarray, under: np.ndarray) -> None:
    """Plans that follow one plan up to some layer and then the other one."""
    for cut in range(1, labelling.problem.layers):
        if labelling.search.deadline.passed:
            return
        labelling.offer(np.concatenate([over[:cut], under[cut:]]))
        labelling.offer(np.concatenate([under[:cut], over[cut:]]))


def _labels(labelling: _Labelling, prices: list[float], ahead: list[np.ndarray], most: int) -> float:
    """Extend labels over all layers, at most that many of them; gives what is proven and offers the best plan."""
    problem = labelling.problem
    state = np.flatnonzero(np.isfinite(problem.time_s[0]) & _may_fit(labelling, 0, problem.fixed_bytes[0]))
    memory, seconds = problem.fixed_bytes[0, state], problem.time_s[0, state]
    came = np.zeros(len(state), dtype=np.int64)
    proven = np.inf
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for layer in range(problem.layers):
        if layer:
            memory, seconds, state, came = _extended(labelling, layer, memory, seconds, state, (prices[0], ahead[0]))
        bounds = _bounds(labelling, layer, memory, seconds, state, prices, ahead)
        kept = np.flatnonzero(bounds < labelling.search.objective * (1 - _STEP))
        kept = kept[_undominated(problem, layer, memory[kept], seconds[kept], state[kept])]
        if len(kept) > most:
            order = np.argsort(bounds[kept], kind="stable")
            proven = min(proven, float(bounds[kept[order[most]]]))
            kept = np.sort(kept[order[:most]])
        memory, seconds, state, came = memory[kept], seconds[kept], state[kept], came[kept]
        labelling.labels += len(kept)
        labelling.widest = max(labelling.widest, len(kept))
        trail.append((state, came))
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
    chosen = []
    for state, came in reversed(trail):
        chosen.append(int(state[label]))
        label = int(came[label])
    return np.array(chosen[::-1])


def _extended(
    labelling: _Labelling,
    layer: int,
    memory: np.ndarray,
    seconds: np.ndarray,
    state: np.ndarray,
    priced: tuple[float, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Labels after one more layer that fit and may still win: memory, time, strategy, label they came from."""
    problem = labelling.problem
    price, ahead = priced
    parts = []
    step = max(4_000_000 // problem.strategies, 1)
    for begin in range(0, len(state), step):
        part = slice(begin, begin + step)
        wide_memory = memory[part, None] + problem.fixed_bytes[layer]
        wide_seconds = seconds[part, None] + (problem.switch_before(layer)[state[part]] + problem.time_s[layer])
        bound = wide_seconds + ahead[layer] - price * (labelling.room - wide_memory)
        possible = _may_fit(labelling, layer, wide_memory)
        row, column = np.nonzero(
            possible & (bound < labelling.search.objective * (1 - _STEP)) & np.isfinite(wide_seconds)
        )
        parts.append((wide_memory[row, column], wide_seconds[row, column], column, row + begin))
    memory, seconds, state, came = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return memory, seconds, state, came


def _may_fit(labelling: _Labelling, layer: int, memory: np.ndarray) -> np.ndarray:
    """Whether labels with so much memory in layers 0..layer fit themselves, and leave room for the layers after it."""
    ahead = memory + labelling.least_memory[layer + 1] <= labelling.room * (1 + _SAME)
    return np.asarray(fits(memory, labelling.problem.memory_bytes) & ahead)


def _bounds(
    labelling: _Labelling,
    layer: int,
    memory: np.ndarray,
    seconds: np.ndarray,
    state: np.ndarray,
    prices: list[float],
    ahead: list[np.ndarray],
) -> np.ndarray:
    """The best lower bound on any plan that a label starts, over all prices of memory."""
    best = np.full(len(state), -np.inf)
    for price, rest in zip(prices, ahead, strict=True):
        np.maximum(best, seconds + rest[layer][state] - price * (labelling.room - memory), out=best)
    return best


def _undominated(
    problem: LayerChoice, layer: int, memory: np.ndarray, seconds: np.ndarray, state: np.ndarray
) -> np.ndarray:
    """Positions of the labels that no other one beats, whatever follows."""
    order = np.lexsort((seconds, memory))
    if layer + 1 < problem.layers:
        switch = problem.switch_before(layer + 1)
        with np.errstate(invalid="ignore"):
            more = switch[:, None, :] - switch[None, :, :]  # of going on from the first index, not the second
        worse = np.where(np.isinf(switch)[None, :, :], -np.inf, more).max(axis=2)
    else:
        worse = np.zeros((problem.strategies, problem.strategies))
    kept = np.ones(len(order), dtype=bool)
    floor = np.full(problem.strategies, np.inf)
    step = max(4_000_000 // problem.strategies, 1)
    for begin in range(0, len(order), step):
        part = order[begin : begin + step]
        reach = np.concatenate([floor[None, :], seconds[part, None] + worse[state[part]]])
        np.minimum.accumulate(reach, axis=0, out=reach)
        kept[begin : begin + step] = reach[np.arange(len(part)), state[part]] > seconds[part] * (1 + _SAME)
        floor = reach[-1]
    return np.sort(order[kept])

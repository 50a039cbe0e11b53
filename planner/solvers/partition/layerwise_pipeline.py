"""Layer-wise strategies and pipeline cuts together, exactly: cuts by bounds on their stages, stages solved when needed.

Every possible stage (first layer, last layer, stages from the end) gets a lower bound on its time from a few prices of
memory. The best cut by these bounds is found by branching on the longest stage; its stages are then solved exactly, and
the cut is looked for again, until the best one has only exact stages: then no cut can be better.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np

from planner.memory import fits, room_bytes
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search, search_partition
from planner.solvers.partition.layerwise_labels import solve_one_stage
from planner.solvers.partition.longest_stage import STEP, LongestStage
from planner.space.partition import LayerChoice, LayerDecision

_PRICES = 14
_SPREAD = 30.0


@dataclass
class _Cutting:
    search: Search
    seconds: np.ndarray
    """[p, L, L] time of the stage that has k + 1 stages from it to the end; a lower bound until it is solved."""
    solved: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    """By (in flight, first, last): the best strategies, none when nothing fits."""
    passes: int = 0

    @property
    def problem(self) -> LayerChoice:
        """What is solved."""
        return cast(LayerChoice, self.search.problem)


def solve_layerwise(search: Search) -> None:
    """The least iteration time.

    O(L^2 S^2) for each price of memory and in-flight count, O(L^2 p) for each look at the cuts; one stage by labels.
    """
    problem: LayerChoice = search.problem
    if problem.stages == problem.micro_batches == 1 and problem.activation_bytes is None:
        solve_one_stage(search)
        return
    search.space = "all cuts into the given number of stages, all strategies of every layer"
    # Every layer takes its least time somewhere, and the longest stage no less than an even share of that.
    least = float(problem.time_s.min(axis=1).sum())
    search.prove(least * (1 + (problem.micro_batches - 1) / problem.stages) * (1 - STEP))
    cutting = _Cutting(search, _bounds(problem, search.deadline))
    while True:
        lowest, starts = _best_cut(cutting)
        search.prove(min(lowest, search.objective))
        search.count(stages_solved=len(cutting.solved), passes=cutting.passes)
        if starts is None or search.bound >= search.objective * (1 - STEP) or not _solve_stages(cutting, starts):
            break


def _stops(cutting: _Cutting, starts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(stages from the end less one, first layer, last layer) of each stage of a cut."""
    ends = (*starts[1:], cutting.problem.layers)
    return [(len(starts) - 1 - i, a, b - 1) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]


def _solve_stages(cutting: _Cutting, starts: tuple[int, ...]) -> bool:
    """Solve the stages of a cut that are only bounded so far, and offer its plan; whether there was such a stage."""
    problem = cutting.problem
    chosen: list[int] = []
    known = len(cutting.solved)
    for k, first, last in _stops(cutting, starts):
        in_flight = min(k + 1, problem.micro_batches)
        key = in_flight, first, last
        if key not in cutting.solved:
            cutting.search.deadline.check()
            found = search_partition(problem.part(first, last, in_flight), time_limit_s=cutting.search.deadline.left_s)
            if not (found.proven or (found.decision is None and found.bound == np.inf)):
                return False
            cutting.solved[key] = found.decision.strategies if found.decision else ()
            for same in range(problem.stages):
                if min(same + 1, problem.micro_batches) == in_flight:
                    cutting.seconds[same, first, last] = found.objective + problem.boundary_before(first)
        chosen += cutting.solved[key]
    if len(chosen) == problem.layers:
        cutting.search.offer(LayerDecision(tuple(chosen), starts))
    return len(cutting.solved) > known


def _best_cut(cutting: _Cutting) -> tuple[float, tuple[int, ...] | None]:
    """The least iteration time by the stage times known so far, and the cut behind it; None when there is none."""
    values = np.unique(cutting.seconds[np.isfinite(cutting.seconds)])
    ranges = LongestStage(values, cutting.problem.micro_batches - 1)
    best: tuple[float, tuple[int, ...] | None] = (np.inf, None)
    while (step := ranges.next_cap()) is not None:
        cutting.search.deadline.check()
        cutting.passes += 1
        cap, enough = step
        total, longest, starts = _least_sum(cutting, cap)
        if starts is None or total >= enough:
            ranges.settle(np.inf, np.inf)
            continue
        ranges.settle(total, longest)
        objective = total + (cutting.problem.micro_batches - 1) * longest
        if objective < best[0]:
            best = objective, starts
    return min(best[0], ranges.bound), best[1]


def _least_sum(cutting: _Cutting, cap: float) -> tuple[float, float, tuple[int, ...] | None]:
    """The least sum of stage times when no stage takes more than the cap, its longest stage and its starts."""
    layers, stages = cutting.problem.layers, cutting.problem.stages
    capped = np.where(cutting.seconds <= cap, cutting.seconds, np.inf)
    after = np.full((stages + 1, layers + 1), np.inf)
    after[0, layers] = 0.0
    take = np.zeros((stages, layers), dtype=np.int64)
    for k in range(stages):
        totals = capped[k] + after[k, 1:][None, :]
        take[k] = totals.argmin(axis=1)
        after[k + 1, :layers] = totals[np.arange(layers), take[k]]
    if not np.isfinite(after[stages, 0]):
        return np.inf, np.inf, None
    starts, longest, first = [], 0.0, 0
    for k in range(stages - 1, -1, -1):
        starts.append(first)
        last = int(take[k, first])
        longest = max(longest, float(cutting.seconds[k, first, last]))
        first = last + 1
    return float(after[stages, 0]), longest, tuple(starts)


def _bounds(problem: LayerChoice, deadline: Deadline) -> np.ndarray:
    """[p, L, L] lower bounds on stage times: the best over prices of memory; infinite where nothing can fit."""
    layers = problem.layers
    found = np.full((problem.stages, layers, layers), np.inf)
    for k in range(problem.stages):
        in_flight = min(k + 1, problem.micro_batches)
        if in_flight < k + 1:
            found[k] = found[k - 1]
            continue
        memory = problem.kept_bytes(in_flight)
        usable = np.where(np.isfinite(problem.time_s), memory, np.inf).min(axis=1)
        sums = np.concatenate(([0.0], np.cumsum(usable)))
        with np.errstate(invalid="ignore"):
            # A difference of two sums is off by their rounding; a bound has to stay below.
            least = sums[None, 1:] - sums[:-1, None] - STEP * sums[-1]
        best = np.zeros((layers, layers))
        for price in (0.0, *_price_grid(problem, memory)):
            deadline.check()
            np.maximum(best, _priced(problem, memory, price), out=best)
        best *= 1 - STEP
        possible = np.triu(fits(least, problem.memory_bytes))
        boundary = np.array([problem.boundary_before(layer) for layer in range(layers)])
        found[k] = np.where(possible, best + boundary[:, None], np.inf)
    return found


def _price_grid(problem: LayerChoice, memory: np.ndarray) -> np.ndarray:
    """Prices around what it costs to go from the fastest to the smallest strategies."""
    times = problem.time_s
    if not np.isfinite(times).any(axis=1).all():
        return np.zeros(0)
    each = np.arange(problem.layers)
    fast, small = times.argmin(axis=1), np.where(np.isfinite(times), memory, np.inf).argmin(axis=1)
    slower = float((times[each, small] - times[each, fast]).sum())
    saved = float((memory[each, fast] - memory[each, small]).sum())
    if not np.isfinite(slower) or slower <= 0 or saved <= 0 or not np.isfinite(problem.memory_bytes):
        return np.zeros(0)
    return slower / saved * np.geomspace(1 / _SPREAD, _SPREAD, _PRICES)


def _priced(problem: LayerChoice, memory: np.ndarray, price: float) -> np.ndarray:
    """[L, L] least time + price * (memory - capacity) of layers i..j, 0 below the diagonal."""
    layers, count = problem.time_s.shape
    cost = problem.time_s + price * memory
    room = price * room_bytes(problem.memory_bytes) if price else 0.0
    found = np.zeros((layers, layers))
    table = np.zeros((layers, count))
    for layer in range(layers):
        if layer:
            switch = problem.switch_before(layer)
            onward = np.stack([(table[:layer] + switch[:, s]).min(axis=1) for s in range(count)], axis=1)
            table[:layer] = onward + cost[layer]
        table[layer] = cost[layer]
        found[: layer + 1, layer] = table[: layer + 1].min(axis=1) - room
    return found


PARTITION_SOLVERS.register("layerwise", PartitionSolver(LayerChoice, solve_layerwise))

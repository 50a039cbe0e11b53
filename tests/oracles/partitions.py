"""Every plan of a small partition problem, priced by the judge alone: what the exact solvers are held against.

The number of plans grows exponentially with layers, nodes and devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from planner.memory import fits
from planner.published.problems import (
    ChainDecision,
    ChainStages,
    IterationDecision,
    IterationProblem,
    LatencyDecision,
    LatencyProblem,
    LayerChoice,
    LayerDag,
    LayerDecision,
    MaxLoadDecision,
    MaxLoadProblem,
    MeshStage,
    PartitionProblem,
    PipeDreamProblem,
    PiperDecision,
    PiperProblem,
    PiperStage,
    PlacedPipelineProblem,
    PlacedStage,
    ReplicatedStage,
    stage_figures,
)
from planner.published.solvers import Result

Cut = frozenset[int]


def by_force(problem: PartitionProblem) -> Result:
    """The best feasible plan of all by the judge."""
    best, decision = math.inf, None
    for plan in every_plan(problem):
        verdict = problem.judge(plan)
        if verdict.feasible and verdict.objective < best:
            best, decision = verdict.objective, plan
    return Result(decision, best, best, "every plan")


@singledispatch
def every_plan(problem: Any) -> Iterator[Any]:
    """All plans of a problem, feasible or not."""
    raise TypeError(f"no way to list the plans of a {type(problem).__name__}")


@every_plan.register
def _of_chain(problem: ChainStages) -> Iterator[ChainDecision]:
    """All pipelines, cuts and orders of devices."""
    devices = [kind for kind, count in enumerate(problem.counts) for _ in range(count)]
    for pipeline in problem.pipelines:
        for types in [()] if pipeline.line else sorted(set(itertools.permutations(devices, pipeline.stages))):
            for cut in itertools.combinations(range(1, problem.layers), pipeline.stages - 1):
                yield ChainDecision((0, *cut, problem.layers), pipeline, types)


@every_plan.register
def _of_meshes(problem: IterationProblem) -> Iterator[IterationDecision]:
    """Every cut with every configuration of its stages, as far as the devices go."""
    for count in range(1, problem.layers + 1):
        for cut in itertools.combinations(range(1, problem.layers), count - 1):
            for chosen in itertools.product(range(len(problem.config_devices)), repeat=count):
                if sum(problem.config_devices[list(chosen)]) <= problem.devices:
                    runs = zip(itertools.pairwise((0, *cut, problem.layers)), chosen, strict=True)
                    yield tuple(MeshStage(a, b - 1, c) for (a, b), c in runs)


@every_plan.register
def _of_layers(problem: LayerChoice) -> Iterator[LayerDecision]:
    """Every combination of strategies."""
    yield from itertools.product(range(problem.strategies), repeat=problem.layers)


@every_plan.register
def _of_loads(problem: MaxLoadProblem) -> Iterator[MaxLoadDecision]:
    """Every device of every colour and of every node without one."""
    home: dict[tuple[str, int], int] = {}
    classes = [home.setdefault(("class", c) if c >= 0 else ("node", i), len(home)) for i, c in
               enumerate(problem.colour.tolist())]  # fmt: skip
    for devices in itertools.product(range(problem.devices), repeat=len(home)):
        yield tuple(devices[c] for c in classes)


@every_plan.register
def _of_latency(problem: LatencyProblem) -> Iterator[LatencyDecision]:
    """Every placement that fits with every topological order."""
    orders = list(_orders(problem, ()))
    for places in itertools.product(range(problem.devices), repeat=problem.nodes):
        if problem.judge(LatencyDecision(places, orders[0])).feasible:
            yield from (LatencyDecision(places, order) for order in orders)


def _orders(problem: LatencyProblem, done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All topological orders that begin so."""
    if len(done) == problem.nodes:
        yield done
        return
    edges = problem.edges.tolist()
    for v in range(problem.nodes):
        if v not in done and all(u in done for u, target in edges if target == v):
            yield from _orders(problem, (*done, v))


def every_cut(layers: LayerDag) -> list[Cut]:
    """Sets of layers that hold the producers of all their members, smaller ones first."""
    before, _ = layers.neighbours()
    found = [frozenset[int]()]
    for layer in range(layers.count):
        found += [cut | {layer} for cut in found if cut.issuperset(before[layer])]
    return sorted(found, key=lambda cut: (len(cut), sorted(cut)))


@every_plan.register
def _of_levels(problem: PipeDreamProblem) -> Iterator[tuple[ReplicatedStage, ...]]:
    """All cuts and replicas, level by level."""
    cuts = every_cut(problem.layers)
    return _runs(problem, cuts, len(problem.machines) - 1, cuts[0], cuts[-1])


def _runs(
    problem: PipeDreamProblem, cuts: list[Cut], level: int, start: Cut, stop: Cut
) -> Iterator[tuple[ReplicatedStage, ...]]:
    """All ways to run the layers between two cuts on one unit of the level above."""

    def rest(before: Cut, units: int) -> Iterator[tuple[ReplicatedStage, ...]]:
        if before == stop:
            if units == 0 or not problem.use_all:
                yield ()
            return
        for cut in cuts:
            if before < cut <= stop:
                for replicas in range(1, units + 1 if problem.replicate else min(units, 1) + 1):
                    layers = tuple(sorted(cut - before))
                    inners = _runs(problem, cuts, level - 1, before, cut) if level else iter([()])
                    for inner in inners:
                        for later in rest(cut, units - replicas):
                            yield (ReplicatedStage(layers, replicas, inner), *later)

    return rest(start, problem.machines[level])


@every_plan.register
def _of_places(problem: PlacedPipelineProblem) -> Iterator[tuple[PlacedStage, ...]]:
    """Every way to take the devices from the left, with every way to cut; what is not allowed is left to the judge."""
    cuts = every_cut(problem.layers)
    strides = [problem.unit_devices(level) for level in range(1, len(problem.machines))]

    def places(free: int, offset: int, copies: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
        """(first, width, copies, stride) of the next stage."""
        if offset:
            yield from ((free + offset, width, copies, stride) for width in range(1, stride - offset + 1))
            return
        yield from ((free, width, 1, 0) for width in range(1, problem.devices - free + 1))
        for unit in strides:
            most = (problem.devices - free) // unit
            if free % unit == 0:
                for count in range(2, most + 1):
                    yield from ((free, width, count, unit) for width in range(1, unit + 1))

    def rest(before: Cut, free: int, offset: int, copies: int, stride: int) -> Iterator[tuple[PlacedStage, ...]]:
        if before == cuts[-1]:
            if offset == 0:
                yield ()
            return
        for place in places(free, offset, copies, stride):
            first, width, count, unit = place
            if count == 1:
                after = (first + width, 0, 1, 0)
            elif offset + width == unit:
                after = (free + count * unit, 0, 1, 0)
            else:
                after = (free, offset + width, count, unit)
            for cut in cuts:
                if before < cut:
                    stage = PlacedStage(tuple(sorted(cut - before)), *place)
                    for later in rest(cut, *after):
                        yield (stage, *later)

    return rest(cuts[0], 0, 0, 1, 0)


@every_plan.register
def _of_piper(problem: PiperProblem) -> Iterator[PiperDecision]:
    """Every ordered partition with all degrees, each stage with its best choices."""
    degrees = [
        (t, d)
        for t in problem.tensor_degrees
        for d in range(1, min(problem.devices // t, problem.batch) + 1)
        if problem.batch % d == 0
    ]
    for stages in _ordered_partitions(problem, frozenset(range(problem.node_count))):
        for chosen in itertools.product(degrees, repeat=len(stages)):
            decision = _fill(problem, stages, chosen)
            if decision is not None:
                yield decision


def _ordered_partitions(problem: PiperProblem, left: frozenset[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to cut the nodes `left` into stages in an order that no edge runs against."""
    if not left:
        yield ()
        return
    edges = problem.edges.tolist()
    for size in range(1, len(left) + 1):
        for nodes in itertools.combinations(sorted(left), size):
            if all(u in nodes for u, v in edges if v in nodes and u in left):
                for rest in _ordered_partitions(problem, left - set(nodes)):
                    yield (nodes, *rest)


def _fill(
    problem: PiperProblem, stages: tuple[tuple[int, ...], ...], degrees: tuple[tuple[int, int], ...]
) -> PiperDecision | None:
    """The best choices for given stages and degrees; None when some stage has none that fit."""
    if sum(t * d for t, d in degrees) > problem.devices:
        return None
    filled = []
    for i, (nodes, (t, d)) in enumerate(zip(stages, degrees, strict=True)):
        in_flight = -(-sum(data for _, data in degrees[i:]) // d)
        best: tuple[float, PiperStage] | None = None
        for choices in itertools.product(*(range(len(problem.options(v, t))) for v in nodes)):
            stage = PiperStage(nodes, t, d, choices)
            seconds, needed = stage_figures(problem, stage, in_flight)
            if fits(needed, problem.memory_bytes) and (best is None or seconds < best[0]):
                best = seconds, stage
        if best is None:
            return None
        filled.append(best[1])
    return PiperDecision(tuple(filled))

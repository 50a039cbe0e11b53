"""Costs of a chain of blocks on a fat device of several ranks, as arrays by block for a search over stages.

One boundary layout holds for the full chain, so that any range of blocks can be a stage. Every block picks one of its
points, by prices of memory against time that are the same for all blocks; points that no price picks are not offered.
The sharding of a stage in a plan (`StageSharding`) is the points of all blocks on one mesh and one choice among them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InfeasibleError, UsageError
from planner.sharding.inner import InnerCosts, trained_parameters
from planner.sharding.inner_points import InnerPoint, point
from planner.sharding.layout import REPLICATED, TensorLayout
from planner.sharding.problem import Choice, rest_of
from planner.sharding.resting import Boundaries, BoundaryLayout, canonical_layout
from planner.sums import float_sum

COARSE = (1e-9, 0.05, 0.5, 1000.0)
"""Prices of memory: the bytes of the fastest choice of all blocks cost this many times its seconds."""
FINE = (1e-9, 0.01, 0.03, 0.1, 0.3, 1000.0)
"""More prices, for a finer search."""
CLOSE, FINE_CLOSE = 0.01, 0.03
"""A choice that is better than another by less than this fraction in every figure is not offered."""


@dataclass(frozen=True)
class ShardedCosts:
    """Costs of the n blocks of a chain on a fat device for one micro-batch; all figures are of one rank.

    Attributes:
        boundaries: layout of the tensors between blocks, by mesh axis.
        layouts: layout of each of these tensors.
        points: [n] the point that each block picked, in the names of the solved block
            (`InnerCosts.blocks[b].named` renames it).
        forward_s: [n] seconds of forward, communication included; a recomputed stage repeats them.
        backward_s: [n] seconds of backward without recomputation.
        step_s: [n] seconds of communication inside the fat device once an update.
        communication_s: [n] seconds of communication in `forward_s + backward_s`.
        forward_communication_s: [n] those in `forward_s`.
        sent_bytes: [n] bytes sent inside the fat device, forward and backward.
        parameter_elements: [n] trainable elements; a parameter counts in every block that uses it.
        whole_on: by parameter, the mesh axes that deal out samples or steps and on which it is replicated.
        saved_bytes: [n] bytes of the storages kept for backward.
        waiting_bytes: [n] bytes that stay until the second half of a split backward.
        checkpoint_bytes: [n] bytes of the input tensors, which recomputation keeps.
        parameters: by block, the trainable parameters that it reads (ties resolved), with the elements held of each.
        workspace_bytes: [n] transient bytes.
    """

    boundaries: Boundaries
    layouts: Mapping[str, TensorLayout]
    points: tuple[InnerPoint, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    step_s: np.ndarray
    communication_s: np.ndarray
    forward_communication_s: np.ndarray
    sent_bytes: np.ndarray
    parameter_elements: np.ndarray
    whole_on: Mapping[str, tuple[int, ...]]
    saved_bytes: np.ndarray
    waiting_bytes: np.ndarray
    checkpoint_bytes: np.ndarray
    parameters: tuple[Mapping[str, float], ...]
    workspace_bytes: np.ndarray

    @property
    def label(self) -> str:
        """The boundary layout as text."""
        return "/".join(self.boundaries)

    @property
    def totals(self) -> tuple[float, ...]:
        """Totals of the chain: seconds, forward seconds, trainable elements, kept bytes, bytes of block inputs."""
        seconds = float(self.forward_s.sum() + self.backward_s.sum())
        saved_bytes, input_bytes = float(self.saved_bytes.sum()), float(self.checkpoint_bytes.sum())
        return seconds, float(self.forward_s.sum()), float(self.parameter_elements.sum()), saved_bytes, input_bytes


def sharded_costs(
    costs: InnerCosts,
    *,
    boundaries: Sequence[Boundaries] | None = None,
    finer: bool = False,
) -> tuple[ShardedCosts, ...]:
    """The distinct choices of a point for each block that some price of memory prefers, fastest first.

    Args:
        costs: the points of the blocks.
        boundaries: boundary layouts to consider; all by default.
        finer: try more prices of memory.

    Returns:
        One or more choices for each boundary layout; none where some block has no point.

    Complexity: blocks times points times prices.
    """
    choices: list[ShardedCosts] = []
    for boundary in costs.boundaries if boundaries is None else boundaries:
        sets = [block.points[boundary] for block in costs.blocks]
        if all(sets):
            picked = _picked(costs, sets, FINE if finer else COARSE)
            layouts = canonical_layouts(costs, boundary)
            choices += [_arrays(costs, boundary, layouts, points) for points in picked]
    choices.sort(key=lambda c: c.totals)
    return tuple(_worth_trying(choices, FINE_CLOSE if finer else CLOSE))


def _worth_trying(choices: Sequence[ShardedCosts], close: float) -> list[ShardedCosts]:
    """The choices without those that an earlier one equals or beats in all totals, but for a small fraction."""
    kept: list[ShardedCosts] = []
    for costs in choices:
        totals = np.asarray(costs.totals)
        if not any(np.all(np.asarray(other.totals) <= totals * (1 + close)) for other in kept):
            kept.append(costs)
    return kept


def leanest_costs(costs: InnerCosts, boundary: Boundaries) -> tuple[ShardedCosts, ...]:
    """The choices with the fewest weights, and with the fewest activations; empty where a block has no point."""
    sets = [block.points[boundary] for block in costs.blocks]
    if not all(sets):
        return ()
    by_weights = tuple(min(points, key=lambda p: (p.parameter_elements, p.saved_bytes)) for points in sets)
    by_kept = tuple(min(points, key=lambda p: (p.saved_bytes, p.parameter_elements)) for points in sets)
    layouts = canonical_layouts(costs, boundary)
    return tuple(_arrays(costs, boundary, layouts, points) for points in (by_weights, by_kept))


def _picked(
    costs: InnerCosts, sets: Sequence[tuple[InnerPoint, ...]], prices: Sequence[float]
) -> list[tuple[InnerPoint, ...]]:
    """The points that all blocks pick, at each pair of prices of weights and of kept activations."""
    steps = max(1, costs.setting.micro_batches)
    figures = [
        np.asarray(
            [[p.forward_s + p.backward_s + p.step_s / steps, p.parameter_elements, p.saved_bytes] for p in points]
        )
        for points in sets
    ]
    fastest = np.sum([f[f[:, 0].argmin()] for f in figures], axis=0)
    units = fastest[0] / np.maximum(fastest[1:], 1.0)
    picks = {
        tuple(int((f @ np.asarray([1.0, w * units[0], a * units[1]])).argmin()) for f in figures)
        for w, a in itertools.product(prices, prices)
    }
    return [tuple(points[k] for points, k in zip(sets, pick, strict=True)) for pick in sorted(picks)]


_OF_POINTS = (
    "forward_s", "backward_s", "step_s", "communication_s", "forward_communication_s", "sent_bytes", "saved_bytes",
    "waiting_bytes", "checkpoint_bytes", "workspace_bytes",
)  # fmt: skip
"""Figures of `InnerPoint` that `ShardedCosts` has by block."""


def _arrays(
    costs: InnerCosts, boundaries: Boundaries, layouts: Mapping[str, TensorLayout], picked: tuple[InnerPoint, ...]
) -> ShardedCosts:
    """The costs of a choice of a point for each block, for given layouts of the tensors between blocks."""
    trained = trained_parameters(costs.graph)
    parameters = tuple(
        _held_parameters(trained, block.named_sizes(point.weights))
        for block, point in zip(costs.blocks, picked, strict=True)
    )
    return ShardedCosts(
        boundaries=boundaries,
        layouts=layouts,
        points=picked,
        parameter_elements=np.array([float_sum(held.values()) for held in parameters], dtype=float),
        whole_on=_whole_on(costs, picked),
        parameters=parameters,
        **{name: np.array([getattr(p, name) for p in picked]) for name in _OF_POINTS},
    )


def _whole_on(costs: InnerCosts, picked: Sequence[InnerPoint]) -> dict[str, tuple[int, ...]]:
    """By parameter, the axes that deal out samples or steps and replicate it in all blocks that read it."""
    dealing, axes_of = costs.setting.options.dealing, dict[str, tuple[int, ...]]()
    trained = trained_parameters(costs.graph)
    for pick, block in zip(picked, costs.blocks, strict=True) if dealing else ():
        for weight, _ in pick.weights:
            layout = rest_of(pick.decision[weight]).value
            for name, _ in trained.get(block.named_as(weight), ()):
                axes = axes_of.get(name, dealing)
                axes_of[name] = tuple(axis for axis in axes if layout[axis] == REPLICATED)
    return axes_of


def canonical_layouts(costs: InnerCosts, boundaries: Boundaries) -> dict[str, TensorLayout]:
    """Layout of each tensor that crosses a boundary, under a boundary layout that is not free."""
    sizes, padded = costs.mesh.sizes, costs.setting.options.padded
    tensors = {name: costs.graph.tensors[name] for name in sorted(costs.chain.crossing_tensors)}
    return {name: canonical_layout(tensor, boundaries, sizes, padded=padded) for name, tensor in tensors.items()}


def _held_parameters(
    trained: Mapping[str, Sequence[tuple[str, int]]], weights: Iterable[tuple[str, float]]
) -> dict[str, float]:
    """By trainable parameter that some weight tensors come from, the elements that a rank holds.

    Args:
        trained: by weight tensor, its parameters, with their elements.
        weights: weight tensors, with the fraction of each that a rank holds.
    """
    held: dict[str, float] = {}
    for tensor, part in weights:
        for name, elements in trained.get(tensor, ()):
            held[name] = max(held.get(name, 0.0), part * elements)
    return held


def decided_costs(costs: InnerCosts, decisions: Sequence[Mapping[str, Choice] | None]) -> ShardedCosts:
    """The costs of the blocks under a decision for each. Equal blocks with equal decisions share a point.

    Blocks without a decision get the points of a choice that the search offers: of the first one that agrees with the
    decisions of all other blocks, else of the fastest. They matter where they read weights of decided blocks.

    Args:
        costs: the blocks on one mesh, under one boundary layout.
        decisions: by block, in the names of the block; None where nothing is decided.

    Raises:
        UsageError: something in a decided block has no strategy or layout.
        InfeasibleError: the judge finds a decision illegal, or an undecided block cannot be sharded like this.

    Complexity: the judge's, once for each distinct block; with undecided blocks the search over points on top.
    """
    (boundary,) = costs.boundaries
    point_of: dict[tuple[int, tuple[Choice, ...]], InnerPoint] = {}
    picked: list[InnerPoint | None] = []
    for sharding, decision in zip(costs.blocks, decisions, strict=True):
        if decision is None:
            picked.append(None)
            continue
        block = sharding.points.block
        part = {name: _decided(decision, sharding.named_as(name)) for name in block.free.names}
        key = id(block), tuple(part.values())
        if key not in point_of:
            point_of[key] = point(block, boundary, part)
        picked.append(point_of[key])
    free = BoundaryLayout.FREE in boundary
    layouts = _decided_layouts(costs, decisions) if free else canonical_layouts(costs, boundary)
    filled = _filled(costs, picked)
    return _arrays(costs, boundary, layouts, filled)


def _filled(costs: InnerCosts, picked: Sequence[InnerPoint | None]) -> tuple[InnerPoint, ...]:
    """The decided points, and for all other blocks those of a choice that the search offers.

    Raises:
        InfeasibleError: the search offers none.
    """
    decided = tuple(point for point in picked if point is not None)
    if len(decided) == len(picked):
        return decided
    offered = sharded_costs(costs)
    if not offered:
        raise InfeasibleError("a block cannot be sharded on this mesh", hint="use another mesh")

    def agrees(choice: ShardedCosts) -> bool:
        pairs = zip(picked, choice.points, strict=True)
        return all(point is None or point.decision == other.decision for point, other in pairs)

    fallback = next(filter(agrees, offered), offered[0]).points
    return tuple(point or other for point, other in zip(picked, fallback, strict=True))


def _decided_layouts(costs: InnerCosts, decisions: Sequence[Mapping[str, Choice] | None]) -> dict[str, TensorLayout]:
    """Layout of each tensor that crosses a boundary, by the first block with a decision about it.

    Raises:
        UsageError: no block has one.
    """
    layouts: dict[str, TensorLayout] = {}
    for name in sorted(costs.chain.crossing_tensors):
        decision = next((d for d in decisions if d is not None and name in d), {})
        layouts[name] = rest_of(_decided(decision, name)).value
    return layouts


def _decided(decision: Mapping[str, Choice], name: str) -> Choice:
    if name not in decision:
        raise UsageError(f"nothing is decided about {name.removeprefix('op:')!r}", hint="decide about the whole graph")
    return decision[name]


@dataclass(frozen=True, eq=False)
class StageSharding:
    """A sharding that stages of a configuration can choose.

    Attributes:
        inner: the points of all blocks on its mesh, at the micro-batch size of the configuration.
        costs: one choice of points under one boundary layout.
    """

    inner: InnerCosts
    costs: ShardedCosts

    @functools.cached_property
    def most_held(self) -> Mapping[str, float]:
        """By trainable parameter, the elements held by the block where a rank holds the most of it."""
        largest: dict[str, float] = {}
        for elements_of in self.costs.parameters:
            for name, elements in elements_of.items():
                largest[name] = max(largest.get(name, 0.0), elements)
        return largest

    @property
    def label(self) -> str:
        """Mesh and boundary layout as text: `tensor 8, sequence`."""
        axes = " x ".join(f"{axis.name} {axis.size}" for axis in self.inner.mesh.axes)
        return f"{axes}, {self.costs.label}"

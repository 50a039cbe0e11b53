"""A chain of blocks on a fat device of several ranks: arrays by block, as a search over stages wants them.

One treatment of the boundaries goes for the whole chain, so that any range of blocks makes a stage. Within it every
block picks one of its points; prices of memory against time, the same for all blocks, say which. What no price would
choose is not offered.

The sharding that a stage of a plan has is the points of all blocks on one mesh, and one choice among them.
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
from planner.sharding.layout import REPLICATED, TensorLayout, shard_elements
from planner.sharding.problem import Choice, rest_of
from planner.sharding.resting import Boundaries, Boundary, canonical_layout

WORTH = (1e-9, 0.05, 0.5, 1000.0)
"""Prices of memory: what the fastest choice of all blocks holds costs this many times its seconds."""
FINE = (1e-9, 0.01, 0.03, 0.1, 0.3, 1000.0)
"""Prices where the choice matters most."""
CLOSE, FINE_CLOSE = 0.01, 0.03
"""A choice that is better than another by less than this fraction in every figure is not offered beside it."""


Sizes = tuple[tuple[str, float], ...]
"""Storages, tensors or parameters by name, and how much of each a rank holds."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of a block; what no other block has is added up.

    Attributes:
        parameter_elements: trainable elements of parameters that no other block reads.
        parameters: names of all others (ties resolved), and the elements held of each.
        saved_bytes: bytes of storages that no other block keeps.
        saved: names of all others, and their bytes. A storage that several blocks of a stage keep is there once.
    """

    parameter_elements: float
    parameters: Sizes
    saved_bytes: float
    saved: Sizes


@dataclass(frozen=True)
class ShardedCosts:
    """What each block of a chain costs on a fat device, for one micro-batch. n blocks; per rank, in all figures.

    Attributes:
        boundaries: how the tensors between blocks lie, by mesh axis.
        layouts: where each of these tensors lies.
        points: [n] the point that each block picked, in the names of the block that was solved
            (`InnerCosts.blocks[b].named` gives it the block's own).
        forward_s: [n] seconds, communication included; a recomputed stage repeats them.
        backward_s: [n] seconds without recomputation.
        step_s: [n] seconds of communication inside the fat device once an update.
        communication_s: [n] the communication in `forward_s + backward_s`.
        sent_bytes: [n] bytes sent inside the fat device, forward and backward.
        parameter_elements: [n] trainable elements; a parameter counts in every block that uses it.
        whole_on: by parameter, the mesh axes that deal out samples or steps and on which every rank holds the same.
        saved_bytes: [n] bytes of the storages kept for backward.
        checkpoint_bytes: [n] bytes of the input tensors: what recomputation keeps.
        held: by block, what of parameters and of kept storages it has alone, and what it shares with others.
        boundary_bytes: [n + 1] bytes of the tensors that cross each boundary. Where they are replicated every rank has
            all of them, so the ranks may share the sending and gather on the other side.
        gradient_boundary_bytes: [n + 1] the same of their gradients.
        workspace_bytes: [n] transient bytes.
    """

    boundaries: Boundaries
    layouts: Mapping[str, TensorLayout]
    points: tuple[InnerPoint, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    step_s: np.ndarray
    communication_s: np.ndarray
    sent_bytes: np.ndarray
    parameter_elements: np.ndarray
    whole_on: Mapping[str, tuple[int, ...]]
    saved_bytes: np.ndarray
    checkpoint_bytes: np.ndarray
    held: tuple[Held, ...]
    boundary_bytes: np.ndarray
    gradient_boundary_bytes: np.ndarray
    workspace_bytes: np.ndarray

    @property
    def label(self) -> str:
        """The boundaries in words."""
        return "/".join(self.boundaries)

    @property
    def totals(self) -> tuple[float, ...]:
        """Of the whole chain: seconds, forward seconds, trainable elements, kept bytes, inputs' bytes of all blocks."""
        seconds = float(self.forward_s.sum() + self.backward_s.sum())
        kept, inputs = float(self.saved_bytes.sum()), float(self.checkpoint_bytes.sum())
        return seconds, float(self.forward_s.sum()), float(self.parameter_elements.sum()), kept, inputs


def sharded_costs(
    costs: InnerCosts,
    differentiable: frozenset[str] | None = None,
    *,
    boundaries: Sequence[Boundaries] | None = None,
    finer: bool = False,
) -> tuple[ShardedCosts, ...]:
    """Choices of points for all blocks that differ and that some price of memory prefers, fastest first.

    Args:
        costs: the points of the blocks.
        differentiable: names of the tensors through which gradients flow; all floating-point ones by default.
        boundaries: treatments of the boundaries to look at; all by default.
        finer: try more prices of memory.

    Returns:
        One or more for each treatment of the boundaries; none for one under which some block has no point.

    Complexity: blocks times points times prices.
    """
    found: list[ShardedCosts] = []
    chain = _Chain(costs, differentiable)
    for boundary in costs.boundaries if boundaries is None else boundaries:
        sets = [block.points[boundary] for block in costs.blocks]
        if all(sets):
            picked = _picked(costs, sets, FINE if finer else WORTH)
            found += chain.arrays(boundary, canonical_layouts(costs, boundary), picked)
    found.sort(key=lambda c: c.totals)
    return tuple(_worth_trying(found, FINE_CLOSE if finer else CLOSE))


def _worth_trying(found: Sequence[ShardedCosts], close: float) -> list[ShardedCosts]:
    """Those that no other is as good as in all totals but for a small fraction; of such pairs the first stays."""
    kept: list[ShardedCosts] = []
    for one in found:
        own = np.asarray(one.totals)
        others = [np.asarray(k.totals) for k in kept]
        if not any(np.all(other <= own * (1 + close)) for other in others):
            kept.append(one)
    return kept


def leanest_costs(costs: InnerCosts, boundary: Boundaries) -> tuple[ShardedCosts, ...]:
    """The choices that hold the fewest weights, and the fewest activations, of all blocks; none where a block has no
    point."""
    sets = [block.points[boundary] for block in costs.blocks]
    if not all(sets):
        return ()
    by_weights = tuple(min(each, key=lambda p: (p.parameter_elements, p.saved_bytes)) for each in sets)
    by_kept = tuple(min(each, key=lambda p: (p.saved_bytes, p.parameter_elements)) for each in sets)
    return tuple(_Chain(costs, None).arrays(boundary, canonical_layouts(costs, boundary), (by_weights, by_kept)))


def _picked(
    costs: InnerCosts, sets: Sequence[tuple[InnerPoint, ...]], worth: Sequence[float]
) -> list[tuple[InnerPoint, ...]]:
    """The points that all blocks choose, at each pair of prices of weights and of kept activations."""
    steps = max(1, costs.options.micro_batches)
    figures = [
        np.asarray([[p.forward_s + p.backward_s + p.step_s / steps, p.parameter_elements, p.saved_bytes] for p in each])
        for each in sets
    ]
    fastest = np.sum([f[f[:, 0].argmin()] for f in figures], axis=0)
    units = fastest[0] / np.maximum(fastest[1:], 1.0)
    chosen = {
        tuple(int((f @ np.asarray([1.0, w * units[0], a * units[1]])).argmin()) for f in figures)
        for w, a in itertools.product(worth, worth)
    }
    return [tuple(each[k] for each, k in zip(sets, picked, strict=True)) for picked in sorted(chosen)]


class _Chain:
    """Makes arrays of the blocks of a chain; what a point holds is added up once for all blocks that are alike."""

    def __init__(self, costs: InnerCosts, differentiable: frozenset[str] | None) -> None:
        self._costs, self._graph, self._differentiable = costs, costs.graph, differentiable
        self._known: dict[tuple[int, tuple[str, ...]], tuple[float, Sizes, float, Sizes]] = {}

    def _held(self, b: int, point: InnerPoint) -> Held:
        """What a rank holds of block b at a point."""
        block, trained = self._costs.blocks[b], trained_parameters(self._graph)
        shared = block.shared
        if self._costs.options.options.dealing:  # `whole_on` tells parameters apart
            shared = {**shared, **{name: block.named_as(name) for name, _ in point.weights}}
        key = id(point), tuple(shared)
        if key not in self._known:
            alone = ((block.named_as(name), part) for name, part in point.weights if name not in shared)
            self._known[key] = (
                sum(held_parameters(trained, alone).values()),
                tuple(each for each in point.weights if each[0] in shared),
                sum(size for name, size in point.saved if name not in shared),
                tuple(each for each in point.saved if each[0] in shared),
            )
        elements, weights, saved_bytes, saved = self._known[key]
        parameters = held_parameters(trained, ((shared[name], part) for name, part in weights))
        named = tuple((shared[name], size) for name, size in saved)
        return Held(elements, tuple(parameters.items()), saved_bytes, named)

    def _crossing_bytes(self, layouts: Mapping[str, TensorLayout], *, gradients: bool) -> np.ndarray:
        """[n + 1] bytes of the tensors that cross each boundary on a rank, or of their gradients."""
        sizes, wanted = {}, self._differentiable
        for name, layout in layouts.items():
            is_float = self._graph.tensors[name].dtype.is_float
            flows = not gradients or (is_float if wanted is None else name in wanted)
            sizes[name] = _tensor_bytes(self._costs, name, layout) if flows else 0.0
        return self._costs.chain.boundary_sums(sizes)

    def arrays(
        self,
        boundaries: Boundaries,
        layouts: Mapping[str, TensorLayout],
        choices: Iterable[tuple[InnerPoint, ...]],
    ) -> list[ShardedCosts]:
        """What some choices of a point for each block come to, the tensors between blocks lying as given."""
        crossing = self._crossing_bytes(layouts, gradients=False)
        gradients = self._crossing_bytes(layouts, gradients=True)
        return [self._arrays(boundaries, layouts, crossing, gradients, picked) for picked in choices]

    def _whole_on(self, picked: Sequence[InnerPoint]) -> dict[str, tuple[int, ...]]:
        """By parameter, the axes that deal out samples or steps and leave it whole in all blocks that read it."""
        dealing, found = self._costs.options.options.dealing, dict[str, tuple[int, ...]]()
        trained = trained_parameters(self._graph)
        for own, block in zip(picked, self._costs.blocks, strict=True) if dealing else ():
            for weight, _ in own.weights:
                layout = rest_of(own.decision[weight]).value
                for name, _ in trained.get(block.named_as(weight), ()):
                    known = found.get(name, dealing)
                    found[name] = tuple(axis for axis in known if layout[axis] == REPLICATED)
        return found

    def _arrays(
        self,
        boundaries: Boundaries,
        layouts: Mapping[str, TensorLayout],
        crossing: np.ndarray,
        gradients: np.ndarray,
        picked: tuple[InnerPoint, ...],
    ) -> ShardedCosts:
        held = tuple(self._held(b, p) for b, p in enumerate(picked))
        elements = [own.parameter_elements + sum(size for _, size in own.parameters) for own in held]
        return ShardedCosts(
            boundaries=boundaries,
            layouts=layouts,
            points=picked,
            forward_s=np.array([p.forward_s for p in picked]),
            backward_s=np.array([p.backward_s for p in picked]),
            step_s=np.array([p.step_s for p in picked]),
            communication_s=np.array([p.communication_s for p in picked]),
            sent_bytes=np.array([p.sent_bytes for p in picked]),
            parameter_elements=np.array(elements),
            whole_on=self._whole_on(picked),
            saved_bytes=np.array([p.saved_bytes for p in picked]),
            checkpoint_bytes=np.array([p.checkpoint_bytes for p in picked]),
            held=held,
            boundary_bytes=crossing,
            gradient_boundary_bytes=gradients,
            workspace_bytes=np.array([p.workspace_bytes for p in picked]),
        )


def canonical_layouts(costs: InnerCosts, boundaries: Boundaries) -> dict[str, TensorLayout]:
    """Where each tensor that crosses a boundary lies under a treatment that is not free."""
    sizes, padded = costs.mesh.sizes, costs.options.options.padded
    tensors = {name: costs.graph.tensors[name] for name in sorted(costs.chain.handed_on)}
    return {name: canonical_layout(tensor, boundaries, sizes, padded=padded) for name, tensor in tensors.items()}


def held_parameters(
    trained: Mapping[str, Sequence[tuple[str, int]]], weights: Iterable[tuple[str, float]]
) -> dict[str, float]:
    """Elements held of each trainable parameter that some weight tensors come from.

    Args:
        trained: by weight tensor, parameters and their elements.
        weights: weight tensors, and the part of each that a rank holds.
    """
    found: dict[str, float] = {}
    for tensor, part in weights:
        for name, elements in trained.get(tensor, ()):
            found[name] = max(found.get(name, 0.0), part * elements)
    return found


def _tensor_bytes(costs: InnerCosts, name: str, layout: TensorLayout) -> float:
    """Bytes of a boundary tensor on one rank."""
    tensor = costs.graph.tensors[name]
    each = costs.options.item_bytes if tensor.dtype.is_float else tensor.dtype.bits / 8
    return each * shard_elements(tensor.shape, layout, costs.mesh.sizes)


def whole_costs(
    costs: InnerCosts, decision: Mapping[str, Choice], differentiable: frozenset[str] | None = None
) -> ShardedCosts:
    """What a decision about the whole graph makes of each block, the tensors between blocks lying as it says.

    Args:
        costs: the blocks on the decision's mesh, their boundaries free.
        decision: strategy of each operator (`op:` and its key), layouts of each tensor and weight.
        differentiable: names of the tensors through which gradients flow; all floating-point ones by default.

    Raises:
        UsageError: something has no strategy or layout.
        InfeasibleError: the judge finds a block's part illegal.

    Complexity: the judge's, once for each distinct block.
    """
    return decided_costs(costs, [decision] * len(costs.blocks), differentiable)


def decided_costs(
    costs: InnerCosts,
    decisions: Sequence[Mapping[str, Choice] | None],
    differentiable: frozenset[str] | None = None,
) -> ShardedCosts:
    """What decisions about each block make of it. Blocks for which they say the same share a point.

    Blocks without a decision get the points of a sharding that the search offers: of the first that picks what is
    decided for the others, else of the fastest. They matter where they read weights that decided blocks read, too.

    Args:
        costs: the blocks on one mesh, under one treatment of their boundaries.
        decisions: by block, in the names of the block; None where nothing is decided.
        differentiable: names of the tensors through which gradients flow; all floating-point ones by default.

    Raises:
        UsageError: something in a decided block has no strategy or layout.
        InfeasibleError: the judge finds a decision illegal, or an undecided block cannot be sharded like this.

    Complexity: the judge's, once for each distinct block; with undecided blocks the search over points on top.
    """
    (boundary,) = costs.boundaries
    known: dict[tuple[int, tuple[Choice, ...]], InnerPoint] = {}
    picked: list[InnerPoint | None] = []
    for sharding, decision in zip(costs.blocks, decisions, strict=True):
        if decision is None:
            picked.append(None)
            continue
        block = sharding.points.block
        part = {name: _decided(decision, sharding.named_as(name)) for name in block.free.names}
        key = id(block), tuple(part.values())
        if key not in known:
            known[key] = point(block, boundary, part)
        picked.append(known[key])
    free = Boundary.FREE in boundary
    layouts = _rests(costs, decisions) if free else canonical_layouts(costs, boundary)
    filled = _filled(costs, picked, differentiable)
    return _Chain(costs, differentiable).arrays(boundary, layouts, (filled,))[0]


def _filled(
    costs: InnerCosts, picked: Sequence[InnerPoint | None], differentiable: frozenset[str] | None
) -> tuple[InnerPoint, ...]:
    """The points that are decided, and for all other blocks those of a sharding that the search offers.

    Raises:
        InfeasibleError: the search offers none.
    """
    decided = tuple(each for each in picked if each is not None)
    if len(decided) == len(picked):
        return decided
    offered = sharded_costs(costs, differentiable)
    if not offered:
        raise InfeasibleError("a block cannot be sharded on this mesh", hint="use another mesh")
    alike = (
        each
        for each in offered
        if all(own is None or own.decision == other.decision for own, other in zip(picked, each.points, strict=True))
    )
    rest = next(alike, offered[0]).points
    return tuple(own or other for own, other in zip(picked, rest, strict=True))


def _rests(costs: InnerCosts, decisions: Sequence[Mapping[str, Choice] | None]) -> dict[str, TensorLayout]:
    """Where each tensor that crosses a boundary lies, as the first block says that decides about it.

    Raises:
        UsageError: none does.
    """
    found: dict[str, TensorLayout] = {}
    for name in sorted(costs.chain.handed_on):
        said = next((each for each in decisions if each is not None and name in each), {})
        found[name] = rest_of(_decided(said, name)).value
    return found


def _decided(decision: Mapping[str, Choice], name: str) -> Choice:
    if name not in decision:
        raise UsageError(f"nothing is decided about {name.removeprefix('op:')!r}", hint="decide about the whole graph")
    return decision[name]


@dataclass(frozen=True, eq=False)
class StageSharding:
    """An entry of the catalogue that a decision's stages choose from.

    Attributes:
        inner: the points of all blocks on the entry's mesh, at the decision's micro-batch size.
        costs: one choice of points, the boundaries lying alike.
    """

    inner: InnerCosts
    costs: ShardedCosts

    @functools.cached_property
    def parameters(self) -> tuple[Mapping[str, float], ...]:
        """By block, names of the trainable parameters that it reads (ties resolved) and the elements held of each."""
        trained = trained_parameters(self.inner.graph)
        return tuple(
            held_parameters(trained, ((block.named_as(name), part) for name, part in point.weights))
            for block, point in zip(self.inner.blocks, self.costs.points, strict=True)
        )

    @functools.cached_property
    def most_held(self) -> Mapping[str, float]:
        """Elements held of each trainable parameter by the block where a rank holds most of it."""
        most: dict[str, float] = {}
        for each in self.parameters:
            for name, elements in each.items():
                most[name] = max(most.get(name, 0.0), elements)
        return most

    @property
    def label(self) -> str:
        """Mesh and boundaries in words: `tensor 8, sequence`."""
        axes = " x ".join(f"{axis.name} {axis.size}" for axis in self.inner.mesh.axes)
        return f"{axes}, {self.costs.label}"

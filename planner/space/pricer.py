"""Price a model for the search: costs of its blocks by micro-batch size, mesh and sharding.

Everything is computed on first use, and kept.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from planner.costs import is_priced
from planner.costs.precision import optimizer_state_bytes
from planner.errors import ModelError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.operators import require_trained
from planner.sharding import Boundaries, BoundaryLayout, Options, Setting, StageSharding, StateBytes
from planner.sharding.inner import BOUNDARIES, InnerCache, InnerCosts, inner_costs
from planner.sharding.mesh import Axis, AxisRole, Mesh, axes_text, mesh_on, roles_of
from planner.sharding.problem import Choice
from planner.sharding.sharded import ShardedCosts, decided_costs, leanest_costs, sharded_costs
from planner.space.blocks import block_seconds, update_s_per_element
from planner.space.configuration import Configuration
from planner.space.device_prices import DevicePrices
from planner.space.job_options import LIMITS, allows_single_devices, refuse_others
from planner.space.jobs import (
    MeshAxes,
    experts_of_row,
    mesh_axes,
    mesh_names,
    meshes_for,
    ranks_of,
    settled,
)
from planner.space.repeats import even_prices
from planner.space.sharded import (
    least_costs,
    on_all_types,
    sharded_block_costs,
    sharded_repeats,
    sharded_weight_grad_s,
)
from planner.space.types import BlockCosts, Job

BlockDecision = Mapping[str, Choice] | None
"""The decision about every operator, tensor and weight of a block; None for blocks without one."""

P = ParamSpec("P")
T = TypeVar("T")

_Numbered = tuple[StageSharding, BlockCosts]
"""A sharding and its costs."""

FloorKey = tuple[Any, ...]
"""A mesh, alone or with the number of its outermost axes whose exchanges a floor counts, or with the layout of the
tensors between blocks on it; opaque to a search.

It identifies a family of shardings, whose floor is a lower bound on their costs."""

Floors = Sequence[tuple[BlockCosts, FloorKey]]
"""Lower bounds on the costs of families of shardings, with the families' keys."""

Refinement = tuple[Floors, Sequence[BlockCosts]]
"""Closer floors with their keys, or the shardings of a family, each with a number of its own."""


def counts_some_axes(key: FloorKey) -> bool:
    """Whether a floor counts exchanges along some axes of a mesh, and a closer one those along one axis more."""
    return len(key) > 1 and isinstance(key[1], int) and key[1] < len(key[0])


LAYER_BOUNDARIES = (BoundaryLayout.REPLICATED, BoundaryLayout.SEQUENCE)
"""Layouts of tensors between the tensor parallel layers of frameworks."""

_SHARED_EVENLY = ("parameter_elements", "saved_bytes", "checkpoint_bytes", "workspace_bytes")

MOST_MESHES = 2
"""Number of meshes on which a first plan is searched."""


def _kept(make: Callable[Concatenate[Pricer, P], T]) -> Callable[Concatenate[Pricer, P], T]:
    """Keep what a method makes: for its pricer, and for those like it with the same limits on how a block is shared."""

    @functools.wraps(make)
    def kept(pricer: Pricer, /, *arguments: P.args, **named: P.kwargs) -> T:
        key = (make.__name__, *pricer.limits, *arguments, *named.items())
        if key not in pricer.known:
            pricer.known[key] = make(pricer, *arguments, **named)
        return cast(T, pricer.known[key])

    return kept


class Pricer:
    """A model's costs on a cluster, by micro-batch size and mesh.

    Args:
        graph: the model, at any batch.
        cluster: device types to price for, and links of the meshes.
        job: precision, optimizer and memory options.
        strict_ops: refuse operators that no rule describes.
        like: a pricer of the same model, cluster and job except for its limits, whose prices are used again; both
            number their shardings together.

    Attributes:
        alone: prices where every replica is one device.
    """

    def __init__(
        self, graph: Graph, cluster: Cluster, job: Job, *, strict_ops: bool = False, like: Pricer | None = None
    ) -> None:
        require_trained(graph)
        job = settled(job, cluster)
        if is_priced(graph):
            engine = "a model that carries measured times of its own"
            refuse_others(job, set(LIMITS) | {"precision", "optimizer", "overlap", "headroom"}, engine, "leave it out")
        self.graph, self.cluster, self._job = graph, cluster, job
        self.alone: DevicePrices = like.alone if like else DevicePrices(graph, cluster, job, strict_ops=strict_ops)
        self.chain, self._precision, self._reruns = self.alone.chain, self.alone.precision, self.alone.reruns
        self.graph_at, self.profiles, self.costs = self.alone.graph_at, self.alone.profiles, self.alone.costs
        self._inner: InnerCache = InnerCache() if like is None else like._inner
        self.known: dict[tuple[object, ...], Any] = {} if like is None else like.known
        self._floor_numbers: Iterator[int] = itertools.count(-1, -1) if like is None else like._floor_numbers
        self._numbered_at: dict[int, list[_Numbered]] = {} if like is None else like._numbered_at
        self._mesh_of: Callable[..., Mesh] = like._mesh_of if like else functools.cache(self._make_mesh)

    @property
    def limits(self) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
        """Limits of the job on how a block is shared: as layers of frameworks, what lies between, what is not split."""
        structure = self._job.structure
        return bool(structure.axes), structure.between_layers, self._job.forbid

    @functools.cached_property
    def meshes(self) -> tuple[MeshAxes, ...]:
        """Meshes on which the job allows operators to be shared."""
        return meshes_for(self.graph, self.cluster, self._job)

    def entry(self, micro_batch: int, number: int) -> _Numbered:
        """A sharding and its costs, by its number among those of a micro-batch size."""
        return self._numbered_at[micro_batch][number - 1]

    def costs_of(self, configuration: Configuration) -> list[BlockCosts]:
        """Costs of the shardings of a configuration's stages."""
        size, numbers = configuration.micro_batch, {stage.sharding for stage in configuration.stages}
        return [self.entry(size, number)[1] if number else self.costs(size) for number in sorted(numbers)]

    def stage_shardings(self, configuration: Configuration) -> dict[int, StageSharding]:
        """The shardings of a configuration's stages, by their numbers."""
        numbers = sorted({stage.sharding for stage in configuration.stages} - {0})
        return {number: self.entry(configuration.micro_batch, number)[0] for number in numbers}

    def whole(
        self, micro_batch: int, mesh: tuple[int, ...], decision: Mapping[str, Choice], device_type: int = 0
    ) -> BlockCosts:
        """Costs of the chain sharded as one, by a decision about every operator, tensor and weight of the graph.

        Args:
            micro_batch: samples.
            mesh: ranks along each axis.
            decision: as the searches of `planner.sharding` make it, on this mesh for `graph_at(micro_batch)`.
            device_type: whose prices hold on all devices: of unlike ones that work in step, the slowest's.

        Raises:
            UsageError: something is not decided.
            InfeasibleError: the decision is not legal.
        """
        axes = tuple(map(Axis, mesh_names(mesh), mesh))
        inner = self._inner_with(micro_batch, axes, (BoundaryLayout.FREE,), device_type=device_type)
        return self._numbered(inner, decided_costs(inner, [decision] * len(inner.blocks)), device_type)

    def decided(
        self, micro_batch: int, mesh: MeshAxes, boundary: Boundaries, decisions: Sequence[BlockDecision]
    ) -> BlockCosts:
        """Costs of the chain with the sharding of each block given, as by a plan file.

        Args:
            micro_batch: samples.
            mesh: its axes.
            boundary: how the tensors between blocks lie, by mesh axis.
            decisions: by block in its own names, strategy of each operator and layouts of each tensor and weight; None
                for blocks of stages that are not sharded like this.

        Raises:
            UsageError: something is not decided, or boundaries cannot lie like this.
            InfeasibleError: a decision is not legal.
        """
        free = BoundaryLayout.FREE in boundary
        inner = self._inner_with(micro_batch, mesh, (BoundaryLayout.FREE,) if free else BOUNDARIES)
        if boundary not in inner.boundaries:
            raise UsageError(f"tensors between blocks cannot lie as {'/'.join(boundary)}", hint="plan again")
        inner = replace(inner, boundaries=(boundary,))
        return self._numbered(inner, decided_costs(inner, decisions))

    def repeated_operators(self, repeats: tuple[str, ...]) -> int:
        """Number of operators that lists of modules run again.

        Raises:
            JobError: the model has no module of a name.
        """
        return sum(len(rerun.places) for rerun in self._reruns().of(repeats))

    def in_words(self) -> str:
        """The space of shardings, in words."""
        if not self.meshes:
            return "every replica one device"
        shapes = ", ".join(map(axes_text, self.meshes))
        kind = Pricer._inner_on.__name__, *self.limits
        made = [inner for (*own, _, mesh), inner in self.known.items() if (*own,) == kind and mesh in self.meshes]
        given_up = sorted({words for inner in made for words in inner.given_up})
        alone = "every replica one device, or " if allows_single_devices(self._job) else ""
        return (
            f"{alone}operators shared by the ranks of a mesh of {shapes}, alike in all stages; "
            "boundaries replicated, cut by sequence or by batch; all ways to share a block"
            + "".join(f"; without {words}" for words in given_up)
        )

    def floors(self, micro_batch: int) -> Floors:
        """By mesh, lower bounds on the costs of any sharding: no communication, and everything split evenly."""
        meshes = [mesh for mesh in self.meshes if micro_batch % self._dealt_ways(mesh) == 0]
        return [(self._floor(micro_batch, ranks_of(mesh)), (mesh,)) for mesh in meshes]

    def closest(self, floors: Floors) -> Floors:
        """Floors of meshes, with the closest in place of each that any search within the same limits worked out."""
        return [each for floor, key in floors for each in self._known_floors(floor, key)]

    def _known_floors(self, floor: BlockCosts, key: FloorKey) -> Floors:
        mesh, micro_batch = key[0], floor.micro_batch
        if self._knows(Pricer._floors_on, micro_batch, mesh):
            return self._floors_on(micro_batch, mesh)
        counted = next((n for n in range(len(mesh), 0, -1) if self._knows(Pricer._exchange_s, mesh, n)), 0)
        return ((self._exchange_floor(micro_batch, mesh, counted), (mesh, counted)),) if counted else ((floor, key),)

    def _knows(self, method: Callable[..., object], *arguments: object) -> bool:
        """True if a method whose results are kept (`_kept`) was called with these arguments within the same limits."""
        return (method.__name__, *self.limits, *arguments) in self.known

    @staticmethod
    def _dealt_ways(mesh: MeshAxes) -> int:
        """Ranks along the expert axes of a mesh, to which the samples of a micro-batch are dealt."""
        return math.prod(axis.size for axis in mesh if axis.role is AxisRole.EXPERT)

    @property
    def fewest_samples(self) -> int:
        """Samples that a micro-batch needs to be dealt to the ranks of any mesh."""
        return max(map(self._dealt_ways, self.meshes), default=1)

    def shardings_of(self, micro_batch: int, ranks: int, context: int = 1, expert: int = 1) -> list[BlockCosts]:
        """Every sharding worth trying with TP, CP and EP of so many ranks; the unsharded chain if all are 1."""
        mesh = mesh_axes((ranks,), context, expert)
        if not mesh:
            return [self.costs(micro_batch)]
        keys = () if micro_batch % self._dealt_ways(mesh) else [key for _, key in self._floors_on(micro_batch, mesh)]
        return [costs for key in keys for costs in self._shardings_on(micro_batch, *key)]

    def even_split(self, micro_batch: int) -> list[BlockCosts]:
        """Shardings on the two largest meshes inside a node, each with its fastest layout of boundaries."""
        node, shardings = self.cluster.node_size or self.cluster.device_count, list[BlockCosts]()
        usable = [mesh for mesh in self.meshes if ranks_of(mesh) <= node and micro_batch % self._dealt_ways(mesh) == 0]
        for mesh in ([mesh for mesh in usable if not roles_of(mesh)] or usable)[-MOST_MESHES:]:
            floors = [(float(f.backward_s.sum()), key) for f, key in self._floors_on(micro_batch, mesh)]
            shardings += self._shardings_on(micro_batch, *min(floors)[1]) if floors else ()
        return shardings

    def refine(self, micro_batch: int, key: FloorKey) -> Refinement:
        """Refine a floor by one step: closer floors with their keys, or the shardings worth trying, fastest first.

        A mesh with context or expert axes first gets floors with the exchanges along these, then along each further
        axis. A mesh then gets one floor for each layout of boundaries, and each of these its shardings.
        """
        mesh, known = key[0], key[1] if len(key) > 1 else 0
        if isinstance(known, tuple):
            return (), self._shardings_on(micro_batch, *key)
        roles = roles_of(mesh)
        if known == len(roles):
            return self._floors_on(micro_batch, mesh), ()
        counted = max(known + 1, sum(role.deals for role in roles))
        return ((self._exchange_floor(micro_batch, mesh, counted), (mesh, counted)),), ()

    def finer(self, micro_batch: int, number: int) -> Sequence[BlockCosts]:
        """More shardings on the mesh and boundaries of a given one, picked by finer steps of the price of memory."""
        known, _ = self.entry(micro_batch, number)
        return self._shardings_on(micro_batch, known.inner.mesh.axes, known.costs.boundaries, True)

    @_kept
    def least(self, micro_batch: int, key: FloorKey) -> BlockCosts | None:
        """Lower bounds on time and memory of all shardings on a mesh with one layout of boundaries.

        The number of these costs is negative, since no plan can have them. None where one of the offered shardings is
        both fastest and leanest.

        The least time of a block is exact, and so is what crosses boundaries; the least memory is that of the leanest
        points, which no point that is not far slower goes below by more than rounding.
        """
        floors = [floor for floor, own in self._floors_on(micro_batch, key[0]) if own == key]
        inner, number = self._inner_on(micro_batch, key[0]), next(self._floor_numbers)
        lean = [sharded_block_costs(inner, each, 0.0, number) for each in leanest_costs(inner, key[1])]
        return least_costs(floors[0], lean, self._shardings_on(micro_batch, *key)[0])

    @_kept
    def _floor(self, micro_batch: int, ranks: int) -> BlockCosts:
        """Lower bounds without communication: an even share of everything on each rank."""
        one_rank = self.costs(micro_batch)
        forward_s, backward_s = self.profiles(micro_batch)[0].at(1 / ranks)
        no_bytes = np.zeros(len(self.chain.blocks) + 1)
        return replace(
            one_rank,
            **{name: getattr(one_rank, name) / ranks for name in _SHARED_EVENLY},
            forward_s=np.array([block_seconds(self.chain, forward_s)]),
            backward_s=np.array([[float(backward_s[list(b.nodes)].sum()) for b in self.chain.blocks]]),
            update_s=one_rank.update_s[:1] / ranks,
            boundary_bytes=no_bytes,
            gradient_boundary_bytes=no_bytes,
            weight_grad_s=None,
            ties=tuple(replace(tie, elements=tie.elements / ranks) for tie in one_rank.ties),
            kept_bytes=None if one_rank.kept_bytes is None else one_rank.kept_bytes / ranks,
            ranks=ranks,
            selective=one_rank.selective and even_prices(one_rank.selective, ranks, self._reruns, forward_s),
        )

    @functools.cached_property
    def _largest_micro_batch(self) -> int:
        """The global batch as micro-batch size; the exported size where the model's batch is fixed."""
        try:
            self.graph_at(self._job.global_batch)
        except ModelError:
            return self.graph.batch
        return self._job.global_batch

    def _exchange_floor(self, micro_batch: int, mesh: MeshAxes, counted: int) -> BlockCosts:
        """The floor of a mesh with the communication along outermost axes, scaled down from the largest micro-batch.

        A sample takes no longer in a larger micro-batch, since neither operators nor exchanges grow by more than in
        proportion, and a larger micro-batch can be split in all ways in which a smaller one can.
        """
        floor = self._floor(micro_batch, ranks_of(mesh))
        least_s = self._exchange_s(mesh, counted) * micro_batch / self._largest_micro_batch
        return replace(floor, backward_s=np.maximum(floor.backward_s, least_s[None, :] - floor.forward_s))

    @_kept
    def _exchange_s(self, mesh: MeshAxes, counted: int) -> np.ndarray:
        """[n] least seconds of each block at the largest micro-batch with exchanges along outermost axes alone.

        Each sharding on a mesh is one on its outermost axes, which the ranks along the others share: they speed up what
        it does by no more than their number. Where none is known, exchanges along one axis less count.
        """
        if counted == 0:
            return np.zeros(len(self.chain.blocks))
        outermost, beneath, largest = mesh[:counted], ranks_of(mesh[counted:]), self._largest_micro_batch
        inner = self._inner_on(largest, mesh) if beneath == 1 else self._outermost_on(largest, outermost, beneath)
        least_s = np.min([inner.least_s(boundary) for boundary in inner.boundaries], axis=0) / beneath
        known = inner.searched & np.isfinite(least_s)
        return least_s if known.all() else np.where(known, least_s, self._exchange_s(mesh, counted - 1))

    @_kept
    def _floors_on(self, micro_batch: int, mesh: MeshAxes) -> list[tuple[BlockCosts, FloorKey]]:
        """Floors with the communication inside blocks, one for each layout of boundaries."""
        floor, inner = self._floor(micro_batch, ranks_of(mesh)), self._inner_on(micro_batch, mesh)
        floors: list[tuple[BlockCosts, FloorKey]] = []
        for boundary in inner.boundaries if inner.usable else ():
            least_s = inner.least_s(boundary)
            if np.isfinite(least_s).all():
                backward_s = np.maximum(floor.backward_s, least_s[None, :] - floor.forward_s)
                floors.append((replace(floor, backward_s=backward_s), (mesh, boundary)))
        return floors

    @_kept
    def _inner_on(self, micro_batch: int, mesh: MeshAxes) -> InnerCosts:
        return self._outermost_on(micro_batch, mesh)

    @_kept
    def _outermost_on(self, micro_batch: int, axes: MeshAxes, beneath: int = 1) -> InnerCosts:
        """The points of blocks on the outermost axes of a mesh, with so many ranks at each place."""
        as_layers, between, _ = self.limits
        allowed = tuple(boundary for boundary in LAYER_BOUNDARIES if not between or boundary.value in between)
        return self._inner_with(micro_batch, axes, allowed if as_layers else BOUNDARIES, as_layers, beneath=beneath)

    def _inner_with(
        self,
        micro_batch: int,
        mesh: MeshAxes,
        boundaries: tuple[BoundaryLayout, ...],
        as_layers: bool = False,
        device_type: int = 0,
        beneath: int = 1,
    ) -> InnerCosts:
        job, number_formats = self._job, self._precision
        state = optimizer_state_bytes(job.optimizer, number_formats)
        setting = Setting(
            self.graph_at(micro_batch),
            self._mesh_of(mesh, beneath),
            item_bytes=number_formats.compute.bits / 8,
            state=StateBytes(number_formats.held_weight_bytes, number_formats.held_gradient_bytes, state),
            micro_batches=max(1, job.global_batch // micro_batch),
            options=Options(roles=roles_of(mesh), as_layers=as_layers),
            forbidden=job.forbid,
        )
        prices = self.profiles(micro_batch)[device_type]
        return inner_costs(self.chain, prices, setting, boundaries=boundaries, cache=self._inner)

    def _make_mesh(self, axes: MeshAxes, beneath: int) -> Mesh:
        """Axes on the first ranks of the cluster, with so many ranks at each place."""
        return mesh_on(self.cluster, {axis.name: axis.size for axis in axes}, experts_of_row(self.graph), beneath)

    @_kept
    def _shardings_on(
        self, micro_batch: int, mesh: MeshAxes, boundary: Boundaries, finer: bool = False
    ) -> tuple[BlockCosts, ...]:
        """The shardings on a mesh worth trying, fastest first; `finer`: for more prices of memory."""
        inner = self._inner_on(micro_batch, mesh)
        known = [each for each in inner.boundaries if each == boundary]
        picks = sharded_costs(inner, boundaries=known, finer=finer)
        return tuple(self._numbered(inner, picked) for picked in picks)

    def _numbered(self, inner: InnerCosts, sharded: ShardedCosts, device_type: int = 0) -> BlockCosts:
        """Costs of a sharding under the next free number of its micro-batch size; the same on all device types."""
        numbered = self._numbered_at.setdefault(inner.micro_batch, [])
        number = len(numbered) + 1
        device, prices = self.cluster.devices[device_type], self.profiles(inner.micro_batch)[device_type]
        element_s = update_s_per_element(device, self._precision, self._job.optimizer, prices.update_byte_per_s)
        costs = sharded_block_costs(inner, sharded, element_s, number)
        of_weights_s = sharded_weight_grad_s(self.costs(inner.micro_batch), sharded, device_type)
        costs = replace(costs, weight_grad_s=of_weights_s)
        types = len(self.cluster.devices)
        repeats = sharded_repeats(inner, sharded, self._reruns, types)
        costs = replace(on_all_types(costs, types), selective=repeats)
        numbered.append((StageSharding(inner, sharded), costs))
        return costs

"""A model's costs for a search: by micro-batch size, and by the mesh on which ranks share every operator.

Everything is worked out when it is asked for, once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.costs import Profile, is_priced, precision, profile
from planner.costs.precision import optimizer_state_bytes
from planner.errors import ModelError, UsageError
from planner.exchange import Step, step_of
from planner.graph import Chain, Graph, build_chain
from planner.hardware.types import Cluster
from planner.operators import Storages, graph_specs, needs_gradient, rebatch, require_trained
from planner.operators.saved import SavedOptions, storages_in_training
from planner.sharding import Boundaries, Boundary, Options, StageSharding, StateBytes
from planner.sharding.inner import InnerCache, InnerCosts, InnerOptions, inner_costs
from planner.sharding.mesh import Axis, AxisRole, axes_text, mesh_on, roles_of
from planner.sharding.problem import Choice
from planner.sharding.sharded import ShardedCosts, decided_costs, leanest_costs, sharded_costs, whole_costs
from planner.space.asked import LIMITS, allows_single_devices, refuse_others
from planner.space.blocks import block_costs, block_seconds, block_storages, wire_bytes
from planner.space.configuration import Configuration
from planner.space.jobs import (
    MeshAxes,
    device_types,
    experts_of_row,
    mesh_axes,
    mesh_names,
    meshes_for,
    ranks_of,
    settled,
)
from planner.space.repeats import EvenRepeats, Held, RepeatedModules, Reruns
from planner.space.sharded import Training, on_all_types, sharded_block_costs, sharded_repeats
from planner.space.types import BlockCosts, Job

Decided = Mapping[str, Choice] | None
"""What is decided about a block; None for nothing."""

Key = tuple[Any, ...]
"""A mesh, or a mesh and how the tensors between blocks lie on it."""

SURE = 0.998
"""Part of the least memory that any point was found to need, below which none of less than thrice the time needs."""

LAYERS = (Boundary.REPLICATED, Boundary.SEQUENCE)
"""How tensors lie between the tensor parallel layers of frameworks."""

MOST_MESHES = 2
"""Meshes on which a first plan is looked for."""


@dataclass(frozen=True)
class Sharded:
    """One way to share the operators of a chain on a mesh.

    Attributes:
        number: among those of the micro-batch size, from 1.
        inner: the points of all blocks on the mesh.
        sharded: the points that the blocks picked.
        costs: what that costs.
    """

    number: int
    inner: InnerCosts
    sharded: ShardedCosts
    costs: BlockCosts


class Pricer:
    """A model's costs on a cluster, by micro-batch size and mesh.

    Args:
        graph: the model, at any batch.
        cluster: device types to price for, and where meshes are laid.
        job: precision, optimizer and memory options.
        strict_ops: refuse operators that no rule describes.
        like: a pricer of the same model, cluster and job but for its limits, whose prices are used again; shardings are
            numbered in common.
    """

    def __init__(
        self, graph: Graph, cluster: Cluster, job: Job, *, strict_ops: bool = False, like: Pricer | None = None
    ) -> None:
        require_trained(graph)
        self.chain: Chain = build_chain(graph) if like is None else like.chain
        job = settled(job, cluster)
        if is_priced(graph):
            engine = "a model that carries measured times of its own"
            refuse_others(job, set(LIMITS) | {"precision", "optimizer", "overlap", "headroom"}, engine, "leave it out")
        self.graph, self.cluster, self._job, self._strict = graph, cluster, job, strict_ops
        self._differentiable = frozenset(needs_gradient(graph))
        self._training = Training(cluster.devices[0], precision(job.precision), job.optimizer)
        self._inner: InnerCache = InnerCache() if like is None else like._inner
        self._below = itertools.count(-1, -1)
        self._worked_on: list[InnerCosts] = []
        self._known: dict[int, list[Sharded]] = {} if like is None else like._known
        self.graph_at: Callable[[int], Graph] = like.graph_at if like else functools.cache(self._graph_at)
        self.profiles: Callable[[int], tuple[Profile, ...]] = like.profiles if like else functools.cache(self._profiles)
        self.costs: Callable[[int], BlockCosts] = like.costs if like else functools.cache(self._costs)
        self._reruns: Callable[[], Reruns] = like._reruns if like else functools.cache(self._told_reruns)
        self._inner_on = functools.cache(self._inner_costs)
        self._shardings_on = functools.cache(self._shardings)
        self._finer_on = functools.cache(self._finer)
        self._floors_on = functools.cache(self._by_boundary)
        self.least = functools.cache(self._least)

    @functools.cached_property
    def meshes(self) -> tuple[MeshAxes, ...]:
        """Meshes that the job allows to share operators on."""
        return meshes_for(self.graph, self.cluster, self._job)

    def entry(self, micro_batch: int, number: int) -> Sharded:
        """A sharding by its number among those of a micro-batch size."""
        return self._known[micro_batch][number - 1]

    def stage_shardings(self, configuration: Configuration) -> dict[int, StageSharding]:
        """How the groups of ranks of a configuration share operators, by the number that its stages give."""
        numbers = sorted({stage.sharding for stage in configuration.stages} - {0})
        entries = [self.entry(configuration.micro_batch, number) for number in numbers]
        return {entry.number: StageSharding(entry.inner, entry.sharded) for entry in entries}

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
        inner = self._inner_with(micro_batch, axes, (Boundary.FREE,), device_type)
        return self._numbered(inner, whole_costs(inner, decision, self._differentiable), device_type)

    def decided(
        self, micro_batch: int, mesh: MeshAxes, boundary: Boundaries, decisions: Sequence[Decided]
    ) -> BlockCosts:
        """Costs of the chain sharded as said block by block, of a plan file say.

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
        free = Boundary.FREE in boundary
        inner = self._inner_with(micro_batch, mesh, (Boundary.FREE,) if free else InnerOptions().boundaries)
        if boundary not in inner.boundaries:
            raise UsageError(f"tensors between blocks cannot lie as {'/'.join(boundary)}", hint="plan again")
        inner = replace(inner, boundaries=(boundary,))
        return self._numbered(inner, decided_costs(inner, decisions, self._differentiable))

    def _graph_at(self, micro_batch: int) -> Graph:
        """The model at a micro-batch size."""
        return self.graph if micro_batch == self.graph.batch else rebatch(self.graph, micro_batch)

    def _profiles(self, micro_batch: int) -> tuple[Profile, ...]:
        """The model's prices on each device type; on types that the job may not use in a precision that they have."""
        job, used = self._job, device_types(self.cluster, self._job)
        return tuple(
            profile(
                self.graph_at(micro_batch),
                device,
                precision=job.precision if t in used else "",
                fused_attention=job.fused_attention,
                dropout=job.dropout,
                assume_dropout=job.assume_dropout,
                strict_ops=self._strict,
            )
            for t, device in enumerate(self.cluster.devices)
        )

    def _costs(self, micro_batch: int) -> BlockCosts:
        """Costs where every replica is one device."""
        graph, own = self.graph_at(micro_batch), self.profiles(micro_batch)
        costs = block_costs(
            self.chain,
            graph,
            own,
            self.cluster.devices,
            precision(self._job.precision),
            self._job.optimizer,
            self._differentiable,
        )
        return replace(
            costs, steps=functools.partial(self._step, micro_batch), selective=self._whole_repeats(micro_batch)
        )

    def _whole_repeats(self, micro_batch: int) -> RepeatedModules:
        """Prices of running modules again where every replica is one device."""
        graph, own, chosen = self.graph_at(micro_batch), self.profiles(micro_batch), precision(self._job.precision)
        blocks = self.chain.blocks

        def forward_s(b: int, places: tuple[int, ...]) -> np.ndarray:
            nodes = [blocks[b].nodes[place] for place in places]
            return np.array([float(each.forward_s[nodes].sum()) for each in own])

        def size_of(b: int, place: int, position: int) -> float:
            return wire_bytes(graph, self._reruns().operand(b, place, position), chosen)

        def saved() -> Held:
            return [tuple(kept.items()) for kept in block_storages(self.chain, own[0])]

        return RepeatedModules(self._reruns, saved, forward_s, size_of)

    def _told_reruns(self) -> Reruns:
        """What blocks run again for lists of modules, whatever the micro-batch size; which lists are worth trying is
        told by a single sample, whatever batch the model was read with, if that can be changed."""
        graph, job, chosen = self.graph, self._job, precision(self._job.precision)
        try:
            batch = self.graph_at(1).batch
        except ModelError:  # a node stops the batch: all plans have the exported one
            batch = graph.batch
        options = SavedOptions(
            fused_attention=job.fused_attention, dropout=job.dropout, assume_dropout=job.assume_dropout
        )
        storages = Storages(graph) if is_priced(graph) else storages_in_training(graph, graph_specs(graph), options)
        own, sized = self.profiles(batch)[device_types(self.cluster, job)[0]], self.graph_at(batch)
        return Reruns(self.chain, own, storages.root, functools.partial(wire_bytes, sized, chosen=chosen))

    def repeated_operators(self, repeats: tuple[str, ...]) -> int:
        """Number of operators that lists of modules run again.

        Raises:
            JobError: the model has no module of a name.
        """
        return sum(len(rerun.places) for rerun in self._reruns().of(repeats))

    def _step(self, micro_batch: int, device_type: int, micro_batches: int, lookups: int) -> Step:
        """What a step of data parallelism exchanges (`BlockCosts.steps`)."""
        own, chosen = self.profiles(micro_batch)[device_type], precision(self._job.precision)
        return step_of(
            self.graph_at(micro_batch),
            own.forward_s,
            own.backward_s,
            gradient_bytes=chosen.gradient_bytes,
            weight_bytes=chosen.weight_bytes,
            micro_batches=micro_batches,
            lookups=lookups,
        )

    def in_words(self) -> str:
        """The meshes, and what is chosen on them."""
        if not self.meshes:
            return "every replica one device"
        shapes = ", ".join(map(axes_text, self.meshes))
        given_up = sorted({words for inner in self._worked_on for words in inner.given_up})
        alone = "every replica one device, or " if allows_single_devices(self._job) else ""
        return (
            f"{alone}operators shared by the ranks of a mesh of {shapes}, alike in all stages; "
            "boundaries replicated, cut by sequence or by batch; all ways to share a block"
            + "".join(f"; without {words}" for words in given_up)
        )

    def floors(self, micro_batch: int) -> list[tuple[BlockCosts, Key]]:
        """By mesh, what no sharding on it is cheaper than: no communication, and everything cut evenly."""
        meshes = [mesh for mesh in self.meshes if self._deals(mesh, micro_batch)]
        by_ranks = {ranks: self._floor(micro_batch, ranks) for ranks in dict.fromkeys(map(ranks_of, meshes))}
        return [(by_ranks[ranks_of(mesh)], (mesh,)) for mesh in meshes]

    @staticmethod
    def _deals(mesh: MeshAxes, micro_batch: int) -> bool:
        """Whether a micro-batch can be dealt evenly to the ranks of a mesh that deal out samples."""
        return micro_batch % math.prod(axis.size for axis in mesh if axis.role is AxisRole.EXPERT) == 0

    def shardings_of(self, micro_batch: int, ranks: int, context: int = 1, expert: int = 1) -> list[BlockCosts]:
        """Every way worth trying to share operators on one tensor axis of so many ranks, beside axes that deal out
        sequences and experts; of one rank the chain as it is."""
        mesh = mesh_axes((ranks,), context, expert)
        if not mesh:
            return [self.costs(micro_batch)]
        keys = (key for _, key in self._floors_on(micro_batch, mesh)) if self._deals(mesh, micro_batch) else ()
        return [costs for key in keys for costs in self._shardings_on(micro_batch, *key)]

    def even_split(self, micro_batch: int) -> list[BlockCosts]:
        """Shardings on the two largest meshes in a node, boundaries lying as is fastest on each."""
        node = self.cluster.node_size or self.cluster.device_count
        found: list[BlockCosts] = []
        usable = [mesh for mesh in self.meshes if ranks_of(mesh) <= node and self._deals(mesh, micro_batch)]
        for mesh in ([mesh for mesh in usable if not roles_of(mesh)] or usable)[-MOST_MESHES:]:
            floors = [(float(f.backward_s.sum()), key) for f, key in self._floors_on(micro_batch, mesh)]
            found += self._shardings_on(micro_batch, *min(floors)[1]) if floors else ()
        return found

    def refine(self, micro_batch: int, key: Key) -> tuple[Sequence[tuple[BlockCosts, Key]], Sequence[BlockCosts]]:
        """Of a mesh that deals something out a floor with its exchanges; of that the floors by how boundaries lie; of
        these the shardings that are worth trying, fastest first."""
        if len(key) == 1 and roles_of(key[0]):
            return ((self._with_exchanges(micro_batch, key[0]), (*key, ())),), ()
        if not any(key[1:]):
            return self._floors_on(micro_batch, key[0]), ()
        return (), self._shardings_on(micro_batch, *key)

    def finer(self, micro_batch: int, number: int) -> Sequence[BlockCosts]:
        """The shardings on the mesh of one, boundaries lying as there, that closer prices of memory prefer."""
        entry = self.entry(micro_batch, number)
        return self._finer_on(micro_batch, entry.inner.mesh.axes, entry.sharded.boundaries)

    def _finer(self, micro_batch: int, mesh: MeshAxes, boundary: Boundaries) -> tuple[BlockCosts, ...]:
        inner = self._inner_on(micro_batch, mesh)
        found = sharded_costs(inner, self._differentiable, boundaries=(boundary,), finer=True)
        return tuple(self._numbered(inner, each) for each in found)

    def _least(self, micro_batch: int, key: Key) -> BlockCosts | None:
        """What no sharding on a mesh, boundaries lying as the key says, takes less time or memory than; its number is
        negative, since no plan can have it. None where one of the offered shardings is both fastest and leanest.

        The least time of a block is exact, and so is what crosses boundaries; the least memory is that of the leanest
        points, which no point that is not far slower goes below by more than rounding.
        """
        floors = [floor for floor, own in self._floors_on(micro_batch, key[0]) if own == key]
        inner, training = self._inner_on(micro_batch, key[0]), self._training
        number = next(self._below)
        lean = [
            sharded_block_costs(inner, each, training, self._differentiable, number)
            for each in leanest_costs(inner, key[1])
        ]
        floor, fastest = floors[0], self._shardings_on(micro_batch, *key)[0]
        if all((fastest.saved_bytes <= c.saved_bytes).all() for c in lean) and all(
            (fastest.parameter_elements <= c.parameter_elements).all() for c in lean
        ):
            return None
        return replace(
            lean[0],
            forward_s=floor.forward_s,
            backward_s=floor.backward_s,
            update_s=floor.update_s,
            parameter_elements=SURE * np.minimum.reduce([each.parameter_elements for each in lean]),
            shard_elements=_least_shards(lean),
            inner_replicas=(),
            saved_bytes=SURE * np.minimum.reduce([each.saved_bytes for each in lean]),
            workspace_bytes=floor.workspace_bytes,
            ties=floor.ties,
            kept_bytes=floor.kept_bytes,
            step_s=None,
            selective=floor.selective,
        )

    def _floor(self, micro_batch: int, ranks: int) -> BlockCosts:
        """No communication, and an even share of everything on each rank, which works on it at its own speed."""
        whole = self.costs(micro_batch)
        forward_s, backward_s = self.profiles(micro_batch)[0].at(1 / ranks)
        blocks = self.chain.blocks
        nothing = np.zeros(len(blocks) + 1)
        return replace(
            whole,
            forward_s=np.array([block_seconds(self.chain, forward_s)]),
            backward_s=np.array([[float(backward_s[list(b.nodes)].sum()) for b in blocks]]),
            update_s=whole.update_s[:1] / ranks,
            parameter_elements=whole.parameter_elements / ranks,
            saved_bytes=whole.saved_bytes / ranks,
            checkpoint_bytes=whole.checkpoint_bytes / ranks,
            boundary_bytes=nothing,
            gradient_boundary_bytes=nothing,
            workspace_bytes=whole.workspace_bytes / ranks,
            ties=tuple(replace(tie, elements=tie.elements / ranks) for tie in whole.ties),
            kept_bytes=None if whole.kept_bytes is None else whole.kept_bytes / ranks,
            ranks=ranks,
            selective=whole.selective and EvenRepeats(whole.selective, ranks, self._reruns, forward_s),
        )

    @functools.cached_property
    def _largest(self) -> int:
        """The global batch as a micro-batch; the exported one where a node stops the batch."""
        try:
            self.graph_at(self._job.global_batch)
        except ModelError:
            return self.graph.batch
        return self._job.global_batch

    def _with_exchanges(self, micro_batch: int, mesh: MeshAxes) -> BlockCosts:
        """The floor of a mesh with what its ranks exchange, from the largest micro-batch, which serves for all sizes: a
        sample takes no longer in a larger one, since neither operators nor exchanges grow by more than in proportion,
        and the larger one can be dealt out in all ways in which the smaller one can.
        """
        floor, largest = self._floor(micro_batch, ranks_of(mesh)), self._largest
        inner = self._inner_on(largest, mesh)
        if inner.whole:
            return floor
        each_s = np.min([inner.least_s(boundary) for boundary in inner.boundaries], axis=0)
        least_s = np.where(np.isfinite(each_s), each_s, 0.0) * micro_batch / largest
        return replace(floor, backward_s=np.maximum(floor.backward_s, least_s[None, :] - floor.forward_s))

    def _by_boundary(self, micro_batch: int, mesh: MeshAxes) -> list[tuple[BlockCosts, Key]]:
        """Floors with the communication inside blocks, for each way in which boundaries may lie."""
        floor, inner = self._floor(micro_batch, ranks_of(mesh)), self._inner_on(micro_batch, mesh)
        found: list[tuple[BlockCosts, Key]] = []
        for boundary in () if inner.whole else inner.boundaries:
            least_s = inner.least_s(boundary)
            if np.isfinite(least_s).all():
                backward_s = np.maximum(floor.backward_s, least_s[None, :] - floor.forward_s)
                found.append((replace(floor, backward_s=backward_s), (mesh, boundary)))
        return found

    def _inner_costs(self, micro_batch: int, mesh: MeshAxes) -> InnerCosts:
        as_layers = bool(self._job.structure.axes)
        between = self._job.structure.between_layers
        layers = tuple(each for each in LAYERS if not between or each.value in between)
        boundaries = layers if as_layers else InnerOptions().boundaries
        found = self._inner_with(micro_batch, mesh, boundaries, as_layers=as_layers)
        self._worked_on.append(found)
        return found

    def _inner_with(
        self,
        micro_batch: int,
        mesh: MeshAxes,
        boundaries: tuple[Boundary, ...],
        device_type: int = 0,
        *,
        as_layers: bool = False,
    ) -> InnerCosts:
        job, chosen = self._job, precision(self._job.precision)
        state = optimizer_state_bytes(job.optimizer, chosen)
        return inner_costs(
            self.chain,
            self.graph_at(micro_batch),
            self.profiles(micro_batch)[device_type],
            mesh_on(self.cluster, {axis.name: axis.size for axis in mesh}, copies=experts_of_row(self.graph)),
            options=InnerOptions(
                boundaries=boundaries,
                item_bytes=chosen.compute.bits / 8,
                state=StateBytes(chosen.held_weight_bytes, chosen.held_gradient_bytes, state),
                micro_batches=max(1, job.global_batch // micro_batch),
                options=Options(roles=roles_of(mesh), as_layers=as_layers),
                forbidden=job.forbid,
            ),
            cache=self._inner,
        )

    def _shardings(self, micro_batch: int, mesh: MeshAxes, boundary: Boundaries) -> tuple[BlockCosts, ...]:
        """The shardings on a mesh that are worth trying, fastest first."""
        inner = self._inner_on(micro_batch, mesh)
        found = sharded_costs(inner, self._differentiable, boundaries=(boundary,))
        return tuple(self._numbered(inner, each) for each in found)

    def _numbered(self, inner: InnerCosts, sharded: ShardedCosts, device_type: int = 0) -> BlockCosts:
        """Costs of a sharding, the same on all device types, which gets the next number of its micro-batch size."""
        known = self._known.setdefault(inner.micro_batch, [])
        number = len(known) + 1
        training = replace(self._training, device=self.cluster.devices[device_type])
        costs = sharded_block_costs(inner, sharded, training, self._differentiable, number)
        types = len(self.cluster.devices)
        repeats = sharded_repeats(inner, sharded, self._reruns, types)
        costs = replace(on_all_types(costs, types), selective=repeats)
        known.append(Sharded(number, inner, sharded, costs))
        return costs


def _least_shards(lean: Sequence[BlockCosts]) -> np.ndarray | None:
    """[n] `BlockCosts.shard_elements` that no point goes below, None where ranks of a group hold nothing alike."""
    shards = [costs.shard_elements for costs in lean if costs.shard_elements is not None]
    return SURE * np.minimum.reduce(shards) if shards else None

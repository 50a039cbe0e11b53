"""Prices of a model whose replicas are single devices: operators, blocks, what recomputing modules takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.costs import Profile, is_priced, precision, profile
from planner.errors import ModelError
from planner.exchange import Step, step_of
from planner.graph import Graph, build_chain
from planner.hardware.types import Cluster
from planner.operators import Storages, graph_specs, rebatch
from planner.operators.saved import SavedOptions, storages_in_training
from planner.space.blocks import block_costs, block_storages, wire_bytes
from planner.space.jobs import device_types
from planner.space.repeats import KeptStorages, Reruns, module_prices
from planner.space.types import BlockCosts, Job, Selective


class DevicePrices:
    """A model's costs on one device of each type; everything is computed on first use, and kept.

    Args:
        graph: the model, at any batch.
        cluster: device types to price for.
        job: precision, optimizer and memory options, settled.
        strict_ops: refuse operators that no rule describes.

    Attributes:
        chain: the model's blocks.
        precision: number formats.
        graph_at: the model at a micro-batch size.
        profiles: its prices on each device type at a micro-batch size.
        costs: costs of its blocks at a micro-batch size.
        reruns: what blocks recompute for lists of modules.
    """

    def __init__(self, graph: Graph, cluster: Cluster, job: Job, *, strict_ops: bool = False) -> None:
        self.chain = build_chain(graph)
        self.precision = precision(job.precision)
        self._graph, self._cluster, self._job, self._strict = graph, cluster, job, strict_ops
        self.graph_at: Callable[[int], Graph] = functools.cache(self._graph_at)
        self.profiles: Callable[[int], tuple[Profile, ...]] = functools.cache(self._profiles)
        self.costs: Callable[[int], BlockCosts] = functools.cache(self._costs)
        self.reruns: Callable[[], Reruns] = functools.cache(self._reruns)

    def _graph_at(self, micro_batch: int) -> Graph:
        """The model at a micro-batch size."""
        return self._graph if micro_batch == self._graph.batch else rebatch(self._graph, micro_batch)

    def _profiles(self, micro_batch: int) -> tuple[Profile, ...]:
        """The model's prices on each device type; types that the job may not use are priced in their best precision."""
        job, used = self._job, device_types(self._cluster, self._job)
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
            for t, device in enumerate(self._cluster.devices)
        )

    def _costs(self, micro_batch: int) -> BlockCosts:
        """Costs of replicas of one device."""
        graph, profiles = self.graph_at(micro_batch), self.profiles(micro_batch)
        formats, optimizer = self.precision, self._job.optimizer
        costs = block_costs(self.chain, graph, profiles, self._cluster.devices, formats, optimizer)
        selective = self._repeats(micro_batch)
        return replace(costs, steps=functools.partial(self._step, micro_batch), selective=selective)

    def _repeats(self, micro_batch: int) -> Selective:
        """Prices of recomputing modules where every replica is one device."""
        graph, profiles = self.graph_at(micro_batch), self.profiles(micro_batch)
        blocks, number_formats = self.chain.blocks, self.precision

        def forward_s(b: int, places: tuple[int, ...]) -> np.ndarray:
            nodes = [blocks[b].nodes[place] for place in places]
            return np.array([float(prices.forward_s[nodes].sum()) for prices in profiles])

        def size_of(b: int, place: int, position: int) -> float:
            return wire_bytes(graph, self.reruns().operand(b, place, position), number_formats)

        def saved() -> KeptStorages:
            return [tuple(kept.items()) for kept in block_storages(self.chain, profiles[0])]

        return module_prices(self.reruns, saved, forward_s, size_of)

    def _reruns(self) -> Reruns:
        """What blocks recompute for lists of modules; the same for all micro-batch sizes.

        Which lists are worth trying is decided at one sample, or at the exported batch where that is fixed.
        """
        graph, job, number_formats = self._graph, self._job, self.precision
        try:
            batch = self.graph_at(1).batch
        except ModelError:  # a node stops the batch: all plans have the exported one
            batch = graph.batch
        options = SavedOptions(
            fused_attention=job.fused_attention, dropout=job.dropout, assume_dropout=job.assume_dropout
        )
        storages = Storages(graph) if is_priced(graph) else storages_in_training(graph, graph_specs(graph), options)
        prices, graph_at_batch = self.profiles(batch)[device_types(self._cluster, job)[0]], self.graph_at(batch)
        return Reruns(
            self.chain, prices, storages.root, functools.partial(wire_bytes, graph_at_batch, chosen=number_formats)
        )

    def _step(self, micro_batch: int, device_type: int, micro_batches: int, lookups: int) -> Step:
        """Variables that a data-parallel step exchanges (`BlockCosts.steps`)."""
        prices, number_formats = self.profiles(micro_batch)[device_type], self.precision
        return step_of(
            self.graph_at(micro_batch),
            prices.forward_s,
            prices.backward_s,
            gradient_bytes=number_formats.gradient_bytes,
            weight_bytes=number_formats.weight_bytes,
            micro_batches=micro_batches,
            lookups=lookups,
        )

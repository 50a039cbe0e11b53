"""The shardings of every block of a chain that a search over stages should consider.

The ranks of a mesh act as one fat device. A block is sharded by itself, with its boundary tensors in a canonical layout
(`planner.sharding.resting`), so that any two blocks with the same boundary layout fit together. For each block and
boundary layout there is a small set of points, none of them better than another in time, weights and kept activations
at once. Equal blocks (by structure, shapes, prices) are solved once.

Work is priced by share (`NodePrices.at`): a rank that does 1/8 of an operator takes the time of an operator with an
eighth of the work, launches included. Two effects are left out: a rank that cuts a product reads more than its share of
replicated operands, and an operator that is not cut keeps the device busy while others of its layer are launched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from planner.graph import Chain, Graph, per_model
from planner.operators.types import SavedBytes
from planner.sharding.block_search import BlockPoints
from planner.sharding.inner_points import BlockProblem, BlockView, InnerPoint, Sizes
from planner.sharding.mesh import Mesh
from planner.sharding.problem import GraphFacts, Setting, WorkSeconds
from planner.sharding.resting import Boundaries, BoundaryLayout, variants


def seconds_key(setting: Setting, members: Sequence[int], shares: Iterable[tuple[float, int]]) -> bytes:
    """A key, equal for nodes with equal forward and backward seconds, one by one, at each of the shares and pieces."""
    nodes = list(members)
    return b"".join(seconds[nodes].tobytes() for share in shares for seconds in setting.nodes_s(*share))


class NodePrices(Protocol):
    """The cost of each node of a graph on one device for one micro-batch (`planner.costs.Profile` is one)."""

    @property
    def micro_batch(self) -> int:
        """Samples of the micro-batch."""

    @property
    def forward_s(self) -> np.ndarray:
        """[nodes] seconds of forward."""

    @property
    def backward_s(self) -> np.ndarray:
        """[nodes] seconds of backward, without recomputation."""

    def at(self, share: float, pieces: int = 1, /) -> tuple[np.ndarray, np.ndarray]:
        """[nodes] seconds, forward and backward, when each node does a share of its work in pieces."""

    @property
    def workspace_bytes(self) -> np.ndarray:
        """[nodes] transient bytes."""

    @property
    def saved(self) -> Sequence[tuple[SavedBytes, ...]]:
        """By node, the storages that it keeps for backward."""


BOUNDARIES = (BoundaryLayout.REPLICATED, BoundaryLayout.SEQUENCE, BoundaryLayout.BATCH)
"""Layouts of the tensors between blocks that may be tried."""


@dataclass(frozen=True)
class BlockSharding:
    """The points of one block.

    Attributes:
        block: index in the chain.
        points: by boundary layout, in the names of the equal block that was solved.
        names: from names of the solved block to names of this block; empty where this block was solved.
    """

    block: int
    points: BlockPoints
    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, point: InnerPoint) -> InnerPoint:
        """A point of this block with tensors, operators and storages in the names of this block."""
        if not self.names:
            return point
        renamed = self.named_as
        return replace(
            point,
            decision={renamed(name): choice for name, choice in point.decision.items()},
            communication=tuple(replace(c, tensor=renamed(c.tensor)) for c in point.communication),
            saved=self.named_sizes(point.saved),
            checkpoints=self.named_sizes(point.checkpoints),
            weights=self.named_sizes(point.weights),
        )

    def named_sizes(self, sizes: Sizes) -> Sizes:
        """Sizes of tensors or storages under their names here."""
        names = self.names
        return tuple([(names.get(name, name), size) for name, size in sizes])

    def named_as(self, name: str) -> str:
        """The name here of a variable of the solved block (`op:` and an operator's key, or a tensor's name)."""
        if name.startswith("op:"):
            return f"op:{self.names.get(name[3:], name[3:])}"
        return self.names.get(name, name)


@dataclass(frozen=True)
class ChainView:
    """The blocks of a chain for the inner search on any mesh.

    Attributes:
        facts: facts of the graph.
        blocks: the blocks in the order of the chain.
        kinds: by block, a number that is the same for blocks with equal keys.
        work_s: seconds of the nodes when each does a share of its work (`Setting.work_s`).
    """

    facts: GraphFacts
    blocks: tuple[BlockView, ...]
    kinds: tuple[int, ...]
    work_s: WorkSeconds | None


@dataclass
class InnerCache:
    """A cache of solved blocks, passed from call to call; meshes count as equal where they are one object.

    Attributes:
        entries: by block and the seconds of its operators, the names of the solved block, and its points.
        shares: by block, the shares at which the seconds of its operators matter.
        kinds: by key, the number of a distinct block.
    """

    entries: dict[object, tuple[tuple[str, ...], BlockPoints]] = field(default_factory=dict)
    shares: dict[object, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    kinds: dict[object, int] = field(default_factory=dict)
    _views: dict[tuple[object, ...], ChainView] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)
    _renamed: dict[tuple[tuple[str, ...], tuple[str, ...]], Mapping[str, str]] = field(default_factory=dict)

    def renamed(self, solved: tuple[str, ...], own: tuple[str, ...]) -> Mapping[str, str]:
        """Mapping from the names of a solved block to those of an equal block; empty where they are the same."""
        if (solved, own) not in self._renamed:
            self._renamed[solved, own] = {} if solved == own else dict(zip(solved, own, strict=True))
        return self._renamed[solved, own]

    def view(self, chain: Chain, prices: NodePrices, setting: Setting) -> ChainView:
        """The blocks of a chain at the prices of a setting of its graph, for any mesh; O(nodes) once."""
        graph = setting.graph
        key = id(chain), id(graph), id(prices), setting.forbidden
        if key not in self._views:
            self._alive += (chain, graph, prices)
            facts, trained = GraphFacts.of(setting), trained_parameters(graph)
            blocks = tuple(BlockView.of(chain, graph, b, facts) for b in range(len(chain.blocks)))
            keys = (block.key(chain.blocks[b], graph, facts, trained) for b, block in enumerate(blocks))
            kinds = tuple([self.kinds.setdefault(each, len(self.kinds)) for each in keys])
            self._views[key] = ChainView(facts, blocks, kinds, setting.work_s)
        return self._views[key]


@dataclass(frozen=True)
class InnerCosts:
    """The points of all blocks of a chain on one mesh at one micro-batch size.

    Attributes:
        chain: the chain.
        setting: the graph at the micro-batch size, the mesh, number formats, and which splits count.
        micro_batch: samples of a micro-batch.
        boundaries: the distinct boundary layouts.
        blocks: the blocks in the order of the chain.
        solved: number of blocks that were solved; the others are equal to one of them.
    """

    chain: Chain
    setting: Setting
    micro_batch: int
    boundaries: tuple[Boundaries, ...]
    blocks: tuple[BlockSharding, ...]
    solved: int

    @property
    def graph(self) -> Graph:
        """The graph at the micro-batch size."""
        return self.setting.graph

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.setting.mesh

    @property
    def searched(self) -> np.ndarray:
        """[n] whether ways to share each block were searched; not where tables would be too large."""
        return np.array([not (block.points.unsolved or block.points.uncut) for block in self.blocks])

    @property
    def usable(self) -> bool:
        """Whether every block can run, and some of them shared."""
        return bool(self.searched.any()) and not any(block.points.unsolved for block in self.blocks)

    @property
    def given_up(self) -> tuple[str, ...]:
        """Messages on what the search leaves out; empty where it is exact for every block."""
        tied: dict[tuple[int, ...], list[int]] = {}
        for block in self.blocks:
            if block.points.tied:
                tied.setdefault(block.points.tied, []).append(block.block)
        uncut = [block.block for block in self.blocks if block.points.uncut]
        parts: tuple[str, ...] = ()
        if uncut:
            parts += (f"every way to cut {len(uncut)} blocks ({self.chain.blocks[uncut[0]].name}, ...)",)
        if unsolved := [block.block for block in self.blocks if block.points.unsolved]:
            first = self.chain.blocks[unsolved[0]].name
            parts += (f"{'x'.join(map(str, self.mesh.sizes))} ranks ({first} needs too large tables there)",)
        return parts + tuple(
            f"layouts of {len(blocks)} blocks ({self.chain.blocks[blocks[0]].name}, ...) that treat the mesh axes "
            f"{' and '.join(self.mesh.names[a] for a in axes)} differently"
            for axes, blocks in tied.items()
        )

    def least_s(self, boundary: Boundaries) -> np.ndarray:
        """[n] least seconds of each block: forward, backward and its part of the update; much faster than all points.

        Infinite where a block has no legal sharding under the boundary layout, or too large tables.
        """
        return np.array([block.points.least_s(boundary) for block in self.blocks])


def inner_costs(
    chain: Chain,
    prices: NodePrices,
    setting: Setting,
    *,
    boundaries: Sequence[BoundaryLayout] = BOUNDARIES,
    cache: InnerCache | None = None,
) -> InnerCosts:
    """Shard every block of a chain on a mesh.

    Args:
        chain: the blocks.
        prices: cost of the nodes on one device.
        setting: the graph of the chain at the micro-batch size of the prices (same node order and tensor names), the
            ranks of the fat device, number formats, and which splits count; without prices.
        boundaries: layouts of the tensors between blocks that may be tried.
        cache: blocks that were solved before.

    A block whose tables would be too large even with all mesh axes tied has no points.

    Complexity: the formulation of each distinct block; reading its points takes one or two eliminations for all
    boundary layouts and prices of memory.
    """
    cache = cache if cache is not None else InnerCache()
    setting, mesh, splits = inner_setting(chain, prices, setting), setting.mesh, setting.options
    view = cache.view(chain, prices, setting)
    setting = replace(setting, work_s=view.work_s)
    crossing = [setting.graph.tensors[name] for name in chain.crossing_tensors]
    distinct = variants(crossing, boundaries, mesh.sizes, padded=splits.padded, roles=splits.roles)
    formats = setting.item_bytes, setting.state, setting.micro_batches, setting.forbidden
    blocks, solved = [], 0
    settings = {repeated: priced_once(setting, repeated) for repeated in chain.repeats}
    for b, (repeated, block) in enumerate(zip(chain.repeats, view.blocks, strict=True)):
        like = (view.kinds[b], distinct, mesh, formats, splits, prices.micro_batch)
        block_setting = replace(settings[repeated], nodes=block.members)
        problem = BlockProblem(block_setting, view.facts, block, prices.workspace_bytes)
        if like not in cache.shares:
            cache.shares[like] = problem.shares
        key = (like, seconds_key(block_setting, block.members, cache.shares[like]))
        if key not in cache.entries:
            solved += 1
            cache.entries[key] = block.names, BlockPoints(problem, distinct)
        names, sets = cache.entries[key]
        blocks.append(BlockSharding(b, sets, cache.renamed(names, block.names)))
    return InnerCosts(chain, setting, prices.micro_batch, distinct, tuple(blocks), solved)


@per_model
def trained_parameters(graph: Graph) -> dict[str, tuple[tuple[str, int], ...]]:
    """By weight tensor, names and elements of the trainable parameters it comes from, ties resolved."""
    index, parameters_of = graph.parameter_index, dict[str, tuple[tuple[str, int], ...]]()
    for tensor, sources in graph.sources.items():
        parameters = (graph.parameters[index[source]] for source in sources)
        resolved = (graph.parameters[index[p.tied_to]] if p.tied_to else p for p in parameters)
        parameters_of[tensor] = tuple((p.name, p.elements) for p in resolved if p.trainable)
    return parameters_of


def inner_setting(chain: Chain, prices: NodePrices, setting: Setting) -> Setting:
    """The setting of the full graph with its prices; that of a block has a part of its nodes.

    Side nodes have no backward and keep nothing of their own.
    """
    side = {i for block in chain.blocks for i in block.side}

    @functools.cache
    def work_s(share: float, pieces: int) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = prices.at(share, pieces)
        backward = np.array(backward, dtype=float)
        backward[list(side)] = 0.0
        return forward, backward

    forward, backward = work_s(1.0, 1)
    saved = [() if i in side else kept for i, kept in enumerate(prices.saved)]
    return replace(setting, forward_s=forward, backward_s=backward, saved=saved, sharded_states=False, work_s=work_s)


def priced_once(setting: Setting, repeated: frozenset[int]) -> Setting:
    """A setting in which side nodes that an earlier block has already run take no time (`Chain.repeats`)."""
    if not repeated or setting.forward_s is None:
        return setting
    free = sorted(repeated)

    def without(seconds: np.ndarray) -> np.ndarray:
        left = np.array(seconds, dtype=float)
        left[free] = 0.0
        return left

    @functools.cache
    def work_s(share: float, pieces: int) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = setting.nodes_s(share, pieces)
        return without(forward), backward

    return replace(setting, forward_s=without(setting.forward_s), work_s=work_s)

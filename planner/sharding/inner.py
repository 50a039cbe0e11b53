"""The shardings of every block of a chain that are worth considering by a search over stages.

The ranks of a mesh act as one fat device. A block is sharded by itself, with the tensors at its boundaries in a
canonical layout (`planner.sharding.resting`), so that any two blocks under the same boundaries fit together. For each
block and boundary there is a small set of points, none of them better than another in time, weights and kept
activations at once. Equal blocks (by structure, shapes, prices) are solved once.

Work is priced by share (`NodePrices.at`): a rank that does 1/8 of an operator takes what an operator of an eighth of
the work takes, launches included. What is left out: a rank that cuts a product reads more than its share of the
operands that it holds whole, and an operator that some ranks leave whole keeps the device busy while the others of its
layer are launched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from planner.graph import Chain, Graph, per_model
from planner.operators.types import SavedBytes
from planner.sharding.block_search import BlockPoints
from planner.sharding.choices import Options
from planner.sharding.inner_points import BlockProblem, BlockView, InnerPoint
from planner.sharding.mesh import Mesh
from planner.sharding.problem import Facts, Setting
from planner.sharding.resting import Boundaries, Boundary, StateBytes, variants

_BITS = 20
"""Leading bits to which the prices of equal blocks agree: six decimal digits."""


class PriceMarks:
    """Seconds of a setting's nodes at some shares, rounded so that equal ones compare equal."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rounded: dict[float, np.ndarray] = {}

    def of(self, members: Sequence[int], shares: Iterable[float]) -> bytes:
        """Equal for nodes that take equally long, one by one and forward and backward, at each of the shares."""
        nodes = list(members)
        return b"".join(self._at(share)[nodes].tobytes() for share in shares)

    def _at(self, share: float) -> np.ndarray:
        """[nodes, 2, 2] mantissa and exponent, forward and backward."""
        if share not in self._rounded:
            mantissa, exponent = np.frexp(np.stack(self._setting.nodes_s(share), axis=1))
            rounded = np.round(mantissa * 2**_BITS).astype(np.int32)
            self._rounded[share] = np.stack([rounded, exponent.astype(np.int32)], axis=2)
        return self._rounded[share]


class NodePrices(Protocol):
    """What each node of a graph costs on one device for one micro-batch (`planner.costs.Profile` is one)."""

    @property
    def micro_batch(self) -> int:
        """Samples per execution."""

    @property
    def forward_s(self) -> np.ndarray:
        """[nodes] seconds."""

    @property
    def backward_s(self) -> np.ndarray:
        """[nodes] seconds, without recomputation."""

    def at(self, share: float, /) -> tuple[np.ndarray, np.ndarray]:
        """[nodes] seconds, forward and backward, when each node does that part of its work."""

    @property
    def workspace_bytes(self) -> np.ndarray:
        """[nodes] transient bytes."""

    @property
    def saved(self) -> tuple[tuple[SavedBytes, ...], ...]:
        """By node, the storages kept for backward."""


@dataclass(frozen=True, slots=True)
class InnerOptions:
    """What the inner search may do.

    Attributes:
        boundaries: ways to treat the tensors between blocks.
        item_bytes: bytes a floating-point element of an activation or weight takes.
        state: bytes a parameter takes; they say what memory is worth against time, no more.
        micro_batches: forward and backward passes a step, over which the weights' update is spread.
        options: which splits count.
        forbidden: splits that are ruled out, as `operator:dimension` (`planner.sharding.limits`); `unmatched` says
            which of them rule nothing out.
    """

    boundaries: tuple[Boundary, ...] = (Boundary.REPLICATED, Boundary.SEQUENCE, Boundary.BATCH)
    item_bytes: float = 2.0
    state: StateBytes = field(default_factory=StateBytes)
    micro_batches: int = 1
    options: Options = field(default_factory=Options)
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockSharding:
    """The points of one block.

    Attributes:
        block: index in the chain.
        points: by boundaries, in the names of the block of this structure that was solved.
        names: from those names to this block's own; empty where it was solved itself.
        shared: the same of names that other blocks have, too, whether it was solved itself or not.
    """

    block: int
    points: BlockPoints
    names: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def named(self, point: InnerPoint) -> InnerPoint:
        """A point of this block, its tensors, operators and storages under the block's own names."""
        if not self.names:
            return point
        new = self.named_as
        return replace(
            point,
            decision={new(name): choice for name, choice in point.decision.items()},
            communication=tuple(replace(c, tensor=new(c.tensor)) for c in point.communication),
            saved=tuple((new(storage), size) for storage, size in point.saved),
            checkpoints=tuple((new(name), size) for name, size in point.checkpoints),
            weights=tuple((new(name), fraction) for name, fraction in point.weights),
        )

    def named_as(self, name: str) -> str:
        """What a variable (`op:` and an operator's key, or a tensor's name) of the solved block is called here."""
        if name.startswith("op:"):
            return f"op:{self.names.get(name[3:], name[3:])}"
        return self.names.get(name, name)


@dataclass(frozen=True)
class ChainView:
    """The blocks of a chain as the inner search sees them on any mesh.

    Attributes:
        facts: of the graph.
        blocks: in the chain's order.
        kinds: by block, a number that blocks with equal keys have in common.
        shared: by block, places in its names of those that other blocks have, too: tensors, storages, and weights of
            parameters that are read elsewhere.
        work_s: seconds of the nodes when each does a share of its work (`Setting.work_s`).
    """

    facts: Facts
    blocks: tuple[BlockView, ...]
    kinds: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    work_s: Callable[[float], tuple[np.ndarray, np.ndarray]] | None


@dataclass
class InnerCache:
    """Solved blocks, to be handed from call to call; of use while graph sizes and hardware repeat.

    Attributes:
        entries: by block and its operators' seconds, the names in the block that was solved, and its points.
        shares: by block, the shares at which the seconds of its operators count.
        kinds: numbers of distinct blocks by their keys.
    """

    entries: dict[object, tuple[tuple[str, ...], BlockPoints]] = field(default_factory=dict)
    shares: dict[object, tuple[float, ...]] = field(default_factory=dict)
    kinds: dict[object, int] = field(default_factory=dict)
    _views: dict[tuple[object, ...], ChainView] = field(default_factory=dict)
    _shared: dict[object, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)
    _renamed: dict[tuple[tuple[str, ...], tuple[str, ...]], Mapping[str, str]] = field(default_factory=dict)

    def renamed(self, solved: tuple[str, ...], own: tuple[str, ...]) -> Mapping[str, str]:
        """From a solved block's names to those of one like it, empty where they are the same; whatever the batch."""
        if (solved, own) not in self._renamed:
            self._renamed[solved, own] = {} if solved == own else dict(zip(solved, own, strict=True))
        return self._renamed[solved, own]

    def view(self, chain: Chain, prices: NodePrices, setting: Setting) -> ChainView:
        """The blocks of a chain at the prices of a setting of its graph, whatever the mesh; O(nodes) once."""
        graph = setting.graph
        key = id(chain), id(graph), id(prices), setting.forbidden
        if key not in self._views:
            self._alive += (chain, graph, prices)
            facts, trained = Facts.of(setting), trained_parameters(graph)
            blocks = tuple(BlockView.of(chain, graph, b, facts) for b in range(len(chain.blocks)))
            keys = (block.key(chain.blocks[b], graph, facts, trained) for b, block in enumerate(blocks))
            kinds = tuple([self.kinds.setdefault(each, len(self.kinds)) for each in keys])
            names = id(chain), tuple([block.names for block in blocks])
            if names not in self._shared:
                self._shared[names] = _shared_places(graph, blocks)
            self._views[key] = ChainView(facts, blocks, kinds, self._shared[names], setting.work_s)
        return self._views[key]

    def place(self, mesh: Mesh) -> tuple[object, ...]:
        """What identifies a mesh; clusters count as one by identity and are kept alive."""
        if mesh.cluster is not None and not any(c is mesh.cluster for c in self._alive):
            self._alive.append(mesh.cluster)
        return mesh.sizes, mesh.start, id(mesh.cluster)


@dataclass(frozen=True)
class InnerCosts:
    """The points of all blocks of a chain on one mesh at one micro-batch.

    Attributes:
        chain: the blocks.
        graph: the graph at the micro-batch's size.
        mesh: the mesh.
        micro_batch: samples.
        options: what was allowed.
        boundaries: the treatments of boundaries that differ.
        blocks: in the chain's order.
        solved: how many blocks were solved, the others being equal to one of those.
    """

    chain: Chain
    graph: Graph
    mesh: Mesh
    micro_batch: int
    options: InnerOptions
    boundaries: tuple[Boundaries, ...]
    blocks: tuple[BlockSharding, ...]
    solved: int

    @property
    def whole(self) -> bool:
        """Whether every rank runs the whole chain, since nothing else could be searched."""
        return all(block.points.whole for block in self.blocks)

    @property
    def given_up(self) -> tuple[str, ...]:
        """What the search leaves out, in words; empty where it is exact for every block."""
        tied: dict[tuple[int, ...], list[int]] = {}
        for block in self.blocks:
            if block.points.tied:
                tied.setdefault(block.points.tied, []).append(block.block)
        whole = [block.block for block in self.blocks if block.points.whole]
        parts = (f"every way to cut {len(whole)} blocks ({self.chain.blocks[whole[0]].name}, ...)",) if whole else ()
        return parts + tuple(
            f"layouts of {len(blocks)} blocks ({self.chain.blocks[blocks[0]].name}, ...) that treat the mesh axes "
            f"{' and '.join(self.mesh.names[a] for a in axes)} differently"
            for axes, blocks in tied.items()
        )

    def least_s(self, boundary: Boundaries) -> np.ndarray:
        """[n] least seconds of each block, forward and backward and its share of the step; far quicker than points.

        Infinite where a block has no legal sharding under these boundaries.
        """
        return np.array([block.points.least_s(boundary) for block in self.blocks])


def inner_costs(
    chain: Chain,
    graph: Graph,
    prices: NodePrices,
    mesh: Mesh,
    *,
    options: InnerOptions | None = None,
    cache: InnerCache | None = None,
) -> InnerCosts:
    """Shard every block of a chain on a mesh.

    Args:
        chain: the blocks.
        graph: the chain's graph at the micro-batch size of the prices (same node order and tensor names).
        prices: what its nodes cost on one device.
        mesh: where the ranks of the fat device lie.
        options: what is allowed.
        cache: blocks solved before.

    Raises:
        InfeasibleError: a block's operators hang together too closely even with all mesh axes treated alike; raised
            when points are asked for.

    Complexity: to formulate each distinct block; what is asked for of its points then takes one or two eliminations,
    with all boundaries and prices of memory at once.
    """
    chosen, cache = options or InnerOptions(), cache if cache is not None else InnerCache()
    setting = inner_setting(chain, graph, prices, mesh, chosen)
    view = cache.view(chain, prices, setting)
    setting = replace(setting, work_s=view.work_s)
    crossing = {name: graph.tensors[name] for name in chain.handed_on}
    treatment = chosen.options
    boundaries = variants(
        crossing.values(), chosen.boundaries, mesh.sizes, padded=treatment.padded, roles=treatment.roles
    )
    found, solved = [], 0
    settings = {again: priced_once(setting, again) for again in chain.repeats}
    all_marks = {again: PriceMarks(each) for again, each in settings.items()}
    for b, (again, block) in enumerate(zip(chain.repeats, view.blocks, strict=True)):
        like = (view.kinds[b], boundaries, cache.place(mesh), chosen, prices.micro_batch)
        own = replace(settings[again], nodes=block.members)
        problem = BlockProblem(own, view.facts, block, prices.workspace_bytes)
        if like not in cache.shares:
            cache.shares[like] = problem.shares
        key = (like, all_marks[again].of(block.members, cache.shares[like]))
        if key not in cache.entries:
            solved += 1
            cache.entries[key] = block.names, BlockPoints(problem, boundaries)
        names, sets = cache.entries[key]
        shared = {names[place]: block.names[place] for place in view.shared[b]}
        found.append(BlockSharding(b, sets, cache.renamed(names, block.names), shared))
    return InnerCosts(chain, graph, mesh, prices.micro_batch, chosen, boundaries, tuple(found), solved)


@per_model
def trained_parameters(graph: Graph) -> dict[str, tuple[tuple[str, int], ...]]:
    """For each weight tensor, names and elements of the trainable parameters it comes from, ties resolved."""
    index, found = graph.parameter_index, dict[str, tuple[tuple[str, int], ...]]()
    for tensor, sources in graph.sources.items():
        own = (graph.parameters[index[source]] for source in sources)
        resolved = (graph.parameters[index[p.tied_to]] if p.tied_to else p for p in own)
        found[tensor] = tuple((p.name, p.elements) for p in resolved if p.trainable)
    return found


@per_model
def _weight_groups(graph: Graph) -> dict[str, int]:
    """For each trained weight tensor a number that those with a parameter in common, also by way of others, share."""
    groups: dict[str, int] = {}
    trained = {tensor: [name for name, _ in own] for tensor, own in trained_parameters(graph).items() if own}
    for parameters in trained.values():
        known = {groups[name] for name in parameters if name in groups}
        number = min(known, default=len(groups))
        if len(known) > 1:
            groups = {name: number if group in known else group for name, group in groups.items()}
        groups.update(dict.fromkeys(parameters, number))
    return {tensor: groups[parameters[0]] for tensor, parameters in trained.items()}


def _shared_places(graph: Graph, blocks: Sequence[BlockView]) -> tuple[tuple[int, ...], ...]:
    """By block, places in its names of those that other blocks have, too (`ChainView.shared`). O(names)."""
    groups = _weight_groups(graph)
    seen: set[str | int] = set()
    twice: set[str | int] = set()
    for block in blocks:
        own: set[str | int] = {*block.names, *(groups[name] for name in block.names if name in groups)}
        twice |= seen & own
        seen |= own
    return tuple(
        tuple(k for k, name in enumerate(block.names) if name in twice or groups.get(name) in twice) for block in blocks
    )


def inner_setting(chain: Chain, graph: Graph, prices: NodePrices, mesh: Mesh, options: InnerOptions) -> Setting:
    """The whole graph's setting, of which each block's is a part (`nodes`); arguments as of `inner_costs`.

    Side nodes have no backward and keep nothing of their own.
    """
    side = sorted({i for block in chain.blocks for i in block.side})
    saved = list(prices.saved)
    for i in side:
        saved[i] = ()

    @functools.cache
    def work_s(share: float) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = prices.at(share)
        backward = np.array(backward, dtype=float)
        backward[side] = 0.0
        return forward, backward

    forward, backward = work_s(1.0)
    return Setting(
        graph,
        mesh,
        forward_s=forward,
        backward_s=backward,
        saved=tuple(saved),
        item_bytes=options.item_bytes,
        state=options.state,
        micro_batches=options.micro_batches,
        options=options.options,
        sharded_states=False,
        work_s=work_s,
        forbidden=options.forbidden,
    )


def priced_once(setting: Setting, again: frozenset[int]) -> Setting:
    """A block's setting in which the side nodes that an earlier block has worked out take no time (`Chain.repeats`)."""
    if not again or setting.forward_s is None:
        return setting
    free = sorted(again)

    def without(seconds: np.ndarray) -> np.ndarray:
        left = np.array(seconds, dtype=float)
        left[free] = 0.0
        return left

    @functools.cache
    def work_s(share: float) -> tuple[np.ndarray, np.ndarray]:
        forward, backward = setting.nodes_s(share)
        return without(forward), backward

    return replace(setting, forward_s=without(setting.forward_s), work_s=work_s)

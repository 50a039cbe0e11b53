"""Contract a graph to a chain of blocks: where it may be cut into stages, and which blocks have equal structure.

Before it, find nodes that no gradient flows through, and a topological order in which few bytes are alive at each
point.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import ModelError
from planner.graph.types import Graph, TensorKind, per_graph

MAX_BLOCKS = 160
"""About the most blocks of a chain."""

_BROADCAST_LAYERS = 3
_LAYER = re.compile(r"^(.*?(?:^|\.)\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """Neighbouring nodes of a chain that always stay together.

    Attributes:
        name: the module it is, `model.layers.7`; `[2/3]` is added where a module is cut in
            several blocks. Unique in a chain.
        nodes: indices into `Graph.nodes`, in the chain's order.
        side: indices of the parameter-free nodes (masks, rotary tables) that this block reads, ancestors included.
        signature: equal for blocks of equal structure, shapes and types.
    """

    name: str
    nodes: tuple[int, ...]
    side: tuple[int, ...]
    signature: str


@dataclass(frozen=True)
class Chain:
    """A graph as a sequence of blocks; tensors flow within a block or to a later one.

    Attributes:
        graph: the graph.
        blocks: in order.
        duplicated: parameter-free nodes that more than one block reads: each stage computes them for itself.
    """

    graph: Graph
    blocks: tuple[ChainBlock, ...]
    duplicated: tuple[int, ...]

    @functools.cached_property
    def crossing_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """By tensor that crosses a boundary between blocks: the block that makes it, then its readers, ascending.

        Graph inputs and results of duplicated nodes are left out.
        """
        graph, crossing = self.graph, dict[str, tuple[int, ...]]()
        block_of = {node: b for b, block in enumerate(self.blocks) for node in block.nodes}
        for node, b in block_of.items():
            for name in graph.nodes[node].outputs:
                readers = {block_of[r] for r in graph.consumers.get(name, ()) if r in block_of} - {b}
                if readers:
                    crossing[name] = (b, *sorted(readers))
        return crossing

    @functools.cached_property
    def layer_heads(self) -> tuple[int, ...]:
        """First block of each numbered layer, in order; the longest run of them where the model has several kinds."""
        first_block: dict[str, int] = {}
        for at, block in enumerate(self.blocks):
            layer = layer_of(self.graph.nodes[block.nodes[0]].module)
            if layer and layer[-1].isdigit():
                first_block.setdefault(layer, at)
        by_kind: dict[str, list[int]] = {}
        for layer, at in first_block.items():
            by_kind.setdefault(layer.rstrip("0123456789"), []).append(at)
        longest: list[int] = max(by_kind.values(), key=len, default=[])
        return tuple(longest)

    @functools.cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """For boundary p = 0..n (before block p): names of the tensors made before it and read after it.

        Empty at both ends.
        """
        names_by_boundary: list[list[str]] = [[] for _ in range(len(self.blocks) + 1)]
        for name, blocks in self.crossing_tensors.items():
            for names in names_by_boundary[blocks[0] + 1 : blocks[-1] + 1]:
                names.append(name)
        return tuple(tuple(names) for names in names_by_boundary)

    def boundary_sums(self, sizes: Mapping[str, float]) -> np.ndarray:
        """[n + 1] sums of sizes over the tensors that cross each boundary; tensors without a size count nothing."""
        change = np.zeros(len(self.blocks) + 2)
        for name in self.crossing_tensors.keys() & sizes.keys():
            blocks = self.crossing_tensors[name]
            change[blocks[0] + 1] += sizes[name]
            change[blocks[-1] + 1] -= sizes[name]
        return np.cumsum(change)[:-1]

    @functools.cached_property
    def repeats(self) -> tuple[frozenset[int], ...]:
        """By block, its side nodes that an earlier block reads, too.

        A stage computes a side node once, however many of its blocks read it; its cost counts in the first such block.
        """
        seen: set[int] = set()
        repeated = []
        for block in self.blocks:
            repeated.append(frozenset(seen.intersection(block.side)))
            seen.update(block.side)
        return tuple(repeated)


@functools.lru_cache(maxsize=1 << 16)
def layer_of(module: str) -> str:
    """The layer a module path belongs to: the path up to its first number, or all of it when it has none."""
    match = _LAYER.match(module)
    return match.group(1) if match else module


@per_graph
def build_chain(graph: Graph) -> Chain:
    """Contract a graph to a chain of at most about `MAX_BLOCKS` blocks.

    A cut may lie where a single tensor crosses (tensors that three or more layers read do not count, their bytes do: an
    encoder's output, a position bias), and, inside long stretches without such a place, between two layers. Of the cuts
    between two weighted nodes the one with the fewest bytes is kept. O(nodes log nodes).

    Raises:
        ModelError: no operator computes anything of the input.
    """
    side = side_nodes(graph)
    order = linear_order(graph, [i for i in range(len(graph.nodes)) if not side[i]])
    if not order:
        raise ModelError("no operator computes anything of the input", where=graph.name, hint="check the export")
    layers = layers_along(graph, order)
    cuts = _choose_cuts(graph, order, layers)
    bounds = [0, *cuts, len(order)]
    members = [tuple(order[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
    sides = [_side_of(graph, nodes, side) for nodes in members]
    uses = np.zeros(len(graph.nodes), dtype=np.int64)
    for nodes in sides:
        uses[list(nodes)] += 1
    names = _names([_block_layer(graph, nodes) for nodes in members])
    blocks = tuple(
        ChainBlock(name, nodes, reads, structural_hash(graph, (*reads, *nodes)))
        for name, nodes, reads in zip(names, members, sides, strict=True)
    )
    return Chain(graph, blocks, tuple(int(i) for i in np.flatnonzero(uses > 1)))


def layers_along(graph: Graph, order: Sequence[int]) -> list[str]:
    """Layer of each node of an order; nodes without a module take their predecessor's, the first ones ""."""
    layers, last = [], ""
    for i in order:
        last = layer_of(graph.nodes[i].module) or last
        layers.append(last)
    return layers


def _choose_cuts(graph: Graph, order: Sequence[int], layers: Sequence[str]) -> list[int]:
    spans = lifetimes(graph, order)
    count = np.zeros(len(order) + 2)
    position = {node: at for at, node in enumerate(order)}
    for name, (start, stop) in spans.items():
        readers = {layers[position[r]] for r in graph.consumers[name] if r in position}
        if len(readers) < _BROADCAST_LAYERS:
            count[start + 1] += 1
            count[stop + 1] -= 1
    count, size = np.cumsum(count)[: len(order)], crossing_bytes(graph, order)[:-1]
    owners = np.array([bool(graph.node_parameters[i]) for i in order])
    weighted = np.array([_holds_matrix(graph, i) for i in order])
    heavy_before = np.concatenate([[0], np.cumsum(weighted if weighted.any() else owners)])
    changes = np.array([p > 0 and layers[p] != layers[p - 1] for p in range(len(order))])
    allowed = count <= 1
    allowed |= _inside_long_stretches(allowed, changes, heavy_before)
    cuts = _lightest_between_weights(np.flatnonzero(allowed), heavy_before, size, changes & owners)
    if len(cuts) + 1 > MAX_BLOCKS:
        between_layers = {int(heavy_before[p]) for p in np.flatnonzero(changes)}
        cuts = [p for p in cuts if int(heavy_before[p]) in between_layers] or cuts
    while len(cuts) + 1 > MAX_BLOCKS:
        cuts = cuts[1::2]
    return cuts


def _holds_matrix(graph: Graph, node: int) -> bool:
    """Whether a node owns a weight of two or more dimensions: a norm's scale alone makes no block."""
    return any(len(graph.parameters[p].shape) > 1 for p in graph.node_parameters[node])


def _inside_long_stretches(allowed: np.ndarray, changes: np.ndarray, heavy_before: np.ndarray) -> np.ndarray:
    """Further cuts in stretches between allowed cuts with over a sixteenth of all weighted nodes, and more than four.

    Cuts lie between two layers, or anywhere if the stretch has no layers.
    """
    further = np.zeros(len(allowed), dtype=bool)
    places = [0, *(int(p) for p in np.flatnonzero(allowed) if p > 0), len(allowed)]
    for start, stop in itertools.pairwise(places):
        weighted_inside = heavy_before[stop] - heavy_before[start]
        if weighted_inside > max(4, heavy_before[-1] / 16):
            inside = slice(start + 1, stop)
            further[inside] = changes[inside] if changes[inside].any() else True
    return further


def _lightest_between_weights(
    places: np.ndarray, heavy_before: np.ndarray, size: np.ndarray, starts: np.ndarray
) -> list[int]:
    """Between each two weighted nodes, the cut that the fewest bytes cross.

    Of equal cuts the first at which a layer with weights starts, else the last.
    """
    best: dict[int, tuple[float, int, int]] = {}
    total = heavy_before[-1]
    for p in (int(p) for p in places):
        group = int(heavy_before[p])
        rank = (float(size[p]), 0 if starts[p] else 1, p if starts[p] else -p)
        if 0 < group < total and (group not in best or rank < best[group]):
            best[group] = rank
    return sorted(abs(rank[2]) for rank in best.values())


def _side_of(graph: Graph, nodes: Sequence[int], side: np.ndarray) -> tuple[int, ...]:
    """Side nodes that some nodes depend on, directly or not, ascending."""
    ancestors: set[int] = set()
    stack = list(nodes)
    while stack:
        for name in graph.nodes[stack.pop()].inputs:
            at = graph.producer.get(name, -1)
            if at >= 0 and side[at] and at not in ancestors:
                ancestors.add(at)
                stack.append(at)
    return tuple(sorted(ancestors))


def _block_layer(graph: Graph, nodes: Sequence[int]) -> str:
    """The layer that holds most of a block's weights (most of its nodes, where it has none)."""
    votes: dict[str, float] = {}
    for i in nodes:
        parameters = [graph.parameters[p] for p in graph.node_parameters[i]]
        for parameter in parameters:
            module = graph.nodes[i].module or parameter.module or parameter.label.rpartition(".")[0]
            votes[layer_of(module)] = votes.get(layer_of(module), 0.0) + 1.0 + parameter.elements
        if not parameters:
            votes[layer_of(graph.nodes[i].module)] = votes.get(layer_of(graph.nodes[i].module), 0.0) + 1e-3
    votes.pop("", None)
    return max(votes, key=lambda m: votes[m]) if votes else graph.nodes[nodes[-1]].op


def _names(wanted: Sequence[str]) -> list[str]:
    totals, seen, names = Counter(wanted), Counter[str](), []
    for name in wanted:
        seen[name] += 1
        names.append(f"{name}[{seen[name]}/{totals[name]}]" if totals[name] > 1 else name)
    return names


def structural_hash(
    graph: Graph,
    nodes: Sequence[int],
    described: Callable[[int, int, str], str] | None = None,
    *,
    without: Collection[str] = (),
) -> str:
    """A hash (hex), equal for groups of nodes that differ only in names and weights.

    Args:
        graph: the graph.
        nodes: indices of the group, in topological order.
        described: what a tensor is, apart from its name, given the first node of the group that has it, its place among
            that node's inputs or, from -1 down, its outputs, and its name. By default kind, type, shape and value.
        without: attributes that do not count.
    """
    numbered: dict[str, str] = {"": "-"}
    texts: list[str] = []

    def number(node: int, place: int, name: str) -> str:
        if name not in numbered:
            words = described(node, place, name) if described else _kind_in_words(graph, name)
            numbered[name] = f"{len(numbered) - 1}:{words}"
        return numbered[name]

    for i in nodes:
        node = graph.nodes[i]
        attributes = sorted((kv for kv in node.attributes.items() if kv[0] not in without), key=lambda kv: kv[0])
        reads = ",".join(number(i, place, name) for place, name in enumerate(node.inputs))
        writes = ",".join(number(i, -1 - place, name) for place, name in enumerate(node.outputs))
        texts.append(f"{node.op}|{node.repeat}|{attributes}|{reads}>{writes};")
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _kind_in_words(graph: Graph, name: str) -> str:
    """Text that identifies a tensor up to its name: kind, type, shape, and values of a constant."""
    tensor = graph.tensors.get(name)
    if tensor is None:
        return "?"
    value = graph.constants.get(name) if tensor.kind is TensorKind.CONSTANT else None
    return f"{tensor.kind}{tensor.dtype}{tensor.shape}{'' if value is None else repr(value)}"


def side_nodes(graph: Graph) -> np.ndarray:
    """Nodes that depend on no parameter: masks, rotary tables, position ids.

    They carry no gradient and can be computed again wherever their results are needed, so they need never cross a cut.
    All false when no node depends on a parameter.

    Returns:
        bool array of shape [nodes]. O(nodes + tensor reads).
    """
    trained = np.zeros(len(graph.nodes), dtype=bool)
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            if not name:
                continue
            at = graph.producer.get(name)
            if at is None:
                trained[i] |= graph.tensors[name].kind is TensorKind.PARAMETER
            else:
                trained[i] |= trained[at]
    return ~trained if trained.any() else trained


def depth_first_order(graph: Graph, members: Sequence[int]) -> list[int]:
    """A topological order of some nodes in which each comes as late as its first reader allows.

    Post-order of a depth-first walk from the last nodes back to their inputs, inputs visited in the
    order they are read. `members` must be topologically sorted. O(nodes + tensor reads), no recursion.
    """
    inside = set(members)
    done: set[int] = set()
    order: list[int] = []
    reads = {i: _producers(graph, i, inside) for i in members}
    has_reader = {p for i in members for p in reads[i]}
    for root in (i for i in members if i not in has_reader):
        stack = [(root, 0)]
        while stack:
            node, next_input = stack.pop()
            if node in done:
                continue
            if next_input < len(reads[node]):
                stack.append((node, next_input + 1))
                if reads[node][next_input] not in done:
                    stack.append((reads[node][next_input], 0))
            else:
                done.add(node)
                order.append(node)
    return order


def _producers(graph: Graph, node: int, inside: set[int]) -> list[int]:
    producers: dict[int, None] = {}
    for name in graph.nodes[node].inputs:
        at = graph.producer.get(name, -1)
        if at in inside:
            producers[at] = None
    return list(producers)


def lifetimes(graph: Graph, order: Sequence[int]) -> dict[str, tuple[int, int]]:
    """For each tensor that one node of the order hands to a later one: (producer position, last reader position)."""
    position = {node: at for at, node in enumerate(order)}
    spans: dict[str, tuple[int, int]] = {}
    for at, node in enumerate(order):
        for name in graph.nodes[node].outputs:
            readers = [position[r] for r in graph.consumers.get(name, ()) if r in position]
            if readers:
                spans[name] = (at, max(readers))
    return spans


def crossing_bytes(graph: Graph, order: Sequence[int]) -> np.ndarray:
    """Bytes of the tensors alive across each place of an order, float64 of shape [len(order) + 1]; the ends are 0."""
    change = np.zeros(len(order) + 2)
    for name, (start, stop) in lifetimes(graph, order).items():
        size = graph.tensors[name].byte_count
        change[start + 1] += size
        change[stop + 1] -= size
    return np.cumsum(change)[:-1]


def linear_order(graph: Graph, members: Sequence[int]) -> list[int]:
    """A topological order of some nodes: the given or a depth-first one, whichever keeps fewer bytes alive."""
    given_order = list(members)
    depth_first = depth_first_order(graph, given_order)
    if depth_first == given_order:
        return given_order
    deep_bytes, given_bytes = crossing_bytes(graph, depth_first).sum(), crossing_bytes(graph, given_order).sum()
    return depth_first if deep_bytes < given_bytes else given_order

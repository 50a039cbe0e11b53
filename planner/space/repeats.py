"""What modules keep of a forward: which operators of a block run again instead, and which storages lie in the host.

A module whose kind drops its output (norms, activation functions) is recomputed before its output is read next. A
module that keeps its output (an MLP, attention) is recomputed as a whole before its backward; what operators outside
keep of its results stays. In both cases the inputs of the recomputed operators stay, or are recomputed themselves.
Blocks are handled one by one, since no module spans two. The head (`head_block`) is never recomputed.

Modules that are offloaded keep the same storages, but in the host's memory: those that no other operator keeps, since a
storage that is needed on the device stays there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.types import Profile
from planner.errors import JobError, UsageError
from planner.graph import Chain, Graph, TensorKind
from planner.operators import kept_pairs
from planner.operators.modules import MODULE_KINDS, drops_output, module_nodes, node_names
from planner.registry import did_you_mean
from planner.space.blocks import head_block, kept_table
from planner.space.recompute_choices import CHOICES
from planner.space.types import BlockCosts, Modules, RepeatCosts, Selective
from planner.sums import float_sum

MOST_OFFERED = 2
"""Lists of modules that a search tries."""

WORTH = 0.1
"""Fraction of all kept bytes that a list must free beyond the list before it."""

MOST_REPEATED = 0.7
"""Largest fraction of the forward pass that a list may repeat; beyond it, whole layers are recomputed."""

Slot = tuple[int, str]
"""A storage by the operator that makes it: the operator's place in its block, and the number of the output or, for
what is kept beside the outputs, `#` and its name."""

KeptStorages = Sequence[Sequence[tuple[str, float]]]
"""By block, the storages that it keeps for the backward pass, and their bytes."""


BUFFERS = 2
"""Blocks whose offloaded activations are on the device at a time: those at work, and those on their way."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """What one block recomputes; operators are given by their place in the block.

    Attributes:
        places: the recomputed operators.
        freed: storages that are no longer kept, each with the number of the connected operators that make it.
        added: inputs that must be kept instead: an operator that reads one, and its position.
    """

    places: tuple[int, ...] = ()
    freed: tuple[tuple[Slot, int], ...] = ()
    added: tuple[tuple[int, int], ...] = ()


class Reruns:
    """Finds the operators that each block recomputes for a list of modules.

    Args:
        chain: the blocks.
        profile: kept storages and times of the operators, at any micro-batch size.
        root: gives the tensor that owns a tensor's storage.
        size_of: gives the bytes of a tensor.
    """

    def __init__(
        self, chain: Chain, profile: Profile, root: Callable[[str], str], size_of: Callable[[str], float]
    ) -> None:
        self.chain, self._graph, self._profile = chain, chain.graph, profile
        self.root, self._size_of = root, size_of
        self._cache: dict[object, Rerun] = {}
        self.of, self.moved = functools.cache(self._of), functools.cache(self._moved)

    @functools.cached_property
    def _kept_by(self) -> list[frozenset[str]]:
        """Names of the storages that each node keeps."""
        saved = self._profile.saved
        return [frozenset(name for name, _ in kept_pairs(saved, (i,))) for i in range(len(saved))]

    @functools.cached_property
    def _last_keeper(self) -> dict[str, int]:
        """By storage, the last block that keeps it."""
        kept_by = self._kept_by
        return {name: b for b, block in enumerate(self.chain.blocks) for i in block.nodes for name in kept_by[i]}

    @functools.cached_property
    def _keepers(self) -> dict[str, set[int]]:
        """By storage, the operators of the chain that keep it."""
        keepers: dict[str, set[int]] = {}
        for i in sorted(self._in_chain):
            for storage in self._kept_by[i]:
                keepers.setdefault(storage, set()).add(i)
        return keepers

    @functools.cached_property
    def _in_chain(self) -> frozenset[int]:
        return frozenset(i for block in self.chain.blocks for i in block.nodes)

    @functools.cached_property
    def _owners(self) -> dict[str, int]:
        return {node.key: i for i, node in enumerate(self._graph.nodes)}

    def _of(self, repeats: tuple[str, ...]) -> tuple[Rerun, ...]:
        """By block, what it recomputes for a list of modules; O(nodes).

        Raises:
            JobError: the model has no module of a name.
        """
        nodes, head = self._modules_nodes(repeats), head_block(self.chain)
        return tuple(Rerun() if b == head else self._rerun(b, *nodes) for b in range(len(self.chain.blocks)))

    def _modules_nodes(self, repeats: Sequence[str]) -> tuple[frozenset[int], frozenset[int]]:
        """Operators of modules whose outputs are dropped, and of modules whose outputs are kept."""
        dropping, grouped = frozenset[int](), frozenset[int]()
        for name in repeats:
            nodes = module_nodes(self._graph, name)
            if not nodes:
                raise _unknown_module(self._graph, name)
            dropping, grouped = (dropping | nodes, grouped) if drops_output(name) else (dropping, grouped | nodes)
        return dropping - grouped, grouped

    def _rerun(self, b: int, dropping: frozenset[int], grouped: frozenset[int]) -> Rerun:
        """What one block recomputes; computed once for blocks of the same structure."""
        block, outputs = self.chain.blocks[b], [self._graph.nodes[i].outputs for i in self.chain.blocks[b].nodes]
        if not (dropping | grouped).intersection(block.nodes):
            return Rerun()
        marks = tuple((i in dropping, i in grouped, len(self._kept_by[i])) for i in block.nodes)
        later = tuple(self._last_keeper.get(name, -1) > b for names in outputs for name in names)
        key = (block.signature, marks, later)
        if key not in self._cache:
            self._cache[key] = self._find_rerun(b, dropping.intersection(block.nodes), grouped)
        return self._cache[key]

    def _find_rerun(self, b: int, dropping: frozenset[int], grouped: frozenset[int]) -> Rerun:
        nodes = self.chain.blocks[b].nodes
        groups = self._connected(grouped.intersection(nodes))
        keepers: dict[str, set[int]] = {}
        for i in nodes:
            for storage in self._kept_by[i]:
                keepers.setdefault(storage, set()).add(i)
        freed = {
            storage: maker
            for storage, keeping in keepers.items()
            if (maker := self._maker(storage)) in dropping
            or {groups.get(k) for k in keeping} == {groups.get(maker, -1)}
            if self._last_keeper[storage] <= b
        }
        needed_groups = {groups[maker] for maker in freed.values() if maker in groups}
        run = {i for i, group in groups.items() if group in needed_groups} | (set(freed.values()) - groups.keys())
        run, added = self._with_inputs(run, keepers.keys() - freed.keys(), dropping)
        connected, place = self._connected(run), {i: k for k, i in enumerate(nodes)}
        slots = sorted((self._slot(name, place[maker], maker), connected[maker]) for name, maker in freed.items())
        return Rerun(
            tuple(sorted(place[i] for i in run)), tuple(slots), tuple((place[i], position) for i, position in added)
        )

    def _maker(self, storage: str) -> int:
        """The operator that makes a storage; -1 for none."""
        return self._graph.producer.get(storage, self._owners.get(storage.rpartition("#")[0], -1))

    def _slot(self, storage: str, place: int, maker: int) -> Slot:
        outputs = self._graph.nodes[maker].outputs
        return place, str(outputs.index(storage)) if storage in outputs else f"#{storage.rpartition('#')[2]}"

    def _with_inputs(
        self, run: set[int], kept: set[str], dropping: frozenset[int]
    ) -> tuple[set[int], list[tuple[int, int]]]:
        """The operators with those that must run before them, and the inputs that must be kept for it."""
        pending, added = sorted(run), dict[str, tuple[int, int]]()
        while pending:
            node = pending.pop()
            for position, root, maker in self._operands(node):
                if root in kept or maker in run or root in added:
                    continue
                if maker in dropping:
                    run.add(maker)
                    pending.append(maker)
                else:
                    added[root] = (node, position)
        return run, [added[root] for root in sorted(added)]

    def _operands(self, node: int) -> Iterator[tuple[int, str, int]]:
        """Activations that an operator reads: position, storage, and producer."""
        graph = self._graph
        for position, name in enumerate(graph.nodes[node].inputs):
            if name and graph.tensors[name].kind is TensorKind.ACTIVATION and name not in graph.sources:
                root = self.root(name)
                if graph.producer.get(root) in self._in_chain:
                    yield position, root, graph.producer[root]

    def _connected(self, nodes: Set[int]) -> dict[int, int]:
        """By operator, the number of its connected group: operators that read each other's results."""
        neighbours: dict[int, list[int]] = {i: [] for i in sorted(nodes)}
        for node in neighbours:
            for _, _, maker in self._operands(node):
                if maker in neighbours:
                    neighbours[node].append(maker)
                    neighbours[maker].append(node)
        group_of: dict[int, int] = {}
        for start in neighbours:
            pending = [] if start in group_of else [start]
            while pending:
                node = pending.pop()
                if node not in group_of:
                    group_of[node] = start
                    pending += neighbours[node]
        return group_of

    def _moved(self, repeats: tuple[str, ...], offload: tuple[str, ...]) -> tuple[Set[str], ...]:
        """By block, storages that lie in the host's memory when some modules are recomputed and others offloaded.

        Args:
            repeats: modules that are recomputed.
            offload: modules that are offloaded.

        Raises:
            JobError: the model has no module of a name.
        """
        head = head_block(self.chain)
        nodes = frozenset[int]().union(*self._modules_nodes(offload))
        nodes -= frozenset(self.chain.blocks[head].nodes) if head >= 0 else frozenset()
        inside = {root for root, keepers in self._keepers.items() if keepers <= nodes}
        found = []
        for b, (block, rerun) in enumerate(zip(self.chain.blocks, self.of(repeats), strict=True)):
            readers = {self.root(self.operand(b, *at)): block.nodes[at[0]] for at in rerun.added}
            moving = {root for root, node in readers.items() if node in nodes and not self._keepers.get(root)}
            found.append((inside | moving) - {root for root, node in readers.items() if node not in nodes})
        return tuple(found)

    def storage(self, b: int, slot: Slot) -> str:
        """Name of a storage of a block, by its slot."""
        place, name = slot
        node = self._graph.nodes[self.chain.blocks[b].nodes[place]]
        return f"{node.key}{name}" if name.startswith("#") else node.outputs[int(name)]

    def operand(self, b: int, place: int, position: int) -> str:
        """Name of a tensor that an operator of a block reads."""
        return self._graph.nodes[self.chain.blocks[b].nodes[place]].inputs[position]

    def present(self, kinds: Modules) -> Modules:
        """Those of some kinds of modules that the model has."""
        return tuple(kind for kind in kinds if module_nodes(self._graph, kind))

    @functools.cached_property
    def offered(self) -> tuple[Modules, ...]:
        """Lists of modules worth trying, each containing the operators of the list before it.

        Greedy: the module that frees most bytes a second of recomputation is added next.
        """
        block_counts = Counter(block.signature for block in self.chain.blocks)
        first_blocks = {block.signature: b for b, block in reversed(list(enumerate(self.chain.blocks)))}
        counted = [(b, block_counts[signature]) for signature, b in first_blocks.items() if b != head_block(self.chain)]
        total_s = float_sum(
            n * float(self._profile.forward_s[list(self.chain.blocks[b].nodes)].sum()) for b, n in counted
        )
        total = sum(n * sum(self._sizes(b).values()) for b, n in counted)
        candidates = [name for name, kind in MODULE_KINDS.items() if kind.usual and module_nodes(self._graph, name)]
        modules, freed, seconds = tuple[str, ...](), 0.0, 0.0
        lists, offered = list[tuple[str, ...]](), 0.0
        while candidates and len(lists) < MOST_OFFERED:
            savings_by_name = {name: self._savings((*modules, name), counted) for name in candidates}
            improving = {
                name: savings
                for name, savings in savings_by_name.items()
                if savings[0] > freed and savings[1] <= MOST_REPEATED * total_s
            }
            if not improving:
                break
            best = max(improving, key=lambda n: (improving[n][0] - freed) / max(improving[n][1] - seconds, 1e-12))
            best_nodes, (freed, seconds) = module_nodes(self._graph, best), improving[best]
            modules = (*(name for name in modules if not module_nodes(self._graph, name) <= best_nodes), best)
            candidates.remove(best)
            if freed - offered >= WORTH * total:
                lists.append(modules)
                offered = freed
        return tuple(lists)

    def _savings(self, repeats: tuple[str, ...], counted: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Bytes that a list frees, and seconds that it recomputes, in blocks that occur so many times each."""
        freed, seconds, nodes_meant = 0.0, 0.0, self._modules_nodes(repeats)
        for b, count in counted:
            rerun, sizes = self._rerun(b, *nodes_meant), self._sizes(b)
            nodes = [self.chain.blocks[b].nodes[place] for place in rerun.places]
            block_bytes = float(sum(sizes[self.storage(b, slot)] for slot, _ in rerun.freed))
            block_bytes -= float_sum(self._size_of(self.operand(b, *at)) for at in rerun.added)
            freed, seconds = freed + count * block_bytes, seconds + count * float(self._profile.forward_s[nodes].sum())
        return freed, seconds

    def _sizes(self, b: int) -> dict[str, int]:
        return dict(kept_pairs(self._profile.saved, self.chain.blocks[b].nodes))


def _unknown_module(graph: Graph, name: str) -> JobError:
    if name in MODULE_KINDS:
        present = ", ".join(kind for kind in MODULE_KINDS if module_nodes(graph, kind)) or "none that has a name"
        return JobError(f"the model has no {name} to recompute or offload", hint=f"its modules: {present}")
    kinds = (kind for kind in MODULE_KINDS if module_nodes(graph, kind))
    known = {"never", "always", *kinds, *(part for node in graph.nodes for part in node_names(node))}
    return JobError(f"nothing to recompute or offload is called {name!r}", hint=did_you_mean(name, known))


def module_prices(
    reruns: Callable[[], Reruns],
    saved: Callable[[], KeptStorages],
    forward_s: Callable[[int, tuple[int, ...]], np.ndarray],
    size_of: Callable[[int, int, int], float],
) -> Selective:
    """Prices of recomputing and offloading modules, each list once.

    Args:
        reruns: gives the recomputed operators; called at the first price.
        saved: gives what blocks keep without recomputation; called at each new price.
        forward_s: gives the [t] forward seconds of a block's operators at some places, by device type.
        size_of: gives the bytes of an input, by block, place of the operator that reads it, and position.
    """

    @functools.cache
    def price(repeats: Modules, offload: Modules) -> RepeatCosts:
        return _module_costs(reruns(), saved(), forward_s, size_of, (repeats, offload))

    return Selective(lambda: reruns().offered, lambda kinds: reruns().present(kinds), price)


def _module_costs(
    reruns: Reruns,
    saved: KeptStorages,
    forward_s: Callable[[int, tuple[int, ...]], np.ndarray],
    size_of: Callable[[int, int, int], float],
    wanted: tuple[Modules, Modules],
) -> RepeatCosts:
    """The price of `module_prices` for the modules `wanted`: to be recomputed, and offloaded."""
    seconds, kept, working = [], [], []
    for b, rerun in enumerate(reruns.of(wanted[0])):
        freed = {reruns.storage(b, slot): group for slot, group in rerun.freed}
        brought_back = dict.fromkeys(freed.values(), 0.0)
        for storage, size in saved[b]:
            if storage in freed:
                brought_back[freed[storage]] += size
        added = [(reruns.operand(b, *at), size_of(b, *at)) for at in rerun.added]
        kept.append([*((name, size) for name, size in saved[b] if name not in freed), *added])
        seconds.append(forward_s(b, rerun.places))
        working.append(max(brought_back.values(), default=0.0))
    moved_bytes, block_moved_bytes = np.zeros((len(kept), len(kept))), np.zeros(len(kept))
    if wanted[1]:
        away, root = reruns.moved(*wanted), reruns.root
        moved = [[each for each in own if root(each[0]) in roots] for own, roots in zip(kept, away, strict=True)]
        kept = [[each for each in own if root(each[0]) not in roots] for own, roots in zip(kept, away, strict=True)]
        moved_bytes, block_moved_bytes = kept_table(moved), np.array([float_sum(s for _, s in own) for own in moved])
    return RepeatCosts(
        wanted[0], np.array(seconds).T, kept_table(kept), np.array(working), moved_bytes, block_moved_bytes
    )


def even_prices(whole: Selective, ranks: int, reruns: Callable[[], Reruns], node_s: np.ndarray) -> Selective:
    """Lower bound on recomputing modules under any sharding over some ranks: an even share, no communication.

    Args:
        whole: prices on one rank.
        ranks: ranks of a replica.
        reruns: gives the recomputed operators.
        node_s: [nodes] forward seconds of each operator's share.
    """

    @functools.cache
    def price(repeats: Modules, offload: Modules) -> RepeatCosts:
        blocks = zip(reruns().chain.blocks, reruns().of(repeats), strict=True)
        seconds = [float(node_s[[block.nodes[place] for place in rerun.places]].sum()) for block, rerun in blocks]
        on_one = whole(repeats, offload)
        shares = {name: getattr(on_one, name) / ranks for name in _BYTES}
        return RepeatCosts(repeats, np.array([seconds]), **shares)

    return replace(whole, price=price)


def least_prices(several: Sequence[Selective]) -> Selective:
    """Lower bound on several prices of recomputing modules."""

    @functools.cache
    def price(repeats: Modules, offload: Modules) -> RepeatCosts:
        prices = [each(repeats, offload) for each in several]
        names = ("repeat_s", *_BYTES)
        return RepeatCosts(repeats, **{n: np.minimum.reduce([getattr(p, n) for p in prices]) for n in names})

    return replace(several[0], price=price)


_BYTES = ("saved_bytes", "working_bytes", "moved_bytes", "block_moved_bytes")
"""Bytes of `RepeatCosts`."""


def selective_costs(costs: BlockCosts, repeats: tuple[str, ...], offload: tuple[str, ...] = ()) -> RepeatCosts:
    """Prices of recomputing some modules, and of moving what others keep to the host.

    Raises:
        UsageError: the costs have none.
        JobError: the model has no module of a name.
    """
    if costs.selective is None:
        hint = f"recompute {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, without offload"
        raise UsageError(f"{','.join((*repeats, *offload))}: the price of single modules is not known", hint=hint)
    return costs.selective(repeats, offload)

"""Selective recomputation: which operators of a block run again, what that frees, and what it costs.

A module of a kind that drops its output (norms, activation functions) is run again before what it made is read next. Of
one that keeps its output (an MLP, attention) all operators are run again before its backward; what operators outside
keep of its results stays. In both cases the tensors that the operators read stay, or are made again themselves. Blocks
are looked at one by one: no module reaches over two. The head (`head_block`) is never repeated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from planner.costs.types import Profile
from planner.errors import JobError, UsageError
from planner.graph import Chain, Graph, TensorKind
from planner.operators.modules import MODULE_KINDS, drops_output, module_nodes, node_names
from planner.registry import did_you_mean
from planner.space.blocks import head_block, kept_table
from planner.space.types import BlockCosts, RepeatCosts, Selective

CHOICES = ("never", "always", "layers", "auto")
"""What can be said of recomputation beside names of modules."""

MOST_OFFERED = 2
"""Lists of modules that a search tries."""

WORTH = 0.1
"""A list frees at least that part of all kept bytes more than the one before it."""

MOST_REPEATED = 0.7
"""Part of the forward pass that a list repeats at the most: to repeat whole layers is another choice."""

Slot = tuple[int, str]
"""An operator's place in its block, and the number of its result, or `#` and what it keeps beside them."""

Held = Sequence[Sequence[tuple[str, float]]]
"""By block, storages and their bytes."""


def recomputed_modules(choice: str) -> tuple[str, ...]:
    """The modules that a choice of recomputation names, `layernorm,moe_act`; none for the words of `CHOICES`."""
    return () if choice in CHOICES else tuple(dict.fromkeys(part.strip() for part in choice.split(",") if part.strip()))


PlainWay = tuple[bool, tuple[str, ...]]
"""Whether stages repeat all layers, or which modules."""


def plain_ways(choice: str) -> tuple[PlainWay, ...]:
    """The ways to recompute that a choice names: nothing, all layers, or its modules."""
    if recomputed_modules(choice):
        return ((False, recomputed_modules(choice)),)
    return {"never": ((False, ()),), "always": ((True, ()),)}.get(choice, ((False, ()), (True, ())))


def is_allowed(choice: str, recompute: bool, repeats: tuple[str, ...]) -> bool:
    """True if a choice leaves a stage open to repeat all layers, or these modules."""
    return (recompute, repeats) in plain_ways(choice) or (choice == "auto" and not recompute)


def lists_of(choice: str, costs: BlockCosts) -> tuple[tuple[str, ...], ...]:
    """Lists of modules of which stages may repeat one, those that take least time first."""
    if choice == "auto":
        return () if costs.selective is None else costs.selective.offered
    return tuple(repeats for _, repeats in plain_ways(choice) if repeats)


@dataclass(frozen=True, slots=True)
class Rerun:
    """What one block runs again, by places of its operators.

    Attributes:
        places: operators.
        freed: storages that are not kept any more, and the number of the group of connected operators that makes each.
        added: operands that must be kept instead: an operator that reads one, and the operand's position.
    """

    places: tuple[int, ...] = ()
    freed: tuple[tuple[Slot, int], ...] = ()
    added: tuple[tuple[int, int], ...] = ()


class Reruns:
    """Operators that run again for lists of modules, by block.

    Args:
        chain: the blocks.
        profile: what the operators keep and take, at any micro-batch size.
        root: the tensor in whose storage a tensor lies.
        size_of: bytes of a tensor.
    """

    def __init__(
        self, chain: Chain, profile: Profile, root: Callable[[str], str], size_of: Callable[[str], float]
    ) -> None:
        self.chain, self._graph, self._profile = chain, chain.graph, profile
        self._root, self._size_of = root, size_of
        self._keeps = [frozenset(each.storage for each in own) for own in profile.saved]
        self._last: dict[str, int] = {}
        for b, block in enumerate(chain.blocks):
            self._last.update((storage, b) for i in block.nodes for storage in self._keeps[i])
        self._in_chain = frozenset(i for block in chain.blocks for i in block.nodes)
        self._owners = {node.key: i for i, node in enumerate(self._graph.nodes)}
        self._known: dict[object, Rerun] = {}
        self.of = functools.cache(self._of)

    def _of(self, repeats: tuple[str, ...]) -> tuple[Rerun, ...]:
        """By block, what a list of modules makes it run again; O(nodes).

        Raises:
            JobError: the model has no module of a name.
        """
        meant, head = self._meant(repeats), head_block(self.chain)
        return tuple(Rerun() if b == head else self._rerun(b, *meant) for b in range(len(self.chain.blocks)))

    def _meant(self, repeats: Sequence[str]) -> tuple[frozenset[int], frozenset[int]]:
        """Operators of modules whose results are dropped, too, and of those whose results stay."""
        dropping, grouped = frozenset[int](), frozenset[int]()
        for name in repeats:
            nodes = module_nodes(self._graph, name)
            if not nodes:
                raise _unknown(self._graph, name)
            dropping, grouped = (dropping | nodes, grouped) if drops_output(name) else (dropping, grouped | nodes)
        return dropping - grouped, grouped

    def _rerun(self, b: int, dropping: frozenset[int], grouped: frozenset[int]) -> Rerun:
        """What one block runs again; worked out once for blocks of one structure of which the same operators are
        meant."""
        block, outputs = self.chain.blocks[b], [self._graph.nodes[i].outputs for i in self.chain.blocks[b].nodes]
        if not (dropping | grouped).intersection(block.nodes):
            return Rerun()
        marks = tuple((i in dropping, i in grouped, len(self._keeps[i])) for i in block.nodes)
        later = tuple(self._last.get(name, -1) > b for names in outputs for name in names)
        key = (block.signature, marks, later)
        if key not in self._known:
            self._known[key] = self._worked_out(b, dropping.intersection(block.nodes), grouped)
        return self._known[key]

    def _worked_out(self, b: int, dropping: frozenset[int], grouped: frozenset[int]) -> Rerun:
        nodes = self.chain.blocks[b].nodes
        groups = self._connected(grouped.intersection(nodes))
        keepers: dict[str, set[int]] = {}
        for i in nodes:
            for storage in self._keeps[i]:
                keepers.setdefault(storage, set()).add(i)
        freed = {
            storage: maker
            for storage, keeping in keepers.items()
            if (maker := self._maker(storage)) in dropping
            or {groups.get(k) for k in keeping} == {groups.get(maker, -1)}
            if self._last[storage] <= b
        }
        wanted = {groups[maker] for maker in freed.values() if maker in groups}
        run = {i for i, group in groups.items() if group in wanted} | (set(freed.values()) - groups.keys())
        run, added = self._closed(run, keepers.keys() - freed.keys(), dropping)
        parts, place = self._connected(run), {i: k for k, i in enumerate(nodes)}
        slots = sorted((self._slot(name, place[maker], maker), parts[maker]) for name, maker in freed.items())
        return Rerun(
            tuple(sorted(place[i] for i in run)), tuple(slots), tuple((place[i], position) for i, position in added)
        )

    def _maker(self, storage: str) -> int:
        """The operator that makes a storage; -1 for none."""
        return self._graph.producer.get(storage, self._owners.get(storage.rpartition("#")[0], -1))

    def _slot(self, storage: str, place: int, maker: int) -> Slot:
        outputs = self._graph.nodes[maker].outputs
        return place, str(outputs.index(storage)) if storage in outputs else f"#{storage.rpartition('#')[2]}"

    def _closed(
        self, run: set[int], kept: set[str], dropping: frozenset[int]
    ) -> tuple[set[int], list[tuple[int, int]]]:
        """Operators with those that must run before them, and operands that have to be kept for it."""
        left, added = sorted(run), dict[str, tuple[int, int]]()
        while left:
            node = left.pop()
            for position, root, maker in self._operands(node):
                if root in kept or maker in run or root in added:
                    continue
                if maker in dropping:
                    run.add(maker)
                    left.append(maker)
                else:
                    added[root] = (node, position)
        return run, [added[root] for root in sorted(added)]

    def _operands(self, node: int) -> Iterator[tuple[int, str, int]]:
        """Activations that an operator reads: position, storage, and the operator that makes it."""
        graph = self._graph
        for position, name in enumerate(graph.nodes[node].inputs):
            if name and graph.tensors[name].kind is TensorKind.ACTIVATION and name not in graph.sources:
                root = self._root(name)
                if graph.producer.get(root) in self._in_chain:
                    yield position, root, graph.producer[root]

    def _connected(self, nodes: Set[int]) -> dict[int, int]:
        """Numbers of the groups of operators that read each other's results."""
        beside: dict[int, list[int]] = {i: [] for i in sorted(nodes)}
        for node in beside:
            for _, _, maker in self._operands(node):
                if maker in beside:
                    beside[node].append(maker)
                    beside[maker].append(node)
        found: dict[int, int] = {}
        for start in beside:
            left = [] if start in found else [start]
            while left:
                node = left.pop()
                if node not in found:
                    found[node] = start
                    left += beside[node]
        return found

    def storage(self, b: int, slot: Slot) -> str:
        """A storage of a block by its slot."""
        place, what = slot
        node = self._graph.nodes[self.chain.blocks[b].nodes[place]]
        return f"{node.key}{what}" if what.startswith("#") else node.outputs[int(what)]

    def operand(self, b: int, place: int, position: int) -> str:
        """A tensor that an operator of a block reads."""
        return self._graph.nodes[self.chain.blocks[b].nodes[place]].inputs[position]

    @functools.cached_property
    def offered(self) -> tuple[tuple[str, ...], ...]:
        """Lists of modules that are worth trying, each with the operators of the one before and more: greedily the
        modules that free most bytes for a second of work."""
        alike = Counter(block.signature for block in self.chain.blocks)
        first = {block.signature: b for b, block in reversed(list(enumerate(self.chain.blocks)))}
        counted = [(b, alike[signature]) for signature, b in first.items() if b != head_block(self.chain)]
        total_s = sum(n * float(self._profile.forward_s[list(self.chain.blocks[b].nodes)].sum()) for b, n in counted)
        total = sum(n * sum(self._sizes(b).values()) for b, n in counted)
        left = [name for name, kind in MODULE_KINDS.items() if kind.usual and module_nodes(self._graph, name)]
        modules, freed, seconds = tuple[str, ...](), 0.0, 0.0
        lists, offered = list[tuple[str, ...]](), 0.0
        while left and len(lists) < MOST_OFFERED:
            tried = {name: self._worth((*modules, name), counted) for name in left}
            useful = {name: own for name, own in tried.items() if own[0] > freed and own[1] <= MOST_REPEATED * total_s}
            if not useful:
                break
            best = max(useful, key=lambda n: (useful[n][0] - freed) / max(useful[n][1] - seconds, 1e-12))
            within, (freed, seconds) = module_nodes(self._graph, best), useful[best]
            modules = (*(name for name in modules if not module_nodes(self._graph, name) <= within), best)
            left.remove(best)
            if freed - offered >= WORTH * total:
                lists.append(modules)
                offered = freed
        return tuple(lists)

    def _worth(self, repeats: tuple[str, ...], counted: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Bytes that a list frees in some blocks, each so many times, and seconds of what runs again."""
        freed, seconds, meant = 0.0, 0.0, self._meant(repeats)
        for b, count in counted:
            rerun, sizes = self._rerun(b, *meant), self._sizes(b)
            nodes = [self.chain.blocks[b].nodes[place] for place in rerun.places]
            own = float(sum(sizes[self.storage(b, slot)] for slot, _ in rerun.freed))
            own -= sum(self._size_of(self.operand(b, *at)) for at in rerun.added)
            freed, seconds = freed + count * own, seconds + count * float(self._profile.forward_s[nodes].sum())
        return freed, seconds

    def _sizes(self, b: int) -> dict[str, int]:
        return {s.storage: s.byte_count for i in self.chain.blocks[b].nodes for s in self._profile.saved[i]}


def _unknown(graph: Graph, name: str) -> JobError:
    if name in MODULE_KINDS:
        has = ", ".join(kind for kind in MODULE_KINDS if module_nodes(graph, kind)) or "none that has a name"
        return JobError(f"the model has no {name} to recompute", hint=f"its modules: {has}")
    known = {*CHOICES, *MODULE_KINDS, *(called for node in graph.nodes for called in node_names(node))}
    return JobError(f"nothing to recompute is called {name!r}", hint=did_you_mean(name, known))


class RepeatedModules:
    """Prices of running modules again (`planner.space.types.Selective`).

    Args:
        reruns: the operators, by block; called where they are needed.
        saved: by block, what it keeps where nothing is repeated; called likewise.
        forward_s: [t] seconds of the operators of a block at some places, by device type.
        size_of: bytes of an operand: block, place of the operator that reads it, position.
    """

    def __init__(
        self,
        reruns: Callable[[], Reruns],
        saved: Callable[[], Held],
        forward_s: Callable[[int, tuple[int, ...]], np.ndarray],
        size_of: Callable[[int, int, int], float],
    ) -> None:
        self._reruns, self._saved, self._forward_s, self._size_of = reruns, saved, forward_s, size_of
        self._priced = functools.cache(self._price)

    @property
    def offered(self) -> tuple[tuple[str, ...], ...]:
        """Lists of modules that are worth trying."""
        return self._reruns().offered

    def __call__(self, repeats: tuple[str, ...], /) -> RepeatCosts:
        """The prices of a list of modules."""
        return self._priced(repeats)

    def _price(self, repeats: tuple[str, ...]) -> RepeatCosts:
        seconds, kept, working = [], [], []
        reruns, saved = self._reruns(), self._saved()
        for b, rerun in enumerate(reruns.of(repeats)):
            freed = {reruns.storage(b, slot): group for slot, group in rerun.freed}
            brought_back = dict.fromkeys(freed.values(), 0.0)
            for storage, size in saved[b]:
                if storage in freed:
                    brought_back[freed[storage]] += size
            added = [(reruns.operand(b, *at), self._size_of(b, *at)) for at in rerun.added]
            kept.append([*((name, size) for name, size in saved[b] if name not in freed), *added])
            seconds.append(self._forward_s(b, rerun.places))
            working.append(max(brought_back.values(), default=0.0))
        return RepeatCosts(repeats, np.array(seconds).T, kept_table(kept), np.array(working))


@dataclass(frozen=True)
class EvenRepeats:
    """What no sharding over some ranks is below when it repeats modules: an even share and no communication.

    Attributes:
        whole: prices on one rank.
        ranks: of a replica.
        reruns: the operators, by block.
        forward_s: [nodes] seconds of each operator's share.
    """

    whole: Selective
    ranks: int
    reruns: Callable[[], Reruns]
    forward_s: np.ndarray

    @property
    def offered(self) -> tuple[tuple[str, ...], ...]:
        """Lists of modules that are worth trying."""
        return self.whole.offered

    def __call__(self, repeats: tuple[str, ...], /) -> RepeatCosts:
        """The least of a list of modules."""
        whole, reruns = self.whole(repeats), self.reruns()
        seconds = [
            float(self.forward_s[[block.nodes[place] for place in rerun.places]].sum())
            for block, rerun in zip(reruns.chain.blocks, reruns.of(repeats), strict=True)
        ]
        return RepeatCosts(
            repeats, np.array([seconds]), whole.saved_bytes / self.ranks, whole.working_bytes / self.ranks
        )


@dataclass(frozen=True)
class LeastRepeats:
    """What none of several prices is below."""

    several: tuple[Selective, ...]

    @property
    def offered(self) -> tuple[tuple[str, ...], ...]:
        """Lists of modules that are worth trying."""
        return self.several[0].offered

    def __call__(self, repeats: tuple[str, ...], /) -> RepeatCosts:
        """The least of a list of modules."""
        prices = [each(repeats) for each in self.several]
        least = [
            np.minimum.reduce([getattr(p, name) for p in prices])
            for name in ("repeat_s", "saved_bytes", "working_bytes")
        ]
        return RepeatCosts(repeats, *least)


def selective_costs(costs: BlockCosts, repeats: tuple[str, ...]) -> RepeatCosts:
    """Prices of running modules again.

    Raises:
        UsageError: they are not known.
        JobError: the model has no module of a name.
    """
    if costs.selective is None:
        hint = f"use {', '.join(CHOICES[:-1])} or {CHOICES[-1]}"
        raise UsageError(f"recompute {','.join(repeats)}: the price of single modules is not known", hint=hint)
    return costs.selective(repeats)

"""The graph as a framework runs it: operators that an exporter wrote out become one node again.

The same module comes out of exporters in different words: LayerNorm as one operator or as nine, attention as one or as
a dozen, batch normalisation folded into the convolution before it. A pattern says how such words are recognised and
which operators of `planner.operators.rules` they stand for. From there on one rule says what such an operator costs,
what it keeps and how it is split. Patterns are files in `planner.operators.patterns`, applied once, when a model is
read.

A pattern can also stand for a kernel that some software has and other software has not. Its nodes stay as they are; a
stack that names it (`Stack.fused`) is priced with one kernel in their place (`fused_kernels`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter

from planner.errors import HardwareError
from planner.graph import AttributeValue, ConstantValue, Graph, Node, Note, NoteLevel, Tensor, TensorKind, per_model
from planner.operators.entry import rule_of
from planner.operators.formulas import Match, find, last_operators
from planner.registry import Registry, did_you_mean


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A match of a pattern: the nodes to remove and their replacement.

    Attributes:
        nodes: indices of the nodes that go; the last one makes the result.
        instead: nodes that take the place of the last one, in order.
        tensors: tensors that are new.
        constants: values of new constants.
    """

    nodes: frozenset[int]
    instead: tuple[Node, ...]
    tensors: tuple[Tensor, ...] = ()
    constants: Mapping[str, ConstantValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pattern:
    """An operator that exporters spell out as several, and how to recognise it.

    Attributes:
        ends: operators that the last of its nodes can be.
        rewrite: the replacement of the nodes that end at a given node; None where the pattern does not match.
        after: names of patterns that must have been applied before.
        note: said to the user where it was applied, `{count}` being how often; "" for nothing.
        kernel: some software runs its nodes as one kernel; no graph is changed.
    """

    ends: frozenset[str]
    rewrite: Callable[[Graph, int], Rewrite | None]
    after: tuple[str, ...] = ()
    note: str = ""
    kernel: bool = False


UNNORMALISED = "@unnormalised"
"""Behind the name of a product whose norm an exporter folded into it, the name of the product without the norm."""

PATTERNS: Registry[Pattern] = Registry("planner.operators.patterns", "pattern")

Attributes = Mapping[str, AttributeValue]


def written_out(
    op: str,
    formulas: Sequence[str],
    inputs: Sequence[str],
    attributes: Attributes | Callable[[Graph, Match], Attributes | None],
    *,
    after: tuple[str, ...] = (),
) -> Pattern:
    """A pattern for an operator that exporters write as a formula.

    Args:
        op: the operator.
        formulas: how it is written (see `planner.operators.formulas`); the first that fits counts.
        inputs: names of the formula in the order of the operator's operands; those that a formula lacks are absent.
        attributes: the operator's attributes, or what finds them for a match; None where it is none after all.
        after: as in `Pattern`.
    """

    by_end = _by_last_operator(formulas)

    def rewrite(graph: Graph, index: int) -> Rewrite | None:
        for match in _matches(graph, index, by_end):
            chosen = attributes(graph, match) if callable(attributes) else attributes
            if chosen is not None:
                operands = [match.names.get(name, "") for name in inputs]
                while not operands[-1]:
                    operands.pop()
                node = replace(graph.nodes[index], op=op, inputs=tuple(operands), attributes=chosen)
                return Rewrite(match.nodes, (node,))
        return None

    return Pattern(frozenset(by_end), rewrite, after)


def one_kernel(formulas: Sequence[str]) -> Pattern:
    """A pattern for nodes that some software runs as one kernel, which keeps its operands and works out again in
    backward what is inside.

    Args:
        formulas: what the kernel computes (see `planner.operators.formulas`); the first that fits counts.
    """

    by_end = _by_last_operator(formulas)

    def rewrite(graph: Graph, index: int) -> Rewrite | None:
        match = next(_matches(graph, index, by_end), None)
        return None if match is None else Rewrite(match.nodes, (graph.nodes[index],))

    return Pattern(frozenset(by_end), rewrite, kernel=True)


def _matches(graph: Graph, index: int, by_end: Mapping[str, Sequence[str]]) -> Iterator[Match]:
    """Matches of formulas that end at a node, in the order of the formulas."""
    node = graph.nodes[index]
    for formula in by_end.get(node.op, ()):
        match = find(graph, formula, node.outputs[0])
        if match is not None and index in match.nodes:
            yield match


def _by_last_operator(formulas: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Formulas by the operators that their last node can be."""
    by_operator: dict[str, list[str]] = {}
    for formula in formulas:
        for operator in last_operators(formula):
            by_operator.setdefault(operator, []).append(formula)
    return by_operator


def fused_kernels(graph: Graph, names: Iterable[str]) -> list[list[int]]:
    """All places where a stack with the named kernels would use them, the last first. O(nodes) for each name.

    Returns:
        For each, indices of its nodes: the last one makes the result, those of the others are never in memory.

    Raises:
        HardwareError: no kernel has that name.
    """
    kernels: list[list[int]] = []
    for name in names:
        pattern = PATTERNS.find(name)
        if pattern is None or not pattern.kernel:
            known = (each for each, entry in PATTERNS.items() if entry.kernel)
            raise HardwareError(f"no fused kernel is called {name!r}", where="stack", hint=did_you_mean(name, known))
        kernels += [sorted(rewrite.nodes) for rewrite in _find_all(graph, pattern)]
    return kernels


def rewritten(graph: Graph) -> Graph:
    """The graph with every pattern in place of the nodes that spell it. O(nodes) for each pattern.

    Name, fingerprint, inputs, outputs and weights stay; weights that only the spelling needed (the ones and zeros of a
    norm without weights) go.
    """
    total = len(graph.nodes)
    notes = []
    graph = _without_constant_work(graph)
    for name in _in_order():
        pattern = PATTERNS.get(name)
        rewrites = [] if pattern.kernel else _find_all(graph, pattern)
        if rewrites:
            graph = _apply(graph, rewrites)
            if pattern.note:
                where = rewrites[-1].instead[-1].key
                notes.append(
                    Note(NoteLevel.INFO, name.replace("_", "-"), pattern.note.format(count=len(rewrites)), where)
                )
    merged = total - len(graph.nodes)
    report = graph.report
    if not merged and not notes:
        return graph
    report = replace(report, merged_nodes=merged, notes=(*report.notes, *notes))
    return replace(graph, report=report)


def _without_constant_work(graph: Graph) -> Graph:
    """Remove nodes that read only constants: their results are computed once, before training."""
    constant = {name for name, tensor in graph.tensors.items() if tensor.kind is TensorKind.CONSTANT}
    kept = []
    for node in graph.nodes:
        operands = [name for name in node.inputs if name]
        state = node.op == "Identity"  # of a loop, at its start
        if operands and constant.issuperset(operands) and not (state or rule_of(node.op).random):
            constant.update(node.outputs)
        else:
            kept.append(node)
    if len(kept) == len(graph.nodes):
        return graph
    tensors = {n: replace(t, kind=TensorKind.CONSTANT) if n in constant else t for n, t in graph.tensors.items()}
    return replace(graph, nodes=tuple(kept), tensors=tensors)


def _in_order() -> list[str]:
    """Names of all patterns, each after those that it names."""
    return list(TopologicalSorter({name: entry.after for name, entry in PATTERNS.items()}).static_order())


@per_model
def _places(graph: Graph) -> Mapping[str, Sequence[int]]:
    """Indices of nodes by operator."""
    places: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        places.setdefault(node.op, []).append(index)
    return places


def _find_all(graph: Graph, pattern: Pattern) -> list[Rewrite]:
    """All matches of a pattern, the last first; no two share a node."""
    taken: set[int] = set()
    rewrites: list[Rewrite] = []
    places = _places(graph)
    for index in sorted((index for op in pattern.ends for index in places.get(op, ())), reverse=True):
        if index in taken:
            continue
        rewrite = pattern.rewrite(graph, index)
        if rewrite is not None and taken.isdisjoint(rewrite.nodes) and _is_closed(graph, rewrite):
            taken |= rewrite.nodes
            rewrites.append(rewrite)
    return rewrites


def _is_closed(graph: Graph, rewrite: Rewrite) -> bool:
    """Whether other nodes read only the last node's results, and all nodes have the same repeat count."""
    nodes = rewrite.nodes
    made = {name for node in rewrite.instead for name in node.outputs}
    gone = {name for i in nodes for name in graph.nodes[i].outputs if name} - made
    inside = all(nodes.issuperset(graph.consumers.get(name, ())) for name in gone)
    return inside and gone.isdisjoint(graph.outputs) and len({graph.nodes[i].repeat for i in nodes}) == 1


def _apply(graph: Graph, rewrites: Sequence[Rewrite]) -> Graph:
    gone = {i for rewrite in rewrites for i in rewrite.nodes}
    instead = {max(rewrite.nodes): rewrite.instead for rewrite in rewrites}
    nodes: list[Node] = []
    for i, node in enumerate(graph.nodes):
        nodes.extend(instead.get(i, ()) if i in gone else (node,))
    known = {**graph.tensors, **{t.name: t for rewrite in rewrites for t in rewrite.tensors}}
    constants = {**graph.constants, **{n: v for rewrite in rewrites for n, v in rewrite.constants.items()}}
    named = (name for node in nodes for name in (*node.inputs, *node.outputs) if name)
    read = dict.fromkeys((*graph.inputs, *graph.outputs, *named))
    sources = {name: found for name, found in graph.sources.items() if name in read}
    before, after = (Counter(s for found in of.values() for s in found) for of in (graph.sources, sources))
    parameters = tuple(p for p in graph.parameters if p.name in after or p.name not in before)
    return replace(
        graph,
        nodes=tuple(nodes),
        tensors={name: known[name] for name in read if name in known},
        constants={name: value for name, value in constants.items() if name in read},
        sources=sources,
        parameters=parameters,
        permuted={name: order for name, order in graph.permuted.items() if name in read},
    )

"""Splits that the user rules out: which strategies a pattern names, and whether it names anything.

A pattern is an operator and a dimension, `MatMul:k` or `layers.0.attn*:n`. The operator is a type, a node's name, or a
module path, which means all that lies inside the module. The dimension is one of the operator's loop nests (`k`), a
number for a dimension of its results (`-1` is the last), or a way to run it without a cut of one dimension (`ring`,
`partial`). Both sides take `*`, `?` and `[]` as in file names; `Softmax:*` leaves an operator whole.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from planner.errors import Problem
from planner.graph import Graph
from planner.operators import OpCall, OpSpec, graph_specs, rule_of
from planner.operators.modules import is_called, node_names
from planner.registry import did_you_mean
from planner.sharding.choices import Means
from planner.sharding.layout import named_nests
from planner.sharding.strategies import Strategy

_NUMBER = re.compile(r"-?\d+")


def _sides(pattern: str) -> tuple[str, str]:
    operator, colon, dim = pattern.rpartition(":")
    return (operator, dim) if colon else (pattern, "")


def forbidden_dims(graph: Graph, patterns: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """By node of a graph, the dimensions that some patterns rule out; O(nodes times patterns)."""
    sides = [_sides(pattern) for pattern in patterns]
    return tuple(
        tuple(dict.fromkeys(dim for operator, dim in sides if dim and is_called(node, operator)))
        for node in graph.nodes
    )


def allowed(found: Sequence[Strategy], call: OpCall, dims: Sequence[str]) -> tuple[Strategy, ...]:
    """Those strategies of an operator that cut no dimension that is ruled out, as `forbidden_dims` says."""
    ranks = _result_ranks(call)
    return tuple(s for s in found if not any(_cuts(s, ranks, dim) for dim in dims))


def _cuts(strategy: Strategy, ranks: Sequence[int | None], dim: str) -> bool:
    if _NUMBER.fullmatch(dim):
        number = int(dim)
        return any(
            part.cuts and part.dim == (number if number >= 0 else (ranks[p] or 0) + number)
            for p, layout in strategy.writes
            if p < len(ranks)
            for part in layout
        )
    return any(name and fnmatch.fnmatchcase(name, dim) for name in strategy.splits)


def _result_ranks(call: OpCall) -> tuple[int | None, ...]:
    """Number of dimensions of each result of an operator."""
    return tuple(None if t is None else len(t.shape) for t in call.outputs)


def unmatched(graph: Graph, patterns: Iterable[str]) -> tuple[Problem, ...]:
    """What is wrong with patterns that rule nothing out, one problem a pattern, `where` the pattern itself.

    Found are patterns that are none, that no operator goes by, and dimensions that none of the operators meant has.
    """
    specs: Sequence[OpSpec] | None = None
    found = []
    for pattern in patterns:
        operator, dim = _sides(pattern)
        nodes = [i for i, node in enumerate(graph.nodes) if is_called(node, operator)]
        if not operator or not dim:
            hint = "write an operator and a dimension, as in MatMul:k or layers.0.attn*:n"
            found.append(Problem("a split to forbid has two sides", pattern, hint))
        elif not nodes:
            known = {name for node in graph.nodes for name in node_names(node)}
            found.append(Problem("no operator, node or module has that name", pattern, did_you_mean(operator, known)))
        else:
            specs = specs or graph_specs(graph)
            known = _dims(graph, specs, nodes)
            if not any(fnmatch.fnmatchcase(name, dim) for name in known):
                found.append(Problem(f"none of its {len(nodes)} operators can be split so", pattern, _known(known)))
    return tuple(found)


def _known(dims: set[str]) -> str:
    names = sorted(d for d in dims if not _NUMBER.fullmatch(d))
    return f"known: {', '.join(names)}, or the number of a dimension of the result" if names else "they are never split"


def _dims(graph: Graph, specs: Sequence[OpSpec], nodes: Sequence[int]) -> set[str]:
    """All dimensions by which some nodes could be cut, by name and by number."""
    found: set[str] = set()
    seen: set[int] = set()
    for i in nodes:
        if id(specs[i]) in seen:
            continue
        seen.add(id(specs[i]))
        call = OpCall.of(graph, graph.nodes[i])
        found |= {d.name for nest in named_nests(call, specs[i]) for d in nest.dims}
        most = max((n for n in _result_ranks(call) if n is not None), default=0)
        found |= {str(k) for k in range(-most, most)}
        rule = rule_of(call.op)
        found |= {rule.joint.value} if rule.joint is not None else set()
        found |= {Means.PARTIAL.value} if rule.linear else set()
    return found

"""Limits on the strategies of operators: splits that the user forbids, and the splits of tensor parallel layers.

A pattern of the user is an operator and a dimension, `MatMul:k` or `layers.0.attn*:n`. The operator is a type, the name
of a node, or a module path, which means every operator inside the module. The dimension is one of the operator's loop
nests (`k`), the number of a dimension of its results (`-1` is the last), or a split kind without a single dimension
(`ring`, `partial`). Both sides take `*`, `?` and `[]` as in file names; `Softmax:*` forbids all splits.

Without limits a tensor axis of a mesh may do anything with any operator. Frameworks cut weights of products by columns
or rows, attention by heads, and tensors between layers by the sequence or not at all (Narayanan et al., SC 2021;
Korthikanti et al., 2022). They never gather a weight over the tensor axis while a micro-batch runs; sharded optimizers
over replicas do that.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from planner.errors import Problem
from planner.graph import Graph, Tensor, TensorKind, per_graph
from planner.operators import JointCut, OpCall, OpSpec, call_classes, graph_specs, rule_of
from planner.operators.modules import is_called, node_names
from planner.registry import did_you_mean
from planner.sharding.choices import Options, SplitKind
from planner.sharding.layout import PARTIAL, TensorLayout
from planner.sharding.mesh import AxisRole
from planner.sharding.strategies import Reason, Strategy

_NUMBER = re.compile(r"-?\d+")


def _sides(pattern: str) -> tuple[str, str]:
    operator, colon, dim = pattern.rpartition(":")
    return (operator, dim) if colon else (pattern, "")


def forbidden_dims(graph: Graph, patterns: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """By node of a graph, the dimensions that some patterns forbid; O(nodes times patterns)."""
    sides = [_sides(pattern) for pattern in patterns]
    return tuple(
        tuple(dict.fromkeys(dim for operator, dim in sides if dim and is_called(node, operator)))
        for node in graph.nodes
    )


def allowed(candidates: Sequence[Strategy], call: OpCall, dims: Sequence[str]) -> tuple[Strategy, ...]:
    """The strategies of an operator that cut no forbidden dimension (`forbidden_dims`)."""
    ranks = _result_ranks(call)
    return tuple(s for s in candidates if not any(_cuts(s, ranks, dim) for dim in dims))


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
    """One problem for each pattern that forbids nothing; its `where` is the pattern.

    Causes: the pattern has no two sides, matches no operator, or none of these operators has the dimension.
    """
    specs: Sequence[OpSpec] | None = None
    problems = []
    for pattern in patterns:
        operator, dim = _sides(pattern)
        nodes = [i for i, node in enumerate(graph.nodes) if is_called(node, operator)]
        if not operator or not dim:
            hint = "write an operator and a dimension, as in MatMul:k or layers.0.attn*:n"
            problems.append(Problem("a split to forbid has two sides", pattern, hint))
        elif not nodes:
            known = {name for node in graph.nodes for name in node_names(node)}
            problems.append(
                Problem("no operator, node or module has that name", pattern, did_you_mean(operator, known))
            )
        else:
            specs = specs or graph_specs(graph)
            known = _dims(graph, specs, nodes)
            if not any(fnmatch.fnmatchcase(name, dim) for name in known):
                problems.append(Problem(f"none of its {len(nodes)} operators can be split so", pattern, _known(known)))
    return tuple(problems)


def _known(dims: set[str]) -> str:
    names = sorted(d for d in dims if not _NUMBER.fullmatch(d))
    return f"known: {', '.join(names)}, or the number of a dimension of the result" if names else "they are never split"


def _dims(graph: Graph, specs: Sequence[OpSpec], nodes: Sequence[int]) -> set[str]:
    """All dimensions along which some nodes could be cut, by name and by number."""
    dims: set[str] = set()
    seen: set[int] = set()
    for i in nodes:
        if id(specs[i]) in seen:
            continue
        seen.add(id(specs[i]))
        call = OpCall.of(graph, graph.nodes[i])
        dims |= {d.name for nest in specs[i].nests for d in nest.dims}
        rank = max((n for n in _result_ranks(call) if n is not None), default=0)
        dims |= {str(k) for k in range(-rank, rank)}
        rule = rule_of(call.op)
        dims |= {rule.joint.value} if rule.joint is not None else set()
        dims |= {SplitKind.PARTIAL.value} if rule.linear else set()
    return dims


SMALL = 0.005
"""A weight with less than this fraction of the elements of its block (a router) may be replicated."""

_Operand = tuple[int, Tensor]
"""An operand's position and tensor."""

_HEADS = frozenset("grh")
"""Iteration dimensions of attention that count heads: groups, heads of a group, heads."""

STEP_SPLITS = ("s", "u", "ring")
"""Splits of attention, and of the rotation before it, by queries, by keys, or by both in turn."""


@per_graph
def attention_heads(graph: Graph) -> tuple[int, int]:
    """Greatest common divisors of all attentions' heads and key-value heads; zeros without attention.

    The groups in which heads of a scan share directions divide both: every rank has whole ones (Megatron,
    core/ssm/mamba_mixer.py).
    """
    heads, groups = 0, 0
    specs = graph_specs(graph)
    for i in call_classes(graph).first:
        rule = rule_of(graph.nodes[i].op)
        if rule.joint is JointCut.RING or rule.scans:
            sizes = {d.name: d.size for nest in specs[i].nests for d in nest.dims if d.name in _HEADS}
            own = sizes.get("g", math.prod(sizes.values()))
            heads = math.gcd(heads, own if rule.scans else math.prod(sizes.values()))
            groups = math.gcd(groups, own)
    return heads, groups


def deals_heads(heads: int, groups: int, sizes: Sequence[int]) -> bool:
    """Whether axes can deal out attention heads: each divides the key-value heads left, or, once none are, their heads.

    Args:
        heads: attention heads.
        groups: key-value heads.
        sizes: ranks along each tensor axis, outermost first.
    """
    left, shared = groups, heads // groups
    for size in sizes:
        if left % size == 0:
            left //= size
        elif left == 1 and shared % size == 0:
            shared //= size
        else:
            return False
    return True


@per_graph
def begins_layer(graph: Graph) -> tuple[bool, ...]:
    """By node, whether it reads nothing that a product with weights has made since the last norm or sum of branches.

    Frameworks cut a product with weights that does so by columns, since every rank has all of what it reads; only later
    products of a layer are cut by rows (Shoeybi et al., 2019, section 3). O(nodes).
    """
    made: set[str] = set()
    begins = []
    for node, spec in zip(graph.nodes, graph_specs(graph), strict=True):
        call, rule = OpCall.of(graph, node), rule_of(node.op)
        tensors = [(n, t) for n, t in zip(node.inputs, call.inputs, strict=True) if t is not None]
        own = [(name, tensor) for name, tensor in tensors if tensor.kind is not TensorKind.PARAMETER]
        begins.append(made.isdisjoint(name for name, _ in own))
        results = [tensor.shape for tensor in call.outputs if tensor is not None]
        terms = [name for name, tensor in own if rule.linear and results and tensor.shape == results[0]]
        is_made = not begins[-1] if len(terms) < 2 else made.issuperset(terms)
        if rule.statistics is not None and own and len(own[0][1].shape) < 4:  # of whole rows, not of heads
            is_made = False
        is_made |= bool(spec.matrix_flops) and len(own) < len(tensors)
        made.update(name for name in node.outputs if name and is_made)
    return tuple(begins)


def layer_strategies(
    candidates: Sequence[Strategy], call: OpCall, spec: OpSpec, options: Options, sizes: Sequence[int], elements: int,
    *, begins: bool,
) -> tuple[Strategy, ...]:  # fmt: skip
    """The strategies of an operator that tensor parallel layers have; all if none has, or without `as_layers`.

    Args:
        candidates: strategies of the operator.
        call: the operator.
        spec: description of the operator.
        options: which splits count.
        sizes: ranks along each axis.
        elements: weight elements of the block that the operator is part of.
        begins: whether it begins a layer (`begins_layer`).
    """
    if not options.as_layers:
        return tuple(candidates)
    axes = [axis for axis, size in enumerate(sizes) if size > 1 and options.role(axis) is AxisRole.TENSOR]
    if not axes:
        return tuple(candidates)
    parameters = [(p, t) for p, t in enumerate(call.inputs) if t is not None and t.kind is TensorKind.PARAMETER]

    def fits(strategy: Strategy) -> bool:
        reads, writes = dict(strategy.reads), [layout for _, layout in strategy.writes]
        as_layers = all(cut_as_layers(call, spec, reads, writes, axis, begins=begins) for axis in axes)
        usual = as_layers and all(_in_layers(strategy, call, spec, parameters, axis, sizes, elements) for axis in axes)
        return usual and _cut_alike(reads, parameters, axes)

    return tuple(filter(fits, candidates)) or tuple(candidates)


def _cut_alike(reads: Mapping[int, TensorLayout], parameters: Sequence[_Operand], axes: Sequence[int]) -> bool:
    """Whether all tensor axes that cut a matrix cut it along one dimension: by columns or by rows, never by both."""
    cuts = [{reads[p][a].dim for a in axes if reads[p][a].cuts} for p, _ in parameters if p in reads]
    return all(len(dims) < 2 for dims in cuts)


def cut_as_layers(
    call: OpCall, spec: OpSpec, reads: Mapping[int, TensorLayout], writes: Iterable[TensorLayout], axis: int,
    *, begins: bool,
) -> bool:  # fmt: skip
    """Whether an axis cuts tables by words, and products that begin a layer by columns.

    Args:
        call: the operator.
        spec: description of the operator.
        reads: by input position, the layout in which the input is read; those read whole may be left out.
        writes: the layouts of results.
        axis: index of the mesh axis.
        begins: whether the operator begins a layer (`begins_layer`).
    """
    weights = [p for p, t in enumerate(call.inputs) if t is not None and t.kind is TensorKind.PARAMETER and t.shape[1:]]
    cuts = [reads[p][axis].dim for p in weights if p in reads and reads[p][axis].cuts]
    if spec.matrix_flops:
        return not (begins and cuts and any(layout[axis] == PARTIAL for layout in writes))
    integers = [t for t in call.inputs if t is not None and not t.dtype.is_float]
    by_words = any(t.kind is not TensorKind.CONSTANT for t in integers)  # positions are always the same
    return not by_words or all(dim == 0 for dim in cuts)


def _in_layers(
    strategy: Strategy, call: OpCall, spec: OpSpec, parameters: Sequence[_Operand], axis: int, sizes: Sequence[int],
    elements: int,
) -> bool:  # fmt: skip
    """Whether tensor parallel layers run an operator by a strategy."""
    name, reads = strategy.splits[axis], dict(strategy.reads)
    matrices = [(p, t) for p, t in parameters if len(t.shape) > 1]  # of products, and tables of embeddings
    weights = matrices if spec.matrix_flops else []
    if any(len(weight.shape) > 3 for _, weight in weights):  # a convolution's kernel
        return not name
    for p, weight in (each for each in matrices if len(each[1].shape) < 4):
        even = all(size % sizes[axis] == 0 for size in weight.shape[-2:])
        cut = p in reads and reads[p][axis].cuts  # an operator without a rule says of no operand how it is read
        if even and weight.elements >= SMALL * elements and not cut:
            return False
    if rule_of(call.op).joint is JointCut.RING:
        return name in _HEADS
    if name in STEP_SPLITS:  # queries and keys that no head divides are gathered before they are rotated
        return False
    if spec.matrix_flops and not weights:
        return bool(name) and _by_heads(strategy, call, axis)
    normed = parameters and not weights
    return not (normed and any(e.axis == axis and e.reason is Reason.STATISTICS for e in strategy.exchanges))


def _by_heads(strategy: Strategy, call: OpCall, axis: int) -> bool:
    """Whether a product of two activations is cut along a dimension of both that is not the samples."""
    pairs = [(call.inputs[p], layout) for p, layout in strategy.reads]
    dims = [(layout[axis].dim, len(t.shape)) for t, layout in pairs if t is not None and layout[axis].cuts]
    return len(dims) == len(pairs) and all(dim < rank - 2 and (dim > 0 or rank < 4) for dim, rank in dims)

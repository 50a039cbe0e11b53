"""Megatron-LM's pattern: the first product of a pair cut by columns, the second by rows, what lies between by heads.

The last mesh axis is the tensor axis, all others cut the batch. Products with a weight are matched in pairs: between
two places of the residual stream (a sum of two activations) those that the stream enters are column products, those
that the sum takes in are row products. Outside the pairs the tensor axis cuts the sequence (sequence parallelism) or
does nothing, whichever is faster. Weights rest as they are used. Korthikanti et al., MLSys 2023, figures 4 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from planner.errors import InfeasibleError
from planner.graph import Graph, TensorKind
from planner.operators import OpCall, OpSpec, graph_specs
from planner.sharding.forbidden import split_refusals
from planner.sharding.formulate import formulate
from planner.sharding.layout import Part
from planner.sharding.problem import Choice, Setting
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.ilp import fastest
from planner.sharding.strategies import Strategy


class Role(StrEnum):
    """What an operator is in the pattern."""

    COLUMN = "column"
    ROW = "row"
    INSIDE = "inside"
    """Between a column and a row product: attention, activations."""
    STREAM = "stream"
    """On the residual stream: norms and sums."""


def _weight_product(graph: Graph, i: int, spec: OpSpec) -> bool:
    kinds = [graph.tensors[n].kind for n in graph.nodes[i].inputs if n]
    return spec.matrix_flops > 0 and TensorKind.PARAMETER in kinds


def _residual(graph: Graph, i: int) -> bool:
    """A sum of two activations of one shape."""
    node = graph.nodes[i]
    shapes = [graph.tensors[n].shape for n in node.inputs if n and graph.tensors[n].kind is TensorKind.ACTIVATION]
    return node.op in ("Add", "Sum") and len(shapes) > 1 and len(set(shapes)) == 1


def roles(setting: Setting) -> dict[int, Role]:
    """The role of each node, by index; O(nodes)."""
    graph, specs = setting.graph, graph_specs(setting.graph)
    members = set(setting.members)
    # entered: a weight product lies between the stream and here; leaving: one lies between here and the stream.
    entered: dict[int, bool] = {}
    leaving: dict[int, bool] = {}
    for i in setting.members:
        before = {graph.producer[n] for n in graph.nodes[i].inputs if n in graph.producer} & members
        entered[i] = not _residual(graph, i) and any(entered[b] or _weight_product(graph, b, specs[b]) for b in before
                                                     if not _row_like(graph, b, specs, entered))  # fmt: skip
    for i in reversed(setting.members):
        after = {c for n in graph.nodes[i].outputs for c in graph.consumers.get(n, ())} & members
        leaving[i] = any(not _residual(graph, c) and (leaving[c] or _weight_product(graph, c, specs[c])) for c in after)
    found = {}
    for i in setting.members:
        if _weight_product(graph, i, specs[i]):
            found[i] = Role.ROW if entered[i] and not leaving[i] else Role.COLUMN
        elif entered[i] and leaving[i]:
            found[i] = Role.INSIDE
        else:
            found[i] = Role.STREAM
    return found


def _row_like(graph: Graph, i: int, specs: tuple[OpSpec, ...], entered: Mapping[int, bool]) -> bool:
    """A weight product behind another one: what comes after it is back on the stream."""
    return _weight_product(graph, i, specs[i]) and entered.get(i, False)


def _allowed(strategy: Strategy, role: Role) -> bool:
    """Whether a strategy belongs to the pattern."""
    *data, tensor = strategy.splits
    batch = [layout[a] for _, layout in strategy.writes for a in range(len(data)) if layout]
    if any(part not in (Part(0), Part(-1)) for part in batch):
        return False
    if role is Role.COLUMN:
        return tensor == "n"
    if role is Role.ROW:
        return tensor == "k"
    parts = {layout[-1] for _, layout in strategy.writes}
    if role is Role.STREAM:
        return parts <= {Part(-1), Part(-2), Part(1)}
    return Part(0) not in parts


@SEARCHES.entry("megatron")
def megatron(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The pattern at its best: column and row products fixed, everything else following as it is fastest within memory.

    Raises:
        InfeasibleError: an operator cannot follow the pattern on this mesh, or nothing in the pattern fits.
    """
    plain = replace(setting, sharded_states=False)
    specs, graph = graph_specs(setting.graph), setting.graph
    by_name = {f"op:{graph.nodes[i].key}": (i, role) for i, role in roles(setting).items()}

    def allows(name: str, choice: Choice) -> bool:
        return not isinstance(choice, Strategy) or _allowed(choice, by_name[name][1])

    def refused(name: str) -> InfeasibleError:
        i, role = by_name[name]
        call, key = OpCall.of(graph, graph.nodes[i]), graph.nodes[i].key
        reasons = "; ".join(split_refusals(call, specs[i], setting.mesh.sizes[-1], setting.options).values())
        return InfeasibleError(
            f"{key} cannot be a {role} operator on this mesh" + (f" ({reasons})" if reasons else ""),
            where=key,
            hint="use a tensor axis that divides heads and widths",
        )

    return fastest(
        plain,
        formulate(plain).narrowed(allows, refused),
        memory_bytes,
        method="pattern",
        what="layout of Megatron's pattern",
        hint="use a larger tensor axis or another search",
    )

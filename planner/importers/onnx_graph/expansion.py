"""How many operators a model has once its functions are written out: refused before anything is written out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from planner.errors import ModelError
from planner.importers.onnx_graph.order import subgraphs

if TYPE_CHECKING:
    import onnx

MOST_NODES = 1 << 20
"""Operators of a model at the most, all functions written out."""
MOST_NESTED = 64
"""Depth of calls inside calls at the most."""

_Key = tuple[str, str, str]


def require_bounded(model: onnx.ModelProto, where: str) -> None:
    """Refuse a model whose functions call themselves, or grow beyond `MOST_NODES` operators. Linear in the file.

    Raises:
        ModelError: names the function.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    known: dict[_Key, int] = {}
    calling: list[_Key] = []

    def written_out(nodes: Iterable[onnx.NodeProto]) -> int:
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            count += body_of(key) if key in functions else 1
            count += sum(written_out(graph.node) for graph in subgraphs(node))
        return count

    def body_of(key: _Key) -> int:
        if key in calling or len(calling) >= MOST_NESTED:
            why = "calls itself" if key in calling else f"is called more than {MOST_NESTED} calls deep"
            raise _damaged(f"the function {key[1]!r} {why}", where)
        if key not in known:
            calling.append(key)
            known[key] = written_out(functions[key].node)
            calling.pop()
        return known[key]

    count = written_out(model.graph.node)
    if count > MOST_NODES:
        raise _damaged(f"with its functions written out the model has {count:,} operators, over {MOST_NODES:,}", where)


def _damaged(message: str, where: str) -> ModelError:
    return ModelError(message, where=where, hint="the file is damaged: export it again")

"""Short ways to write tensors, operator calls and graphs down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from planner.graph import DType, Graph, Node, Parameter, Tensor, TensorKind
from planner.operators import OpCall, spec
from planner.sharding import Part, splits

KINDS = {
    "x": TensorKind.ACTIVATION,
    "w": TensorKind.PARAMETER,
    "i": TensorKind.INPUT,
    "c": TensorKind.CONSTANT,
}


def tensor(text: str, name: str = "t") -> Tensor:
    """`"x 2 3"`: activation [2, 3] of float32; `"i:int64 8"`: input [8] of int64. Kinds: x, w, i, c."""
    head, *sizes = text.split()
    kind, _, dtype = head.partition(":")
    return Tensor(name, tuple(map(int, sizes)), DType(dtype or "float32"), KINDS[kind])


def call(
    op: str,
    inputs: Sequence[str | None],
    outputs: Sequence[str | None],
    *,
    opset: int = 20,
    constants: dict[int, tuple[Any, ...]] | None = None,
    **attributes: Any,
) -> OpCall:
    """An operator call over tensors written as above."""
    known = constants or {}
    return OpCall(
        op,
        opset,
        tuple(tensor(text, f"in{k}") if text is not None else None for k, text in enumerate(inputs)),
        tuple(tensor(text, f"out{k}") if text is not None else None for k, text in enumerate(outputs)),
        attributes,
        tuple(known.get(k) for k in range(len(inputs))),
    )


def graph(tensors: dict[str, str], nodes: Sequence[Node], *, frozen: Sequence[str] = ()) -> Graph:
    """A graph over named tensors; parameters are those of kind w, trainable unless frozen."""
    made = {name: tensor(text, name) for name, text in tensors.items()}
    weights = [t for t in made.values() if t.kind is TensorKind.PARAMETER]
    produced = {name for node in nodes for name in node.outputs}
    return Graph(
        name="hand",
        fingerprint="",
        nodes=tuple(nodes),
        tensors=made,
        inputs=tuple(t.name for t in made.values() if t.kind is TensorKind.INPUT),
        outputs=(nodes[-1].outputs[0],),
        parameters=tuple(
            Parameter(t.name, t.name, t.shape, t.dtype, trainable=t.name not in frozen)
            for t in weights
            if t.name not in produced
        ),
        sources={t.name: (t.name,) for t in weights if t.name not in produced},
        opset=20,
    )


def node(op: str, inputs: str, output: str, *, repeat: int = 1, **attributes: Any) -> Node:
    """A node by the names of its tensors."""
    outputs = tuple(output.split())
    return Node(outputs[0], op, tuple(inputs.split()), outputs, attributes, repeat=repeat)


class Split(NamedTuple):
    """One split: its dimension, how large it is, what becomes of operands and results, whether borders are needed."""

    dim: str
    size: int
    reads: dict[int, Part]
    writes: dict[int, Part]
    windowed: bool


def splits_of(what: OpCall) -> list[Split]:
    """Every legal split of a call."""
    nests = spec(what).nests
    sizes = {d.name: d.size for nest in nests for d in nest.dims}
    windows = {access.dims[k][0] for nest in nests for access in nest.reads for k, width in access.halo if width}
    return [Split(name, sizes[name], *parts, name in windows) for name, parts in splits(nests).items()]

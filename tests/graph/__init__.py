"""Helpers to write small graphs down by hand."""

from __future__ import annotations

from planner.graph import DType, Graph, Node, Parameter, Tensor, TensorKind


def make_graph(lines: list[str], *, inputs: tuple[str, ...] = ("x",), size: int = 4) -> Graph:
    """A graph from lines `out = op(in, ...)`; names starting with `w` are parameters; all tensors have `size` elements.

    A line may start with `module:` in brackets, `[layers.0] h = MatMul(x, w0)`, and end with `#bytes` of elements.
    """
    tensors: dict[str, Tensor] = {n: Tensor(n, (size,), DType.FLOAT32, TensorKind.INPUT) for n in inputs}
    nodes: list[Node] = []
    parameters: dict[str, Parameter] = {}
    for line in lines:
        module, _, rest = line.rpartition("]")
        text, _, count = rest.partition("#")
        out, _, call = text.strip().partition(" = ")
        op, _, args = call.strip().rstrip(")").partition("(")
        reads = tuple(a.strip() for a in args.split(",") if a.strip())
        for name in reads:
            if name.startswith("w") and name not in parameters:
                parameters[name] = Parameter(name, name, (size,), DType.FLOAT32)
                tensors[name] = Tensor(name, (size,), DType.FLOAT32, TensorKind.PARAMETER)
        tensors[out] = Tensor(out, (int(count) if count else size,), DType.FLOAT32, TensorKind.ACTIVATION)
        nodes.append(Node(out, op, reads, (out,), {}, module.lstrip("[")))
    return Graph(
        "hand", "0", tuple(nodes), tensors, inputs, (nodes[-1].key,), tuple(parameters.values()),
        {name: (name,) for name in parameters},
    )  # fmt: skip

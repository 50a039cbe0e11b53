"""DLRM: recommendation from dense features and categorical ones, whose embedding tables hold nearly all weights.

A sample reads one row of each table. The rows and the vector of dense features are multiplied pairwise, and fully
connected layers turn the products into one logit. Weights have the names of the original implementation.
"""

from __future__ import annotations

from . import _layers as layers
from . import _ops as ops
from ._config import Config, ModelBuildError, typed
from ._graph import ElementType, GraphBuilder, Value

OPSET = 20


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a DLRM of dense features [batch, 13] and categorical ones [batch, tables]; it ends at a logit [batch, 1].

    `bottom` are the widths of the layers on the dense features, `top` those on the products.

    Raises:
        ModelBuildError: there is no table, or the layers do not end at a row's width and at 1.
    """
    tables, width = c["tables"], c["width"]
    if not tables or c["bottom"][-1:] != [width] or c["top"][-1:] != [1]:
        raise ModelBuildError(
            f"tables of width {width} with layers {c['bottom']} and {c['top']}",
            "give at least one table, bottom layers that end at its width, and top layers that end at 1",
        )
    dense = g.input("dense", (batch, c["dense"]))
    sparse = g.input("sparse", (batch, len(tables)), ElementType.INT64)
    with g.scope("bot_l"):
        x = _mlp(g, dense, c["bottom"], last_relu=True)
    rows = [x]
    with g.scope("emb_l"):
        for table, count in enumerate(tables):
            with g.scope(str(table)):
                index = ops.gather(g, sparse, g.constant(table), axis=1)
                rows.append(ops.gather(g, g.parameter("weight", (count, width)), index))
    with g.scope("interact"):
        features = _interactions(g, rows, width)
    with g.scope("top_l"):
        g.output(_mlp(g, ops.concat(g, (x, features), 1), c["top"], last_relu=False))


def _mlp(g: GraphBuilder, x: Value, widths: list[int], *, last_relu: bool) -> Value:
    """Fully connected layers with ReLU between them; linear layers take even indices."""
    for index, width in enumerate(widths):
        x = layers.linear(g, x, width, str(2 * index))
        if last_relu or index < len(widths) - 1:
            with g.scope(str(2 * index + 1)):
                x = ops.unary(g, "Relu", x)
    return x


def _interactions(g: GraphBuilder, rows: list[Value], width: int) -> Value:
    """Products of each pair of vectors, each pair once: [b, n * (n - 1) / 2]."""
    count = len(rows)
    stacked = ops.reshape(g, ops.concat(g, rows, 1), (0, count, width))
    products = ops.matmul(g, stacked, ops.transpose(g, stacked, (0, 2, 1)))
    lower = [i * count + j for i in range(count) for j in range(i)]
    return ops.gather(g, ops.reshape(g, products, (0, count * count)), g.constant(lower), axis=1)


MODEL_TYPES = typed({"dlrm": construct}, OPSET)

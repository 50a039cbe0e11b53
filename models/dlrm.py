"""DLRM: recommendation from dense features and categorical ones, whose embedding tables hold nearly all weights.

One row is read from each table; rows and the dense features' vector are multiplied pairwise, and fully connected layers
make one logit of that. Weights have the names of the original implementation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._graph import ElementType, GraphBuilder, Value
from ._types import Entry, ModelInfo

OPSET = 20


@dataclass(frozen=True, slots=True)
class DLRMSize:
    """Sizes of a DLRM.

    Attributes:
        tables: rows of each embedding table.
        width: width of an embedding row.
        bottom: widths of the layers on the dense features; the last is `width`.
        top: widths of the layers on the products; the last is 1.
        dense: number of dense features.
    """

    tables: tuple[int, ...]
    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dense: int = 13


def construct(size: DLRMSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a DLRM of dense features [batch, 13] and categorical ones [batch, tables]; it ends at a logit [batch, 1]."""
    dense = g.input("dense", (batch, size.dense))
    sparse = g.input("sparse", (batch, len(size.tables)), ElementType.INT64)
    with g.scope("bot_l"):
        x = _mlp(g, dense, size.bottom, last_relu=True)
    rows = [x]
    with g.scope("emb_l"):
        for table, count in enumerate(size.tables):
            with g.scope(str(table)):
                index = ops.gather(g, sparse, g.constant(table), axis=1)
                rows.append(ops.gather(g, g.parameter("weight", (count, size.width)), index))
    with g.scope("interact"):
        features = _interactions(g, rows, size.width)
    with g.scope("top_l"):
        g.output(_mlp(g, ops.concat(g, (x, features), 1), size.top, last_relu=False))


def _mlp(g: GraphBuilder, x: Value, widths: tuple[int, ...], *, last_relu: bool) -> Value:
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


_TERABYTE = DLRMSize(
    (39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
     14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
    128, (512, 256, 128), (1024, 1024, 512, 256, 1),
)  # fmt: skip
_KAGGLE = DLRMSize(
    (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
     2173, 4, 7046547, 18, 15, 286181, 105, 142572),
    16, (512, 256, 64, 16), (512, 256, 1),
)  # fmt: skip
_NAUMOV = "Naumov et al. 2019, Deep Learning Recommendation Model"

_SIZES = {
    "dlrm-kaggle": (_KAGGLE, 540_000_000, "Criteo Kaggle tables", f"{_NAUMOV}; sizes of its Kaggle benchmark"),
    "dlrm": (_TERABYTE, 24_036_595_969, "Criteo Terabyte tables", f"{_NAUMOV}; MLPerf training v1.0 sizes"),
}

MODELS = {
    name: Entry(
        ModelInfo(name, "dlrm", text, len(size.bottom) + len(size.top), count, None, None, source),
        OPSET,
        functools.partial(construct, size),
    )
    for name, (size, count, text, source) in _SIZES.items()
}

"""VGG and AlexNet for 224 x 224 images: convolutions, then three fully connected layers with most of the weights.

Weights have torchvision's names.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import GraphBuilder, Value

OPSET = 20

Feature = tuple[int, int, int, int] | int
"""A convolution with a ReLU (channels, side of its window, stride, padding), or a pool by the side of its windows,
which are two apart."""
_ALEXNET: Sequence[Feature] = (
    (64, 11, 4, 2), 3, (192, 5, 1, 2), 3, (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1), 3,
)  # fmt: skip


def construct(
    c: Config, g: GraphBuilder, batch: int, features: Sequence[Feature], linear: tuple[int, int, int]
) -> None:
    """Add a net that reads `image` [batch, 3, height, width] and ends at logits [batch, classes].

    Args:
        c: its configuration.
        g: the graph.
        batch: images.
        features: convolutions and pools, in order.
        linear: indices of the fully connected layers in `classifier` (dropout and ReLU take indices too).
    """
    x = g.input("image", (batch, 3, c["image_size"], c["image_size"]))
    with g.scope("features"):
        index = 0
        for layer in features:
            x, index = _feature(g, x, layer, index)
    x = ops.flatten(g, x)
    with g.scope("classifier"):
        for index, width in zip(linear, (4096, 4096, c["num_labels"]), strict=True):
            x = layers.linear(g, x, width, str(index))
            if index != linear[-1]:
                with g.scope(str(index + 1)):
                    x = ops.unary(g, "Relu", x)
    g.output(x)


def _feature(g: GraphBuilder, x: Value, layer: Feature, index: int) -> tuple[Value, int]:
    """One convolution with its ReLU or one pool at an index of `features`, and the next free index."""
    if isinstance(layer, int):
        with g.scope(str(index)):
            return ops.max_pool(g, x, kernel=layer, stride=2), index + 1
    channels, kernel, stride, pad = layer
    with g.scope(str(index)):
        weight = g.parameter("weight", (channels, x.shape[1], kernel, kernel))
        bias = g.parameter("bias", (channels,), fill=0.0)
        x = ops.conv(g, x, weight, bias, stride=stride, pad=pad)
    with g.scope(str(index + 1)):
        return ops.unary(g, "Relu", x), index + 2


def _vgg(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """So many 3 x 3 convolutions in each of five groups, a pool after each."""
    features: list[Feature] = []
    for count, width in zip(c["groups"], (64, 128, 256, 512, 512), strict=True):
        features += [(width, 3, 1, 1)] * count + [2]
    construct(c, g, batch, features, (0, 3, 6))


def _alexnet(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    construct(c, g, batch, _ALEXNET, (1, 4, 6))


MODEL_TYPES = typed({"vgg": _vgg, "alexnet": _alexnet}, OPSET)

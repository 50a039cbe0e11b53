"""VGG and AlexNet for 224 x 224 images: convolutions, then three fully connected layers with most of the weights.

Weights have torchvision's names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import GraphBuilder, Value

OPSET = 20


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution followed by a ReLU."""

    channels: int
    kernel: int = 3
    stride: int = 1
    pad: int = 1


@dataclass(frozen=True, slots=True)
class VGGSize:
    """Sizes of a plain convolutional net.

    Attributes:
        features: convolutions in order, and pools, each by the side of its windows, which are two apart.
        linear: indices of the fully connected layers in `classifier` (dropout and ReLU take indices too).
        classes: size of the result.
        image: height and width of the input.
    """

    features: tuple[Conv | int, ...]
    linear: tuple[int, int, int] = (0, 3, 6)
    classes: int = 1000
    image: int = 224


def construct(size: VGGSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a net that reads `image` [batch, 3, height, width] and ends at logits [batch, classes]."""
    x = g.input("image", (batch, 3, size.image, size.image))
    with g.scope("features"):
        index = 0
        for layer in size.features:
            x, index = _feature(g, x, layer, index)
    x = ops.flatten(g, x)
    with g.scope("classifier"):
        for index, features in zip(size.linear, (4096, 4096, size.classes), strict=True):
            x = layers.linear(g, x, features, str(index))
            if index != size.linear[-1]:
                with g.scope(str(index + 1)):
                    x = ops.unary(g, "Relu", x)
    g.output(x)


def _feature(g: GraphBuilder, x: Value, layer: Conv | int, index: int) -> tuple[Value, int]:
    """One convolution with its ReLU or one pool at an index of `features`, and the next free index."""
    if isinstance(layer, int):
        with g.scope(str(index)):
            return ops.max_pool(g, x, kernel=layer, stride=2), index + 1
    with g.scope(str(index)):
        weight = g.parameter("weight", (layer.channels, x.shape[1], layer.kernel, layer.kernel))
        bias = g.parameter("bias", (layer.channels,), fill=0.0)
        x = ops.conv(g, x, weight, bias, stride=layer.stride, pad=layer.pad)
    with g.scope(str(index + 1)):
        return ops.unary(g, "Relu", x), index + 2


def _vgg(*groups: int) -> VGGSize:
    """So many 3 x 3 convolutions in each of five groups, a pool after each."""
    widths = (64, 128, 256, 512, 512)
    features: list[Conv | int] = []
    for count, width in zip(groups, widths, strict=True):
        features += [Conv(width)] * count + [2]
    return VGGSize(tuple(features))


_ALEXNET = VGGSize(
    (Conv(64, 11, 4, 2), 3, Conv(192, 5, 1, 2), 3, Conv(384), Conv(256), Conv(256), 3),
    linear=(1, 4, 6),
)


def _sized(c: Config, size: VGGSize) -> VGGSize:
    return replace(size, classes=c["num_labels"], image=c["image_size"])


MODEL_TYPES = typed({"vgg": lambda c: _sized(c, _vgg(*c["groups"])), "alexnet": lambda c: _sized(c, _ALEXNET)})

"""ResNet for 224 x 224 images, in training form: batch normalisation is kept as an operator and not folded away.

Weights have torchvision's names; the 1.5 variant (stride in the 3 x 3 convolution) is what everyone trains.
"""

from __future__ import annotations

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import GraphBuilder, Value

OPSET = 20
WIDTHS = (64, 128, 256, 512)


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a ResNet that reads `image` [batch, 3, height, width] and ends at logits [batch, classes].

    `blocks` are the residual blocks of each of the four groups; `bottleneck` blocks have three convolutions with a
    fourfold wider end, instead of two.
    """
    x = g.input("image", (batch, 3, c["image_size"], c["image_size"]))
    x = _relu(g, _normalised(g, x, 64, 7, 2, "conv1", "bn1"), "relu")
    with g.scope("maxpool"):
        x = ops.max_pool(g, x, kernel=3, stride=2, pad=1)
    for group, (count, width) in enumerate(zip(c["blocks"], WIDTHS, strict=True), start=1):
        for block in range(count):
            with g.scope(f"layer{group}"), g.scope(str(block)):
                x = _block(c, g, x, width, 2 if group > 1 and block == 0 else 1)
    with g.scope("avgpool"):
        x = g.node("GlobalAveragePool", [x], (*x.shape[:2], 1, 1))
    g.output(layers.linear(g, ops.flatten(g, x), c["num_labels"], "fc"))


def _block(c: Config, g: GraphBuilder, x: Value, width: int, stride: int) -> Value:
    """One residual block; its input is projected where the shape changes."""
    if c["bottleneck"]:
        y = _relu(g, _normalised(g, x, width, 1, 1, "conv1", "bn1"), "relu")
        y = _relu(g, _normalised(g, y, width, 3, stride, "conv2", "bn2"), "relu")
        y = _normalised(g, y, 4 * width, 1, 1, "conv3", "bn3")
    else:
        y = _relu(g, _normalised(g, x, width, 3, stride, "conv1", "bn1"), "relu")
        y = _normalised(g, y, width, 3, 1, "conv2", "bn2")
    if x.shape != y.shape:
        with g.scope("downsample"):
            x = _normalised(g, x, y.shape[1], 1, stride, "0", "1")
    return _relu(g, ops.add(g, y, x), "relu")


def _relu(g: GraphBuilder, x: Value, name: str) -> Value:
    with g.scope(name):
        return ops.unary(g, "Relu", x)


def _normalised(g: GraphBuilder, x: Value, channels: int, kernel: int, stride: int, conv: str, norm: str) -> Value:
    """A convolution without bias, then batch normalisation in training mode (running statistics as further results)."""
    with g.scope(conv):
        weight = g.parameter("weight", (channels, x.shape[1], kernel, kernel))
        x = ops.conv(g, x, weight, None, stride=stride, pad=kernel // 2)
    with g.scope(norm):
        names = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
        scale, bias, mean, variance = (g.parameter(name, (channels,), fill=fill) for name, fill in names.items())
        normalised, _, _ = g.node_with(
            "BatchNormalization",
            [x, scale, bias, mean, variance],
            [(x.shape, x.dtype), ((channels,), x.dtype), ((channels,), x.dtype)],
            attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1},
        )
    return normalised


MODEL_TYPES = typed({"resnet": construct}, OPSET)

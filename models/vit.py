"""Vision Transformers for 224 x 224 images with a class token and LayerNorm before each layer.

Weights have the names and layouts of the Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._config import Config, size_from, sized, typed
from ._graph import GraphBuilder, Value

OPSET = 20
EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class ViTSize:
    """Sizes of a Vision Transformer.

    Attributes:
        layers: number of encoder layers.
        hidden: width of the residual stream.
        heads: attention heads.
        ffn: inner width of the feed-forward layer.
        patch: height and width of a patch.
        image: height and width of the input.
        classes: size of the result.
        channels: colours of the input.
        qkv_bias: queries, keys and values have biases.
    """

    layers: int = sized("num_hidden_layers")
    hidden: int = sized("hidden_size")
    heads: int = sized("num_attention_heads")
    ffn: int = sized("intermediate_size")
    patch: int = sized("patch_size", default=16)
    image: int = sized("image_size", default=224)
    classes: int = 1000
    channels: int = sized("num_channels", default=3)
    qkv_bias: bool = sized("qkv_bias", default=True)


def construct(size: ViTSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a model that reads `pixel_values` [batch, channels, h, w] and ends at logits [batch, classes]."""
    pixels = g.input("pixel_values", (batch, size.channels, size.image, size.image))
    with g.scope("vit"):
        with g.scope("embeddings"):
            x = _embeddings(size, g, pixels)
        for layer in range(size.layers):
            with g.scope(f"layers.{layer}"):
                x = _layer(size, g, x)
        x = layers.layer_norm(g, x, "layernorm", epsilon=EPSILON)
    first = ops.gather(g, x, g.constant(0), axis=1)
    g.output(layers.linear(g, first, size.classes, "classifier"))


def _embeddings(size: ViTSize, g: GraphBuilder, pixels: Value) -> Value:
    """Patches as vectors behind a class token, positions added: [b, patches + 1, hidden]."""
    with g.scope("patch_embeddings"):
        with g.scope("projection"):
            weight = g.parameter("weight", (size.hidden, size.channels, size.patch, size.patch))
            bias = g.parameter("bias", (size.hidden,), fill=0.0)
            patches = ops.conv(g, pixels, weight, bias, stride=size.patch)
        patches = ops.transpose(g, ops.reshape(g, patches, (0, 0, -1)), (0, 2, 1))
    token = ops.expand_batch(g, g.parameter("cls_token", (1, 1, size.hidden)), patches)
    x = ops.concat(g, (token, patches), 1)
    return ops.add(g, x, g.parameter("position_embeddings", (1, x.shape[1], size.hidden)))


def _layer(size: ViTSize, g: GraphBuilder, x: Value) -> Value:
    """One encoder layer of [b, s, hidden]."""
    normed = layers.layer_norm(g, x, "layernorm_before", epsilon=EPSILON)
    with g.scope("attention"):
        q, k, v = (
            layers.split_heads(g, layers.linear(g, normed, size.hidden, name, bias=size.qkv_bias), size.heads)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        merged = layers.merge_heads(g, layers.attention(g, q, k, v))
        attended = layers.linear(g, merged, size.hidden, "o_proj")
    x = ops.add(g, attended, x)
    normed = layers.layer_norm(g, x, "layernorm_after", epsilon=EPSILON)
    with g.scope("mlp"):
        inner = layers.gelu(g, layers.linear(g, normed, size.ffn, "fc1"))
        changed = layers.linear(g, inner, size.hidden, "fc2")
    return ops.add(g, changed, x)


def _size(c: Config) -> object:
    return size_from(ViTSize, c, classes=c["num_labels"] or len(c["id2label"] or ()) or 1000)


MODEL_TYPES = typed({"vit": _size}, ViTSize)

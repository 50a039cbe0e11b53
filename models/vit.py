"""Vision Transformers for 224 x 224 images with a class token and LayerNorm before each layer.

Weights have the names and layouts of the Hugging Face checkpoints.
"""

from __future__ import annotations

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import GraphBuilder, Value

OPSET = 20
EPSILON = 1e-12


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a model that reads `pixel_values` [batch, channels, h, w] and ends at logits [batch, classes]."""
    pixels = g.input("pixel_values", (batch, c["num_channels"], c["image_size"], c["image_size"]))
    with g.scope("vit"):
        with g.scope("embeddings"):
            x = _embeddings(c, g, pixels)
        for layer in range(c["num_hidden_layers"]):
            with g.scope(f"layers.{layer}"):
                x = _layer(c, g, x)
        x = layers.layer_norm(g, x, "layernorm", epsilon=EPSILON)
    first = ops.gather(g, x, g.constant(0), axis=1)
    classes = c["num_labels"] or len(c["id2label"] or ()) or 1000
    g.output(layers.linear(g, first, classes, "classifier"))


def _embeddings(c: Config, g: GraphBuilder, pixels: Value) -> Value:
    """Patches as vectors behind a class token, positions added: [b, patches + 1, hidden]."""
    hidden, patch = c["hidden_size"], c["patch_size"]
    with g.scope("patch_embeddings"):
        with g.scope("projection"):
            weight = g.parameter("weight", (hidden, c["num_channels"], patch, patch))
            bias = g.parameter("bias", (hidden,), fill=0.0)
            patches = ops.conv(g, pixels, weight, bias, stride=patch)
        patches = ops.transpose(g, ops.reshape(g, patches, (0, 0, -1)), (0, 2, 1))
    token = ops.expand_batch(g, g.parameter("cls_token", (1, 1, hidden)), patches)
    x = ops.concat(g, (token, patches), 1)
    return ops.add(g, x, g.parameter("position_embeddings", (1, x.shape[1], hidden)))


def _layer(c: Config, g: GraphBuilder, x: Value) -> Value:
    """One encoder layer of [b, s, hidden]."""
    hidden = c["hidden_size"]
    normed = layers.layer_norm(g, x, "layernorm_before", epsilon=EPSILON)
    with g.scope("attention"):
        q, k, v = (
            layers.split_heads(g, layers.linear(g, normed, hidden, name, bias=c["qkv_bias"]), c["num_attention_heads"])
            for name in ("q_proj", "k_proj", "v_proj")
        )
        merged = layers.merge_heads(g, layers.attention(g, q, k, v))
        attended = layers.linear(g, merged, hidden, "o_proj")
    x = ops.add(g, attended, x)
    normed = layers.layer_norm(g, x, "layernorm_after", epsilon=EPSILON)
    with g.scope("mlp"):
        inner = layers.gelu(g, layers.linear(g, normed, c["intermediate_size"], "fc1"))
        changed = layers.linear(g, inner, hidden, "fc2")
    return ops.add(g, changed, x)


MODEL_TYPES = typed({"vit": construct}, OPSET)

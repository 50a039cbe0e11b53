"""Attention and rotary embedding."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import OperatorCall, rule


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape [b, s, heads * d] to [b, heads, s, d]; tensors of four dimensions are returned unchanged."""
    return x if x.dim() == 4 else x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def window(queries: torch.Tensor, keys: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Mask [q, k] of a window of keys before and after each query (-1: all), from the positions of both."""
    distance = keys[None, :] - queries[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if before < 0 else seen & (distance >= -before)
    return seen if after < 0 else seen & (distance <= after)


def _positions(q: torch.Tensor, k: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries, of which the first is given, and of keys."""
    queries = torch.arange(first, first + q.shape[2], device=q.device)
    return queries, torch.arange(k.shape[2], device=k.device)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, *, causal: bool = False
) -> torch.Tensor:
    """Scaled dot-product attention as one kernel, which keeps its operands, its result and a number for each row.

    On the meta device the kernels are named, since torch chooses one by the device: of a GPU, which reads grouped keys
    as they are, and, where there is a mask, a processor's. No mask that needs a gradient can be given.

    Args:
        q: queries [b, heads, queries, d].
        k: keys [b, key heads, keys, d].
        v: values [b, key heads, keys, d].
        mask: added to the scores, or true where a query sees a key; broadcasts to [b, heads, queries, keys].
        scale: factor of the scores.
        causal: query i sees keys 0 to i only; without a mask.
    """
    groups = q.shape[1] // k.shape[1]
    if not q.is_meta:
        mask = mask if mask is None or mask.dtype in (torch.bool, q.dtype) else mask.to(q.dtype)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    kernels: Any = torch.ops.aten
    if mask is None:
        results = kernels._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
        results = kernels._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return cast(torch.Tensor, results[0])


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, seen: torch.Tensor | None,
    scale: float, softcap: float, sinks: torch.Tensor | None = None, *, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(q k' * scale + bias) v with grouped keys; `sinks` [heads] are scores without a value.

    One kernel does it, unless scores are capped or have sinks, values are wider than keys, or the bias is trained.
    `causal` says of a mask `seen` that it hides later keys and nothing else.
    """
    trained = bias is not None and bias.requires_grad
    if not softcap and sinks is None and not trained and q.shape[-1] == v.shape[-1] and v.is_floating_point():
        if causal and bias is None:
            return fused_attention(q, k, v, None, scale, causal=True)
        if bias is None or seen is None:
            return fused_attention(q, k, v, seen if bias is None else bias, scale)
        return fused_attention(q, k, v, bias.masked_fill(~seen, -torch.inf), scale)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q * math.sqrt(scale)) @ (k * math.sqrt(scale)).transpose(-1, -2)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v
    shares = torch.softmax(scores, -1)
    # A query that sees no key gets nothing.
    shares = shares if seen is None else shares.masked_fill(~seen, 0.0)
    return shares @ v


@rule("Attention")
def _attention(c: OperatorCall) -> list[torch.Tensor]:
    if c.outputs > 3 or c.has(6):
        raise ModelError("Attention with scores as a result or padded keys has no torch rule", where=c.name)
    three = c[0].dim() == 3
    q = _heads(c[0], int(c.attr("q_num_heads", 0)))
    k, v = (_heads(c[i], int(c.attr("kv_num_heads", 0))) for i in (1, 2))
    if c.has(4):
        k, v = torch.cat([c[4], k], 2), torch.cat([c[5], v], 2)
    mask, bias, seen, causal = c.get(3), None, None, False
    if mask is not None and mask.dtype == torch.bool:
        seen = mask
    elif mask is not None:
        bias = mask
    before, after = int(c.attr("left_window_size", -1)), int(c.attr("right_window_size", -1))
    if c.has(4) and max(before, after) >= 0:
        raise ModelError(
            "Attention with a window over a cache has no torch rule", where=c.name, hint="export for training"
        )
    if c.attr("is_causal", 0):
        after = 0 if after < 0 else min(after, 0)
    if before >= 0 or after >= 0:
        # Queries are aligned with the first keys where no past precedes them.
        first = k.shape[2] - q.shape[2] if c.has(4) else 0
        causal = seen is None and before < 0 and after == 0 and first == 0
        visible = window(*_positions(q, k, first), before, after)
        seen = visible if seen is None else seen & visible
    scale = c.attr("scale") or 1.0 / math.sqrt(q.shape[-1])
    y = _attended(q, k, v, bias, seen, scale, c.attr("softcap", 0.0), causal=causal)
    y = y.transpose(1, 2).flatten(2) if three else y
    return [y, k, v]


@rule("com.microsoft.GroupQueryAttention")
def _group_query_attention(c: OperatorCall) -> list[torch.Tensor]:
    if any(c.has(i) for i in (3, 4, 7, 8, 9, 10)) or not c.has(1) or c.outputs > 1 or c.attr("do_rotary", 0):
        raise ModelError("GroupQueryAttention with a cache has no torch rule", where=c.name, hint="export for training")
    q = _heads(c[0], int(c.attr("num_heads")))
    k, v = (_heads(c[i], int(c.attr("kv_num_heads"))) for i in (1, 2))
    width, first = int(c.attr("local_window_size", -1)), k.shape[2] - q.shape[2]
    seen = window(*_positions(q, k, first), width - 1 if width > 0 else -1, 0)
    scale = c.attr("scale") or 1.0 / math.sqrt(q.shape[-1])
    y = _attended(q, k, v, None, seen, scale, c.attr("softcap", 0.0), c.get(11), causal=width <= 0 and not first)
    return [y.transpose(1, 2).flatten(2)]


@rule("RotaryEmbedding")
def _rotary_embedding(c: OperatorCall) -> torch.Tensor:
    x = c[0]
    heads = int(c.attr("num_heads", 0))
    turned = x.reshape(x.shape[0], x.shape[1], heads, -1) if x.dim() == 3 else x.transpose(1, 2)
    width = int(c.attr("rotary_embedding_dim", 0)) or turned.shape[-1]
    options = c.get(3), width, bool(c.attr("interleaved", 0))
    trained = c[1].requires_grad or c[2].requires_grad
    y = _rotated(turned, c[1], c[2], *options) if trained else _Rotation.apply(turned, c[1], c[2], *options)
    return y.reshape(x.shape) if x.dim() == 3 else y.transpose(1, 2)


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: torch.Tensor | None, width: int, interleaved: bool
) -> torch.Tensor:
    """Pairs of numbers of x [b, s, heads, d] turned by angles.

    Args:
        x: of which the first `width` numbers of each head are turned.
        cos: cosines [b, s, width / 2], or a table of which `places` [b, s] gives the rows.
        sin: sines, likewise.
        places: rows of the tables; None without tables.
        width: how many numbers of a head are turned.
        interleaved: whether neighbours are a pair, not numbers of the two halves.
    """
    if places is not None:
        cos, sin = cos[places.long()], sin[places.long()]
    cos, sin = cos[..., : width // 2].unsqueeze(2), sin[..., : width // 2].unsqueeze(2)
    part, rest = x[..., :width], x[..., width:]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
    done = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat([done, rest], -1) if rest.shape[-1] else done


class _Rotation(torch.autograd.Function):  # type: ignore[misc]
    """As `_rotated`; keeps the tables, and turns gradients back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: torch.Tensor | None, *options: Any,  # noqa: ANN401
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(cos, sin, places)
        ctx.options = options
        return _rotated(x, cos, sin, places, *options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        cos, sin, places = ctx.saved_tensors
        return _rotated(gradient, cos, -sin, places, *ctx.options), None, None, None, None, None

"""Mixture-of-experts layers: a gate chooses experts for each token, each expert has a fixed capacity.

The tokens of one sample are a group, as in GShard: an expert has `capacity` places for each group, tokens beyond that
are dropped (the residual connection carries them). All experts run as one batched matrix product
`[experts, groups * capacity, hidden] x [experts, hidden, ffn]`: work counts the places, not experts times tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._graph import ElementType, GraphBuilder, Value
from ._layers import Activation


@dataclass(frozen=True, slots=True)
class MoE:
    """Sizes of mixture-of-experts layers.

    Attributes:
        experts: number of experts.
        top_k: experts a token is sent to.
        capacity_factor: places of an expert over the tokens it would get under perfect balance.
        renormalise: make the gate's weights of the chosen experts sum to 1.
        one_hot: tokens reach their experts by products with a one-hot matrix [tokens, experts * capacity], as GShard
            and Switch do on TPUs; else rows are gathered by index, without multiplications.
        gated: experts are gated (two inner matrices, kept as one) instead of plain.
        sigmoid: the gate scores each expert on its own by a sigmoid, instead of all by a softmax.
        correction: a bias on the scores that choose experts, not on their weights; balances load without a loss
            (DeepSeek-V3).
        scale: factor on the weights of the chosen experts.
        bias: gate and experts have biases.
        latent: width of the experts' input and output, with projections before and after; 0 for the tokens' width.
    """

    experts: int
    top_k: int
    capacity_factor: float = 1.0
    renormalise: bool = True
    one_hot: bool = False
    gated: bool = False
    sigmoid: bool = False
    correction: bool = False
    scale: float = 1.0
    bias: bool = False
    latent: int = 0

    def capacity(self, tokens: int) -> int:
        """Places of an expert for a group of that many tokens."""
        return max(1, math.ceil(self.top_k * tokens * self.capacity_factor / self.experts))


@dataclass(frozen=True, slots=True)
class _Routing:
    """Expert and place of each choice of a token; first choices come first, so that second ones are dropped first."""

    expert: Value
    """[b, k * s] the chosen expert."""
    position: Value
    """[b, k * s] the place in that expert, counted from 0; at or beyond the capacity when there is none left."""
    chosen: Value
    """[b, k * s, experts] one-hot of the chosen expert."""
    weight: Value
    """[b, k, s, 1] the gate's weight."""


def mixture(g: GraphBuilder, x: Value, moe: MoE, ffn: int, activation: Activation) -> Value:
    """A mixture-of-experts feed-forward layer of [b, s, hidden]."""
    routing = _route(g, x, moe)
    if not moe.latent:
        return _dispatched(g, x, routing, moe, ffn, activation)
    narrow = layers.linear(g, x, moe.latent, "fc1_latent_proj", bias=False)
    result = _dispatched(g, narrow, routing, moe, ffn, activation)
    return layers.linear(g, result, x.shape[2], "fc2_latent_proj", bias=False)


def _dispatched(g: GraphBuilder, x: Value, routing: _Routing, moe: MoE, ffn: int, activation: Activation) -> Value:
    """Send tokens [b, s, width] to their experts; for each token the weighted sum of the results."""
    capacity = moe.capacity(x.shape[1])
    if moe.one_hot:
        dispatch, combine = _einsum_matrices(g, routing, moe, capacity)
        rows = ops.matmul(g, ops.transpose(g, dispatch, (0, 2, 1)), x)
        return ops.matmul(g, combine, _experts(g, rows, moe, capacity, ffn, activation))
    kept = ops.binary(g, "Less", routing.position, g.constant(capacity), ElementType.BOOL)
    places = moe.experts * capacity
    slot = ops.add(g, ops.mul(g, routing.expert, g.constant(capacity)), routing.position)
    rows = ops.gather_rows(g, x, _tokens_by_slot(g, x, ops.where(g, kept, slot, g.constant(places)), places))
    rows = _experts(g, rows, moe, capacity, ffn, activation)
    slot = ops.where(g, kept, slot, g.constant(0))
    chosen = ops.reshape(g, ops.gather_rows(g, rows, slot), (0, moe.top_k, -1, x.shape[2]))
    mask = ops.reshape(g, ops.cast(g, kept, ElementType.FLOAT), (0, moe.top_k, -1, 1))
    return ops.reduce_sum(g, ops.mul(g, chosen, ops.mul(g, routing.weight, mask)), 1)


def _route(g: GraphBuilder, x: Value, moe: MoE) -> _Routing:
    """Gate, choose the best experts, count each choice's place in its expert."""
    batch, seq, _ = x.shape
    logits = layers.linear(g, x, moe.experts, "gate", bias=moe.bias)
    scores = ops.unary(g, "Sigmoid", logits) if moe.sigmoid else ops.softmax(g, logits)
    ranked = scores
    if moe.correction:
        with g.scope("gate"):
            ranked = ops.add(g, scores, g.parameter("e_score_correction_bias", (moe.experts,), fill=0.0))
    result = (batch, seq, moe.top_k)
    weight, index = g.node_with(
        "TopK",
        [ranked, g.constant([moe.top_k])],
        [(result, ElementType.FLOAT), (result, ElementType.INT64)],
        attributes={"axis": -1},
    )
    if moe.correction:
        weight = g.node("GatherElements", [scores, index], result, axis=2)
    if moe.renormalise:
        weight = ops.binary(g, "Div", weight, ops.reduce_sum(g, weight, 2, keepdims=True))
    if moe.scale != 1.0:
        weight = ops.scale(g, weight, moe.scale)
    expert = ops.reshape(g, ops.transpose(g, index, (0, 2, 1)), (0, -1))
    chosen = ops.one_hot(g, expert, moe.experts)
    before = g.node("CumSum", [chosen, g.constant(1)], chosen.shape, exclusive=1)
    position = ops.reduce_sum(g, ops.mul(g, before, chosen), 2)
    return _Routing(expert, position, chosen, ops.unsqueeze(g, ops.transpose(g, weight, (0, 2, 1)), 3))


def _einsum_matrices(g: GraphBuilder, routing: _Routing, moe: MoE, capacity: int) -> tuple[Value, Value]:
    """Dispatch and combine matrices [b, s, experts * capacity]: one-hot, and one-hot times the gate's weight."""
    expert = ops.unsqueeze(g, ops.cast(g, routing.chosen, ElementType.FLOAT), 3)
    place = ops.unsqueeze(g, ops.one_hot(g, routing.position, capacity, ElementType.FLOAT), 2)
    seat = ops.reshape(g, ops.mul(g, expert, place), (0, moe.top_k, -1, moe.experts * capacity))
    return ops.reduce_sum(g, seat, 1), ops.reduce_sum(g, ops.mul(g, seat, routing.weight), 1)


def _tokens_by_slot(g: GraphBuilder, x: Value, slot: Value, places: int) -> Value:
    """[b, places] index of the token in each place (0 for an empty one); slot `places` collects what was dropped."""
    token = ops.binary(g, "Mod", ops.arange(g, slot.shape[1]), g.constant(x.shape[1]))
    token = ops.expand_batch(g, ops.unsqueeze(g, token, 0), slot)
    empty = ops.expand_batch(g, g.node("Expand", [g.constant(0), g.constant([1, places + 1])], (1, places + 1)), slot)
    filled = g.node("ScatterElements", [empty, slot, token], empty.shape, axis=1)
    ends = [g.constant([0]), g.constant([places]), g.constant([1])]
    return g.node("Slice", [filled, *ends], (slot.shape[0], places))


def _experts(g: GraphBuilder, rows: Value, moe: MoE, capacity: int, ffn: int, activation: Activation) -> Value:
    """All experts at once on [b, experts * capacity, hidden]."""
    hidden = rows.shape[2]
    with g.scope("experts"):
        x = ops.transpose(g, ops.reshape(g, rows, (0, moe.experts, capacity, hidden)), (1, 0, 2, 3))
        x = ops.reshape(g, x, (moe.experts, -1, hidden))
        if moe.gated:
            gate, up = ops.split(g, _expert_product(g, x, "gate_up_proj", 2 * ffn, moe), (ffn, ffn), 2)
            x = _expert_product(g, ops.mul(g, activation(g, gate), up), "down_proj", hidden, moe)
        else:
            x = activation(g, _expert_product(g, x, "wi", ffn, moe))
            x = _expert_product(g, x, "wo", hidden, moe)
        x = ops.transpose(g, ops.reshape(g, x, (moe.experts, -1, capacity, hidden)), (1, 0, 2, 3))
        return ops.reshape(g, x, (0, moe.experts * capacity, hidden))


def _expert_product(g: GraphBuilder, x: Value, name: str, features: int, moe: MoE) -> Value:
    """Each expert's product of its rows [experts, rows, inputs] with its own weight [outputs, inputs]."""
    weight = g.parameter(name, (moe.experts, features, x.shape[2]))
    product = ops.matmul(g, x, ops.transpose(g, weight, (0, 2, 1)))
    if not moe.bias:
        return product
    return ops.add(g, product, g.parameter(f"{name}_bias", (moe.experts, 1, features), fill=0.0))

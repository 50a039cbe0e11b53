"""Recurrent layers, whose state goes from token to token: Mamba-2 and gated DeltaNet.

Implementations join the projections and short convolutions of several parts. Here each part has its own, with the same
weights and work, so that each can be sharded by heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._attention import Shared
from ._config import Key, ModelBuildError, sized
from ._graph import GraphBuilder, Value

SCAN_OPSET = 27
"""First operator set with `CausalConvWithState` and `LinearAttention`."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A Mamba-2 mixer: one decay per head and token, one pair of directions B and C per group of heads.

    Attributes:
        heads: heads of the state.
        head_dim: width of one head.
        state: size of the state of each element of a head.
        groups: groups of heads that share the directions B and C.
        kernel: taps of the convolution over time.
        chunk: tokens of one block of the scan.
        bias: the projections have biases.
        conv_bias: the convolution has one.
    """

    heads: int = sized("mamba_num_heads", Key(int, 128))
    head_dim: int = sized("mamba_head_dim", Key(int, 64))
    state: int = sized("ssm_state_size", Key(int, 128))
    groups: int = sized("n_groups", Key(int, 8))
    kernel: int = sized("conv_kernel", Key(int, 4))
    chunk: int = sized("chunk_size", default=128)
    bias: bool = False
    conv_bias: bool = sized("use_conv_bias", default=True)

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelBuildError(
                f"{self.heads} heads of the state are not a multiple of {self.groups} groups",
                "give a number of groups that divides that of heads",
            )

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        inner, directions = self.heads * self.head_dim, self.groups * self.state
        z = layers.linear(g, x, inner, "z_proj", bias=self.bias)
        parts = [
            _convolved(g, layers.linear(g, x, width, f"{name}_proj", bias=self.bias), name, self.kernel, self.conv_bias)
            for name, width in (("x", inner), ("b", directions), ("c", directions))
        ]
        step = layers.linear(g, x, self.heads, "dt_proj", bias=self.bias)
        per_head = (self.heads,)
        y = g.node(
            "shardplan.StateSpaceScan",
            [
                *parts,
                step,
                g.parameter("A_log", per_head, fill=0.0),
                g.parameter("D", per_head, fill=1.0),
                g.parameter("dt_bias", per_head, fill=0.0),
            ],
            parts[0].shape,
            num_heads=self.heads,
            num_groups=self.groups,
            chunk_size=self.chunk,
        )
        y = ops.mul(g, y, layers.silu(g, z))
        split = ops.reshape(g, y, (0, 0, self.groups, inner // self.groups))
        with g.scope("norm"):
            weight = g.parameter("weight", (inner,), fill=1.0)
            y = ops.mul(g, ops.reshape(g, layers.unit_rms(g, split), (0, 0, inner)), weight)
        return layers.linear(g, y, x.shape[2], "out_proj", bias=self.bias)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated DeltaNet mixer: a decaying state, in which a token replaces the value of its key (Qwen3-Next).

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with a state of its own; a multiple of `key_heads`.
        key_dim: width of a query or key head.
        value_dim: width of a value head.
        kernel: taps of the convolution over time.
    """

    key_heads: int = sized("linear_num_key_heads", Key(int, 16))
    value_heads: int = sized("linear_num_value_heads", Key(int, 32))
    key_dim: int = sized("linear_key_head_dim", Key(int, 128))
    value_dim: int = sized("linear_value_head_dim", Key(int, 128))
    kernel: int = sized("linear_conv_kernel_dim", Key(int, 4))

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelBuildError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads",
                "give a number of key heads that divides that of value heads",
            )

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        g.require_opset(SCAN_OPSET)
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = (
            _convolved(g, layers.linear(g, x, width, f"{name}_proj", bias=False), name, self.kernel, bias=False)
            for name, width in (("q", keys), ("k", keys), ("v", values))
        )
        z = layers.linear(g, x, values, "z_proj", bias=False)
        beta = ops.unary(g, "Sigmoid", layers.linear(g, x, self.value_heads, "b_proj", bias=False))
        y = g.node_with(
            "LinearAttention",
            [self._repeated(g, q), self._repeated(g, k), v, None, self._decay(g, x), beta],
            [(v.shape, v.dtype), ((x.shape[0], self.value_heads, self.key_dim, self.value_dim), v.dtype)],
            attributes={"q_num_heads": self.value_heads, "kv_num_heads": self.value_heads},
        )[0]
        by_head = ops.reshape(g, y, (0, 0, self.value_heads, self.value_dim))
        normed = ops.reshape(g, layers.rms_norm(g, by_head, "norm", epsilon=shared.epsilon), (0, 0, values))
        return layers.linear(g, ops.mul(g, normed, layers.silu(g, z)), x.shape[2], "out_proj", bias=False)

    def _repeated(self, g: GraphBuilder, x: Value) -> Value:
        """Normalise queries or keys to unit length, and repeat each head for the value heads that it serves."""
        times, width = self.value_heads // self.key_heads, self.key_dim
        x = ops.reshape(g, x, (0, 0, self.key_heads, width))
        x = g.node("LpNormalization", [x], x.shape, axis=-1, p=2)
        x = ops.unsqueeze(g, x, 3)
        x = g.node("Expand", [x, g.constant([1, 1, 1, times, 1])], (*x.shape[:3], times, width))
        return ops.reshape(g, x, (0, 0, self.value_heads * width))

    def _decay(self, g: GraphBuilder, x: Value) -> Value:
        """Logarithm of the decay of each head's state at each token: `-exp(A_log) softplus(a + dt_bias)`.

        The product is written as the exponential of a sum, so that no operator reads weights alone.
        """
        step = layers.linear(g, x, self.value_heads, "a_proj", bias=False)
        step = ops.unary(g, "Softplus", ops.add(g, step, g.parameter("dt_bias", (self.value_heads,), fill=0.0)))
        rate = g.parameter("A_log", (self.value_heads,), fill=0.0)
        return ops.unary(g, "Neg", ops.unary(g, "Exp", ops.add(g, ops.unary(g, "Log", step), rate)))


def _convolved(g: GraphBuilder, x: Value, name: str, kernel: int, bias: bool) -> Value:
    """Convolve each channel of [b, s, channels] causally over the tokens, then apply SiLU."""
    g.require_opset(SCAN_OPSET)
    batch, _, channels = x.shape
    with g.scope(f"{name}_conv1d"):
        weight = g.parameter("weight", (channels, 1, kernel))
        inputs = [ops.transpose(g, x, (0, 2, 1)), weight]
        if bias:
            inputs.append(g.parameter("bias", (channels,), fill=0.0))
        y = g.node_with(
            "CausalConvWithState",
            inputs,
            [((batch, channels, x.shape[1]), x.dtype), ((batch, channels, kernel - 1), x.dtype)],
            attributes={"activation": "silu"},
        )[0]
        return ops.transpose(g, y, (0, 2, 1))

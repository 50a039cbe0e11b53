"""GELU, by the error function or by tanh with the cube as products, SiLU and Mish: one kernel each in eager training.

GELU with `Pow(x, 3)` is left alone: models that have it compute it step by step, and keep every step. So is
`x * sigmoid(1.7 x)`.

The gate of a feed-forward layer, SwiGLU or GEGLU, is a kernel of some software: it reads gate and value and writes
their product; backward reads both again with the product's gradient and writes two gradients. The activated gate is
never in memory. Step by step, it is written, read and kept: three tensors of the inner width for each token instead of
four, the input of the next matrix among them.

Sources: Megatron Core `fusions/fused_bias_swiglu.py` and `fused_bias_geglu.py` (`SwiGLUFunction` keeps its input alone;
`--no-bias-swiglu-fusion` switches it off, on by default); Hsu et al. 2024, Liger Kernel, section 3.2 (the same for
both); what torch.compile makes of such a pair of operators.
"""

from __future__ import annotations

from planner.operators.rewriting import PATTERNS, one_kernel, written_out

_TANH = ("Tanh(k * (x + k * x * x * x))", "Tanh(k * x * (1 + k * x * x))")
_BY_TANH = tuple(gelu.format(tanh) for tanh in _TANH for gelu in ("k * x * (1 + {})", "x * (k + k * {})"))
_BY_ERF = ("k * x * (1 + Erf(k * x))", "x * (k + k * Erf(k * x))")

PATTERNS.register("gelu", written_out("Gelu", _BY_ERF, ("x",), {"approximate": "none"}))
PATTERNS.register("tanh_gelu", written_out("Gelu", _BY_TANH, ("x",), {"approximate": "tanh"}))
PATTERNS.register("silu", written_out("Swish", ("x * Sigmoid(x)", "x / (1 + Exp(Neg(x)))"), ("x",), {}))
PATTERNS.register("mish", written_out("Mish", ("x * Tanh(Softplus(x))",), ("x",), {}))


PATTERNS.register("gated_activation", one_kernel(("Swish(x) * y", "Gelu(x) * y")))

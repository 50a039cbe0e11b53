"""The gate of a feed-forward layer as one kernel: SwiGLU, GEGLU.

The kernel reads gate and value and writes their product; backward reads both again with the product's gradient and
writes two gradients. The activated gate is never in memory. Step by step, it is written, read and kept: three tensors
of the inner width are kept for each token instead of four, the input of the next matrix among them.

Sources: Megatron Core `fusions/fused_bias_swiglu.py` and `fused_bias_geglu.py` (`SwiGLUFunction` keeps its input alone;
`--no-bias-swiglu-fusion` switches it off, on by default); Hsu et al. 2024, Liger Kernel, section 3.2 (the same for
both); what torch.compile makes of such a pair of operators.
"""

from __future__ import annotations

from planner.operators.rewriting import PATTERNS, one_kernel

PATTERNS.register("gated_activation", one_kernel(("Swish(x) * y", "Gelu(x) * y")))

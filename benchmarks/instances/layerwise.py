"""Made-up but realistic layer-wise instances, for benchmarks and tests: transformer layers on one server of devices."""

from __future__ import annotations

import itertools
import math

import numpy as np

from planner.published.problems import LayerChoice

_LAYER_S = 0.080
_WEIGHT_BYTES = 0.4e9
_ACTIVATION_BYTES = 6.0e9


def synthetic_layerwise_problem(
    layers: int, strategies: int, fraction: float, *, kinds: int = 1, noise: float = 0.0, seed: int = 0
) -> LayerChoice:
    """An instance of L layers and S strategies; the same arguments give the same instance.

    Args:
        layers: L.
        strategies: S, at most 48: tensor degrees 1 to 32, plain or sharded data parallel, with and without recompute
            and sequence parallelism, in turn.
        fraction: capacity between the least memory that works (0) and what the fastest choices take (1).
        kinds: unlike kinds of layers, in equal runs.
        noise: relative noise on every layer's times, so that no two are alike.
        seed: of kinds and noise.
    """
    random = np.random.default_rng(seed)
    table = _strategies()[:strategies]
    size = random.uniform(0.5, 2.0, kinds) if kinds > 1 else np.ones(1)
    kind = np.arange(layers) * kinds // layers
    time_s = np.array([[size[k] * entry[0] for entry in table] for k in kind])
    time_s *= random.lognormal(0.0, noise, time_s.shape) if noise else 1.0
    memory = np.round(np.array([[size[k] ** 0.8 * entry[1] for entry in table] for k in kind]))
    degrees = np.array([entry[2] for entry in table])
    ratio = np.abs(np.log2(degrees[:, None] / degrees[None, :]))
    switch = 0.002 * ratio
    least = float(memory.min(axis=1).sum())
    fastest = float(memory[np.arange(layers), time_s.argmin(axis=1)].sum())
    return LayerChoice(time_s, memory, switch, least + fraction * (fastest - least))


def _strategies() -> list[tuple[float, float, int, str]]:
    """(seconds, bytes, tensor degree, name) of one layer."""
    found = []
    for sequence, recompute, sharded, power in itertools.product((0, 1), (0, 1), (0, 1), range(6)):
        tensor = 1 << power
        data = 32 // tensor
        seconds = _LAYER_S / 32 * (1 + 0.11 * power) * (4 / 3 if recompute else 1.0) * (1.01 if sequence else 1.0)
        seconds += 0.0011 * (data - 1) / data / tensor * (1.5 if sharded else 1.0) + 0.0007 * math.log2(tensor)
        state = _WEIGHT_BYTES / tensor * 8
        kept = _ACTIVATION_BYTES / 32 * (1.0 + (0.3 if not sequence else 0.0) * power)
        memory = (state / data if sharded else state) + (0.12 * kept if recompute else kept)
        label = f"tp{tensor}-{'sdp' if sharded else 'dp'}{data}" + ("-ckpt" * recompute) + ("-sp" * sequence)
        found.append((seconds, memory, tensor, label))
    return sorted(found, key=lambda entry: entry[3].count("-"))

"""Made-up but realistic instances of the iteration-time problem, for benchmarks and tests.

A stack of alike layers between an embedding and a head, on servers of eight devices. A configuration is a mesh of n
devices used as data times tensor parallel: compute shrinks with the mesh, less and less well; tensor parallelism pays
all-reduces a layer, over slow links once it leaves a server; data parallelism pays gradient exchange; measurement noise
makes the times neither additive nor monotone.
"""

from __future__ import annotations

import math

import numpy as np

from planner.published.problems import IterationProblem, boundary_levels

_SERVER = 8
_LAYER_S = 0.040
_LAYER_WEIGHT_BYTES = 2.4e9
_LAYER_ACTIVATION_BYTES = 0.6e9
_ALL_REDUCE_S = 0.0008


def synthetic_iteration_problem(
    layers: int,
    devices: int,
    configs: int,
    *,
    micro_batches: int = 64,
    memory_bytes: float = math.inf,
    links: bool = False,
    seed: int = 0,
) -> IterationProblem:
    """An instance with L layers, D devices and C configurations; the same arguments give the same instance.

    Args:
        layers: L.
        devices: D, a power of two.
        configs: C; meshes of 1, 2, 4, ... D devices in turn, each first wholly tensor parallel, then ever less.
        micro_batches: M.
        memory_bytes: memory of a device; a layer keeps 9.6 GB of weights and 0.6 GB a micro-batch on one device.
        links: whether boundaries cost time, eight times as much between servers as inside.
        seed: of the noise.
    """
    random = np.random.default_rng(seed)
    meshes = _meshes(devices, configs)
    work = _LAYER_S * random.uniform(0.9, 1.1, layers)
    work[0] *= 0.3
    work[-1] *= 1.6
    sums = np.concatenate(([0.0], np.cumsum(work)))
    first, last = np.triu_indices(layers)
    span = sums[last + 1] - sums[first]
    count = last - first + 1
    shape = (layers, layers, configs)
    time_s, fixed, activation = np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf)
    for c, (size, tensor) in enumerate(meshes):
        slow = 6.0 if tensor > _SERVER else 1.0
        reduces = count * _ALL_REDUCE_S * slow * (tensor - 1) / tensor
        exchange = 0.0006 * count * (size // tensor - 1) / max(size // tensor, 1)
        seconds = span / size * (1 + 0.03 * math.log2(size)) + reduces + exchange
        time_s[first, last, c] = seconds * random.lognormal(0.0, 0.02, len(first))
        fixed[first, last, c] = count * _LAYER_WEIGHT_BYTES / tensor * 4
        activation[first, last, c] = count * _LAYER_ACTIVATION_BYTES / size
    levels = boundary_levels(devices, (_SERVER,)) if links else None
    moved = np.full(layers, 0.002) * random.uniform(0.8, 1.2, layers)
    return IterationProblem(
        time_s=time_s,
        config_devices=np.array([size for size, _ in meshes], dtype=np.int64),
        devices=devices,
        micro_batches=micro_batches,
        fixed_bytes=fixed if memory_bytes < math.inf else None,
        activation_bytes=activation if memory_bytes < math.inf else None,
        memory_bytes=memory_bytes,
        boundary_s=np.stack([moved, 8 * moved]) if links else None,
        boundary_level=levels,
    )


def _meshes(devices: int, configs: int) -> list[tuple[int, int]]:
    """[C] (devices, tensor degree) of the configurations."""
    sizes = [1 << k for k in range(devices.bit_length()) if 1 << k <= devices]
    found: list[tuple[int, int]] = []
    shrink = 0
    while len(found) < configs:
        found += [(size, max(size >> shrink, 1)) for size in sizes]
        shrink += 1
    return found[:configs]

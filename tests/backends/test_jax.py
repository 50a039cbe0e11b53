"""JAX places weights as the exported shardings say, on virtual devices, and gives the gradients of one device."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from planner import export
from tests.runtime import cases

if find_spec("jax") is None:
    pytest.skip("jax is not installed", allow_module_level=True)

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, ".")
import sharding

shapes = json.loads(sys.argv[1])
devices = sharding.mesh()
pieces = {}
for name, shape in shapes.items():
    pieces[name] = {
        of: list(sharding.parameter(name, devices, of).shard_shape(tuple(shape)))
        for of in ("value", "gradient", "optimizer")
    }

draw = np.random.default_rng(0)
up, down = json.loads(sys.argv[2])
weights = {name: draw.standard_normal(shapes[name]).astype(np.float32) for name in (up, down)}
x = draw.standard_normal((8, weights[up].shape[1])).astype(np.float32)


def loss(weights, x):
    return jnp.square(jax.nn.gelu(x @ weights[up].T) @ weights[down].T).mean()


expected = jax.grad(loss)(weights, x)
placed = {name: jax.device_put(value, sharding.parameter(name, devices)) for name, value in weights.items()}
gradients = {name: sharding.parameter(name, devices, "gradient") for name in weights}
found = jax.jit(jax.grad(loss), out_shardings=gradients)(placed, x)
error = max(float(abs(np.asarray(found[n]) - np.asarray(expected[n])).max()) for n in weights)
held = {n: [list(s.data.shape) for s in found[n].addressable_shards] for n in weights}
print(json.dumps({"pieces": pieces, "error": error, "held": held, "devices": len(jax.devices())}))
"""


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_jax_places_weights_as_the_plan_says(zero: int, tmp_path: Path) -> None:
    found = cases.plan(cases.Case("", "gpt-neox", 8, {"tensor": 2, "zero": zero}, 8))
    for name, text in export.export(found, "jax").files.items():
        (tmp_path / name).write_text(text)
    parameters = {p.name: p.shape for p in found.stage_parameters(0) if p.trainable}
    up, down = (next(n for n in parameters if word in n and n.endswith("weight")) for word in ("up_proj", "down_proj"))
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(parameters), json.dumps([up, down])],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["devices"] == found.world_size == 8
    assert answer["error"] < 1e-4
    replicas = len(found.stages[0].replicas)
    for name in (up, down):
        assert answer["held"][name] == [answer["pieces"][name]["gradient"]] * 8
    for name, shape in parameters.items():
        place = found.layout_of(name)
        assert place is not None
        cut = 2 if place.value.startswith("S") else 1
        whole = _size(shape)
        pieces = {of: _size(piece) for of, piece in answer["pieces"][name].items()}
        even = any(n % replicas == 0 for d, n in enumerate(shape) if place.value != f"S{d}")
        shared = replicas if even else 1
        assert pieces["value"] == whole // cut // (shared if zero > 2 else 1)
        assert pieces["optimizer"] == whole // cut // (shared if zero else 1)


def _size(shape: tuple[int, ...] | list[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total

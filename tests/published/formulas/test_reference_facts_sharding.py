"""Facts of tensor sharding and experts at further sizes: each figure a sum worked out by hand, by section."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from planner import UsageError
from planner import formulas as f

PRODUCT = "ik,kj->ij"
SIZES = {"a": 10, "b": 5, "c": 20}
MESH = {"m1": 4, "m2": 2}
CHAIN = ["x:ab,bc->y:ac", "y:ac,cd->ad"]
FOURS = dict.fromkeys("abcd", 4)

FACTS: list[tuple[str, str, Callable[[], Any], Any]] = [
    # Tofu
    (
        "Tofu",
        "A by k, B by j, C by i: 4 + 8, 4 + 8, 8 + 4",
        lambda: f.tofu_operator_bytes(PRODUCT, [8, 8, 8], ["k", "j", "i"]),
        {"i": 12, "k": 12, "j": 12},
    ),
    (
        "Tofu",
        "four workers: 192, 48 + 192, 192 + 48 + 48",
        lambda: f.tofu_operator_bytes(PRODUCT, [64] * 3, ["i", "k", "i"], parts=4),
        {"i": 192, "k": 240, "j": 288},
    ),
    (
        "Tofu",
        "whole operands are there already, partial sums go both ways",
        lambda: f.tofu_operator_bytes(PRODUCT, [8, 8, 8], ["", "", ""]),
        {"i": 8, "k": 16, "j": 8},
    ),
    (
        "Tofu",
        "resting as cut costs nothing",
        lambda: f.tofu_operator_bytes("bi,io->bo", [8, 4, 2], ["b", "", "b"])["b"],
        0,
    ),
    ("Tofu", "a sum over i that rests by o", lambda: f.tofu_operator_bytes("io->o", [8, 2], ["i", "o"])["i"], 2),
    ("Tofu", "7 x 1.5 GiB less 4 H (H - 1024) 12 B", lambda: f.tofu_rnn_bytes(7, 4096) / 2**30, 7 * 1.5 - 0.5625),
    ("Tofu", "an eighth on each of 8", lambda: f.tofu_rnn_bytes(8, 8192, workers=8) / 2**30, 45.375 / 8),
    (
        "Tofu",
        "fp16 weights, gradients: 2 x 2 B of 8 H^2",
        lambda: f.tofu_rnn_bytes(1, 4, 4, copies=2, item_bytes=2),
        512,
    ),
    # GShard
    (
        "GShard",
        "E 128, 12 layers, M 2048, H 4096",
        lambda: f.gshard_expert_parameters(128, 12, 2048, 4096),
        6 * 128 * 2**24,
    ),
    ("GShard", "every layer a mixture", lambda: f.gshard_expert_parameters(2, 3, 4, 8, every=1), 3 * 2 * 64),
    ("GShard", "C = 2 S/E = 2 x 4096/512", lambda: f.gshard_capacity(4096, 512), 16),
    ("GShard", "C with factor 1.25 rounded up: 10.0", lambda: f.gshard_capacity(1024, 256, factor=1.25), 10),
    ("GShard", "top 1 of 100 over 8: 12.5", lambda: f.gshard_capacity(100, 8, top=1), 13),
    ("GShard", "D 128: 2 x 2048 x 1024 x 2 x 127/128", lambda: f.gshard_all_to_all_bytes(2048, 1024, 128), 2**16 * 127),
    ("GShard", "top 1, fp32, D 4: 64 x 8 x 4 x 3/4", lambda: f.gshard_all_to_all_bytes(64, 8, 4, 1, 4), 1536),
    ("GShard", "four in training", lambda: f.gshard_all_to_all_bytes(64, 8, 4, 1, 4, train_step=True), 6144),
    # Mesh-TensorFlow
    (
        "Mesh-TF",
        "8 x 2: 2 x 64 x 1024 and 2 7/8 2 x 1024 x 2048",
        lambda: sum(f.mesh_tensorflow_feed_forward_elements(512, 1024, 4096, 8, 2)),
        131072 + 7340032,
    ),
    ("Mesh-TF", "one device sends nothing", lambda: sum(f.mesh_tensorflow_feed_forward_elements(8, 8, 8, 1, 1)), 0),
    (
        "Mesh-TF",
        "1024 in at most 2 dims",
        lambda: f.mesh_tensorflow_mesh_shapes(1024, 2)[1:],
        ((512, 2), (256, 4), (128, 8), (64, 16), (32, 32)),
    ),
    ("Mesh-TF", "8 in at most 3 dims", lambda: f.mesh_tensorflow_mesh_shapes(8, 3), ((8,), (4, 2), (2, 2, 2))),
    (
        "Mesh-TF",
        "3 then 6 - 3, before 4",
        lambda: f.mesh_tensorflow_schedule(["->x:a", "->y:b", "y:b->z:bc"], {"a": 4, "b": 3, "c": 2}),
        (1, 2, 0),
    ),
    (
        "Mesh-TF",
        "one mesh dimension of 8 divides nothing",
        lambda: f.mesh_tensorflow_layout_and_mesh("ab,bc->ac", SIZES, 8, most_dims=1)[1],
        "",
    ),
    (
        "Mesh-TF",
        "2 x 2 on 4 devices: 4 (25 + 50 + 50), 4: 4 (50 + 25 + 50)",
        lambda: f.mesh_tensorflow_layout_and_mesh("ab,bc->ac", SIZES, 4)[2],
        500,
    ),
    ("Mesh-TF", "1 + 4 + 2", lambda: f.mesh_tensorflow_assignments(2, 2), 7),
    ("Mesh-TF", "1 + 4 x 2 + 6 x 2", lambda: f.mesh_tensorflow_assignments(4, 2), 21),
    (
        "Mesh-TF",
        "a whole: 4 (50 + 25 + 50)",
        lambda: (
            str(f.mesh_tensorflow_layout("ab,bc->ac", SIZES, MESH, ["a"])),
            f.mesh_tensorflow_layout("ab,bc->ac", SIZES, MESH, ["a"]).peak_bytes,
        ),
        ("c:m1", 500),
    ),
    (
        "Mesh-TF",
        "a:m2 alone: 4 (25 + 100 + 100)",
        lambda: f.mesh_tensorflow_peak_bytes("ab,bc->ac", SIZES, MESH, "a:m2"),
        900,
    ),
    ("Mesh-TF", "nothing split: 4 x 350", lambda: f.mesh_tensorflow_peak_bytes("ab,bc->ac", SIZES, MESH, ""), 1400),
    (
        "Mesh-TF",
        "two operations, five tensors of 64 B",
        lambda: f.mesh_tensorflow_peak_bytes(CHAIN, FOURS, {"m": 2}, ""),
        320,
    ),
    (
        "Mesh-TF",
        "b and d never meet: 4 x 32 + 64",
        lambda: (
            str(f.mesh_tensorflow_layout(CHAIN, FOURS, {"m": 2})),
            f.mesh_tensorflow_layout(CHAIN, FOURS, {"m": 2}).peak_bytes,
        ),
        ("b:m;d:m", 192),
    ),
    (
        "Mesh-TF",
        "bf16 halves",
        lambda: f.mesh_tensorflow_layout("ab,bc->ac", SIZES, MESH, item_bytes=2).peak_bytes,
        150,
    ),
    # AutoDDL, tensor parallelism
    (
        "AutoDDL",
        "2 x 15/16 x 2048 x 4096",
        lambda: f.autoddl_linear_elements(1024, 2048, 4096, 16)[0],
        15728640,
    ),
    ("AutoDDL", "2 x 3/16 (2 + 4 + 8) 2^20", lambda: f.autoddl_linear_elements(1024, 2048, 4096, 16)[1], 5505024),
    (
        "AutoDDL",
        "3 x 3/16 (2 + 8) 2^20",
        lambda: f.autoddl_linear_elements(1024, 2048, 4096, 16)[2],
        5898240,
    ),
    (
        "AutoDDL",
        "falls as 1/sqrt(P): 7/64 over 15/256",
        lambda: f.autoddl_linear_elements(8, 8, 8, 64)[1] / f.autoddl_linear_elements(8, 8, 8, 256)[1],
        (7 / 64) / (15 / 256),
    ),
    # Alpa
    ("Alpa", "all-gather 1 + 3/4 x 8/2 + 0.1", lambda: f.alpa_collective_cost("all-gather", 8, 4, 1, 0.5), 4.1),
    ("Alpa", "reduce-scatter 1 + 3 + 0.001", lambda: f.alpa_collective_cost("reduce-scatter", 8, 4, 1, 0.5), 4.001),
    ("Alpa", "all-to-all 7/64 x 4 x 16", lambda: f.alpa_collective_cost("all-to-all", 16, 8, extra=False), 7),
    ("Alpa", "4 x 4", lambda: f.alpa_submeshes(4, 4), ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4))),
    (
        "Alpa",
        "4 x 4, powers of two",
        lambda: f.alpa_submeshes(4, 4, every_host_count=False),
        ((1, 1), (1, 2), (1, 4), (2, 4), (4, 4)),
    ),
    ("Alpa", "one device", lambda: f.alpa_submeshes(1, 1), ((1, 1),)),
    # sizes of models
    ("sizes", "h 2304, 32 layers", lambda: 32 * f.transformer_block_parameters(2304), 2039390208),
    ("sizes", "h 8, f 16: 256 + 256 + 72 + 16", lambda: f.transformer_block_parameters(8, 16), 600),
]


@pytest.mark.parametrize(("call", "expected"), [pytest.param(*row[2:], id=f"{row[0]}: {row[1]}") for row in FACTS])
def test_fact(call: Callable[[], Any], expected: Any) -> None:
    found = call()
    exact = isinstance(expected, (tuple, str))
    assert found == expected if exact else found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("devices", [4, 16, 64, 256])
def test_the_mesh_shapes_are_all_and_no_other(devices: int) -> None:
    found = f.mesh_tensorflow_mesh_shapes(devices, 3)
    assert len(set(found)) == len(found)
    assert all(math.prod(s) == devices and list(s) == sorted(s, reverse=True) for s in found)
    power = devices.bit_length() - 1
    assert len(found) == sum(
        1 for a in range(power + 1) for b in range(a + 1) for c in range(b + 1) if a + b + c == power
    )


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: f.tofu_operator_bytes("ik kj", [1, 1], ["i", "k"]), "write it as ik,kj->ij"),
        (lambda: f.tofu_operator_bytes(PRODUCT, [1, 1], ["i", "k"]), "tensor_bytes 2"),
        (lambda: f.tofu_operator_bytes(PRODUCT, [1, 1, 1], ["j", "k", "i"]), "use one of i, k"),
        (lambda: f.autoddl_linear_elements(8, 8, 8, 8), "no square grid"),
        (lambda: f.alpa_collective_cost("all_reduce", 8, 4), "did you mean 'all-reduce'"),
        (lambda: f.mesh_tensorflow_layout("ab,bz->az", SIZES, MESH), "a dimension with a size"),
        (lambda: f.mesh_tensorflow_peak_bytes("ab,bc->ac", SIZES, MESH, "b:m1"), "not a multiple"),
        (lambda: f.mesh_tensorflow_peak_bytes("ab,bc->ac", SIZES, MESH, "a:m9"), "name a dimension"),
        (lambda: f.mesh_tensorflow_feed_forward_elements(9, 8, 8, 2, 1), "not a multiple"),
        (lambda: f.gshard_capacity(8, 0), "experts is 0"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        call()

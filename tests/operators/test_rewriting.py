"""An operator spelled out costs and keeps what the operator does, however it is spelled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import planner
from planner.graph import Graph, Node
from planner.operators import rewritten, unique_bytes
from tests.operators import calls

WIDE = "x 2 6 16"
ROW = "x 2 6 1"


def step(text: str, **attributes: int | float | tuple[int, ...]) -> Node:
    """`"y = Add a b"` as a node."""
    result, _, call = text.partition(" = ")
    op, *inputs = call.split()
    return Node(result, op, tuple(inputs), tuple(result.split()), attributes)


def build(tensors: dict[str, str], steps: list[Node], constants: dict[str, tuple[float, ...]] | None = None) -> Graph:
    """A product, then these steps, then a product, so that gradients flow through all of them."""
    known = {"in": "i 2 6 16", "before": "w 16 16", "x": WIDE, "after": "w 16 4", "end": "x 2 6 4"}
    nodes = [step("x = MatMul in before"), *steps, step("end = MatMul y after")]
    made = calls.graph({**known, "y": WIDE, **tensors}, nodes)
    return replace(made, constants=constants or {}, batch=2)


def same(written: Graph, operator: Graph) -> None:
    """The first, recognised, is the second: nodes, work, bytes and seconds."""
    found = rewritten(written)
    assert [node.op for node in found.nodes] == [node.op for node in operator.nodes]
    assert found.outputs == operator.outputs
    assert {p.name for p in found.parameters} == {p.name for p in operator.parameters}
    device = planner.load_cluster("dgx-a100").devices[0]
    first, second = (planner.profile(graph, device, precision="fp32") for graph in (found, operator))
    for name in ("forward_s", "backward_s", "forward_flops", "backward_flops", "moved_bytes", "workspace_bytes"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert unique_bytes(first.saved) == unique_bytes(second.saved)


NORM = {
    **dict.fromkeys(("c", "q", "n", "u"), WIDE), **dict.fromkeys(("m", "v", "e", "s", "r"), ROW),
    "two": "c", "eps": "c", "half": "c", "one": "c", "g": "w 16", "b": "w 16", "h": "x 16", "flat": "x 2 6",
    "last": "c:int64 1", **dict.fromkeys(("mm", "vv"), ROW), **dict.fromkeys(("i", "t"), WIDE),
}  # fmt: skip
SQUARES = {"two": (2.0,), "eps": (1e-5,), "half": (-0.5,), "one": (1.0,), "last": (-1,)}
MEAN = step("m = ReduceMean x", axes=(-1,))
VARIANCE = step("v = ReduceMean q", axes=(-1,))


@pytest.mark.parametrize(
    "steps",
    [
        [
            MEAN, step("c = Sub x m"), step("q = Pow c two"), VARIANCE, step("e = Add v eps"), step("s = Sqrt e"),
            step("n = Div c s"), step("u = Mul n g"), step("y = Add u b"),
        ],
        [
            MEAN, step("c = Sub x m"), step("q = Mul c c"), VARIANCE, step("e = Add eps v"), step("s = Sqrt e"),
            step("r = Reciprocal s"), step("n = Mul c r"), step("u = Mul g n"), step("y = Add b u"),
        ],
        [
            MEAN, step("c = Sub x m"), step("q = Mul c c"), VARIANCE, step("e = Add v eps"), step("r = Pow e half"),
            step("n = Mul r c"), step("u = Mul n g"), step("y = Add u b"),
        ],
        [
            MEAN, step("c = Sub x m"), step("q = Mul c c"), step("flat = ReduceMean q", axes=(-1,), keepdims=0),
            step("v = Unsqueeze flat last"), step("e = Add v eps"), step("s = Sqrt e"), step("n = Div c s"),
            step("u = Mul n g"), step("y = Add u b"),
        ],
        [
            MEAN, step("q = Mul x x"), VARIANCE, step("mm = Mul m m"), step("vv = Sub v mm"), step("e = Add vv eps"),
            step("s = Sqrt e"), step("c = Sub x m"), step("n = Div c s"), step("u = Mul n g"), step("y = Add u b"),
        ],
        [
            MEAN, step("c = Sub x m"), step("q = Mul c c"), VARIANCE, step("e = Add v eps"), step("s = Sqrt e"),
            step("r = Reciprocal s"), step("i = Mul r g"), step("n = Mul x i"), step("t = Mul m i"),
            step("u = Sub b t"), step("y = Add n u"),
        ],
    ],
)  # fmt: skip
def test_layer_norm(steps: list[Node]) -> None:
    operator = build({"g": "w 16", "b": "w 16"}, [step("y = LayerNormalization x g b", axis=-1)])
    same(build(NORM, steps, SQUARES), operator)


def test_a_norm_whose_parts_are_read_elsewhere_is_left_alone() -> None:
    steps = [
        MEAN, step("c = Sub x m"), step("q = Mul c c"), VARIANCE, step("e = Add v eps"), step("s = Sqrt e"),
        step("n = Div c s"), step("u = Mul n g"), step("y = Add u c"),
    ]  # fmt: skip
    found = rewritten(build(NORM, steps, SQUARES))
    assert "Sub" in {node.op for node in found.nodes}
    assert "LayerNormalization" not in {node.op for node in found.nodes}


@pytest.mark.parametrize("inverse", ["r = Reciprocal s", "r = Div one s"])
def test_rms_norm_spelled_out_keeps_the_normalised_input_as_well(inverse: str) -> None:
    steps = [
        step("q = Pow x two"), VARIANCE, step("e = Add v eps"), step("s = Sqrt e"), step(inverse),
        step("n = Mul x r"), step("y = Mul g n"),
    ]  # fmt: skip
    device = planner.load_cluster("dgx-a100").devices[0]
    operator = build({"g": "w 16"}, [step("y = RMSNormalization x g", axis=-1)])
    found = rewritten(build(NORM, steps, SQUARES))
    assert [node.op for node in found.nodes] == [node.op for node in operator.nodes]
    first, second = (planner.profile(graph, device, precision="fp32") for graph in (found, operator))
    assert first.forward_s.sum() == second.forward_s.sum()
    assert unique_bytes(first.saved) - unique_bytes(second.saved) == 4 * 2 * 6 * 16


def test_a_norm_whose_scale_counts_from_one_is_that_norm() -> None:
    root = [step("q = Mul x x"), VARIANCE, step("e = Add v eps"), step("s = Sqrt e"), step("n = Div x s")]
    counted = [*root, step("h = Add g one"), step("y = Mul n h")]
    plain = [*root, step("y = Mul n g")]
    same(build(NORM, counted, SQUARES), rewritten(build(NORM, plain, SQUARES)))


BY_ERF = [step("a = Mul x k"), step("c = Erf a"), step("d = Add one c"), step("e = Mul k x"), step("y = Mul e d")]
SCALED_LAST = [step("a = Div x k"), step("c = Erf a"), step("d = Add c one"), step("e = Mul d x"), step("y = Mul e k")]
CURVE = {**dict.fromkeys("acdefhij", WIDE), "k": "c", "one": "c"}


@pytest.mark.parametrize(
    ("steps", "op"),
    [
        (BY_ERF, "Gelu"),
        (SCALED_LAST, "Gelu"),
        ([step("a = Sigmoid x"), step("y = Mul a x")], "Swish"),
        ([step("a = Neg x"), step("c = Exp a"), step("d = Add c one"), step("y = Div x d")], "Swish"),
        ([step("a = Softplus x"), step("c = Tanh a"), step("y = Mul x c")], "Mish"),
        (
            [
                step("a = Mul x k"), step("c = Erf a"), step("d = Mul c k"), step("e = Add d k"), step("y = Mul x e"),
            ],
            "Gelu",
        ),
        (
            [
                step("a = Mul x x"), step("c = Mul a k"), step("d = Add c one"), step("e = Mul x k"),
                step("f = Mul e d"), step("h = Tanh f"), step("i = Add one h"), step("j = Mul k x"),
                step("y = Mul j i"),
            ],
            "Gelu",
        ),
    ],
)  # fmt: skip
def test_activations(steps: list[Node], op: str) -> None:
    same(build(CURVE, steps, {"k": (0.7,), "one": (1.0,)}), build({}, [step(f"y = {op} x")]))


def test_a_sigmoid_of_the_scaled_input_is_no_silu() -> None:
    steps = [step("a = Mul x k"), step("c = Sigmoid a"), step("y = Mul c x")]
    assert "Swish" not in {node.op for node in rewritten(build(CURVE, steps, {"k": (1.702,)})).nodes}


HEADS = {"x": WIDE, "h": "x 2 6 2 8", "t": "x 2 2 6 8", "z": "x 2 2 6 8", "w": "x 2 6 2 8"}
INTO = [step("h = Reshape x sizes"), step("t = Transpose h", perm=(0, 2, 1, 3))]
OUT = [step("w = Transpose z", perm=(0, 2, 1, 3)), step("y = Reshape w flat")]
SIZES = {"sizes": (2, 6, 2, 8), "flat": (2, 6, 16)}
SHAPES = {"sizes": "c:int64 4", "flat": "c:int64 3"}


def test_rotary_embedding() -> None:
    tensors = {
        **HEADS, **SHAPES, **dict.fromkeys(("p", "q", "r"), "x 2 2 6 8"), **dict.fromkeys(("f", "s", "n"), "x 2 2 6 4"),
        "cos": "c 1 1 6 8", "sin": "c 1 1 6 8", "zero": "c:int64 1", "four": "c:int64 1", "eight": "c:int64 1",
        "last": "c:int64 1",
    }  # fmt: skip
    places = {"zero": (0,), "four": (4,), "eight": (8,), "last": (-1,)}
    steps = [
        *INTO, step("p = Mul t cos"), step("f = Slice t zero four last"), step("s = Slice t four eight last"),
        step("n = Neg s"), step("q = Concat n f", axis=-1), step("r = Mul q sin"), step("z = Add p r"), *OUT,
    ]  # fmt: skip
    operator = build({**tensors}, [*INTO, step("z = RotaryEmbedding t cos sin"), *OUT], SIZES)
    same(build(tensors, steps, {**SIZES, **places}), operator)


PAIRS = {
    **dict.fromkeys(("p", "q", "r"), "x 2 2 6 8"), **dict.fromkeys("fsnacdegk", "x 2 2 6 4"),
    **dict.fromkeys(("uf", "un"), "x 2 2 6 4 1"), "st": "x 2 2 6 4 2", "cos": "c 1 1 6 8", "sin": "c 1 1 6 8",
    "hc": "c 1 1 6 4", "hs": "c 1 1 6 4", **dict.fromkeys(("zero", "one", "eight", "last", "two"), "c:int64 1"),
    "four": "c:int64 4",
}  # fmt: skip
HALVES = [step("f = Slice t zero eight last two"), step("s = Slice t one eight last two")]
PAIRED = [
    step("uf = Unsqueeze e last"), step("un = Unsqueeze k last"), step("st = Concat uf un", axis=-1),
    step("z = Reshape st four"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "cos", "sin"),
    [
        (
            [
                *HALVES, step("n = Neg s"), step("un = Unsqueeze n last"), step("uf = Unsqueeze f last"),
                step("st = Concat un uf", axis=-1), step("q = Reshape st four"), step("p = Mul t cos"),
                step("r = Mul q sin"), step("z = Add p r"),
            ],
            "cos", "sin",
        ),
        (
            [
                *HALVES, step("a = Mul f hc"), step("c = Mul s hs"), step("e = Sub a c"), step("d = Mul f hs"),
                step("g = Mul s hc"), step("k = Add d g"), *PAIRED,
            ],
            "hc", "hs",
        ),
    ],
)  # fmt: skip
def test_rotary_embedding_of_pairs(steps: list[Node], cos: str, sin: str) -> None:
    tensors = {**HEADS, **SHAPES, **PAIRS}
    places = {"zero": (0,), "one": (1,), "two": (2,), "eight": (8,), "last": (-1,), "four": (2, 2, 6, 8)}
    operator = [*INTO, step(f"z = RotaryEmbedding t {cos} {sin}", interleaved=1), *OUT]
    same(build(tensors, [*INTO, *steps, *OUT], {**SIZES, **places}), build(tensors, operator, SIZES))


ATTENTION = {
    **HEADS, **SHAPES, "k": "c", **dict.fromkeys(("qs", "kr"), "x 2 2 6 8"),
    **dict.fromkeys(("kt", "k3", "ks"), "x 2 2 8 6"), "flatk": "x 4 6 8", "turned": "x 4 8 6",
    **dict.fromkeys(("s", "a", "p", "g"), "x 2 2 6 6"), "nan": "x:bool 2 2 6 6", "m": "c 1 1 6 6",
    "three": "c:int64 3", **dict.fromkeys(("four", "scores", "heads"), "c:int64 4"),
    **dict.fromkeys(("t2", "v3", "z3"), "x 4 6 8"), **dict.fromkeys(("s3", "a3", "p3"), "x 4 6 6"),
}  # fmt: skip
KEYS_IN_THREE_STEPS = [
    step("flatk = Reshape t three"), step("turned = Transpose flatk", perm=(0, 2, 1)), step("kt = Reshape turned four"),
]  # fmt: skip


@pytest.mark.parametrize(
    "steps",
    [
        [
            step("kt = Transpose t", perm=(0, 1, 3, 2)), step("s = MatMul t kt"), step("a = Mul s k"),
            step("p = Softmax a", axis=-1), step("z = MatMul p t"),
        ],
        [
            *KEYS_IN_THREE_STEPS, step("qs = Mul t k"), step("ks = Mul kt k"), step("s = MatMul qs ks"),
            step("p = Softmax s", axis=-1), step("nan = IsNaN p"), step("g = Where nan k p"), step("z = MatMul g t"),
        ],
        [
            step("qs = Mul t k"), step("kt = Transpose qs", perm=(0, 1, 3, 2)), step("s = MatMul t kt"),
            step("p = Softmax s", axis=-1), step("z = MatMul p t"),
        ],
        [
            step("flatk = Reshape t three"), step("turned = Transpose t2", perm=(0, 2, 1)),
            step("s3 = MatMul flatk turned"), step("a3 = Mul s3 k"), step("a = Reshape a3 scores"),
            step("p = Softmax a", axis=-1), step("z = MatMul p t"),
        ],
        [
            step("flatk = Reshape t three"), step("turned = Transpose t2", perm=(0, 2, 1)),
            step("s3 = MatMul flatk turned"), step("p3 = Softmax s3", axis=-1), step("z3 = MatMul p3 v3"),
            step("z = Reshape z3 heads"),
        ],
    ],
)  # fmt: skip
def test_attention(steps: list[Node]) -> None:
    operator = build(ATTENTION, [*INTO, step("z = Attention t t t"), *OUT], SIZES)
    joined = [step(f"{name} = Reshape t three") for name in ("t2", "v3") if any(name in n.inputs for n in steps)]
    steps = [*joined, *steps]
    constants = {
        **SIZES, "k": (0.3,), "three": (4, 6, 8), "four": (2, 2, 8, 6), "scores": (2, 2, 6, 6), "heads": (2, 2, 6, 8),
    }  # fmt: skip
    same(build(ATTENTION, [*INTO, *steps, *OUT], constants), operator)


def test_attention_follows_the_batch_and_has_no_scores_in_memory() -> None:
    steps = [
        step("kt = Transpose t", perm=(0, 1, 3, 2)), step("s = MatMul t kt"), step("a = Add s m"),
        step("p = Softmax a", axis=-1), step("z = MatMul p t"),
    ]  # fmt: skip
    found = planner.rebatch(rewritten(build(ATTENTION, [*INTO, *steps, *OUT], SIZES)), 5)
    (at,) = (i for i, node in enumerate(found.nodes) if node.op == "Attention")
    assert found.tensors["z"].shape == (5, 2, 6, 8)
    device = planner.load_cluster("dgx-a100").devices[0]
    fused, eager = (planner.profile(found, device, precision="fp32", fused_attention=f) for f in (True, False))
    scores = 5 * 2 * 6 * 6 * 4
    assert eager.workspace_bytes[at] - fused.workspace_bytes[at] == 2 * scores


def test_a_trained_bias_leaves_the_scores_in_memory() -> None:
    steps = [
        step("kt = Transpose t", perm=(0, 1, 3, 2)), step("s = MatMul t kt"), step("a = Add s bias"),
        step("p = Softmax a", axis=-1), step("z = MatMul p t"),
    ]  # fmt: skip
    found = rewritten(build({**ATTENTION, "bias": "w 2 6 6"}, [*INTO, *steps, *OUT], SIZES))
    (at,) = (i for i, node in enumerate(found.nodes) if node.op == "Attention")
    device = planner.load_cluster("dgx-a100").devices[0]
    saved = planner.profile(found, device, precision="fp32").saved[at]
    assert {item.storage: item.byte_count for item in saved}["z#probabilities"] == 4 * 2 * 2 * 6 * 6


def test_group_norm() -> None:
    tensors = {
        "img": "i 2 3 4 4", "kernel": "w 8 3 1 1", "x": "x 2 8 4 4", "r": "x 2 2 64", "n": "x 2 2 64", "o": "x 2 8 4 4",
        "ones": "c 2", "zeros": "c 2", "g": "w 8 1 1", "b": "w 8 1 1", "u": "x 2 8 4 4", "y": "x 2 8 4 4",
        "sizes": "c:int64 3", "back": "c:int64 4",
    }  # fmt: skip
    conv = step("x = Conv img kernel")
    steps = [
        step("r = Reshape x sizes"), step("n = InstanceNormalization r ones zeros"), step("o = Reshape n back"),
        step("u = Mul o g"), step("y = Add u b"),
    ]  # fmt: skip
    operator = calls.graph(tensors, [conv, step("y = GroupNormalization x g b", num_groups=2)])
    same(calls.graph(tensors, [conv, *steps]), operator)


def test_a_folded_batch_norm_runs_and_keeps_its_input() -> None:
    tensors = {"img": "i 2 3 4 4", "w": "w 8 3 1 1", "w_bias": "w 8", "y": "x 2 8 4 4"}
    found = rewritten(calls.graph(tensors, [step("y = Conv img w w_bias")]))
    assert [node.op for node in found.nodes] == ["Conv", "BatchNormalization"]
    assert found.nodes[1].inputs[2] == "w_bias"
    assert len(rewritten(calls.graph({**tensors, "c": "w 8"}, [step("y = Conv img w c")])).nodes) == 1

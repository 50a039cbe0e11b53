"""What a rank's tensors take on torch's meta device beside the plan, and the kernels by which they take no more."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import models  # noqa: E402
import planner  # noqa: E402
from planner import runtime  # noqa: E402
from planner.runtime.fusing import FusedAttention, Repeat, fused  # noqa: E402
from planner.runtime.interpreter import run  # noqa: E402
from planner.runtime.live_bytes import LiveBytes  # noqa: E402
from planner.runtime.model_file import Step  # noqa: E402
from planner.runtime.operators import Context, kernels  # noqa: E402
from planner.runtime.operators.attention import fused_attention  # noqa: E402
from tests.models.graphs import gpt  # noqa: E402

LIKE_LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048,
}  # fmt: skip
LIKE_MIXTRAL = {
    **LIKE_LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512,
}  # fmt: skip
SIZE, SEQ = 2, 256


@functools.cache
def _model(name: str) -> tuple[Any, planner.Graph]:
    deep = name.startswith("deep ")  # its largest block is a layer
    layers, vocab = (8, 512) if deep else (4, 2048)
    size = gpt(layers, 256, 4, vocab, SEQ)
    if "gpt" not in name:
        like = LIKE_LLAMA if name == "llama" else LIKE_MIXTRAL
        size = models.size_of(**{**like, "num_hidden_layers": layers, "vocab_size": vocab})
    proto = models.build_custom(size, batch=SIZE, seq=SEQ)
    return proto, planner.graph_from_proto(proto, name=name)


def _ratios(name: str, degrees: dict[str, Any]) -> list[float]:
    """Of the first rank of each stage, the most bytes that lived at a time over those of the plan."""
    proto, graph = _model(name)
    asked = planner.Degrees(micro_batch=SIZE, **{"data": 1, **degrees})
    job = planner.Job(4 * SIZE * asked.data, precision="fp32", optimizer="adam")
    plan = planner.predict(graph, planner.load_cluster("dgx-h100"), job, asked).plan
    ranks = sorted({stage.ranks[0] for stage in plan.stages})
    found = [runtime.run(plan, proto, steps=2, alone=rank, device="meta").memory[0] for rank in ranks]
    return [rank.measured_bytes / rank.predicted_bytes for rank in found]


@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral"])
@pytest.mark.parametrize(
    "degrees",
    [{"pipeline": 1}, {"pipeline": 1, "recompute": True}, {"pipeline": 2}, {"pipeline": 4}, {"data": 2, "zero": 1}],
    ids=["1 rank", "1 rank, recomputed", "2 stages", "4 stages", "2 replicas, ZeRO-1"],
)
def test_tensors_take_what_the_plan_says(name: str, degrees: dict[str, Any]) -> None:
    for ratio in _ratios(name, degrees):
        assert 0.93 < ratio < 1.03, ratio


@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral"])
@pytest.mark.parametrize("degrees", [{"zero": 2}, {"zero": 3}, {"zero": 3, "recompute": True}])
def test_weights_and_gradients_of_one_block_are_there_at_a_time(name: str, degrees: dict[str, Any]) -> None:
    # a plan counts the largest block twice, as the one at work and as the next, beside the largest workspace
    (sharded,), (whole,) = _ratios(name, {"data": 4, **degrees}), _ratios(name, {"data": 4})
    assert 0.98 < whole < 1.001
    assert 0.85 < sharded < 1.001


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("gpt", {"repeats": ("layernorm", "act")}), ("gpt", {"repeats": ("mlp", "core_attn")}),
        ("gpt", {"repeats": ("Add",)}), ("gpt", {"repeats": ("*.mlp.*",)}),
        ("llama", {"repeats": ("layernorm", "act", "core_attn")}), ("llama", {"repeats": ("mlp",)}),
        ("mixtral", {"repeats": ("moe_act", "layernorm")}), ("mixtral", {"repeats": ("moe",)}),
        ("gpt", {"pipeline": 2, "repeats": ("layernorm", "act")}), ("gpt", {"tensor": 2, "repeats": ("mlp",)}),
        ("llama", {"data": 4, "zero": 3, "repeats": ("layernorm", "mlp")}),
        ("gpt", {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "repeats": ("layernorm", "act")}),
    ],
)  # fmt: skip
def test_modules_that_are_repeated_are_not_kept(name: str, degrees: dict[str, Any]) -> None:
    kept = {key: value for key, value in degrees.items() if key != "repeats"}
    for without, ratio in zip(_ratios(name, kept), _ratios(name, degrees), strict=True):
        assert abs(ratio - without) < 0.04, (ratio, without)
        assert ratio < 1.03


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("deep gpt", {}), ("deep gpt", {"recompute": True}), ("deep gpt", {"recompute": True, "recompute_layers": 1}),
        ("deep gpt", {"repeats": ("layernorm", "act")}), ("deep gpt", {"tensor": 2, "recompute": True}),
        ("deep mixtral", {"repeats": ("moe_act",)}),
    ],
)  # fmt: skip
def test_products_alone_wait_for_the_second_half_of_a_backward(
    name: str, degrees: dict[str, Any], schedule: str
) -> None:
    # with the gradients of their results; layers that are recomputed are there one at a time, but for these
    for ratio in _ratios(name, {"pipeline": 2, "schedule": schedule, **degrees}):
        assert 0.97 < ratio < 1.03, ratio


@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral"])
def test_the_largest_workspace_counts_beside_the_halves_of_a_backward(name: str) -> None:
    # that of the logits here, which is not there when the most is kept
    for ratio in _ratios(name, {"pipeline": 2, "schedule": "zb-v", "recompute": True}):
        assert 0.9 < ratio < 1.05, ratio


def test_ranks_that_share_operators_take_what_the_plan_says() -> None:
    for degrees in ({"tensor": 2}, {"tensor": 2, "recompute": True}):
        assert 0.9 < _ratios("gpt", degrees)[0] < 1.1


def _written_attention(*, divide: bool = False, trained: bool = False) -> tuple[list[Step], dict[str, Any]]:
    steps = [
        Step("Neg", ("q",), ("negative",), {}, 18),
        Step("Mul", ("negative", "s"), ("qs",), {}, 18),
        Step("Transpose", ("k",), ("kt",), {"perm": [0, 1, 3, 2]}, 18),
        Step("MatMul", ("qs", "kt"), ("product",), {}, 18),
        Step("Div" if divide else "Mul", ("product", "s"), ("scaled",), {}, 18),
        Step("Add", ("scaled", "bias"), ("biased",), {}, 18),
        Step("Where", ("seen", "biased", "hidden"), ("scores",), {}, 18),
        Step("Softmax", ("scores",), ("shares",), {"axis": -1}, 18),
        Step("IsNaN", ("shares",), ("nothing",), {}, 18),
        Step("Where", ("nothing", "zero", "shares"), ("kept",), {}, 18),
        Step("MatMul", ("kept", "v"), ("y",), {}, 18),
    ]
    drawn = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(2, 3, 5, 4, generator=drawn, dtype=torch.float64).requires_grad_() for name in ("q", "k", "v")
    }
    numbers = {"s": 0.7, "hidden": -1e30, "zero": 0.0}
    values.update({name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()})
    values["bias"] = torch.randn(3, 5, 5, generator=drawn, dtype=torch.float64).requires_grad_(trained)
    values["seen"] = torch.ones(5, 5, dtype=torch.bool).tril()
    return steps, values


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_written_attention_is_one_kernel_with_the_same_gradients(divide: bool, trained: bool) -> None:
    steps, values = _written_attention(divide=divide, trained=trained)
    together = fused(steps, ["y"])
    assert [type(unit) for unit in together] == [Step, Step, FusedAttention]
    leaves = [x for x in values.values() if x.requires_grad]
    found = []
    for units in (steps, together):
        y = run(units, values, Context(torch.float64), wanted=["y"])["y"]
        fused_kernel = any("ScaledDotProduct" in fn.name() for fn in _functions(y))
        assert fused_kernel == (units is together and not trained)  # no kernel gives a bias its gradient
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)


def _functions(y: Any) -> list[Any]:
    found, stack = [], [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found.append(node)
            stack += [fn for fn, _ in node.next_functions]
    return found


def test_a_softmax_that_others_read_stays() -> None:
    steps, _ = _written_attention()
    assert all(isinstance(unit, Step) for unit in fused(steps, ["y", "shares"]))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_meta_device_has_kernels_that_keep_no_scores(groups: int, masked: bool) -> None:
    live = LiveBytes()
    with live:
        q = torch.zeros(1, 4, 512, 64, device="meta", requires_grad=True)
        k, v = (torch.zeros(1, 4 // groups, 512, 64, device="meta", requires_grad=True) for _ in range(2))
        mask = torch.zeros(512, 512, device="meta") if masked else None
        before = live.now_bytes
        y = fused_attention(q, k, v, mask, 0.125)
        repeated = 2 * k.numel() * groups * 4 if masked and groups > 1 else 0
        assert live.now_bytes - before <= (y.numel() + 4 * 512) * 4 + repeated + 2048  # and a random state
        y.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


def test_an_activation_keeps_its_operand_alone() -> None:
    steps = [
        Step("Sigmoid", ("gate",), ("s",), {}, 18), Step("Mul", ("gate", "s"), ("act",), {}, 18),
        Step("Mul", ("act", "up"), ("y",), {}, 18),
    ]  # fmt: skip
    swish, last = fused(steps, ["y"], listed=["act", "y"])
    assert isinstance(swish, Step)
    assert (swish.op, swish.inputs) == ("Swish", ("gate",))
    assert last == steps[2]
    (gate,) = fused(steps, ["y"], listed=["act", "y"], gates=True)
    assert isinstance(gate, Step)
    assert (gate.op, gate.inputs) == ("SwiGLU", ("gate", "up"))
    wider = [*steps[:2], Step("Erf", ("act",), ("y",), {}, 18)]
    assert [type(unit) for unit in fused(wider, ["y"], listed=["y"])] == [Repeat]
    values = {name: torch.randn(6, dtype=torch.float64, requires_grad=True) for name in ("gate", "up")}
    expected, found = (
        torch.autograd.grad(run(units, values, Context(torch.float64), wanted=["y"])["y"].sum(), [*values.values()])
        for units in (steps, [gate])
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_functions_have_the_gradients_of_what_they_compute() -> None:
    drawn = torch.Generator().manual_seed(5)
    x, scale = (
        torch.randn(*shape, generator=drawn, dtype=torch.float64).requires_grad_() for shape in ((3, 4, 6), (6,))
    )
    check = functools.partial(torch.autograd.gradcheck, raise_exception=True)
    assert check(lambda x, w: kernels.RMSNorm.apply(x, w, (2,), 1e-5), (x, scale))
    assert check(lambda x, w: kernels.repeated(lambda x, w: (x * w, x.sum() * w), (x, w)), (x, scale))
    logits = torch.randn(5, 7, generator=drawn, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([1, 2, -100, 0, 6])
    assert check(lambda x: kernels.cross_entropy(x, labels, -100), (logits,))
    torch.testing.assert_close(
        kernels.cross_entropy(logits, labels, -100), torch.nn.functional.cross_entropy(logits, labels)
    )


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_weights_are_added_in_place(turned: bool) -> None:
    drawn = torch.Generator().manual_seed(7)
    row = torch.randn(100, generator=drawn, dtype=torch.float64)
    leaf = row[20:60].view(8, 5).requires_grad_() if turned else row[20:60].view(5, 8).requires_grad_()
    w = leaf.transpose(0, 1) if turned else leaf
    x = torch.randn(2, 3, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    places = torch.tensor([[0, 2], [2, 4]])
    expected = torch.autograd.grad((x @ w).square().sum() + w[places].square().sum(), [x, leaf])
    sums = torch.ones(100, dtype=torch.float64)
    leaf.grad = sums[20:60].view(leaf.shape)
    total = kernels.product(x, w).square().sum() + kernels.lookup(w, places).square().sum()
    torch.autograd.backward(total, inputs=[x, leaf])
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(sums[20:60].view(leaf.shape), expected[1] + 1)
    assert sums[:20].sum() + sums[60:].sum() == 60
    leaf.grad = None
    total = kernels.product(x, w).square().sum() + kernels.lookup(w, places).square().sum()
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], expected[1])


def test_only_what_outlives_an_update_counts() -> None:
    live = LiveBytes()
    with live:
        kept = torch.zeros(1024, device="meta")
        with live.lasting():
            state = (kept + 1) * 2
    assert live.peak_bytes == live.now_bytes == 4096 + state.numel() * 4

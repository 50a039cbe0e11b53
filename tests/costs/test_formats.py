"""Number formats below 16 bits: bytes of a parameter and of what a layer keeps, seconds of a product, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.costs import Profile, optimizer_state_bytes, precision, profile
from planner.errors import JobError, UsageError
from planner.exchange import kept_bytes, recipe_of
from planner.graph import Graph, Node
from planner.hardware import Curve, Device, load_device
from tests.operators import calls

FLAT = Curve((1.0,), (1.0,))
FAST = {"bf16": 1e12, "fp8": 2e12, "mxfp8": 2e12, "nvfp4": 4e12}
DEVICE = Device("toy", 10**12, 0, FAST, FLAT, 1e15, 1e9, FLAT, launch_s=0.0)
"""One byte a nanosecond; a bf16 multiply-add every two picoseconds."""


@pytest.mark.parametrize(
    ("name", "optimizer", "held", "gathered", "gradients", "sent", "state"),
    [
        ("bf16", "adam", 2, 2, 2, 2, 4 + 4 + 4),
        ("bf16", "adam:moments=bf16", 2, 2, 2, 2, 4 + 2 + 2),
        ("bf16:grads=fp32", "adam", 2, 2, 4, 4, 12),
        ("bf16:grads=fp32,reduce=bf16", "adam", 2, 2, 4, 2, 12),
        ("fp8", "adam", 1 + 1, 1, 2, 2, 12),  # by rows and by columns
        ("fp8-cs", "adam:moments=bf16", 1 + 1, 1, 2, 2, 8),
        ("fp8-cs:weights=bf16", "adam", 2 + 1 + 1, 2, 2, 2, 12),
        ("fp8-blockwise", "sgd", 2 + 2 * (1 + 4 / 128), 2, 2, 2, 4),
        ("mxfp8", "adam", 2 * (1 + 1 / 32), 2, 2, 2, 12),  # ranks gather bf16 and cast
        ("mxfp8:weights=bf16,grads=fp32", "adam", 2 + 2 * (1 + 1 / 32), 2, 4, 4, 12),
        ("nvfp4", "momentum:moments=bf16", 2 + 2 * (1 / 2 + 1 / 16), 2, 2, 2, 4 + 2),
    ],
)
def test_bytes_of_a_parameter(
    name: str, optimizer: str, held: float, gathered: float, gradients: float, sent: float, state: float
) -> None:
    chosen = precision(name)
    assert chosen.name == name
    assert chosen.held_weight_bytes == held
    assert chosen.weight_bytes == gathered
    assert chosen.held_gradient_bytes == gradients
    assert chosen.gradient_bytes == sent
    assert optimizer_state_bytes(optimizer, chosen) == state


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp9", "unknown precision 'fp9'"),
        ("mxfp8:grad=fp32", "precision 'mxfp8' has no option 'grad'"),
        ("mxfp8:grads=fp64", "cannot read 'fp64'"),
        ("bf16:last=2", "'bf16:last=2' cannot have last"),
        ("fp8:first=-1", "cannot have first"),
        ("fp8:weights=fp32", "cannot have weights"),
    ],
)
def test_names_that_say_nothing(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        precision(name)


def test_an_optimizer_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="optimizer 'adam' has no option 'state'"):
        optimizer_state_bytes("adam:state=bf16", precision("bf16"))


def node(op: str, inputs: str, outputs: str, module: str = "", **attributes: int) -> Node:
    names = tuple(outputs.split())
    return Node(names[0], op, tuple(inputs.split()), names, attributes, module)


def linear(rows: int = 256, inner: int = 512, columns: int = 1024) -> Graph:
    """A rectifier, which keeps its result, a linear layer that reads it, and a rectifier."""
    tensors = {"x": f"i {rows} {inner}", "a": f"w {inner} {inner}", "g": f"x {rows} {inner}", "h": f"x {rows} {inner}"}
    tensors |= {"b": f"w {inner} {columns}", "y": f"x {rows} {columns}", "z": f"x {rows} {columns}"}
    nodes = [node("MatMul", "x a", "g"), node("Relu", "g", "h"), node("MatMul", "h b", "y"), node("Relu", "y", "z")]
    return replace(calls.graph(tensors, nodes), batch=rows)


def of(made: Graph, name: str, device: Device = DEVICE) -> Profile:
    return profile(made, device, precision=name, loss=False)


BOTH = 256 * 512 * 2
"""Bytes of `h` in bf16, which the activation keeps as its result."""


@pytest.mark.parametrize(
    ("name", "byte_count"),
    [
        ("bf16", BOTH),
        ("fp8", BOTH + 256 * 512),
        ("fp8-blockwise", BOTH + 256 * 512 * (1 + 4 / 128)),
        ("mxfp8", BOTH + 256 * 512 * (1 + 1 / 32)),
        ("nvfp4", BOTH + 256 * 512 * (1 / 2 + 1 / 16)),
    ],
)
def test_a_linear_layer_keeps_its_own_cast_beside_what_others_keep(name: str, byte_count: float) -> None:
    found = of(linear(), name)
    assert {s.storage: s.byte_count for s in found.saved[2]}["h"] == byte_count
    assert {s.storage: s.byte_count for s in found.saved[1]}["h"] == byte_count


def test_a_linear_layer_keeps_its_cast_alone() -> None:
    tensors = {"x": "i 64 64", "a": "w 64 64", "h": "x 64 64", "b": "w 64 128", "y": "x 64 128", "z": "x 64 128"}
    made = replace(
        calls.graph(tensors, [node("MatMul", "x a", "h"), node("MatMul", "h b", "y"), node("Relu", "y", "z")]), batch=64
    )
    assert [(s.storage, s.byte_count) for s in of(made, "bf16").saved[1]] == [("h", 64 * 64 * 2)]
    assert [(s.storage, s.byte_count) for s in of(made, "mxfp8").saved[1]] == [("h", 64 * 64 + 64 * 2)]


X, W, Y = 256 * 512, 512 * 1024, 256 * 1024
FLOPS = 2 * 256 * 512 * 1024


@pytest.mark.parametrize(
    ("name", "e", "readings", "rate"),
    [("fp8", 1, 1, 2e12), ("fp8-cs", 1, 2, 2e12), ("mxfp8", 1 + 1 / 32, 1, 2e12), ("nvfp4", 1 / 2 + 1 / 16, 2, 4e12)],
)
def test_seconds_of_a_product_and_its_casts(name: str, e: float, readings: int, rate: float) -> None:
    slow = of(linear(), name, replace(DEVICE, memory_byte_per_s=1e9))  # memory decides
    forward = (X + W) * e + 2 * Y
    backward = (2 * Y + X + W) * e + 2 * (X + W)
    assert slow.forward_s[2] * 1e9 == pytest.approx(forward + X * (2 * readings + 2 * e))
    assert slow.backward_s[2] * 1e9 == pytest.approx(backward + Y * (2 * readings + 2 * e))
    fast = of(linear(), name, replace(DEVICE, memory_byte_per_s=1e18))  # the matrix units decide
    assert fast.forward_s[2] == pytest.approx(FLOPS / rate, rel=1e-6)
    assert fast.backward_s[2] == pytest.approx(2 * FLOPS / rate, rel=1e-6)


def test_a_format_reaches_part_of_the_curve() -> None:
    device = replace(DEVICE, memory_byte_per_s=1e18, format_rates={"fp8": 0.5})
    assert of(linear(), "fp8", device).forward_s[2] == pytest.approx(FLOPS / (0.5 * 2e12), rel=1e-6)
    assert of(linear(), "bf16", device).forward_s[2] == pytest.approx(FLOPS / 1e12, rel=1e-6)


def test_products_of_one_activation_share_its_cast() -> None:
    tensors = {"x": "i 64 64", "a": "w 64 64", "h": "x 64 64", "b": "w 64 64", "c": "w 64 64"}
    tensors |= {"p": "x 64 64", "q": "x 64 64", "s": "x 64 64"}
    nodes = [
        node("MatMul", "x a", "h"),
        node("MatMul", "h b", "p"),
        node("MatMul", "h c", "q"),
        node("Add", "p q", "s"),
    ]
    found = of(replace(calls.graph(tensors, nodes), batch=64), "fp8")
    assert (found.forward_s[1] - found.forward_s[2]) * 1e9 == pytest.approx(64 * 64 * (2 + 1 + 1))


def test_a_product_without_backward_is_cast_once() -> None:
    tensors = {"x": "i 64 64", "a": "w 64 64", "h": "x 64 64", "y": "x 64 64"}
    found = of(replace(calls.graph(tensors, [node("MatMul", "x a", "h"), node("Relu", "h", "y")]), batch=64), "fp8")
    # only the weight's gradient: h's gradient by columns, x by columns, the result in bf16
    assert found.backward_s[0] * 1e9 == pytest.approx(64 * 64 * (1 + 1 + 2) + 64 * 64 * (2 + 1))


def test_routers_heads_and_odd_rows_stay_wide() -> None:
    tensors = {"x": "i 64 64", "a": "w 64 64", "h": "x 64 64", "r": "w 64 32", "s": "x 64 32", "p": "x 64 32"}
    tensors |= {"v": "x 64 2", "i": "x 64 2", "o": "w 64 40", "u": "x 64 40", "b": "w 64 96", "y": "x 64 96"}
    nodes = [
        node("MatMul", "x a", "h"),
        node("MatMul", "h r", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("TopK", "p", "v i"),
        node("MatMul", "h o", "u"),
        node("MatMul", "h b", "y"),
    ]
    made = replace(calls.graph(tensors, nodes), batch=64, outputs=("v", "u", "y"))
    found = profile(made, DEVICE, precision="mxfp8")
    assert found.formats == ("mxfp8", "bf16", "bf16", "bf16", "bf16", "mxfp8")  # 40 columns are no multiple of 32
    headed = profile(replace(made, outputs=("y",)), DEVICE, precision="mxfp8")
    assert headed.formats == ("mxfp8", "bf16", "bf16", "bf16", "bf16", "bf16")  # y are logits


def test_layers_at_the_ends_stay_wide() -> None:
    tensors = {"x": "i 64 64", **{f"w{i}": "w 64 64" for i in range(4)}, **{f"h{i}": "x 64 64" for i in range(4)}}
    tensors["y"] = "x 64 64"
    names = ["x", "h0", "h1", "h2"]
    nodes = [node("MatMul", f"{names[i]} w{i}", f"h{i}", f"layers.{i}.fc") for i in range(4)]
    nodes.append(node("Relu", "h3", "y"))
    made = replace(calls.graph(tensors, nodes), batch=64)
    assert of(made, "fp8:first=1,last=2").formats == ("bf16", "fp8", "bf16", "bf16", "bf16")


def test_a_format_that_a_device_lacks() -> None:
    with pytest.raises(JobError, match="h100-sxm-80gb does not compute in mxfp8, but in bf16") as raised:
        of(linear(), "mxfp8", load_device("h100-sxm-80gb"))
    assert raised.value.problem.hint == "use --precision fp8 or fp8-cs or fp8-blockwise"
    with pytest.raises(JobError, match="a100-sxm-80gb does not compute in fp8"):
        of(linear(), "fp8", load_device("a100-sxm-80gb"))
    assert of(linear(), "nvfp4", load_device("b200-sxm-180gb")).formats[2] == "nvfp4"


@pytest.mark.parametrize(
    ("zero", "weights", "beside"),
    [
        (0, 100 * (2 + 0.0625), 0),
        (1, 100 * (2 + 0.0625), 0),
        (3, 100 * 2 / 4, 2 * 30 * (2 + 0.0625) + 30 * 2),  # two gathered units with their casts, gradients of one
    ],
)
def test_narrow_copies_are_made_of_what_a_rank_has(zero: int, weights: float, beside: float) -> None:
    chosen = precision("mxfp8")
    kept = kept_bytes(
        recipe_of(zero), chosen, 12.0, lambda group: 1 if group is None else 4, 100.0, 30.0,
        copy_bytes=chosen.copy_bytes,
    )  # fmt: skip
    assert kept.weights == weights
    assert kept.transient == beside
    assert kept.optimizer == (100 * 12 if zero == 0 else 100 * 12 / 4)


def test_a_plan_holds_and_sends_what_its_formats_say() -> None:
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-b200")
    job = planner.Job(
        64, precision="fp8-cs:grads=fp32,reduce=bf16", optimizer="adam:moments=bf16", zero=(1,),
        pipeline_stages=(1,), tensor_parallel=(1,), data_parallel=(8,),
    )  # fmt: skip
    plan = planner.plan(graph, cluster, job)
    stage, elements = plan.predictions.stages[0], plan.model.parameters
    assert stage.memory.weights_bytes == pytest.approx(elements * (1 + 1), abs=1)
    assert stage.memory.gradients_bytes == pytest.approx(elements * 4, abs=1)
    assert stage.memory.optimizer_bytes == pytest.approx(elements * (4 + 2 + 2) / 8, abs=1)
    sent = {c.of: c.bytes for c in stage.collectives}
    assert sent == {"gradients": elements * 2, "weights": elements * 1}
    assert planner.check_plan(plan, graph, cluster).findings == ()

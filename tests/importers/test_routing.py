"""Mixtures of experts written out as loops: how many rows each expert is taken to be sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import planner
from planner.importers import graph_from_proto
from tests.importers.build import absent, ints, model, node, value

Masks = Callable[[int], list[onnx.NodeProto]]
SEQ, WIDTH, INNER, EXPERTS, CHOSEN = 16, 8, 32, 4, 2


def mask_of_places(expert: int) -> list[onnx.NodeProto]:
    """As older Mixtral and Qwen modules write it: a one-hot [rows, k, experts], turned, one expert of it."""
    return [
        node("OneHot", ["places", "depth", "off_on"], [f"hot{expert}"], axis=-1),
        node("Transpose", [f"hot{expert}"], [f"turned{expert}"], perm=[2, 1, 0]),
        node("Gather", [f"turned{expert}", f"number{expert}"], [f"mask{expert}"], axis=0),
    ]


def compared_places(expert: int) -> list[onnx.NodeProto]:
    """As DeepSeek's module writes it: places equal to the expert's number."""
    return [
        node("Equal", ["places", f"number{expert}"], [f"equal{expert}"]),
        node("Transpose", [f"equal{expert}"], [f"mask{expert}"], perm=[1, 0]),
    ]


def rows_of_experts(expert: int) -> list[onnx.NodeProto]:
    """A table [rows, experts] with ones at the chosen places, one column of it, for every slot."""
    return [
        node("Mul", ["logits", "zero"], [f"zeros{expert}"]),
        node("ScatterElements", [f"zeros{expert}", "places", "ones"], [f"table{expert}"], axis=1),
        node("Gather", [f"table{expert}", f"number{expert}"], [f"column{expert}"], axis=1),
        node("Unsqueeze", [f"column{expert}", "first"], [f"mask{expert}"]),
    ]


def loop(masks: Masks) -> onnx.ModelProto:
    nodes = [
        node("Shape", ["x"], ["shape"]), node("Reshape", ["x", "rows"], ["h"]),
        node("MatMul", ["h", "router"], ["logits"]), node("Softmax", ["logits"], ["scores"], axis=-1),
        node("TopK", ["scores", "k"], ["chosen", "places"], axis=-1), node("Mul", ["h", "zero"], ["sum0"]),
    ]  # fmt: skip
    stored = [
        ints("rows", [-1, WIDTH]), ints("k", [CHOSEN]), ints("depth", EXPERTS), ints("off_on", [0, 1]),
        ints("halves", [1, 1]), ints("first", [0]), ints("last", [1]), absent("router", [WIDTH, EXPERTS]),
        numpy_helper.from_array(np.zeros((), np.float32), "zero"),
        numpy_helper.from_array(np.ones((2 * SEQ, CHOSEN), np.float32), "ones"),
    ]  # fmt: skip
    for e in range(EXPERTS):
        stored += [ints(f"number{e}", e), absent(f"up{e}", [WIDTH, INNER]), absent(f"down{e}", [INNER, WIDTH])]
        nodes += [
            *masks(e), node("NonZero", [f"mask{e}"], [f"found{e}"]),
            node("Split", [f"found{e}", "halves"], [f"slots{e}", f"picks{e}"], axis=0),
            node("Squeeze", [f"picks{e}", "first"], [f"row{e}"]), node("Gather", ["h", f"row{e}"], [f"own{e}"], axis=0),
            node("MatMul", [f"own{e}", f"up{e}"], [f"wide{e}"]), node("Relu", [f"wide{e}"], [f"active{e}"]),
            node("MatMul", [f"active{e}", f"down{e}"], [f"made{e}"]),
            node("Unsqueeze", [f"row{e}", "last"], [f"at{e}"]),
            node("ScatterND", [f"sum{e}", f"at{e}", f"made{e}"], [f"sum{e + 1}"], reduction="add"),
        ]  # fmt: skip
    nodes.append(node("Reshape", [f"sum{EXPERTS}", "shape"], ["y"]))
    shape = ["batch", SEQ, WIDTH]
    return model(nodes, [value("x", shape)], [value("y", shape)], stored, opset=18)


def work_of(rows: int) -> float:
    """FLOPs: the router's product, and for each row two products in each of the experts that it is sent to."""
    return 2.0 * rows * WIDTH * EXPERTS + CHOSEN * rows * 2 * 2.0 * WIDTH * INNER


@pytest.mark.parametrize("masks", [mask_of_places, compared_places, rows_of_experts])
def test_experts_in_a_loop_compute_the_rows_that_are_sent_to_them(masks: Masks) -> None:
    graph = graph_from_proto(loop(masks), dims={"batch": 2})
    assert graph.tensors["own0"].shape == (2 * SEQ * CHOSEN // EXPERTS, WIDTH)
    (said,) = [n.message for n in graph.report.notes if n.code == "experts-even"]
    assert said == (
        "4 experts find their rows by data; with each of a layer picked equally often, they are 16 in NonZero 'found0'"
    )
    device = planner.load_cluster("dgx-a100").devices[0]
    priced = planner.profile(graph, device, precision="fp32", loss=False)
    assert priced.forward_flops.sum() == work_of(2 * SEQ)


@pytest.mark.parametrize("masks", [mask_of_places, compared_places])
def test_experts_in_a_loop_follow_the_batch(masks: Masks) -> None:
    graph = graph_from_proto(loop(masks), dims={"batch": 2})
    larger = planner.rebatch(graph, 6)
    assert larger.tensors["own3"].shape == (6 * SEQ * CHOSEN // EXPERTS, WIDTH)
    device = planner.load_cluster("dgx-a100").devices[0]
    assert planner.profile(larger, device, precision="fp32", loss=False).forward_flops.sum() == work_of(6 * SEQ)

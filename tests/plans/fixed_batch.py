"""A small ONNX file that is fixed at one batch, and plans of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import planner

BATCH, WIDTH = 2, 8


def model_file(path: Path) -> Path:
    """Two layers over [batch, 3, 8]: shapes with the batch in constants, a reshape that changes nothing, a table with a
    row for each sample, and an operator that no output needs."""
    draw = np.random.default_rng(0)
    float32, shape = TensorProto.FLOAT, [BATCH, 3, WIDTH]
    weights = {f"w{k}": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) for k in range(2)}
    weights["table"] = np.broadcast_to(draw.standard_normal((1, 3, WIDTH)), shape).astype(np.float32)
    sizes = {"flat": [BATCH * 3, WIDTH], "back": shape, "same": [BATCH, -1, WIDTH]}
    nodes = [helper.make_node("Add", ["x", "table"], ["h0"])]
    for k in range(2):
        nodes += [
            helper.make_node("Reshape", [f"h{k}", "flat"], [f"rows{k}"]),
            helper.make_node("MatMul", [f"rows{k}", f"w{k}"], [f"product{k}"]),
            helper.make_node("Reshape", [f"product{k}", "back"], [f"cube{k}"]),
            helper.make_node("Reshape", [f"cube{k}", "same"], [f"alike{k}"]),
            helper.make_node("Tanh", [f"alike{k}"], [f"h{k + 1}"]),
        ]
    nodes.append(helper.make_node("Reshape", ["h1", "flat"], ["unused"]))
    initializers = [numpy_helper.from_array(x, name) for name, x in weights.items()]
    initializers += [numpy_helper.from_array(np.array(x, np.int64), name) for name, x in sizes.items()]
    graph = helper.make_graph(
        nodes, "fixed", [helper.make_tensor_value_info("x", float32, shape)],
        [helper.make_tensor_value_info("h2", float32, shape)], initializers,
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, path)
    return path


def plan_of(path: Path, micro_batch: int) -> planner.Plan:
    job = planner.Job(global_batch=8, precision="fp32", optimizer="sgd", devices=2)
    degrees = planner.Degrees(pipeline=2, micro_batch=micro_batch)
    return planner.predict(planner.load_graph(path), planner.load_cluster("dgx-a100"), job, degrees).plan

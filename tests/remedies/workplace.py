"""A folder with small files of every kind, in which commands are refused and their remedies followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cli.main import main
from tests.fuzz import others
from tests.fuzz.formats import PROFILE
from tests.importers.build import absent, model, node, scoped, value
from tests.published.partition.instances import PIPEDREAM, operator_graph, piper

UNEVEN = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV4\tSYS\nGPU1\tNV4\t X \tSYS\nGPU2\tSYS\tSYS\t X \n"
"""A matrix of two joined GPUs and a single one."""


def perceptron(batch: int | str) -> onnx.ModelProto:
    """Four linear layers; the batch is a size, or the name of an axis."""
    nodes, last = [], "x"
    for i in range(4):
        nodes += [scoped(node("Gemm", [last, f"{i}.weight", f"{i}.bias"], [f"h{i}"], transB=1), str(i), "aten.addmm")]
        last = f"h{i}"
    weights = [absent(f"{i}.weight", [16, 16]) for i in range(4)] + [absent(f"{i}.bias", [16]) for i in range(4)]
    return model(nodes, [value("x", [batch, 16])], [value(last, [batch, 16])], weights)


def convolution() -> onnx.ModelProto:
    """A convolution with a window of 3 over an image of open height."""
    nodes = [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3])]
    return model(nodes, [value("x", [2, 3, "h", 8])], [value("y", [2, 4, None, 6])], [absent("w", [4, 3, 3, 3])])


def loop() -> onnx.ModelProto:
    """A Loop that does not say how often it runs."""
    state = helper.make_tensor_value_info("s", TensorProto.FLOAT, [4, 4])
    counter = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    body = helper.make_graph(
        [helper.make_node("MatMul", ["s", "w"], ["t"]), helper.make_node("Identity", ["c"], ["d"])], "body",
        [counter, condition, state],
        [helper.make_tensor_value_info("d", TensorProto.BOOL, []),
         helper.make_tensor_value_info("t", TensorProto.FLOAT, [4, 4])],
    )  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Loop", ["", "yes", "x"], ["y"], name="turns", body=body)], "looped",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
        [numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.ones((4, 4), np.float32), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def unpriced() -> onnx.ModelProto:
    """A product and an operator that has no rule."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Mystery", ["h"], ["y"], domain="acme")]
    made = model(nodes, [value("x", [4, 8])], [value("y", [4, 8])], [absent("w", [8, 8])])
    made.graph.value_info.append(value("h", [4, 8]))
    made.opset_import.add(domain="acme", version=1)
    return made


def fill(folder: Path) -> None:
    """Write the files."""
    os.environ.setdefault("COLUMNS", "200")
    (folder / "toy.onnx").write_bytes(perceptron("batch").SerializeToString())
    (folder / "fixed.onnx").write_bytes(perceptron(4).SerializeToString())
    (folder / "loop.onnx").write_bytes(loop().SerializeToString())
    (folder / "unpriced.onnx").write_bytes(unpriced().SerializeToString())
    (folder / "conv.onnx").write_bytes(convolution().SerializeToString())
    (folder / "lab.yaml").write_text(PROFILE)
    (folder / "instance.json").write_text(json.dumps(operator_graph()))
    (folder / "piper.json").write_text(json.dumps(piper()))
    (folder / "profile.graph.txt").write_text(PIPEDREAM)
    (folder / "orders.csv").write_text(others.ORDERS[0])
    (folder / "runs.csv").write_text(others.RUNS)
    (folder / "nccl.txt").write_text(others.nccl_text())
    (folder / "nameless.txt").write_text(others.nccl_text().replace("all_reduce_perf", ""))
    (folder / "topology.txt").write_text(others.topology_text())
    (folder / "uneven.txt").write_text(UNEVEN)
    (folder / "exists.yaml").write_text("here\n")
    (folder / "config.json").write_text(json.dumps(others.CONFIGURATIONS[0]))
    for line in (
        "plan toy.onnx -H v100-pcie-4 -b 8 -o toy.plan.json -q",
        "plan toy.onnx -H v100-pcie-4 -b 8 --pp 2 --tp 1 -o two.plan.json -q",
        "plan toy.onnx -H v100-pcie-4 -b 8 --tp 2 --pp 2 -o tensor.plan.json -q",
        "plan instance.json --time-limit 2s -o instance.partition.json -q",
        "profile fixed.onnx -d t4-16gb -o fixed.costs.json",
    ):
        assert answer(folder, line)[0] == 0, line
    kept = json.loads((folder / "toy.plan.json").read_text())
    kept["provenance"] |= {"model": "", "hardware": ""}
    (folder / "nameless.plan.json").write_text(json.dumps(kept))


def answer(folder: Path, line: str) -> tuple[int, str]:
    """Exit code and standard error of a command line."""
    import contextlib
    import io

    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    code: object = 0
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line.split())
        except SystemExit as end:
            code = end.code or 0
    return int(str(code)), err.getvalue()

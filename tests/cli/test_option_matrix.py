"""Every option in every way to plan: the plan has what was asked for, or the option is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import planner
from tests.cli.plan_files import run

BLOCKS, WIDTH, BATCH = 8, 64, 16
ORDERS = "worker,kind,stage,micro_batch\n" + "".join(
    f"{worker},{kind},{worker},{m}\n" for worker in (0, 1) for kind in ("F", "B") for m in range(4)
)
"""Two stages, four micro-batches, all forwards before all backwards."""
TIMES = " -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=4096.0, parameter_size="
PROFILE = "\n".join(
    [
        "node0 -- Input" + TIMES + "0.000",
        *(f"node{i} -- Linear{TIMES}16384.000" for i in range(1, 5)),
        *(f"\tnode{i} -- node{i + 1}" for i in range(4)),
    ]
)
"""Four layers with measured times."""

Check = Callable[[planner.Plan], bool]
OPTIONS: dict[str, Check] = {
    "--devices 2": lambda p: p.world_size <= 2,
    "--micro-batch 2": lambda p: p.micro_batches.size == 2,
    "--schedule gpipe": lambda p: p.schedule.name == "gpipe",
    "--precision fp32": lambda p: p.options.precision == "fp32",
    "--optimizer sgd": lambda p: p.predictions.stages[0].memory.optimizer_bytes < 2 * 4 * p.model.parameters,
    "--recompute always": lambda p: all(s.recompute for s in p.stages),
    "--recompute never": lambda p: not any(s.recompute for s in p.stages),
    "--zero 0": lambda p: all(s.zero == 0 for s in p.stages),
    "--zero 3": lambda p: all(s.zero == 3 for s in p.stages),
    "--tp 1": lambda p: {s.group_ranks for s in p.stages} == {1},
    "--tp 2": lambda p: {s.group_ranks for s in p.stages} == {2},
    "--pp 2": lambda p: len(p.stages) == 2,
    "--dp 2": lambda p: {len(s.replicas) for s in p.stages} == {2},
    "--mesh 2x2": lambda p: {tuple(a.size for a in s.axes) for s in p.shardings} == {(2, 2)},
    "--mesh 2x2 --pp 1": lambda p: {s.group_ranks for s in p.stages} == {4},
    "--keep block0=0 --pp 2": lambda p: "block0" in p.stages[0].modules[0],
    "--forbid MatMul:k": lambda p: p.options.forbid == ("MatMul:k",),
    "--uniform": lambda p: len({len(s.replicas) for s in p.stages}) == 1,
    "--max-stages 2": lambda p: len(p.stages) <= 2,
    "--overlap 0.5": lambda p: p.options.overlap == 0.5,
    "--attention eager": lambda p: not p.options.fused_attention,
    "--no-dropout": lambda p: not p.options.dropout,
    "--assume-dropout": lambda p: p.options.assume_dropout,
    "--nodes 2": lambda p: p.hardware.device_count == 16,
}
PRICED = {"--devices 2", "--micro-batch 2", "--precision fp32", "--optimizer sgd", "--nodes 2"}
PRICED |= {"--attention eager", "--no-dropout", "--assume-dropout"}
GIVEN = PRICED | {"--recompute always", "--recompute never", "--zero 0", "--tp 1", "--pp 2", "--dp 2", "--uniform"}
GIVEN |= {"--max-stages 2"}
MODES: dict[str, tuple[str, set[str]]] = {
    "search": ("model", set(OPTIONS)),
    "--system gpipe": ("model", PRICED),
    "--system pipedream": ("model", PRICED),
    "--system pipemare": ("model", PRICED),
    "--system data-parallel": ("model", PRICED),
    "--system hetpipe": ("model", PRICED),
    "--system gshard": ("model", PRICED),
    "--system tofu": ("model", PRICED),
    "--system mesh-tensorflow": ("model", PRICED),
    "--schedule zb-h1": ("model", GIVEN),
    "--schedule chimera": ("model", GIVEN),
    "--schedule interleaved --micro-batch 2": ("model", GIVEN - {"--pp 2", "--max-stages 2"}),
    "--schedule-file orders.csv": ("model", GIVEN),
    "measured times": (
        "profile",
        set(OPTIONS)
        - {"--attention eager", "--no-dropout", "--assume-dropout", "--keep block0=0 --pp 2", "--forbid MatMul:k"},
    ),
}
"""The command line of each way to plan, its model, and the options that it follows; it refuses all others."""


def deep(path: Path) -> Path:
    """A perceptron of as many equal layers as there are blocks."""
    names = [f"block{i}" for i in range(BLOCKS)]
    weights = [helper.make_tensor(f"{n}.w", TensorProto.FLOAT, [WIDTH] * 2, [0.0] * WIDTH**2) for n in names]
    nodes = [
        helper.make_node("MatMul", [names[i - 1] if i else "x", f"{n}.w"], [n], name=f"/{n}/MatMul")
        for i, n in enumerate(names)
    ]
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, [1, WIDTH])], [value(names[-1], TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "deep", *ends, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("matrix")
    deep(made / "model.onnx")
    (made / "model.graph.txt").write_text(PROFILE)
    (made / "orders.csv").write_text(ORDERS)
    return made


def arguments(folder: Path, mode: str, option: str) -> list[str]:
    """A command line that plans in one of the ways with one further option."""
    model = folder / {"model": "model.onnx", "profile": "model.graph.txt"}[MODES[mode][0]]
    line = (
        ["--dim", "batch=4"]
        if mode == "measured times"
        else []
        if not mode.startswith("--")
        else mode.replace("orders.csv", str(folder / "orders.csv")).split()
    )
    return [str(model), "-H", "dgx-a100", "-b", str(BATCH), *line, *option.split()]


@pytest.mark.parametrize("mode", MODES)
def test_every_option_is_followed_or_refused_by_name(
    mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for option, holds in OPTIONS.items():
        code = run("plan", *arguments(folder, mode, option), "--format", "json")
        said = capsys.readouterr()
        if option in MODES[mode][1]:
            if code or not holds(planner.load_plan(said.out)):
                wrong.append(f"{option}: not followed ({code}, {said.err.strip()})")
        elif code not in (2, 5) or not any(word in said.err for word in option.split()) or "(" not in said.err:
            wrong.append(f"{option}: not refused ({code}, {said.err.strip()})")
    assert not wrong, "\n".join([mode, *wrong])

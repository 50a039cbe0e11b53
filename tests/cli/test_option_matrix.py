"""Every option in every way to plan: the plan has what was asked for, or the option is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import planner
from tests.cli.plan_files import run

BLOCKS, WIDTH, BATCH = 4, 64, 8
ORDERS = "worker,action\n" + "".join(
    f"{worker},{kind}{worker}.{m}\n" for worker in (0, 1) for kind in ("F", "B") for m in range(4)
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

POOL = "-H ethernet-10g --nodes 1"
"""Four devices: eight take five times as long to plan for."""

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
    "--pp 2": lambda p: len({s.replicas[0] for s in p.stages}) == 2,
    "--dp 2": lambda p: {len(s.replicas) for s in p.stages} == {2},
    "--mesh 2x2 --nodes 2": lambda p: {tuple(a.size for a in s.axes) for s in p.shardings} == {(2, 2)},
    "--mesh 2x2 --pp 1": lambda p: {s.group_ranks for s in p.stages} == {4},
    "--keep block0=0 --pp 2": lambda p: "block0" in p.stages[0].modules[0],
    "--forbid MatMul:k": lambda p: p.options.forbid == ("MatMul:k",),
    "--uniform": lambda p: len({len(s.replicas) for s in p.stages}) == 1,
    "--max-stages 2": lambda p: len(p.stages) <= 2,
    "--overlap 0.5": lambda p: p.options.overlap == 0.5,
    "--headroom 20%": lambda p: p.hardware.headroom == p.options.headroom == 0.2,
    "--attention eager": lambda p: not p.options.fused_attention,
    "--no-dropout": lambda p: not p.options.dropout,
    "--assume-dropout": lambda p: p.options.assume_dropout,
    "--for deepspeed": lambda p: p.runs_on == ("deepspeed",),
    "--nodes 2": lambda p: p.hardware.device_count == 8,
}
PRICED = {"--devices 2", "--micro-batch 2", "--precision fp32", "--optimizer sgd", "--nodes 2"}
PRICED |= {"--headroom 20%", "--attention eager", "--no-dropout", "--assume-dropout"}
ORDERED = set(OPTIONS) - {"--schedule gpipe", "--mesh 2x2 --pp 1", "--for deepspeed"}
"""What plans for one schedule of two stages and more follow."""

MODEL_ONLY = {"--attention eager", "--no-dropout", "--assume-dropout", "--keep block0=0 --pp 2", "--forbid MatMul:k"}
"""What a model with measured times has nothing of."""

MODES: dict[str, set[str]] = {
    "model.onnx": set(OPTIONS),
    "model.onnx --system gpipe": PRICED,
    "model.onnx --system pipedream": PRICED,
    "model.onnx --system pipemare": PRICED,
    "model.onnx --system data-parallel": PRICED,
    "model.onnx --system hetpipe": PRICED,
    "model.onnx --system gshard": PRICED,
    "model.onnx --system tofu": PRICED,
    "model.onnx --system mesh-tensorflow": PRICED,
    "model.onnx --schedule zb-h1": ORDERED,
    "model.onnx --schedule chimera": ORDERED,
    "model.onnx --schedule interleaved --micro-batch 2": ORDERED - {"--max-stages 2"},
    "model.onnx --schedule-file orders.csv": ORDERED,
    "model.graph.txt --dim batch=4": set(OPTIONS) - MODEL_ONLY,
}
"""The command line of each way to plan, and the options that it follows; it refuses all others."""


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


def arguments(folder: Path, line: str) -> list[str]:
    """A command line with the files of the folder."""
    return [str(folder / word) if (folder / word).exists() else word for word in line.split()]


@pytest.mark.parametrize("mode", MODES)
def test_every_option_is_followed_or_refused_by_name(
    mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for option, holds in OPTIONS.items():
        if "--schedule " in mode and "--schedule" in option:
            continue  # one more schedule to choose from
        code = run("plan", *arguments(folder, f"{mode} {POOL} -b {BATCH} {option}"), "--format", "json")
        said = capsys.readouterr()
        if option in MODES[mode]:
            if code or not holds(planner.load_plan(said.out)):
                wrong.append(f"{option}: not followed ({code}, {said.err.strip()})")
        elif code not in (2, 5) or not any(word in said.err for word in option.split()) or "(" not in said.err:
            wrong.append(f"{option}: not refused ({code}, {said.err.strip()})")
    assert not wrong, "\n".join([mode, *wrong])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("compare MODEL -H dgx-a100 -b 16 --systems gpipe --precision bf61", 2, "did you mean 'bf16'"),
        ("compare MODEL -H dgx-1v -b 16 --systems gpipe --precision bf16", 5, "compute in bf16, but in fp16, fp32"),
        ("profile MODEL -d t4-16gb --precision bf16", 5, "compute in bf16, but in fp16, fp32, int8"),
        ("profile MODEL -d t4-16gb --precision tf32", 5, "use --precision fp32 or fp16"),
        ("profile MODEL -d t4-16gb --cache x", 2, "--cache does not apply"),
        ("profile MODEL -d t4-16gb --format json --top 3", 2, "--top does not apply to --format json"),
        ("profile MODEL --measure --precision fp16", 2, "--precision does not apply to --measure"),
        ("profile MODEL --measure --assume-dropout", 2, "--assume-dropout does not apply to --measure"),
        ("profile TIMES -d t4-16gb", 2, "--device does not apply to a model that carries measured times"),
        ("profile TIMES --precision fp16", 2, "--precision does not apply to a model that carries measured times"),
        ("simulate PLAN --format json --width 80", 2, "--width does not apply to --format json"),
        ("simulate PLAN --overlap-transfers --format json", 0, '"transfers": "overlapped"'),
        ("explain PLAN --model MODEL", 2, "--model and --hardware must be given together"),
        ("explain PLAN --nodes 2", 2, "--nodes needs --hardware"),
        ("explain PLAN --dim batch=2", 2, "--dim needs --model"),
        (
            "plan MODEL -H dgx-1v -b 16 --precision bf16",
            5,
            "v100-sxm2-16gb does not compute in bf16, but in fp16, fp32",
        ),
        (
            "plan TIMES -H dgx-1v -b 16 --precision bf16",
            5,
            "v100-sxm2-16gb does not compute in bf16, but in fp16, fp32",
        ),
        ("plan MODEL -H dgx-a100 -b 16 --dim depth=2", 3, "no symbolic axis 'depth'"),
        ("plan MODEL -H dgx-1v -b 16", 0, "fp16 (no bf16 on v100-sxm2-16gb), adam"),
        ("plan MODEL -H mixed-pool -b 16", 0, "fp16 (no bf16 on v100-pcie-16gb, t4-16gb), adam"),
        ("plan MODEL -H dgx-1v -b 16 --precision fp32", 0, "fp32, adam"),
        ("profile MODEL -d p100-sxm2-16gb", 0, "fp16 (no bf16 on p100-sxm2-16gb), micro-batch 1"),
        ("compare MODEL -H dgx-1v -b 16 --systems gpipe", 0, "global batch 16, fp16 (no bf16 on v100-sxm2-16gb)"),
        ("compare MODEL -H dgx-a100 -b 16 --systems gpipe", 0, "global batch 16, bf16\n"),
        ("plan MODEL -H dgx-a100 -b 16 --tp 4", 0, "excluded by --tp 4"),
        ("plan MODEL -H dgx-a100 -b 16 --mesh 2x2", 0, "excluded by --mesh 2x2"),
        ("plan MODEL -H dgx-a100 -b 16 --pp 2 --zero 1", 0, "excluded by --zero 1, --pp 2"),
    ],
)
def test_other_options_too(line: str, code: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = folder / "own.plan.json"
    if not plan.exists():
        assert run("plan", folder / "model.onnx", "-H", "dgx-a100", "-b", BATCH, "--pp", 2, "-q", "-o", plan) == 0
    places = {"MODEL": folder / "model.onnx", "TIMES": folder / "model.graph.txt", "PLAN": plan}
    found = run(*(places.get(word, word) for word in line.split()))
    said = capsys.readouterr()
    text = said.out + said.err
    assert (found, words in text or words in " ".join(text.split())) == (code, True), text
    assert ("does not fit" in said.out) is False


@pytest.mark.parametrize("devices", [2, 4])
def test_interleaved_workers_have_several_chunks_and_neighbours(devices: int, folder: Path) -> None:
    target = folder / f"interleaved{devices}.plan.json"
    line = ("-H", "dgx-a100", "-b", BATCH, "--schedule", "interleaved", "--devices", devices, "-q", "-o", target)
    assert run("plan", folder / "model.onnx", *line) == 0
    plan = planner.read_plan(target)
    workers = {stage.ranks for stage in plan.stages}
    assert len(plan.stages) == 2 * len(workers)
    assert 2 <= len(workers) <= devices

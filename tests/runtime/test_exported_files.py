"""Files as torch's two exporters write them, with weights stored once or turned, run at another batch than theirs."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402

WORDS, WIDTH, HEADS, STEPS = 300, 16, 2, 6


class Layer(torch.nn.Module):  # type: ignore[name-defined,misc]
    """Attention under a mask that has a row for each sample and head, biased by distance, then a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.ahead_norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.zeros_(module.bias)  # equal vectors, of which a file keeps one

    def forward(self, x: Any, bias: Any) -> Any:
        size, count = x.shape[:2]
        hidden = self.norm(x)
        q, k, v = (
            part(hidden).reshape(size, count, HEADS, -1).transpose(1, 2).reshape(size * HEADS, count, -1)
            for part in self.parts[:3]
        )
        scores = torch.softmax(torch.baddbmm(bias, q, k.transpose(1, 2)), -1)
        mixed = torch.bmm(scores, v).reshape(size, HEADS, count, -1).transpose(1, 2).reshape(size, count, WIDTH)
        x = x + self.parts[3](mixed)
        return x + self.down(torch.relu(self.up(self.ahead_norm(x))))


class Decoder(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A decoder whose head is the table of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Any) -> Any:
        places = torch.arange(STEPS, dtype=torch.float32)
        slopes = torch.tensor([0.5**head for head in range(HEADS)]).reshape(1, HEADS, 1, 1)
        ahead = torch.triu(torch.full((STEPS, STEPS), -1e9), 1)
        bias = (slopes * places + ahead).expand(ids.shape[0], HEADS, STEPS, STEPS)
        x, bias = self.embed_tokens(ids), bias.reshape(ids.shape[0] * HEADS, STEPS, STEPS)
        for layer in self.layers:
            x = layer(x, bias)
        return self.lm_head(self.norm(x))


@pytest.fixture(scope="module")
def decoder() -> Any:
    torch.manual_seed(1)
    return Decoder().eval()


@pytest.fixture(scope="module", params=["torch.export", "torchscript"])
def file(request: pytest.FixtureRequest, decoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "decoder.onnx"
    sample = torch.zeros(2, STEPS, dtype=torch.long)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if request.param == "torchscript":
            torch.onnx.export(decoder, (sample,), path, dynamo=False, opset_version=17, input_names=["ids"])
        else:
            torch.onnx.export(decoder, (sample,), path, dynamo=True, input_names=["ids"], verbose=False)
    return path


@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2)], ids=["1", "PP 2", "TP 2", "PP 2 TP 2"])
def test_a_plan_of_the_file_trains_the_module(
    file: Path, decoder: Any, tmp_path: Path, stages: int, ranks: int
) -> None:
    graph = planner.load_graph(file)
    limits = {"pipeline_stages": (stages,), "tensor_parallel": (ranks,), "data_parallel": (1,)}
    job = planner.Job(8, precision="fp32", micro_batches=(4,), backends=("any",), **limits)
    plan = planner.plan(graph, planner.load_cluster("dgx-h100", devices=stages * ranks), job)
    words = torch.randint(WORDS, (8, STEPS + 1), generator=torch.Generator().manual_seed(2))
    np.savez(tmp_path / "data.npz", ids=words[:, :-1].numpy(), labels=words[:, 1:].numpy())
    check = runtime.run(plan, file, data=tmp_path / "data.npz", check=True).check
    assert check is not None
    assert not check.wrong
    with torch.no_grad():
        logits = decoder(words[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))
    assert check.loss == pytest.approx(float(expected), rel=1e-5)  # in float32


def test_each_module_has_a_weight_of_its_own_where_the_file_keeps_one(file: Path, decoder: Any) -> None:
    graph = planner.load_graph(file)
    named = {p.name for p in graph.parameters if p.trainable and len(p.shape) == 1}
    assert len(named) == sum(weight.dim() == 1 for weight in decoder.parameters())
    assert {read.weight for read in graph.separated} <= named
    assert len({(read.operator, read.operand) for read in graph.separated}) == len(graph.separated)


def test_a_plan_that_does_not_say_who_reads_merged_weights_is_to_be_made_again(file: Path) -> None:
    cluster = planner.load_cluster("dgx-h100", devices=1)
    plan = planner.plan(planner.load_graph(file), cluster, planner.Job(2, precision="fp32"))
    assert plan.model.separated
    needed = tuple(each for each in plan.requires if each != "separated_weights")
    model = dataclasses.replace(plan.model, separated=())
    older = dataclasses.replace(plan, minor=0, model=model, requires=needed)
    with pytest.raises(planner.PlanError, match=r"plan again: .* does not say which operators read weights"):
        runtime.run(older, file)


def test_biases_of_zeros_that_the_exporter_left_out_are_trained(tmp_path: Path) -> None:
    torch.manual_seed(2)
    module = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)).eval()
    for part in (module[0], module[2]):
        torch.nn.init.zeros_(part.bias)
    path = tmp_path / "rows.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(4, 12),), path, dynamo=True, input_names=["x"], verbose=False)
    graph = planner.load_graph(path)
    assert {(p.label, p.shape) for p in graph.parameters if len(p.shape) == 1} == {("0.bias", (16,)), ("2.bias", (5,))}
    assert [(read.weight, read.stored, read.operand) for read in graph.separated] == [
        ("0.bias", "", 2),
        ("2.bias", "", 2),
    ]
    job = planner.Job(8, precision="fp32", micro_batches=(2,), backends=("any",), pipeline_stages=(2,))
    plan = planner.plan(graph, planner.load_cluster("dgx-h100", devices=2), job)
    inputs, labels = torch.randn(8, 12), torch.randint(5, (8,))
    np.savez(tmp_path / "data.npz", x=inputs.numpy(), labels=labels.numpy())
    check = runtime.run(plan, path, data=tmp_path / "data.npz", loss="labels", check=True).check
    assert check is not None
    assert not check.wrong
    assert {name for _, name, _ in check.errors} == {p.name for p in graph.parameters}
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(module(inputs), labels)
    assert check.loss == pytest.approx(float(expected), rel=1e-5)


def test_a_size_that_follows_from_data_is_told_by_name(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    def weight(name: str) -> Any:
        return helper.make_tensor(name, TensorProto.FLOAT, (8, 8), np.eye(8).ravel())

    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]),
        helper.make_node("Greater", ["chosen", "zero"], ["positive"]),
        helper.make_node("NonZero", ["positive"], ["places"]), helper.make_node("Transpose", ["places"], ["rows"]),
        helper.make_node("GatherND", ["h", "rows"], ["taken"]), helper.make_node("MatMul", ["taken", "second"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "choice",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 8)),
         helper.make_tensor_value_info("chosen", TensorProto.FLOAT, (4,))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight("first"), weight("second"), helper.make_tensor("zero", TensorProto.FLOAT, (), [0.0])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    job = planner.Job(8, precision="fp32", micro_batches=(4,), pipeline_stages=(2,), backends=("any",))
    cluster = planner.load_cluster("dgx-h100", devices=2)
    plan = planner.plan(planner.load_graph(tmp_path / "m.onnx"), cluster, job)
    with pytest.raises(planner.ModelError, match=r"taken: is .* between two stages, .* follows from data"):
        runtime.run(plan, tmp_path / "m.onnx")

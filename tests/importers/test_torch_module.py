"""Torch modules as graphs: names and ties of the module, no data needed, equal to the file that torch writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


class Tiny(torch.nn.Module):  # type: ignore[name-defined,misc]
    """An embedding that is tied to the head, a table of positions in a buffer, two layers under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.head = torch.nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(-1, 1, 8 * 16).reshape(8, 16))
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def forward(self, ids: Any) -> Any:
        hidden = self.embed(ids) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask)
        return self.head(hidden)


def tokens(device: str = "cpu") -> Any:
    return torch.zeros(2, 8, dtype=torch.long, device=device)


def test_names_and_ties_are_those_of_the_module() -> None:
    module = Tiny()
    graph = planner.from_torch(module, tokens())
    assert {p.name for p in graph.parameters if p.trainable} == {name for name, _ in module.named_parameters()}
    assert graph.parameter_count() == sum(weight.numel() for weight in module.parameters())
    assert graph.name == "Tiny"
    assert graph.report.format == "torch"


def test_the_meta_device_and_inputs_by_name_give_the_same_work() -> None:
    with torch.device("meta"):
        empty = Tiny()
    graph, full = planner.from_torch(empty, {"ids": tokens("meta")}), planner.from_torch(Tiny(), (tokens(),))
    assert graph.parameter_count() == full.parameter_count()
    cluster, job = planner.load_cluster("dgx-a100", devices=2), planner.Job(global_batch=8)
    seconds = [planner.plan(g, cluster, job).predictions.iteration_s for g in (graph, full)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


def test_it_equals_the_file_that_torch_writes(tmp_path: Path) -> None:
    module, file = Tiny(), tmp_path / "tiny.onnx"
    torch.onnx.export(module, (tokens(),), file, dynamo=True, optimize=False, verbose=False)
    written, graph = planner.load_graph(file), planner.from_torch(module, (tokens(),))
    assert [node.op for node in graph.nodes] == [node.op for node in written.nodes]
    assert graph.parameter_count() == written.parameter_count()


def test_what_torch_cannot_export_is_an_error_of_the_model() -> None:
    with pytest.raises(planner.ModelError, match="Tiny: torch cannot export the module: "):
        planner.from_torch(Tiny(), (tokens().float(),))

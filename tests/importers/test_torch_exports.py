"""Modules as researchers write them, exported by torch's two exporters: parameters and products as torch counts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import planner  # noqa: E402
from planner.operators import graph_specs, rebatch  # noqa: E402


class Encoder(nn.Module):  # type: ignore[misc]
    """Layers that begin as copies of one, with positions of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.places = nn.Parameter(torch.randn(1, 6, 48))

    def forward(self, x: Any) -> Any:
        return self.layers(x + self.places)


class Cells(nn.Module):  # type: ignore[misc]
    """A cell and a head that are applied once a step, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(48, 24), nn.Linear(24, 5)

    def forward(self, x: Any) -> Any:
        state, made = x.new_zeros(x.shape[0], 24), []
        for step in range(3):
            state = self.cell(x[:, step], state)
            made.append(self.head(state))
        return torch.stack(made, 1)


class Images(nn.Module):  # type: ignore[misc]
    """A fresh norm behind a transposed convolution, whose statistics equal scale and shift, before equal filters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.ConvTranspose2d(6, 8, 2, 2), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 40, 3), nn.Conv2d(8, 40, 3)
        for part in (self.left, self.right):
            nn.init.zeros_(part.weight)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.up(x.unflatten(2, (6, 8)))))
        return self.left(x) * self.right(x)


class Spline(nn.Module):  # type: ignore[misc]
    """Knots in a buffer, of which parts are taken away and divided by; a gate of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-2, 2, 9))
        self.gate, self.mix = nn.Parameter(torch.randn(6, 48)), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        apart = ((x * self.gate).unsqueeze(-1) - self.knots[:-1]) / (self.knots[1:] - self.knots[:-1])
        return self.mix(apart)


class Queries(nn.Module):  # type: ignore[misc]
    """Queries that a parameter repeats for every sample, in attention over keys with a class token in front."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.token = nn.Parameter(torch.randn(5, 48)), nn.Parameter(torch.zeros(1, 1, 48))
        self.cross, self.head = nn.MultiheadAttention(48, 4), nn.Linear(48, 3)

    def forward(self, x: Any) -> Any:
        keys = torch.cat([self.token.expand(len(x), -1, -1), x], 1).transpose(0, 1)
        mixed, _ = self.cross(self.queries.unsqueeze(1).repeat(1, len(x), 1), keys, keys)
        return self.head(mixed.transpose(0, 1).mean(1))


class Places(nn.Module):  # type: ignore[misc]
    """Attention beside a layer that is applied to constant places: work on weights before work on samples."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.far = nn.Linear(48, 144), nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        places = torch.ones(1, 6, 6, 2).cumsum(1).expand(len(x), -1, -1, -1)
        near = torch.softmax(self.far(places).squeeze(-1), -1)
        return (torch.softmax(q @ k.transpose(1, 2), -1) * 0.5 + near) @ v


MODULES = [Encoder, Cells, Images, Spline, Queries, Places]


@pytest.mark.parametrize("exporter", ["torch.export", "torchscript"])
@pytest.mark.parametrize("make", MODULES)
def test_an_export_has_the_modules_parameters_and_products(make: type[Any], exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, file = make().eval(), tmp_path / "model.onnx"
    x = torch.randn(2, 6, 48)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            how: dict[str, Any] = {"dynamo": False, "opset_version": 17}
            if exporter == "torch.export":
                how = {"dynamo": True, "verbose": False, "optimize": make not in (Images, Places)}  # it folds
            torch.onnx.export(module, (x,), file, **how)
            with (
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
                FlopCounterMode(display=False) as count,
            ):
                module(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    graph = planner.load_graph(file)
    assert graph.parameter_count() == sum(p.numel() for p in module.parameters())
    assert sum(spec.matrix_flops for spec in graph_specs(graph)) == count.get_total_flops()
    assert rebatch(graph, 6).tensors[graph.outputs[0]].shape[0] == 6


class Windows(nn.Module):  # type: ignore[misc]
    """Attention biased by a table of distances, of which a buffer picks entries; one head starts with equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(48, 144), nn.Parameter(torch.randn(11, 2))
        self.equal = nn.Parameter(torch.zeros(11, 2))
        self.register_buffer("picks", (torch.arange(6)[:, None] - torch.arange(6)) + 5)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).reshape(len(x), 6, 3, 2, 24).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) + self.bias[self.picks].permute(2, 0, 1)
        return torch.softmax(scores + self.equal[self.picks].permute(2, 0, 1), -1) @ v


def test_a_table_that_the_exporter_picked_entries_of_counts_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, file = Windows().eval(), tmp_path / "model.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(2, 6, 48),), file, dynamo=True, verbose=False)
    graph = planner.load_graph(file)
    tables = {p.label: p.elements for p in graph.parameters if p.label in ("bias", "equal")}
    assert tables == {"bias": 11 * 2}  # stored as [2, 6, 6]; of the equal entries nothing tells how many there are
    assert graph.parameter_count() == 48 * 144 + 144 + 22
    lost = [note.message for note in graph.report.notes if note.code == "weight-became-constant"]
    assert any(message.startswith("equal was computed") and "not counted" in message for message in lost)


class Cut(nn.Module):  # type: ignore[misc]
    """Learned positions and fixed ones of sines and cosines, cut to the length of the sample; a token and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.learned, self.head = nn.Parameter(torch.randn(1, 9, 48)), nn.Linear(48, 3)
        self.scale, self.token = nn.Parameter(torch.randn(7, 48)), nn.Parameter(torch.randn(1, 48))
        angles = torch.arange(9)[:, None] * 0.1 ** (torch.arange(24) / 8)
        self.register_buffer("waves", torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None])

    def forward(self, x: Any) -> Any:
        x = torch.relu(x + self.learned[:, : x.shape[1]]) + self.waves[:, : x.shape[1]]
        x = torch.cat([self.token[None].expand(len(x), -1, -1), x], 1)
        return self.head(x * self.scale[None] * (self.waves[:, : x.shape[1], ::2] * 3).repeat(1, 1, 2))


def test_nameless_positions_count_where_their_numbers_look_learned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = tmp_path / "model.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(Cut().eval(), (torch.randn(2, 6, 48),), file, dynamo=False, opset_version=17)
    graph = planner.load_graph(file)
    assert graph.parameter_count() == 6 * 48 + 7 * 48 + 48 + 48 * 3 + 3
    said = [note.message for note in graph.report.notes if note.code == "tables-counted"]
    assert len(said) == 1
    assert "look drawn" in said[0]

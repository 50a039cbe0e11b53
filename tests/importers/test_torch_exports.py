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
from planner.operators import graph_specs  # noqa: E402


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


@pytest.mark.parametrize("exporter", ["torch.export", "torchscript"])
@pytest.mark.parametrize("make", [Encoder, Cells, Images, Spline])
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
                how = {"dynamo": True, "verbose": False, "optimize": make is not Images}  # which folds its norm
            torch.onnx.export(module, (x,), file, **how)
            with (
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
                FlopCounterMode(display=False) as count,
            ):
                module(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    graph = planner.load_graph(file)
    dropped = "out_proj.bias" if exporter == "torch.export" else "none"  # a zero that is added to a product
    held = [p.numel() for name, p in module.named_parameters() if not name.endswith(dropped)]
    assert graph.parameter_count() == sum(held)
    assert sum(spec.matrix_flops for spec in graph_specs(graph)) == count.get_total_flops()

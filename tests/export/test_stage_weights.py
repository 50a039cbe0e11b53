"""Stages of a pipeline hold each weight once: by a module, by its own name, or the plan is refused by that name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import export
from planner.errors import PlanError
from planner.graph import Graph
from planner.plans import Plan
from tests.importers.build import absent, model, node, scoped, value
from tests.shared_data import shared_path


def pipeline(graph: Graph, stages: int, **degrees: Any) -> Plan:
    job = planner.Job(global_batch=16, precision="fp32")
    named = planner.Degrees(pipeline=stages, **degrees)
    return planner.predict(graph, planner.load_cluster("dgx-a100"), job, named).plan


def chain(*weights: tuple[str, tuple[str, ...]]) -> Graph:
    """Products of one tensor with weights of 8 x 8, each a name and the scopes of its operator."""
    nodes = [
        scoped(node("MatMul", [f"x{at}", name], [f"x{at + 1}"]), *scopes, "matmul")
        for at, (name, scopes) in enumerate(weights)
    ]
    shape = [1, 8]
    proto = model(
        nodes,
        [value("x0", shape)],
        [value(f"x{len(weights)}", shape)],
        [absent(name, [8, 8]) for name, _ in weights],
    )
    return planner.graph_from_proto(proto)


def stages_of_weights(plan: Plan) -> dict[str, list[int]]:
    """By weight, the stages whose part of the whole model has it, as `stage_module` leaves it."""
    document = json.loads(str(export.export(plan, "torch").files["parallel.json"]))
    found: dict[str, list[int]] = {}
    for stage in plan.stages:
        dropped = [
            name
            for other, listed in enumerate(zip(document["stages"], document["weights"], strict=True))
            for name in (*listed[0], *listed[1])
            if other != stage.index
        ]
        for block in plan.block_table:
            for p in block.parameters:
                path = f"{p.module or p.name}."
                if not any(path.startswith(f"{name}.") for name in dropped):
                    found.setdefault(p.name, []).append(stage.index)
    return found


def owners(plan: Plan) -> dict[str, list[int]]:
    return {p.name: [stage.index] for stage in plan.stages for p in plan.stage_parameters(stage.index)}


def test_modules_with_digits_at_their_ends_are_no_layers() -> None:
    """`conv1` and `norm2` are modules beside each other, also where one block has both."""
    scopes = ("conv1", "norm1", "conv2", "norm2")
    plan = pipeline(chain(*((f"{name}.weight", (name,)) for name in scopes)), 2)
    assert stages_of_weights(plan) == owners(plan)
    document = json.loads(str(export.export(plan, "torch").files["parallel.json"]))
    assert sorted(name for names in document["stages"] for name in names) == sorted(scopes)
    assert document["weights"] == [[], []]


def test_weights_of_the_model_itself_are_listed_by_name() -> None:
    plan = pipeline(chain(("first", ()), ("a.weight", ("a",)), ("last", ())), 2)
    document = json.loads(str(export.export(plan, "torch").files["parallel.json"]))
    assert sorted(name for names in document["weights"] for name in names) == ["first", "last"]
    assert stages_of_weights(plan) == owners(plan)
    with pytest.raises(PlanError, match=r"weights that are in no layer of one stage alone \(first, last\)"):
        export.export(plan, "deepspeed")


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ([("a.weight", ("a",)), ("onnx::MatMul_7", ())], "weights .*onnx::MatMul_7"),  # the exporter lost its name
        ([(f"layers.0.{m}.weight", ("layers.0", f"layers.0.{m}")) for m in "ab"], "layers divided between stages"),
        ([("a.weight", ("a",)), ("a.inner.weight", ("a", "a.inner"))], "weights .*a.inner.weight"),
    ],
    ids=["unknown", "a layer that is cut", "a module in another one"],
)
def test_weights_that_two_stages_would_keep_are_refused_by_name(
    weights: list[tuple[str, tuple[str, ...]]], named: str
) -> None:
    plan = pipeline(chain(*weights), 2, starts=(1,))
    for name in ("torch", "deepspeed"):
        with pytest.raises(PlanError, match=named):
            export.export(plan, name)


@pytest.mark.parametrize("name", ["unet_diff.dynamo", "unet_diff.legacy14"])
def test_an_exported_u_net_has_each_weight_once(name: str) -> None:
    graph = planner.load_graph(str(shared_path(f"onnx/families/{name}.onnx")))
    plan = pipeline(graph, 2)
    assert stages_of_weights(plan) == owners(plan)


def _u_net() -> Any:
    """A U-Net whose blocks hold modules of several levels: convolutions and norms of neighbours."""
    import torch
    from torch import nn

    def twice(a: int, b: int) -> nn.Sequential:
        halves = ((nn.Conv2d(i, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for i in (a, b))
        return nn.Sequential(*(each for half in halves for each in half))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.down1, self.down2 = twice(3, 8), twice(8, 16), twice(16, 32)
            self.up1, self.join1 = nn.ConvTranspose2d(32, 16, 2, 2), twice(32, 16)
            self.up2, self.join2 = nn.ConvTranspose2d(16, 8, 2, 2), twice(16, 8)
            self.scale, self.leave, self.pool = nn.Parameter(torch.ones(8, 1, 1)), nn.Conv2d(8, 2, 1), nn.MaxPool2d(2)

        def forward(self, x: Any) -> Any:
            first = self.enter(x)
            second = self.down1(self.pool(first))
            y = self.join1(torch.cat([self.up1(self.down2(self.pool(second))), second], 1))
            return self.leave(self.join2(torch.cat([self.up2(y), first], 1)) * self.scale)

    return UNet()


@pytest.mark.parametrize("stages", [2, 3])
def test_parts_of_a_u_net_in_torch_are_the_whole(stages: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    graph = planner.from_torch(_u_net(), (torch.randn(2, 3, 16, 16),))
    plan = pipeline(graph, stages)
    for name, content in export.export(plan, "torch").files.items():
        (tmp_path / name).write_text(str(content))
    spec = importlib.util.spec_from_file_location("parallelize", tmp_path / "parallelize.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    parts = [
        {name for name, _ in program.stage_module(_u_net(), stage.index).named_parameters()} for stage in plan.stages
    ]
    assert set.union(*parts) == {name for name, _ in _u_net().named_parameters()}
    assert sum(map(len, parts)) == len(set.union(*parts))

"""Plans on GPUs, where torch sees one: gradients, torch's allocator, checkpoints, and ranks that share a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402
from planner.runtime.device import MetaDevice, choose  # noqa: E402
from tests.runtime import cases  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

PLANS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("one process", "gpt, wide", 1, {}),
    ("2 stages", "gpt, wide", 2, {"pipeline": 2}),
    ("chimera", "gpt, wide", 2, {"pipeline": 2, "schedule": "chimera"}),
    ("tensor 2", "gpt, wide", 2, {"tensor": 2}),
    ("2 replicas, ZeRO-3", "gpt, wide", 2, {"zero": 3}),
    ("recomputed, inputs offloaded", "gpt, wide", 2, {"pipeline": 2, "recompute": True, "offload": ("layer_input",)}),
    ("2 stages, offloaded", "gpt, wide", 2, {"pipeline": 2, "offload": ("core_attn", "mlp")}),
    ("experts", "mixtral", 2, {"pipeline": 2}),
)


def _plan(model: str, ranks: int, degrees: dict[str, Any]) -> planner.Plan:
    return cases.plan(cases.Case("", model, ranks, degrees, 4))


@pytest.mark.parametrize(("name", "model", "ranks", "degrees"), PLANS, ids=lambda value: value if value else None)
def test_gradients_on_gpus_are_the_whole_models(name: str, model: str, ranks: int, degrees: dict[str, Any]) -> None:
    """Ranks share a GPU where there are fewer of them: exchanges go over gloo then, else over NCCL."""
    found = runtime.run(_plan(model, ranks, degrees), cases.model(model), steps=0, check=True, device="cuda")
    assert found.check is not None
    assert found.check.largest < 1e-10


def test_a_gpu_trains_as_a_processor_does() -> None:
    plan = _plan("gpt, wide", 2, {"pipeline": 2})
    losses = [
        runtime.run(plan, cases.model("gpt, wide"), steps=3, dtype="float64", learning_rate=0.1, device=device).losses
        for device in ("cpu", "cuda")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_ranks_share_a_gpu_over_gloo() -> None:
    plan = _plan("gpt, wide", 2, {"pipeline": 2})
    found = runtime.run(plan, cases.model("gpt, wide"), steps=2, check=True, device="cuda", backend="gloo")
    assert found.check is not None
    assert found.check.largest < 1e-10
    assert all(t.measured_s > 0 for t in found.times)


def _file(folder: Path) -> tuple[planner.Plan, Any]:
    model = planner.build_bundled("gpt2", batch=1, seq=256)
    graph, cluster = planner.graph_from_proto(model, name="gpt2"), planner.load_cluster("dgx-a100")
    job = planner.Job(global_batch=4, precision="fp32", optimizer="adam", devices=2)
    return planner.predict(graph, cluster, job, planner.Degrees(pipeline=2, micro_batch=1)).plan, model


@pytest.mark.parametrize("rank", [0, 1])
def test_the_allocator_counts_what_tensors_without_data_take(rank: int, tmp_path: Path) -> None:
    """Within 3 %: kernels have workspaces that no tensor shows."""
    plan, model = _file(tmp_path)
    on_gpu = runtime.run(plan, model, steps=2, device="cuda", alone=rank).memory[0].measured_bytes
    counted = runtime.run(plan, model, steps=2, device="meta", alone=rank).memory[0].measured_bytes
    assert on_gpu == pytest.approx(counted, rel=0.03)


def test_training_goes_from_a_gpu_to_a_processor_and_back(tmp_path: Path) -> None:
    plan, model = _plan("gpt, wide", 1, {}), runtime.read_model(cases.model("gpt, wide"))
    data = runtime.synthetic(plan, model, torch.float64)
    kinds = ("cpu", "cuda", "cpu")

    def trained(kinds: tuple[str, ...], folder: Path) -> list[float]:
        losses = []
        for at, kind in enumerate(kinds):
            trainer = runtime.Trainer(
                plan, model, 0, dtype=torch.float64, device=choose(kind).open(0),
                optimizer=lambda weights: torch.optim.Adam(list(weights), lr=0.01, fused=True),
            )  # fmt: skip
            if at:
                trainer.load(folder / str(at - 1))
            losses.append(trainer.step(data))
            trainer.save(folder / str(at))
        return losses

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert trained(kinds, tmp_path / "a") == pytest.approx(trained(("cpu",) * 3, tmp_path / "b"), rel=1e-10)
    finally:
        torch.distributed.destroy_process_group()


def test_the_meta_device_is_no_gpu() -> None:
    assert MetaDevice().name.type == "meta"
    assert choose("auto").kind == "cuda"

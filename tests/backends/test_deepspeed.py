"""DeepSpeed trains a pipeline that is cut by the exported files, on processes of this machine, as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import models
import planner
from planner import export

if not all(map(find_spec, ("torch", "deepspeed"))):
    pytest.skip("deepspeed is not installed", allow_module_level=True)

PROGRAM = """
import json, os, re
import torch, torch.nn as nn
import deepspeed
import pipeline

WIDTH, WORDS, SAMPLES, LENGTH = 16, 50, 2, 8
config = json.loads(open("ds_config.json").read())
config["optimizer"]["params"]["lr"] = 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))))


def layer(name):
    if "embed" in name:
        return nn.Embedding(WORDS, WIDTH)
    if "head" in name:
        return nn.Linear(WIDTH, WORDS, bias=False)
    return Block() if re.search(r"layers\\.\\d+$", name) else nn.LayerNorm(WIDTH)


def loss(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def built():
    torch.manual_seed(0)
    return [layer(name) for name in pipeline.MODULES]


deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
whole = nn.Sequential(*built())
batch = torch.arange(config["train_batch_size"] * LENGTH).reshape(-1, LENGTH) * 7 % WORDS
optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
losses = []
for step in range(2):
    optimizer.zero_grad()
    value = loss(whole((batch + step) % WORDS), (batch + step) % WORDS)
    value.backward()
    optimizer.step()
    losses.append(value.item())

model = pipeline.PlannedPipeline(built(), loss_fn=loss)
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=[p for p in model.parameters()])
replica = engine.grid.get_data_parallel_id()
own = batch.reshape(engine.grid.get_data_parallel_world_size(), -1, SAMPLES, LENGTH)[replica]
found = [
    engine.train_batch(iter([((x + step) % WORDS, (x + step) % WORDS) for x in own])).item() for step in range(2)
]
expected = dict(whole.named_parameters())
first = engine.module.parts[engine.stage_id]
error, trained = 0.0, []
for name, weight in engine.module.named_parameters():
    error = max(error, float((weight - expected[name]).abs().max() / expected[name].abs().max()))
    trained.append(int(name.split(".")[0]))
answer = json.dumps({
    "rank": rank, "stage": engine.stage_id, "replica": replica, "layers": sorted(set(trained)), "error": error,
    "losses": found, "expected": losses, "optimizer": type(engine.optimizer).__name__,
})
open(f"answer.{rank}.json", "w").write(answer)
torch.distributed.barrier()
os._exit(0)
"""


def _plan(degrees: dict[str, Any], devices: int) -> planner.Plan:
    size = models.size_of(
        model_type="llama", num_hidden_layers=4, hidden_size=16, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=24, vocab_size=50, rms_norm_eps=1e-5,
    )  # fmt: skip
    graph = planner.graph_from_proto(models.build_custom(size, batch=2, seq=8, seed=1), name="llama")
    job = planner.Job(global_batch=16, precision="fp32", optimizer="sgd", devices=devices)
    chosen = planner.Degrees(micro_batch=2, pipeline=2, **degrees)
    return planner.predict(graph, planner.load_cluster("dgx-a100"), job, chosen).plan


@pytest.mark.parametrize(
    ("degrees", "devices"), [({}, 2), ({"recompute": True}, 2), ({}, 4), ({"zero": 1}, 4)],
    ids=["2 stages", "recomputed", "2 stages, 2 replicas", "2 stages, 2 replicas, ZeRO-1"],
)  # fmt: skip
def test_deepspeed_trains_the_planned_pipeline(degrees: dict[str, Any], devices: int, tmp_path: Path) -> None:
    plan = _plan(degrees, devices)
    for name, content in export.export(plan, "deepspeed").files.items():
        (tmp_path / name).write_text(str(content))
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(tmp_path),
    }  # fmt: skip
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), "train.py"]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answers = [json.loads(path.read_text()) for path in tmp_path.glob("answer.*.json")]
    assert sorted(answer["rank"] for answer in answers) == list(range(devices))
    counts = [len(modules) for modules in export.readings.stage_modules(plan)]
    assert sum(counts) == 7
    for answer in answers:
        stage = plan.stages[answer["stage"]]
        first = sum(counts[: stage.index])
        assert answer["layers"] == list(range(first, first + counts[stage.index]))
        assert [answer["rank"]] == list(stage.replicas[answer["replica"]])
        assert answer["error"] < 1e-5
        assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)

"""transformers trains by the exported configuration on two processes, to the gradients of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import export
from tests.export.plans import graph

if not all(map(find_spec, ("torch", "transformers", "accelerate"))):
    pytest.skip("transformers is not installed", allow_module_level=True)

PROGRAM = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

config = json.loads(open("distributed_config.json").read())
# joins the processes, too
TrainingArguments(output_dir=".", use_cpu=True, **json.loads(open("training_arguments.json").read()))
torch.manual_seed(0)
size = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)
whole = LlamaForCausalLM(size)
whole.save_pretrained("weights")  # by rank 0 alone
torch.distributed.barrier()
tokens = torch.arange(4 * 8).reshape(4, 8) % 64
whole(input_ids=tokens, labels=tokens).loss.backward()
expected = {name: weight.grad for name, weight in whole.named_parameters()}
said = DistributedConfig.from_dict(config)
model = LlamaForCausalLM.from_pretrained("weights", dtype=torch.float32, distributed_config=said)
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
own = tokens.chunk(world // said.tp_size)[rank // said.tp_size]
model(input_ids=own, labels=own).loss.backward()
error, pieces = 0.0, {}
for name, weight in model.named_parameters():
    gradient = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
    error = max(error, float((gradient - expected[name]).abs().max() / expected[name].abs().max()))
    pieces[name] = (weight.to_local() if hasattr(weight, "to_local") else weight).numel() / expected[name].numel()
if rank == 0:
    print(json.dumps({"error": error, "pieces": pieces}))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("degrees", "shares"),
    [
        ({"tensor": 2, "zero": 0}, {"mlp.up_proj": 0.5, "self_attn.o_proj": 0.5, "input_layernorm": 1.0}),
        ({"zero": 3}, {"mlp.up_proj": 0.5, "self_attn.o_proj": 0.5, "input_layernorm": 0.5}),
        ({"zero": 0}, {"mlp.up_proj": 1.0, "self_attn.o_proj": 1.0, "input_layernorm": 1.0}),
    ],
    ids=lambda value: str(value).replace("'", ""),
)
def test_transformers_trains_by_the_configuration(
    degrees: dict[str, Any], shares: dict[str, float], tmp_path: Path
) -> None:
    # a sample of odd length cannot be cut, so that tensors between layers are whole on both ranks
    job = planner.Job(global_batch=64, precision="fp32", devices=2)
    cluster, chosen = planner.load_cluster("dgx-h100"), planner.Degrees(**degrees)
    plan = planner.predict(graph("llama3-8b", 257), cluster, job, chosen, fewest_weights=True).plan
    for name, content in export.export(plan, "transformers").files.items():
        (tmp_path / name).write_text(str(content))
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"error"')))
    assert answer["error"] < 1e-5
    for name, share in shares.items():
        assert answer["pieces"][f"model.layers.1.{name}.weight"] == share, name

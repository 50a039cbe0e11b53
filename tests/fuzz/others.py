"""Formats beside models, plans and profiles: what other programs and users write, each with the texts to begin with."""

from __future__ import annotations

import functools
import io
import json
import random
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.fuzz.models import models
from tests.fuzz.texts import mutate_json, mutate_text

Mutate = Callable[[str, random.Random], str]


def mutated(texts: Callable[[], tuple[str, ...]], change: Mutate) -> Callable[[Path, random.Random], None]:
    """A function that writes a mutation of one of some texts."""

    def make(path: Path, rng: random.Random) -> None:
        text = change(rng.choice(texts()), rng)
        content = text.encode("utf-8", errors="surrogatepass")
        if rng.random() < 0.03:
            at = rng.randrange(len(content) + 1)
            content = content[:at] + rng.choice((b"\xff", b"\x00", b"\xef\xbb\xbf", rng.randbytes(5))) + content[at:]
        path.write_bytes(content)

    return make


def _nested(change: Mutate) -> Mutate:
    """A mutation that one time in fifty nests the text in brackets instead."""

    def nest(text: str, rng: random.Random) -> str:
        if rng.random() > 0.02:
            return change(text, rng)
        depth = rng.choice((30, 65, 900, 100_000))
        return "[" * depth + text + rng.choice(("", "]" * depth))

    return nest


json_text = _nested(mutate_json)
plain_text = _nested(mutate_text)


@functools.cache
def cost_texts() -> tuple[str, ...]:
    """Costs of the toy model."""
    import planner

    graph = planner.graph_from_proto(models()[0], name="toy", dims={"batch": 1})
    profile = planner.profile(graph, planner.load_device("t4-16gb"), precision="fp16")
    return (json.dumps(planner.costs.costs_document(graph, profile)),)


def deepspeed_texts() -> tuple[str, ...]:
    """Configurations of DeepSpeed."""
    return (json.dumps({
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8,
                              "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": True}, "fp16": {"enabled": False}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "data_types": {"grad_accum_dtype": "fp32"}, "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 1},
        "activation_checkpointing": {"partition_activations": False}, "pipeline": {"stages": 2},
    }),)  # fmt: skip


TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 8
seq_len = 128
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1
tensor_parallel_degree = 2
context_parallel_degree = 1
expert_parallel_degree = 1
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "never"
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
[activation_checkpoint]
mode = "full"
"""
MEGATRON = """\
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4
--num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 --global-batch-size 8 --seq-length 128
--use-distributed-optimizer --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--sequence-parallel --optimizer adam --context-parallel-size 1 --expert-model-parallel-size 1 --overlap-grad-reduce
"""
SCRIPT = """\
#!/bin/bash
TP=2
PP=${PP:-2}
MODEL=(--num-layers 4 --hidden-size 64 --num-attention-heads 4)
torchrun --nproc-per-node 4 pretrain_gpt.py \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} "${MODEL[@]}" \\
    --pipeline-model-parallel-layout "Et|tt|tL" --fp8-format hybrid --bf16 --optimizer-cpu-offload # all
"""

CONFIGURATIONS = (
    {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128},
    {"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
     "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
     "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
     "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
     "max_position_embeddings": 128, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid"},
    {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
     "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "sliding_window": 16,
     "layer_types": ["full_attention", "sliding_attention"], "text_config": {"hidden_size": 32}},
    {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64},
    {"model_type": "resnet", "blocks": [1, 1, 1, 1]},
    {"model_type": "dlrm", "tables": [5, 7], "width": 4, "bottom": [8, 4], "top": [8, 1]},
)  # fmt: skip


def hugging_face_texts() -> tuple[str, ...]:
    """Configurations of small models."""
    return tuple(json.dumps(each) for each in CONFIGURATIONS)


ORDERS = (
    "worker,action\n0,F0.0\n0,F0.1\n0,B0.0\n0,B0.1\n0,S0\n0,U0\n1,F1.0\n1,B1.0\n1,F1.1\n1,B1.1\n1,S1\n1,U1\n",
    "worker,lane,action\n0,0,F0.0\n1,0,F1.0\n1,0,B1.0\n1,0,U1\n0,0,B0.0\n0,1,U0\n",
)


def orders_texts() -> tuple[str, ...]:
    """Orders as JSON."""
    lanes = ["F0.0 F0.1 B0.0 B0.1 S0 U0", ["F1.0", "B1.0 F1.1", "B1.1 S1 U1"]]
    return (json.dumps({"lanes": lanes, "workers": [0, 1], "parts": 1, "versions": [1, 1], "limits": [2, 1]}),)


RUNS = (
    "tp,pp,dp,micro_batch,zero,global_batch,seconds,memory_gib\n1,1,4,1,1,64,0.0412,3.2\n2,2,1,2,0,64,0.0498,1.9\n"
    "4,1,1,8,0,64,0.053,0.1\n1,2,2,2,0,64,0.04,\n"
)
RULES = "# own severities\nslower: error\nfaster: info\nmemory-grew: off # never\nmodel-changed: warning\n"


@functools.cache
def stack_texts() -> tuple[str, ...]:
    """Bundled stacks, and one with what few have."""
    from planner.hardware.document import profile_folder

    own = "stack: mine\nbase: megatron-2021\nlaunch: 40 us\nattention: {value: {h100*: 30%, '*': 90%}}\n"
    own += "loss: {value: [3, 5], source: counted}\ncompared: {value: [3, 0.9, 1.1], source: fitted}\n"
    bundled = sorted((profile_folder() / "stacks").glob("*.yaml"))
    return (own, own, *(path.read_text(encoding="utf-8") for path in bundled if path.name != "errors.yaml"))


def nccl_text() -> str:
    """What nccl-tests print."""
    lines = ["# nccl-tests version 2.20.0", "# Collective test starting: all_reduce_perf", "# Using devices"]
    lines += [f"#  Rank {r:2} Group  0 Pid 1 on host device {r} [0x07] NVIDIA A100-SXM4-80GB" for r in range(8)]
    lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong     time"]
    for power in range(3, 31, 3):
        us = 25 + 2**power / 131e3
        lines.append(f"{2**power:12} {2**power // 4:12} float sum -1 {us:8.2f} 1.00 1.00 0 {us:8.2f} 1.0 1.0 0")
    return "\n".join(lines)


def topology_text() -> str:
    """A matrix of `nvidia-smi topo -m`."""
    count = 4
    head = "\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\tNIC0\tCPU Affinity\tNUMA Affinity"
    rows = [
        f"GPU{i}\t" + "\t".join(" X " if i == j else "NV4" if i // 2 == j // 2 else "SYS" for j in range(count))
        + "\tPIX\t0-31\t0" for i in range(count)
    ]  # fmt: skip
    return "\n".join([head, *rows, "NIC0\t" + "\t".join(["PIX"] * count) + "\t X ", "", "Legend:", "  X    = Self"])


CALCULON = {
    "matrix": {"float16": {"tflops": 312, "gflops_efficiency": {"128": 0.99, "16": 0.95, "0": 0.01}}},
    "vector": {"float16": {"tflops": 78, "gflops_efficiency": [[128, 0.99], [0, 0.1]]}},
    "mem1": {"GiB": 80, "GBps": 2048, "MB_efficiency": {"100": 0.9, "1": 0.7, "0": 0.1}},
    "processing_mode": "no_overlap",
    "networks": [
        {"bandwidth": 300, "efficiency": 0.65, "size": 8, "latency": 0.00001, "ops": {"p2p": [1, None]}},
        {"bandwidth": 25, "efficiency": 0.9, "size": 65536, "latency": 0.00002, "must_be_filled": False},
    ],
}
ASTRA = (
    "topology: [ Ring, FullyConnected, Switch ]\nnpus_count: [ 2, 8, 4 ]\nbandwidth: [ 200.0, 100.0, 50.0 ]\n"
    "latency: [ 500.0, 500.0, 2000.0 ]  # ns\n"
)
OLD_ASTRA = {
    "topology-name": "Hierarchical", "topologies-per-dim": ["Ring", "Switch"], "units-count": [4, 2],
    "links-count": [2, 1], "link-latency": [500, 500], "link-bandwidth": [50, 20],
}  # fmt: skip


def store(path: Path, rng: random.Random) -> None:
    """A file of a sweep: whole, of other columns, with rows that are none, cut off, or no database."""
    from planner.ask.sweeps import Store, SweepRow, _key

    rows = json.dumps({"point": [["model", "x"]], "headline": None, "shape": "1", "reason": "", "bound_s": 1.0})
    point = (("model", str(path.parent / "toy.onnx")), ("hardware", "v100-pcie-4"), ("batch", "4"), ("dim.batch", "1"))
    kind = rng.randrange(5)
    if kind == 0:
        with sqlite3.connect(path) as file:
            columns = rng.choice(("a", "key, value", "key, row, more", "row, key"))
            file.execute(f"CREATE TABLE rows ({columns})")
        return
    kept = Store(path)
    kept.put(SweepRow(point, reason="none"))
    kept.close()
    with sqlite3.connect(path) as file:
        text = mutate_json(rows, rng)
        value = rng.choice((text.encode("utf-8", errors="surrogatepass"), 7, "7", "{}", "[1]", b"\xff"))
        file.execute("UPDATE rows SET row = ? WHERE key = ?", (value, _key(point)))
    if kind > 2:
        content = bytearray(path.read_bytes())
        if kind == 3:
            content = content[: rng.randrange(len(content))]
        for _ in range(kind == 4 and rng.choice((1, 4, 40))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(bytes(content))


def arrays(path: Path, rng: random.Random) -> None:
    """An archive of arrays: of objects, cut off, with changed bytes, or with a header that lies."""
    stream = io.BytesIO()
    shape = rng.choice(((8, 8), (0,), (), (3, 1, 2)))
    kind = rng.choice((np.float32, np.int64, np.uint16, np.complex64, "U4", ">i4"))
    content = {"x": np.zeros(shape, kind), "labels": np.arange(8)}
    rng.choice((np.savez, np.savez_compressed))(stream, **content)  # type: ignore[operator]
    data = bytearray(stream.getvalue())
    action = rng.randrange(5)
    if action == 0:
        data = data[: rng.randrange(len(data))]
    elif action == 1:
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif action == 2:
        head = str({"descr": rng.choice(("<f4", "O", "<U9", "x", [1])), "fortran_order": False,
                    "shape": rng.choice(((10**12,), (-1,), ("a",), (2**62, 8)))})  # fmt: skip
        other = io.BytesIO()
        with zipfile.ZipFile(other, "w") as archive:
            words = rng.choice((head, head[:-3], "(" * 9000, ""))
            archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words.encode())
        data = bytearray(other.getvalue())
    path.write_bytes(bytes(data))

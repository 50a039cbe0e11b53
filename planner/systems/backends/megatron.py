"""Megatron-LM and Megatron-Core."""

from planner.plans.types import Requirement
from planner.space.types import Structure
from planner.systems.backends import GROUPS, PIPELINE, REPLICAS, Backend, register

register(
    Backend(
        key="megatron",
        title="Megatron",
        usual=True,
        can=REPLICAS | PIPELINE | GROUPS | {Requirement.SHARDED_GROUPS},
        schedules=("1f1b", "interleaved"),
        zero=(0, 1),
        formats=(
            "bf16",
            "bf16-fp32grad",
            "fp16",
            "fp32",
            "fp8",
            "fp8-cs",
            "fp8-blockwise",
            "mxfp8",
            "nvfp4",
        ),
        optimizers=("adam", "adamw", "sgd", "momentum"),
        zero_of_formats=dict.fromkeys(("fp8", "fp8-cs", "mxfp8"), (1,)),
        sharded_optimizers=("adam", "adamw"),
        unable={"fp8": ("layernorm", "moe_act", "first", "last")},
        decoders=True,
        structure=Structure(
            equal_replicas=True,
            alike=True,
            whole_layers=True,
            axes=("tensor", "context", "expert"),
            powers_of_two=True,
            head_groups="heads",
        ),
        modules=("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
        offloads=("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear"),
        sources={
            "schedules": "megatron/core/pipeline_parallel/schedules.py; --num-layers-per-virtual-pipeline-stage",
            "zero": "--use-distributed-optimizer, --num-distributed-optimizer-instances (arguments.py)",
            "formats": "--bf16, --fp16, --fp8-format with --fp8-recipe, --fp4-format (arguments.py)",
            "optimizers": "--optimizer adam, sgd with --sgd-momentum (core/optimizer/__init__.py)",
            "zero_of_formats": "--fp8-param-gather wants --use-distributed-optimizer (arguments.py)",
            "sharded_optimizers": "core/optimizer/distrib_optimizer.py takes Adam alone",
            "unable": "delayed scaling (fp8) goes with neither recomputation of layernorm and moe_act nor "
            "--first-last-layers-bf16 (core/transformer/transformer_config.py)",
            "decoders": "--num-layers equal layers; --pipeline-model-parallel-layout places these, embedding and loss",
            "equal_replicas": "one --tensor-model-parallel-size and --pipeline-model-parallel-size for all stages; "
            "unequal grids only between modules (examples/mimo/training/topology.py)",
            "alike": "one set of layers and of --recompute-granularity, --recompute-method, --recompute-modules",
            "some_layers": "--recompute-granularity full --recompute-method block --recompute-num-layers (a chunk)",
            "modules": "--recompute-granularity selective --recompute-modules (core/transformer/transformer_config.py)",
            "offloads": "--fine-grained-activation-offloading --offload-modules (user guide of Megatron Core 0.19, "
            "Fine-Grained Activation Offloading)",
            "whole_layers": "--pipeline-model-parallel-layout counts decoder layers, embedding and loss "
            "(pipeline_parallel_layer_layout.py); stages may have unequally many",
            "axes": "core/tensor_parallel/layers.py: ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding; "
            "--sequence-parallel; --context-parallel-size; --expert-model-parallel-size",
            "powers_of_two": "common practice: widths divide a node of 8",
            "head_groups": "attention.py: ranks beyond the key-value heads gather the projection and take their part",
        },
        notes=("chunks, micro-batches in groups: --microbatch-group-size-per-virtual-pipeline-stage",),
    )
)

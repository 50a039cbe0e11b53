"""DeepSpeed: ZeRO, its pipeline engine and AutoTP; and ZeRO-3 alone, as most use it."""

from planner.plans.types import Requirement
from planner.space.types import Structure
from planner.systems.backends import GROUPS, PIPELINE, REPLICAS, Backend, register

register(
    Backend(
        key="deepspeed",
        title="DeepSpeed",
        usual=True,
        can=REPLICAS | GROUPS | PIPELINE - {Requirement.MULTI_STAGE_RANK, Requirement.SPLIT_BACKWARD},
        schedules=("1f1b",),
        zero=(0, 1, 2, 3),
        formats=("bf16", "bf16-fp32grad", "bf16-deepspeed", "fp16", "fp32"),
        zero_of_formats={"bf16-fp32grad": (2, 3), "bf16-deepspeed": (1,)},
        optimizers=("adam", "adamw", "sgd", "lamb"),
        structure=Structure(
            some_layers=False,
            equal_replicas=True,
            alike=True,
            whole_layers=True,
            axes=("tensor", "expert"),
            powers_of_two=True,
            head_groups="key-value heads",
            zero_in_pipelines=(0, 1),
            between_layers=("replicated",),
        ),
        sources={
            "schedules": "runtime/pipe/engine.py: TrainSchedule is the only one for training",
            "zero": "zero_optimization.stage",
            "formats": "bf16.enabled, fp16.enabled, data_types.grad_accum_dtype (docs/_pages/config-json.md)",
            "zero_of_formats": "gradients summed in float32: refused without ZeRO, by the BF16_Optimizer "
            "(bf16-deepspeed) with stage 1 (runtime/engine.py, _do_optimizer_sanity_check)",
            "optimizers": "optimizer.type (runtime/engine.py, _configure_basic_optimizer)",
            "equal_replicas": "PipelineModule's topology: one number of replicas for all stages",
            "alike": "one activation_checkpoint_interval, one tensor_parallel.autotp_size",
            "some_layers": "activation_checkpoint_interval recomputes every n-th run of layers, not the first n",
            "whole_layers": "PipelineModule takes a list of layers (runtime/pipe/module.py); uneven by a subclass",
            "axes": "tensor_parallel.partition_config (runtime/tensor_parallel/config.py); ep_size of deepspeed.moe",
            "powers_of_two": "common practice: widths divide a node of 8",
            "head_groups": "AutoTP cuts key and value projections by whole heads",
            "zero_in_pipelines": "runtime/pipe/engine.py: the pipeline engine refuses ZeRO-2 and ZeRO-3",
            "between_layers": "AutoTP's row-parallel layers end in an all-reduce (module_inject/layers.py)",
        },
    )
)

register(
    Backend(
        key="deepspeed-zero3",
        title="DeepSpeed ZeRO-3",
        can=REPLICAS,
        schedules=(),
        zero=(3,),
        formats=("bf16", "bf16-fp32grad", "fp16", "fp32"),
        optimizers=("adam", "adamw", "sgd", "lamb"),
        structure=Structure(equal_replicas=True, alike=True, whole_layers=True, some_layers=False),
        sources={
            "schedules": "none: data parallelism without stages or groups",
            "zero": "zero_optimization.stage: 3",
            "formats": "bf16.enabled, fp16.enabled, data_types.grad_accum_dtype (docs/_pages/config-json.md)",
            "optimizers": "optimizer.type (runtime/engine.py, _configure_basic_optimizer)",
            "equal_replicas": "all ranks are replicas",
            "alike": "one model on all ranks",
            "some_layers": "checkpointing is a call in the model's own code, the same for every layer",
            "whole_layers": "the model is not cut",
        },
    )
)

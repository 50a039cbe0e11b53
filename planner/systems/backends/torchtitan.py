"""torchtitan: PyTorch's own parallel layers, FSDP2 and pipelining."""

from planner.plans.types import Requirement
from planner.space.types import Structure
from planner.systems.backends import GROUPS, PIPELINE, REPLICAS, Backend, register

register(
    Backend(
        key="torchtitan",
        title="torchtitan",
        usual=True,
        can=REPLICAS | PIPELINE - {Requirement.TIED_PARAMETERS} | GROUPS | {Requirement.SHARDED_GROUPS},
        schedules=("1f1b", "gpipe", "interleaved", "zb-v", "dualpipe-v"),
        zero=(0, 2, 3),
        formats=("bf16-fp32grad", "fp32"),
        decoders=True,
        next_token_alone=True,
        structure=Structure(
            some_layers=False,
            equal_replicas=True,
            alike=True,
            whole_layers=True,
            axes=("tensor", "context", "expert"),
            powers_of_two=True,
            head_groups="key-value heads",
            zero_in_pipelines=(0, 1),
        ),
        sources={
            "schedules": "pipeline_parallel_schedule (config/configs.py): names of torch.distributed.pipelining",
            "zero": "data_parallel_replicate_degree (0), data_parallel_shard_degree with fsdp_reshard_after_forward: "
            "never (2), always (3); both degrees for groups of shards",
            "zero_in_pipelines": "stages turn off FSDP's reduction and its reshard after backward, and reduce once "
            "after the last micro-batch (torch.distributed.pipelining, stage.py, backward_maybe_with_nosync): weights "
            "and gradients of a stage are whole on every rank, as of ZeRO-1, whatever fsdp_reshard_after_forward says",
            "formats": "mixed_precision_param; mixed_precision_reduce is float32 alone (config/job_config.py), in "
            "which gradients of micro-batches are summed (_fsdp_param.py of torch, to_accumulated_grad_if_needed)",
            "decoders": "parallelize and pipeline functions of decoders (models/llama3, "
            "distributed/pipeline_parallel.py)",
            "next_token_alone": "its DeepSeek-V3 leaves out the predictors (models/deepseek_v3)",
            "equal_replicas": "one mesh of pp, dp, cp and tp degrees for all ranks",
            "alike": "one parallelize function and one activation checkpoint mode for all parts "
            "(activation_checkpoint.py)",
            "some_layers": "selective_ac_option: every n-th layer, not the first n (activation_checkpoint.py)",
            "whole_layers": "module_fqns_per_model_part lists modules of the model (pipeline_parallel.py)",
            "axes": "ColwiseParallel, RowwiseParallel, SequenceParallel (models/llama3/sharding.py); "
            "context_parallel_degree, expert_parallel_degree",
            "powers_of_two": "common practice: widths divide a node of 8",
            "head_groups": "key and value projections are cut by columns, whole heads a rank",
        },
    )
)

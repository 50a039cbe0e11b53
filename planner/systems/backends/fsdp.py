"""PyTorch FSDP by itself: replicas with sharded weights, nothing else."""

from planner.space.types import Structure
from planner.systems.backends import REPLICAS, Backend, register

register(
    Backend(
        key="fsdp",
        title="FSDP",
        can=REPLICAS,
        schedules=(),
        zero=(2, 3),
        structure=Structure(equal_replicas=True, alike=True, whole_layers=True, some_layers=False),
        sources={
            "schedules": "none: data parallelism without stages or groups",
            "zero": "fully_shard(reshard_after_forward=): False (2), True (3)",
            "equal_replicas": "all ranks are replicas",
            "alike": "one model on all ranks; checkpoint_wrapper on all layers or none",
            "some_layers": "checkpoint_wrapper on all layers or none",
            "whole_layers": "the model is not cut",
        },
    )
)

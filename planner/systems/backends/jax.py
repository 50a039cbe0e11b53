"""JAX: a mesh, a sharding for each array, no pipelines."""

from planner.plans.types import Requirement
from planner.space.types import Structure
from planner.systems.backends import GROUPS, REPLICAS, Backend, register

register(
    Backend(
        key="jax",
        title="JAX",
        can=REPLICAS | GROUPS | {Requirement.RING_ATTENTION, Requirement.HALO_EXCHANGE},
        schedules=(),
        zero=(0, 1, 2, 3),
        structure=Structure(equal_replicas=True, alike=True),
        modules=("*",),
        offloads=("layer_input",),
        sources={
            "schedules": "no pipeline runtime (a pipeline is written by hand with shard_map)",
            "zero": "a PartitionSpec for each weight, gradient and optimizer state",
            "equal_replicas": "Mesh: one shape for all devices (sharding_impls.py)",
            "alike": "one program for all devices",
            "some_layers": "jax.checkpoint around some layers",
            "modules": "jax.checkpoint with a policy for what is kept",
            "offloads": "jax.checkpoint_policies.save_and_offload_only_these_names; MaxText: remat_policy custom "
            "with decoder_layer_input: offload (configs/base.yml)",
            "axes": "NamedSharding, with_sharding_constraint: any layout of any array",
        },
    )
)

"""What training frameworks demand of all plans that they take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Structure:
    """Restrictions that a training framework puts on plans, beside the user's own options; none by default.

    Attributes:
        equal_replicas: all stages have the same number of replicas.
        alike: all stages have the same sharding and the same recomputation.
        whole_layers: stages begin where a layer begins.
        axes: allowed roles of mesh axes (`planner.sharding.AxisRole`); tensor axes then split operators as the layers
            of frameworks do (`planner.sharding.limits`). Empty allows anything.
        powers_of_two: mesh axes have 1, 2, 4, 8 .. ranks, as is usual; a search looks at no others.
        head_groups: what the ranks of the tensor axes must divide: "" nothing, "heads" the attention heads, "key-value
            heads" the heads that have keys of their own.
        zero_in_pipelines: allowed ZeRO stages of plans with several pipeline stages; empty for those of the job.
        zero_alone: allowed ZeRO stages of plans with one stage; empty for those of the job.
        between_layers: allowed layouts of tensors between layers on a tensor axis, "replicated" or "sequence"; empty
            for both.
        some_layers: stages may recompute the first of their layers only.
        offloads: what a search may keep in the host's memory: kinds of modules, and `layer_input` of layers that are
            recomputed. Empty for nothing.
        offload_zero: ZeRO stages beside which it may; empty for those of the job.
    """

    equal_replicas: bool = False
    alike: bool = False
    whole_layers: bool = False
    axes: tuple[str, ...] = ()
    powers_of_two: bool = False
    head_groups: str = ""
    zero_in_pipelines: tuple[int, ...] = ()
    zero_alone: tuple[int, ...] = ()
    between_layers: tuple[str, ...] = ()
    some_layers: bool = True
    offloads: tuple[str, ...] = ()
    offload_zero: tuple[int, ...] = ()


UNRESTRICTED = Structure()
"""No restriction at all."""

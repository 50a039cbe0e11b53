"""GShard: layouts of a few tensors annotated, the rest completed; experts over devices."""

from planner.solvers.layouts import Layouts
from planner.systems import System, register
from planner.systems.proposals import by_layouts

register(
    System(
        key="gshard",
        title="GShard",
        cut="none: one program on all devices",
        sharding="any layouts on a mesh of all devices",
        solver=by_layouts,
        staleness="none",
        chooses=(
            "layouts that need least time, annotated tensors as written; with experts, their weights "
            "along the experts and tokens exchanged by all-to-all"
        ),
        source="Lepikhin et al., ICLR 2021",
        layouts=Layouts("gshard", within_memory="leanest"),
        backend={
            "weight_versions": "1",
            "expert_capacity": (
                "top-2 gating, C = 2 S / E tokens for an expert and a group of S tokens, times a capacity"
                " factor; tokens above it are passed on by the residual path"
            ),
            "auxiliary_loss": "balances the load of the experts",
        },
        open=(
            "layouts are completed by least time within memory, without annotations; memory gets the price at "
            "which they fit",
            "every expert is taken to receive its share of the tokens",
        ),
    ),
)

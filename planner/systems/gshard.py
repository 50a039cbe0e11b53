"""GShard: layouts of a few tensors annotated, the rest completed; experts over devices."""

from planner.solvers.layouts import Layouts
from planner.systems import System, register
from planner.systems.proposals import by_layouts

register(
    System(
        key="gshard",
        title="GShard",
        solver=by_layouts,
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
    ),
)

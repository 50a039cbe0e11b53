"""Tofu: every operator cut along dimensions found by recursion, on the devices of one machine."""

from planner.solvers.layouts import Layouts
from planner.systems import System, register
from planner.systems.proposals import by_layouts

register(
    System(
        key="tofu",
        title="Tofu",
        solver=by_layouts,
        source="Wang et al., EuroSys 2019",
        layouts=Layouts("tofu", one_node=True, chain=True),
        backend={
            "weight_versions": "1",
            "layouts": (
                "one dimension of every tensor, or several by recursion; weights and optimizer state "
                "sharded like their gradients"
            ),
        },
    ),
)

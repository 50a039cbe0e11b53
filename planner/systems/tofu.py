"""Tofu: every operator cut along dimensions found by recursion, on the devices of one machine."""

from planner.solvers.layouts import Layouts
from planner.systems import System, register
from planner.systems.proposals import by_layouts

register(
    System(
        key="tofu",
        title="Tofu",
        cut="none: every operator runs on all devices of one machine",
        sharding="one cut per factor of the device count for every tensor",
        solver=by_layouts,
        staleness="none",
        chooses=(
            "a 2-way cut of every tensor at a time, log2 k times over, each by dynamic programming on the"
            " coarsened graph, least bytes moved"
        ),
        source="Wang et al., EuroSys 2019",
        layouts=Layouts("tofu", one_node=True, chain=True),
        backend={
            "weight_versions": "1",
            "layouts": (
                "one dimension of every tensor, or several by recursion; weights and optimizer state "
                "sharded like their gradients"
            ),
        },
        open=(
            "one machine, as published; further machines stay idle",
            "counts of devices that are no power of two are cut by their prime factors",
        ),
    ),
)

"""Chimera: pipelines in both directions, W x D workers."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="chimera",
        title="Chimera",
        solver=by_search,
        source="Li and Hoefler, SC 2021",
        limits=Limits(schedules=("chimera",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "1, in 2f copies of every stage",
            "update": "once per mini-batch after an all-reduce among the 2fW workers of a stage",
            "exchange": "launched eagerly where a bubble follows, at the end elsewhere",
        },
    ),
)

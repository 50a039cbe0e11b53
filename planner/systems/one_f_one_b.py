"""PipeDream-Flush: 1F1B, drained at every mini-batch."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="1f1b",
        title="PipeDream-Flush (1F1B)",
        solver=by_search,
        source="Narayanan et al., ICML 2021 (PipeDream-2BW), section 3; SC 2021",
        limits=Limits(schedules=("1f1b",), recompute=(Recompute.BLOCKS,), fewest_stages=2),
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch, after the flush",
        },
    ),
)

"""PipeDream-2BW: width, depth, micro-batch and recomputation; two weight versions, no flush."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import Semantics, System, register
from planner.systems.proposals import by_search

register(
    System(
        key="pipedream-2bw",
        title="PipeDream-2BW",
        solver=by_search,
        semantics=Semantics.ASYNC,
        source="Narayanan et al., ICML 2021",
        limits=Limits(schedules=("pipedream-2bw",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "2 (the one being used and the one being made), swapped once per mini-batch",
            "update": "once per mini-batch of m >= d micro-batches",
            "learning_rate": "as in synchronous training; the delay is constant",
        },
    ),
)

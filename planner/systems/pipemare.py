"""PipeMare: one stage per device, asynchronous, no stashing."""

from planner.space.subspaces import Limits
from planner.systems import Semantics, System, register
from planner.systems.proposals import by_search

register(
    System(
        key="pipemare",
        title="PipeMare",
        solver=by_search,
        semantics=Semantics.ASYNC,
        source="Yang et al., MLSys 2021",
        limits=Limits(schedules=("pipemare",), fewest_stages=2, stage_a_device=True, copies=False),
        backend={
            "weight_versions": "1, and one buffer as large as the weights for T2",
            "T1": "learning rate divided by tau_i^p, p annealed from 1 to 0",
            "T2": (
                "backward weights u = w - tau delta with delta a running mean of weight changes, gamma = 0.135^(1/tau)"
            ),
            "T3": "the first epochs synchronous",
        },
    ),
)

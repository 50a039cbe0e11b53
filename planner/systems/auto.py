"""The best of all of them: this planner's own search, and every named system beside it."""

from planner.space.job_options import LIMITS, PRICED
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="auto",
        title="auto",
        solver=by_search,
        source="this planner",
        limits=None,
        takes=PRICED | {*LIMITS, "overlap"},
        best_of_all=True,
        backend={
            "plan": "`shardplan plan --system auto` writes it, as `compare --write-plans` does for every row",
        },
    ),
)

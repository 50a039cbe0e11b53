"""The best of all of them: this planner's own search, and every named system beside it."""

from planner.space.job_options import LIMITS, PRICED
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="auto",
        title="auto",
        cut="any contiguous stages, replicas, copies, recomputation and ZeRO-1; and what the named systems choose",
        sharding="groups of ranks that share every operator of a stage, and what the named systems choose",
        solver=by_search,
        staleness="none by default; with `--semantics any` that of the system it takes",
        chooses=(
            "the fastest of the own search (proven best of its space by the closed form, then simulated) "
            "and of all other systems in the comparison"
        ),
        source="this planner",
        limits=None,
        takes=PRICED | {*LIMITS, "overlap"},
        best_of_all=True,
        backend={
            "plan": "`shardplan plan --system auto` writes it, as `compare --write-plans` does for every row",
        },
        open=(
            "asynchronous systems take part only with `--semantics any`, rows whose updates differ never",
            "the own search counts transfers and the exchange at the end in full; data-parallel rows overlap them",
        ),
    ),
)

"""Plain synchronous data parallelism: what every published system compares itself with."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="data-parallel",
        title="Data parallelism",
        solver=by_exchange,
        source="common practice",
        exchange="all-reduce",
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch after an all-reduce",
        },
        tunable={"exchange": "all-reduce"},
    ),
)

"""Parallax: sparse variables on parameter servers, dense ones by all-reduce."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="parallax",
        title="Parallax",
        solver=by_exchange,
        source="Kim et al., EuroSys 2019",
        exchange="parallax",
        backend={
            "weight_versions": "1",
            "server_placement": "partitions of sparse variables on all machines, largest first to the least loaded",
            "partitions": "as many as machines; measured and fitted (c + b/P + a(P-1)) in a real run",
        },
        tunable={"partitions": "0", "dense_from": "1"},
    ),
)

"""Parallax: sparse variables on parameter servers, dense ones by all-reduce."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="parallax",
        title="Parallax",
        cut="none: every device has the whole model",
        solver=by_exchange,
        staleness="none",
        chooses=(
            "for each variable the cheaper way: sparse gradients through servers in partitions, dense "
            "ones by all-reduce"
        ),
        source="Kim et al., EuroSys 2019",
        exchange="parallax",
        backend={
            "weight_versions": "1",
            "server_placement": "partitions of sparse variables on all machines, largest first to the least loaded",
            "partitions": "as many as machines; measured and fitted (c + b/P + a(P-1)) in a real run",
        },
        open=(
            "the part of the rows that is touched is at most look-ups over rows, which is taken",
            "sparse variables and their optimizer state rest in host memory, a device holds the rows it looked up",
            "rows go between host memory and device at 12.8 GB/s, and are summed and updated at a host's 120 GB/s:"
            " estimates",
            "rows that no sample looks up are not updated, which differs from the other systems for optimizers with"
            " momentum: such a row is marked and never taken for the best of all",
        ),
        tunable={"partitions": "0", "dense_from": "1"},
    ),
)

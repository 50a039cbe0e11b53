"""Plain synchronous data parallelism: what every published system compares itself with."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="data-parallel",
        title="Data parallelism",
        cut="none: every device has the whole model",
        solver=by_exchange,
        staleness="none",
        chooses="the micro-batch of a device, as many devices as share the batch then, gradients accumulated",
        source="common practice",
        exchange="all-reduce",
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch after an all-reduce",
        },
        open=(
            "gradients are reduced in buckets, overlapped with the backward of the last micro-batch",
            "the fastest micro-batch size is taken, even if fewer devices share the batch with it",
        ),
        tunable={"exchange": "all-reduce"},
    ),
)

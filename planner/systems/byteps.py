"""BytePS: data parallelism with summation services on all machines."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="byteps",
        title="BytePS",
        solver=by_exchange,
        source="Jiang et al., OSDI 2020",
        exchange="byteps",
        backend={
            "weight_versions": "1",
            "server_placement": (
                "a summation service on the processors of every machine, CPU machines more: "
                "2(n-1)/(n^2+kn-2k) of the bytes each"
            ),
            "update": "on the devices: gradients are pulled, not weights",
        },
        tunable={"cpu_machines": "0", "inside": "auto", "efficiency": "1"},
    ),
)

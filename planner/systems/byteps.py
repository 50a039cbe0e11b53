"""BytePS: data parallelism with summation services on all machines."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="byteps",
        title="BytePS",
        cut="none: every device has the whole model",
        solver=by_exchange,
        staleness="none",
        chooses=(
            "the share of every machine's summation service so that all network ports are busy to the "
            "end; how a machine sums inside by its links"
        ),
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
        open=(
            "k = 0, as hardware profiles name no machines without accelerators; byteps:cpu_machines=4 (or =n, as "
            "many as machines) adds some, with the network port of a machine of the group",
            "as many accelerators are beside a network card as two for each card of a machine",
        ),
        tunable={"cpu_machines": "0", "inside": "auto", "efficiency": "1"},
    ),
)

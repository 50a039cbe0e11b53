"""Herring: data parallelism with balanced fusion buffers on servers beside the devices."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="herring",
        title="Herring",
        solver=by_exchange,
        source="Thangakrishnan et al., SC 2020",
        exchange="herring",
        backend={
            "weight_versions": "1",
            "server_placement": "one on every machine, the same share of every fusion buffer",
            "fusion_buffer": "25 MB",
        },
        tunable={"efficiency": "1", "buffer_bytes": "25e6"},
    ),
)

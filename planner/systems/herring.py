"""Herring: data parallelism with balanced fusion buffers on servers beside the devices."""

from planner.systems import System, register
from planner.systems.proposals import by_exchange

register(
    System(
        key="herring",
        title="Herring",
        cut="none: every device has the whole model",
        solver=by_exchange,
        staleness="none",
        chooses="fusion buffers filled in order of arrival, each cut in equal shards over all machines",
        source="Thangakrishnan et al., SC 2020",
        exchange="herring",
        backend={
            "weight_versions": "1",
            "server_placement": "one on every machine, the same share of every fusion buffer",
            "fusion_buffer": "25 MB",
        },
        open=(
            "the efficiency of the transport (about twice that of a ring on EFA, as claimed) is 1 here: bytes are the "
            "same as a ring's, and the profile's efficiency holds for both; herring:efficiency=1.2 sets it",
        ),
        tunable={"efficiency": "1", "buffer_bytes": "25e6"},
    ),
)

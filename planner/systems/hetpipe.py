"""HetPipe: virtual workers of unlike devices, waves of mini-batches, bounded distance."""

from planner.space.subspaces import Limits
from planner.systems import SYSTEMS
from planner.systems.types import Semantics, System

SYSTEMS.register(
    "hetpipe",
    System(
        key="hetpipe",
        title="HetPipe",
        cut=(
            "virtual workers of one node each (NP), of the same share of every type (ED), or of a fast and "
            "a slow type each (HD); order of devices and cuts within one chosen together"
        ),
        solver="hetpipe",
        semantics=Semantics.ASYNC,
        staleness="s_local = Nm - 1 own updates; s_global = (D+1)(s_local+1) + s_local - 1 of others",
        chooses=(
            "the allocation policy, the order of unlike devices and the cuts with the fastest slowest "
            "stage, the largest number Nm of concurrent mini-batches that fits"
        ),
        source="Park et al., USENIX ATC 2020",
        limits=Limits(schedules=("hetpipe",)),
        exchange="wsp",
        backend={
            "weight_versions": (
                "Nm per stage; a mini-batch uses the version that its virtual worker had when it entered"
            ),
            "update": "local after each mini-batch; one aggregated push per wave of Nm",
            "clock_distance": "D = 0: no virtual worker runs ahead of the slowest by a wave",
            "server_placement": (
                "a stage's shard on the nodes that hold the stage where all virtual workers are cut alike, else"
                " evenly on all nodes"
            ),
        },
        open=(
            "clock distance 0; larger distances do not change the pace of steady virtual workers",
            "the hybrid policy (HD) joins the fastest type with the slowest and so on inwards, by the time of the"
            " whole model, where virtual workers of a node's size come out; hetpipe:policy=HD asks for one",
            "all virtual workers work at the pace of the slowest",
            "pushes and pulls run beside the work: the slower of the two counts",
            "a plan file has one cut for all virtual workers: where unlike ones are fastest with cuts of their own,"
            " the best with one cut is written, and the file says what that costs",
        ),
        tunable={"policy": ""},
    ),
)

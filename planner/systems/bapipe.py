"""BaPipe: balanced partition and exploration of schedules, data parallelism beside them."""

from planner.play import Transfers
from planner.space.subspaces import Limits
from planner.systems import SYSTEMS
from planner.systems.types import System

SYSTEMS.register(
    "bapipe",
    System(
        key="bapipe",
        title="BaPipe",
        cut="one pipeline over all devices, balanced for each device's own speed, or data parallelism",
        solver="bapipe",
        staleness="none: the pipeline drains before every update",
        chooses=(
            "1F1B-SO where twice the features fit and transfers matter, else 1F1B-SNO; min-max partition,"
            " layers moved off over-full stages; plain data parallelism where that is faster"
        ),
        source="Zhao et al., 2020",
        limits=Limits(schedules=("bapipe-sno", "bapipe-so"), transfers=Transfers.OVERLAPPED),
        exchange="all-reduce",
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch",
        },
        open=(
            "no published code: schedules, forms and memory as recalled and reproduced by simulation",
            "coarse partition first and splitting a layer across neighbours are not needed here: the "
            "exact partition prices transfers",
        ),
    ),
)

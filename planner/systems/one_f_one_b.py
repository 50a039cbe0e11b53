"""PipeDream-Flush: 1F1B, drained at every mini-batch."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="1f1b",
        title="PipeDream-Flush (1F1B)",
        cut="balanced stages in line; copies of the pipeline",
        solver=by_search,
        staleness="none: the pipeline drains before every update",
        chooses=(
            "depth, width, micro-batch and recomputation by trying all; at most D - s micro-batches in "
            "flight instead of M let it take smaller depths than GPipe"
        ),
        source="Narayanan et al., ICML 2021 (PipeDream-2BW), section 3; SC 2021",
        limits=Limits(schedules=("1f1b",), recompute=(Recompute.BLOCKS,), fewest_stages=2),
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch, after the flush",
        },
        open=(
            "stages are balanced by compute time, embeddings and heads included, not by number of layers",
            "both placements of copies are tried: neighbouring devices for a pipeline, or for the replicas of a stage",
        ),
    ),
)

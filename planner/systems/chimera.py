"""Chimera: pipelines in both directions, W x D workers."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="chimera",
        title="Chimera",
        cut="D balanced stages on D workers in both directions; W copies",
        solver=by_search,
        staleness="none: the pipeline drains before every update",
        chooses=(
            "the largest micro-batch that fits for each (W, D), then the shape that its performance model"
            " prefers; more pairs of pipelines trade memory for bubbles; forward doubling with "
            "recomputation where there are more than D micro-batches"
        ),
        source="Li and Hoefler, SC 2021",
        limits=Limits(schedules=("chimera",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "1, in 2f copies of every stage",
            "update": "once per mini-batch after an all-reduce among the 2fW workers of a stage",
            "exchange": "launched eagerly where a bubble follows, at the end elsewhere",
        },
        open=(
            "recomputation is by layer; if that does not fit, by stage, from the stage's input",
            "all micro-batch sizes are simulated rather than the largest only",
            "backward halving is not tried: it needs micro-batches of at least two samples",
            "both placements of copies are tried: neighbouring devices for a pipeline, or for the replicas of a stage",
        ),
    ),
)

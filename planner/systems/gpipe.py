"""GPipe: balanced cells, all forwards, then all backwards, activations recomputed."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="gpipe",
        title="GPipe",
        cut="K balanced cells in line; copies of the pipeline",
        solver=by_search,
        staleness="none: the pipeline drains before every update",
        chooses=(
            "K cells balanced by estimated cost and M micro-batches, 4K and more for a small bubble; recomputation"
            " where activations do not fit"
        ),
        source="Huang et al., NeurIPS 2019",
        limits=Limits(schedules=("gpipe",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch, gradients of all micro-batches summed",
            "batch_norm": "statistics per micro-batch in training, moving averages over the mini-batch",
        },
        open=(
            "recomputation is by layer; if that does not fit, by stage, from the stage's input",
            "the published heuristic minimises the variance of cell costs; here the slowest cell is "
            "minimised exactly, within memory",
            "M of 4K and more is the paper's advice against the bubble; here the fastest M is taken, whatever it is",
            "copies of the pipeline beside each other (data parallelism) are allowed, as many as the "
            "batch divides into",
            "both placements of copies are tried: neighbouring devices for a pipeline, or for the replicas of a stage",
        ),
    ),
)

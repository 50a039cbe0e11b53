"""GPipe: balanced cells, all forwards, then all backwards, activations recomputed."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_search

register(
    System(
        key="gpipe",
        title="GPipe",
        solver=by_search,
        source="Huang et al., NeurIPS 2019",
        limits=Limits(schedules=("gpipe",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch, gradients of all micro-batches summed",
            "batch_norm": "statistics per micro-batch in training, moving averages over the mini-batch",
        },
    ),
)

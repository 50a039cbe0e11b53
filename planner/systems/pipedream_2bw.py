"""PipeDream-2BW: width, depth, micro-batch and recomputation; two weight versions, no flush."""

from planner.space.subspaces import Limits, Recompute
from planner.systems import Semantics, System, register
from planner.systems.proposals import by_search

register(
    System(
        key="pipedream-2bw",
        title="PipeDream-2BW",
        cut="depth d of balanced stages, width w of parallel pipelines",
        solver=by_search,
        semantics=Semantics.ASYNC,
        staleness="one update everywhere: W(t+1) = W(t) - nu grad f(W(t-1))",
        chooses=(
            "depth, width, micro-batch and recomputation by trying all, at least d micro-batches a "
            "mini-batch; two versions instead of d let it take depths that PipeDream cannot"
        ),
        source="Narayanan et al., ICML 2021",
        limits=Limits(schedules=("pipedream-2bw",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "2 (the one being used and the one being made), swapped once per mini-batch",
            "update": "once per mini-batch of m >= d micro-batches",
            "learning_rate": "as in synchronous training; the delay is constant",
        },
        open=(
            "recomputation is by layer; if that does not fit, by stage, from the stage's input",
            "stages are balanced by compute time, embeddings and heads included, not by number of layers",
            "the exchange of gradients runs beside the work: the slower of the two counts, as in the "
            "published cost model",
            "both placements of copies are tried: neighbouring devices for a pipeline, or for the replicas of a stage",
        ),
    ),
)

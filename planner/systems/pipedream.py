"""PipeDream: replicated stages by a hierarchical DP, 1F1B without a flush, stashed weights."""

from planner.play import Transfers
from planner.space.subspaces import Limits
from planner.systems import SYSTEMS
from planner.systems.types import Semantics, System

SYSTEMS.register(
    "pipedream",
    System(
        key="pipedream",
        title="PipeDream",
        cut="contiguous stages, each replicated on its own, level by level of the cluster",
        solver="pipedream",
        semantics=Semantics.ASYNC,
        staleness="gradients of stage s are D - 1 - s updates old",
        chooses=(
            "stage boundaries and replicas that minimise the slowest stage; NOAM = ceil(workers / "
            "replicas of the first stage) minibatches in flight"
        ),
        source="Narayanan et al., SOSP 2019",
        limits=Limits(schedules=("pipedream",), transfers=Transfers.OVERLAPPED),
        exchange="all-reduce",
        backend={
            "weight_versions": (
                "stash one version per minibatch in flight; its backward uses the version of its forward"
            ),
            "update": "after every minibatch; the replicas of a stage average first",
            "replicas": "round-robin; a backward runs on the replica that ran the forward",
            "learning_rate": "as for data parallelism with the same minibatch; no correction",
        },
        open=(
            "a minibatch is what a device would work on in data parallelism (global batch over "
            "devices); the table's iteration is as many of them as make a global batch",
            "gradients of replicas travel beside later work: the slower of the two counts, as in the published cost",
            "NOAM starves stages that feed wider ones: where a longer warm-up that fits is faster, it is taken",
            "partitions by the paper's stage cost (the longer of computation and exchange) and by the released"
            " program's (their sum, with a server's bytes and with a ring's) are played, level by level of the"
            " cluster (up to 16 devices) and with all devices on one level of the narrowest links, and the best by"
            " the longer of computation and a ring's bytes; the fastest is taken",
            "replicas need not share an iteration's minibatches evenly (15-1 with 16 of them); a plan file holds"
            " the fastest that do, and says what that loses",
        ),
    ),
)

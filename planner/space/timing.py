"""The time of a judged decision, played out."""

from __future__ import annotations

from planner.play import StageTimes, Trace, Transfers, play
from planner.space.types import Decision, Evaluation


def simulate_decision(
    decision: Decision, evaluation: Evaluation, *, transfers: Transfers = Transfers.BLOCKING
) -> Trace:
    """Play a judged decision; its copies are alike, so one is played.

    Raises:
        PlanError: the evaluation has no terms (the decision is malformed).
    """
    terms = evaluation.stages
    times = StageTimes.of(
        [t.forward_s for t in terms],
        [t.backward_s for t in terms],
        [t.receive_s for t in terms],
        [t.exposed_sync_s for t in terms],
        [t.update_s for t in terms],
        return_s=[t.return_s for t in terms],
    )
    replicas = [stage.replicas for stage in decision.stages]
    return play(decision.schedule, replicas, decision.micro_batches, times, transfers=transfers)

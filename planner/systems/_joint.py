"""What the own search found where several ranks share every operator, as a row of the comparison."""

from __future__ import annotations

from planner.simulate import simulate_decision
from planner.space.pricer import Pricer
from planner.space.types import Candidate, Decision, Evaluation
from planner.systems._bench import Bench
from planner.systems._search import Found


def shared_found(bench: Bench, prices: Pricer, candidate: Candidate) -> Found:
    """A decision with groups of ranks, its iteration simulated; transfers keep devices waiting."""
    decision, evaluation = candidate.decision, candidate.evaluation
    seconds = simulate_decision(decision, evaluation).makespan_s
    fullest = max(evaluation.stages, key=lambda t: t.memory.total / t.capacity_bytes)
    devices = decision.copies * sum(stage.devices for stage in decision.stages)
    busy_s = 0.0
    for stage, t in zip(decision.stages, evaluation.stages, strict=True):
        inside_s = prices.entry(decision.micro_batch, stage.sharding).sharded.communication_s[stage.start : stage.stop]
        work_s = t.forward_s + t.backward_s - float(inside_s.sum())
        own_s = decision.micro_batches * work_s + stage.replicas * t.update_s
        busy_s += decision.copies * stage.ranks * own_s
    return Found(
        plan=_words(prices, decision),
        iteration_s=seconds,
        memory=fullest.memory,
        capacity_bytes=fullest.capacity_bytes,
        bubble=max(0.0, 1 - busy_s / (devices * seconds)),
        sent_bytes=_sent_bytes(bench, prices, decision, evaluation),
        devices=devices,
        micro_batch=decision.micro_batch,
        notes=("the own search is fastest; communication inside a group is not overlapped",),
    )


def _words(prices: Pricer, decision: Decision) -> str:
    """A decision in a few words."""
    stages = decision.stages
    label = prices.entry(decision.micro_batch, stages[0].sharding).costs.label
    replicas = [decision.copies * stage.replicas for stage in stages]
    least, most = min(replicas), max(replicas)
    words = f"{len(stages)} stages" if len(stages) > 1 else "1 stage"
    words += f" x {least} replicas" if least == most else f" x {least} to {most} replicas"
    words += f" x {stages[0].ranks} ranks ({label}), micro-batch {decision.micro_batch}"
    again = sum(stage.recompute for stage in stages)
    return (
        words + (f", recompute {again} stages" if again else "") + (f", ZeRO-{decision.zero}" if decision.zero else "")
    )


def _sent_bytes(bench: Bench, prices: Pricer, decision: Decision, evaluation: Evaluation) -> float:
    """Bytes that all devices send in an iteration: inside groups, between stages, and for gradients."""
    total, runs = 0.0, decision.copies * decision.micro_batches
    for index, (stage, terms) in enumerate(zip(decision.stages, evaluation.stages, strict=True)):
        entry = prices.entry(decision.micro_batch, stage.sharding)
        blocks = slice(stage.start, stage.stop)
        total += runs * stage.ranks * float(entry.sharded.sent_bytes[blocks].sum())
        if index:
            costs = entry.costs
            crossing = float(costs.boundary_bytes[stage.start] + costs.gradient_boundary_bytes[stage.start])
            total += runs * stage.ranks * crossing
        others = decision.copies * stage.replicas - 1
        moved = terms.memory.gradients + (terms.memory.weights if decision.zero else terms.memory.gradients)
        total += others * stage.ranks * moved
    return total

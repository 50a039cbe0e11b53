"""The judge: what a decision costs and which limits it breaks, worked out from the inputs alone.

Nothing here is shared with the solvers: plain loops over the blocks, devices and links that a decision names.

The closed form of the iteration time, m_i = micro_batches / r_i being what one of the r_i replicas of stage i works on:

    t_i = forward_i + backward_i + receive_i + return_i
    T   = sum_i t_i  +  max_i (m_i - 1 + late_i) t_i  +  max_k (e_k - lead_k)_+

The first term fills and drains the pipeline, the second is the pace of its slowest stage (synchronous 1F1B and GPipe
alike: Narayanan et al., SOSP 2019; Fan et al., PPoPP 2021). Where an earlier stage has fewer replicas, no more than
that many micro-batches arrive at a time, so the last replica of stage i begins late by a part of t_i:

    late_i = 1 - min(1, min_{j<i} r_j / r_i)

The third term is what the end of the iteration still waits for: stage k synchronises and updates for
`e_k = exposed_sync_k + update_k`, beginning `lead_k = sum_{j<k} (backward_j + return_j)` before stage 0 ends its last
backward. Where stages share weights, summing their gradients is part of the first one's `exposed_sync`. Exact for equal
stages; for GPipe a lower bound where another stage is slowest forward than backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective
from planner.schedules import Pipeline, get
from planner.space.layout import slice_width, stage_groups
from planner.space.limits import forbidden_choices, malformations, overfull_stages
from planner.space.replicas import Replicas
from planner.space.settled import precision_of
from planner.space.types import BlockCosts, Decision, Evaluation, Job, StageChoice, StageTerms, Violation

Shelf = BlockCosts | Mapping[int, BlockCosts]
"""Costs at one micro-batch size, of one sharding or by the number of several."""


def evaluate(costs: Shelf, cluster: Cluster, job: Job, decision: Decision) -> Evaluation:
    """Price a decision and list every limit that it breaks.

    Args:
        costs: the chain's costs at the decision's micro-batch size; by sharding where stages differ in it.
        cluster: the machine.
        job: what is to be trained, and which choices are allowed.
        decision: the point of the space.

    Returns:
        The iteration time, the terms of each stage and the violations. A decision whose stages or devices make no sense
        (kinds "coverage", "devices", "divisibility"), or that its schedule cannot serve, gets an infinite time and no
        terms. What the job forbids is said before what the schedule cannot do.

    Raises:
        UsageError: the job's precision or optimizer is unknown.

    O(stages * (blocks + ranks)).
    """
    shelf = {costs.sharding: costs} if isinstance(costs, BlockCosts) else costs
    malformed = malformations(shelf, cluster, job, decision)
    if malformed:
        return Evaluation(float("inf"), (), malformed, 0)
    pipeline = Pipeline(tuple(s.replicas for s in decision.stages), decision.micro_batches)
    schedule = get(decision.schedule)
    unserved = schedule.supports(pipeline)
    if unserved:
        forbidden = tuple(forbidden_choices(job, decision, shelf[decision.stages[0].sharding].names))
        return Evaluation(float("inf"), (), forbidden or (Violation("option", 0, unserved),), 0)
    in_flight = schedule.in_flight(pipeline)
    groups = stage_groups(decision)
    of_stage = [shelf[choice.sharding] for choice in decision.stages]
    tied_s = _tied_s(of_stage, cluster, job, decision, groups)
    stages = tuple(
        _stage_terms(of_stage[index], cluster, job, decision, groups, index, in_flight[index], tied_s[index])
        for index in range(len(groups))
    )
    pace = [terms.total_s / choice.replicas for choice, terms in zip(decision.stages, stages, strict=True)]
    iteration_s = sum(terms.total_s for terms in stages) + _steady_s(decision, stages) + _tail_s(stages)
    violations = (*forbidden_choices(job, decision, of_stage[0].names), *overfull_stages(stages))
    return Evaluation(iteration_s, stages, violations, pace.index(max(pace)))


def _steady_s(decision: Decision, stages: Sequence[StageTerms]) -> float:
    """Seconds that the slowest stage works on all its micro-batches but one, its last replica beginning late."""
    steady_s, fewest = 0.0, math.inf
    for choice, terms in zip(decision.stages, stages, strict=True):
        late = 1 - min(1.0, fewest / choice.replicas)
        turns = decision.micro_batches // choice.replicas - 1 + late
        steady_s = max(steady_s, turns * terms.total_s)
        fewest = min(fewest, choice.replicas)
    return steady_s


def _tail_s(stages: Sequence[StageTerms]) -> float:
    """Seconds that synchronisation and updates last beyond stage 0's last backward."""
    lead_s = tail_s = 0.0
    for terms in stages:
        tail_s = max(tail_s, terms.exposed_sync_s + terms.update_s - lead_s)
        lead_s += terms.backward_s + terms.return_s
    return tail_s


def _stage_terms(
    costs: BlockCosts,
    cluster: Cluster,
    job: Job,
    decision: Decision,
    groups: Sequence[np.ndarray],
    index: int,
    in_flight: int,
    tied_s: float,
) -> StageTerms:
    choice, chosen = decision.stages[index], precision_of(job, cluster)
    blocks = range(choice.start, choice.stop)
    types = np.unique(cluster.device_types[groups[index]]).tolist()
    repeated = [b for b in blocks if choice.recompute and (costs.repeated is None or costs.repeated[b])]

    def slowest_s(seconds: np.ndarray, which: Sequence[int] = blocks) -> float:
        return max(sum(float(seconds[t, b]) for b in which) for t in types)

    recompute_s = slowest_s(costs.forward_s, repeated)
    forward_s, backward_s = slowest_s(costs.forward_s), slowest_s(costs.backward_s) + recompute_s
    held, charged = _elements(costs, blocks)
    own = [float(costs.parameter_elements[b]) for b in blocks]
    concurrent = max(1, slice_width(decision) // choice.ranks // choice.replicas) * choice.ranks
    replicas = Replicas(cluster, groups[index], concurrent, chosen, decision.zero)
    pass_s, sync_s = replicas.pass_s(own), replicas.end_s(held)
    receive_s, return_s = _transfers_s(costs, cluster, groups, index, choice.start)
    device = min((cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
    unit_bytes, working_bytes = _activations(costs, choice, repeated)
    workspace = float(costs.workspace_bytes[choice.start : choice.stop].max())
    kept = in_flight * unit_bytes + working_bytes
    updated = held / charged if charged else 0.0
    return StageTerms(
        forward_s=forward_s + max(0.0, pass_s[0] - job.overlap * forward_s),
        backward_s=backward_s + max(0.0, pass_s[1] - job.overlap * backward_s),
        recompute_s=recompute_s,
        receive_s=receive_s,
        sync_s=sync_s,
        exposed_sync_s=max(0.0, sync_s - max(0.0, job.overlap * backward_s - pass_s[1])) + tied_s,
        update_s=slowest_s(costs.update_s) / replicas.shards * updated + _sum(costs.step_s, blocks),
        in_flight=in_flight,
        memory=replicas.memory(held, max(own), job.optimizer, kept, (workspace, float(device.reserve_bytes))),
        capacity_bytes=float(device.memory_bytes),
        return_s=return_s,
        tied_sync_s=tied_s,
        unit_bytes=unit_bytes,
    )


def _sum(seconds: np.ndarray | None, blocks: Sequence[int]) -> float:
    return 0.0 if seconds is None else sum(float(seconds[b]) for b in blocks)


def _elements(costs: BlockCosts, blocks: range) -> tuple[float, float]:
    """Trainable elements that a stage holds, shared ones once, and what its blocks are charged for one by one."""
    charged = sum(float(costs.parameter_elements[b]) for b in blocks)
    twice = sum(tie.elements * max(0, sum(b in blocks for b in tie.blocks) - 1) for tie in costs.ties)
    return charged - twice, charged


def _transfers_s(
    costs: BlockCosts, cluster: Cluster, groups: Sequence[np.ndarray], index: int, boundary: int
) -> tuple[float, float]:
    """Seconds to receive a stage's input, and to return its gradient."""
    if not index:
        return 0.0, 0.0
    pair, here = (groups[index - 1], groups[index]), (boundary,)
    receive_s = _transfer_s(cluster, *pair, float(costs.boundary_bytes[boundary]))
    return_s = _transfer_s(cluster, *pair, float(costs.gradient_boundary_bytes[boundary]))
    return receive_s + _sum(costs.gather_s, here), return_s + _sum(costs.gradient_gather_s, here)


def _activations(costs: BlockCosts, choice: StageChoice, repeated: Sequence[int]) -> tuple[float, float]:
    """What a replica keeps of each micro-batch in flight, and beside it of the one it is working on.

    A recomputed stage keeps the inputs of its blocks and all of the blocks that it does not repeat. By the time it
    repeats a block, the micro-batch in work has freed the latter: these come last.
    """
    first, last = choice.start, choice.stop - 1
    if not choice.recompute:
        return float(costs.saved_bytes[first, last]), 0.0
    kept = 0.0 if costs.kept_bytes is None else sum(float(b) for b in costs.kept_bytes[first : last + 1])
    largest = max((float(costs.saved_bytes[b, b]) for b in repeated), default=0.0)
    return float(costs.checkpoint_bytes[first, last]) + kept, max(0.0, largest - kept)


def _tied_s(
    costs: Sequence[BlockCosts], cluster: Cluster, job: Job, decision: Decision, groups: Sequence[np.ndarray]
) -> list[float]:
    """By stage, the time to sum the gradients of its weights that later stages hold too.

    With g the greatest common divisor of the holders' replicas, replica q of each exchanges with all replicas of the
    others whose number is q modulo g: these see the same micro-batches. All g groups of all copies work at once, and
    the slowest counts, at the first holder: its backward ends last.
    """
    found = [0.0] * len(groups)
    payload_bytes = precision_of(job, cluster).gradient_bytes
    for number, tie in enumerate(costs[0].ties):
        holders = [k for k, s in enumerate(decision.stages) if any(s.start <= b < s.stop for b in tie.blocks)]
        elements = max((costs[k].ties[number].elements for k in holders), default=0.0)
        if len(holders) < 2 or not elements:
            continue
        shared = math.gcd(*(decision.stages[k].replicas for k in holders))
        working = decision.copies * shared * decision.stages[holders[0]].ranks
        members = (
            np.concatenate([groups[k][copy, q::shared, 0] for k in holders])
            for copy in range(decision.copies)
            for q in range(shared)
        )
        found[holders[0]] += max(
            collective_s(cluster, Collective.ALL_REDUCE, m, elements * payload_bytes, working) for m in members
        )
    return found


def _transfer_s(cluster: Cluster, before: np.ndarray, here: np.ndarray, payload_bytes: float) -> float:
    """Slowest transfer among the pairs of replicas that some micro-batch connects, with all pairs sending at once.

    Every rank of a replica sends its part to its like in the next stage.
    """
    if not payload_bytes:
        return 0.0
    (_, senders, ranks), receivers = before.shape, here.shape[1]
    turns = np.arange(int(np.lcm(senders, receivers)))
    ends = sorted({0, ranks - 1})
    sources, targets = before[:, turns % senders][..., ends], here[:, turns % receivers][..., ends]
    terms = send_terms(cluster, sources, targets, concurrent=min(senders, receivers) * ranks)
    return float(terms.seconds(payload_bytes).max())

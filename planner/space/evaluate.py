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
from collections.abc import Sequence

import numpy as np

from planner.costs.precision import Precision, optimizer_state_bytes, precision
from planner.errors import UsageError
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective
from planner.schedules import Pipeline, get, names
from planner.space.layout import slice_width, stage_ranks
from planner.space.types import BlockCosts, Decision, Evaluation, Job, MemoryBytes, StageChoice, StageTerms, Violation

MEMORY_TOLERANCE = 1e-9
"""A device is over-full when it needs more than its memory by this fraction: room for rounding, never for a tensor."""


def evaluate(costs: BlockCosts, cluster: Cluster, job: Job, decision: Decision) -> Evaluation:
    """Price a decision and list every limit that it breaks.

    Args:
        costs: the chain's costs at the decision's micro-batch size.
        cluster: the machine.
        job: what is to be trained, and which choices are allowed.
        decision: the point of the space.

    Returns:
        The iteration time, the terms of each stage and the violations. A decision whose stages or devices make no sense
        (kinds "coverage", "devices", "divisibility") gets an infinite time and no terms.

    Raises:
        UsageError: the job's precision or optimizer is unknown.

    O(stages * (blocks + ranks)).
    """
    malformed = [*_coverage(costs, decision), *_devices(cluster, job, decision), *_divisibility(costs, job, decision)]
    if malformed:
        return Evaluation(float("inf"), (), tuple(malformed), 0)
    pipeline = Pipeline(tuple(s.replicas for s in decision.stages), decision.micro_batches)
    in_flight = get(decision.schedule).in_flight(pipeline)
    ranks = stage_ranks(decision)
    tied_s = _tied_s(costs, cluster, job, decision, ranks)
    stages = tuple(
        _stage_terms(costs, cluster, job, decision, ranks, index, in_flight[index], tied_s[index])
        for index in range(len(ranks))
    )
    pace = [terms.total_s / choice.replicas for choice, terms in zip(decision.stages, stages, strict=True)]
    iteration_s = sum(terms.total_s for terms in stages) + _steady_s(decision, stages) + _tail_s(stages)
    violations = (*_options(job, decision), *_memory(costs, stages))
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
    ranks: Sequence[np.ndarray],
    index: int,
    in_flight: int,
    tied_s: float,
) -> StageTerms:
    choice = decision.stages[index]
    chosen = precision(job.precision)
    blocks = range(choice.start, choice.stop)
    types = np.unique(cluster.device_types[ranks[index]]).tolist()
    forward_s = max(sum(float(costs.forward_s[t, b]) for b in blocks) for t in types)
    repeated = [b for b in blocks if choice.recompute and (costs.repeated is None or costs.repeated[b])]
    recompute_s = max(sum(float(costs.forward_s[t, b]) for b in repeated) for t in types)
    backward_s = max(sum(float(costs.backward_s[t, b]) for b in blocks) for t in types) + recompute_s
    held = charged = sum(float(costs.parameter_elements[b]) for b in blocks)
    held -= sum(tie.elements * max(0, sum(b in blocks for b in tie.blocks) - 1) for tie in costs.ties)
    shards = decision.copies * choice.replicas if decision.zero else 1
    update_s = max(sum(float(costs.update_s[t, b]) for b in blocks) for t in types) / shards
    update_s *= held / charged if charged else 0.0
    concurrent = max(1, slice_width(decision) // choice.replicas)
    sync_s = _sync_s(cluster, ranks[index].ravel(), held, chosen, decision.zero, concurrent)
    receive_s = return_s = 0.0
    if index:
        before, here = ranks[index - 1], ranks[index]
        receive_s = _transfer_s(cluster, before, here, float(costs.boundary_bytes[choice.start]))
        return_s = _transfer_s(cluster, before, here, float(costs.gradient_boundary_bytes[choice.start]))
    device = min((cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
    unit_bytes, working_bytes = _activations(costs, choice, repeated)
    memory = MemoryBytes(
        weights=held * chosen.weight_bytes,
        gradients=held * chosen.gradient_bytes,
        optimizer=held * optimizer_state_bytes(job.optimizer, chosen) / shards,
        activations=in_flight * unit_bytes + working_bytes,
        workspace=max(float(costs.workspace_bytes[b]) for b in blocks),
        reserve=float(device.reserve_bytes),
    )
    return StageTerms(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=recompute_s,
        receive_s=receive_s,
        sync_s=sync_s,
        exposed_sync_s=max(0.0, sync_s - job.overlap * backward_s) + tied_s,
        update_s=update_s,
        in_flight=in_flight,
        memory=memory,
        capacity_bytes=float(device.memory_bytes),
        return_s=return_s,
        tied_sync_s=tied_s,
        unit_bytes=unit_bytes,
    )


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


def _sync_s(
    cluster: Cluster, ranks: np.ndarray, elements: float, chosen: Precision, zero: int, concurrent: int
) -> float:
    """Gradient all-reduce; with ZeRO-1, gradients are scattered and updated weights gathered."""
    if len(ranks) < 2 or not elements:
        return 0.0
    gradients, weights = elements * chosen.gradient_bytes, elements * chosen.weight_bytes
    if not zero:
        return collective_s(cluster, Collective.ALL_REDUCE, ranks, gradients, concurrent)
    scatter_s = collective_s(cluster, Collective.REDUCE_SCATTER, ranks, gradients, concurrent)
    return scatter_s + collective_s(cluster, Collective.ALL_GATHER, ranks, weights, concurrent)


def _tied_s(
    costs: BlockCosts, cluster: Cluster, job: Job, decision: Decision, ranks: Sequence[np.ndarray]
) -> list[float]:
    """By stage, the time to sum the gradients of its weights that later stages hold too.

    With g the greatest common divisor of the holders' replicas, replica q of each exchanges with all replicas of the
    others whose number is q modulo g: these see the same micro-batches. All g groups of all copies work at once, and
    the slowest counts, at the first holder: its backward ends last.
    """
    found = [0.0] * len(ranks)
    payload_bytes = precision(job.precision).gradient_bytes
    for tie in costs.ties:
        holders = [k for k, s in enumerate(decision.stages) if any(s.start <= b < s.stop for b in tie.blocks)]
        if len(holders) < 2 or not tie.elements:
            continue
        groups = math.gcd(*(decision.stages[k].replicas for k in holders))
        members = (
            np.concatenate([ranks[k][copy, q::groups] for k in holders])
            for copy in range(decision.copies)
            for q in range(groups)
        )
        found[holders[0]] += max(
            collective_s(cluster, Collective.ALL_REDUCE, m, tie.elements * payload_bytes, decision.copies * groups)
            for m in members
        )
    return found


def _transfer_s(cluster: Cluster, before: np.ndarray, here: np.ndarray, payload_bytes: float) -> float:
    """Slowest transfer among the pairs of replicas that some micro-batch connects, with all pairs sending at once."""
    if not payload_bytes:
        return 0.0
    senders, receivers = before.shape[1], here.shape[1]
    turns = np.arange(int(np.lcm(senders, receivers)))
    terms = send_terms(
        cluster, before[:, turns % senders], here[:, turns % receivers], concurrent=min(senders, receivers)
    )
    return float(terms.seconds(payload_bytes).max())


def _coverage(costs: BlockCosts, decision: Decision) -> list[Violation]:
    """Stages must follow on from block 0 to the last, none empty."""
    found, n, expected = [], len(costs.parameter_elements), 0
    for index, stage in enumerate(decision.stages):
        if stage.start != expected:
            found.append(
                Violation("coverage", index, f"stage {index} begins at block {stage.start}, not at {expected}")
            )
        if stage.stop <= stage.start or stage.stop > n:
            found.append(
                Violation("coverage", index, f"stage {index} is blocks {stage.start} to {stage.stop} of a chain of {n}")
            )
        expected = stage.stop
    if expected != n:
        found.append(Violation("coverage", max(0, len(decision.stages) - 1), f"stages end at block {expected} of {n}"))
    return found


def _devices(cluster: Cluster, job: Job, decision: Decision) -> list[Violation]:
    found = []
    available = min(job.devices or cluster.device_count, cluster.device_count)
    taken = sum(stage.replicas for stage in decision.stages)
    width = slice_width(decision)
    if decision.copies < 1 or any(stage.replicas < 1 for stage in decision.stages):
        found.append(Violation("devices", 0, "a pipeline needs at least one copy and every stage at least one replica"))
    if taken > width:
        found.append(Violation("devices", 0, f"stages take {taken} devices of a slice of {width}", taken, width))
    if decision.copies * width > available:
        message = f"{decision.copies} copies of {width} devices, but there are {available}"
        found.append(Violation("devices", 0, message, decision.copies * width, available))
    return found


def _divisibility(costs: BlockCosts, job: Job, decision: Decision) -> list[Violation]:
    found = []
    samples = decision.copies * decision.micro_batches * decision.micro_batch
    if samples != job.global_batch or decision.micro_batches < 1:
        message = (
            f"{decision.copies} copies of {decision.micro_batches} micro-batches of {decision.micro_batch} samples "
            f"are not a global batch of {job.global_batch}"
        )
        found.append(Violation("divisibility", 0, message, job.global_batch, samples))
    if decision.micro_batch != costs.micro_batch:
        message = f"micro-batch {decision.micro_batch}, but the costs are for {costs.micro_batch}"
        found.append(Violation("divisibility", 0, message, decision.micro_batch, costs.micro_batch))
    for index, stage in enumerate(decision.stages):
        if stage.replicas > 0 and decision.micro_batches % stage.replicas:
            message = f"{stage.replicas} replicas of stage {index} do not divide {decision.micro_batches} micro-batches"
            found.append(Violation("divisibility", index, message, decision.micro_batches, stage.replicas))
    if decision.schedule not in names():
        found.append(Violation("option", 0, f"there is no schedule {decision.schedule!r}"))
    return found


def _options(job: Job, decision: Decision) -> list[Violation]:
    """Choices that the job does not allow."""
    if job.recompute not in ("never", "always", "auto"):
        raise UsageError(f"unknown recompute choice {job.recompute!r}", hint="use never, always or auto")
    found = []
    if decision.schedule not in job.schedules:
        found.append(Violation("option", 0, f"schedule {decision.schedule} is not among {', '.join(job.schedules)}"))
    if decision.zero not in job.zero:
        found.append(Violation("option", 0, f"ZeRO stage {decision.zero} is not among {job.zero}"))
    if job.micro_batches and decision.micro_batch not in job.micro_batches:
        found.append(Violation("option", 0, f"micro-batch {decision.micro_batch} is not among {job.micro_batches}"))
    if job.max_stages and len(decision.stages) > job.max_stages:
        message = f"{len(decision.stages)} stages, but at most {job.max_stages} are allowed"
        found.append(Violation("option", 0, message, len(decision.stages), job.max_stages))
    for index, stage in enumerate(decision.stages):
        if (job.recompute == "never" and stage.recompute) or (job.recompute == "always" and not stage.recompute):
            found.append(Violation("option", index, f"stage {index}: recompute must be used {job.recompute}"))
    return found


def _memory(costs: BlockCosts, stages: Sequence[StageTerms]) -> list[Violation]:
    found = []
    for index, terms in enumerate(stages):
        needed = terms.memory.total
        if needed > terms.capacity_bytes * (1 + MEMORY_TOLERANCE):
            message = (
                f"stage {index} needs {needed / 2**30:.2f} GiB on a device of {terms.capacity_bytes / 2**30:.2f} GiB"
            )
            found.append(Violation("memory", index, message, needed, terms.capacity_bytes))
    return found

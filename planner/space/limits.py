"""The limits that a decision may break: coverage, devices, divisibility, the job's options, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.errors import UsageError
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.schedules import names
from planner.space.layout import slice_width
from planner.space.pins import pinned_blocks
from planner.space.types import BlockCosts, Decision, Job, StageTerms, Violation


def malformations(
    shelf: Mapping[int, BlockCosts], cluster: Cluster, job: Job, decision: Decision
) -> tuple[Violation, ...]:
    """Why a decision makes no sense: blocks left out, more devices than there are, batches that do not come out.

    Args:
        shelf: the chain's costs by sharding.
        cluster: the machine.
        job: what is to be trained.
        decision: the point of the space.
    """
    costs = next(iter(shelf.values()))
    return (
        *_coverage(costs, decision),
        *_devices(cluster, job, decision),
        *_divisibility(costs, job, decision),
        *_shardings(shelf, decision),
    )


def _shardings(shelf: Mapping[int, BlockCosts], decision: Decision) -> list[Violation]:
    """Every stage is sharded in a known way over its ranks, and all of them hand over tensors that lie alike."""
    found = []
    for index, stage in enumerate(decision.stages):
        costs = shelf.get(stage.sharding)
        if costs is None:
            found.append(Violation("sharding", index, f"stage {index}: there is no sharding {stage.sharding}"))
        elif costs.ranks != stage.ranks:
            message = f"stage {index} has replicas of {stage.ranks} ranks; its sharding is for {costs.ranks}"
            found.append(Violation("sharding", index, message, stage.ranks, costs.ranks))
    labels = sorted({shelf[s.sharding].label for s in decision.stages if s.sharding in shelf})
    if len(labels) > 1:
        found.append(Violation("sharding", 0, f"stages are sharded over different meshes: {', '.join(labels)}"))
    return found


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
    taken = sum(stage.devices for stage in decision.stages)
    width = slice_width(decision)
    if decision.copies < 1 or any(s.replicas < 1 or s.ranks < 1 for s in decision.stages):
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
    if decision.schedule.partition(":")[0] not in names():
        found.append(Violation("option", 0, f"there is no schedule {decision.schedule!r}"))
    return found


def forbidden_choices(job: Job, decision: Decision, names: Sequence[str]) -> list[Violation]:
    """Choices that the job does not allow.

    Args:
        job: what is to be trained.
        decision: the point of the space.
        names: of the blocks.
    """
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
    for words, allowed, taken in _counts(job, decision):
        for count in sorted(taken - set(allowed)) if allowed else ():
            found.append(Violation("option", 0, f"{words} {count} is not among {allowed}"))
    for block, wanted in pinned_blocks(job, names) if job.keep else ():
        index = next(k for k, s in enumerate(decision.stages) if s.start <= block < s.stop)
        if wanted not in (index, index - len(decision.stages)):
            found.append(Violation("option", index, f"block {names[block]!r} is on stage {index}, not on {wanted}"))
    if job.uniform and len({s.replicas for s in decision.stages}) > 1:
        found.append(Violation("option", 0, "stages differ in their number of replicas"))
    for index, stage in enumerate(decision.stages):
        if (job.recompute == "never" and stage.recompute) or (job.recompute == "always" and not stage.recompute):
            found.append(Violation("option", index, f"stage {index}: recompute must be used {job.recompute}"))
    return found


def _counts(job: Job, decision: Decision) -> Iterator[tuple[str, tuple[int, ...], set[int]]]:
    """The widths that a user may limit, what is allowed (nothing said means all), and what the decision has."""
    yield "tensor parallelism", job.tensor_parallel, {s.ranks for s in decision.stages}
    yield "number of stages", job.pipeline_stages, {len(decision.stages)}
    yield "data parallelism", job.data_parallel, {decision.copies * s.replicas for s in decision.stages}


def overfull_stages(stages: Sequence[StageTerms]) -> list[Violation]:
    """Stages that need more memory than their smallest device has."""
    found = []
    for index, terms in enumerate(stages):
        needed = terms.memory.total
        reserve = terms.memory.reserve
        if not fits(needed - reserve, terms.capacity_bytes - reserve):
            message = (
                f"stage {index} needs {needed / 2**30:.2f} GiB on a device of {terms.capacity_bytes / 2**30:.2f} GiB"
            )
            found.append(Violation("memory", index, message, needed, terms.capacity_bytes))
    return found

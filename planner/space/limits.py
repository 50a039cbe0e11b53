"""The limits that a decision may break: coverage, devices, divisibility, the job's options, memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from planner.hardware.types import Cluster
from planner.memory import fits
from planner.schedules import get, names
from planner.space.configuration import LAYER_INPUT, Configuration
from planner.space.cuts import pinned_blocks
from planner.space.job_options import allowed_ranks, as_written
from planner.space.layers import layer_starts
from planner.space.recompute_choices import is_allowed
from planner.space.types import BlockCosts, Job, StageTerms, Violation, WorkerMemory
from planner.space.workers import Workers

EXCLUDED = "excluded by "
"""Beginning of the message of a violation of an option of the user's."""


def malformations(
    shelf: Mapping[int, BlockCosts], job: Job, configuration: Configuration, *, named: bool = True
) -> tuple[Violation, ...]:
    """Why a configuration is malformed: uncovered blocks, samples that do not divide, unknown shardings.

    Args:
        shelf: the chain's costs by number of the sharding.
        job: what is to be trained.
        configuration: the configuration to check.
        named: True if its schedule must be one of the registry.
    """
    costs = next(iter(shelf.values()))
    if configuration.copies < 1 or any(s.replicas < 1 or s.ranks < 1 for s in configuration.stages):
        message = "a pipeline needs at least one copy and every stage at least one replica"
        return (Violation("devices", 0, message), *_coverage(costs, configuration))
    return (
        *_coverage(costs, configuration),
        *_divisibility(costs, job, configuration, named),
        *_shardings(shelf, configuration),
        *unpriced(job, configuration),
    )


def missing_devices(cluster: Cluster, job: Job, configuration: Configuration, workers: Workers) -> list[Violation]:
    """Violations of a configuration that takes more devices than its slice, the job or the cluster has."""
    found = []
    available = job.devices_of(cluster)
    taken = sum(int(own.shape[1]) for own in workers.ranks)
    width = configuration.slice_devices or taken
    if taken > width:
        found.append(Violation("devices", 0, f"stages take {taken} devices of a slice of {width}", taken, width))
    needed = workers.world_size if configuration.devices else configuration.copies * width
    if needed > available:
        message = f"{configuration.copies} copies of {width} devices, but there are {available}"
        found.append(Violation("devices", 0, message, needed, available))
    return found


def _shardings(shelf: Mapping[int, BlockCosts], decision: Configuration) -> list[Violation]:
    """Violations of shardings: each must be known and be for its stage's ranks, and all must have one mesh."""
    found = []
    for index, stage in enumerate(decision.stages):
        costs = shelf.get(stage.sharding)
        if costs is None:
            found.append(Violation("sharding", index, f"stage {index}: there is no sharding {stage.sharding}"))
        elif costs.ranks != stage.ranks:
            message = f"stage {index} has replicas of {stage.ranks} ranks; its sharding is for {costs.ranks}"
            found.append(Violation("sharding", index, message, stage.ranks, costs.ranks))
        elif (costs.context, costs.expert) != (stage.context, stage.expert):
            said, own = (f"CP {each.context} and EP {each.expert}" for each in (stage, costs))
            found.append(Violation("sharding", index, f"stage {index} has {said}; its sharding is for {own}"))
    labels = sorted({shelf[s.sharding].label for s in decision.stages if s.sharding in shelf})
    if len(labels) > 1:
        found.append(Violation("sharding", 0, f"stages are sharded over different meshes: {', '.join(labels)}"))
    return found


def unpriced(job: Job, configuration: Configuration) -> Iterator[Violation]:
    """Violations of choices that the block prices are not for, or that cannot be priced yet."""
    for name, value, priced in (
        ("precision", configuration.precision or job.precision, job.precision),
        ("overlap", job.overlap if configuration.overlap is None else configuration.overlap, job.overlap),
    ):
        if value != priced:
            yield Violation("option", 0, f"{name} {value}, but the blocks are priced for {priced}")
    for index, stage in enumerate(configuration.stages):
        if stage.repeats and stage.recompute:
            message = f"stage {index} repeats all layers, and {', '.join(stage.repeats)} with them: say one of the two"
            yield Violation("option", index, message)
        if stage.layers and (not stage.recompute or stage.offload or configuration.whole_stages):
            message = f"stage {index} has a number of layers to recompute, {stage.layers}"
            yield Violation("option", index, f"{message}: recompute layer by layer, and offload nothing")
        elif stage.recompute and stage.offload not in ((), (LAYER_INPUT,)):
            message = (
                f"stage {index} recomputes all layers and keeps only their inputs: offload {LAYER_INPUT}, nothing else"
            )
            yield Violation("option", index, message)
        elif LAYER_INPUT in stage.offload and not stage.recompute:
            message = f"stage {index} keeps more than {LAYER_INPUT}: recompute all layers, or name modules to offload"
            yield Violation("option", index, message)


def _coverage(costs: BlockCosts, decision: Configuration) -> list[Violation]:
    """Violations of coverage: stages must follow each other from the first block to the last, none empty."""
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


def _divisibility(costs: BlockCosts, job: Job, decision: Configuration, named: bool) -> list[Violation]:
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
        replicas = decision.copies * stage.replicas
        if decision.shard_over and replicas % decision.shard_over:
            message = f"groups of {decision.shard_over} do not divide the {replicas} replicas of stage {index}"
            found.append(Violation("divisibility", index, message, replicas, decision.shard_over))
    if named and decision.schedule.partition(":")[0] not in names():
        found.append(Violation("option", 0, f"there is no schedule {decision.schedule!r}"))
    return found


def unlike_repeats(decision: Configuration, repeats: Collection[int]) -> list[Violation]:
    """Stages that repeat their forward, or do not, unlike the orders, where these do so by actions of their own."""
    return [
        Violation(
            "option", index, f"the orders {'' if index in repeats else 'do not '}repeat the forward of stage {index}"
        )
        for index, stage in enumerate(decision.stages)
        if repeats and (stage.recompute != (index in repeats) or stage.repeats)
    ][:1]


def forbidden_choices(
    job: Job, decision: Configuration, names: Sequence[str], workers: Workers | None = None
) -> list[Violation]:
    """Choices that the job does not allow.

    Args:
        job: what is to be trained.
        decision: the point of the space.
        names: of the blocks.
        workers: who holds its stages; without them each stage has workers of its own.
    """
    stages, count = decision.stages, len(decision.stages)
    widths = "tensor_parallel" if job.tensor_parallel else "meshes"
    found = [
        (name, 0)
        for name, allowed, taken in _allowed_and_taken(job, decision, workers)
        if allowed and not taken <= set(allowed)
    ]
    if allowed_ranks(job) and not {s.ranks // (s.context * s.expert) for s in stages} <= set(allowed_ranks(job)):
        found.append((widths, 0))
    if job.max_stages and count > job.max_stages:
        found.append(("max_stages", 0))
    for block, wanted in pinned_blocks(job, names) if job.keep else ():
        index = next(k for k, s in enumerate(stages) if s.start <= block < s.stop)
        found += [("keep", index)] if wanted not in (index, index - count) else []
    if job.uniform and len({s.replicas for s in stages}) > 1:
        found.append(("uniform", 0))
    asked = [is_allowed(job.recompute, stage.keeping._replace(offload=())) for stage in stages]
    found += [("recompute", asked.index(False))] if not all(asked) else []
    options = [(index, as_written(job, name)) for name, index in dict.fromkeys(found)]
    options += [(at, f"{' or '.join(job.backends)}: {what}") for at, what in _outside_structure(job, decision, names)]
    return [Violation("option", index, EXCLUDED + what) for index, what in options]


def _outside_structure(job: Job, decision: Configuration, names: Sequence[str]) -> list[tuple[int, str]]:
    """The first stage that breaks a restriction of the wanted frameworks, and what it has; empty if none does."""
    structure, first = job.structure, decision.stages[0]
    starts = layer_starts(names) if structure.whole_layers else ()
    zero = structure.zero_in_pipelines if len(decision.stages) > 1 else structure.zero_alone
    if zero and decision.zero not in zero:
        return [(0, f"ZeRO {decision.zero}")]
    for index, stage in enumerate(decision.stages):
        alike = (stage.sharding, stage.keeping) == (first.sharding, first.keeping)
        if structure.equal_replicas and stage.replicas != first.replicas:
            return [(index, "unequal replicas")]
        if len(starts) and starts[stage.start] != stage.start:
            return [(index, "layers cut apart")]
        if stage.layers and not structure.some_layers:
            return [(index, "some layers recomputed")]
        if structure.alike and not alike:
            return [(index, "stages shared or recomputed unlike")]
    return []


def _allowed_and_taken(
    job: Job, decision: Configuration, workers: Workers | None
) -> Iterator[tuple[str, tuple[object, ...], set[object]]]:
    """By option of the job, the values that it allows (empty means all) and those that the configuration takes."""
    key, plain = decision.schedule.partition(":")[0], (n for n in job.schedules if n.partition(":")[0] in names())
    allowed = (*job.schedules, *(get(name).name for name in plain))
    yield "schedules", allowed, {key if key in job.schedules else decision.schedule}
    yield "zero", job.zero, {decision.zero}
    yield "micro_batches", job.micro_batches, {decision.micro_batch}
    yield "context_parallel", job.context_parallel, {s.context for s in decision.stages}
    yield "expert_parallel", job.expert_parallel, {s.expert for s in decision.stages}
    in_line = workers is None or workers.in_line
    replicas = [s.replicas for s in decision.stages] if workers is None else [len(own) for own in workers.holders]
    yield "pipeline_stages", job.pipeline_stages, {len(decision.stages) if in_line else len(workers.hosted)}  # type: ignore[union-attr]
    yield "data_parallel", job.data_parallel, {decision.copies * count for count in replicas}


def overfull_workers(workers: Sequence[WorkerMemory]) -> list[Violation]:
    """Violations of workers that need more memory than their smallest device has."""
    found = []
    for worker in workers:
        needed = worker.memory.total
        reserve = worker.memory.reserve
        if not fits(needed - reserve, worker.capacity_bytes - reserve):
            stages = "stage " + str(worker.stages[0]) if len(worker.stages) == 1 else f"stages {_listed(worker.stages)}"
            verb = "needs" if len(worker.stages) == 1 else "on one device need"
            message = f"{stages} {verb} {needed / 2**30:.2f} GiB on a device of {worker.capacity_bytes / 2**30:.2f} GiB"
            found.append(Violation("memory", worker.stages[0], message, needed, worker.capacity_bytes))
    return found


def overfull_hosts(cluster: Cluster, workers: Workers, stages: Sequence[StageTerms]) -> list[Violation]:
    """The violation of the fullest node whose host lacks memory for what its devices keep there; none if unknown."""
    if not cluster.host_memory_bytes or not any(terms.host_bytes for terms in stages):
        return []
    kept_bytes, node_size = np.zeros(cluster.device_count), max(1, cluster.node_size)
    for stage, terms in enumerate(stages):
        kept_bytes[workers.groups(stage).ravel()] += terms.in_flight * terms.host_bytes
    nodes = np.bincount(np.arange(len(kept_bytes)) // node_size, kept_bytes)
    needed, available = float(nodes.max()), cluster.host_memory_bytes
    if fits(needed, available):
        return []
    message = (
        f"node {int(nodes.argmax())} keeps {needed / 2**30:.2f} GiB in a host's memory of {available / 2**30:.2f} GiB"
    )
    first = next(k for k, terms in enumerate(stages) if terms.host_bytes)
    return [Violation("host", first, message, needed, available)]


def _listed(stages: Sequence[int]) -> str:
    """A few numbers, shortened in the middle."""
    return ", ".join(map(str, stages)) if len(stages) < 5 else f"{stages[0]}, {stages[1]}, ... {stages[-1]}"

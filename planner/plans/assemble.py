"""Write a judged decision out as a plan: indices of blocks, operators and ranks become their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from planner.costs.precision import Precision
from planner.costs.report import coverage
from planner.errors import PlanError
from planner.graph import Chain, Graph, Note, NoteLevel, per_graph
from planner.hardware.types import Cluster
from planner.operators.modules import drops_output, module_nodes
from planner.plans import sections, shard_sections
from planner.plans.collectives import all_collectives, exchange_section
from planner.plans.figures import Alternative, gap_to, headline_of
from planner.plans.files import seal
from planner.plans.idle import fuller_use, idle_count
from planner.plans.model import Block, BlockRun, compress
from planner.plans.rank_schedule import RankSchedule, lay_out, meeting
from planner.plans.readings import requirements, words_in
from planner.plans.records import Duplicated, FileRead, Given, Provenance, SharedParameter, Stage
from planner.plans.structures import block_structures
from planner.plans.types import EXPOSED_MINOR, FORMAT, SCHEMA_VERSION, Plan, Requirement, minor_of
from planner.plans.words import module_ranges, significant
from planner.schedules import ActionKind, Schedule, WeightPolicy, get
from planner.sharding import StageSharding
from planner.space.blocks import head_block
from planner.space.configuration import StageChoice
from planner.space.jobs import precision_of, settled
from planner.space.layers import Layers
from planner.space.pricer import Pricer
from planner.space.schemes import SchemeExchange
from planner.space.steps import NOTHING_EXPOSED, step_view
from planner.space.timing import certificate_alone
from planner.space.types import Candidate, Certificate, Configuration, Evaluation, Job

NOT_MODELLED = (
    "data loading, checkpoint writing and host work other than kernel launches",
    "contention between activation transfers and gradient synchronisation on the same links",
    "fragmentation of device memory beyond the reserve",
    "fusion of operators other than attention",
    "stragglers, failures and clock throttling",
)
"""What predictions of every plan leave out."""

_NO_OVERLAP = "communication inside a group behind work: it is priced as if nothing overlapped"
_UNEQUAL = "tensor, sequence and expert parallelism over devices of several types (not searched)"
_REPEATED_WORK = "time of the duplicated operators in stages after the first that has them"


def assemble(
    pricer: Pricer,
    cluster: Cluster,
    job: Job,
    decision: Configuration,
    evaluation: Evaluation,
    simulated_s: float,
    *,
    certificate: Certificate | None = None,
    provenance: Provenance | None = None,
    alternatives: Sequence[Candidate] = (),
    schedule: Schedule | None = None,
    given: Given = "",
    by_rules: bool = False,
) -> Plan:
    """Write a configuration that was priced, evaluated and simulated out as a sealed plan; O(nodes + actions).

    Args:
        pricer: the prices of the model, and how groups of several ranks share its work.
        cluster: the hardware, with the headroom that the plan leaves free.
        job: what was asked for.
        decision: the answer.
        evaluation: the judge's verdict on it: times and memory by stage.
        simulated_s: seconds of an iteration, simulated.
        certificate: what the search proved; None if nothing but the configuration was looked at.
        provenance: how the plan came to be; by default the names of model and cluster.
        alternatives: other priced configurations to list in the plan, without the answer itself.
        schedule: the schedule, if the registry does not know it by the configuration's name.
        given: what the user gave of the schedule (`ScheduleSection.given`); "" for nothing.
        by_rules: whether a published system's rules chose it, so that nothing is proposed for devices that are idle.

    Raises:
        PlanError: the configuration does not fit the chain, the cluster or the shardings.
        UsageError: unknown schedule or precision.
    """
    job = settled(job, cluster)
    graph, chain, prices = pricer.graph_at(decision.micro_batch), pricer.chain, pricer.profiles(decision.micro_batch)[0]
    formats = precision_of(job, cluster)
    rank_schedule = lay_out(decision, schedule=schedule)
    _check_devices(cluster, rank_schedule.world_size)
    staging, duplicated = staged(graph, chain, decision, formats)
    blocks = block_table(chain)
    used = shard_sections.used_shardings(decision, pricer.stage_shardings(decision))
    stages = _named_stages(staging, chain, blocks, decision, rank_schedule, used)
    shared = sections.shared_parameters(
        [[p for block in blocks[s.start : s.stop] for p in block.parameters] for s in decision.stages],
        graph.parameter_index,
        formats,
        summed=rank_schedule.section.weight_policy == WeightPolicy.SYNC,
    )
    rank_shared = [shard_sections.rank_share(entry, used, formats) for entry in shared]
    proof = certificate or certificate_alone(decision, evaluation.stages, simulated_s)
    step = step_view(decision, schedule or get(decision.schedule), evaluation.stages, evaluation.iteration_s)
    section = meeting(rank_schedule.section, len(decision.stages), shared)
    scheme = _tensor_scheme(evaluation)
    node_size = cluster.node_size or 1
    exchanged = [()] * len(stages) if scheme else all_collectives(stages, decision, rank_shared, formats, node_size)
    split, error = ActionKind.WEIGHT_GRAD in words_in(section), sections.compared_error(cluster, decision)
    working = {rank for stage in stages for rank in stage.ranks}
    predictions = sections.predictions_section(
        decision, evaluation, proof, exchanged, step=step, split=split, error=error
    )
    plan = Plan(
        format=FORMAT,
        version=SCHEMA_VERSION,
        digest="",
        provenance=provenance or default_provenance(pricer.graph.name, cluster.name),
        model=sections.model_section(graph, formats),
        hardware=sections.hardware_section(cluster),
        options=job,
        configuration=_configuration_section(decision, rank_schedule, used),
        world_size=rank_schedule.world_size,
        copies=decision.copies,
        micro_batches=sections.micro_batches_section(decision),
        requires=(),
        stages=stages,
        routing=rank_schedule.routing,
        boundaries=shard_sections.sharded_boundaries(staging.boundaries(), decision, used),
        shared_parameters=shared,
        duplicated=duplicated,
        schedule=dataclasses.replace(section, given=given),
        predictions=shard_sections.with_inside(predictions, decision, used),
        alternatives=tuple(_alternative(pricer, candidate) for candidate in alternatives),
        coverage=coverage(graph, prices.origin),
        notes=(*graph.report.notes, *(_separate_copies_note(entry) for entry in shared if entry.reduction == "none")),
        not_modelled=_not_modelled(cluster, sharded=bool(used), duplicated=duplicated),
        blocks=_block_runs(chain),
        shardings=shard_sections.sharding_sections(graph, decision, used, blocks),
        exchange=exchange_section(scheme.exchange, scheme.step) if scheme else None,
        headline=headline_of(
            graph,
            cluster,
            prices,
            chosen=formats,
            global_batch=decision.micro_batch * decision.micro_batches * decision.copies,
            ranks=working,
            iteration_s=evaluation.iteration_s,
            memory_bytes=step.fullest.memory.total,
            capacity_bytes=step.fullest.capacity_bytes,
            error=predictions.measured_error,
            use=idle_count(cluster, job, working)
            if by_rules
            else fuller_use(pricer, cluster, job, decision, evaluation, working, own_shape=bool(given)),
        ),
    )
    return with_simulation(_with_requirements(plan, divided=bool(staging.divided_modules())), simulated_s)


def _alternative(pricer: Pricer, candidate: Candidate) -> Alternative:
    """The section of an alternative, with the ranks that hold different experts under its shardings."""
    entries = pricer.stage_shardings(candidate.decision).values()
    experts = max((shard_sections.expert_ranks_of(entry) for entry in entries), default=1)
    return sections.alternative_section(candidate, experts)


def _tensor_scheme(evaluation: Evaluation) -> SchemeExchange | None:
    """The exchange of gradients tensor by tensor; None where a ZeRO stage's is listed with the stages."""
    exchange = evaluation.exchange
    return exchange if exchange is not None and exchange.scheme.zero is None else None


def _with_requirements(plan: Plan, *, divided: bool) -> Plan:
    """The plan with what it needs of a backend, and the minor version of the schema that can say it."""
    return with_minor(dataclasses.replace(plan, requires=requirements(plan, divided=divided)))


def with_minor(plan: Plan) -> Plan:
    """The plan with the least minor version of the schema that says what it needs, and what its alternatives do."""
    told = {Requirement.LAYER_RECOMPUTE} if any(other.layers for other in plan.alternatives) else set[Requirement]()
    newest = any(terms.exposed != NOTHING_EXPOSED for terms in plan.predictions.stages)
    newest |= any(other.experts > 1 for other in plan.alternatives)
    newest |= any(block.structure for block in plan.block_table)
    minor = max(minor_of({*plan.requires, *told}), EXPOSED_MINOR if newest else 0)
    return dataclasses.replace(plan, minor=minor)


def _configuration_section(
    decision: Configuration, rank_schedule: RankSchedule, used: Mapping[int, tuple[StageSharding, str]]
) -> Configuration:
    """The configuration for the file: shardings numbered from 1 in file order, the schedule by its full name."""
    numbers = {number: place for place, number in enumerate(used, 1)}
    stages = tuple(dataclasses.replace(stage, sharding=numbers.get(stage.sharding, 0)) for stage in decision.stages)
    return dataclasses.replace(decision, stages=stages, schedule=rank_schedule.section.name)


def _separate_copies_note(shared: SharedParameter) -> Note:
    """The note that tied weights are trained as separate copies."""
    message = (
        f"stages {list(shared.stages)} each train a copy of these tied weights of their own: as the pipeline never "
        "drains, at no update do all of them have the gradient of the same micro-batches, and none is exchanged"
    )
    return Note(NoteLevel.WARNING, "tie-given-up", message, shared.parameter)


def _not_modelled(cluster: Cluster, *, sharded: bool, duplicated: Sequence[Duplicated]) -> tuple[str, ...]:
    """Effects that the predictions leave out: of every plan, and of one for such devices, groups and operators."""
    repeated = any(len(entry.stages) > 1 for entry in duplicated)
    effects = ((_NO_OVERLAP, sharded), (_UNEQUAL, len(cluster.devices) > 1), (_REPEATED_WORK, repeated))
    return (*NOT_MODELLED, *(effect for effect, holds in effects if holds))


def default_provenance(
    model: str = "",
    hardware: str = "",
    *,
    dims: Sequence[str] = (),
    nodes: int | str | None = None,
    changes: Sequence[str] = (),
    stack: str = "",
    costs: str = "",
    files: Sequence[FileRead] = (),
) -> Provenance:
    """Who made a plan: this program and version, and what the user called model, hardware and stack, without folders.

    Nothing of it depends on where files lie or how the command line was written: the same question has the same bytes.

    Args:
        model: name or path.
        hardware: name or path.
        dims: sizes that the model was read at, `seq=1024` each.
        nodes: number of nodes that was asked for; None for the profile's own.
        changes: figures of the hardware that were set, in the order in which they were.
        stack: name or path; "" if none was named.
        costs: path of the file of seconds of operators; "" if there is none.
        files: further files that the plan is made from.
    """
    model, hardware, stack, costs = (Path(name).name if name else "" for name in (model, hardware, stack, costs))
    made_by, sizes = ("shardplan", version("shardplan"), ()), (tuple(sorted(dims)), str(nodes or ""))
    return Provenance(*made_by, model, hardware, *sizes, tuple(changes), stack, costs, tuple(files))


def with_simulation(plan: Plan, iteration_s: float) -> Plan:
    """The plan with its simulated iteration time in seconds, bound and gap adjusted to it; sealed anew."""
    simulated_s = significant(iteration_s)
    bound_s = min(plan.predictions.bound_s, simulated_s)
    gap = significant(gap_to(bound_s, simulated_s))
    predictions = dataclasses.replace(plan.predictions, simulated_iteration_s=simulated_s, bound_s=bound_s, gap=gap)
    headline = plan.headline and plan.headline.at(simulated_s, predictions.measured_error)
    return seal(dataclasses.replace(plan, predictions=predictions, headline=headline))


def with_price(plan: Plan, dollars_per_device_hour: float) -> Plan:
    """The plan with the price of a device and hour, in US dollars, in its headline; sealed anew."""
    return seal(dataclasses.replace(plan, headline=plan.headline and plan.headline.priced(dollars_per_device_hour)))


def _named_stages(
    staging: sections.Staging,
    chain: Chain,
    blocks: Sequence[Block],
    decision: Configuration,
    rank_schedule: RankSchedule,
    used: Mapping[int, tuple[StageSharding, str]],
) -> tuple[Stage, ...]:
    """The plan's stages, with names of modules, inputs and outputs."""
    stages = []
    for index, choice in enumerate(decision.stages):
        entry, name = used[choice.sharding] if choice.ranks > 1 else (None, "")
        stage = in_model(
            stage_section(decision, index, blocks, rank_schedule.groups[index], name), staging, chain, decision
        )
        if entry is not None:
            held = shard_sections.rank_parameters(entry, choice.start, choice.stop)
            replicas = shard_sections.rank_replicas(entry, choice.start, choice.stop)
            stage = dataclasses.replace(stage, rank_parameters=held, rank_replicas=replicas)
        stages.append(stage)
    return tuple(stages)


def stage_section(
    decision: Configuration, index: int, blocks: Sequence[Block], groups: tuple[tuple[int, ...], ...], sharding: str
) -> Stage:
    """A stage as configuration, blocks and schedule make it, without what only the model or its sharding says."""
    choice = decision.stages[index]
    stage_blocks = blocks[choice.start : choice.stop]
    owners = {p.owner: p.elements for block in stage_blocks for p in block.parameters if p.trainable}
    return Stage(
        index=index,
        blocks=(choice.start, choice.stop),
        modules=module_ranges([block.name for block in stage_blocks]),
        inputs=(),
        outputs=(),
        replicas=groups,
        recompute=choice.recompute,
        kept_blocks=(),
        zero=decision.zero,
        parameters=sum(owners.values()),
        sharding=sharding,
        repeats=choice.repeats,
        offload=choice.offload,
        shard_over=decision.shard_over,
    )


def in_model(stage: Stage, staging: sections.Staging, chain: Chain, decision: Configuration) -> Stage:
    """A stage with what the model says of it: inputs, outputs, what recomputation keeps and repeats, what moves."""
    choice = decision.stages[stage.index]
    repeated = _members(chain, choice, choice.repeats)
    kept = set(_members(chain, choice, [name for name in choice.repeats if not drops_output(name)]))
    head = -1 if decision.whole_stages else head_block(chain)
    return dataclasses.replace(
        stage,
        inputs=staging.inputs(stage.index),
        outputs=staging.outputs(stage.index),
        kept_blocks=kept_blocks(choice, Layers.of([block.name for block in chain.blocks]), head),
        repeated=repeated,
        dropped=tuple(name for name in repeated if name not in kept),
        offloaded=_members(chain, choice, choice.offload),
    )


def kept_blocks(choice: StageChoice, layers: Layers, head: int) -> tuple[int, ...]:
    """Blocks of a recomputed stage that it keeps whole: those behind the layers that it recomputes, and the head."""
    if not choice.recompute:
        return ()
    first_kept = int(layers.kept_from(choice.start, choice.stop, choice.layers))
    return tuple(b for b in range(choice.start, choice.stop) if b >= first_kept or b == head)


def _members(chain: Chain, choice: StageChoice, modules: Sequence[str]) -> tuple[str, ...]:
    """The operators of some modules of a stage, without those of the head, which is never changed."""
    graph, head = chain.graph, head_block(chain)
    nodes = frozenset[int]().union(*(module_nodes(graph, name) for name in modules))
    kept = (node for b in range(choice.start, choice.stop) if b != head for node in chain.blocks[b].nodes)
    return tuple(graph.nodes[node].key for node in kept if node in nodes)


def _check_stages(chain: Chain, decision: Configuration) -> None:
    """Refuse stages that leave out, repeat or reorder blocks of the chain."""
    edges = [0, *(stage.stop for stage in decision.stages)]
    starts = [stage.start for stage in decision.stages]
    empty = any(stage.stop <= stage.start for stage in decision.stages)
    if starts != edges[:-1] or edges[-1] != len(chain.blocks) or empty:
        raise PlanError(
            f"stages {[(s.start, s.stop) for s in decision.stages]} do not cover {len(chain.blocks)} blocks in order",
            hint="each stage starts at the block where the one before stops",
        )


def _check_devices(cluster: Cluster, needed: int) -> None:
    if needed > cluster.device_count:
        raise PlanError(
            f"the decision takes {needed} devices of {cluster.device_count}",
            where=cluster.name,
            hint="use fewer copies, stages or replicas",
        )


def _duplicated(chain: Chain, decision: Configuration) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(operators, stages) of the parameter-free operators that stages compute for themselves.

    Operators needed by the same stages stand together; larger sets of stages come first, so that an operator never
    stands before one that it reads. Operators that no block reads (they only make outputs) go to the last stage.
    """
    owned = {node for at in range(len(chain.blocks)) for node in _block_nodes(chain, at)}
    stages: dict[int, set[int]] = {node: set() for node in range(len(chain.graph.nodes)) if node not in owned}
    for index, stage in enumerate(decision.stages):
        for block in chain.blocks[stage.start : stage.stop]:
            for node in block.side:
                if node in stages:
                    stages[node].add(index)
    groups: dict[tuple[int, ...], list[int]] = {}
    for node in sorted(stages):
        groups.setdefault(tuple(sorted(stages[node])) or (len(decision.stages) - 1,), []).append(node)
    ordered = sorted(groups.items(), key=lambda entry: (-len(entry[0]), entry[1][0]))
    return [(tuple(nodes), stage_set) for stage_set, nodes in ordered]


def _block_nodes(chain: Chain, at: int) -> tuple[int, ...]:
    """A block's operators in an order that can be executed: parameter-free ones that only it reads come first."""
    block, shared = chain.blocks[at], set(chain.duplicated)
    return (*(node for node in block.side if node not in shared), *block.nodes)


def staged(
    graph: Graph, chain: Chain, decision: Configuration, formats: Precision
) -> tuple[sections.Staging, tuple[Duplicated, ...]]:
    """The model's operators in the stages of a decision, and those that stages compute for themselves.

    Raises:
        PlanError: the stages do not cover the blocks of the chain in order.
    """
    _check_stages(chain, decision)
    duplicated = _duplicated(chain, decision)
    stage_of = {
        node: index
        for index, stage in enumerate(decision.stages)
        for at in range(stage.start, stage.stop)
        for node in _block_nodes(chain, at)
    }
    copies = {node: frozenset(stages) for nodes, stages in duplicated for node in nodes}
    entries = (Duplicated(tuple(graph.nodes[i].key for i in nodes), stages) for nodes, stages in duplicated)
    return sections.Staging(graph, stage_of, copies, formats), tuple(entries)


@per_graph
def block_table(chain: Chain) -> tuple[Block, ...]:
    """The blocks of a chain by the names of what is in them; the same at every micro-batch size."""
    return tuple(_block(chain, at, structure) for at, structure in enumerate(block_structures(chain)))


@per_graph
def _block_runs(chain: Chain) -> tuple[BlockRun, ...]:
    """The blocks of a chain, those that repeat written once."""
    return compress(block_table(chain))


def _block(chain: Chain, at: int, structure: str) -> Block:
    nodes = _block_nodes(chain, at)
    keys = tuple(chain.graph.nodes[node].key for node in nodes)
    return Block(chain.blocks[at].name, keys, sections.block_parameters(chain.graph, nodes), structure)

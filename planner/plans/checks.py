"""Check parts of a plan: its orders, its figures, and what its model says of it.

Orders are held against those of the schedule: they must be able to run, within the memory of every rank. Figures must
agree with each other and with the job. What the model says is worked out anew by the functions that write plans; of
shardings the splits and layouts of every block are judged, and what they make the ranks of a group exchange and hold is
compared. Seconds and bytes depend on the cluster: they are compared when the plan is evaluated anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner import schedules
from planner.costs.precision import precision
from planner.errors import PlanError, UsageError
from planner.graph import Graph, TensorKind, build_chain
from planner.hardware.types import neighbours
from planner.json_text import KeyPath, readable
from planner.memory import room_bytes
from planner.plans.assemble import block_table, in_model, staged
from planner.plans.claims import check_claims_alone
from planner.plans.figures import Alternative, StagePrediction, gap_to
from planner.plans.files import to_document
from planner.plans.findings import PLAN_AGAIN, RELATIVE, ROUNDED, Fault, Finding, differences, stage_in
from planner.plans.identity import other_model
from planner.plans.model import blocks_as_said
from planner.plans.rank_schedule import tied_groups
from planner.plans.readings import is_searched, leaders, malformed, requirements, schedule_of, unit_sizes, work_of
from planner.plans.rebuild import RebuiltSharding, alternative_configuration, rebuild, renamed, with_figures
from planner.plans.records import ScheduleSection, Stage
from planner.plans.sections import model_section
from planner.plans.shard_sections import group_collective, holdings, weight_origin
from planner.plans.shardings import ShardedBlock, correspondence
from planner.plans.types import MINORS, Plan, Requirement
from planner.plans.words import summary
from planner.schedules import Action, ActionKind, OrderError, Work
from planner.schedules.compiling import compile_orders
from planner.schedules.custom_orders import check_numbers
from planner.schedules.evictions import lent_bytes
from planner.schedules.held import own_bytes
from planner.sharding import BoundaryLayout, canonical_layout, collective_uses, evaluate, layout_text
from planner.sharding.problem import Choice
from planner.space.limits import forbidden_choices
from planner.space.workers import lay_workers
from planner.units import format_bytes, format_seconds, plural

_EXCHANGES = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC)
_WORKER = re.compile(r"worker ([0-9]+)")


def check_orders(plan: Plan, right: ScheduleSection) -> list[Finding]:
    """Findings about the schedule section; O(actions).

    Orders that are not the schedule's are compiled for a reason that says more: a cycle of waits, an action that lacks
    another.

    Args:
        plan: a plan whose stages are those of its configuration.
        right: the schedule laid out on ranks.
    """
    said, path = plan.schedule, ("schedule",)
    found = [
        d.finding(plan, Fault.ORDERS) for d in differences(replace(said, orders=()), replace(right, orders=()), path)
    ]
    lines, right_lines = _lines(said), _lines(right)
    for key in sorted(lines.keys() | right_lines.keys()):
        line, right_line = lines.get(key, ...), right_lines.get(key, ...)
        if line != right_line:
            rank, place = key[0], (*path, "orders", f"rank {key[0]}")
            own = (d.finding(plan, Fault.ORDERS) for d in differences(line, right_line, place))
            found += [replace(finding, rank=rank, stage=plan.stage_of(rank)) for finding in own]
    why = list(_stuck(plan)) if found or said.given == "orders" else []
    return [*found, *why] or check_held(plan)


def _lines(section: ScheduleSection) -> dict[tuple[int, int], dict[str, Any]]:
    """The line of actions of each rank and lane; a second one of the same lane stands behind all lanes."""
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for number, order in enumerate(section.orders):
        for rank, first in zip(order.ranks, order.first, strict=True):
            lane = order.lane if (rank, order.lane) not in lines else len(section.orders) + number
            lines[rank, lane] = {"first": first, "step": order.step, "actions": order.actions}
    return lines


def _stuck(plan: Plan) -> Iterator[Finding]:
    """A finding about why the orders of one copy cannot run; none if they can."""
    ranks, copies = leaders(plan)
    try:
        for message in malformed(plan):
            yield Finding(Fault.ORDERS, message)
            return
        shared = tied_groups(range(len(plan.stages)), plan.shared_parameters)
        work = work_of(plan, ranks, copies=copies)
        check_numbers(work)
        work = _with_shared_exchanges(work, shared)
        compile_orders(work)
    except OrderError as error:
        if error.lane >= len(work.lanes):
            yield Finding(Fault.ORDERS, error.problem.message, error.problem.hint)
            return
        rank, message = ranks[work.lane_workers[error.lane]], error.problem.message
        lane = work.lanes[error.lane]
        stage = lane[error.index].stage if error.index < len(lane) else plan.stage_of(rank)
        if "deadlock" in message:
            message = _WORKER.sub(lambda found: f"rank {ranks[int(found[1])]}", message)
        else:
            message = f"rank {rank}: {message}"
        yield Finding(Fault.ORDERS, message, error.problem.hint, stage, rank)
    except PlanError as error:
        yield Finding(Fault.ORDERS, error.problem.message, error.problem.hint or PLAN_AGAIN)


def _with_shared_exchanges(work: Work, group: Mapping[int, int]) -> Work:
    """The orders with one exchange for stages that sum gradients of the same parameters, under the lowest stage."""
    if all(stage == lowest for stage, lowest in group.items()):
        return work
    exchanged: set[tuple[int, Action]] = set()
    lanes: list[list[Action]] = []
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        lanes.append([])
        for action in lane:
            if action.kind in _EXCHANGES:
                action = action._replace(stage=group.get(action.stage, action.stage))
                if (worker, action) in exchanged:
                    continue
                exchanged.add((worker, action))
            lanes[-1].append(action)
    return replace(work, lanes=tuple(map(tuple, lanes)))


def check_held(plan: Plan) -> list[Finding]:
    """A finding for each rank of a copy that exceeds its device's memory, at the first action where it does.

    Memory is counted in the order of one lane, without a clock. What other ranks move to a rank counts all the time,
    since the orders do not say when it leaves. Of a rank with several lanes only resident state is counted. O(actions).
    """
    ranks, _ = leaders(plan)
    sizes = unit_sizes(plan)
    orders = {rank: plan.lanes(rank) for rank in ranks}
    lent = lent_bytes((lane for lanes in orders.values() for lane in lanes), sizes.kept)
    findings = []
    for rank, lanes in orders.items():
        terms = [plan.predictions.stages[stage] for stage in plan.stages_of(rank)]
        memory = [t.memory for t in terms]
        resting = sum(m.weights_bytes + m.gradients_bytes + m.optimizer_bytes for m in memory)
        resting += max(m.reserve_bytes for m in memory) + max(m.workspace_bytes for m in memory)
        resting += round(lent.get(rank, 0))
        capacity = min(t.capacity_bytes for t in terms)
        free_bytes = room_bytes(capacity) - resting
        at, held = -1 if free_bytes >= 0 else 0, 0.0
        if len(lanes) == 1 and free_bytes >= 0:
            held, at = own_bytes(lanes[0], sizes, free_bytes)
        if at >= 0:
            total, action = format_bytes(resting + held), lanes[0][at]
            message = f"rank {rank} holds {total} of {format_bytes(capacity)} when {action} runs"
            if rank in lent:
                message += f", {format_bytes(lent[rank])} of it evicted from other ranks"
            hint = "keep fewer micro-batches, recompute, or cut the model into more stages"
            findings.append(Finding(Fault.MEMORY, message, hint, action.stage, rank))
    return findings


_MAY_BE_NEGATIVE = (("options", "keep"), ("predictions", "bubble_fraction"), ("model", "rebatch"))


def check_figures(plan: Plan) -> list[Finding]:
    """Findings about figures that contradict each other or the job; O(size of the file).

    Args:
        plan: a plan without findings that keep its orders from running.
    """
    findings = [*_negative((), to_document(plan))]
    findings += [
        Finding(Fault.FIGURES, words)
        for words in (*_hardware(plan), *_given(plan), *_bounds(plan), *_alternatives(plan))
    ]
    findings += check_claims_alone(plan)
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        wrong = (*_device(plan, stage, terms), *_terms(stage, terms))
        findings += [Finding(Fault.FIGURES, words, stage=stage.index) for words in wrong]
    names = tuple(block.name for block in plan.block_table)
    try:
        schedule = schedule_of(plan)
        for name in plan.options.schedules if plan.schedule.given != "orders" else ():
            schedules.get(name)
        workers = lay_workers(plan.configuration, schedule)
        right = with_figures(plan, schedule.weight_buffers)
        broken_limits = forbidden_choices(plan.options, plan.configuration, names, workers) if is_searched(plan) else []
    except UsageError as error:
        return [*findings, Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    findings += [difference.finding(plan, Fault.FIGURES) for difference in differences(plan, right)]
    return [*findings, *(Finding(Fault.OPTIONS, limit.message, PLAN_AGAIN, limit.stage) for limit in broken_limits)]


def _negative(path: KeyPath, value: object) -> Iterator[Finding]:
    """Findings about negative numbers, where the schema allows none."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _negative((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _negative((*path, index), item)
    elif isinstance(value, (int, float)) and value < 0 and path[:2] not in _MAY_BE_NEGATIVE:
        yield Finding(Fault.FIGURES, f"{readable(path)} is {value}", stage=stage_in(path))


def _hardware(plan: Plan) -> Iterator[str]:
    """Device types cover ranks without gaps, and their number is what the levels of links connect."""
    hardware = plan.hardware
    starts = [run.first_rank for run in hardware.devices]
    ends = list(itertools.accumulate((run.count for run in hardware.devices), initial=0))
    if starts != ends[:-1]:
        yield f"device types begin at ranks {starts}, expected {ends[:-1]}"
    joined = math.prod(level.size for level in hardware.levels)
    for count, what in ((ends[-1], "listed"), (joined, "joined by the levels of links")):
        if count != hardware.device_count:
            yield f"{plural(count, 'device')} are {what}, the cluster has {hardware.device_count}"
    if plan.world_size > hardware.device_count:
        yield f"the world has {plan.world_size} ranks, the cluster {plural(hardware.device_count, 'device')}"
    placed = set(hardware.device_order)
    if placed and (len(placed) != len(hardware.device_order) or len(placed) != hardware.machine_devices):
        yield f"{len(placed)} different devices in the order of a machine of {hardware.machine_devices}"


def _given(plan: Plan) -> Iterator[str]:
    """Where the user gave the configuration, the options allow what it decides and nothing else."""
    if plan.schedule.given != "configuration":
        return
    options, decided = plan.options, plan.configuration
    for name, allowed, taken in (
        ("zero", options.zero, (decided.zero,)),
        ("whole_stages", options.whole_stages, decided.whole_stages),
        ("transfers", options.transfers, decided.transfers),
    ):
        if allowed != taken:
            yield f"options.{name} allows {allowed}, the configuration that was given has {taken}"


def _device(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[str]:
    """Capacity and reserve of a stage are those of its devices in the hardware section."""
    runs = [
        run
        for run in plan.hardware.devices
        if any(run.first_rank <= rank < run.first_rank + run.count for rank in stage.ranks)
    ]
    filled = 1 - plan.hardware.headroom
    peers = neighbours(stage.group_ranks, len(stage.replicas), len(plan.stages) > 1)
    for what, said, known in (
        ("capacity_bytes", terms.capacity_bytes, {math.floor(run.memory_bytes * filled) for run in runs}),
        ("memory.reserve_bytes", terms.memory.reserve_bytes,
         {run.reserve_bytes + peers * run.neighbour_bytes for run in runs}),
    ):  # fmt: skip
        if known and said not in known:
            devices = ", ".join(format_bytes(size) for size in sorted(known))
            yield f"{what} of stage {stage.index} is {format_bytes(said)}, its devices have {devices}"


def _terms(stage: Stage, terms: StagePrediction) -> Iterator[str]:
    """Parts of a stage's times do not exceed the total that they are part of."""
    parts = [
        ("recompute_s", terms.recompute_s, "backward_s", terms.backward_s),
        (
            "recompute_s + weight_grad_s",
            terms.recompute_s + (terms.weight_grad_s or 0.0),
            "backward_s",
            terms.backward_s,
        ),
        ("tied_sync_s", terms.tied_sync_s, "exposed_sync_s", terms.exposed_sync_s),
        ("exposed_sync_s", terms.exposed_sync_s, "sync_s + tied_sync_s", terms.sync_s + terms.tied_sync_s),
    ]
    for part, part_s, total_name, total_s in parts:
        if part_s > total_s * (1 + RELATIVE):
            yield f"stage {stage.index}: {part} is {format_seconds(part_s)}, {total_name} {format_seconds(total_s)}"


def _bounds(plan: Plan) -> Iterator[str]:
    """Bounds are in order, and a proof has no gap."""
    predictions = plan.predictions
    gap = gap_to(predictions.bound_s, predictions.reached_s)
    if predictions.bound_s > predictions.reached_s * (1 + RELATIVE):
        yield f"the bound {predictions.bound_s} s is above the iteration time {predictions.reached_s} s"
    tried_s, longest_s = predictions.tried_bound_s, predictions.reached_s * (1 + RELATIVE)
    if tried_s is not None and not predictions.bound_s <= tried_s <= longest_s:
        yield f"the bound of what was tried, {tried_s} s, does not lie between bound and iteration time"
    line_s = predictions.line_bound_s
    if line_s is not None and line_s < predictions.bound_s:
        yield f"the bound of one stage a worker, {line_s} s, is below that of all, {predictions.bound_s} s"
    if predictions.proven_optimal and gap > ROUNDED:
        yield f"the plan is called proven optimal at {format_seconds(gap * predictions.reached_s)} above its bound"


def _alternatives(plan: Plan) -> Iterator[str]:
    """Alternatives have the plan's global batch and match their summary, and none is faster than the bound."""
    for number, other in enumerate(plan.alternatives):
        for problem in _problems(plan, other):
            yield f"alternatives[{number}] ({other.label}): {problem}"


def _problems(plan: Plan, other: Alternative) -> Iterator[str]:
    """What is wrong with one alternative, a sentence each."""
    stages = len(other.starts)
    named = len(other.repeats) or stages, len(other.offload) or stages
    lengths = (len(other.replicas), len(other.ranks) or stages, len(other.layers) or stages, *named)
    if not stages or any(length != stages for length in lengths) or other.starts[0] != 0:
        counts = f"{lengths[0]} replicas, {lengths[1]} ranks and {lengths[2]} numbers of layers"
        yield f"{stages} starts, {counts} of stages that begin at block 0"
        return
    batch = other.copies * other.micro_batch * other.micro_batches
    if batch != plan.micro_batches.global_batch:
        yield f"its micro-batches are {plural(batch, 'sample')}, not {plan.micro_batches.global_batch}"
    if other.summary != summary(alternative_configuration(other, len(plan.block_table))):
        yield f"it is not {other.summary!r}"
    seconds = other.simulated_iteration_s
    if seconds is not None and not other.infeasible and seconds < plan.predictions.bound_s * (1 - RELATIVE):
        yield f"it takes {format_seconds(seconds)}, less than the bound for all plans"


_FOR_THIS_MODEL = "plan again for this model"
_SHARDED = ("layout", "rank_bytes", "received")
"""Fields of a boundary that shardings say."""


def check_graph(plan: Plan, graph: Graph, *, readable: bool = True) -> list[Finding]:
    """Findings about a plan and the model that it claims to be for, at the plan's micro-batch size.

    Args:
        plan: a plan whose numbers and names lead somewhere.
        graph: the model.
        readable: false if its shardings cannot be read, and are left out.

    O(nodes), and for shardings the judge's work on every block.
    """
    if (other := other_model(plan, graph)) is not None:
        return [other]
    if graph.batch and graph.batch != plan.micro_batches.size:
        message = f"the model is at batch {graph.batch}, the plan's micro-batch is {plan.micro_batches.size}"
        return [Finding(Fault.MODEL, message, "read the model at the plan's micro-batch size")]
    try:
        right = _in_model(plan, graph)
    except (PlanError, UsageError) as error:
        return [Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    blocks, right_blocks = ({block.name: block for block in table} for table in (plan.block_table, right.block_table))
    found = [
        *differences(plan, dataclasses.replace(right, blocks=plan.blocks)),
        *differences(blocks, right_blocks, ("blocks",)),
    ]
    findings = [difference.finding(plan, Fault.DIFFERS, _FOR_THIS_MODEL) for difference in found]
    if readable and plan.shardings and plan.block_table == right.block_table:
        findings += _shardings(plan, graph)
    return findings


def _in_model(plan: Plan, graph: Graph) -> Plan:
    """The plan with blocks, operators, tensors and requirements as the model has them.

    Raises:
        PlanError: the stages do not cover the model's blocks.
        UsageError: the precision is unknown.
    """
    chain, formats, decision = build_chain(graph), precision(plan.options.precision), plan.configuration
    staging, duplicated = staged(graph, chain, decision, formats)
    section = model_section(graph, formats).comparable(plan.model)
    said = {boundary.tensor: boundary for boundary in plan.boundaries}
    boundaries = (
        dataclasses.replace(b, **{name: getattr(said[b.tensor], name) for name in _SHARDED}) if b.tensor in said else b
        for b in staging.boundaries()
    )
    stages = [in_model(stage, staging, chain, decision) for stage in plan.stages]
    if plan.minor < MINORS[Requirement.MODULE_RECOMPUTE]:  # which operators are repeated is not said
        stages = [dataclasses.replace(stage, repeated=(), dropped=()) for stage in stages]
    right = dataclasses.replace(
        plan,
        model=dataclasses.replace(section, name=plan.model.name),
        stages=tuple(stages),
        boundaries=tuple(boundaries),
        duplicated=duplicated,
    )
    table, divided = blocks_as_said(block_table(chain), plan.block_table), bool(staging.divided_modules())
    needed = requirements(plan, divided=divided)
    has_mark = divided == (Requirement.MID_MODULE_CUT in plan.requires)
    right = dataclasses.replace(right, requires=plan.requires if has_mark else needed)
    right.__dict__["block_table"] = table
    return right


def _shardings(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Findings about splits and layouts that the model does not allow, and what does not follow from them."""
    try:
        for rebuilt in rebuild(plan, graph):
            found = [
                Finding(Fault.SHARDINGS, f"{rebuilt.sharding.name!r}, block {block}: {message}", tensor=name)
                for entry in rebuilt.sharding.blocks
                for block, name, message in _entry(plan, rebuilt, entry)
            ]
            yield from (*found, *_between(plan, rebuilt))
    except UsageError as error:
        yield Finding(Fault.SHARDINGS, error.problem.message, error.problem.hint)


def _entry(plan: Plan, rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[tuple[int, str, str]]:
    """(block, name, what is wrong) with the operators and tensors of an entry."""
    graph, decision = rebuilt.graph, rebuilt.decision(entry)
    for block, further_names in entry.members():
        names = correspondence(entry, plan.block_table, block, further_names)
        wrong = list(_named(plan, rebuilt, entry, block, names)) or list(_splits(rebuilt, entry, decision))
        if not wrong:
            own = {renamed(name, names): choice for name, choice in decision.items()}
            verdict = evaluate(rebuilt.part(entry, block, names), own, facts=rebuilt.facts)
            wrong = [(message.split(" ")[0], message) for message in verdict.violations]
        if wrong:
            yield from ((block, *each) for each in dict.fromkeys(wrong))
            return
    first, setting = entry.first[0], rebuilt.part(entry)
    verdict = evaluate(setting, decision, facts=rebuilt.facts)
    uses = collective_uses(setting, decision, verdict.communication)
    needed = {(c.of, c.reason, c.phase) for c in (group_collective(use, rebuilt.mesh, 1) for use in uses)}
    listed = {(c.of, c.reason, c.phase) for c in entry.collectives}
    for of, reason, phase in sorted(needed ^ listed):
        fault = "needed but not listed" if (of, reason, phase) in needed else "listed but not needed"
        if phase != "backward" or (of, reason, "forward") not in listed:  # what backward keeps is said by prices
            yield first, of, f"communication {phase} of {of!r} is {fault}"
    dealt = holdings(graph, rebuilt.mesh, [o.operator for o in entry.operators], entry.tensors)
    for difference in differences(entry.holdings, dealt, ("holdings",)):
        yield first, next((h.weight for h in {*dealt} ^ {*entry.holdings}), ""), str(difference)


def _named(
    plan: Plan, rebuilt: RebuiltSharding, entry: ShardedBlock, block: int, names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(name, what is wrong): an entry names its block's operators and their tensors, and where weights come from."""
    graph, side = rebuilt.graph, {key for group in plan.duplicated for key in group.nodes}
    listed = {names.get(o.operator, o.operator) for o in entry.operators}
    own = set(plan.block_table[block].nodes)
    for key in sorted((listed - side) ^ own):
        said = "is not an operator of the block" if key in listed else "has no split"
        yield key, f"operator {key!r} {said}"
    placed = {names.get(p.tensor, p.tensor): p for p in entry.tensors}
    for name in sorted(placed.keys() ^ set(rebuilt.tensors(entry, names))):
        yield name, f"tensor {name!r} {'is in none of its operators' if name in placed else 'has no layout'}"
    for name, place in placed.items():
        if name not in graph.tensors:
            continue
        weight, carries = graph.tensors[name].kind is TensorKind.PARAMETER, name in rebuilt.facts.carrying
        if bool(place.gradient) != (weight or carries) or bool(place.optimizer) is not weight:
            yield name, f"{name!r} lacks the layout of its gradient or optimizer state, or has one too many"
        parameters = tuple(names.get(p, p) for p in place.parameters)
        if (parameters, place.dims) != weight_origin(graph, name):
            yield name, f"{name!r} does not come from parameters {list(parameters)} in this way"


def _splits(rebuilt: RebuiltSharding, entry: ShardedBlock, decision: Mapping[str, Choice]) -> Iterator[tuple[str, str]]:
    """(operator, what is wrong) of the splits that the loop nests of their operators do not have."""
    for split in entry.operators:
        if f"op:{split.operator}" not in decision:
            cut, layouts = (
                " ".join(each or "-" for each in split.splits),
                f"{list(split.reads)} -> {list(split.writes)}",
            )
            share = f"with {split.share:g} of the work on a rank"
            yield split.operator, f"operator {split.operator!r} cannot be split as [{cut}] {layouts} {share}"


def _between(plan: Plan, rebuilt: RebuiltSharding) -> Iterator[Finding]:
    """Tensors between blocks lie as the sharding says, or where it leaves them free the same for all blocks.

    What duplicated operators make lies in each block as that block makes it.
    """
    graph, sharding = rebuilt.graph, rebuilt.sharding
    free, known = "free" in sharding.boundaries, dict[str, tuple[str, str]]()
    treatment = tuple(BoundaryLayout(each) for each in sharding.boundaries)
    side = {key for group in plan.duplicated for key in group.nodes}
    for stage in (stage for stage in plan.stages if stage.sharding == sharding.name):
        for block, entry, names in plan.sharded_blocks(stage.index):
            crossing = set(rebuilt.crossing(entry, names))
            places = {names[place.tensor]: place for place in entry.tensors}
            own = {names[o.operator] for o in entry.operators} & side
            made = {name for key in own for name in graph.nodes[graph.producer[key]].outputs}
            for name in (places.keys() & crossing) - made:
                said = places[name].value, places[name].gradient
                if not free:
                    sizes = rebuilt.mesh.sizes
                    right = layout_text(canonical_layout(graph.tensors[name], treatment, sizes, padded=sharding.padded))
                    known[name] = right, right if name in rebuilt.facts.carrying else ""
                if known.setdefault(name, said) != said:
                    lies, right = (
                        f"{value}, its gradient as {gradient or '-'}" for value, gradient in (said, known[name])
                    )
                    message = f"{name!r} lies as {lies} for block {block} of {sharding.name!r}, else as {right}"
                    hint = "a tensor between blocks lies in one place"
                    yield Finding(Fault.SHARDINGS, message, hint, stage.index, tensor=name)

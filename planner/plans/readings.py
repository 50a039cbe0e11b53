"""Read a plan back: the orders of its ranks as work to compile, its blocks as the parts of a decoder (the embedding,
numbered layers, logits and loss), and the capabilities that it needs of a backend.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import UsageError
from planner.graph.blocks import layer_of
from planner.plans.model import Block
from planner.plans.orders import WORD
from planner.plans.records import WORK_FIELDS, ScheduleSection
from planner.plans.shardings import ShardedBlock, Sharding
from planner.plans.types import Plan, Requirement
from planner.schedules import Action, ActionKind, Schedule, WeightPolicy, Work, custom_schedule, get
from planner.schedules.held import UnitSizes
from planner.sharding import AxisRole
from planner.space.evaluate import in_closed_form

_SEVERAL = re.compile(r"\.[1-9]|[-*\[]")
"""Matches a line with micro-batch numbers other than 0, for which its step matters."""


def malformed(plan: Plan) -> list[str]:
    """Contradictions in a plan's schedule section, apart from its actions, a sentence each."""
    section, stages = plan.schedule, len(plan.stages)
    problems = []
    if section.weight_policy not in set(WeightPolicy):
        problems.append(f"{section.weight_policy!r} is no weight policy; use {', '.join(WeightPolicy)}")
    if section.iterations < 1 or section.parts < 1:
        problems.append(f"orders of {section.iterations} iterations and {section.parts} parts of a micro-batch")
    for name in ("versions", "limits", "staleness", "averaged", "corrections"):
        values = getattr(section, name)
        if values and len(values) != stages:
            problems.append(f"{name} are given for {len(values)} stages, the plan has {stages}")
        if name in ("versions", "limits", "averaged") and any(value < 1 for value in values):
            problems.append(f"{name} are below 1: {list(values)}")
    lanes: dict[int, set[int]] = {}
    for order in section.orders:
        for rank in order.ranks:
            lanes.setdefault(rank, set()).add(order.lane)
    if section.streaming and not section.side_by_side:
        problems.append("streaming is said of ranks that do not run their lanes side by side")
    if section.causal and section.parts == 1:
        problems.append("parts of a micro-batch are said to be causal, but it has one")
    if section.side_by_side and any(len(lane_numbers) < 2 for lane_numbers in lanes.values()):
        problems.append("lanes are said to run side by side, but some rank has one")
    misnumbered = [rank for rank, lane_numbers in lanes.items() if lane_numbers != set(range(len(lane_numbers)))]
    if misnumbered:
        rank = misnumbered[0]
        problems.append(f"the lanes of rank {rank} are numbered {sorted(lanes[rank])}, not from 0 on")
    return problems


def work_of(plan: Plan, ranks: Sequence[int], times: int = 1, copies: int = 1) -> Work:
    """The orders of some ranks, each of which becomes a worker; O(actions).

    Args:
        plan: the plan.
        ranks: one rank of each replica of the stages to include.
        times: repetitions of the part that never drains.
        copies: number of copies that the ranks are one of; its micro-batches are numbered from 0 without gaps.

    Raises:
        PlanError: a line of actions cannot be read.
    """
    section = plan.schedule
    group_of = {rank: group[0] for stage in plan.stages for group in stage.replicas for rank in group}
    number = {group_of[rank]: worker for worker, rank in enumerate(ranks)}
    lanes, workers = [], []
    for worker, rank in enumerate(ranks):
        for lane in plan.lanes(rank, times):
            lanes.append(
                tuple(
                    a if copies == 1 and a.peer < 0 else _of_worker(a, copies, number.get(group_of.get(a.peer, -1), -1))
                    for a in lane
                )
            )
            workers.append(worker)
    return Work(
        tuple(lanes),
        workers=tuple(workers),
        shared=section.side_by_side,
        versions=section.versions,
        **{name: getattr(section, name) for name in WORK_FIELDS},
    )


def _of_worker(action: Action, copies: int, peer: int) -> Action:
    """The action with the micro-batch number inside its copy, and with a worker as its peer."""
    counted = action.kind in (ActionKind.SYNC, ActionKind.LAUNCH_SYNC, ActionKind.UPDATE)
    number = action.micro_batch if counted else action.micro_batch // copies
    return action._replace(micro_batch=number, peer=peer)


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule: by its name, or from the orders of one copy where they are the user's own.

    Raises:
        UsageError: no schedule has the name.
        PlanError: the orders cannot run.
    """
    if plan.schedule.given != "orders":
        return get(plan.schedule.name)
    ranks, copies = leaders(plan)
    return custom_schedule(work_of(plan, ranks, copies=copies), plan.schedule.name)


def is_searched(plan: Plan) -> bool:
    """True if shardplan's own search chose the plan, so that it has a bound for all plans of a space."""
    return plan.system is None and plan.schedule.given in ("", "orders")


def has_closed_form(plan: Plan) -> bool:
    """True if the plan's iteration time is the closed form of its stages' times, not the simulated time.

    False for a schedule that is not registered.
    """
    try:
        return plan.system is None and in_closed_form(plan.configuration, schedule_of(plan))
    except UsageError:
        return False


def leaders(plan: Plan) -> tuple[list[int], int]:
    """One rank of each replica of one copy, and the number of copies; of all copies, and 1, if copies differ.

    Replica j of a stage is of copy `j % copies`. O(ranks).
    """
    copies = plan.copies if plan.copies > 1 and _copies_alike(plan) else 1
    return sorted({group[0] for stage in plan.stages for group in stage.replicas[::copies]}), copies


def counterparts(plan: Plan, leading: Sequence[int], copies: int) -> list[tuple[tuple[int, ...], ...]]:
    """For each leader the groups of ranks that have its part in all copies (see `leaders`)."""
    groups = {
        stage.replicas[j][0]: stage.replicas[j : j + copies]
        for stage in plan.stages
        for j in range(0, len(stage.replicas), copies)
    }
    return [groups[rank] for rank in leading]


def _copies_alike(plan: Plan) -> bool:
    """True if copy c does what copy 0 does: the same lines of actions, for micro-batches that are c higher.

    Micro-batches must be dealt to copies in turn: steps are a multiple of the number of copies.
    """
    twins: dict[int, tuple[int, int]] = {}
    for stage in plan.stages:
        for j, group in enumerate(stage.replicas):
            copy = j % plan.copies
            for rank, first_rank in zip(group, stage.replicas[j - copy], strict=False):
                if twins.setdefault(rank, (first_rank, copy)) != (first_rank, copy):
                    return False
    lines: dict[tuple[int, int], tuple[str, int, int]] = {}
    for order in plan.schedule.orders:
        dealt = order.step % plan.copies == 0 or not _SEVERAL.search(order.actions)
        if len(order.first) != len(order.ranks) or not dealt:
            return False
        for rank, first in zip(order.ranks, order.first, strict=True):
            if rank not in twins or (rank, order.lane) in lines:
                return False
            lines[rank, order.lane] = order.actions, order.step, first
    of_first = {(twins[rank][0], lane) for rank, lane in lines}
    expected = (
        lines.get((twins[rank][0], lane)) == (actions, step, first - twins[rank][1])
        for (rank, lane), (actions, step, first) in lines.items()
    )
    return len(lines) == plan.copies * len(of_first) and all(expected)


WORDS: Mapping[str, Requirement | None] = {
    **dict.fromkeys(("F", "B", "S", "U")),
    **dict.fromkeys(("I", "W"), Requirement.SPLIT_BACKWARD),
    **dict.fromkeys(("SA", "RA", "SG", "RG"), Requirement.EXPLICIT_TRANSFERS),
    **dict.fromkeys(("E", "L", ">"), Requirement.EVICTIONS),
    "R": Requirement.EXPLICIT_RECOMPUTE,
    "G": Requirement.EARLY_EXCHANGE,
    "+": Requirement.PAIRED_ACTIONS,
    "/": Requirement.SUB_SEQUENCES,
    "@": Requirement.ASYNC_WEIGHTS,
}
"""Capability that each word of an order and each mark on a word needs; None where all backends have it."""

SCHEDULE_KEYS: Mapping[str, Requirement] = {
    "parts": Requirement.SUB_SEQUENCES,
    "side_by_side": Requirement.LANES,
    "streaming": Requirement.STREAMING,
    "limits": Requirement.IN_FLIGHT_LIMITS,
    "averaged": Requirement.PARTIAL_UPDATES,
    "clock_distance": Requirement.BOUNDED_STALENESS,
    "corrections": Requirement.CORRECTIONS,
    "optimizer": Requirement.CORRECTIONS,
}
"""Capability that keys of the schedule section need, if they differ from their default."""


def requirements(plan: Plan, *, divided: bool) -> tuple[Requirement, ...]:
    """Capabilities that a plan needs, in the order of `Requirement`; O(file).

    Args:
        plan: the plan; its `requires` is ignored.
        divided: true if a layer is divided between stages (only the model tells).
    """
    needed = {*_of_stages(plan), *_of_orders(plan), *_inside(plan)}
    if divided:
        needed.add(Requirement.MID_MODULE_CUT)
    return tuple(requirement for requirement in Requirement if requirement in needed)


def _of_stages(plan: Plan) -> Iterator[Requirement]:
    """Requirements of stages, the tensors between them, and their weights."""
    counts = [len(stage.replicas) for stage in plan.stages]
    sharded = {stage.zero for stage in plan.stages if len(stage.replicas) > 1}
    pairs = [(b.from_stage, to) for b in plan.boundaries for to in b.to_stages]
    repeated = [(stage.recompute, stage.repeats) for stage in plan.stages]
    needs = {
        Requirement.PIPELINE: len(plan.stages) > 1,
        Requirement.REPLICATED_STAGE: max(counts, default=0) > 1,
        Requirement.UNEQUAL_REPLICATION: len(set(counts)) > 1,
        Requirement.SKIP_EDGES: any(to != source + 1 for source, to in pairs),
        Requirement.MULTI_TENSOR_BOUNDARY: len(set(pairs)) < len(pairs),
        Requirement.DUPLICATED_NODES: any(len(entry.stages) > 1 for entry in plan.duplicated),
        Requirement.TIED_PARAMETERS: any(s.reduction == "sum" for s in plan.shared_parameters),
        Requirement.SEPARATED_WEIGHTS: bool(plan.model.separated),
        Requirement.SEPARATE_COPIES: any(s.reduction == "none" for s in plan.shared_parameters),
        Requirement.RECOMPUTE: any(recompute or repeats for recompute, repeats in repeated),
        Requirement.LAYER_RECOMPUTE: any(choice.layers for choice in plan.configuration.stages),
        Requirement.MODULE_RECOMPUTE: any(repeats for _, repeats in repeated),
        Requirement.MIXED_RECOMPUTE: len({choice.keeping for choice in plan.configuration.stages}) > 1,
        Requirement.ZERO1: 1 in sharded,
        Requirement.ZERO2: 2 in sharded,
        Requirement.ZERO3: 3 in sharded,
        Requirement.SHARDED_GROUPS: any(stage.shard_over for stage in plan.stages),
        Requirement.MULTI_STAGE_RANK: any(len(plan.stages_of(rank)) > 1 for s in plan.stages for rank in s.ranks),
        Requirement.IDLE_RANKS: bool(plan.idle_ranks),
        Requirement.OFFLOAD: any(stage.offload for stage in plan.stages),
        Requirement.EXCHANGE_SCHEME: plan.exchange is not None,
    }
    yield from (requirement for requirement, is_needed in needs.items() if is_needed)


def _of_orders(plan: Plan) -> Iterator[Requirement]:
    """Requirements of the schedule section and its orders."""
    section = plan.schedule
    if section.weight_policy != WeightPolicy.SYNC:
        yield Requirement.ASYNC_WEIGHTS
    if plan.routing == "by_order":
        yield Requirement.ORDER_ROUTING
    if any(order.lane for order in section.orders):
        yield Requirement.LANES
    for field in dataclasses.fields(section):
        if field.name in SCHEDULE_KEYS and getattr(section, field.name) != field.default:
            yield SCHEDULE_KEYS[field.name]
    yield from (needed for word in words_in(section) if (needed := WORDS.get(word)) is not None)


def words_in(section: ScheduleSection) -> frozenset[str]:
    """Kinds and marks of all words of a schedule's orders (`WORDS`)."""
    lines = {order.actions for order in section.orders}
    words = (word for line in lines for word in WORD.findall(line))
    return frozenset(
        text
        for paired, kind, *_, part, version, peer in words
        for text in (paired, kind, part and "/", version and "@", peer and ">")
        if text
    )


def _inside(plan: Plan) -> Iterator[Requirement]:
    """Requirements of groups of several ranks."""
    used = {stage.sharding for stage in plan.stages if stage.sharding}
    shardings = [s for s in plan.shardings if s.name in used]
    entries = [entry for sharding in shardings for entry in sharding.blocks]
    dealt = {holding.what for entry in entries for holding in entry.holdings}
    reasons = {collective.reason for entry in entries for collective in entry.collectives}
    layouts = {text for entry in entries for o in entry.operators for text in (*o.reads, *o.writes)}
    layouts |= {text for entry in entries for p in entry.tensors for text in (p.value, p.gradient, p.optimizer)}
    boundaries = {boundary for sharding in shardings for boundary in sharding.boundaries}
    axes = {axis.role for sharding in shardings for axis in sharding.axes}
    needs = {
        Requirement.TENSOR_PARALLEL: any(stage.group_ranks > 1 for stage in plan.stages),
        Requirement.SEQUENCE_PARALLEL: "sequence" in boundaries,
        Requirement.EXPERT_PARALLEL: "experts" in dealt,
        Requirement.VOCABULARY_PARALLEL: "rows" in dealt,
        Requirement.RING_ATTENTION: "ring" in reasons,
        Requirement.HALO_EXCHANGE: "halo" in reasons,
        Requirement.SHARED_STATISTICS: "statistics" in reasons,
        Requirement.INTERLEAVED_SPLIT: any("~" in text for text in layouts),
        Requirement.PADDED_SPLIT: any(s.padded for s in shardings),
        Requirement.MIXED_SHARDINGS: len({stage.sharding for stage in plan.stages}) > 1,
        Requirement.CONTEXT_PARALLEL: AxisRole.CONTEXT in axes,
        Requirement.BATCH_PARALLEL: "batch" in boundaries,
        Requirement.FREE_LAYOUTS: "free" in boundaries,
        Requirement.GATHERED_WEIGHTS: any(map(_gathers_weights, entries)),
    }
    yield from (requirement for requirement, is_needed in needs.items() if is_needed)


def _gathers_weights(entry: ShardedBlock) -> bool:
    """True if a pass gathers a weight that is cut on the ranks of a group."""
    weights = {place.tensor for place in entry.tensors if place.optimizer}
    return any(c.of in weights and c.phase != "step" and c.kind == "all_gather" for c in entry.collectives)


def dealt_axes(sharding: Sharding) -> frozenset[str]:
    """Mesh axes along which the experts of a mixture are dealt to ranks: expert, and also tensor parallel ones."""
    held = (holding for entry in sharding.blocks for holding in entry.holdings if holding.what == "experts")
    return frozenset(name for holding in held for name in holding.axes)


def expert_ranks(plan: Plan) -> int:
    """Ranks that hold different experts (EP), the most of any stage; they are data or tensor parallel ranks, too."""
    sizes = (
        math.prod(axis.size for axis in sharding.axes if axis.name in dealt_axes(sharding))
        for sharding in plan.shardings
    )
    return max(sizes, default=1)


def unit_sizes(plan: Plan) -> UnitSizes:
    """Bytes of a unit's activations by stage, as the plan predicts them; the same all the time where it does not say
    what stays between the halves of a backward."""
    said = plan.predictions.stages
    halves = [terms.halves_bytes or (terms.unit_bytes, terms.unit_bytes) for terms in said]
    return UnitSizes([terms.unit_bytes for terms in said], *zip(*halves, strict=True))


def base_name(block: Block) -> str:
    """A block's module without the number of its part, `model.layers.0` for `model.layers.0[1/2]`."""
    return block.name.partition("[")[0]


def layer_name(block: Block) -> str:
    """The numbered module that a block is part of, `model.layers.0`; the block's own name where there is none."""
    return layer_of(base_name(block))


def layers(plan: Plan) -> tuple[str, ...]:
    """The numbered modules, in order: `model.layers.0`, `model.layers.1`, ..."""
    names = dict.fromkeys(layer_name(block) for block in plan.block_table)
    return tuple(name for name in names if name[-1:].isdigit())


def block_items(plan: Plan) -> tuple[str, ...]:
    """For each block: `E` before the layers, `t` in a layer, `L` behind the layers."""
    return _items([layer_name(block) for block in plan.block_table])


def _items(layer_names: Sequence[str]) -> tuple[str, ...]:
    numbered = [at for at, name in enumerate(layer_names) if name[-1:].isdigit()]
    first, last = (numbered[0], numbered[-1]) if numbered else (len(layer_names), len(layer_names))
    return tuple("E" if at < first else "L" if at > last else "t" for at in range(len(layer_names)))


def item_starts(plan: Plan) -> frozenset[int]:
    """First blocks of the embedding, of each layer, and of logits and loss."""
    names = [
        layer_name(block) if item == "t" else item
        for item, block in zip(block_items(plan), plan.block_table, strict=True)
    ]
    return frozenset(at for at, name in enumerate(names) if at == 0 or names[at - 1] != name)


def kinds_of_layers(block_names: Sequence[str]) -> tuple[str, ...]:
    """Names of the numbered modules without their numbers: one in a decoder.

    The few behind the layers, at most half as many, are predictors of further tokens, and not among them.
    """
    names = dict.fromkeys(layer_of(name.partition("[")[0]) for name in block_names)
    kinds = [name.rstrip("0123456789") for name in names if name[-1:].isdigit()]
    counts = Counter(kinds)
    most = max(counts.values(), default=0)
    last = max((at for at, kind in enumerate(kinds) if 2 * counts[kind] > most), default=-1)
    return tuple(dict.fromkeys(kinds[: last + 1]))


def predictors(plan: Plan) -> tuple[str, ...]:
    """The numbered modules behind the layers that predict further tokens, in order."""
    kinds = kinds_of_layers(plan.block_names)
    return tuple(name for name in layers(plan) if name.rstrip("0123456789") not in kinds)


def is_decoder(block_names: Sequence[str]) -> bool:
    """Whether the model of some blocks is an embedding, layers of one kind, and a loss."""
    items = _items([layer_of(name.partition("[")[0]) for name in block_names])
    return len(kinds_of_layers(block_names)) == 1 and items[0] == "E" and items[-1] == "L"

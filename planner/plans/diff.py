"""List every value that differs between two plans by stage, block, tensor or option, never by position in a list.

Names whose numbers shifted, because a layer was inserted before them, appear with their new number. Blocks whose
shardings changed alike appear once. `planner.plans.comparison` sums the differences up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType

from planner.plans.files import left_out
from planner.plans.matching import BlockMatch
from planner.plans.model import OF_FILE
from planner.plans.model_changes import ModelView, model_changes
from planner.plans.shardings import ShardedBlock
from planner.plans.types import Plan
from planner.plans.validate import require_sound
from planner.plans.words import module_ranges
from planner.units import plural

Value = str | int | float | bool | None | tuple[str | int, ...]
Key = tuple[str, ...]

_NUMBERS_OF_STAGES = ("stage", "from_stage", "bottleneck")
"""Fields whose numbers are stage numbers: they have no relative difference."""


class Area(StrEnum):
    """Parts of a plan that can be compared or left out of a comparison."""

    MODEL = "model"
    HARDWARE = "hardware"
    OPTIONS = "options"
    BATCHES = "batches"
    STAGES = "stages"
    BLOCKS = "blocks"
    SHARDINGS = "shardings"
    BOUNDARIES = "boundaries"
    PARAMETERS = "parameters"
    SCHEDULE = "schedule"
    REQUIRES = "requires"
    PREDICTIONS = "predictions"
    ALTERNATIVES = "alternatives"
    COVERAGE = "coverage"
    NOTES = "notes"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        area: the part of the plan, of plans of models an `Area`.
        path: what it is about, from general to particular: ("stage 2", "replicas"), ("layers.7", "stage"); a name alone
            for a thing that only one plan has.
        old: value in the old plan; None when it is new.
        new: value in the new plan; None when it is gone.
        relative: (new - old) / |old| for numbers, else None.
    """

    area: str
    path: Key
    old: Value
    new: Value
    relative: float | None = None


def diff(old: Plan, new: Plan, *, tolerance: float = 0.0, ignore: Iterable[Area] = ()) -> list[Change]:
    """Changes from one plan to another, in the order of `Area`.

    Digest, provenance and the notation of blocks and actions in the file do not count.

    Args:
        old: the plan before.
        new: the plan after.
        tolerance: numbers in predictions, alternatives and coverage that differ by at most this fraction are equal.
        ignore: parts to leave out.

    Raises:
        PlanError: the parts of one of the plans contradict each other.

    O(operators + parameters + ranks).
    """
    require_sound(old)
    require_sound(new)
    skipped = set(ignore)
    changes: list[Change] = []
    model = model_changes(ModelView.of_plan(old), ModelView.of_plan(new))
    names = {**dict(_inner_names(old, new, model.match)), **model.renamed}
    for area in Area:
        if area not in skipped:
            close = tolerance if area in (Area.PREDICTIONS, Area.ALTERNATIVES, Area.COVERAGE) else 0.0
            if area is Area.SHARDINGS:
                before, after = sharding_facts(old, new, names)
            else:
                before, after = (dict(_FACTS[area](plan)) for plan in (old, new))
                before = dict(_with_names(before, names, model.modules))
            if area is Area.STAGES:
                before |= _stage_modules(old, names)
            changes += changed_values(area, before, after, close)
    return changes


def _stage_modules(plan: Plan, names: Mapping[str, str]) -> Iterator[tuple[Key, Value]]:
    """The modules of the stages under new names of their blocks, where they are those of the blocks."""
    for stage in plan.stages:
        blocks = [block.name for block in plan.stage_blocks(stage.index)]
        if stage.modules == module_ranges(blocks):
            yield (f"stage {stage.index}", "modules"), module_ranges([names.get(name, name) for name in blocks])


def _inner_names(old: Plan, new: Plan, match: BlockMatch) -> Iterator[tuple[str, str]]:
    """Old and new names of tensors that only shardings name, by their places in the entries of blocks of one content.

    Raises:
        PlanError: an entry's names do not fit the plan's blocks.
    """
    before, after = (
        {block: (entry, names) for stage in plan.stages for block, entry, names in plan.sharded_blocks(stage.index)}
        for plan in (old, new)
    )
    for i, j in match.pairs:
        if i in before and j in after:
            (old_entry, old_names), (new_entry, new_names) = before[i], after[j]
            if len(old_entry.tensors) == len(new_entry.tensors):
                for a, b in zip(old_entry.tensors, new_entry.tensors, strict=True):
                    if old_names[a.tensor] != new_names[b.tensor]:
                        yield old_names[a.tensor], new_names[b.tensor]


def _with_names(
    facts: Mapping[Key, Value], names: Mapping[str, str], modules: Mapping[str, str]
) -> Iterator[tuple[Key, Value]]:
    """The old plan's facts under the names that blocks, operators, weights and modules have in the new one."""
    for key, value in facts.items():
        new_value = value
        if isinstance(value, tuple):
            new_value = tuple(names.get(part, part) if isinstance(part, str) else part for part in value)
        elif isinstance(value, str) and key[-1] == "module":
            new_value = modules.get(value, value)
        elif type(value) is str:
            new_value = names.get(value) or _WORD.sub(lambda match: names.get(match[0], match[0]), value)
        yield tuple(_renamed_part(part, names) for part in key), new_value


_WORD = re.compile(r"[^\s,;()'\"]*[^\s,;()'\".:]")
"""A name in a text: without spaces, and without the punctuation of the sentence at its end."""


def _renamed_part(part: str, names: Mapping[str, str]) -> str:
    """A part of a key, which is a name or ends in one: `weight`, `input ids`, `exchange of weight`."""
    words, space, name = part.rpartition(" ")
    return names.get(part) or f"{words}{space}{names.get(name, name)}"


def changed_values(
    area: str, old: Mapping[Key, Value], new: Mapping[Key, Value], tolerance: float = 0.0
) -> Iterator[Change]:
    """The values that differ, by key; an object (first part of the key) that only one side has is one change.

    Args:
        area: the part of the plan that they are of.
        old: values of the old plan, by key from general to particular.
        new: those of the new plan.
        tolerance: relative difference of two numbers that counts as none.
    """
    heads_old, heads_new = {key[0] for key in old}, {key[0] for key in new}
    reported: set[str] = set()
    for key in dict.fromkeys((*old, *new)):
        head = key[0]
        if len(key) > 1 and (head not in heads_old or head not in heads_new):
            if head not in reported:
                reported.add(head)
                yield Change(area, (head,), _facts_of(old, head), _facts_of(new, head))
            continue
        a, b = old.get(key), new.get(key)
        if a == b and type(a) is type(b):
            continue
        relative = None if key[-1] in _NUMBERS_OF_STAGES else _relative(a, b)
        if relative is None or abs(relative) > tolerance:
            yield Change(area, key, a, b, relative)


def _facts_of(facts: Mapping[Key, Value], head: str) -> Value:
    """All facts about an object that one plan has, in a tuple of texts; None where it has none."""
    facts_of_head = {key[1:]: value for key, value in facts.items() if key[0] == head}
    texts = {key: value if isinstance(value, tuple) else (value,) for key, value in facts_of_head.items()}
    return tuple(f"{' '.join(key)}: {' '.join(map(str, parts))}" for key, parts in texts.items()) or None


def _relative(old: Value, new: Value) -> float | None:
    """(new - old) / |old| of two numbers; None for anything else and from zero."""
    if isinstance(old, bool) or isinstance(new, bool):
        return None
    if not isinstance(old, (int, float)) or not isinstance(new, (int, float)):
        return None
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old and math.isfinite(old) else None


def _fields(value: object, *head: str, leave: tuple[str, ...] = ()) -> Iterator[tuple[Key, Value]]:
    """The fields of a dataclass that are written to the file, without those of `leave`."""
    for field in fields(value):  # type: ignore[arg-type]
        if field.name not in leave and not left_out(value, field):
            yield (*head, field.name), getattr(value, field.name)


def _model(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from _fields(plan.model, leave=("inputs", "outputs", *OF_FILE))
    for what, tensors in (("input", plan.model.inputs), ("output", plan.model.outputs)):
        for tensor in tensors:
            yield (f"{what} {tensor.name}", "shape"), tensor.shape
            yield (f"{what} {tensor.name}", "dtype"), tensor.dtype


def _hardware(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from _fields(plan.hardware, leave=("devices", "levels"))
    for run in plan.hardware.devices:
        yield from _fields(run, f"devices from rank {run.first_rank}", leave=("first_rank",))
    for level in plan.hardware.levels:
        yield from _fields(level, f"level {level.name}", leave=("name",))


def _batches(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from _fields(plan.micro_batches)
    yield ("copies",), plan.copies
    yield ("world_size",), plan.world_size


def _coverage(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from _fields(plan.coverage, leave=("fallback_ops",))
    yield from ((("fallback", op), count) for op, count in plan.coverage.fallback_ops.items())


def _notes(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from (((n.code, n.where or n.message), n.message) for n in plan.notes)
    yield from ((("not modelled", text), True) for text in plan.not_modelled)


def _stages(plan: Plan) -> Iterator[tuple[Key, Value]]:
    for stage in plan.stages:
        head = f"stage {stage.index}"
        yield (head, "modules"), stage.modules
        yield from _fields(stage, head, leave=("index", "blocks", "modules", "replicas", "sharding"))
        yield (head, "replicas"), len(stage.replicas)
        yield from (((head, what), value) for what, value in mesh_facts(plan, stage.index))
        yield (head, "ranks"), stage.ranks


def _blocks(plan: Plan) -> Iterator[tuple[Key, Value]]:
    """Which stage holds each block, which operators a block has, and which stages compute duplicated operators."""
    for stage in plan.stages:
        for block in plan.stage_blocks(stage.index):
            yield (block.name, "stage"), stage.index
            yield (block.name, "operators"), block.nodes
    for entry in plan.duplicated:
        for node in entry.nodes:
            yield (f"duplicated {node}", "stages"), entry.stages


def _boundaries(plan: Plan) -> Iterator[tuple[Key, Value]]:
    for boundary in plan.boundaries:
        yield from _fields(boundary, boundary.tensor, leave=("tensor",))


def _parameters(plan: Plan) -> Iterator[tuple[Key, Value]]:
    for stage in plan.stages:
        for parameter in plan.stage_parameters(stage.index):
            yield from _fields(parameter, parameter.label or parameter.name, leave=("name", "label"))
    for shared in plan.shared_parameters:
        yield from _fields(shared, f"shared {shared.parameter}", leave=("parameter",))


def _schedule(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield ("name",), plan.schedule.name
    yield ("weight_policy",), plan.schedule.weight_policy
    for name in ("iterations", "parts", "versions", "limits", "staleness", "averaged", "clock_distance", "transfers"):
        yield (name,), getattr(plan.schedule, name)
    for stage, correction in enumerate(plan.schedule.corrections):
        yield from _fields(correction, f"stage {stage}", "correction")
    if plan.schedule.optimizer is not None:
        yield from _fields(plan.schedule.optimizer, "optimizer")
    if plan.system is not None:
        yield ("system", "name"), plan.system.name
        for topic, told in sorted(plan.system.tells.items()):
            yield ("system", topic), told
    if plan.exchange is not None:
        yield ("exchange", "scheme"), plan.exchange.scheme
        for alike in plan.exchange.tensors:
            for tensor in alike.tensors:
                yield (f"exchange of {tensor}", "method"), alike.method
                yield (f"exchange of {tensor}", "shares"), tuple(f"{share:g}" for share in alike.shares)
    for order in plan.schedule.orders:
        for rank, first in zip(order.ranks, order.first, strict=False):
            yield (f"rank {rank}", "actions"), f"{order.actions} (micro-batch {first} + {order.step} k)"


def _predictions(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from _fields(plan.predictions, leave=("stages", "bubble_convention", "measured_error"))
    if plan.headline is not None and plan.headline.dollars_per_hour:
        yield ("dollars_per_hour",), plan.headline.dollars_per_hour
    for index, terms in enumerate(plan.predictions.stages):
        head = f"stage {index}"
        yield from _fields(terms, head, leave=("memory", "collectives"))
        yield from (((head, f"{kind}_bytes"), size) for kind, size in terms.memory.by_kind().items())
        seen: dict[str, int] = {}
        for collective in terms.collectives:
            name = f"{collective.kind} of {collective.of}"
            seen[name] = seen.get(name, 0) + 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            yield from _fields(collective, head, name, leave=("kind", "of"))


def _alternatives(plan: Plan) -> Iterator[tuple[Key, Value]]:
    seen: dict[str, int] = {}
    for other in plan.alternatives:
        seen[other.label] = seen.get(other.label, 0) + 1
        head = other.label if seen[other.label] == 1 else f"{other.label} ({seen[other.label]})"
        yield (head, "summary"), other.summary
        yield (head, "iteration_s"), other.iteration_s
        yield (head, "memory_bytes"), other.memory_bytes
        yield (head, "infeasible"), other.infeasible


EntriesByBlock = Mapping[str, tuple[int, ShardedBlock, Mapping[str, str]]]
"""By block name: number of the sharding entry, the entry, and the block's own names by the entry's names."""


def sharding_facts(
    old: Plan, new: Plan, names: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[Key, Value], dict[Key, Value]]:
    """Splits and layouts of both plans, given once for blocks that share an entry in each of the plans.

    Args:
        old: the plan before, told under the new names of what it names.
        new: the plan after.
        names: new name by old name of what is the same in both models.

    Raises:
        PlanError: an entry's names do not fit the plan's blocks.

    O(names of all blocks).
    """
    if not (old.shardings or new.shardings):
        return {}, {}
    before, after = _entries(old, names), _entries(new, {})
    groups: dict[tuple[int, int], list[str]] = {}
    for name in sorted(before.keys() | after.keys(), key=_natural):
        pair = tuple(known[name][0] if name in known else -1 for known in (before, after))
        groups.setdefault((pair[0], pair[1]), []).append(name)
    facts: tuple[dict[Key, Value], dict[Key, Value]] = {}, {}
    for blocks in groups.values():
        more = len(blocks) - 1
        head = f"{blocks[0]} and {plural(more, 'block')} like it" if more else blocks[0]
        for found, known in zip(facts, (before, after), strict=True):
            if blocks[0] in known:
                found.update(_entry_facts(head, known[blocks[0]][1], known[blocks[0]][2]))
    return facts


def mesh_facts(plan: Plan, stage: int) -> Iterator[tuple[str, Value]]:
    """Ranks of a stage's replicas, their mesh, and how tensors between blocks lie on it."""
    sharding = plan.sharding_of(stage)
    yield "width", plan.stages[stage].group_ranks
    yield "mesh", sharding.mesh if sharding else ""
    yield "tensors between blocks", "/".join(sharding.boundaries) if sharding else ""
    yield "uneven cuts", sharding.padded if sharding else False


def _entries(plan: Plan, new_names: Mapping[str, str]) -> EntriesByBlock:
    entries: dict[str, tuple[int, ShardedBlock, Mapping[str, str]]] = {}
    numbers: dict[int, int] = {}
    for stage in plan.stages:
        for block, entry, names in plan.sharded_blocks(stage.index):
            number = numbers.setdefault(id(entry), len(numbers))
            name = plan.block_table[block].name
            renamed = {key: new_names.get(value, value) for key, value in names.items()} if new_names else names
            entries[new_names.get(name, name)] = number, entry, renamed
    return entries


def _entry_facts(head: str, entry: ShardedBlock, names: Mapping[str, str]) -> Iterator[tuple[Key, Value]]:
    for o in entry.operators:
        layouts = f"{' '.join(each or 'R' for each in o.reads)} -> {' '.join(each or 'R' for each in o.writes)}"
        yield (head, names[o.operator], "split"), f"{' '.join(each or '-' for each in o.splits)}: {layouts}"
    for p in entry.tensors:
        yield (head, names[p.tensor], "layout"), "/".join(filter(None, (p.value, p.gradient, p.optimizer)))
    for h in entry.holdings:
        yield (head, names[h.weight], f"{h.what} of a rank"), h.each
    sums: dict[str, float] = {}
    for c in entry.collectives:
        kind = f"{c.kind.replace('_', '-')} {c.phase} along {', '.join(c.axes)} on {c.level}"
        sums[kind] = sums.get(kind, 0.0) + c.sent_bytes
    yield from (((head, kind, "sent_bytes"), size) for kind, size in sums.items())
    yield (head, "parameters"), round(entry.figures.parameters)
    yield (head, "saved_bytes"), round(entry.figures.saved_bytes)


def _natural(name: str) -> list[tuple[str, int]]:
    """Sort key that puts `layers.2` before `layers.10`."""
    return [("", int(p)) if p.isdigit() else (p, -1) for p in re.split(r"([0-9]+)", name)]


def _required(plan: Plan) -> Iterator[tuple[Key, Value]]:
    yield from (((str(flag),), True) for flag in plan.requires)
    yield from ((("runs on", name), True) for name in plan.runs_on)


_FACTS: Mapping[Area, Callable[[Plan], Iterator[tuple[Key, Value]]]] = {
    Area.MODEL: _model,
    Area.HARDWARE: _hardware,
    Area.OPTIONS: lambda plan: _fields(plan.options),
    Area.BATCHES: _batches,
    Area.STAGES: _stages,
    Area.BLOCKS: _blocks,
    Area.BOUNDARIES: _boundaries,
    Area.PARAMETERS: _parameters,
    Area.SCHEDULE: _schedule,
    Area.REQUIRES: _required,
    Area.PREDICTIONS: _predictions,
    Area.ALTERNATIVES: _alternatives,
    Area.COVERAGE: _coverage,
    Area.NOTES: _notes,
}
"""By area, the function that lists a plan's values by key; shardings are compared by `sharding_facts`."""

"""What two plans say of groups of ranks, block by block; blocks that changed alike are told once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.plans.shardings import ShardedBlock
from planner.plans.types import Plan
from planner.units import plural

Value = str | int | float | bool | None | tuple[str | int, ...]
Key = tuple[str, ...]
Known = Mapping[str, tuple[int, ShardedBlock, Mapping[str, str]]]
"""By name of a block, number of its entry, the entry, and from the names in there to the block's own."""


def sharding_facts(old: Plan, new: Plan) -> tuple[dict[Key, Value], dict[Key, Value]]:
    """How both plans split operators and lay tensors, of one block for all that are alike in each of the plans.

    Raises:
        PlanError: an entry's names do not fit the plan's blocks.

    O(names of all blocks).
    """
    if not (old.shardings or new.shardings):
        return {}, {}
    before, after = _known(old), _known(new)
    groups: dict[tuple[int, int], list[str]] = {}
    for name in sorted(before.keys() | after.keys(), key=_natural):
        pair = tuple(known[name][0] if name in known else -1 for known in (before, after))
        groups.setdefault((pair[0], pair[1]), []).append(name)
    facts: tuple[dict[Key, Value], dict[Key, Value]] = {}, {}
    for names in groups.values():
        more = len(names) - 1
        head = f"{names[0]} and {plural(more, 'block')} like it" if more else names[0]
        for found, known in zip(facts, (before, after), strict=True):
            if names[0] in known:
                found.update(_facts(head, known[names[0]][1], known[names[0]][2]))
    return facts


def mesh_facts(plan: Plan, stage: int) -> Iterator[tuple[str, Value]]:
    """Ranks of a stage's replicas, their mesh, and how tensors between blocks lie on it."""
    sharding = plan.sharding_of(stage)
    yield "width", plan.stages[stage].group_ranks
    yield "mesh", " x ".join(f"{axis.name} {axis.size}" for axis in sharding.axes) if sharding else ""
    yield "tensors between blocks", "/".join(sharding.boundaries) if sharding else ""
    yield "uneven cuts", sharding.padded if sharding else False


def _known(plan: Plan) -> Known:
    found: dict[str, tuple[int, ShardedBlock, Mapping[str, str]]] = {}
    numbers: dict[int, int] = {}
    for stage in plan.stages:
        for block in range(*stage.blocks) if stage.sharding else ():
            entry = plan.sharded_block(stage.index, block)
            if entry is not None:
                number = numbers.setdefault(id(entry[0]), len(numbers))
                found[plan.block_table[block].name] = number, *entry
    return found


def _facts(head: str, entry: ShardedBlock, names: Mapping[str, str]) -> Iterator[tuple[Key, Value]]:
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


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """A piece of a name: text, or a number by its value."""

    text: str
    number: int


def _natural(name: str) -> list[_Piece]:
    """Order of names in which `layers.2` stands before `layers.10`."""
    return [_Piece("", int(p)) if p.isdigit() else _Piece(p, -1) for p in re.split(r"([0-9]+)", name)]

"""Match blocks and stages of two plans by structure, so that an inserted layer shows as one insertion.

Blocks are aligned in order by names without numbers and by the shapes of their weights: the numbers of all blocks
behind an insertion shift, but these blocks still match.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from planner.plans.model import Block, outline
from planner.plans.types import Plan
from planner.plans.words import PART
from planner.sums import float_sum
from planner.units import plural

_NUMBERED = re.compile(r".*[0-9]$")

Ranges = tuple[range, range]
"""Positions in the old and in the new sequence."""


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """The matched blocks of two plans.

    Attributes:
        pairs: blocks of the same structure, by number in the old and in the new plan, ascending.
        changed: blocks of the same name with another structure.
        removed: numbers of the blocks that only the old plan has.
        added: numbers of the blocks that only the new plan has.
    """

    pairs: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, int], ...] = ()
    removed: tuple[int, ...] = ()
    added: tuple[int, ...] = ()

    def new_of(self) -> dict[int, int]:
        """Number in the new plan by number in the old one, of all blocks that both have."""
        return dict((*self.pairs, *self.changed))


def structure(block: Block) -> Hashable:
    """Key that is equal for blocks alike: names of operators without numbers; names, shapes and types of weights."""
    weights = tuple((outline(p.name), p.shape, p.dtype, p.trainable, bool(p.tied_to)) for p in block.parameters)
    return outline(block.name), tuple(map(outline, block.nodes)), weights


def shape(block: Block) -> Hashable:
    """Like `structure` without names, for models whose names all changed."""
    return len(block.nodes), tuple((p.shape, p.dtype, p.trainable) for p in block.parameters)


def match_blocks(old: Sequence[Block], new: Sequence[Block]) -> BlockMatch:
    """Match the blocks of two models; O(blocks^2) at the worst, O(blocks) where most of them are alike."""
    pairs: list[tuple[int, int]] = []
    removed: list[int] = []
    added: list[int] = []
    for gap in _aligned([structure(b) for b in old], [structure(b) for b in new], pairs):
        inner: list[tuple[int, int]] = []
        before, after = ([shape(blocks[i]) for i in at] for blocks, at in zip((old, new), gap, strict=True))
        for left, right in _aligned(before, after, inner) if _renamed(old, new, gap) else [_full_ranges(before, after)]:
            removed += [gap[0][i] for i in left]
            added += [gap[1][i] for i in right]
        pairs += [(gap[0][i], gap[1][j]) for i, j in inner]
    names = {new[j].name: j for j in added}
    changed = tuple((i, names[old[i].name]) for i in removed if old[i].name in names)
    changed_old, changed_new = {i for i, _ in changed}, {j for _, j in changed}
    return BlockMatch(
        tuple(sorted(pairs)),
        changed,
        tuple(i for i in removed if i not in changed_old),
        tuple(j for j in added if j not in changed_new),
    )


def _renamed(old: Sequence[Block], new: Sequence[Block], gap: Ranges) -> bool:
    """True if the two sides of a gap share no block name: then blocks of equal shape may have been renamed."""
    return not {old[i].name for i in gap[0]} & {new[j].name for j in gap[1]}


def _full_ranges(before: Sequence[Hashable], after: Sequence[Hashable]) -> Ranges:
    return range(len(before)), range(len(after))


def _aligned(old: Sequence[Hashable], new: Sequence[Hashable], pairs: list[tuple[int, int]]) -> Iterator[Ranges]:
    """Append the pairs of equal items to `pairs`, and yield the gaps between them."""
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs.extend(zip(range(a, b), range(c, d), strict=True))
        else:
            yield range(a, b), range(c, d)


def renamed(old: Plan, new: Plan, match: BlockMatch) -> Mapping[str, str]:
    """New name by old name of all blocks, operators and weights whose numbers shifted."""
    new_names: dict[str, str] = {}
    for i, j in match.pairs:
        before, after = old.block_table[i], new.block_table[j]
        new_names[before.name] = after.name
        new_names |= zip(before.nodes, after.nodes, strict=False)
        for a, b in zip(before.parameters, after.parameters, strict=False):
            new_names |= {a.name: b.name, a.label: b.label}
    return {a: b for a, b in new_names.items() if a != b and a}


def decision_words(plan: Plan, index: int) -> dict[str, str]:
    """A stage's decisions beside its blocks and those that recomputation keeps, by display name."""
    stage, sharding = plan.stages[index], plan.sharding_of(index)
    layers = plan.configuration.stages[index].layers
    all_layers = plural(layers, "layer") if layers else "all layers"
    return {
        "DP": str(len(stage.replicas)),
        "ranks": str(stage.group_ranks),
        "mesh": sharding.mesh if sharding else "none",
        "layout between blocks": "/".join(sharding.boundaries) if sharding else "whole",
        "recompute": all_layers if stage.recompute else "+".join(stage.repeats) or "nothing",
        "offload": "+".join(stage.offload) or "nothing",
        "ZeRO": str(stage.zero),
    }


def _decided(plan: Plan, index: int, structures: Iterable[Hashable]) -> Hashable:
    """A stage's decisions without numbers that shift: stages with equal decisions run the same blocks in the same way.

    Args:
        plan: the plan.
        index: the stage.
        structures: of its blocks.
    """
    stage = plan.stages[index]
    kept = tuple(block - stage.blocks[0] for block in stage.kept_blocks) if stage.recompute else ()
    return tuple(structures), kept, tuple(decision_words(plan, index).items())


def match_stages(old: Plan, new: Plan, match: BlockMatch) -> tuple[int, list[Ranges]]:
    """Number of unchanged stages, and the ranges of stages between them that changed.

    A block that changed but kept its place does not make its stage a changed one.
    """
    new_structure = {structure(old.block_table[i]): structure(new.block_table[j]) for i, j in match.new_of().items()}
    structures = [[structure(block) for block in old.stage_blocks(stage.index)] for stage in old.stages]
    before = [_decided(old, i, (new_structure.get(each, each) for each in own)) for i, own in enumerate(structures)]
    after = [_decided(new, stage.index, map(structure, new.stage_blocks(stage.index))) for stage in new.stages]
    if len(before) == len(after):  # stages keep their numbers
        differ = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return len(before) - len(differ), [(range(i, i + 1), range(i, i + 1)) for i in differ]
    pairs: list[tuple[int, int]] = []
    gaps = list(_aligned(before, after, pairs))
    return len(pairs), gaps


def layers_of(blocks: Sequence[Block]) -> float:
    """Number of numbered modules (layers) in some blocks; part 1 of 2 of a layer counts 0.5."""
    parts = ((PART.match(block.name), block.name) for block in blocks)
    return float_sum(
        1 / int(part[3]) if part else 1.0 for part, name in parts if _NUMBERED.match(part[1] if part else name)
    )

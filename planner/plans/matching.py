"""Match blocks and stages of two plans by structure, so that an inserted layer shows as one insertion.

Blocks are aligned in order by what they compute and hold; names decide between blocks of one content. The numbers of
all blocks behind an insertion shift, and a module may have been renamed, but these blocks still match.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from planner.plans.model import Block, numbers, outline
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
        pairs: blocks of the same content, by number in the old and in the new plan, ascending; their names may differ.
        changed: blocks of the same name or the same weights with another content.
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
    """Key that is equal for blocks alike: names without numbers, weights, and what the operators compute."""
    names = outline(block.name), *(map(outline, block.nodes)), *(outline(p.name) for p in block.parameters)
    return names, content(block)


def weights(block: Block) -> Hashable:
    """Number of operators, and shapes and types of weights: what any two versions of a plan file say of a block."""
    return len(block.nodes), tuple((p.shape, p.dtype, p.trainable, bool(p.tied_to)) for p in block.parameters)


def content(block: Block) -> Hashable:
    """What a block computes and holds, without names; in files of before names of operators stand for the former."""
    return weights(block), block.structure or tuple(map(outline, block.nodes))


def match_blocks(old: Sequence[Block], new: Sequence[Block]) -> BlockMatch:
    """Match the blocks of two models; O(blocks^2) at the worst, O(blocks) where most of them are alike.

    Blocks of one name and content go first. Between these, blocks of one content are the same under another name, and
    blocks of equal weights or of one name are the same with other operators. If blocks are left on one side, all are
    matched again under the names that most blocks of their kind have in the new model: an additional layer of an
    encoder that was renamed does not shift the decoder behind it.
    """
    if any(block.structure for block in old) is not any(block.structure for block in new):
        old, new = ([replace(block, structure="") for block in blocks] for blocks in (old, new))
    match = _matched(old, new, {})
    names = _usual_names(old, new, match)
    return _matched(old, new, names) if names and (match.removed or match.added) else match


def _usual_names(old: Sequence[Block], new: Sequence[Block], match: BlockMatch) -> dict[str, str]:
    """By outline of old block names that changed, the outline that most of their matches have."""
    votes: dict[str, Counter[str]] = {}
    for i, j in (*match.pairs, *match.changed):
        votes.setdefault(outline(old[i].name), Counter())[outline(new[j].name)] += 1
    usual = {before: counts.most_common(1)[0][0] for before, counts in votes.items()}
    return {before: after for before, after in usual.items() if before != after}


def _matched(old: Sequence[Block], new: Sequence[Block], names: Mapping[str, str]) -> BlockMatch:
    """The blocks matched under new names by the outlines of old ones."""
    kinds: dict[Hashable, int] = {}
    called = [names.get(outline(block.name), outline(block.name)) for block in old], [outline(b.name) for b in new]
    contents, held = (
        tuple([kinds.setdefault(key(block), len(kinds)) for block in blocks] for blocks in (old, new))
        for key in (content, weights)
    )
    pairs: list[tuple[int, int]] = []
    changed: list[tuple[int, int]] = []
    gaps: list[Gap] = [(list(range(len(old))), list(range(len(new))))]
    gaps = _between(gaps, (called, contents), pairs)
    gaps = _between(gaps, (contents,), pairs)
    gaps = _between(gaps, (called, held), changed)
    nameless = [not {called[0][i] for i in before} & {called[1][j] for j in after} for before, after in gaps]
    alike = _between([gap for gap, lacks in zip(gaps, nameless, strict=True) if lacks], (held,), changed)
    gaps = [*(gap for gap, lacks in zip(gaps, nameless, strict=True) if not lacks), *alike]
    removed, added = ([at for gap in gaps for at in gap[side]] for side in (0, 1))
    by_name = {(called[1][j], numbers(new[j].name)): j for j in added}
    for i in removed:
        if (at := by_name.pop((called[0][i], numbers(old[i].name)), None)) is not None:
            changed.append((i, at))
    changed_old, changed_new = {i for i, _ in changed}, {j for _, j in changed}
    return BlockMatch(
        tuple(sorted(pairs)),
        tuple(sorted(changed)),
        tuple(sorted(i for i in removed if i not in changed_old)),
        tuple(sorted(j for j in added if j not in changed_new)),
    )


Gap = tuple[list[int], list[int]]
"""Numbers of neighbouring blocks of the old and of the new model that are not matched yet."""


def _between(
    gaps: Sequence[Gap], keys: Sequence[Sequence[Sequence[Hashable]]], pairs: list[tuple[int, int]]
) -> list[Gap]:
    """Append pairs of blocks with equal keys, each key by old and by new block; the gaps that are left between them."""
    left: list[Gap] = []
    for before, after in gaps:
        inner: list[tuple[int, int]] = []
        old_keys, new_keys = (
            [tuple(key[side][at] for key in keys) for at in part] for side, part in enumerate((before, after))
        )
        for a, b in _aligned(old_keys, new_keys, inner):
            left.append(([before[i] for i in a], [after[j] for j in b]))
        pairs += [(before[i], after[j]) for i, j in inner]
    return left


def _aligned(old: Sequence[Hashable], new: Sequence[Hashable], pairs: list[tuple[int, int]]) -> Iterator[Ranges]:
    """Append the pairs of equal items to `pairs`, and yield the gaps between them, as far behind as they can lie.

    Of equal layers in a row, one more is then the last one, not one of those before it.
    """
    opcodes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    a, c = 0, 0  # ends of what is paired or yielded already
    for at, (tag, _, a_end, _, c_end) in enumerate(opcodes):
        if tag == "equal":
            pairs.extend(zip(range(a, a_end), range(c, c_end), strict=True))
            a, c = a_end, c_end
            continue
        follows = opcodes[at + 1][2] - a_end if at + 1 < len(opcodes) else 0
        side, start, stop = (new, c, c_end) if tag == "insert" else (old, a, a_end)
        slid = 0
        while tag != "replace" and slid < follows and side[start + slid] == side[stop + slid]:
            slid += 1
        pairs.extend(zip(range(a, a + slid), range(c, c + slid), strict=True))
        yield range(a + slid, a_end + slid), range(c + slid, c_end + slid)
        a, c = a_end + slid, c_end + slid


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


def carried_structures(old: Plan, new: Plan, match: BlockMatch, stage: int) -> list[Hashable]:
    """Structures of the blocks of an old stage, as those of the new plan that match them where there are any."""
    numbers_of = match.new_of()
    return [
        structure(new.block_table[numbers_of[i]] if i in numbers_of else old.block_table[i])
        for i in range(*old.stages[stage].blocks)
    ]


def match_stages(old: Plan, new: Plan, match: BlockMatch) -> tuple[int, list[Ranges]]:
    """Number of unchanged stages, and the ranges of stages between them that changed.

    A block that changed but kept its place does not make its stage a changed one.
    """
    before = [_decided(old, stage.index, carried_structures(old, new, match, stage.index)) for stage in old.stages]
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

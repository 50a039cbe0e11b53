"""What differs between two versions of a model: layers, blocks, sizes of inputs, and names, as few rules as possible.

A model is seen as a plan describes it; a graph is brought into that form, so that a plan and a model, or two plans, are
compared by the same code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from planner.plans.matching import BlockMatch, layers_of, match_blocks, weights
from planner.plans.model import Block, ModelSection, TensorSpec, numbers, outline
from planner.plans.types import Plan
from planner.plans.words import PART, module_list, module_ranges
from planner.units import plural

_TOLD = 3
"""Rules of names that are told at most."""

_SEPARATORS = re.compile(r"[./:]+")


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as a plan describes it.

    Attributes:
        section: its inputs, outputs and counts.
        blocks: its blocks, all written out.
        batch: samples that its sizes are for; 0 if unknown.
    """

    section: ModelSection
    blocks: tuple[Block, ...]
    batch: int

    @classmethod
    def of_plan(cls, plan: Plan) -> ModelView:
        """The model of a plan."""
        return cls(plan.model, plan.block_table, plan.micro_batches.size)


@dataclass(frozen=True, slots=True)
class ModelChanges:
    """What differs between two versions of a model.

    Attributes:
        match: their blocks.
        renamed: new name by old name of what is the same under another name.
        modules: new path by old path of modules that own the same weights.
        sizes: inputs and outputs whose sizes or types differ, a phrase each.
        content: what else differs but names, a phrase each.
        names: how names changed, a rule each.
    """

    match: BlockMatch
    renamed: Mapping[str, str]
    modules: Mapping[str, str]
    sizes: tuple[str, ...]
    content: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def only_names(self) -> bool:
        """True if nothing but names differs."""
        return bool(self.names) and not (self.sizes or self.content)

    @property
    def phrases(self) -> tuple[str, ...]:
        """All that differs, layers first."""
        names = f"names changed ({', '.join(self.names)})"
        if self.only_names:
            return (f"{names}, nothing else",)
        told = (*self.content, *self.sizes, *([names] if self.names else []))
        return told or ("operators are connected or set otherwise inside blocks of the same names and weights",)


def model_changes(old: ModelView, new: ModelView) -> ModelChanges:
    """Compare two versions of a model: blocks by what they compute, then sizes, then names; as `match_blocks`."""
    match = match_blocks(old.blocks, new.blocks)
    names = renamed(old, new, match)
    sizes = tuple(_sizes(old, new, names))
    content = tuple(_content(old, new, match, sized=bool(sizes)))
    modules = {
        a.module: b.module
        for i, j in match.pairs
        for a, b in zip(old.blocks[i].parameters, new.blocks[j].parameters, strict=True)
    }
    return ModelChanges(match, names, modules, sizes, content, name_changes(old, new, match, names))


def _content(old: ModelView, new: ModelView, match: BlockMatch, *, sized: bool) -> Iterator[str]:
    """Layers and blocks that only one model has or that differ, and numbers of weights.

    Args:
        old: the model before.
        new: the model after.
        match: their blocks.
        sized: sizes of inputs differ, so that blocks with the same weights and operators differ in sizes, too.
    """
    for blocks, at, word in ((new.blocks, match.added, "more"), (old.blocks, match.removed, "fewer")):
        only = [blocks[i] for i in at]
        if only:
            layers = layers_of(only)
            count = f"{layers:g} layer{'' if layers == 1 else 's'}" if layers else plural(len(only), "block")
            yield f"{count} {word} ({_listed(only)})"
    known = all(any(block.structure for block in view.blocks) for view in (old, new))
    told = [j for i, j in match.changed if (known and not sized) or weights(old.blocks[i]) != weights(new.blocks[j])]
    if told:
        yield f"{plural(len(told), 'block')} changed ({_listed([new.blocks[j] for j in told])})"
    if old.section.parameters != new.section.parameters:
        yield f"{old.section.parameters:,} -> {new.section.parameters:,} parameters"
    if not known and match.changed and len(told) < len(match.changed):
        yield "files of before do not say what operators compute"


def _listed(blocks: Sequence[Block]) -> str:
    return module_list(module_ranges([block.name for block in blocks]))


def _sizes(old: ModelView, new: ModelView, names: Mapping[str, str]) -> Iterator[str]:
    """Inputs and outputs that differ in sizes per sample or in type, under the new names."""
    before, after = (
        {name(t.name): _per_sample(t, view.batch) for t in (*view.section.inputs, *view.section.outputs)}
        for view, name in ((old, lambda each: names.get(each, each)), (new, str))
    )
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield f"{name} {_shape(before.get(name))} -> {_shape(after.get(name))}"


def _per_sample(tensor: TensorSpec, batch: int) -> tuple[object, ...]:
    """Shape without the dimension of samples, and type."""
    shape = tensor.shape
    return (*(shape[1:] if batch and shape[:1] == (batch,) else shape), tensor.dtype)


def _shape(said: tuple[object, ...] | None) -> str:
    return "nothing" if said is None else f"{' x '.join(map(str, said[:-1])) or 'a number'} {said[-1]}"


def renamed(old: ModelView, new: ModelView, match: BlockMatch) -> Mapping[str, str]:
    """New name by old name of all blocks, operators, weights, inputs and outputs that are the same under another name.

    Operators and weights of a block are the same in order; of a changed block that kept its name, only operators that
    kept theirs, and weights if all have the same shapes. Inputs and outputs are the same by place, where there are as
    many of equal shapes and types.
    """
    new_names: dict[str, str] = {}
    same = set(match.pairs)
    for i, j in (*match.pairs, *match.changed):
        before, after = old.blocks[i], new.blocks[j]
        new_names[before.name] = after.name
        renamed_block = (i, j) in same or outline(before.name) != outline(after.name)
        if len(before.nodes) == len(after.nodes):
            nodes = zip(before.nodes, after.nodes, strict=True)
            new_names |= {a: b for a, b in nodes if renamed_block or outline(a) == outline(b)}
        if [p.shape for p in before.parameters] == [p.shape for p in after.parameters]:
            for a, b in zip(before.parameters, after.parameters, strict=True):
                new_names |= {a.name: b.name, a.label: b.label}
    for what in ("inputs", "outputs"):
        before_tensors, after_tensors = getattr(old.section, what), getattr(new.section, what)
        if [_per_sample(t, old.batch) for t in before_tensors] == [_per_sample(t, new.batch) for t in after_tensors]:
            tensors = zip(before_tensors, after_tensors, strict=True)
            new_names |= {a.name: b.name for a, b in tensors if a.name not in new_names}
    return {a: b for a, b in new_names.items() if a != b and a}


def name_changes(old: ModelView, new: ModelView, match: BlockMatch, names: Mapping[str, str]) -> tuple[str, ...]:
    """How names of blocks, operators and tensors changed that are the same in both models, the commonest change first.

    Args:
        old: the model before.
        new: the model after.
        match: their blocks.
        names: new name by old name (`renamed`).

    Returns:
        Rules such as `*.self_attn.* -> *.attention.*`, in which `*` stands for any names or numbers, then blocks with
        other numbers, where no block was added or removed; () where no name changed.
    """
    counts = Counter(rule for a, b in names.items() if outline(a) != outline(b) for rule in _rules(a, b))
    rules = [rule for rule, _ in counts.most_common()]
    told = [*rules[:_TOLD], *([f"{len(rules) - _TOLD} other parts of names"] if len(rules) > _TOLD else [])]
    if not (match.added or match.removed):
        told += _renumbered(old, new, match)
        if names and not told:
            before, after = next(iter(names.items()))
            told.append(f"{before} -> {after}" + (f", {len(names) - 1} more alike" if len(names) > 1 else ""))
    return tuple(told)


def _renumbered(old: ModelView, new: ModelView, match: BlockMatch) -> list[str]:
    """Blocks whose numbers changed: `layers.0-15 -> layers.1-16`."""
    pairs = [(old.blocks[i].name, new.blocks[j].name) for i, j in sorted((*match.pairs, *match.changed))]
    shifted = [(a, b) for a, b in pairs if numbers(a) != numbers(b) and len(numbers(a)) == len(numbers(b))]
    if not shifted:
        return []
    before, after = (module_list(module_ranges(names)) for names in zip(*shifted, strict=True))
    return [f"{before} -> {after}"]


def _rules(old: str, new: str) -> Iterator[str]:
    """What was inserted into a name, taken out of it or replaced in it, part by part."""
    before, after = (outline(PART.sub(r"\1", name).strip("./:")) for name in (old, new))
    a, b = (_SEPARATORS.split(name) for name in (before, after))
    if a == b:
        yield from [f"{_shown(before)} -> {_shown(after)}"] if before != after else []
        return
    separator = "/" if "/" in after and "." not in after else "."
    first = True
    for tag, i, i_end, j, j_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        rest = i_end < len(a) or j_end < len(b)
        general = tag == "replace" and not (first and rest and not any("#" in part for part in a[:i]))
        start = (["*"] if i else []) if general else a[:i]
        sides = ([*start, *part, *(["*"] if rest else [])] for part in (a[i:i_end], b[j:j_end]))
        yield " -> ".join(_shown(separator.join(side)) for side in sides)
        first = False


def _shown(text: str) -> str:
    return text.replace("#", "*")

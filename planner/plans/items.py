"""A plan's blocks as the parts of a decoder: the embedding, numbered layers, logits and loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.graph.blocks import layer_of
from planner.plans.model import Block
from planner.plans.types import Plan


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

"""Parallel styles of modules: names for how their weights are sharded over the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.plans import Block, Plan, ShardedBlock, Sharding
from planner.sharding.layout import parse_layout


def module_styles(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pairs of module and parallel style, for modules whose weights or gradients are not simply replicated.

    `colwise` and `rowwise` linear layers, `logits` (by columns, the result gathered), `embedding rows` and `embedding
    columns`, `experts` of a mixture, `sequence` (a norm between layers whose input is cut by the sequence), `summed`
    (a whole weight whose gradient is summed over the group: a norm of the heads of a rank); "" where none of these fits
    how weights are cut.
    """
    for stage in plan.stages:
        sharding = plan.sharding_of(stage.index)
        for at in range(*stage.blocks) if sharding else ():
            sharded_block = plan.sharded_block(stage.index, at)
            if sharding is not None and sharded_block is not None:
                yield from _styles_of(
                    plan.block_table[at], sharding, *sharded_block, logits=at == len(plan.block_table) - 1
                )


def _styles_of(
    block: Block, sharding: Sharding, entry: ShardedBlock, own_names: Mapping[str, str], *, logits: bool
) -> Iterator[tuple[str, str]]:
    """Pairs of module and parallel style in one block."""
    tables = {own_names[h.weight]: h.what for h in entry.holdings}
    owners, style_of = {p.name: p for p in block.parameters}, dict[str, str]()
    sequence = "sequence" in sharding.boundaries
    for place in entry.tensors:
        names = [own_names[name] for name in (place.parameters or (place.tensor,))]
        if not place.optimizer or len(names) != 1 or names[0] not in owners:
            continue
        parameter = owners[names[0]]
        cuts = {part.dim for part in parse_layout(place.value, len(sharding.axes)) if part.cuts}
        if len(parameter.shape) > 1 and (cuts or sequence):
            linear = place.dims == (1, 0)
            style_of[parameter.module] = _style(
                cuts, tables.get(own_names[place.tensor], ""), linear=linear, logits=logits
            )
        elif len(parameter.shape) == 1 and (cuts or sequence or "P" in place.gradient):
            style_of.setdefault(parameter.module, "" if cuts else "sequence" if sequence else "summed")
    inside = {module.rpartition(".")[0] for module, kind in style_of.items() if kind in ("colwise", "rowwise")}
    for module, kind in style_of.items():
        yield module, "" if kind == "sequence" and module.rpartition(".")[0] in inside else kind


def _style(cuts: set[int], table: str, *, linear: bool, logits: bool) -> str:
    """The style of a matrix: a product reads the transpose of an `nn.Linear`'s weight, whose columns are rows of it."""
    if table:
        return table if table == "experts" else f"embedding {table}"
    if not linear or len(cuts) != 1:
        return ""
    return ("logits" if logits else "colwise") if cuts == {1} else "rowwise"

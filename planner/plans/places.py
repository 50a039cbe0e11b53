"""Where every tensor lies and how every operator is split, looked up by the model's own names."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from planner.plans.blocks import Block
from planner.plans.shardings import Holding, OperatorSplit, ShardedBlock, Sharding, TensorPlace, correspondence

T = TypeVar("T")
_CUT = re.compile(r"S([0-9]+)")


class Places:
    """Looks names up in the shardings of a plan.

    Args:
        stages: for each stage the name of its sharding ("" for none) and its blocks.
        shardings: of the plan.
        table: all blocks of the plan.
    """

    def __init__(
        self, stages: Sequence[tuple[str, range]], shardings: Sequence[Sharding], table: Sequence[Block]
    ) -> None:
        self._stages, self._table = stages, table
        self._shardings = {sharding.name: sharding for sharding in shardings}
        self._entries = {
            (sharding.name, block): (entry, names)
            for sharding in shardings
            for entry in sharding.blocks
            for block, names in entry.members()
        }

    def entry(self, stage: int, block: int) -> tuple[ShardedBlock, Mapping[str, str]] | None:
        """What holds for a block of a stage, and from the names in there to the block's own.

        Raises:
            PlanError: the block has not the form of the entry's first one.
        """
        found = self._entries.get((self._stages[stage][0], block))
        return None if found is None else (found[0], correspondence(found[0], self._table, block, found[1]))

    def tensor(self, name: str, stage: int | None) -> TensorPlace | None:
        """Where a tensor rests; None where nothing is said."""
        return _first(self._tensors, name, stage)

    def operator(self, name: str, stage: int | None) -> OperatorSplit | None:
        """How an operator is split; None where nothing is said."""
        return _first(self._operators, name, stage)

    def holding(self, weight: str, stage: int) -> tuple[Holding, Sharding] | None:
        """Which experts or rows of a weight are dealt to the ranks of a stage's groups."""
        found = self._holdings[stage].get(weight)
        return None if found is None else (found, self._shardings[self._stages[stage][0]])

    @functools.cached_property
    def _tensors(self) -> tuple[Mapping[str, TensorPlace], ...]:
        return self._resolved(lambda e, name: (entry for p in e.tensors for entry in _with_parameters(_place(p, name))))

    @functools.cached_property
    def _operators(self) -> tuple[Mapping[str, OperatorSplit], ...]:
        return self._resolved(
            lambda e, name: ((name[o.operator], dataclasses.replace(o, operator=name[o.operator])) for o in e.operators)
        )

    @functools.cached_property
    def _holdings(self) -> tuple[Mapping[str, Holding], ...]:
        return self._resolved(
            lambda e, name: (
                (name[h.weight], dataclasses.replace(h, weight=name[h.weight]))
                for h in e.holdings
                if h.what != "columns"
            )
        )

    def _resolved(
        self, items: Callable[[ShardedBlock, Mapping[str, str]], Iterable[tuple[str, T]]]
    ) -> tuple[Mapping[str, T], ...]:
        """By stage, what the entries of its blocks say, by the model's names; where a tensor is made comes first."""
        found: list[Mapping[str, T]] = []
        for stage, (_, blocks) in enumerate(self._stages):
            own: dict[str, T] = {}
            for block in blocks:
                known = self.entry(stage, block)
                if known is not None:
                    for name, item in items(*known):
                        own.setdefault(name, item)
            found.append(own)
        return tuple(found)


def _first(found: Sequence[Mapping[str, T]], name: str, stage: int | None) -> T | None:
    searched = found if stage is None else found[stage : stage + 1]
    return next((own[name] for own in searched if name in own), None)


def _place(place: TensorPlace, names: Mapping[str, str]) -> TensorPlace:
    """A place under the model's names."""
    parameters = tuple(names[p] for p in place.parameters)
    return dataclasses.replace(place, tensor=names[place.tensor], parameters=parameters)


def _with_parameters(place: TensorPlace) -> list[tuple[str, TensorPlace]]:
    """A weight's place by its own name and by those of its parameters, transposed as far as the plan says how."""
    found = [(place.tensor, place)]
    for parameter in place.parameters:
        if place.dims:
            value, gradient, optimizer = (
                transposed(text, place.dims) for text in (place.value, place.gradient, place.optimizer)
            )
            found.append((parameter, TensorPlace(parameter, value, gradient, optimizer)))
        else:
            found.append((parameter, place))
    return found


def transposed(text: str, dims: Sequence[int]) -> str:
    """A layout in another order of dimensions: `S1` of a matrix is `S0` of its transpose.

    Args:
        text: the layout.
        dims: for each dimension that it is about, the one in the other order.
    """
    return _CUT.sub(lambda match: f"S{dims[int(match[1])]}", text)

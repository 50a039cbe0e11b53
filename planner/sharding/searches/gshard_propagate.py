"""GShard's propagation: layouts spread from annotated tensors to all others through the operators.

A cut travels along the dimension that an operator iterates in its operands and results. Of the strategies that agree
with every known cut, and that cut nothing on axes without a known cut, the operator takes the one with the fewest
partial sums and the least work a rank, and passes its cuts on. Sweeps forward and backward repeat until nothing
changes; what is then unknown is replicated. Replication does not travel. Lepikhin et al., ICLR 2021, section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from planner.errors import InfeasibleError
from planner.graph import TensorKind
from planner.sharding.formulate import formulate
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, refusal
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.gshard import Annotation, complete, resolve
from planner.sharding.strategies import Strategy

Place = tuple[str, int]
"""A tensor and a mesh axis."""

Use = tuple[Place, Part, bool]
"""A place, the part that a strategy gives it, and whether the tensor is a result of the operator."""


class _KnownPart(NamedTuple):
    """The known part of a place, and the annotation that it comes from."""

    part: Part
    origin: str


def _uses(setting: Setting, i: int, strategy: Strategy) -> tuple[Use, ...]:
    """The uses of operands and results by a strategy of node i."""
    node = setting.graph.nodes[i]
    sides = ((node.inputs, strategy.reads, False), (node.outputs, strategy.writes, True))
    return tuple(
        ((setting.tied.get(names[p], names[p]), axis), part, written)
        for names, layouts, written in sides
        for p, layout in layouts
        if p < len(names) and names[p] in setting.graph.tensors
        for axis, part in enumerate(layout)
    )


def _agree(uses: Iterable[Use], known: Mapping[Place, _KnownPart]) -> bool:
    """Whether uses respect what is known of some places; a partial sum may become any result."""
    return all(
        place not in known or known[place].part == part or (written and part == PARTIAL)
        for place, part, written in uses
    )


class _Propagation:
    """The parts of tensors that are known so far."""

    def __init__(self, setting: Setting, problem: ShardingProblem, annotations: Mapping[str, Annotation]) -> None:
        self.setting, self.graph = setting, setting.graph
        self.known: dict[Place, _KnownPart] = {
            (name, axis): _KnownPart(part, annotation.origin)
            for name, annotation in annotations.items()
            for axis, part in enumerate(annotation.layout)
            if part is not None
        }
        choices = dict(zip(problem.names, problem.choices, strict=True))
        self.strategies = {
            i: [(s, _uses(setting, i, s)) for s in choices[f"op:{self.graph.nodes[i].key}"] if isinstance(s, Strategy)]
            for i in setting.members
        }

    def layout(self, name: str) -> TensorLayout:
        """The layout of a tensor as far as it is known, replicated elsewhere."""
        axes = range(len(self.setting.mesh.axes))
        return tuple(known.part if (known := self.known.get((name, axis))) else REPLICATED for axis in axes)

    def visit(self, i: int) -> bool:
        """Let one node pass its cuts on; true if anything changed.

        Raises:
            InfeasibleError: two annotations meet at the node, which cannot respect both.
        """
        places = dict.fromkeys(place for _, uses in self.strategies[i] for place, _, _ in uses)
        cuts = {place: self.known[place] for place in places if place in self.known and self.known[place].part.cuts}
        if not cuts:
            return False
        origin_of = {axis: known.origin for (_, axis), known in reversed(cuts.items())}
        quiet = [
            (strategy, uses)
            for strategy, uses in self.strategies[i]
            if all(not dim or axis in origin_of for axis, dim in enumerate(strategy.splits))
        ]
        fitting = [(strategy, uses) for strategy, uses in quiet if _agree(uses, self.known)]
        if not fitting:
            self._refuse_conflict(i, cuts, [uses for _, uses in quiet])
            return False
        _, best = min(fitting, key=lambda entry: (sum(part == PARTIAL for _, part, _ in entry[1]), entry[0].share))
        changed = False
        for place, part, _ in best:
            if part.cuts and place not in self.known and self._may_cut(place, part):
                self.known[place] = _KnownPart(part, origin_of[place[1]])
                changed = True
        return changed

    def _may_cut(self, place: Place, part: Part) -> bool:
        """Whether the tensor can be cut so, given what is known of its other axes."""
        tensor, axis = self.graph.tensors[place[0]], place[1]
        layout = self.layout(place[0])
        cut = (*layout[:axis], part, *layout[axis + 1 :])
        padded = self.setting.options.padded
        return tensor.kind is not TensorKind.CONSTANT and not refusal(
            tensor.shape, cut, self.setting.mesh.sizes, padded=padded
        )

    def _refuse_conflict(self, i: int, cuts: Mapping[Place, _KnownPart], quiet: Sequence[tuple[Use, ...]]) -> None:
        """Name two annotations that no strategy of a node can both respect.

        Cuts that come from one annotation along two paths, or that the operator cannot use at all, are no conflict:
        there the layout is changed.
        """
        usable = [place for place in cuts if any(_agree(uses, {place: cuts[place]}) for uses in quiet)]
        for first, second in itertools.combinations(usable, 2):
            pair = {place: cuts[place] for place in (first, second)}
            if cuts[first].origin != cuts[second].origin and not any(_agree(uses, pair) for uses in quiet):
                node = self.graph.nodes[i]
                raise InfeasibleError(
                    f"annotations {cuts[first].origin!r} and {cuts[second].origin!r} meet at {node.key} ({node.op}), "
                    f"which cannot take {first[0]} as {cuts[first].part} and {second[0]} as {cuts[second].part} on "
                    f"axis {self.setting.mesh.names[first[1]]!r}",
                    where=node.key,
                    hint="remove one of them, or let the search change the layout between them (gshard)",
                )


def propagate(
    setting: Setting, problem: ShardingProblem, annotations: Mapping[str, Annotation]
) -> dict[str, TensorLayout]:
    """The layout of every tensor and weight of a problem that follows from the annotations alone.

    Raises:
        InfeasibleError: two annotations meet at an operator that cannot respect both.

    Complexity: sweeps times strategies; the sweeps are at most the depth of the graph, usually two or three.
    """
    propagation = _Propagation(setting, problem, annotations)
    changed = True
    while changed:
        forward = [propagation.visit(i) for i in setting.members]
        backward = [propagation.visit(i) for i in reversed(setting.members)]
        changed = any(forward) or any(backward)
    return {name: propagation.layout(name) for name in problem.names if not name.startswith("op:")}


@SEARCHES.entry("gshard-propagate")
def gshard_propagate(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Every tensor rests where propagation puts it, operators follow; the bound holds under those layouts.

    Raises:
        UsageError: as of `gshard`.
        InfeasibleError: as of `gshard`, and annotations that meet at an operator that cannot respect both.
    """
    problem = formulate(setting)
    annotations = resolve(setting)
    layouts = propagate(setting, problem, annotations)
    fixed = {name: annotation for name, annotation in annotations.items() if name not in layouts}
    fixed |= {name: Annotation(name, layout, "propagation") for name, layout in layouts.items()}
    return complete(setting, problem, fixed, memory_bytes, "annotations propagated")

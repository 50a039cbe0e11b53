"""GShard's propagation: layouts spread from annotated tensors to all others through the operators.

A cut travels along the dimension that an operator iterates in its operands and results. Of the strategies that agree
with every known cut, and that cut nothing on axes without a known cut, the operator takes the one with the fewest
partial sums and the least work a rank, and passes its cuts on. Sweeps forward and backward repeat until nothing
changes; what is then unknown is replicated. Replication does not travel. Lepikhin et al., ICLR 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner.errors import InfeasibleError
from planner.graph import TensorKind
from planner.sharding.annotations import Annotation, resolve
from planner.sharding.formulate import formulate
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, refusal
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.gshard import complete
from planner.sharding.strategies import Strategy

Place = tuple[str, int]
"""A tensor and a mesh axis."""


@dataclass(frozen=True, slots=True)
class _KnownPart:
    """What is known of a tensor on an axis, and the annotation that it comes from."""

    part: Part
    origin: str


@dataclass(frozen=True, slots=True)
class _Use:
    """What a strategy makes of an operand or a result (`written`) on an axis."""

    place: Place
    part: Part
    written: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A strategy of an operator with its uses of the tensors around it."""

    strategy: Strategy
    uses: tuple[_Use, ...]

    @staticmethod
    def of(setting: Setting, i: int, strategy: Strategy) -> _Candidate:
        """The candidate of a strategy of node i."""
        node, uses = setting.graph.nodes[i], []
        for written, names, layouts in ((False, node.inputs, strategy.reads), (True, node.outputs, strategy.writes)):
            for p, layout in layouts:
                if p < len(names) and names[p] in setting.graph.tensors:
                    name = setting.tied.get(names[p], names[p])
                    uses += [_Use((name, axis), part, written) for axis, part in enumerate(layout)]
        return _Candidate(strategy, tuple(uses))

    @property
    def cost(self) -> tuple[int, float]:
        """Partial sums, then the share of the work that a rank does."""
        return sum(use.part == PARTIAL for use in self.uses), self.strategy.share

    def agrees(self, known: Mapping[Place, _KnownPart]) -> bool:
        """Whether it respects what is known of some places; a partial sum may become any result."""
        return all(
            use.place not in known or known[use.place].part == use.part or (use.written and use.part == PARTIAL)
            for use in self.uses
        )


class _Propagation:
    """What is known of tensors so far, by tensor and axis."""

    def __init__(self, setting: Setting, problem: ShardingProblem, annotations: Mapping[str, Annotation]) -> None:
        self.setting, self.graph = setting, setting.graph
        self.known: dict[Place, _KnownPart] = {
            (name, axis): _KnownPart(part, annotation.origin)
            for name, annotation in annotations.items()
            for axis, part in enumerate(annotation.layout)
            if part is not None
        }
        index = {name: v for v, name in enumerate(problem.names)}
        self.candidates = {
            i: [
                _Candidate.of(setting, i, choice)
                for choice in problem.choices[index[f"op:{self.graph.nodes[i].key}"]]
                if isinstance(choice, Strategy)
            ]
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
        places = dict.fromkeys(use.place for candidate in self.candidates[i] for use in candidate.uses)
        origin_of: dict[int, str] = {}
        for place in places:
            if place in self.known and self.known[place].part.cuts:
                origin_of.setdefault(place[1], self.known[place].origin)
        if not origin_of:
            return False
        quiet = [
            candidate
            for candidate in self.candidates[i]
            if all(not dim or axis in origin_of for axis, dim in enumerate(candidate.strategy.splits))
        ]
        fitting = [candidate for candidate in quiet if candidate.agrees(self.known)]
        if not fitting:
            self._refuse_conflict(i, places, quiet)
            return False
        changed = False
        for use in min(fitting, key=lambda candidate: candidate.cost).uses:
            if use.part.cuts and use.place not in self.known and self._may_cut(use.place, use.part):
                self.known[use.place] = _KnownPart(use.part, origin_of[use.place[1]])
                changed = True
        return changed

    def _may_cut(self, place: Place, part: Part) -> bool:
        """Whether the tensor can be cut so, given what is known of its other axes."""
        tensor, axis = self.graph.tensors[place[0]], place[1]
        if tensor.kind is TensorKind.CONSTANT:
            return False
        layout = self.layout(place[0])
        cut = (*layout[:axis], part, *layout[axis + 1 :])
        return not refusal(tensor.shape, cut, self.setting.mesh.sizes, padded=self.setting.options.padded)

    def _refuse_conflict(self, i: int, places: Collection[Place], quiet: list[_Candidate]) -> None:
        """Name two annotations that no strategy of a node can both respect.

        Cuts that come from one annotation along two paths, or that the operator cannot use at all, are no conflict:
        there the layout is changed.
        """
        cuts = {place: self.known[place] for place in places if place in self.known and self.known[place].part.cuts}

        def possible(*some: Place) -> bool:
            return any(candidate.agrees({place: cuts[place] for place in some}) for candidate in quiet)

        usable = [place for place in cuts if possible(place)]
        for k, first in enumerate(usable):
            for second in usable[k + 1 :]:
                if cuts[first].origin != cuts[second].origin and not possible(first, second):
                    node = self.graph.nodes[i]
                    raise InfeasibleError(
                        f"annotations {cuts[first].origin!r} and {cuts[second].origin!r} meet at {node.key} "
                        f"({node.op}), which cannot take {first[0]} as {cuts[first].part} and {second[0]} as "
                        f"{cuts[second].part} on axis {self.setting.mesh.names[first[1]]!r}",
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

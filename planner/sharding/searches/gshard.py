"""GShard: the user gives the layouts of a few tensors, the program completes all others.

Annotated tensors and weights rest as asked (`Setting.annotations`). The rest is chosen exactly, so that work and
changes of layout take the least time; where annotations do not fit together, the layout is changed between them. If the
fastest completion exceeds the memory, memory gets a price.

A mixture of experts needs nothing more: tokens annotated along their groups and expert weights along the experts make
dispatch and combine changes of layout from one cut to another, which are all-to-alls.

An annotation is a pattern and a layout: `{"h.*.mlp.c_fc.weight": "RS1", "tokens": "S0?"}`. A pattern (with `*`, `?` and
`[]` as in file names) is matched against the names of tensors and the labels of parameters. A `?` in a layout leaves
that mesh axis to the search. A name written out takes precedence over a pattern.

The propagation of the paper: layouts spread from annotated tensors to all others through the operators. A cut travels
along the dimension that an operator iterates in its operands and results. Of the strategies that agree with every known
cut, and that cut nothing on axes without a known cut, the operator takes the one with the fewest partial sums and the
least work a rank, and passes its cuts on. Sweeps forward and backward repeat until nothing changes; what is then
unknown is replicated. Replication does not travel. Lepikhin et al., ICLR 2021, section 3.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.errors import InfeasibleError, UsageError
from planner.graph import Tensor, TensorKind
from planner.registry import did_you_mean
from planner.sharding.formulate import formulate
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, parse_layout, refusal
from planner.sharding.problem import Setting, ShardingProblem, rest_of
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.ilp import fastest
from planner.sharding.strategies import Strategy

_FREE = re.compile(r"R|P|S\d+(?:~\d+)?|\?")

PartialLayout = tuple[Part | None, ...]
"""A layout with None for the axes that are left open."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """The layout asked for one tensor.

    Attributes:
        tensor: name of the tensor.
        layout: one part for each mesh axis; None for any.
        origin: the annotation as the user wrote it, `pattern: layout`.
        exact: whether the user wrote out the name.
    """

    tensor: str
    layout: PartialLayout
    origin: str
    exact: bool = False

    def allows(self, layout: TensorLayout) -> bool:
        """Whether a layout is as asked on every axis that is not open."""
        return all(asked is None or asked == part for asked, part in zip(self.layout, layout, strict=True))


def parse_annotation(text: str, axes: int) -> PartialLayout:
    """Parse a layout such as `S0?`.

    Raises:
        UsageError: the text is no layout on that many axes.
    """
    words = _FREE.findall(text)
    if "".join(words) != text or len(words) != axes:
        raise UsageError(
            f"{text!r} is no layout on {axes} mesh axes",
            hint="write for each axis R (replicated), P (partial sums), S and the dimension, or ? (open), as in S0?",
        )
    return tuple(None if word == "?" else parse_layout(word, 1)[0] for word in words)


def resolve(setting: Setting) -> dict[str, Annotation]:
    """The annotations of a setting, by tensor.

    Raises:
        UsageError: a pattern matches no tensor of the nodes, a tensor cannot have the layout, or two annotations of
            one tensor disagree.
    """
    graph = setting.graph
    labels = _labels(setting)
    annotations: dict[str, Annotation] = {}
    for pattern, text in setting.annotations.items():
        layout, exact = parse_annotation(text, len(setting.mesh.axes)), pattern in labels
        matching = [names for label, names in labels.items() if fnmatch.fnmatchcase(label, pattern)]
        names = labels.get(pattern) or [name for names in matching for name in names]
        if not names:
            raise UsageError(
                f"no tensor is called {pattern!r}", where="annotations", hint=did_you_mean(pattern, labels)
            )
        for name in dict.fromkeys(setting.tied.get(n, n) for n in names):
            annotation = Annotation(name, layout, f"{pattern}: {text}", exact)
            _check(graph.tensors[name], annotation, setting)
            annotations[name] = _joined(annotations.get(name), annotation)
    return annotations


def _labels(setting: Setting) -> dict[str, list[str]]:
    """Tensors of the nodes by name and by label."""
    graph = setting.graph
    labels: dict[str, list[str]] = {}
    tensors = dict.fromkeys(n for i in setting.members for n in (*graph.nodes[i].inputs, *graph.nodes[i].outputs) if n)
    for name in tensors:
        if name not in graph.tensors:
            continue
        labels.setdefault(name, []).append(name)
        for source in graph.sources.get(name, ()):
            label = graph.parameters[graph.parameter_index[source]].label
            if label != name:
                labels.setdefault(label, []).append(name)
    return labels


def _check(tensor: Tensor, annotation: Annotation, setting: Setting) -> None:
    layout = tuple(REPLICATED if part is None else part for part in annotation.layout)
    why = refusal(tensor.shape, layout, setting.mesh.sizes, padded=setting.options.padded)
    if why:
        raise UsageError(
            f"annotation {annotation.origin!r}: {tensor.name} cannot lie so: {why}",
            where="annotations",
            hint="choose a dimension that the axis divides, or allow padding",
        )


def _joined(known: Annotation | None, annotation: Annotation) -> Annotation:
    if known is None or (annotation.exact and not known.exact):
        return annotation
    if (known.exact and not annotation.exact) or known.layout == annotation.layout:
        return known
    raise UsageError(
        f"annotations {known.origin!r} and {annotation.origin!r} ask for two layouts of {annotation.tensor}",
        where="annotations",
        hint="remove one, or write the tensor's full name for an exception",
    )


def _restricted(setting: Setting, problem: ShardingProblem, annotations: Mapping[str, Annotation]) -> ShardingProblem:
    """The problem with only those choices that respect the annotations; model inputs are read as asked."""
    place = {name: v for v, name in enumerate(problem.names)}
    keep: dict[int, np.ndarray] = {}
    for name, annotation in annotations.items():
        if setting.graph.tensors[name].kind is TensorKind.INPUT:
            _restrict_readers(setting, problem, annotation, place, keep)
        elif name in place:
            choices = problem.choices[place[name]]
            options = [c for c, choice in enumerate(choices) if annotation.allows(rest_of(choice).value)]
            if not options:
                raise _unmet(annotation, "no such layout is open to it")
            keep[place[name]] = np.asarray(options)
    return problem.restricted(keep)


def _restrict_readers(
    setting: Setting,
    problem: ShardingProblem,
    annotation: Annotation,
    place: Mapping[str, int],
    keep: dict[int, np.ndarray],
) -> None:
    """Keep the strategies that read an annotated input of the model as asked."""
    replicated = (REPLICATED,) * len(setting.mesh.axes)
    for i in sorted(set(setting.graph.consumers.get(annotation.tensor, ())) & set(setting.members)):
        node = setting.graph.nodes[i]
        v = place[f"op:{node.key}"]
        positions = [p for p, name in enumerate(node.inputs) if name == annotation.tensor]
        options = [
            c for c in keep.get(v, np.arange(problem.sizes[v])).tolist()
            if isinstance(s := problem.choices[v][c], Strategy)
            and all(annotation.allows(dict(s.reads).get(p, replicated)) for p in positions)
        ]  # fmt: skip
        if not options:
            raise _unmet(annotation, f"{node.key} ({node.op}) cannot read it so")
        keep[v] = np.asarray(options)


def _unmet(annotation: Annotation, why: str) -> InfeasibleError:
    return InfeasibleError(
        f"annotation {annotation.origin!r} of {annotation.tensor} cannot be met: {why}",
        where=annotation.tensor,
        hint="choose another layout, or allow padded or coupled splits",
    )


def complete(
    setting: Setting,
    problem: ShardingProblem,
    annotations: Mapping[str, Annotation],
    memory_bytes: float | None,
    method: str,
) -> ShardingAnswer:
    """The fastest completion of some annotations within memory.

    Raises:
        InfeasibleError: an annotation cannot be met, or no completion was found that fits.
    """
    return fastest(
        setting,
        _restricted(setting, problem, annotations),
        memory_bytes,
        method=method,
        what="completion of the annotations",
        hint="annotate large weights with a split, or use a larger mesh",
    )


@SEARCHES.entry("gshard")
def gshard(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Annotated tensors as asked, all else as fast as possible within memory; the bound holds under the annotations.

    Raises:
        UsageError: an annotation matches no tensor, asks for an impossible layout, or contradicts another.
        InfeasibleError: an annotation cannot be met, or memory is too small.
    """
    return complete(setting, formulate(setting), resolve(setting), memory_bytes, "annotations completed exactly")


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

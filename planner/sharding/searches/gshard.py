"""GShard: the user gives the layouts of a few tensors, the program completes all others.

Annotated tensors and weights rest as asked (`Setting.annotations`). The rest is chosen exactly, so that work and
changes of layout take the least time; where annotations do not fit together, the layout is changed between them. If the
fastest completion exceeds the memory, memory gets a price: each price gives a bound, and a price that is high enough a
completion that fits.

A mixture of experts needs nothing more: tokens annotated along their groups and expert weights along the experts make
dispatch and combine changes of layout from one cut to another, which are all-to-alls.

An annotation is a pattern and a layout: `{"h.*.mlp.c_fc.weight": "RS1", "tokens": "S0?"}`. A pattern (with `*`, `?` and
`[]` as in file names) is matched against the names of tensors and the labels of parameters. A `?` in a layout leaves
that mesh axis to the search. A name written out takes precedence over a pattern.

The propagation of the paper: layouts spread from annotated tensors to all others through the operators. A cut travels
along the iteration dimension of an operator's loop nests that indexes the cut dimension, to all other operands and
results that it indexes. Sweeps forward and backward repeat until nothing changes; what is then unknown is replicated.
Replication and partial sums do not travel. Lepikhin et al., ICLR 2021, section 3.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.errors import InfeasibleError, UsageError
from planner.graph import Node, Tensor, TensorKind
from planner.memory import fits
from planner.operators import graph_specs
from planner.registry import did_you_mean
from planner.sharding.choices import Parts, splits
from planner.sharding.elimination import Factor, minimise
from planner.sharding.formulate import formulate
from planner.sharding.layout import REPLICATED, Part, TensorLayout, parse_layout, refusal
from planner.sharding.problem import Setting, ShardingProblem, rest_of
from planner.sharding.searches import SEARCHES, ShardingAnswer, fastest_choices
from planner.sharding.strategies import Strategy
from planner.units import format_bytes

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
        for name in dict.fromkeys(names):
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


@SEARCHES.entry("gshard")
def gshard(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Annotated tensors as asked, all else as fast as possible within memory.

    Raises:
        UsageError: an annotation matches no tensor, asks for an impossible layout, or contradicts another.
        InfeasibleError: an annotation cannot be met, or memory is too small.
    """
    return fastest(setting, _restricted(setting, formulate(setting), resolve(setting)), memory_bytes)


_Known = dict[tuple[str, int], tuple[Part, str]]
"""By tensor and mesh axis, the part that is known, and the annotation that it comes from."""


def propagate(setting: Setting, annotations: Mapping[str, Annotation]) -> dict[str, TensorLayout]:
    """The layout of every tensor and weight of the nodes that follows from the annotations alone.

    Raises:
        InfeasibleError: two annotations meet at an operator that cannot respect both.

    Complexity: sweeps times operands; the sweeps are at most the depth of the graph, usually two or three.
    """
    graph, specs, axes = setting.graph, graph_specs(setting.graph), range(len(setting.mesh.axes))
    ways = [(graph.nodes[i], splits(specs[i].nests)) for i in setting.members]
    known: _Known = {
        (name, axis): (part, annotation.origin)
        for name, annotation in annotations.items()
        for axis, part in enumerate(annotation.layout)
        if part is not None
    }
    count = -1
    while count < len(known):
        count = len(known)
        for node, cuts in (*ways, *reversed(ways)):
            placed = {dim: _cut_tensors(node, parts) for dim, parts in cuts.items()}
            for axis in axes:
                _pass_on(setting, node, placed, axis, known)
    names = dict.fromkeys(name for node, _ in ways for name in (*node.inputs, *node.outputs) if name in graph.tensors)
    fixed = (TensorKind.INPUT, TensorKind.CONSTANT)
    return {name: _layout(name, axes, known) for name in names if graph.tensors[name].kind not in fixed}


def _layout(name: str, axes: Iterable[int], known: _Known) -> TensorLayout:
    """The layout of a tensor as far as it is known, replicated elsewhere."""
    return tuple(known.get((name, axis), (REPLICATED, ""))[0] for axis in axes)


def _cut_tensors(node: Node, parts: Parts) -> dict[str, Part]:
    """Operands and results that a cut of an operator cuts, with their parts."""
    sides = zip((node.inputs, node.outputs), parts, strict=True)
    named = ((names[p], part) for names, by_position in sides for p, part in by_position.items() if p < len(names))
    return {name: part for name, part in named if part.cuts}


def _pass_on(setting: Setting, node: Node, placed: Mapping[str, Mapping[str, Part]], axis: int, known: _Known) -> None:
    """Let an operator pass the cut of one axis on to its other operands and results.

    Where it would be cut along two dimensions, because of one annotation along two paths, nothing is passed on: there
    the layout is changed.

    Args:
        setting: what is sharded.
        node: the operator.
        placed: by dimension that can be cut, the parts of operands and results.
        axis: the mesh axis.
        known: what is known; new parts are added.

    Raises:
        InfeasibleError: the operator would be cut along two dimensions because of two annotations.
    """
    origins = {
        dim: (name, known[name, axis])
        for dim, parts in placed.items()
        for name, part in parts.items()
        if known.get((name, axis), (None, ""))[0] == part
    }
    (first, (part, origin)), *others = origins.values() or [("", (REPLICATED, ""))]
    for second, (other, contrary) in others:
        if contrary != origin:
            raise InfeasibleError(
                f"annotations {origin!r} and {contrary!r} meet at {node.key} ({node.op}), which cannot take {first} as "
                f"{part} and {second} as {other} on axis {setting.mesh.names[axis]!r}",
                where=node.key,
                hint="remove one of them, or let the search change the layout between them (gshard)",
            )
    if len(origins) == 1:
        for name, cut in placed[next(iter(origins))].items():
            if (name, axis) not in known and _may_cut(setting, name, axis, cut, known):
                known[name, axis] = cut, origin


def _may_cut(setting: Setting, name: str, axis: int, part: Part, known: _Known) -> bool:
    """Whether a tensor can be cut so, given what is known of its other axes."""
    tensor, sizes = setting.graph.tensors[name], setting.mesh.sizes
    layout = _layout(name, range(len(sizes)), known)
    cut = (*layout[:axis], part, *layout[axis + 1 :])
    return tensor.kind is not TensorKind.CONSTANT and not refusal(
        tensor.shape, cut, sizes, padded=setting.options.padded
    )


@SEARCHES.entry("gshard-propagate")
def gshard_propagate(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Every tensor rests where propagation puts it; operators follow.

    Raises:
        UsageError: as of `gshard`.
        InfeasibleError: as of `gshard`, and annotations that meet at an operator that cannot respect both.
    """
    annotations = resolve(setting)
    layouts = propagate(setting, annotations)
    fixed = {name: annotation for name, annotation in annotations.items() if name not in layouts}
    fixed |= {name: Annotation(name, layout, "propagation") for name, layout in layouts.items()}
    return fastest(setting, _restricted(setting, formulate(setting), fixed), memory_bytes)


NEAR = 0.02
"""Relative gap at which the search within memory ends."""


def fastest(setting: Setting, problem: ShardingProblem, memory_bytes: float | None) -> ShardingAnswer:
    """The fastest choice of a problem, proven; within memory the fastest that a price finds.

    Raises:
        InfeasibleError: no choice was found that fits, or the problem is too large for elimination.
    """
    held = [Factor((v,), kept) for v, kept in enumerate(problem.bytes)]
    choices = fastest_choices(problem.sizes, problem.factors(), held, memory_bytes, "completion of layouts", close=NEAR)
    return ShardingAnswer.of(setting, problem.decision(choices), memory_bytes)


DEAR = 1e6
"""Price of memory: the bytes of the fastest layouts cost this many times their seconds."""


@SEARCHES.entry("leanest")
def leanest(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """The layouts with the least memory: the best choice at a price at which only memory counts.

    Raises:
        InfeasibleError: even those do not fit, or exact elimination would need too large a table.
    """
    problem = formulate(setting)
    seconds, choices = minimise(problem.sizes, problem.factors())
    price = DEAR * max(seconds, 1e-12) / max(1.0, problem.memory(choices))
    _, choices = minimise(problem.sizes, problem.factors(price))
    held = problem.memory(choices)
    if memory_bytes is not None and not fits(held, memory_bytes):
        raise InfeasibleError(
            f"every layout needs about {format_bytes(held)} a device, {format_bytes(memory_bytes)} are there",
            hint="use a larger mesh, more recomputation or a smaller micro-batch",
        )
    return ShardingAnswer.of(setting, problem.decision(choices), memory_bytes)

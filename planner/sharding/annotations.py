"""Layouts that the user writes beside some tensors: which tensors are meant, and whether the wishes agree.

An annotation is a pattern and a layout: `{"h.*.mlp.c_fc.weight": "RS1", "tokens": "S0?"}`. A pattern (with `*`, `?` and
`[]` as in file names) is held against the names of tensors and the labels of parameters. A `?` in a layout leaves
that mesh axis to the search. A name written out goes before a pattern.

`propagate` spreads layouts from annotated tensors to all others through the operators, as GShard's partitioner does it.
A cut travels along the dimension that an operator iterates in its operands and results: of the strategies that agree
with every cut known so far, and that cut nothing on axes where nothing is known, the operator takes the one with the
fewest partial sums and the least work a rank, and hands its cuts on. Sweeps forward and backward go on until nothing
is new; what is then unknown is replicated. Replication does not travel. Lepikhin et al., ICLR 2021, section 3.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InfeasibleError, UsageError
from planner.graph import Tensor, TensorKind
from planner.hardware.document import parse_document
from planner.registry import did_you_mean
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, parse_layout, refusal
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.strategies import Strategy

_FREE = re.compile(r"R|P|S\d+(?:~\d+)?|\?")

PartialLayout = tuple[Part | None, ...]
"""A layout of which some axes are left open."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """A wish about one tensor.

    Attributes:
        tensor: its name.
        layout: one part for each mesh axis; None where any will do.
        origin: the wish as the user wrote it, `pattern: layout`.
        exact: whether the name was written out.
    """

    tensor: str
    layout: PartialLayout
    origin: str
    exact: bool = False

    def allows(self, layout: TensorLayout) -> bool:
        """Whether a layout is what was wished."""
        return all(want is None or want == part for want, part in zip(self.layout, layout, strict=True))


def parse_annotation(text: str, axes: int) -> PartialLayout:
    """The layout that a text like `S0?` means.

    Raises:
        UsageError: not a layout of that many axes.
    """
    words = _FREE.findall(text)
    if "".join(words) != text or len(words) != axes:
        raise UsageError(
            f"{text!r} is no layout on {axes} mesh axes",
            hint="write for each axis R (replicated), P (partial sums), S and the dimension, or ? (open), as in S0?",
        )
    return tuple(None if word == "?" else parse_layout(word, 1)[0] for word in words)


def load_annotations(path: str | Path) -> dict[str, str]:
    """Annotations from a YAML file: a mapping of patterns to layouts.

    Raises:
        UsageError: the file cannot be read, or is something else; all findings at once.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the annotations", where=str(path), hint=str(error)) from error
    document = parse_document(text, str(path))
    if document.problems:
        raise UsageError("the annotations cannot be read", where=str(path), problems=document.problems)
    if not isinstance(document.data, dict):
        raise UsageError("annotations are a mapping of tensor names to layouts", where=str(path), hint="x: S0R")
    wrong = [
        document.problem_at(document.values[name,], f"the layout of {name!r} is not a text", "write for instance S0R")
        for name, layout in document.data.items()
        if not isinstance(layout, str)
    ]
    if wrong:
        raise UsageError("the annotations cannot be used", where=str(path), problems=wrong)
    return dict(document.data)


def resolve(setting: Setting) -> dict[str, Annotation]:
    """The wishes of a setting, by tensor.

    Raises:
        UsageError: a pattern that no tensor of the nodes has, a layout that a tensor cannot have, two wishes for one
            tensor that disagree.
    """
    graph = setting.graph
    labels = _labels(setting)
    found: dict[str, Annotation] = {}
    for pattern, text in setting.annotations.items():
        layout, exact = parse_annotation(text, len(setting.mesh.axes)), pattern in labels
        names = labels.get(pattern) or [n for label, ns in labels.items() if fnmatch.fnmatchcase(label, pattern)
                                        for n in ns]  # fmt: skip
        if not names:
            raise UsageError(
                f"no tensor is called {pattern!r}", where="annotations", hint=did_you_mean(pattern, labels)
            )
        for name in dict.fromkeys(setting.tied.get(n, n) for n in names):
            wish = Annotation(name, layout, f"{pattern}: {text}", exact)
            _check(graph.tensors[name], wish, setting)
            found[name] = _joined(found.get(name), wish)
    return found


def _labels(setting: Setting) -> dict[str, list[str]]:
    """Tensors by everything they may be called."""
    graph = setting.graph
    found: dict[str, list[str]] = {}
    used = dict.fromkeys(n for i in setting.members for n in (*graph.nodes[i].inputs, *graph.nodes[i].outputs) if n)
    for name in used:
        if name not in graph.tensors:
            continue
        found.setdefault(name, []).append(name)
        for source in graph.sources.get(name, ()):
            label = graph.parameters[graph.parameter_index[source]].label
            if label != name:
                found.setdefault(label, []).append(name)
    return found


def _check(tensor: Tensor, wish: Annotation, setting: Setting) -> None:
    layout = tuple(REPLICATED if part is None else part for part in wish.layout)
    why = refusal(tensor.shape, layout, setting.mesh.sizes, padded=setting.options.padded)
    if why:
        raise UsageError(
            f"annotation {wish.origin!r}: {tensor.name} cannot lie so: {why}",
            where="annotations",
            hint="choose a dimension that the axis divides, or allow padding",
        )


def _joined(known: Annotation | None, wish: Annotation) -> Annotation:
    if known is None or (wish.exact and not known.exact):
        return wish
    if (known.exact and not wish.exact) or known.layout == wish.layout:
        return known
    raise UsageError(
        f"annotations {known.origin!r} and {wish.origin!r} ask for two layouts of {wish.tensor}",
        where="annotations",
        hint="remove one, or write the tensor's full name for an exception",
    )


Place = tuple[str, int]
"""A tensor and a mesh axis."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a tensor on an axis, and the annotation that it comes from."""

    part: Part
    origin: str


class _Spread:
    def __init__(self, setting: Setting, problem: ShardingProblem, wishes: Mapping[str, Annotation]) -> None:
        self.setting, self.graph, self.problem = setting, setting.graph, problem
        self.known: dict[Place, Known] = {
            (name, a): Known(part, wish.origin)
            for name, wish in wishes.items()
            for a, part in enumerate(wish.layout)
            if part is not None
        }
        index = {name: v for v, name in enumerate(problem.names)}
        self.strategies: dict[int, list[Strategy]] = {
            i: [s for s in problem.choices[index[f"op:{setting.graph.nodes[i].key}"]] if isinstance(s, Strategy)]
            for i in setting.members
        }

    def name(self, tensor: str) -> str:
        return self.setting.tied.get(tensor, tensor)

    def places(self, i: int, strategy: Strategy) -> Iterator[tuple[Place, Part, bool]]:
        """What a strategy makes of each operand and result: tensor and axis, part, whether it is a result."""
        node = self.graph.nodes[i]
        for written, names, layouts in ((False, node.inputs, strategy.reads), (True, node.outputs, strategy.writes)):
            for p, layout in layouts:
                if p < len(names) and names[p] in self.graph.tensors:
                    for a, part in enumerate(layout):
                        yield (self.name(names[p]), a), part, written

    def agrees(self, i: int, strategy: Strategy, known: Mapping[Place, Known]) -> bool:
        """Whether it respects what is known of some places; a partial sum may become any result."""
        return all(
            place not in known or known[place].part == part or (written and part == PARTIAL)
            for place, part, written in self.places(i, strategy)
        )

    def visit(self, i: int) -> bool:
        """Let one node hand its cuts on; whether anything was new."""
        origins = self.origins(i)
        if not origins:
            return False
        quiet = [s for s in self.strategies[i] if all(not name or a in origins for a, name in enumerate(s.splits))]
        fitting = [s for s in quiet if self.agrees(i, s, self.known)]
        if not fitting:
            self.conflict(i, quiet)
            return False
        best = min(fitting, key=lambda s: (self.sums(i, s), s.share))
        changed = False
        for (name, a), part, _ in self.places(i, best):
            if part.cuts and (name, a) not in self.known and self.may(name, a, part):
                self.known[name, a] = Known(part, origins[a])
                changed = True
        return changed

    def sums(self, i: int, strategy: Strategy) -> int:
        return sum(part == PARTIAL for _, part, _ in self.places(i, strategy))

    def origins(self, i: int) -> dict[int, str]:
        """By axis on which a tensor of a node is known to be cut, the annotation behind the first such cut."""
        node = self.graph.nodes[i]
        found: dict[int, str] = {}
        for n in (*node.inputs, *node.outputs):
            for a in range(len(self.setting.mesh.axes)):
                known = self.known.get((self.name(n), a)) if n else None
                if known is not None and known.part.cuts:
                    found.setdefault(a, known.origin)
        return found

    def may(self, name: str, axis: int, part: Part) -> bool:
        """Whether the tensor can be cut so, given what is known of its other axes."""
        tensor = self.graph.tensors[name]
        if tensor.kind is TensorKind.CONSTANT:
            return False
        layout = [
            k.part if (k := self.known.get((name, a))) else REPLICATED for a in range(len(self.setting.mesh.axes))
        ]
        layout[axis] = part
        return not refusal(tensor.shape, tuple(layout), self.setting.mesh.sizes, padded=self.setting.options.padded)

    def conflict(self, i: int, quiet: list[Strategy]) -> None:
        """Name two annotations that no strategy of a node can both respect.

        Cuts that come from one annotation on two ways, or that the operator cannot use at all, are no conflict: there
        the layout is changed.
        """
        node = self.graph.nodes[i]
        names = dict.fromkeys(self.name(n) for n in (*node.inputs, *node.outputs) if n)
        here = [(n, a) for n in names for a in range(len(self.setting.mesh.axes)) if (n, a) in self.known]

        def possible(*places: Place) -> bool:
            return any(self.agrees(i, s, {place: self.known[place] for place in places}) for s in quiet)

        for k, one in enumerate(here):
            for other in here[k + 1 :]:
                mine, theirs = self.known[one], self.known[other]
                usable = mine.part.cuts and theirs.part.cuts and possible(one) and possible(other)
                if usable and mine.origin != theirs.origin and not possible(one, other):
                    raise InfeasibleError(
                        f"annotations {mine.origin!r} and {theirs.origin!r} meet at {node.key} ({node.op}), which "
                        f"cannot take {one[0]} as {mine.part} and {other[0]} as {theirs.part} on axis "
                        f"{self.setting.mesh.names[one[1]]!r}",
                        where=node.key,
                        hint="remove one of them, or let the search change the layout between them (gshard)",
                    )


def propagate(setting: Setting, problem: ShardingProblem, wishes: Mapping[str, Annotation]) -> dict[str, TensorLayout]:
    """A layout for every tensor and weight of a problem, from the annotations alone.

    Raises:
        InfeasibleError: two annotations meet at an operator that cannot respect both.

    Complexity: sweeps times strategies; the sweeps are at most the depth of the graph, usually two or three.
    """
    spread = _Spread(setting, problem, wishes)
    changed = True
    while changed:
        forward = [spread.visit(i) for i in setting.members]
        backward = [spread.visit(i) for i in reversed(setting.members)]
        changed = any(forward) or any(backward)
    axes = range(len(setting.mesh.axes))
    names = [n for n in problem.names if not n.startswith("op:")]
    return {name: tuple(k.part if (k := spread.known.get((name, a))) else REPLICATED for a in axes) for name in names}

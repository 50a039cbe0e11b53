"""Layouts that the user writes beside some tensors: which tensors are meant, and whether the wishes agree.

An annotation is a pattern and a layout: `{"h.*.mlp.c_fc.weight": "RS1", "tokens": "S0?"}`. A pattern (with `*`, `?` and
`[]` as in file names) is held against the names of tensors and the labels of parameters. A `?` in a layout leaves
that mesh axis to the search. A name written out goes before a pattern.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from planner.errors import UsageError
from planner.graph import Tensor
from planner.hardware.document import parse_document
from planner.registry import did_you_mean
from planner.sharding.layout import REPLICATED, Part, TensorLayout, parse_layout, refusal
from planner.sharding.problem import Setting

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

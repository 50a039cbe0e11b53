"""GShard: the user gives the layouts of a few tensors, the program completes all others.

Annotated tensors and weights rest as asked (`Setting.annotations`). The rest is chosen exactly, so that work and
changes of layout take the least time; where annotations do not fit together, the layout is changed between them. If the
fastest completion exceeds the memory, memory gets a price. The propagation of the paper is `gshard_propagate.py`.

A mixture of experts needs nothing more: tokens annotated along their groups and expert weights along the experts make
dispatch and combine changes of layout from one cut to another, which are all-to-alls.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import TensorKind
from planner.sharding.annotations import Annotation, resolve
from planner.sharding.formulate import formulate
from planner.sharding.layout import REPLICATED
from planner.sharding.problem import Setting, ShardingProblem, rest_of
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.ilp import fastest
from planner.sharding.strategies import Strategy


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

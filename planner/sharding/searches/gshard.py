"""GShard's way: layouts of a few tensors from the user, of all others from the program.

Two ways to complete them. `gshard`: annotated tensors and weights rest as written, the rest is chosen exactly so that
work and changes of layout take the least time; where annotations do not fit together the layout is changed between
them. Where the fastest does not fit the memory, memory gets a price. `gshard-propagate`: the paper's propagation fixes
where every tensor rests, operators then follow; annotations that cannot both be respected are an error. Annotations
stand in `Setting.annotations`.

A mixture of experts needs nothing more: tokens annotated along their groups and expert weights along the experts make
dispatch and combine changes of layout from one cut to another, which are all-to-alls.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import TensorKind
from planner.sharding.annotations import Annotation, propagate, resolve
from planner.sharding.formulate import formulate
from planner.sharding.layout import REPLICATED, TensorLayout
from planner.sharding.problem import Setting, ShardingProblem, rest_of
from planner.sharding.searches import SEARCHES, ShardingAnswer
from planner.sharding.searches.ilp import fastest
from planner.sharding.strategies import Strategy


def _restricted(setting: Setting, problem: ShardingProblem, wishes: Mapping[str, Annotation]) -> ShardingProblem:
    """The problem with the annotated tensors resting as written; a network's input is read as written."""
    place = {name: v for v, name in enumerate(problem.names)}
    keep: dict[int, np.ndarray] = {}
    for name, wish in wishes.items():
        if setting.graph.tensors[name].kind is TensorKind.INPUT:
            _restrict_readers(setting, problem, wish, place, keep)
        elif name in place:
            choices = problem.choices[place[name]]
            options = [c for c, choice in enumerate(choices) if wish.allows(rest_of(choice).value)]
            if not options:
                raise _unmet(wish, "no such layout is open to it")
            keep[place[name]] = np.asarray(options)
    return problem.restricted(keep)


def _restrict_readers(
    setting: Setting,
    problem: ShardingProblem,
    wish: Annotation,
    place: Mapping[str, int],
    keep: dict[int, np.ndarray],
) -> None:
    whole = (REPLICATED,) * len(setting.mesh.axes)
    for i in sorted(set(setting.graph.consumers.get(wish.tensor, ())) & set(setting.members)):
        node = setting.graph.nodes[i]
        v = place[f"op:{node.key}"]
        spots = [p for p, name in enumerate(node.inputs) if name == wish.tensor]
        options = [
            c for c in keep.get(v, np.arange(problem.sizes[v])).tolist()
            if isinstance(s := problem.choices[v][c], Strategy)
            and all(wish.allows(dict(s.reads).get(p, whole)) for p in spots)
        ]  # fmt: skip
        if not options:
            raise _unmet(wish, f"{node.key} ({node.op}) cannot read it so")
        keep[v] = np.asarray(options)


def _unmet(wish: Annotation, why: str) -> InfeasibleError:
    return InfeasibleError(
        f"annotation {wish.origin!r} of {wish.tensor} cannot be met: {why}",
        where=wish.tensor,
        hint="choose another layout, or allow padded or coupled splits",
    )


def _completed(setting: Setting, problem: ShardingProblem, memory_bytes: float | None, method: str) -> ShardingAnswer:
    return fastest(
        setting,
        problem,
        memory_bytes,
        method=method,
        what="completion of the annotations",
        hint="annotate large weights with a split, or use a larger mesh",
    )


@SEARCHES.entry("gshard")
def gshard(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Annotated tensors as written, everything else as it is fastest within memory; the bound holds under them.

    Raises:
        UsageError: annotations that name no tensor, a layout that it cannot have, or two layouts of one tensor.
        InfeasibleError: an annotation that cannot be met, or too little memory.
    """
    problem = formulate(setting)
    left = _restricted(setting, problem, resolve(setting))
    return _completed(setting, left, memory_bytes, "annotations completed exactly")


@SEARCHES.entry("gshard-propagate")
def gshard_propagate(setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
    """Every tensor where propagation of the annotations puts it; the bound holds under those layouts.

    Raises:
        UsageError: as `gshard`.
        InfeasibleError: as `gshard`, and annotations that meet at an operator that cannot respect both.
    """
    problem = formulate(setting)
    wishes = resolve(setting)
    layouts: dict[str, TensorLayout] = propagate(setting, problem, wishes)
    fixed = {name: wish for name, wish in wishes.items() if name not in layouts}
    fixed |= {name: Annotation(name, layout, "propagation") for name, layout in layouts.items()}
    return _completed(setting, _restricted(setting, problem, fixed), memory_bytes, "annotations propagated")

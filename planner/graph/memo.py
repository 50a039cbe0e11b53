"""Results of functions of a graph alone, kept with the graph: computed once, gone when the graph goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from planner.graph.types import Graph

T = TypeVar("T")


def per_graph(function: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Make a function compute its result once for each graph object.

    The function must depend on the graph alone, and nobody may change what it returns.
    """
    key = _key(function)

    @functools.wraps(function)
    def remembered(graph: Graph) -> T:
        kept = vars(graph)
        if key not in kept:
            kept[key] = function(graph)
        result: T = kept[key]
        return result

    return remembered


def remember(graph: Graph, function: Callable[[Graph], T], result: T) -> None:
    """Give a graph the result of a function that is remembered, which then is not called."""
    vars(graph)[_key(function)] = result


def hand_on(source: Graph, target: Graph, functions: Iterable[Callable[[Graph], object]], *properties: str) -> None:
    """Give a graph those results of another that are known: for graphs that differ in nothing these depend on.

    Args:
        source: the graph that has them.
        target: the graph that gets them.
        functions: functions that are remembered.
        properties: names of cached properties of graphs.
    """
    known = vars(source)
    for key in (*map(_key, functions), *properties):
        if key in known:
            vars(target)[key] = known[key]


def _key(function: Callable[[Graph], object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"

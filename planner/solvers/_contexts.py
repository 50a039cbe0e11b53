"""Contexts of suffixes: where they begin, and which links each of their possible first stages would be reached over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.space.problem import StageProblem


@dataclass(frozen=True, eq=False)
class Contexts:
    """Contexts by number, ordered by where they begin.

    Attributes:
        at: [contexts] device at which the suffix begins.
        link: [contexts, R] class of link into a first stage with replicas[o].
        first: [W + 2] contexts that begin at a are first[a]..first[a + 1] - 1.
        after: [R, W + 1] context of a suffix at a whose stage before has replicas[o].
        follows: bool [R, contexts], whether a stage with replicas[o] can stand before a suffix of that context.
    """

    at: np.ndarray
    link: np.ndarray
    first: np.ndarray
    after: np.ndarray
    follows: np.ndarray


def contexts(problem: StageProblem) -> Contexts:
    """Group the stages before each boundary by the links they mean; O(R^2 W)."""
    count, width = len(problem.replicas), problem.slice_devices
    at: list[int] = []
    rows: list[np.ndarray] = []
    after = np.full((count, width + 1), -1, dtype=np.int64)
    for a in range(width + 1):
        fits = np.flatnonzero(problem.replicas <= a)
        if a == width:
            after[fits, a] = len(at)
            at.append(a)
            rows.append(np.full(count, -1, dtype=np.int64))
        elif len(fits):
            profiles, which = np.unique(problem.link[fits, :, a], axis=0, return_inverse=True)
            after[fits, a] = len(at) + which.reshape(-1)
            at.extend([a] * len(profiles))
            rows.extend(profiles)
    places = np.array(at, dtype=np.int64)
    follows = np.stack(
        [(after[o, places] == np.arange(len(places))) & (places >= r) for o, r in enumerate(problem.replicas)]
    )
    return Contexts(places, np.stack(rows), np.searchsorted(places, np.arange(width + 2)), after, follows)

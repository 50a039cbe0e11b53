"""The fewest layers that a stage must recompute to fit, in closed form: what it keeps falls with their number."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from planner.space.layers import Layers
from planner.space.problem import StageProblem
from planner.space.ranges import first_layers_bytes


@dataclass(frozen=True, eq=False)
class SomeLayers:
    """Stages of a problem that recompute the first of their layers, as many as it takes, but not all.

    Attributes:
        problem: a problem whose first way to recompute is nothing, and whose last one is all layers.
        layers: of its chain.
    """

    problem: StageProblem
    layers: Layers

    @functools.cached_property
    def _freed_bytes(self) -> np.ndarray:
        """[K, n, layers] most bytes of a micro-batch that a stage frees which begins with a block, up to each layer."""
        problem, ends = self.problem, self.layers.ends
        freed = (problem.saved_bytes[0] - problem.saved_bytes[-1])[:, :, ends - 1]
        inside = ends[None, :] > np.arange(problem.blocks)[:, None]
        return np.asarray(np.maximum.accumulate(np.where(inside, freed, 0.0), axis=2))

    def fewest(
        self, kind: np.ndarray, span: tuple[int, np.ndarray], needs: tuple[np.ndarray, ...], below_s: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fewest layers with which stages fit, and seconds of their recomputation; 0 and infinity where none is found.

        Args:
            kind: int64 [stages], the kind of each stage's place.
            span: the first block of all stages, and the last block of each.
            needs: [stages] micro-batches in flight, bytes needed beside activations, and bytes offered.
            below_s: [stages] seconds; slower recomputation is not looked for.

        O(stages log(layers)) at most; mostly the first number tried is the right one.
        """
        problem, (first, last) = self.problem, span
        in_flight, resident_bytes, room_bytes = needs
        lacking = (resident_bytes + in_flight * problem.saved_bytes[0][kind, first, last] - room_bytes) / in_flight
        before = int(self.layers.first[first])
        few, most = np.zeros(len(last), dtype=np.int64), self.layers.count(first, last + 1) - 1
        for each in np.unique(kind).tolist():
            rows = kind == each
            few[rows] = np.searchsorted(self._freed_bytes[each, first, before:], lacking[rows]) + 1
        layers, seconds = np.zeros(len(last), dtype=np.int64), np.full(len(last), np.inf)
        rows = np.flatnonzero(few <= most)
        while len(rows):
            kept_from = self.layers.ends[before + few[rows] - 1]
            repeat_s = problem.repeat_s[-1][kind[rows], first, kept_from - 1]
            faster = repeat_s < below_s[rows]
            rows, kept_from, repeat_s = rows[faster], kept_from[faster], repeat_s[faster]
            tables = problem.saved_bytes[-1], problem.working_bytes[-1]
            saved, working = first_layers_bytes(
                tables, problem.saved_bytes[0], (kind[rows],), (first, last[rows]), kept_from
            )
            fits = resident_bytes[rows] + working + in_flight[rows] * saved <= room_bytes[rows]
            layers[rows[fits]], seconds[rows[fits]] = few[rows[fits]], repeat_s[fits]
            rows = rows[~fits]
            few[rows] += 1
            rows = rows[few[rows] <= most[rows]]
        return layers, seconds

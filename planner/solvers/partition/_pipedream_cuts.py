"""All places where a layer graph can be cut, as arrays sorted by the compute time before the cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.graph.ideals import ancestor_bits, enumerate_ideals, prefix_ideals
from planner.solvers.partition import Deadline, OutOfTime
from planner.space.partition import BoundaryBytes, Frontiers, Layers

_CHUNK = 1 << 15


@dataclass(frozen=True, eq=False)
class Cuts:
    """S cuts, the empty one first and the full one last.

    Attributes:
        bits: uint64 [S, words] layers before the cut.
        compute_s: float64 [S] their compute time, ascending.
        weight_bytes: float64 [S].
        saved_bytes: float64 [S].
        cut_bytes: float64 [S] bytes that cross.
        complete: whether these are all cuts there are.
    """

    bits: np.ndarray
    compute_s: np.ndarray
    weight_bytes: np.ndarray
    saved_bytes: np.ndarray
    cut_bytes: np.ndarray
    complete: bool

    @property
    def count(self) -> int:
        """Number of cuts."""
        return len(self.bits)

    @functools.cached_property
    def nested(self) -> bool:
        """Whether each cut holds the one before it."""
        return not (self.bits[:-1] & ~self.bits[1:]).any()

    def subset(self, rows: np.ndarray) -> Cuts:
        """Some of the cuts, with the two ends in any case."""
        keep = np.unique(np.concatenate([rows, [0, self.count - 1]]))
        fields = (self.bits, self.compute_s, self.weight_bytes, self.saved_bytes, self.cut_bytes)
        bits, compute_s, weight_bytes, saved_bytes, cut_bytes = (field[keep] for field in fields)
        complete = self.complete and len(keep) == self.count
        return Cuts(bits, compute_s, weight_bytes, saved_bytes, cut_bytes, complete)

    def coarse(self, most: int) -> Cuts:
        """About that many cuts: those where little crosses, and some spread over the compute time."""
        if self.count <= most:
            return self
        spread = np.linspace(0, self.count - 1, most // 2).astype(np.int64)
        return self.subset(np.concatenate([spread, np.argsort(self.cut_bytes, kind="stable")[: most // 2]]))

    def layers_between(self, first: int, last: int) -> tuple[int, ...]:
        """Layers before cut `last` that are not before cut `first`."""
        members = np.unpackbits((self.bits[last] & ~self.bits[first]).view(np.uint8), bitorder="little")
        return tuple(np.flatnonzero(members).tolist())

    def line(self) -> np.ndarray:
        """Cuts on one chain from empty to full: each holds the one before."""
        found, sizes = [0], np.bitwise_count(self.bits).sum(axis=1)
        for row in range(1, self.count):
            if sizes[row] > sizes[found[-1]] and not (self.bits[found[-1]] & ~self.bits[row]).any():
                found.append(row)
        return np.array(found)


def all_cuts(layers: Layers, boundary: BoundaryBytes, frontiers: Frontiers, most: int, deadline: Deadline) -> Cuts:
    """Every cut of a layer graph; when there are too many, those along its topological order only.

    Too many are more than `most`, and more than can be listed and priced before the deadline.

    Complexity: O(cuts * (layers + edges)) in vectorised operations.
    """
    arcs = [(a, b) for a, b in layers.edges.tolist()]
    bits, figures = None, np.zeros((0, 6))
    with contextlib.suppress(OutOfTime):
        bits = enumerate_ideals(layers.count, arcs, most, check=deadline.check)
        if bits is not None:
            figures = _figures(layers, boundary, frontiers, bits, deadline.check)
    complete = len(figures) > 0
    if bits is None or not complete:
        bits = prefix_ideals(layers.count, [range(layers.count)])
        figures = _figures(layers, boundary, frontiers, bits, lambda: None)
    keep = np.flatnonzero(figures[:, 5] > 0)
    order = keep[np.lexsort((*bits[keep].T, figures[keep, 4], figures[keep, 0]))]
    compute_s, weight_bytes, saved_bytes, cut_bytes = (figures[order, i].copy() for i in range(4))
    return Cuts(bits[order], compute_s, weight_bytes, saved_bytes, cut_bytes, complete)


def _figures(
    layers: Layers, boundary: BoundaryBytes, frontiers: Frontiers, bits: np.ndarray, check: Callable[[], None]
) -> np.ndarray:
    """Compute time, weights, saved bytes, bytes at the cut, number of layers, whether allowed: float64 [rows, 6]."""
    _, after = layers.neighbours()
    ancestors = ancestor_bits(layers.count, [(a, b) for a, b in layers.edges.tolist()])
    parts = []
    for at in range(0, len(bits), _CHUNK):
        parts.append(_chunk_figures(layers, boundary, frontiers, bits[at : at + _CHUNK], after, ancestors, check))
    return np.concatenate(parts)


def _chunk_figures(
    layers: Layers,
    boundary: BoundaryBytes,
    frontiers: Frontiers,
    bits: np.ndarray,
    after: list[list[int]],
    ancestors: list[int],
    check: Callable[[], None],
) -> np.ndarray:
    octets = bits.view(np.uint8).reshape(len(bits), -1)
    inside = np.unpackbits(octets, axis=1, bitorder="little", count=layers.count).astype(bool)
    last = inside.copy()
    for layer, readers in enumerate(after):
        if readers:
            last[:, layer] &= ~inside[:, readers].any(axis=1)
    crossing = np.zeros(len(bits))
    for layer, readers in enumerate(after):
        check()
        if boundary is BoundaryBytes.RELEASED:
            carried = last[:, [layer, *_outliving(layer, readers, ancestors)]].any(axis=1)
        else:
            carried = inside[:, layer] & (~inside[:, readers]).any(axis=1)
        crossing[carried] += layers.output_bytes[layer]
    allowed = np.ones(len(bits), dtype=bool)
    if frontiers is Frontiers.FIRST_SOURCE:
        allowed = _walked(inside, last, ancestors)
    sums = inside.astype(np.float64) @ np.stack([layers.compute_s, layers.weight_bytes, layers.saved_bytes], axis=1)
    return np.column_stack([sums, crossing, inside.sum(axis=1), allowed])


def _walked(inside: np.ndarray, last: np.ndarray, ancestors: list[int]) -> np.ndarray:
    """Which cuts a walk from the first source comes to (`Frontiers.FIRST_SOURCE`), the two ends in any case."""
    count = len(ancestors)
    first = next(i for i, before in enumerate(ancestors) if not before)
    reached = [i == first or bool(ancestors[i] >> first & 1) for i in range(count)]
    allowed = last[:, reached].any(axis=1)
    for layer in range(count):
        if reached[layer]:
            continue
        kin = [end for end in range(count) if reached[end] and ancestors[end] & ancestors[layer]]
        allowed &= ~last[:, layer] | last[:, kin].any(axis=1)
    sizes = inside.sum(axis=1)
    return np.asarray(allowed | (sizes == 0) | (sizes == count))


def _outliving(layer: int, readers: list[int], ancestors: list[int]) -> list[int]:
    """Layers that depend on `layer` while some reader of it is neither one of them nor before them."""
    return [
        end
        for end, before in enumerate(ancestors)
        if before >> layer & 1 and any(reader != end and not before >> reader & 1 for reader in readers)
    ]

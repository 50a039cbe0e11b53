"""Which blocks of a stage are recomputed where only the first of its layers are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_PARTS = 4
"""Most blocks of one layer; a numbered module of more blocks is a stage of a network, not a layer."""

_CHOICE = re.compile(r"layers:([1-9]\d*)")
_NUMBERED = re.compile(r"(?:^|\.)\d+$")


def layers_of_choice(choice: str) -> int:
    """The number of layers in a choice of recomputation like `layers:4`; 0 for other choices."""
    match = _CHOICE.fullmatch(choice)
    return int(match[1]) if match else 0


def layer_starts(names: Sequence[str]) -> np.ndarray:
    """int64 [n], the first block of the layer that each block, by its name, is part of.

    Frameworks recompute by layers (Megatron's uniform method with one layer, FSDP's wrapped modules), also where a
    chain can be cut inside one: neighbouring blocks of one numbered module are a layer, others stand alone.
    """
    layers = [name.rpartition("[")[0] or name for name in names]
    starts = np.arange(len(layers))
    for layer, members in itertools.groupby(range(len(layers)), key=layers.__getitem__):
        blocks = list(members)
        if layer[-1:].isdigit() and len(blocks) <= MOST_PARTS:
            starts[blocks] = blocks[0]
    return starts


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """The layers of a chain of n blocks: its numbered modules, or single blocks where none is numbered.

    The last block is never the first of a layer: it may be the head, which is not recomputed.

    Attributes:
        first: int64 [n + 1], number of the first layer that ends after boundary p; the number of layers for none.
        started: int64 [n + 1], number of layers that begin before boundary p.
        ends: int64 [layers], the block after the last one of each layer.
    """

    first: np.ndarray
    started: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(names: Sequence[str], starts: np.ndarray | None = None) -> Layers:
        """The layers of blocks by their names.

        Args:
            names: of the blocks.
            starts: the first block of the layer of each block (`layer_starts`); by default from the names.
        """
        starts = layer_starts(names) if starts is None else starts
        count, block = len(starts), np.arange(len(starts))
        numbered = np.array([bool(_NUMBERED.search(name.partition("[")[0])) for name in names], bool)
        heads = (starts == block) & (block < count - 1)
        if len(names) == count and (heads & numbered).any():
            heads &= numbered
        places = np.flatnonzero(heads)
        ends = np.searchsorted(starts, starts[places], side="right")
        boundaries = np.arange(count + 1)
        return Layers(np.searchsorted(ends, boundaries, side="right"), np.searchsorted(places, boundaries), ends)

    def count(self, start: np.ndarray | int, stop: np.ndarray | int) -> np.ndarray:
        """Number of layers of which a stage of blocks `start` to `stop` (exclusive) has a part."""
        return np.asarray(np.maximum(self.started[stop] - self.first[start], 0))

    def kept_from(self, start: np.ndarray | int, stop: np.ndarray | int, layers: np.ndarray | int) -> np.ndarray:
        """The first block whose activations a stage keeps that recomputes the first so many layers.

        `stop` where it recomputes all of them: for 0 layers, or as many as it has or more.
        """
        last = np.clip(self.first[start] + np.asarray(layers) - 1, 0, max(len(self.ends) - 1, 0))
        some = (np.asarray(layers) > 0) & (np.asarray(layers) < self.count(start, stop))
        return np.where(some, self.ends[last], stop) if len(self.ends) else np.broadcast_to(stop, last.shape)

    def recomputed(self, start: int, stop: int, kept: Sequence[int]) -> int:
        """Number of layers that a stage recomputes which keeps some blocks whole; 0 for all layers.

        The inverse of `kept_from`. The last block of the chain does not count, nor do blocks outside of layers.
        """
        first_kept = min((b for b in kept if b < len(self.started) - 2), default=stop)
        layers = int(self.count(start, first_kept))
        return 0 if layers >= int(self.count(start, stop)) else layers

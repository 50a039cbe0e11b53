"""Weights of a stage in rows that replicas cut into equal shares, and which of them are gathered while a pass runs.

ZeRO 2 and 3 work block by block, as plans count it: the weights of the block at work and of the next one are gathered,
and the gradients of the one at work are added up in full, until another block begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from planner.runtime.device import TrainingDevice
from planner.runtime.groups import RankGroup
from planner.runtime.host import place_of
from planner.runtime.interpreter import Values

Finish = Callable[[str, torch.Tensor], torch.Tensor]
"""Completes a gradient, by weight, inside the tensor-parallel group (adds up partial sums)."""


class Row:
    """Some weights of a stage, one after the other in a flat tensor.

    Args:
        pieces: this rank's piece of each weight.
        device: where they lie, with all that is made of them.
        group: the replicas of these pieces, in an order that need not be that of the plan; None for a single one.
        apart: whether this rank's share lies apart, so that the shares of the others can be let go.

    Attributes:
        shapes: by weight.
        flat: the weights, with zeros up to a multiple of the replicas.
        apart: whether the share lies apart.
        share: this rank's share, a part of `flat` unless it lies apart.
        summed: gradients after the exchange between replicas: of the share, or of all weights; None before.
    """

    def __init__(self, pieces: Values, *, device: TrainingDevice, group: RankGroup | None, apart: bool) -> None:
        self._device, self._group, self.apart = device, group, apart
        ranks, self._place = (group.size, group.place) if group else (1, 0)
        self.shapes = {name: tuple(x.shape) for name, x in pieces.items()}
        self._sizes = {name: int(x.numel()) for name, x in pieces.items()}
        self._each = -(-sum(self._sizes.values()) // ranks)
        dtype = next((x.dtype for x in pieces.values()), torch.float32)
        self.flat = torch.zeros(self._each * ranks, dtype=dtype, device=device.name)
        self._fill(self.flat, pieces)
        self.share = self.share_of(self.flat).clone() if apart else self.share_of(self.flat)
        self.summed: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._views: Values = {}
        self._handed: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None

    def by_name(self, flat: torch.Tensor) -> Values:
        """Views of a flat tensor by weight."""
        views, at = {}, 0
        for name, shape in self.shapes.items():
            views[name] = flat[at : at + self._sizes[name]].view(shape)
            at += self._sizes[name]
        return views

    def leaves(self, flat: torch.Tensor) -> Values:
        """As `by_name`, each a leaf of autograd."""
        return {name: view.requires_grad_(True) for name, view in self.by_name(flat.data).items()}

    def packed(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values of all weights as a flat tensor."""
        return self._fill(self.flat.new_zeros(self.flat.numel()), values)

    def _fill(self, flat: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.shapes:
            flat[: sum(self._sizes.values())] = torch.cat([values[name].reshape(-1) for name in self.shapes])
        return flat

    def share_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share of a flat tensor."""
        return flat[self._place * self._each : (self._place + 1) * self._each]

    def gather(self) -> None:
        """Gather the weights from all replicas."""
        if self.apart and not self.flat.untyped_storage().size():
            self._device.resize(self.flat, self.flat.numel() * self.flat.element_size())
        if self._group is not None:
            self._group.gather_into(self.flat.data, self.share.detach())

    def release(self) -> None:
        """Let go of all but this rank's share, if that lies apart."""
        if self.apart:
            self._device.resize(self.flat, 0)

    def whole(self, share: torch.Tensor) -> Values:
        """By weight, what replicas hold the shares of. A collective call."""
        return self.by_name(share if self._group is None else self._group.gather(share).flatten())

    @property
    def has_sums(self) -> bool:
        """Whether gradients were added up since the last ones were taken."""
        return self._sums is not None

    def sums(self) -> Values:
        """By weight, where gradients of micro-batches are added up."""
        if self._sums is None:
            self._sums, self._spare = self._spare, None
            self._sums = torch.zeros_like(self.flat.data) if self._sums is None else self._sums.zero_()
            self._views = self.by_name(self._sums)
        return self._views

    def open_sums(self) -> None:
        """Begin sums for a while, at zero (`scatter_sums`)."""
        if self._sums is not None and not self._sums.untyped_storage().size():
            self._device.resize(self._sums, self._sums.numel() * self._sums.element_size())
            self._sums.zero_()

    def close_sums(self) -> None:
        """Let go of the sums, which stay where they are for those that refer to them."""
        self.sums()
        if self._sums is not None:
            self._device.resize(self._sums, 0)

    def scatter_sums(self, finish: Finish) -> None:
        """Add this rank's share of the sums over replicas to `summed`, and let go of the sums."""
        if self._sums is not None:
            self._complete(self._sums, finish)
            share = self._sums if self._group is None else self._group.scatter_sum(self._sums)
            self.summed = share if self.summed is None else self.summed.add_(share)
            self.close_sums()

    def take_sums(self, finish: Finish | None) -> torch.Tensor:
        """The sums as a flat tensor; the next ones begin anew.

        Args:
            finish: completes each; None where they are.
        """
        self.sums()
        flat = self._sums if self._sums is not None else self.flat
        if finish is not None:
            self._complete(flat, finish)
        self._sums, self._handed = None, flat
        return flat

    def _complete(self, flat: torch.Tensor, finish: Finish) -> None:
        for name, gradient in self.by_name(flat).items():
            finished = finish(name, gradient)
            if finished is not gradient:
                gradient.copy_(finished)

    def done(self, *, in_place: bool, reuse: bool) -> None:
        """Forget what was summed; the tensor that was taken last serves the next sums, if it held that or may go.

        Args:
            in_place: whether the share of the sum over replicas is a part of that tensor.
            reuse: false while that tensor is on its way.
        """
        handed, self._handed = self._handed, None
        if reuse and handed is not None and (in_place or handed is self.summed):
            self._spare = handed
        self.summed = None


class BlocksAtWork:
    """Which rows of a stage are gathered and summed while a pass runs.

    Operators tell of the names that they read before they run, in forward. In backward their nodes of autograd's graph
    do, which run in the opposite order: each before any other of its operator.

    Args:
        rows: a row for each block, in order of the blocks.
        names: for each name by which operators read a weight, its name in the rows.
        ahead: number of rows that are gathered before they are needed.
        finish: completes gradients.
    """

    def __init__(self, rows: Sequence[Row], names: Mapping[str, str], ahead: int, finish: Finish) -> None:
        self._rows, self._ahead, self._finish = rows, ahead, finish
        row_of = {weight: k for k, row in enumerate(rows) for weight in row.shapes}
        self._row_of = {name: row_of[weight] for name, weight in names.items() if weight in row_of}
        self._stored = {place_of(row.flat): k for k, row in enumerate(rows)}
        self._gathered, self._summing = set[int](), set[int]()
        self._backward = self._sums = False
        for row in rows:
            row.close_sums()
            row.release()

    def begin(self, *, backward: bool, sums: bool) -> None:
        """Begin a pass.

        Args:
            backward: whether blocks run from the last to the first.
            sums: whether gradients of weights are added up.
        """
        self._backward, self._sums = backward, sums

    def end(self) -> None:
        """End a pass: scatter the gradients, let go of the weights."""
        self._close(range(0))

    def before(self, names: Iterable[str]) -> None:
        """Note what an operator reads, before it runs."""
        if needed := self._rows_of(names):
            self._enter(needed)

    def again(self, names: Iterable[str]) -> None:
        """Note what an operator reads that runs again for the backward of another, whose rows stay as they are."""
        self._gather(sorted(self._rows_of(names)))

    def after(self, names: Iterable[str], outputs: Iterable[str], results: Iterable[object]) -> None:
        """Note what an operator made. A result that is a view of a weight stands for the weight from now on."""
        needed = self._rows_of(names)
        for name, x in zip(outputs, results, strict=False):
            if needed and isinstance(x, torch.Tensor):
                if (stored := self._stored.get(place_of(x))) is not None:
                    self._row_of[name] = stored
                if x.grad_fn is not None:
                    x.grad_fn.register_prehook(lambda gradients: self._enter(needed, sums=self._sums))

    def sum_up(self, name: str) -> None:
        """Make ready the sum of the gradients of a weight."""
        self._enter(self._rows_of([name]), sums=True)

    def _rows_of(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset(self._row_of[name] for name in names if name in self._row_of)

    def _enter(self, needed: frozenset[int], *, sums: bool = False) -> None:
        at, step = (min(needed), -1) if self._backward else (max(needed), 1)
        ahead = (at + step * (k + 1) for k in range(self._ahead))
        wanted = [*sorted(needed), *(k for k in ahead if 0 <= k < len(self._rows))]
        self._close(wanted, needed)
        self._gather(wanted)
        for k in sorted(needed - self._summing) if sums else ():
            self._rows[k].open_sums()
            self._summing.add(k)

    def _gather(self, wanted: Iterable[int]) -> None:
        for k in wanted:
            if self._rows[k].apart and k not in self._gathered:
                self._rows[k].gather()
                self._gathered.add(k)

    def _close(self, gathered: Iterable[int], summing: Iterable[int] = ()) -> None:
        """Close all rows but those that stay gathered, and those whose gradients are being added up."""
        for k in sorted(self._summing.difference(summing)):
            self._rows[k].scatter_sums(self._finish)
            self._summing.remove(k)
        for k in sorted(self._gathered.difference(gathered)):
            self._rows[k].release()
            self._gathered.remove(k)

"""The weights of one stage on one rank: versions, gradients and their reduction over replicas, ZeRO, updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from planner.errors import PlanError
from planner.exchange import GATHERED_UNITS
from planner.runtime.corrections import DRIFT, UPDATES, Corrections
from planner.runtime.device import HOST, TrainingDevice
from planner.runtime.groups import RankGroup
from planner.runtime.interpreter import Values
from planner.runtime.rows import BlocksAtWork, Finish, Row
from planner.schedules.types import OptimizerScaling, StageCorrection

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
"""Makes the optimizer for a list of weights; where ZeRO shards its state, its rule must work element by element."""


class StageWeights:
    """Weights of one stage as one rank trains them.

    All weights lie one after the other in a row. With ZeRO-1 and above it is cut into as many equal shares as
    there are replicas, and a rank updates its own share. With ZeRO-2 and above each block has a row of its own:
    gradients are reduce-scattered after the backward of a block, with ZeRO-3 its weights are gathered for every pass
    only. That is so where all replicas run the same actions (`together`) and one version is kept; otherwise both happen
    once an iteration.

    Args:
        pieces: this rank's piece of each weight.
        device: where they lie, with all that is made of them.
        group: the replicas of these pieces, in an order that need not be that of the plan; None for a single one.
        zero: ZeRO stage.
        together: whether the replicas run the same actions in the same order.
        make: makes the optimizer.
        stash: versions that are kept for micro-batches in flight; with 1 every pass reads the newest weights.
        finish: completes a gradient inside the tensor-parallel group (adds up partial sums).
        corrected: corrections for stale weights, and momentum and learning rate for the batch of an update; None
            without corrections. Not with ZeRO, nor with several versions.
        blocks: the weights of each block, each once.
        names: for each name by which operators read a weight, its name in `pieces`.

    Attributes:
        at_work: the blocks whose weights and gradients are there during a pass; None where those of all are.
    """

    def __init__(
        self, pieces: Values, *, device: TrainingDevice, group: RankGroup | None, zero: int, together: bool,
        make: MakeOptimizer, stash: int = 1, finish: Finish,
        corrected: tuple[StageCorrection, OptimizerScaling | None] | None = None,
        blocks: Sequence[Sequence[str]] = (), names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._device, self._group = device, group
        self.zero = zero if group is not None and group.size > 1 else 0
        by_block = self.zero >= 2 and together and stash == 1
        self._finish, self._stash = finish, stash
        self.shapes = {name: tuple(x.shape) for name, x in pieces.items()}
        self.version = 0
        self._kept: dict[int, Values] = {}
        self._launched: tuple[Callable[[], None], torch.Tensor] | None = None
        parts = [{name: pieces[name] for name in block if name in pieces} for block in blocks] if by_block else []
        self.rows = [
            Row(part, device=device, group=group, apart=by_block and self.zero >= 3)
            for part in [part for part in parts if part] or [pieces]
        ]
        self._masters = {name: x for row in self.rows for name, x in row.leaves(row.flat).items()}
        self.leaves = {name: x for row in self.rows for name, x in row.leaves(row.flat).items()}
        if stash > 1:
            self.leaves = self._leaves(self.flat.clone())
        self._kept[0] = self.leaves
        optimized = [leaf for leaf, _ in self._optimized()]
        self.optimizer = make(optimized) if self.shapes and any(x.numel() for x in optimized) else None
        if corrected is not None and self.zero:
            raise PlanError("weights are corrected for delay and sharded", where="schedule", hint="use ZeRO 0")
        self.corrections = Corrections(*corrected, self.flat, self._masters, self.optimizer) if corrected else None
        self.at_work = BlocksAtWork(self.rows, names or {}, GATHERED_UNITS - 1, finish) if by_block else None

    @property
    def flat(self) -> torch.Tensor:
        """The weights of the first row: all of them, but with ZeRO 2 and 3."""
        return self.rows[0].flat

    def _leaves(self, flat: torch.Tensor) -> Values:
        return self.rows[0].leaves(flat)

    def read(self, version: int = -1) -> Values:
        """The weights that a pass reads: the newest, or those after `version` updates.

        Raises:
            PlanError: that version is not kept any longer, or not made yet.
        """
        if version < 0 or version == self.version or self._stash == 1:
            return self.leaves
        if version not in self._kept:
            raise PlanError(f"weights after {version} updates are not kept", where="schedule", hint="plan again")
        return self._kept[version]

    @contextmanager
    def computing(self, *, forward: bool, sums: bool) -> Iterator[None]:
        """Context of a pass: the weights are in place, predicted ones where the plan corrects for delay.

        Args:
            forward: whether the pass runs from the first operator to the last.
            sums: whether it adds up gradients of weights.
        """
        if self.at_work is not None:
            self.at_work.begin(backward=not forward, sums=sums)
            yield
            self.at_work.end()
        elif self.corrections is not None:
            with self.corrections.forward() if forward else self.corrections.backward():
                yield
        else:
            yield

    def accumulators(self) -> Values:
        """By weight, where gradients of micro-batches are added up; some only while their block works."""
        return {name: view for row in self.rows for name, view in row.sums().items()}

    def add(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Accumulate those of some gradients that are of these weights."""
        for row in self.rows:
            own = {name: x for name in row.shapes if (x := gradients.get(name)) is not None}
            for name, gradient in own.items():
                if self.at_work is not None:
                    self.at_work.sum_up(name)
                row.sums()[name].add_(gradient)

    def sum_up(self) -> None:
        """Take the accumulated gradients as the sum over replicas."""
        for row in self.rows:
            row.summed = row.take_sums(None)

    def launch(self, number: int = -1) -> None:
        """Begin the all-reduce of gradients without waiting; only waves of updates have numbers (`WaveWeights`)."""
        if self.at_work is None:
            flat = self.rows[0].take_sums(self._finish)
            summed = self._group.begin_sum(flat) if self._group is not None and not self.zero else lambda: None
            self._launched = summed, flat

    def exchange(self, number: int = -1) -> None:
        """Sum the gradients over replicas, or wait for the sum that `launch` began."""
        if self.at_work is not None:
            return
        if self._launched is not None:
            wait, flat = self._launched
            self._launched = None
            wait()
        else:
            flat = self.rows[0].take_sums(self._finish)
            if self._group is not None and not self.zero:
                self._group.sum(flat)
        if self.zero and self._group is not None:
            flat = self._group.scatter_sum(flat, in_place=self.zero == 1)
        self.rows[0].summed = flat

    def update(self, factor: float = 1.0) -> None:
        """Apply the summed gradients, multiplied by a factor, and begin the next version.

        A single replica need not have called `exchange`.
        """
        self.version += 1
        if self.rows[0].summed is None and self._group is None and self.rows[0].has_sums:
            self.exchange()
        if self.optimizer is None or all(row.summed is None for row in self.rows):
            self._kept[self.version] = self.leaves
            return
        for row in self.rows:
            if row.summed is not None and factor != 1.0:
                row.summed.mul_(factor)
            if self.zero:
                row.share.grad = row.summed
            elif row.summed is not None:
                for name, gradient in row.by_name(row.summed).items():
                    self._masters[name].grad = gradient
        with self.corrections.update() if self.corrections else nullcontext(), self._device.updating():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for row in self.rows:
            row.done(in_place=self.zero == 1, reuse=self._launched is None)
            if self.zero and not row.apart:
                row.gather()
        if self._stash > 1:
            self.leaves = self._kept[self.version] = self._leaves(self.flat.clone())
            self._kept = {version: kept for version, kept in self._kept.items() if version > self.version - self._stash}

    def drain(self) -> None:
        """End an iteration, or as many as orders span: finish what is under way, and count versions anew."""
        self.version, self._kept = 0, {0: self.leaves}

    def whole_gradient(self) -> Values:
        """The summed gradients by name, gathered over replicas. A collective call."""
        return {
            name: x
            for row in self.rows
            if row.summed is not None
            for name, x in (row.whole(row.summed) if self.zero else row.by_name(row.summed)).items()
        }

    def state(self) -> tuple[Values, dict[str, Values]]:
        """Weights, and the optimizer's state by kind and weight: this rank's pieces, gathered over replicas.

        State that is one number for all weights stands under the name "".
        """
        values: Values = {}
        for row in self.rows:
            if row.apart:
                values.update(row.whole(row.share.detach()))
            else:
                values.update({name: self.leaves[name].detach().clone() for name in row.shapes})
        kinds: dict[str, Values] = self.corrections.state() if self.corrections else {}
        states = self.optimizer.state if self.optimizer is not None else {}
        for leaf, by_name in self._optimized():
            for kind, value in states.get(leaf, {}).items():
                shaped = isinstance(value, torch.Tensor) and value.shape == leaf.shape and value.dim()
                kinds.setdefault(kind, {}).update(by_name(value) if shaped else {"": torch.as_tensor(value)})
        return values, kinds

    def restore(self, values: Mapping[str, torch.Tensor], kinds: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set weights and optimizer state as `state` returned them."""
        for row in self.rows:
            flat = row.packed(values)
            (row.share if row.apart else row.flat).data.copy_(row.share_of(flat) if row.apart else flat)
        if self._stash > 1:
            self.leaves = self._leaves(self.flat.clone())
        self.drain()
        if self.corrections is not None:
            self.corrections.restore(kinds)
        if self.optimizer is None:
            return
        for kind, held in ((kind, held) for kind, held in kinds.items() if kind not in (DRIFT, UPDATES)):
            if "" in held:
                for leaf, device in self._counted():
                    self.optimizer.state[leaf][kind] = held[""].clone().to(device)
            elif self.zero:
                for row in self.rows:
                    self.optimizer.state[row.share][kind] = row.share_of(row.packed(held)).clone()
            else:
                for name, leaf in self._masters.items():
                    self.optimizer.state[leaf][kind] = self._device.place(held[name].clone())

    def _optimized(self) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], Values]]]:
        """What the optimizer updates, each with what makes values by weight of a tensor that is shaped like it."""
        if self.zero:
            yield from ((row.share, row.whole) for row in self.rows)
        else:
            yield from ((leaf, partial(_named, name)) for name, leaf in self._masters.items())

    def _counted(self) -> list[tuple[torch.Tensor, torch.device]]:
        """What the optimizer updates, and where its numbers of steps are: on the device only if it is fused there."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [
            (leaf, leaf.device if group.get("fused") or group.get("capturable") else HOST)
            for group in groups
            for leaf in group["params"]
        ]


def _named(name: str, x: torch.Tensor) -> Values:
    return {name: x}

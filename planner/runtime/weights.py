"""The weights of one stage on one rank: versions, gradients and their reduction over replicas, ZeRO, updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from planner.errors import PlanError
from planner.runtime.corrections import DRIFT, UPDATES, Corrections
from planner.runtime.device import HOST, Device
from planner.runtime.groups import Group
from planner.runtime.interpreter import Values
from planner.schedules.types import OptimizerScaling, StageCorrection

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
"""Makes the optimizer for a list of weights; where ZeRO shards its state, its rule must work element by element."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Summed gradients of all weights in a row, and the same by weight as views into it."""

    flat: torch.Tensor
    views: Values


class StageWeights:
    """Weights of one stage as one rank trains them.

    All weights lie one after the other in a flat tensor. With ZeRO-1 and above it is cut into as many equal shares as
    there are replicas, and a rank updates its own share. With ZeRO-2 and above gradients are reduce-scattered after
    every backward, with ZeRO-3 weights are gathered for every pass only, where all replicas run the same actions
    (`together`); otherwise both happen once an iteration.

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
    """

    def __init__(
        self, pieces: Values, *, device: Device, group: Group | None, zero: int, together: bool, make: MakeOptimizer,
        stash: int = 1, finish: Callable[[str, torch.Tensor], torch.Tensor],
        corrected: tuple[StageCorrection, OptimizerScaling | None] | None = None,
    ) -> None:  # fmt: skip
        self._device, self._group = device, group
        ranks, place = (group.size, group.place) if group else (1, 0)
        self._ranks, self._place = ranks, place
        self.zero = zero if ranks > 1 else 0
        self._together, self._finish, self._stash = together, finish, stash
        self.shapes = {name: tuple(x.shape) for name, x in pieces.items()}
        self._sizes = {name: x.numel() for name, x in pieces.items()}
        self.version = 0
        self._kept: dict[int, Values] = {}
        self._accumulated: _Sums | None = None
        self._handed: _Sums | None = None
        self._spare: _Sums | None = None
        self._launched: tuple[Callable[[], None], torch.Tensor] | None = None
        self.summed: torch.Tensor | None = None
        dtype = next((x.dtype for x in pieces.values()), torch.float32)
        self._total = sum(self._sizes.values())
        each = -(-self._total // ranks)
        self._padded = each * ranks
        self.flat = torch.zeros(self._padded, dtype=dtype, device=device.name)
        if pieces:
            self.flat[: self._total] = torch.cat([x.reshape(-1) for x in pieces.values()])
        share = self.flat[place * each : (place + 1) * each]
        self.share = share.clone() if self.zero >= 3 else share
        self._masters = self._leaves(self.flat)
        self.leaves = self._leaves(self.flat.clone() if stash > 1 else self.flat)
        self._kept[0] = self.leaves
        optimized = self._optimized()
        self.optimizer = make(optimized) if optimized and self._total else None
        if corrected is not None and self.zero:
            raise PlanError("weights are corrected for delay and sharded", where="schedule", hint="use ZeRO 0")
        self.corrections = Corrections(*corrected, self.flat, self._masters, self.optimizer) if corrected else None

    def _leaves(self, flat: torch.Tensor) -> Values:
        """Weights by name, as views into a flat tensor."""
        leaves, at = {}, 0
        for name, shape in self.shapes.items():
            view = flat.data[at : at + self._sizes[name]].view(shape)
            leaves[name] = view.requires_grad_(True)
            at += self._sizes[name]
        return leaves

    def gather(self) -> None:
        """All-gather the weights for a pass (ZeRO-3)."""
        if self.zero >= 3 and self._together:
            if not self.flat.untyped_storage().size():
                self._device.resize(self.flat, self._padded * self.flat.element_size())
            self._all_gather()

    def release(self) -> None:
        """Free the shares of other ranks (ZeRO-3)."""
        if self.zero >= 3 and self._together:
            self._device.resize(self.flat, 0)

    def _all_gather(self) -> None:
        if self._group is not None:
            self._group.gather_into(self.flat.data, self.share.detach())

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

    def computing(self, *, forward: bool) -> AbstractContextManager[None]:
        """Context in which the weights for a pass are in place: predicted ones, where the plan corrects for delay."""
        if self.corrections is None:
            return nullcontext()
        return self.corrections.forward() if forward else self.corrections.backward()

    def accumulators(self) -> Values:
        """By weight, where the gradients of micro-batches are added up: views into a row like that of the weights."""
        return self._sums().views

    def _sums(self) -> _Sums:
        if self._accumulated is None:
            if self._spare is not None:
                self._accumulated, self._spare = self._spare, None
                self._accumulated.flat.zero_()
            else:
                flat = torch.zeros_like(self.flat.data)
                self._accumulated = _Sums(flat, self._by_name(flat))
        return self._accumulated

    def add(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Accumulate those of some gradients that are of these weights."""
        own = {name: x for name, x in gradients.items() if x is not None and name in self.shapes}
        if own:
            sums = self.accumulators()
            for name, gradient in own.items():
                sums[name].add_(gradient)

    def scatter(self) -> None:
        """Reduce-scatter the gradients after a backward (ZeRO-2 and above)."""
        if self.zero >= 2 and self._together:
            share = self._scattered(self._flat_gradient())
            self._handed = None
            self.summed = share if self.summed is None else self.summed.add_(share)

    def sum_up(self) -> None:
        """Take the accumulated gradients as the sum over replicas."""
        self.summed = self._flat_gradient(complete=True)

    def _flat_gradient(self, *, complete: bool = False) -> torch.Tensor:
        """The accumulated gradients as a flat tensor, complete inside the tensor-parallel group; begins new ones."""
        sums = self._sums()
        for name, gradient in () if complete else sums.views.items():
            finished = self._finish(name, gradient)
            if finished is not gradient:
                gradient.copy_(finished)
        self._accumulated, self._handed = None, sums
        return sums.flat

    def _done_with(self, summed: torch.Tensor) -> None:
        """Use a row of summed gradients again for the next ones, if it is the one that was handed out last."""
        handed, self._handed = self._handed, None
        if handed is not None and self._launched is None and (handed.flat is summed or self.zero == 1):
            self._spare = handed

    def _scattered(self, flat: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """This rank's share of the sum over replicas, a part of the row that was given if that is in place."""
        return flat if self._group is None else self._group.scatter_sum(flat, in_place=in_place)

    def _gathered(self, share: torch.Tensor) -> torch.Tensor:
        """The shares of all replicas one after the other."""
        return share if self._group is None else self._group.gather(share).flatten()

    def launch(self, number: int = -1) -> None:
        """Begin the all-reduce of gradients without waiting; only waves of updates have numbers (`WaveWeights`)."""
        flat = self._flat_gradient()
        summed = self._group.begin_sum(flat) if self._group is not None and not self.zero else lambda: None
        self._launched = summed, flat

    def exchange(self, number: int = -1) -> None:
        """Sum the gradients over replicas, or wait for the sum that `launch` began."""
        if self._launched is not None:
            wait, flat = self._launched
            self._launched = None
            wait()
        elif self.zero >= 2 and self._together:
            return
        else:
            flat = self._flat_gradient()
            if self._group is not None and not self.zero:
                self._group.sum(flat)
        self.summed = self._scattered(flat, in_place=self.zero == 1) if self.zero else flat

    def update(self, factor: float = 1.0) -> None:
        """Apply the summed gradients, multiplied by a factor, and begin the next version.

        A single replica need not have called `exchange`.
        """
        self.version += 1
        if self.summed is None and self._ranks == 1 and self._accumulated is not None:
            self.exchange()
        if self.summed is not None and factor != 1.0:
            self.summed.mul_(factor)
        if self.optimizer is None or self.summed is None:
            self._kept[self.version] = self.leaves
            return
        if self.zero:
            self.share.grad = self.summed
        else:
            at = 0
            for name, leaf in self._masters.items():
                leaf.grad = self.summed[at : at + self._sizes[name]].view(leaf.shape)
                at += self._sizes[name]
        with self.corrections.update() if self.corrections else nullcontext(), self._device.updating():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._done_with(self.summed)
        self.summed = None
        if self.zero in (1, 2) or (self.zero and not self._together):
            self._all_gather()
        if self._stash > 1:
            self.leaves = self._kept[self.version] = self._leaves(self.flat.clone())
            self._kept = {version: kept for version, kept in self._kept.items() if version > self.version - self._stash}

    def drain(self) -> None:
        """End an iteration, or as many as orders span: finish what is under way, and count versions anew."""
        self.version, self._kept = 0, {0: self.leaves}

    def whole_gradient(self) -> Values:
        """The summed gradients by name, gathered over replicas. A collective call."""
        if self.summed is None:
            return {}
        return self._by_name(self._gathered(self.summed) if self.zero else self.summed)

    def _by_name(self, flat: torch.Tensor) -> Values:
        pieces, at = {}, 0
        for name, shape in self.shapes.items():
            pieces[name] = flat[at : at + self._sizes[name]].view(shape)
            at += self._sizes[name]
        return pieces

    def state(self) -> tuple[Values, dict[str, Values]]:
        """Weights, and the optimizer's state by kind and weight: this rank's pieces, gathered over replicas.

        State that is one number for all weights stands under the name "".
        """
        self.gather()
        values = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        self.release()
        kinds: dict[str, Values] = self.corrections.state() if self.corrections else {}
        if self.optimizer is None:
            return values, kinds
        if not self.zero:
            for name, leaf in self._masters.items():
                for kind, value in self.optimizer.state.get(leaf, {}).items():
                    shaped = isinstance(value, torch.Tensor) and value.shape == leaf.shape and value.dim()
                    kinds.setdefault(kind, {})[name if shaped else ""] = torch.as_tensor(value)
            return values, kinds
        for kind, value in self.optimizer.state.get(self.share, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == self.share.shape:
                kinds[kind] = self._by_name(self._gathered(value))
            else:
                kinds[kind] = {"": torch.as_tensor(value)}
        return values, kinds

    def restore(self, values: Mapping[str, torch.Tensor], kinds: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set weights and optimizer state as `state` returned them."""
        flat = self._row(values)
        self.gather()
        self.flat.data.copy_(flat)
        each = self._padded // self._ranks
        if self.zero >= 3:
            self.share.data.copy_(flat[self._place * each : (self._place + 1) * each])
        if self._stash > 1:
            self.leaves = self._leaves(self.flat.clone())
        self.version, self._kept = 0, {0: self.leaves}
        self.release()
        if self.corrections is not None:
            self.corrections.restore(kinds)
        if self.optimizer is None:
            return
        for kind, held in ((kind, held) for kind, held in kinds.items() if kind not in (DRIFT, UPDATES)):
            if "" in held:
                for leaf, device in self._counted():
                    self.optimizer.state[leaf][kind] = held[""].clone().to(device)
            elif self.zero:
                row = self._row(held)[self._place * each : (self._place + 1) * each]
                self.optimizer.state[self.share][kind] = row.clone()
            else:
                for name, leaf in self._masters.items():
                    self.optimizer.state[leaf][kind] = self._device.place(held[name].clone())

    def _counted(self) -> list[tuple[torch.Tensor, torch.device]]:
        """What the optimizer updates, and where its numbers of steps are: on the device only if it is fused there."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [
            (leaf, leaf.device if group.get("fused") or group.get("capturable") else HOST)
            for group in groups
            for leaf in group["params"]
        ]

    def _optimized(self) -> list[torch.Tensor]:
        return [self.share] if self.zero else list(self._masters.values())

    def _row(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        flat = self.flat.new_zeros(self._padded)
        if self.shapes:
            flat[: self._total] = torch.cat([values[name].reshape(-1) for name in self.shapes])
        return flat

"""Corrections for stale weights, so that asynchronous pipelines converge: the plan's `corrections`, stage by stage.

While a pass runs, predicted weights stand in the memory of the newest ones. Autograd keeps no copy of them, so a
backward reads the weights that stand there when it runs, as schedules that keep one version want it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from planner.errors import PlanError
from planner.runtime.interpreter import Values
from planner.schedules.types import OptimizerScaling, StageCorrection

DRIFT, UPDATES = "correction_drift", "correction_updates"
"""State kept beside the optimizer's: running mean of the changes by updates, and number of updates."""


class Corrections:
    """The corrections of one stage, on its weights in a row.

    Args:
        correction: the plan's corrections of the stage.
        scaling: momentum and learning rate for the batch of an update; None where they stay.
        flat: the weights as a flat tensor, which the optimizer changes in place.
        masters: the same weights by name, as the optimizer has them, in the order of the flat tensor.
        optimizer: its momentum is the velocity; None where the stage trains nothing. Its learning rates are read at
            every use, so that a learning-rate schedule may change them.

    Raises:
        PlanError: velocities are needed, but the optimizer has no momentum.
    """

    def __init__(
        self, correction: StageCorrection, scaling: OptimizerScaling | None, flat: torch.Tensor,
        masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None,
    ) -> None:  # fmt: skip
        self._correction, self._flat, self._masters = correction, flat.data, dict(masters)
        self._optimizer, self._groups = optimizer, list(optimizer.param_groups) if optimizer else []
        self._compensates = correction.velocity_factor != 1.0 or correction.gradient_factor != 0.0
        self._drift, self._updates = torch.zeros_like(self._flat), 0
        self._scales = [1.0 if scaling is None else _scaled(group, scaling) for group in self._groups]
        predicts = self._compensates or correction.forward_horizon or correction.backward_horizon
        if predicts and any("momentum" not in group for group in self._groups):
            raise PlanError(
                "weights are predicted by their velocity, which this optimizer does not keep",
                where="schedule.corrections",
                hint="train with SGD and momentum",
            )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which the weights for a forward are in place."""
        with self._shifted(self._predicted(self._correction.forward_horizon)):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context in which the weights for a backward are in place."""
        back = self._predicted(self._correction.backward_horizon)
        if self._correction.velocity_decay:
            back = self._drift * (self._correction.forward_delay - self._correction.backward_delay)
        with self._shifted(back):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context for the optimizer's step: sets its learning rate, and compensates for the delay afterwards."""
        usual = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates(), strict=True):
            group["lr"] = rate
        before, gradients = self._flat.clone(), [x.grad for x in self._masters.values()]
        yield
        correction = self._correction
        if self._compensates:
            self._flat.sub_((correction.velocity_factor - 1.0) * self._row(self._velocities(), by_rate=True))
            self._flat.sub_(correction.gradient_factor * self._row(gradients, by_rate=True))
        for group, rate in zip(self._groups, usual, strict=True):
            group["lr"] = rate
        self._updates += 1
        if correction.velocity_decay:
            self._drift.mul_(correction.velocity_decay).add_((self._flat - before) * (1.0 - correction.velocity_decay))

    def state(self) -> dict[str, Values]:
        """State for a checkpoint, by kind and weight; a single number stands under the name ""."""
        drifts, at = {}, 0
        for name, master in self._masters.items():
            drifts[name] = self._drift[at : at + master.numel()].view(master.shape).clone()
            at += master.numel()
        return {DRIFT: drifts, UPDATES: {"": torch.tensor(float(self._updates))}}

    def restore(self, kinds: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set that state; missing kinds begin anew."""
        self._drift = self._row([kinds.get(DRIFT, {}).get(name) for name in self._masters])
        self._updates = int(kinds.get(UPDATES, {}).get("", torch.zeros(())))

    def _rates(self) -> list[float]:
        """Learning rates of this update, by parameter group, annealed over the plan's `annealing_steps`."""
        first, steps = self._correction.learning_rate_factor, self._correction.annealing_steps
        factor = first ** (1.0 - min(self._updates / steps, 1.0)) if steps else first
        return [group["lr"] * scale * factor for group, scale in zip(self._groups, self._scales, strict=True)]

    def _predicted(self, horizon: int) -> torch.Tensor | None:
        """Tensor to subtract from the weights to predict them `horizon` updates ahead; None for no prediction."""
        if not horizon:
            return None
        return horizon * self._row(self._velocities(), by_rate=True, rates=self._rates())

    def _velocities(self) -> list[torch.Tensor | None]:
        states = self._optimizer.state if self._optimizer else {}
        return [states.get(x, {}).get("momentum_buffer") for x in self._masters.values()]

    def _row(
        self, parts: Sequence[torch.Tensor | None], *, by_rate: bool = False, rates: Sequence[float] = ()
    ) -> torch.Tensor:
        """Flatten tensors that are shaped like the weights, None as zeros.

        Args:
            parts: one for each weight.
            by_rate: whether each is multiplied by the learning rate of its parameter group.
            rates: these rates by group, where they are not the current ones.
        """
        current = list(rates) or [float(group["lr"]) for group in self._groups]
        rate_of = {id(x): rate for group, rate in zip(self._groups, current, strict=True) for x in group["params"]}
        row, at = torch.zeros_like(self._flat), 0
        for master, part in zip(self._masters.values(), parts, strict=True):
            if part is not None:
                rate = rate_of.get(id(master), 0.0) if by_rate else 1.0
                row[at : at + master.numel()] = rate * part.detach().reshape(-1)
            at += master.numel()
        return row

    @contextmanager
    def _shifted(self, by: torch.Tensor | None) -> Iterator[None]:
        if by is None:
            yield
            return
        before = self._flat.clone()
        self._flat.sub_(by)
        try:
            yield
        finally:
            self._flat.copy_(before)


def _scaled(group: dict[str, float], scaling: OptimizerScaling) -> float:
    """Set a group's momentum for the batch of an update; returns the factor of its learning rate.

    Without momentum the learning rate is in proportion to the batch.
    """
    if not group.get("momentum"):
        return scaling.batch / scaling.reference_batch
    group["momentum"] = scaling.momentum
    return scaling.learning_rate_factor

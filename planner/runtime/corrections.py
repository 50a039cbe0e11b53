"""What a stage does so that training with old weights converges, as the plan's `corrections` say.

Predicted weights lie in the place of the newest while a pass runs: autograd keeps no copy of them, so a backward reads
what lies there when it runs, as the schedules that keep one version mean it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planner.errors import PlanError
from planner.schedules.types import OptimizerScaling, StageCorrection


class Corrections:
    """The corrections of one stage, on its weights in a row.

    Args:
        said: of the stage.
        scaling: momentum and learning rate for the batch of an update; None where they stay.
        flat: the weights, which the optimizer changes in place.
        masters: the same weights by name, as the optimizer has them, in the order of the row.
        optimizer: its momentum is the velocity; None where the stage trains nothing.

    Raises:
        PlanError: velocities are needed, and the optimizer has none.
    """

    def __init__(
        self, said: StageCorrection, scaling: OptimizerScaling | None, flat: torch.Tensor,
        masters: list[torch.Tensor], optimizer: torch.optim.Optimizer | None,
    ) -> None:  # fmt: skip
        self._said, self._flat, self._masters, self._optimizer = said, flat.data, masters, optimizer
        self._drift, self._updates = torch.zeros_like(self._flat), 0
        self._rates = [float(group["lr"]) for group in optimizer.param_groups] if optimizer else []
        if scaling is not None:
            self._scale(scaling)
        moves = any("momentum" in group for group in optimizer.param_groups) if optimizer else True
        compensated = said.velocity_factor != 1.0 or said.gradient_factor != 0.0
        if (compensated or said.forward_horizon or said.backward_horizon) and not moves:
            raise PlanError(
                "weights are predicted by their velocity, which this optimizer does not keep",
                where="schedule.corrections",
                hint="train with SGD and momentum",
            )

    def _scale(self, scaling: OptimizerScaling) -> None:
        """Momentum and learning rate for the batch of an update; without momentum the rate in proportion to it."""
        for number, group in enumerate(self._optimizer.param_groups if self._optimizer else ()):
            if group.get("momentum"):
                group["momentum"] = scaling.momentum
                self._rates[number] *= scaling.learning_rate_factor
            else:
                self._rates[number] *= scaling.batch / scaling.reference_batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The weights that a forward reads are in place."""
        with self._moved(self._predicted(self._said.forward_horizon)):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The weights that a backward reads are in place."""
        back = None
        if self._said.velocity_decay:
            back = self._drift * (self._said.forward_delay - self._said.backward_delay)
        elif self._said.backward_horizon:
            back = self._predicted(self._said.backward_horizon)
        with self._moved(back):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """The optimizer steps within: with the rate of this update, then compensated for the delay."""
        if self._optimizer is None:
            yield
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._factor()
        before, gradient = self._flat.clone(), self._row([x.grad for x in self._masters])
        yield
        self._updates += 1
        said = self._said
        if said.velocity_factor != 1.0 or said.gradient_factor != 0.0:
            step = (said.velocity_factor - 1.0) * self._velocity() + said.gradient_factor * gradient
            self._flat.sub_(step * float(self._optimizer.param_groups[0]["lr"]))
        if said.velocity_decay:
            self._drift.mul_(said.velocity_decay).add_((self._flat - before) * (1.0 - said.velocity_decay))

    def _factor(self) -> float:
        """Of the learning rate at this update: annealed to 1 over the steps that the plan says, if it says any."""
        first, steps = self._said.learning_rate_factor, self._said.annealing_steps
        return first ** (1.0 - min(self._updates / steps, 1.0)) if steps else first

    def _predicted(self, horizon: int) -> torch.Tensor | None:
        """What is taken from the weights to predict them after so many updates."""
        if not horizon or self._optimizer is None:
            return None
        return self._velocity() * (self._rates[0] * self._factor() * horizon)

    def _velocity(self) -> torch.Tensor:
        states = self._optimizer.state if self._optimizer else {}
        return self._row([states.get(x, {}).get("momentum_buffer") for x in self._masters])

    def _row(self, parts: list[torch.Tensor | None]) -> torch.Tensor:
        """Tensors like the weights in a row; zeros for those that are not there yet."""
        found = torch.zeros_like(self._flat)
        at = 0
        for master, part in zip(self._masters, parts, strict=True):
            if part is not None:
                found[at : at + master.numel()] = part.detach().reshape(-1)
            at += master.numel()
        return found

    @contextmanager
    def _moved(self, by: torch.Tensor | None) -> Iterator[None]:
        if by is None:
            yield
            return
        before = self._flat.clone()
        self._flat.sub_(by)
        try:
            yield
        finally:
            self._flat.copy_(before)

"""What a stage does so that training with old weights converges, as the plan's `corrections` say.

Predicted weights lie in the place of the newest while a pass runs: autograd keeps no copy of them, so a backward reads
what lies there when it runs, as the schedules that keep one version mean it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from planner.errors import PlanError
from planner.runtime.interpreter import Values
from planner.schedules.types import OptimizerScaling, StageCorrection

DRIFT, UPDATES = "correction_drift", "correction_updates"
"""What is kept beside the optimizer's state: a mean of what updates changed, and how many there were."""


class Corrections:
    """The corrections of one stage, on its weights in a row.

    Args:
        said: of the stage.
        scaling: momentum and learning rate for the batch of an update; None where they stay.
        flat: the weights, which the optimizer changes in place.
        masters: the same weights by name, as the optimizer has them, in the order of the row.
        optimizer: its momentum is the velocity; None where the stage trains nothing. Its learning rates are read at
            every use, so that a schedule may change them.

    Raises:
        PlanError: velocities are needed, and the optimizer has none.
    """

    def __init__(
        self, said: StageCorrection, scaling: OptimizerScaling | None, flat: torch.Tensor,
        masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None,
    ) -> None:  # fmt: skip
        self._said, self._flat, self._masters = said, flat.data, dict(masters)
        self._optimizer, self._groups = optimizer, list(optimizer.param_groups) if optimizer else []
        self._compensates = said.velocity_factor != 1.0 or said.gradient_factor != 0.0
        self._drift, self._updates = torch.zeros_like(self._flat), 0
        self._scales = [1.0 if scaling is None else _scaled(group, scaling) for group in self._groups]
        predicts = self._compensates or said.forward_horizon or said.backward_horizon
        if predicts and any("momentum" not in group for group in self._groups):
            raise PlanError(
                "weights are predicted by their velocity, which this optimizer does not keep",
                where="schedule.corrections",
                hint="train with SGD and momentum",
            )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The weights that a forward reads are in place."""
        with self._moved(self._predicted(self._said.forward_horizon)):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The weights that a backward reads are in place."""
        back = self._predicted(self._said.backward_horizon)
        if self._said.velocity_decay:
            back = self._drift * (self._said.forward_delay - self._said.backward_delay)
        with self._moved(back):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """The optimizer steps within: with the rate of this update, then compensated for the delay."""
        usual = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates(), strict=True):
            group["lr"] = rate
        before, gradients = self._flat.clone(), [x.grad for x in self._masters.values()]
        yield
        said = self._said
        if self._compensates:
            self._flat.sub_((said.velocity_factor - 1.0) * self._row(self._velocities(), by_rate=True))
            self._flat.sub_(said.gradient_factor * self._row(gradients, by_rate=True))
        for group, rate in zip(self._groups, usual, strict=True):
            group["lr"] = rate
        self._updates += 1
        if said.velocity_decay:
            self._drift.mul_(said.velocity_decay).add_((self._flat - before) * (1.0 - said.velocity_decay))

    def state(self) -> dict[str, Values]:
        """What training goes on from, by kind and weight; "" in place of a weight for one number."""
        found, at = {}, 0
        for name, master in self._masters.items():
            found[name] = self._drift[at : at + master.numel()].view(master.shape).clone()
            at += master.numel()
        return {DRIFT: found, UPDATES: {"": torch.tensor(float(self._updates))}}

    def restore(self, kinds: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take that state; what is not there begins anew."""
        self._drift = self._row([kinds.get(DRIFT, {}).get(name) for name in self._masters])
        self._updates = int(kinds.get(UPDATES, {}).get("", torch.zeros(())))

    def _rates(self) -> list[float]:
        """Of this update, by parameter group: annealed over the steps that the plan says, if it says any."""
        first, steps = self._said.learning_rate_factor, self._said.annealing_steps
        factor = first ** (1.0 - min(self._updates / steps, 1.0)) if steps else first
        return [group["lr"] * scale * factor for group, scale in zip(self._groups, self._scales, strict=True)]

    def _predicted(self, horizon: int) -> torch.Tensor | None:
        """What is taken from the weights to predict them after so many updates."""
        if not horizon:
            return None
        return horizon * self._row(self._velocities(), by_rate=True, rates=self._rates())

    def _velocities(self) -> list[torch.Tensor | None]:
        states = self._optimizer.state if self._optimizer else {}
        return [states.get(x, {}).get("momentum_buffer") for x in self._masters.values()]

    def _row(
        self, parts: Sequence[torch.Tensor | None], *, by_rate: bool = False, rates: Sequence[float] = ()
    ) -> torch.Tensor:
        """Tensors like the weights in a row, zeros for those that are not there; times the learning rates of their
        groups, as these stand or as given."""
        current = list(rates) or [float(group["lr"]) for group in self._groups]
        rate_of = {id(x): rate for group, rate in zip(self._groups, current, strict=True) for x in group["params"]}
        found, at = torch.zeros_like(self._flat), 0
        for master, part in zip(self._masters.values(), parts, strict=True):
            if part is not None:
                rate = rate_of.get(id(master), 0.0) if by_rate else 1.0
                found[at : at + master.numel()] = rate * part.detach().reshape(-1)
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


def _scaled(group: dict[str, float], scaling: OptimizerScaling) -> float:
    """Factor of a group's learning rate for the batch of an update, and its momentum set for it; without momentum the
    rate is in proportion to the batch."""
    if not group.get("momentum"):
        return scaling.batch / scaling.reference_batch
    group["momentum"] = scaling.momentum
    return scaling.learning_rate_factor

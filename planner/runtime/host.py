"""Activations in the host's memory: what operators keep for their backward is moved there, and brought back for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from planner.runtime.device import TrainingDevice
from planner.runtime.model_file import Step


class HostMemory:
    """Moves what some operators of a pass keep; each of them has a copy of its own.

    Args:
        operators: by first output.
        resident: tensors that stay on the device all the time, as weights; what shares their storage is not moved.
        device: of the tensors.

    Attributes:
        moved_bytes: bytes that were moved there.
    """

    def __init__(self, operators: Collection[str], resident: Iterable[torch.Tensor], device: TrainingDevice) -> None:
        self._operators, self._device = operators, device
        self._resident = {place_of(x) for x in resident}
        self.moved_bytes = 0

    def keeping(self, operator: str) -> AbstractContextManager[object]:
        """What autograd keeps within goes to the host, if the operator is one of those whose tensors move."""
        if operator not in self._operators:
            return nullcontext()
        hooks: AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self.away, operator), self.back
        )
        return hooks

    def is_resident(self, x: torch.Tensor) -> bool:
        """Whether a tensor stays on the device all the time."""
        return place_of(x) in self._resident

    def away(self, operator: str, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What an operator keeps: moved, if it is one of those, and whether it was."""
        if operator not in self._operators or self.is_resident(x):
            return x, False
        self.moved_bytes += x.numel() * x.element_size()
        return self._device.to_host(x), True

    def back(self, kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
        """The tensor again, from what `away` gave."""
        x, away = kept
        return self._device.from_host(x) if away else x


def place_of(x: torch.Tensor) -> int:
    """Which storage a tensor has; without data it has no address."""
    return int(x.untyped_storage()._cdata)


def moved(x: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A leaf of autograd with the values of a tensor, moved to or from the host."""
    return move(x).detach().requires_grad_(x.requires_grad)


def steps_of(operators: Collection[str], listed: Collection[str], steps: Iterable[Step]) -> frozenset[str]:
    """First outputs of the file's operators that some of a plan's operators stand for.

    An operator that the plan does not list is part of those that read its results.

    Args:
        operators: the plan's operators that are meant.
        listed: all operators that the plan lists.
        steps: operators of the file in order.
    """
    found, readers = set[str](), dict[str, list[str]]()
    for step in reversed(list(steps)):
        own = [reader for name in step.outputs for reader in readers.get(name, ())]
        inside = step.name not in listed and bool(own) and all(reader in found for reader in own)
        if step.name in operators or inside:
            found.add(step.name)
        for name in step.inputs:
            readers.setdefault(name, []).append(step.name)
    return frozenset(found)

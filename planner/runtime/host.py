"""Activations in the host's memory: what operators keep for their backward is moved there, and brought back for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from planner.runtime.model_file import Step


class HostMemory:
    """Moves what some operators of a pass keep; each of them has a copy of its own.

    Args:
        operators: by first output.
        resident: tensors that stay on the device all the time, as weights; what shares their storage is not moved.

    Attributes:
        moved_bytes: bytes that were moved there.
    """

    def __init__(self, operators: Collection[str], resident: Iterable[torch.Tensor]) -> None:
        self._operators = operators
        self._resident = {_place(x) for x in resident}
        self.moved_bytes = 0

    def keeping(self, operator: str) -> AbstractContextManager[object]:
        """What autograd keeps within goes to the host, if the operator is one of those whose tensors move."""
        if operator not in self._operators:
            return nullcontext()
        hooks: AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(self._away, _back)
        return hooks

    def _away(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.device | None]:
        if _place(x) in self._resident:
            return x, None
        self.moved_bytes += x.numel() * x.element_size()
        return x.detach().to("cpu", copy=True), x.device


def _place(x: torch.Tensor) -> int:
    return int(x.untyped_storage().data_ptr())


def _back(kept: tuple[torch.Tensor, torch.device | None]) -> torch.Tensor:
    x, device = kept
    return x if device is None else x.to(device)


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A leaf of autograd with a tensor's values, in another buffer on a device."""
    return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)


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

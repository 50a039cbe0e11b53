"""Number formats of training and what they cost in memory per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import JobError, UsageError
from planner.graph import DType
from planner.hardware.types import Device
from planner.registry import did_you_mean


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights, gradients and activations are stored and computed.

    Attributes:
        name: what the user writes.
        format: the number format that matrix units compute in, by which a device states its peaks.
        compute: type of activations and of matrix units' inputs.
        weight_bytes: bytes a parameter takes in the working copy.
        gradient_bytes: bytes a parameter's gradient takes.
        master_bytes: bytes of the fp32 master copy, kept with the optimizer state; 0 without one.
        spare_bytes: bytes of a gradient in the compute type that stays when it has been added to that of
            `gradient_bytes`: zeroed, not freed.
    """

    name: str
    format: str
    compute: DType
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    spare_bytes: int = 0

    @property
    def held_gradient_bytes(self) -> int:
        """Bytes of a parameter's gradients in memory; `gradient_bytes` are those that travel."""
        return self.gradient_bytes + self.spare_bytes

    def lacking(self, device: Device) -> bool:
        """Whether a device does not compute in the format."""
        return self.format not in device.matrix_flop_per_s


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", "fp32", DType.FLOAT32, 4, 4, 0),
        Precision("tf32", "tf32", DType.FLOAT32, 4, 4, 0),
        Precision("bf16", "bf16", DType.BFLOAT16, 2, 2, 4),
        Precision("fp16", "fp16", DType.FLOAT16, 2, 2, 4),
        Precision("bf16-fp32grad", "bf16", DType.BFLOAT16, 2, 4, 4),
        Precision("bf16-deepspeed", "bf16", DType.BFLOAT16, 2, 4, 4, spare_bytes=2),  # its BF16_Optimizer
        Precision("bf16-pure", "bf16", DType.BFLOAT16, 2, 2, 0),
    )
}

BEST_FIRST = ("bf16", "fp16", "fp32")
"""Precisions to choose from where none is asked for: fp16 needs its loss scaled, and fp32 takes twice the memory."""

OPTIMIZER_STATE_BYTES = {"adam": 8, "adamw": 8, "sgd": 0, "momentum": 4, "adafactor": 0, "lamb": 8}
"""fp32 bytes of optimizer state a parameter, without the master copy (Adam: two moments)."""


def precision(name: str) -> Precision:
    """The precision of that name.

    Raises:
        UsageError: no precision has that name.
    """
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}", hint=did_you_mean(name, PRECISIONS))
    return PRECISIONS[name]


def best_precision(devices: Sequence[Device]) -> str:
    """The first of `BEST_FIRST` whose format every one of the devices computes in; the first where none is."""
    able = (name for name in BEST_FIRST if not any(map(PRECISIONS[name].lacking, devices)))
    return next(able, BEST_FIRST[0])


def precision_remark(name: str, devices: Sequence[Device]) -> str:
    """Why a precision was chosen where none was asked for: which devices lack a better one; empty for the best."""
    better = BEST_FIRST[: BEST_FIRST.index(name)] if name in BEST_FIRST else ()
    lacking = {p: [d.name for d in devices if PRECISIONS[p].lacking(d)] for p in better}
    return "; ".join(f"no {p} on {', '.join(names)}" for p, names in lacking.items() if names)


def supported_precision(name: str, device: Device) -> Precision:
    """The precision of that name (the best one where it is empty), if the device computes in its format.

    Raises:
        UsageError: no precision has that name.
        JobError: the device states no rate for its format.
    """
    chosen = precision(name or best_precision([device]))
    if chosen.lacking(device):
        known = ", ".join(sorted(device.matrix_flop_per_s)) or "none"
        able = " or ".join(p.name for p in PRECISIONS.values() if not p.lacking(device))
        raise JobError(
            f"{device.name} does not compute in {chosen.format}, but in {known}",
            hint=f"use --precision {able}" if able else "add the format's peak to the hardware profile",
        )
    return chosen


def optimizer_state_bytes(optimizer: str, chosen: Precision) -> int:
    """Bytes of optimizer state a parameter, master copy included.

    Raises:
        UsageError: no optimizer has that name.
    """
    if optimizer not in OPTIMIZER_STATE_BYTES:
        raise UsageError(f"unknown optimizer {optimizer!r}", hint=did_you_mean(optimizer, OPTIMIZER_STATE_BYTES))
    return OPTIMIZER_STATE_BYTES[optimizer] + chosen.master_bytes

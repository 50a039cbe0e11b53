"""Number formats of training and what they cost in memory per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UsageError
from planner.graph import DType
from planner.registry import did_you_mean


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights, gradients and activations are stored and computed.

    Attributes:
        name: what the user writes.
        compute: type of activations and of matrix units' inputs.
        weight_bytes: bytes a parameter takes in the working copy.
        gradient_bytes: bytes a parameter's gradient takes.
        master_bytes: bytes of the fp32 master copy, kept with the optimizer state; 0 without one.
    """

    name: str
    compute: DType
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", DType.FLOAT32, 4, 4, 0),
        Precision("tf32", DType.FLOAT32, 4, 4, 0),
        Precision("bf16", DType.BFLOAT16, 2, 2, 4),
        Precision("fp16", DType.FLOAT16, 2, 2, 4),
        Precision("bf16-fp32grad", DType.BFLOAT16, 2, 4, 4),
        Precision("bf16-pure", DType.BFLOAT16, 2, 2, 0),
    )
}

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


def optimizer_state_bytes(optimizer: str, chosen: Precision) -> int:
    """Bytes of optimizer state a parameter, master copy included.

    Raises:
        UsageError: no optimizer has that name.
    """
    if optimizer not in OPTIMIZER_STATE_BYTES:
        raise UsageError(f"unknown optimizer {optimizer!r}", hint=did_you_mean(optimizer, OPTIMIZER_STATE_BYTES))
    return OPTIMIZER_STATE_BYTES[optimizer] + chosen.master_bytes

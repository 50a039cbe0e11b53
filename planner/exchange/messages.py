"""What travels in an exchange of gradients: messages, and the legs that each of them passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a message.

    Attributes:
        busy_s: how long it keeps every port busy, float64 [2 ports].
        latency_s: until its end has arrived, during which the ports are free again.
    """

    busy_s: np.ndarray
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """Gradients that travel together.

    Attributes:
        variables: whose gradients, or parts of them, these are.
        method: how they travel.
        payload_bytes: what each machine contributes.
        ready_s: when the last of them is complete.
        legs: what it passes, in order.
        chunk: part of the payload that must have passed a leg before the next can begin, 0..1.
    """

    variables: tuple[str, ...]
    method: str
    payload_bytes: float
    ready_s: float
    legs: tuple[Leg, ...]
    chunk: float = 1.0

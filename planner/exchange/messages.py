"""What travels in an exchange of gradients: messages, and the legs that each of them passes.

Messages in time: each passes its legs in turn, and every port serves them first come, first served.

A leg keeps each port it uses busy for a time of its own. The next leg of a message may begin when a first chunk of
it has arrived (a tensor cut in partitions is pushed and pulled at the same time), and cannot end before the last
chunk has passed. Where all messages use the same ports alike, this is a single link that serves one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.exchange.types import Transfer


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


def play(messages: Sequence[Message], ports: int) -> tuple[Transfer, ...]:
    """When each message arrives, in the order given.

    Args:
        messages: what is sent, each from its ready time on.
        ports: number of ports; legs are over twice as many (ways out, then ways in).

    Returns:
        One transfer a message. O(legs * (log(legs) + ports)), and deterministic: equal times in message order.
    """
    free = np.zeros(2 * ports)
    ends = [m.ready_s for m in messages]
    queue = [(m.ready_s, i, 0) for i, m in enumerate(messages) if m.legs]
    heapq.heapify(queue)
    while queue:
        ready, i, leg = heapq.heappop(queue)
        passed, chunk = messages[i].legs[leg], messages[i].chunk
        used = passed.busy_s > 0
        longest = float(passed.busy_s.max(initial=0.0))
        end = first = ready
        if used.any():
            busy = passed.busy_s[used]
            begun = np.maximum(free[used], ready)
            free[used] = begun + busy
            end, first = float((begun + busy).max()), float((begun + chunk * busy).max())
        if leg:
            end = max(end, ends[i] + chunk * longest)
        ends[i] = end + passed.latency_s
        if leg + 1 < len(messages[i].legs):
            heapq.heappush(queue, (first + passed.latency_s, i, leg + 1))
    return tuple(
        Transfer(m.variables, m.method, m.payload_bytes, m.ready_s, end) for m, end in zip(messages, ends, strict=True)
    )

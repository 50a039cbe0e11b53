"""Packing of gradients into messages, and the simulation of messages on ports.

Gradients are packed in the order in which the backward completes them. A message passes its legs in turn; every port
serves messages first come, first served. A leg keeps each port it uses busy for its own time. The next leg of a message
may begin when the first chunk has arrived (a tensor cut in partitions is pushed and pulled at the same time), and
cannot end before the last chunk has passed. If all messages use the same ports alike, the ports act as a single link
that serves one message after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import UsageError
from planner.exchange.types import Step, Transfer, Variable


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a message.

    Attributes:
        busy_s: seconds that it keeps every port busy, float64 [2 ports].
        latency_s: seconds from there until its end has arrived; the ports are free again.
    """

    busy_s: np.ndarray
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """Gradients that travel together.

    Attributes:
        variables: names of the variables whose gradients, or parts of them, it holds.
        method: how it travels.
        payload_bytes: bytes that each machine contributes.
        ready_s: when the last of its gradients is complete.
        legs: its legs, in order.
        chunk: fraction of the payload that must have passed a leg before the next leg can begin, 0..1.
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
        messages: each is sent from its ready time on.
        ports: number of ports; legs have an entry for each direction of each port (outgoing, then incoming).

    Returns:
        One transfer a message. O(legs * (log(legs) + ports)), and deterministic: equal times in message order.
    """
    free = np.zeros(2 * ports)
    ends = [m.ready_s for m in messages]
    queue = [(m.ready_s, i, 0) for i, m in enumerate(messages) if m.legs]
    heapq.heapify(queue)
    while queue:
        ready, i, leg = heapq.heappop(queue)
        current, chunk = messages[i].legs[leg], messages[i].chunk
        used = current.busy_s > 0
        longest = float(current.busy_s.max(initial=0.0))
        end = first = ready
        if used.any():
            busy = current.busy_s[used]
            start_s = np.maximum(free[used], ready)
            free[used] = start_s + busy
            end, first = float((start_s + busy).max()), float((start_s + chunk * busy).max())
        if leg:
            end = max(end, ends[i] + chunk * longest)
        ends[i] = end + current.latency_s
        if leg + 1 < len(messages[i].legs):
            heapq.heappush(queue, (first + current.latency_s, i, leg + 1))
    return tuple(
        Transfer(m.variables, m.method, m.payload_bytes, m.ready_s, end) for m, end in zip(messages, ends, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent as one.

    Attributes:
        variables: names of the variables whose gradients, or parts of them, it holds.
        gradient_bytes: bytes of these gradients.
        ready_s: when the last of them is complete, from the start of the backward.
        weight_bytes: bytes of the weights of the same variables.
    """

    variables: tuple[str, ...]
    gradient_bytes: float
    ready_s: float
    weight_bytes: float


def _bucket(step: Step, members: list[Variable]) -> Bucket:
    return Bucket(
        tuple(v.name for v in members),
        sum(v.gradient_bytes for v in members),
        max(step.ready_s(v) for v in members),
        sum(v.pulled_bytes for v in members),
    )


def pack(step: Step, bucket_bytes: float) -> tuple[Bucket, ...]:
    """Buckets of uncut gradients in order of arrival; the gradient that fills a bucket closes it. 0: one gradient each.

    O(variables log variables). After PyTorch's DistributedDataParallel (Li et al., VLDB 2020), without its smaller
    first bucket.

    Raises:
        UsageError: a negative size.
    """
    if bucket_bytes < 0:
        raise UsageError(f"buckets of {bucket_bytes} bytes", hint="use a size of 0 or more")
    buckets: list[Bucket] = []
    members: list[Variable] = []
    filled = 0.0
    for v in step.arrivals():
        members.append(v)
        filled += v.gradient_bytes
        if filled >= bucket_bytes:
            buckets.append(_bucket(step, members))
            members, filled = [], 0.0
    return (*buckets, _bucket(step, members)) if members else tuple(buckets)


def fuse(step: Step, buffer_bytes: float) -> tuple[Bucket, ...]:
    """Buffers of one exact size, filled with gradients in order of arrival; a gradient is cut where a buffer is full.

    After Herring's balanced fusion buffers (Thangakrishnan et al., SC 2020). O(variables + buffers).

    Raises:
        UsageError: a size that is not above 0.
    """
    if not buffer_bytes > 0:
        raise UsageError(f"fusion buffers of {buffer_bytes} bytes", hint="use a size above 0")
    buffers: list[Bucket] = []
    names: list[str] = []
    filled = pulled = ready = 0.0
    for v in step.arrivals():
        left = v.gradient_bytes
        while left > 0:
            part = min(left, buffer_bytes - filled)
            names.append(v.name)
            filled, left, ready = filled + part, left - part, step.ready_s(v)
            pulled += v.pulled_bytes * part / v.gradient_bytes
            if filled >= buffer_bytes:
                buffers.append(Bucket(tuple(names), filled, ready, pulled))
                names, filled, pulled = [], 0.0, 0.0
    return (*buffers, Bucket(tuple(names), filled, ready, pulled)) if names else tuple(buffers)

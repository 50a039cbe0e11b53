"""Gradients packed for sending, in the order in which the backward completes them."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange.types import Step, Variable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent as one.

    Attributes:
        variables: whose gradients it holds, or parts of them.
        gradient_bytes: what it holds.
        ready_s: when the last of it is complete, from the start of the backward.
        weight_bytes: bytes of the same variables' weights.
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
    """Whole gradients in order of arrival; a bucket closes with the one that fills it. 0: each gradient by itself.

    O(variables log variables). After PyTorch's DistributedDataParallel (Li et al., VLDB 2020), without its smaller
    first bucket.

    Raises:
        UsageError: a negative size.
    """
    if bucket_bytes < 0:
        raise UsageError(f"buckets of {bucket_bytes} bytes", hint="use a size of 0 or more")
    found: list[Bucket] = []
    members: list[Variable] = []
    filled = 0.0
    for v in step.arrivals():
        members.append(v)
        filled += v.gradient_bytes
        if filled >= bucket_bytes:
            found.append(_bucket(step, members))
            members, filled = [], 0.0
    return (*found, _bucket(step, members)) if members else tuple(found)


def fuse(step: Step, buffer_bytes: float) -> tuple[Bucket, ...]:
    """Gradients poured into buffers of exactly one size in order of arrival, cut where a buffer is full.

    After Herring's balanced fusion buffers (Thangakrishnan et al., SC 2020). O(variables + buffers).

    Raises:
        UsageError: a size that is not above 0.
    """
    if not buffer_bytes > 0:
        raise UsageError(f"fusion buffers of {buffer_bytes} bytes", hint="use a size above 0")
    found: list[Bucket] = []
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
                found.append(Bucket(tuple(names), filled, ready, pulled))
                names, filled, pulled = [], 0.0, 0.0
    return (*found, Bucket(tuple(names), filled, ready, pulled)) if names else tuple(found)

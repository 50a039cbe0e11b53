"""What the runtime takes of a device's memory beside the tensors of a plan, each figure with its source.

- *Context*: the driver's context and the kernels that are loaded, `reserve` of a device profile.
- *Communication buffers*: a collective library keeps buffers for each neighbour that a rank has in each of its groups.
- *Fragmentation*: an allocator holds more than is allocated at the peak. It gives what is idle back before it fails, so
  nothing is charged for it; `headroom` is the allowance, and `shown_bytes` says what the driver would show.
"""

from __future__ import annotations

import dataclasses
from typing import overload

import numpy as np

from planner.hardware.types import Cluster, Device

NEIGHBOURS = 3
"""Neighbours of a rank in a group: the one before it in a ring, and parent and child in a tree (NCCL 2.4 and later)."""

PIPELINE_NEIGHBOURS = 2
"""Stages that a worker of a pipeline sends to and receives from: the one before and the one after."""

HEADROOM = 0.05
"""Part of a device's memory that a search leaves free, unless the job says otherwise."""

STEP_BYTES = 4
"""Bytes an element of an fp32 copy of 16-bit gradients, which the optimizer step makes for the part that it updates:
20 bytes a parameter in all (Megatron-LM, documentation of the distributed optimizer)."""


@overload
def neighbours(tensor: int, data: int, piped: bool) -> int: ...
@overload
def neighbours(tensor: int, data: np.ndarray, piped: bool | np.ndarray) -> np.ndarray: ...
def neighbours(tensor: int, data: int | np.ndarray, piped: bool | np.ndarray) -> int | np.ndarray:
    """Neighbours of a rank, summed over its groups: those of its tensor and data parallel groups, of its pipeline, and
    of all ranks together where it has two groups or more.

    Args:
        tensor: ranks that share operators.
        data: replicas of a stage over all copies of the pipeline.
        piped: whether there are several stages.
    """
    groups = (tensor > 1) + np.greater(data, 1).astype(int) + np.asarray(piped).astype(int)
    own = min(tensor - 1, NEIGHBOURS) + np.minimum(np.subtract(data, 1), NEIGHBOURS)
    found = own + PIPELINE_NEIGHBOURS * np.asarray(piped) + NEIGHBOURS * (groups > 1)
    return found if np.ndim(found) else int(found)


def with_headroom(cluster: Cluster, headroom: float) -> Cluster:
    """The same machine, of whose memory plans leave a part free."""
    if all(device.headroom == headroom for device in cluster.devices):
        return cluster
    devices = (dataclasses.replace(device, headroom=headroom) for device in cluster.devices)
    return dataclasses.replace(cluster, devices=tuple(devices))


def shown_bytes(tensor_bytes: float, reserve_bytes: float, cache: float, stepped_elements: float = 0.0) -> float:
    """Estimate of what a driver's tool (nvidia-smi) shows, in bytes.

    Args:
        tensor_bytes: tensors at the peak.
        reserve_bytes: context and communication buffers.
        cache: what the allocator holds, over the tensors (`Stack.allocator_cache`).
        stepped_elements: elements whose 16-bit gradients the optimizer step casts to fp32 on this rank; the allocator
            keeps that memory beside what a pass needs.
    """
    return (tensor_bytes + STEP_BYTES * stepped_elements) * cache + reserve_bytes


def reserve_bytes(device: Device, tensor: int, data: int, piped: bool) -> float:
    """Context and communication buffers of one rank on a device; arguments as of `neighbours`."""
    return float(device.reserve_bytes + device.neighbour_bytes * neighbours(tensor, data, piped))

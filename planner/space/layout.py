"""Which device runs what: a decision's stages laid on the line of ranks."""

from __future__ import annotations

import numpy as np

from planner.space.types import Decision


def slice_width(decision: Decision) -> int:
    """Devices in the slice of one copy of the pipeline."""
    return decision.slice_devices or sum(stage.devices for stage in decision.stages)


def stage_groups(decision: Decision) -> tuple[np.ndarray, ...]:
    """Ranks of each stage: int64 [copies, replicas, ranks of a replica] a stage.

    Copy c owns the ranks from `c * slice_width` on; its stages take neighbouring devices in order, up to the end of the
    slice. Replica q of copy c is entry [c, q]; inside a copy, micro-batch k runs on replica `k % replicas`.
    """
    width = slice_width(decision)
    starts = np.arange(decision.copies, dtype=np.int64)[:, None, None] * width
    offset = width - sum(stage.devices for stage in decision.stages)
    groups = []
    for stage in decision.stages:
        own = np.arange(stage.devices, dtype=np.int64).reshape(1, stage.replicas, stage.ranks)
        groups.append(starts + offset + own)
        offset += stage.devices
    return tuple(groups)


def stage_ranks(decision: Decision) -> tuple[np.ndarray, ...]:
    """First rank of each replica (its only one without tensor parallelism): int64 [copies, replicas] a stage."""
    return tuple(groups[..., 0] for groups in stage_groups(decision))

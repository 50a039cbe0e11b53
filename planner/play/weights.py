"""Versions of the weights over time: how many a worker holds of a stage, and when that changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.play.trace import Trace
from planner.schedules.versions import version_use


@dataclass(frozen=True, slots=True, eq=False)
class VersionCurve:
    """A step function: `held[i]` versions from `time_s[i]` until the next time."""

    time_s: np.ndarray
    held: np.ndarray


def version_curve(trace: Trace, worker: int, stage: int) -> VersionCurve:
    """Versions of a stage's weights that a worker holds, in time; O(actions log actions).

    A version counts from the first action that finds it in need of being kept beside the newest, and no longer once
    the last action that reads it has ended.
    """
    program = trace.program
    mine = np.flatnonzero((program.worker == worker) & (program.stage == stage))
    if not len(mine):
        return VersionCurve(np.zeros(1), np.zeros(1, np.int64))
    held = version_use(program).held[mine]
    at = np.flatnonzero(np.diff(held, prepend=1))
    grows = np.diff(held, prepend=1)[at] > 0
    when = np.where(grows, trace.start_s[mine[at]], trace.end_s[mine[np.maximum(at - 1, 0)]])
    return VersionCurve(np.concatenate([[0.0], when]), np.concatenate([[1], held[at]]))

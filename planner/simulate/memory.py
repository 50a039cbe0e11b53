"""Memory over time: what a worker holds at each action boundary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.schedules.program import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Program
from planner.simulate.engine import Trace


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """Memory of one device of each stage; float64 [stages] each.

    Attributes:
        fixed_bytes: held all the time: weights, gradients, optimizer state.
        unit_bytes: kept for one micro-batch from the start of its forward to the end of its backward.
        working_bytes: held on top while a backward runs.
        reserve_bytes: what the runtime keeps on the device, once however many stages run there.
    """

    fixed_bytes: np.ndarray
    unit_bytes: np.ndarray
    working_bytes: np.ndarray
    reserve_bytes: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """A step function: `held_bytes[i]` from `time_s[i]` until the next time; one step for each change."""

    time_s: np.ndarray
    held_bytes: np.ndarray

    @property
    def peak_bytes(self) -> float:
        """The most that is held."""
        return float(self.held_bytes.max())


def memory_curve(trace: Trace, worker: int, sizes: StageBytes) -> MemoryCurve:
    """Memory of one worker over the iteration; O(its actions).

    A forward's activations count from the moment it occupies the worker (its input is then received).
    """
    program = trace.program
    mine = slice(int(program.offsets[worker]), int(program.offsets[worker + 1]))
    kind, stage = program.kind[mine], program.stage[mine]
    unit, working = sizes.unit_bytes[stage], sizes.working_bytes[stage]
    gradient = (kind == BACKWARD) | (kind == INPUT_GRAD)
    at_start = np.where(kind == FORWARD, unit, 0.0) + np.where(gradient, working, 0.0)
    releases = (kind == BACKWARD) | (kind == WEIGHT_GRAD)
    at_end = -np.where(releases, unit, 0.0) - np.where(gradient, working, 0.0)
    own = np.unique(stage)
    fixed = float(sizes.fixed_bytes[own].sum() + sizes.reserve_bytes[own].max())
    times = np.stack([trace.start_s[mine], trace.compute_end_s[mine]], axis=1).ravel()
    changes = np.stack([at_start, at_end], axis=1).ravel()
    moved = changes != 0
    return MemoryCurve(
        np.concatenate([[0.0], times[moved]]), np.concatenate([[fixed], fixed + np.cumsum(changes[moved])])
    )


def peak_in_flight(program: Program) -> np.ndarray:
    """[workers, stages] the most micro-batches of a stage that a worker keeps at the same time; O(actions)."""
    change = np.where(program.kind == FORWARD, 1, 0)
    change -= np.where((program.kind == BACKWARD) | (program.kind == WEIGHT_GRAD), 1, 0)
    peaks = np.zeros((program.workers, program.stages), np.int64)
    for stage in range(program.stages):
        held = np.cumsum(np.where(program.stage == stage, change, 0))
        mine = np.flatnonzero(program.stage == stage)
        np.maximum.at(peaks[:, stage], program.worker[mine], held[mine])
    return peaks

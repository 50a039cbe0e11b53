"""A problem's stages as tables for the chain DP: what each costs by place, and how many micro-batches it can keep.

Recomputing a stage never makes an iteration faster (the repeated forward delays everything by at least what it hides),
so under "auto" a stage is recomputed where, and only where, its activations do not fit otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.memory import most_that_fit
from planner.space.problem import StageProblem


@dataclass(frozen=True, eq=False)
class StageTables:
    """Stages of blocks i..j by place, [P, n, n]; `plain` and `again` are without and with recomputation.

    Attributes:
        forward_s: forward pass.
        plain_s, again_s: forward and backward pass.
        plain_end_s, again_end_s: exposed synchronisation and update.
        plain_limit, again_limit: int64, most micro-batches in flight that fit; -1 where the stage never fits.
        receive_s, return_s, transfer_s: [R, W + 1, n + 1] least over the stages before of the transfer into, of the one
            back and of both at boundary p for a stage with replicas[o] at a.
        tied_s: [R, W] least time to sum the gradients of weights that the first and the last block share, for a first
            stage with replicas[o] at a; 0 without any.
        least_s: [n + 1] prefix sums of each block's forward and backward on the fastest type.
    """

    forward_s: np.ndarray
    plain_s: np.ndarray
    again_s: np.ndarray
    plain_end_s: np.ndarray
    again_end_s: np.ndarray
    plain_limit: np.ndarray
    again_limit: np.ndarray
    receive_s: np.ndarray
    return_s: np.ndarray
    transfer_s: np.ndarray
    tied_s: np.ndarray
    least_s: np.ndarray

    def choose(
        self, place: np.ndarray, i: int, j: np.ndarray | slice, in_flight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(forward, forward and backward, end) of stages i..j; the latter two infinite where memory does not
        suffice."""
        plain = in_flight <= self.plain_limit[place, i, j]
        again = in_flight <= self.again_limit[place, i, j]
        work = np.where(plain, self.plain_s[place, i, j], np.where(again, self.again_s[place, i, j], np.inf))
        end = np.where(plain, self.plain_end_s[place, i, j], self.again_end_s[place, i, j])
        return self.forward_s[place, i, j], work, end

    def recomputes(self, place: int, i: int, j: int, in_flight: int) -> bool:
        """Whether the chosen form of a stage is the recomputed one."""
        return in_flight > int(self.plain_limit[place, i, j])


def stage_tables(problem: StageProblem) -> StageTables:
    """Tables of a problem; O(P n^2 + R^2 W n)."""
    work = problem.forward_s[problem.place_kind]
    backward = problem.backward_s[problem.place_kind]
    again = backward + problem.repeat_s[problem.place_kind]
    forward = _with_exchange(problem, work, problem.exchange_forward_s)
    receive, back, transfer = _least_transfers(problem)
    never, always = problem.recompute == "never", problem.recompute == "always"
    nothing = np.full(forward.shape, -1)
    return StageTables(
        forward_s=forward,
        plain_s=forward + _with_exchange(problem, backward, problem.exchange_backward_s),
        again_s=forward + _with_exchange(problem, again, problem.exchange_backward_s),
        plain_end_s=_exposed(problem, backward) + problem.update_s,
        again_end_s=_exposed(problem, again) + problem.update_s,
        plain_limit=nothing if always else _limit(problem, np.zeros_like(problem.saved_bytes), problem.saved_bytes),
        again_limit=nothing if never else _limit(problem, problem.working_bytes, problem.checkpoint_bytes),
        receive_s=receive,
        return_s=back,
        transfer_s=transfer,
        tied_s=problem.tied_s.min(axis=0) if len(problem.tied_s) else np.zeros(problem.place.shape),
        least_s=problem.least_s,
    )


def _exposed(problem: StageProblem, backward_s: np.ndarray) -> np.ndarray:
    """Synchronisation that does not hide behind the last backward, as far as that hides nothing else."""
    hiding = problem.overlap * backward_s
    if len(problem.exchange_backward_s):
        hiding = np.maximum(hiding - problem.exchange_backward_s, 0.0)
    return np.asarray(np.maximum(problem.sync_s - hiding, 0.0))


def _with_exchange(problem: StageProblem, work_s: np.ndarray, exchange_s: np.ndarray) -> np.ndarray:
    """A pass with what replicas exchange in it, as far as it is not hidden."""
    return work_s + np.maximum(exchange_s - problem.overlap * work_s, 0.0) if len(exchange_s) else work_s


def _limit(problem: StageProblem, fixed_bytes: np.ndarray, each_bytes: np.ndarray) -> np.ndarray:
    """Micro-batches in flight that fit beside what is resident."""
    capacity = problem.capacity_bytes[problem.place_kind][:, None, None]
    fixed = problem.resident_bytes + fixed_bytes[problem.place_kind]
    return most_that_fit(fixed, each_bytes[problem.place_kind], capacity)


def _least_transfers(problem: StageProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count, _, width = problem.link.shape
    parts = problem.receive_s, problem.return_s, problem.receive_s + problem.return_s
    receive, back, both = (np.full((count, width, problem.blocks + 1), np.inf) for _ in parts)
    for before in range(count):
        for after in range(count):
            at = np.flatnonzero(problem.link[before, after] >= 0)
            classes = problem.link[before, after, at]
            for least, seconds in zip((receive, back, both), parts, strict=True):
                least[after, at] = np.minimum(least[after, at], seconds[classes])
    for least in (receive, back, both):
        least[:, :, 0] = 0.0
    return receive, back, both

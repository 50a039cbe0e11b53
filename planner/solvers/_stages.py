"""Inputs of the chain DP: stage tables by place, pinned blocks, and problems split into parts that it can solve.

Recomputation never makes an iteration faster, because the repeated forward delays everything by at least the time that
it hides; nor does more recomputation. So a stage takes the fastest allowed choice of recomputation that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.memory import most_that_fit
from planner.space.problem import BY_KIND, BY_OPTION, BY_PLACE, BY_WAY, StageProblem


@dataclass(frozen=True, slots=True)
class Pins:
    """Pinned blocks from the view of a search that adds stages at the front.

    Attributes:
        first: last block pinned to the first stage; -1 if there is none.
        behind: (block, number of stages after the one that it is pinned to).
    """

    first: int
    behind: tuple[tuple[int, int], ...]

    @staticmethod
    def of(problem: StageProblem) -> Pins:
        """The pins of a problem; pins counted from the front need a fixed number of stages (`split_by_count`)."""
        first = max((b for b, stage in problem.pins.tolist() if stage == 0), default=-1)
        total = int(problem.stage_counts[0]) if len(problem.stage_counts) else 0
        behind = tuple(
            (b, -stage - 1 if stage < 0 else total - 1 - stage) for b, stage in problem.pins.tolist() if stage
        )
        return Pins(first, behind)

    def allow(self, i: int, stop: np.ndarray, after: np.ndarray) -> np.ndarray:
        """True where a stage of blocks i..stop-1 with `after` stages behind it respects the pins; broadcasts both."""
        allowed = np.full(stop.shape, i == 0 or i > self.first)
        for block, number in self.behind:
            allowed &= (after != number) | ((i <= block) & (stop > block))
            allowed &= (after >= number) | (i > block)
            allowed &= number >= 0  # A negative number means that the pipeline has too few stages.
        return allowed


def split_by_count(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per number of stages if a pin counts from the front; else the problem alone."""
    if len(problem.stage_counts) == 1 or not (problem.pins[:, 1] > 0).any():
        return (problem,)
    most = min(problem.blocks, problem.slice_devices, problem.max_stages or problem.blocks)
    counts = [n for n in range(1, most + 1) if not len(problem.stage_counts) or n in problem.stage_counts]
    return tuple(replace(problem, stage_counts=np.array([n]), max_stages=n) for n in counts)


def split(problem: StageProblem) -> tuple[StageProblem, ...]:
    """Divide a problem by a choice that the label search must know beforehand; empty if there is none.

    In this order: the number of replicas of all stages, their sharding, their recomputation, the number of stages. A
    bound of the problem holds for all parts.
    """
    for split_by in (split_by_replicas, split_by_sharding, split_by_recompute, split_by_count):
        parts = split_by(problem)
        if len(parts) > 1:
            return parts
    return ()


def split_by_sharding(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per sharding if all stages must be alike; else the problem alone."""
    numbers = np.unique(problem.shardings)
    if not problem.alike or len(numbers) == 1:
        return (problem,)
    return tuple(_of_options(problem, np.flatnonzero(problem.shardings == number)) for number in numbers)


def split_by_recompute(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per choice of recomputation if all stages must be alike; else the problem alone."""
    return tuple(_with_recompute(problem, way) for way in range(len(problem.ways))) if problem.alike else (problem,)


def _with_recompute(problem: StageProblem, way: int) -> StageProblem:
    """The problem in which all stages make one choice of recomputation; every block then takes its time."""
    repeat_s = np.diagonal(problem.repeat_s[way], axis1=1, axis2=2).min(axis=0)
    least_s = problem.least_s + np.concatenate([[0.0], np.cumsum(repeat_s)])
    kept = {name: getattr(problem, name)[[way]] for name in ("ways", *BY_WAY)}
    return replace(problem, alike=False, least_s=least_s, **kept)


def split_by_replicas(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per number of replicas if all stages must have the same; else the problem alone."""
    counts = np.unique(problem.replicas)
    if not problem.uniform or len(counts) == 1:
        return (problem,)
    return tuple(
        replace(_of_options(problem, np.flatnonzero(problem.replicas == count)), uniform=False) for count in counts
    )


def _of_options(problem: StageProblem, options: np.ndarray) -> StageProblem:
    """The problem with some of its options, and only the places and device kinds that these use."""
    kept = {name: getattr(problem, name)[options] for name in BY_OPTION}
    place = problem.place[options]
    places, renumbered = np.unique(place, return_inverse=True)
    outside = int(len(places) > 0 and places[0] < 0)
    places = places[outside:]
    kinds, place_kind = np.unique(problem.place_kind[places], return_inverse=True)
    kept |= {name: values[places] for name in BY_PLACE if len(values := getattr(problem, name))}
    kept |= {name: getattr(problem, name)[kinds] for name in BY_KIND}
    kept |= {name: getattr(problem, name)[:, kinds] for name in BY_WAY}
    return replace(
        problem,
        **kept,
        place=renumbered.reshape(place.shape) - outside,
        place_kind=place_kind,
        link=problem.link[np.ix_(options, options)],
        tied_s=problem.tied_s[:, options],
    )


@dataclass(frozen=True, eq=False)
class StageTables:
    """Time and memory of stages of blocks i..j by place P and by choice of recomputation Q, fastest choice first.

    Attributes:
        forward_s: [P, n, n] forward pass.
        work_s: [Q, P, n, n] forward and backward pass.
        end_s: [Q, P, n, n] exposed synchronisation and update.
        limit: int64 [Q, P, n, n], most micro-batches in flight that fit; -1 if the stage never fits.
        receive_s, return_s, transfer_s: [R, W + 1, n + 1] transfer in, transfer back and both, at boundary p for a
            stage with replicas[o] that begins at device a; each the minimum over the possible stages before.
        tied_s: [R, W] least time to sum the gradients of weights that the first and the last block share, for a first
            stage with replicas[o] at a; 0 without shared weights.
        least_s: [n + 1] prefix sums of each block's forward and backward on its fastest device type.
    """

    forward_s: np.ndarray
    work_s: np.ndarray
    end_s: np.ndarray
    limit: np.ndarray
    receive_s: np.ndarray
    return_s: np.ndarray
    transfer_s: np.ndarray
    tied_s: np.ndarray
    least_s: np.ndarray

    def choose(
        self, place: np.ndarray, i: int, j: np.ndarray | slice, in_flight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(forward, forward and backward, end) seconds of stages i..j in the fastest choice of recomputation that fits.

        The second is infinite if no choice fits.
        """
        fits = in_flight <= self.limit[0][place, i, j]
        work, end = np.where(fits, self.work_s[0][place, i, j], np.inf), self.end_s[0][place, i, j]
        for choice in range(1, len(self.limit)):
            if fits.all():
                break
            more = ~fits & (in_flight <= self.limit[choice][place, i, j])
            work = np.where(more, self.work_s[choice][place, i, j], work)
            end = np.where(more, self.end_s[choice][place, i, j], end)
            fits |= more
        return self.forward_s[place, i, j], work, end

    def way(self, place: int, i: int, j: int, in_flight: int) -> int:
        """Index of the choice of recomputation that `choose` takes for a stage that fits."""
        return int((in_flight <= self.limit[:, place, i, j]).argmax())


def stage_tables(problem: StageProblem) -> StageTables:
    """Tables of a problem; O(P n^2 + R^2 W n)."""
    work = problem.forward_s[problem.place_kind]
    backward = problem.backward_s[problem.place_kind]
    passes = [backward + repeat_s[problem.place_kind] for repeat_s in problem.repeat_s]
    forward = _with_exchange(problem, work, problem.exchange_forward_s)
    receive, back, transfer = _least_transfers(problem)
    return StageTables(
        forward_s=forward,
        work_s=np.stack([forward + _with_exchange(problem, each, problem.exchange_backward_s) for each in passes]),
        end_s=np.stack([_exposed(problem, each) + problem.update_s for each in passes]),
        limit=np.stack([_limit(problem, *b) for b in zip(problem.working_bytes, problem.saved_bytes, strict=True)]),
        receive_s=receive,
        return_s=back,
        transfer_s=transfer,
        tied_s=problem.tied_s.min(axis=0) if len(problem.tied_s) else np.zeros(problem.place.shape),
        least_s=problem.least_s,
    )


def _exposed(problem: StageProblem, backward_s: np.ndarray) -> np.ndarray:
    """Seconds of synchronisation that the last backward does not hide, after it hid its own exchanges."""
    hiding = problem.overlap * backward_s
    if len(problem.exchange_backward_s):
        hiding = np.maximum(hiding - problem.exchange_backward_s, 0.0)
    return np.asarray(np.maximum(problem.sync_s - hiding, 0.0))


def _with_exchange(problem: StageProblem, work_s: np.ndarray, exchange_s: np.ndarray) -> np.ndarray:
    """Seconds of a pass with the part of its exchanges that it does not hide."""
    return work_s + np.maximum(exchange_s - problem.overlap * work_s, 0.0) if len(exchange_s) else work_s


def _limit(problem: StageProblem, fixed_bytes: np.ndarray, each_bytes: np.ndarray) -> np.ndarray:
    """int64 [P, n, n], most micro-batches in flight that fit beside the resident bytes."""
    capacity = problem.capacity_bytes[problem.place_kind][:, None, None]
    fixed = problem.resident_bytes + fixed_bytes[problem.place_kind]
    return most_that_fit(fixed, each_bytes[problem.place_kind], capacity)


def _least_transfers(problem: StageProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`receive_s`, `return_s` and `transfer_s` of `StageTables`."""
    parts = problem.receive_s, problem.return_s, problem.receive_s + problem.return_s
    links, after = np.unique(np.unique(problem.link, axis=0), axis=1, return_inverse=True)
    receive, back, both = (np.full((*links.shape[1:], problem.blocks + 1), np.inf) for _ in parts)
    for classes in links:
        reachable = classes >= 0
        for least, seconds in zip((receive, back, both), parts, strict=True):
            least[reachable] = np.minimum(least[reachable], seconds[classes[reachable]])
    for least in (receive, back, both):
        least[:, :, 0] = 0.0
    options = after.reshape(-1)
    return receive[options], back[options], both[options]

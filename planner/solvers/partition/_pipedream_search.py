"""Drives the sweep: first over few cuts for a good plan, then over all of them below rising limits for the proof."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.solvers.partition._deadline import Deadline, OutOfTime
from planner.solvers.partition._pipedream_cuts import Cuts
from planner.solvers.partition._pipedream_sweep import Layout, Pricing, Step, Sweep

_FEW = 4000
_COARSE = (150, 1000, 5000, 20_000, 60_000)
_RUNGS = (1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(slots=True)
class Outcome:
    """What a search knows.

    Attributes:
        time: seconds a minibatch of the best plan, infinite when there is none.
        steps: its stages, None when it is the plan that the search was given.
        bound: no plan is faster.
        cuts: those the steps refer to.
        pairs: pairs of cuts that were priced.
    """

    time: float
    bound: float
    steps: tuple[Step, ...] | None = None
    cuts: Cuts | None = None
    pairs: int = 0
    improved: Callable[[float, float], None] | None = field(default=None, repr=False)

    def report(self) -> None:
        """Tell what is known by now."""
        if self.improved:
            self.improved(self.time, self.bound)


def search(
    cuts: Cuts,
    layout_of: Callable[[int], Layout],
    devices: Sequence[int],
    pricing: Callable[[int], Pricing],
    outcome: Outcome,
    deadline: Deadline,
) -> Outcome:
    """The fastest plan on one of several numbers of devices.

    Args:
        cuts: where the graph may be cut; when they are not complete, `outcome.bound` stays what the compute time says.
        layout_of: where stages may go on so many devices.
        devices: numbers of devices to try, most promising first.
        pricing: what they cost then.
        outcome: what is known before; updated and returned.
        deadline: when to stop.
    """
    layouts: dict[int, Layout] = {}

    def below(limit: float, some: Cuts) -> bool:
        """Look for a plan below a limit; true when one was found. Updates the outcome."""
        goal = limit
        for count in devices:
            if some.compute_s[-1] / count >= goal:
                continue
            deadline.check()
            if count not in layouts:
                layouts[count] = layout_of(count)
            sweep = Sweep(some, layouts[count], pricing(count), goal, deadline.check)
            try:
                found = sweep.run()
            finally:
                outcome.pairs += sweep.pairs
            if found:
                goal, outcome.steps = found
                outcome.time, outcome.cuts = goal, some
                outcome.report()
        return goal < limit

    outcome.bound = max(outcome.bound, float(cuts.compute_s[-1]) / max(devices))
    with contextlib.suppress(OutOfTime):
        _climb(cuts, below, outcome)
    return outcome


def _climb(cuts: Cuts, below: Callable[[float, Cuts], bool], outcome: Outcome) -> None:
    for most in _COARSE:
        if cuts.count > 2 * most:
            below(outcome.time, cuts.coarse(most))
    base = outcome.bound
    rungs = _RUNGS if cuts.count > _FEW and math.isfinite(outcome.time) else (1.0,)
    for rung in rungs:
        limit = outcome.time if rung == 1.0 else base + rung * (outcome.time - base)
        if limit <= outcome.bound:
            continue
        found = below(limit, cuts)
        if cuts.complete:
            outcome.bound = outcome.time if found or rung == 1.0 else limit
            outcome.report()
        if found:
            return

"""Every assignment of classes to devices through the judge: the oracle for the other max-load solvers."""

from __future__ import annotations

from itertools import product

from planner.errors import JobError
from planner.solvers.partition import Progress, Result
from planner.space.partition import MaxLoadDecision, MaxLoadProblem
from tests.oracles.every_plan import best_of

NAME = "max-load-brute-force"
_MOST = 3_000_000


def solve_by_enumeration(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans. O(devices^classes * edges).

    Args:
        problem: the problem, of a few classes.
        time_limit_s: stop after about this long.
        start: not used.
        progress: called when a better plan is found.

    Raises:
        JobError: there are too many plans.
    """
    del start
    home: dict[tuple[str, int], int] = {}
    classes = [
        home.setdefault(("class", int(c)) if c >= 0 else ("node", i), len(home)) for i, c in enumerate(problem.colour)
    ]
    if problem.devices ** len(home) > _MOST:
        raise JobError(f"{problem.devices}^{len(home)} plans are too many to try one by one",
                       hint="use another solver")  # fmt: skip
    plans = (
        MaxLoadDecision(tuple(devices[c] for c in classes))
        for devices in product(range(problem.devices), repeat=len(home))
    )
    space = "contiguous plans" if problem.contiguous else "all plans"
    return best_of(problem, plans, solver=NAME, time_limit_s=time_limit_s, space=space, progress=progress)

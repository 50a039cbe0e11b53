"""What every exact solver's answer must show."""

from __future__ import annotations

import functools
import math

import pytest

from planner.published.problems import PartitionProblem
from planner.published.solvers import Result, search_partition

by_cp_sat = functools.partial(search_partition, solver="max-load-cp-sat")
by_highs = functools.partial(search_partition, solver="max-load-highs")
by_ideals = functools.partial(search_partition, solver="max-load-ideals")
by_pairs = functools.partial(search_partition, solver="max-load-pairs")
by_list = functools.partial(search_partition, solver="latency-list")


def assert_equals_brute_force(problem: PartitionProblem, best: Result, found: Result) -> None:
    """A proven answer as good as trying everything, confirmed by the judge, with a bound that no simple plan beats."""
    assert found.proven
    if best.decision is None:
        assert found.decision is None
        assert found.bound == math.inf
        return
    assert found.objective == pytest.approx(best.objective, rel=1e-9)
    verdict = problem.judge(found.decision)
    assert verdict.feasible
    assert verdict.objective == found.objective
    for _, plan in problem.trivial():
        judged = problem.judge(plan)
        assert not judged.feasible or judged.objective >= found.bound

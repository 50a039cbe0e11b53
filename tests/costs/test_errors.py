"""The interval that comes with a prediction."""

from __future__ import annotations

import math
import statistics

import pytest

from planner.costs import JobClass, error_of, measured_error, read_errors
from planner.costs.errors import ERRORS_FILE
from planner.hardware.document import profile_folder

JOB = JobClass("some-stack", "some-device", "nothing", "one stage")


def test_a_class_that_was_never_compared_says_so() -> None:
    found = measured_error(JOB)
    assert (found.runs, found.low, found.high) == (0, None, None)
    assert found.in_words(1.0) == f"no run of this class was ever compared: {JOB}"


def test_an_interval_by_student() -> None:
    """Nine degrees of freedom: the 90 % quantile is 1.383 (tables of Student's distribution)."""
    ratios = [0.9, 0.95, 1.0, 1.0, 1.02, 1.05, 1.05, 1.1, 1.12, 1.2]
    logs = [math.log(r) for r in ratios]
    reach = 1.383 * statistics.stdev(logs) * math.sqrt(1.1)
    found = error_of(JOB, ratios)
    assert found.runs == 10
    assert found.low == pytest.approx(math.exp(statistics.mean(logs) - reach), rel=1e-3)
    assert found.high == pytest.approx(math.exp(statistics.mean(logs) + reach), rel=1e-3)
    assert found.in_words(10.0).startswith("80 %: ")
    assert found.in_words(10.0).endswith("one stage: 10 runs")


@pytest.mark.parametrize("ratio", [0.6, 1.7])
def test_an_interval_holds_the_prediction(ratio: float) -> None:
    """Runs that all lie to one side of their predictions have an interval that ends at the predicted time."""
    found = error_of(JOB, [ratio, ratio * 1.01, ratio * 0.99])
    assert found.low is not None
    assert found.high is not None
    assert found.low <= min(ratio, 1.0)
    assert found.high >= max(ratio, 1.0)
    assert 1.0 in (found.low, found.high)


def test_two_runs_make_no_interval() -> None:
    found = error_of(JOB, [1.0, 1.1])
    assert (found.runs, found.low) == (2, None)
    assert "too few runs" in found.in_words(1.0)


def test_shipped_classes() -> None:
    job = JobClass.of("fsdp-2023", "a100-sxm-80gb", ranks=1, zero=3, stages=1, schedule="1f1b")
    found = measured_error(job)
    assert str(job) == "fsdp-2023 on a100-sxm-80gb, weights shared, one stage"
    assert found.runs == 14
    assert found.low is not None
    assert found.high is not None
    assert 0.7 < found.low < 1 < found.high < 1.3
    stated = [each for each in read_errors(profile_folder() / ERRORS_FILE).values() if each.low is not None]
    assert all(each.low is None or each.high is None or each.low <= 1 <= each.high for each in stated)
    many = JobClass.of("megatron-2021", "a100-sxm-80gb", ranks=8, zero=1, stages=4, schedule="1f1b")
    assert measured_error(many).runs >= 20

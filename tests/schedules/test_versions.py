"""Which version of the weights is read, held and updated; what nobody holds cannot be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import PlanError
from planner.schedules import Pipeline, Work, compile_orders, get, parse_action, peak_versions, staleness, version_use


def work(*lanes: str, versions: tuple[int, ...] = ()) -> Work:
    return Work(tuple(tuple(map(parse_action, lane.split())) for lane in lanes), versions=versions)


STASHED = "F0.0@0 F0.1@0 B0.0@0 U0.0 F0.2@1 B0.1@0 U0.1 B0.2@1 U0.2"


def test_versions_by_action() -> None:
    use = version_use(compile_orders(work(STASHED)))
    assert use.newest.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert use.read.tolist() == [0, 0, 0, -1, 1, 0, -1, 1, -1]
    assert use.held.tolist() == [1, 1, 1, 1, 2, 2, 1, 2, 1]
    assert use.applied.tolist() == [-1, -1, 0, -1, -1, 1, -1, 2, -1]


def test_staleness_by_hand() -> None:
    found = staleness(compile_orders(work(STASHED)))
    assert found.forward_most.tolist() == found.backward_most.tolist() == [1]
    assert found.forward_mean.tolist() == pytest.approx([2 / 3])


def test_reading_the_newest_makes_forward_and_backward_differ() -> None:
    found = staleness(compile_orders(work("F0.0 F0.1 B0.0 U0.0 F0.2 B0.1 U0.1 B0.2 U0.2")))
    assert found.forward_most.tolist() == [1]
    assert found.backward_most.tolist() == [0]


def test_a_version_that_is_not_made_yet() -> None:
    with pytest.raises(PlanError, match=r"F0\.1 reads version 1 of the weights of stage 0, which is not made yet"):
        compile_orders(work("F0.0@0 F0.1@1 B0.0@0 U0.0 B0.1@1"))


def test_a_version_that_is_dropped() -> None:
    with pytest.raises(PlanError, match=r"B0\.1 reads version 0 .* is dropped: the worker holds 1"):
        compile_orders(work(STASHED, versions=(1,)))
    assert peak_versions(compile_orders(work(STASHED, versions=(2,)))).tolist() == [2]


def test_pipedream_with_a_version_too_few() -> None:
    full = get("pipedream").work(Pipeline((1,) * 4, 8))
    assert full.versions == (4, 3, 2, 1)
    with pytest.raises(PlanError, match=r"stage 1, which is dropped: the worker holds 2"):
        compile_orders(replace(full, versions=(4, 2, 2, 1)))


def test_double_buffering_with_too_few_micro_batches_would_read_what_is_not_made() -> None:
    """With m < p the last stages would need the update before it exists: each version is read one mini-batch late."""
    short = Pipeline((1,) * 4, 2)
    assert "at least 4" in get("pipedream-2bw").supports(short)
    lane = "F0.0@0 F0.1@0 F0.2@0 F0.3@0 F0.4@1 B0.0@0 B0.1@0 U0.0 B0.2@0 B0.3@0 U0.1 B0.4@1 U0.2"
    with pytest.raises(PlanError, match="not made yet"):
        compile_orders(work(lane, versions=(2,)))


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        ("F0.0 E0.0>1 B0.0", r"B0\.0 needs activations that are evicted"),
        ("F0.0 L0.0 B0.0", "loads what was not evicted"),
        ("F0.0 E0.0>1 E0.0>1 L0.0 B0.0", "evicted twice"),
        ("E0.0>1 F0.0 L0.0 B0.0", "does not come after its forward"),
        ("F0.0 B0.0 R0.0", "comes after its backward"),
        ("+F0.0 B0.0", "paired with none"),
        ("F0.0 G0.1 G0.1 B0.0", "more than once"),
        ("F0.0/3 B0.0", "the part of F0.0/3 is not one of 1"),
        ("F0.0 SA0.1 B0.0", r"SA0\.1 needs its forward"),
    ],
)
def test_further_orders_that_are_refused(lane: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compile_orders(work(lane))


def test_sub_sequences_must_keep_the_order_of_the_text() -> None:
    lane = tuple(map(parse_action, ["F0.0/1", "F0.0/0", "B0.0/1", "B0.0/0"]))
    with pytest.raises(PlanError, match="the forward of the part before"):
        compile_orders(Work((lane,), parts=2, causal=True))
    lane = tuple(map(parse_action, ["F0.0/0", "F0.0/1", "B0.0/0", "B0.0/1"]))
    with pytest.raises(PlanError, match="the backward of the part after"):
        compile_orders(Work((lane,), parts=2, causal=True))


def test_a_receive_waits_for_the_send() -> None:
    program = compile_orders(work("F0.0 SA0.0 RG0.0 B0.0", "RA1.0 F1.0 B1.0 SG1.0"))
    assert program.source.tolist() == [-1, -1, 7, -1, 1, -1, -1, -1]
    with pytest.raises(PlanError, match="receipt of its input"):
        compile_orders(work("F0.0 SA0.0 RG0.0 B0.0", "F1.0 RA1.0 B1.0 SG1.0"))


def test_launched_exchanges_may_cross() -> None:
    """What deadlocks when both wait does not when they launch first."""
    left, right = "F0.0 F1.0 B1.0 G1 B0.0 G0 S0 S1", "F0.1 F1.1 B1.1 G1 B0.1 G0 S1 S0"
    assert len(compile_orders(work(left, right)).sequence) == 16

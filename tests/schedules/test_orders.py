"""Orders of GPipe and 1F1B: written-out cases, and properties over all replica vectors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError, UsageError
from planner.schedules import (
    ActivationUnit,
    Pipeline,
    Schedule,
    WeightPolicy,
    compile_orders,
    get,
    names,
)


def text(schedule: str, replicas: tuple[int, ...], micro_batches: int) -> list[str]:
    orders = get(schedule).order(Pipeline(replicas, micro_batches))
    return [" ".join(str(action) for action in order) for order in orders]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert text("gpipe", (1, 2), 4) == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 S0 U0",
        "F1.0 F1.2 B1.0 B1.2 S1 U1",
        "F1.1 F1.3 B1.1 B1.3 S1 U1",
    ]


def test_1f1b_warms_up_by_distance_to_the_last_stage() -> None:
    assert text("1f1b", (1, 1, 1), 4) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 S0 U0",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3 S1 U1",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 S2 U2",
    ]


def test_1f1b_with_a_wider_first_stage_is_pipedreams_noam() -> None:
    """Three workers feed one: ceil(4 / 3) = 2 micro-batches in flight at each replica of the input stage."""
    assert text("1f1b", (3, 1), 6) == [
        "F0.0 F0.3 B0.0 B0.3 S0 U0",
        "F0.1 F0.4 B0.1 B0.4 S0 U0",
        "F0.2 F0.5 B0.2 B0.5 S0 U0",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F1.4 B1.4 F1.5 B1.5 S1 U1",
    ]


@pytest.mark.parametrize(
    ("schedule", "replicas", "micro_batches", "in_flight"),
    [
        ("gpipe", (1, 1, 1, 1), 8, (8, 8, 8, 8)),
        ("gpipe", (1, 2, 4), 8, (8, 4, 2)),
        ("1f1b", (1, 1, 1, 1), 8, (4, 3, 2, 1)),
        ("1f1b", (1, 1, 1, 1), 2, (2, 2, 2, 1)),
        ("1f1b", (2, 2, 2), 8, (3, 2, 1)),
        ("1f1b", (3, 1), 6, (2, 1)),
        ("1f1b", (1, 3), 6, (4, 1)),
        ("1f1b", (1, 4, 1), 24, (9, 2, 1)),
        ("1f1b", (1, 8, 1), 24, (17, 2, 1)),
        ("1f1b", (8, 4, 2, 1), 24, (2, 2, 2, 1)),
        ("1f1b", (1, 2, 4), 24, (7, 3, 1)),
        ("1f1b", (15, 1), 240, (2, 1)),
    ],
)
def test_in_flight(schedule: str, replicas: tuple[int, ...], micro_batches: int, in_flight: tuple[int, ...]) -> None:
    assert get(schedule).in_flight(Pipeline(replicas, micro_batches)) == in_flight


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_synchronous_schedules_keep_one_weight_version(schedule: str) -> None:
    entry: Schedule = get(schedule)
    assert entry.name == schedule
    assert entry.weight_policy is WeightPolicy.SYNC
    assert entry.activation_unit is ActivationUnit.MICRO_BATCH
    assert entry.weight_versions(Pipeline((1, 2), 4)) == (1, 1)


def test_registry_names_and_suggestion() -> None:
    assert {"gpipe", "1f1b"} <= set(names())
    with pytest.raises(UsageError, match="did you mean '1f1b'"):
        get("1fb1")


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "message"),
    [((), 4, "needs stages"), ((0,), 4, "needs stages"), ((1,), 0, "needs stages"), ((1, 3), 4, "do not divide")],
)
def test_pipelines_that_make_no_sense(replicas: tuple[int, ...], micro_batches: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Pipeline(replicas, micro_batches)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    micro_batches = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
    divisors = [d for d in range(1, micro_batches + 1) if micro_batches % d == 0]
    return Pipeline(tuple(draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=7))), micro_batches)


def peaks(order: str) -> int:
    """Most forwards without their backward, counted from the written order."""
    held = most = 0
    for token in order.split():
        held += {"F": 1, "B": -1}.get(token[0], 0)
        most = max(most, held)
    return most


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["gpipe", "1f1b"]), pipelines())
def test_every_order_is_complete_runnable_and_keeps_what_it_claims(schedule: str, pipeline: Pipeline) -> None:
    written = text(schedule, pipeline.replicas, pipeline.micro_batches)
    tokens = Counter(token for order in written for token in order.split())
    expected = Counter(
        f"{kind}{s}.{m}" for kind in "FB" for s in range(pipeline.stages) for m in range(pipeline.micro_batches)
    )
    expected += Counter({f"{kind}{s}": count for kind in "SU" for s, count in enumerate(pipeline.replicas)})
    assert tokens == expected

    claimed = get(schedule).in_flight(pipeline)
    for (stage, replica), order in zip(pipeline.workers(), written, strict=True):
        mine = [int(token.split(".")[1]) for token in order.split() if token[0] == "F"]
        assert mine == list(range(replica, pipeline.micro_batches, pipeline.replicas[stage]))
        assert peaks(order) == claimed[stage]
        assert order.endswith(f"S{stage} U{stage}")

    position = {}
    sequence = compile_orders(get(schedule).order(pipeline)).sequence.tolist()  # raises on a deadlock
    flat = [token for order in written for token in order.split()]
    for at, action in enumerate(sequence):
        position[(flat[action], action)] = at
    when = {token: at for (token, _), at in position.items() if "." in token}
    assert len(position) == len(flat)
    for s in range(pipeline.stages):
        for m in range(pipeline.micro_batches):
            assert when[f"F{s}.{m}"] < when[f"B{s}.{m}"]
            if s:
                assert when[f"F{s - 1}.{m}"] < when[f"F{s}.{m}"]
                assert when[f"B{s}.{m}"] < when[f"B{s - 1}.{m}"]

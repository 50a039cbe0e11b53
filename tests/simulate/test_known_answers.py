"""Makespans, bubbles and in-flight counts from the literature and from published simulations, as tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.schedules import Pipeline, get
from planner.simulate import StageTimes, Transfers, bubble_fraction, play
from tests.shared_data import shared_path


def cases(system: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(shared_path("reference/known_answers.json").read_text())[system]
    return entries


@pytest.mark.parametrize(("system", "schedule"), [("GPipe", "gpipe"), ("1F1B-flush", "1f1b")])
def test_published_bubbles(system: str, schedule: str) -> None:
    for case in cases(system):
        given, expected = case["input"], case["expect"]
        stages, micro_batches = given["D"], given["M"]
        backward = given["B"] + given.get("R", 0)
        times = StageTimes.of([given["F"]] * stages, [backward] * stages)
        trace = play(schedule, (1,) * stages, micro_batches, times)
        assert trace.makespan_s == pytest.approx(expected["makespan"])
        if "bubble" in expected:
            assert bubble_fraction(trace) == pytest.approx(expected["bubble"])
            assert list(get(schedule).in_flight(Pipeline((1,) * stages, micro_batches))) == expected["inflight"]


def test_dapple_event_simulations() -> None:
    for case in cases("DAPPLE"):
        given, expected = case["input"], case["expect"]
        times = StageTimes.of(given["F"], given["B"], sync_s=given["AR"] or 0.0)
        assert play("1f1b", (1,) * 4, given["M"], times).makespan_s == pytest.approx(expected["sim"])


def test_bapipe_without_overlap() -> None:
    """1F1B whose transfers have a latency but occupy nobody (1F1B-SNO)."""
    for case in cases("BaPipe"):
        given, expected = case["input"], case["expect"]
        if "sno" not in expected:
            continue
        times = StageTimes.of([given["F"]] * given["N"], [given["B"]] * given["N"], given["SR"])
        trace = play("1f1b", (1,) * given["N"], given["M"], times, transfers=Transfers.OVERLAPPED)
        assert trace.makespan_s == pytest.approx(expected["sno"])
        silent = StageTimes.of([given["F"]] * given["N"], [given["B"]] * given["N"])
        assert play("1f1b", (1,) * given["N"], given["M"], silent).makespan_s == pytest.approx(expected["as_"])


@pytest.mark.parametrize(
    ("schedule", "forward", "backward", "sync", "micro_batches", "makespan"),
    [
        ("1f1b", (1, 1, 1, 1), (2, 2, 2, 2), 0, 8, 33),
        ("1f1b", (2, 1, 1, 1), (4, 2, 2, 2), 0, 8, 51),
        ("1f1b", (1, 1, 1, 2), (2, 2, 2, 4), 0, 8, 57),
        ("1f1b", (1, 1, 1, 1), (2, 2, 2, 2), 5, 8, 38),
        ("1f1b", (3,), (5,), 0, 4, 32),
        ("gpipe", (1, 1, 1, 1), (2, 2, 2, 2), 0, 4, 21),
        ("gpipe", (1, 1, 1, 1), (3, 3, 3, 3), 0, 8, 44),
        ("gpipe", (2, 1), (1, 3), 0, 4, 22),
    ],
)
def test_makespans(
    schedule: str,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    sync: float,
    micro_batches: int,
    makespan: float,
) -> None:
    times = StageTimes.of(forward, backward, sync_s=float(sync))
    assert play(schedule, (1,) * len(forward), micro_batches, times).makespan_s == pytest.approx(makespan)

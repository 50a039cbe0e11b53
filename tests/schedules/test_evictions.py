"""Activations that workers move to others: who holds how many, and how long a move takes; counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

from planner import schedules
from planner.schedules import Action, ActionKind, Pipeline
from planner.schedules.evictions import guest_units_of, lent_bytes, slowest_moves_s

LEVELS = (
    SimpleNamespace(size=2, latency_s=1.0, device_byte_per_s=10.0),
    SimpleNamespace(size=2, latency_s=2.0, device_byte_per_s=5.0),
)


def _order(text: str) -> list[Action]:
    """Actions such as `F0`, `E0>1`, `L0` of stage 0, by micro-batch and the worker that holds what is moved."""
    actions = []
    for word in text.split():
        number, _, peer = word[1:].partition(">")
        actions.append(Action(ActionKind(word[0]), 0, int(number), peer=int(peer or -1)))
    return actions


def test_a_move_takes_the_links_that_both_ranks_share() -> None:
    """30 B inside a pair: 1 + 30 / 10 s. 20 B across pairs: 2 + 20 / 5 s, the slower of the two moves of stage 1."""
    moves = [(0, 0, 1), (1, 0, 1), (1, 1, 2)]
    assert slowest_moves_s(moves, LEVELS, [30.0, 20.0, 10.0]) == [4.0, 6.0, 0.0]


def test_a_worker_holds_at_most_what_is_away_at_once() -> None:
    both = _order("F0 F1 E0>1 F2 E1>1 L0 B0 L1 B1 B2")
    in_turn = _order("F0 E0>1 F1 L0 B0 E1>1 F2 L1 B1 B2")
    assert lent_bytes([both], [8.0]) == {1: 16.0}
    assert lent_bytes([in_turn], [8.0]) == {1: 8.0}
    assert lent_bytes([both, in_turn], [8.0]) == {1: 24.0}
    assert lent_bytes([_order("F0 E0 L0 B0")], [8.0]) == {}


def test_the_early_workers_of_bpipe_leave_units_with_the_late_ones() -> None:
    """Of four workers the first of 1F1B keeps four units; three are allowed, so that the last one holds the fourth."""
    orders = schedules.get("bpipe").work(Pipeline((1,) * 4, 8)).lanes
    assert guest_units_of(orders) == {3: {0: 1}}
    assert guest_units_of(schedules.get("1f1b").work(Pipeline((1,) * 4, 8)).lanes) == {}

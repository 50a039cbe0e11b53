"""Lines of actions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plan.orders import decode, encode, encode_orders
from planner.schedules.types import Action, ActionKind

F, B, S, U = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.SYNC, ActionKind.UPDATE

actions = st.one_of(
    st.builds(
        Action,
        st.sampled_from([F, B, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD]),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    st.builds(Action, st.sampled_from([S, U]), st.integers(0, 2)),
)


def steps(text: str) -> list[Action]:
    """Actions written one by one, `F0.3 B0.1 S0`."""
    found = []
    for word in text.split():
        stage, _, number = word[1:].partition(".")
        found.append(Action(ActionKind(word[0]), int(stage), int(number) if number else -1))
    return found


@pytest.mark.parametrize(
    ("line", "written_out"),
    [
        ("F0.0-3 B0.0-3 S0 U0", "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 S0 U0"),
        ("F0.0-1 B0.1-0", "F0.0 F0.1 B0.1 B0.0"),
        ("F1.0-1 (B1.0 F1.2)*2 B1.2-3", "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"),
        ("(F2.0 B2.0)*3 S2 U2", "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 S2 U2"),
    ],
)
def test_a_line_stands_for_its_actions_and_is_what_they_are_written_as(line: str, written_out: str) -> None:
    assert list(decode(line)) == steps(written_out)
    assert encode(steps(written_out)) == line


@pytest.mark.parametrize(
    "line",
    ["X0.1", "F0", "F0.", "0F1", "(F0.1 B0.1", "(F0.1)*", "F0.1xyz", "(F0.0)*999999999", "F0.0-99999999"],
)
def test_a_damaged_line_is_refused(line: str) -> None:
    with pytest.raises(PlanError):
        decode(line)


@given(st.lists(actions, max_size=40))
@settings(deadline=None, max_examples=200)
def test_any_list_of_actions_comes_back(listed: list[Action]) -> None:
    assert list(decode(encode(listed))) == listed


@given(st.dictionaries(st.integers(0, 9), st.lists(actions, max_size=12), max_size=4))
@settings(deadline=None, max_examples=100)
def test_any_orders_of_ranks_come_back(orders: dict[int, list[Action]]) -> None:
    lines = encode_orders(orders)
    assert {rank: list(line.expand(rank)) for line in lines for rank in line.ranks} == orders


def test_replicas_that_take_turns_share_a_line() -> None:
    (line,) = encode_orders({4: steps("F0.0 B0.0 F0.2 B0.2 S0"), 5: steps("F0.1 B0.1 F0.3 B0.3 S0")})
    assert (line.ranks, line.first, line.step, line.actions) == ((4, 5), (0, 1), 2, "(F0.0 B0.0)*2 S0")

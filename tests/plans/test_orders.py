"""Lines of actions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plans import Steady, Steps, decode, encode, encode_orders
from planner.schedules import Action, ActionKind, parse_action

F, B, S, U = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.SYNC, ActionKind.UPDATE


def made(kind: ActionKind, stage: int, micro_batch: int = -1, *more: int, **named: Any) -> Action:
    """An action; what is not given has its default, whatever its type."""
    return Action(kind, stage, micro_batch, *more, **named)


COUNTED = [S, U, ActionKind.LAUNCH_SYNC]
mostly_absent = st.sampled_from([-1, -1, 0, 1, 2])
actions = st.one_of(
    st.builds(
        made,
        st.sampled_from([kind for kind in ActionKind if kind not in COUNTED]),
        st.integers(0, 2),
        st.integers(0, 5),
        mostly_absent,
        mostly_absent,
        mostly_absent,
        st.booleans(),
    ),
    st.builds(made, st.sampled_from(COUNTED), st.integers(0, 2), mostly_absent),
)
patterns = st.lists(actions, min_size=1, max_size=5)
rises = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))


@st.composite
def repetitive(draw: st.DrawFn) -> list[Action]:
    """Bodies that come again and again with rising numbers, one after the other, as schedules have them."""
    found: list[Action] = []
    for body, times, rise in draw(st.lists(st.tuples(patterns, st.integers(1, 9), rises), max_size=4)):
        for i in range(times):
            found += [raised(action, i, rise) for action in body]
    return found


def raised(action: Action, times: int, rise: tuple[int, int, int, int]) -> Action:
    by = rise[1] if action.kind in (S, ActionKind.LAUNCH_SYNC) else rise[2] if action.kind is U else rise[0]
    number = action.micro_batch + times * by if action.micro_batch >= 0 else -1
    version = action.version + times * rise[3] if action.version >= 0 else -1
    return action._replace(micro_batch=number, version=version)


def steps(text: str) -> list[Action]:
    """Actions written one by one, `F0.3 B0.1 S0`."""
    return [parse_action(word) for word in text.split()]


@pytest.mark.parametrize(
    ("line", "written_out"),
    [
        ("F0.0-3 B0.0-3 S0 U0", "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 S0 U0"),
        ("F0.0-1 B0.1-0", "F0.0 F0.1 B0.1 B0.0"),
        ("F1.0-1 (B1.0 F1.2)*2 B1.2-3", "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"),
        ("(F2.0 B2.0)*3 S2 U2", "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 S2 U2"),
        ("(F0.0 F1.1)*3+2", "F0.0 F1.1 F0.2 F1.3 F0.4 F1.5"),
        ("(F0.0-1 B0.0-1 G0.0)*2+2", "F0.0 F0.1 B0.0 B0.1 G0.0 F0.2 F0.3 B0.2 B0.3 G0.1"),
        ("(F0.0@0 B0.0@0 U0.0)*3v1", "F0.0@0 B0.0@0 U0.0 F0.1@1 B0.1@1 U0.1 F0.2@2 B0.2@2 U0.2"),
        ("(F0.0 S0.0 U0.0)*2+4s2u4", "F0.0 S0.0 U0.0 F0.4 S0.2 U0.4"),
        ("(F0.0/0 F0.0/1)*2", "F0.0/0 F0.0/1 F0.1/0 F0.1/1"),
        ("F0.0-1@0 +B0.0 RA0.2", "F0.0@0 F0.1@0 +B0.0 RA0.2"),
    ],
)
def test_a_line_stands_for_its_actions_and_is_what_they_are_written_as(line: str, written_out: str) -> None:
    assert list(decode(line)) == steps(written_out)
    assert encode(steps(written_out)) == line


@pytest.mark.parametrize(
    "line",
    [
        "X0.1",
        "F0",
        "F0.",
        "0F1",
        "(F0.1 B0.1",
        "(F0.1)*",
        "F0.1xyz",
        "(F0.0)*999999999",
        "F0.0-99999999",
        "E0.1>3",
        "[F0.1",
        "F0.1]",
        "([F0.1])*2",
        "[F0.1] [F0.2]",
        "(F0.1]",
        "((F0.1)*2000)*2000",
        "(F0.1@0)*3v-1",
        "(F0.1)*3+1v",
    ],
)
def test_a_damaged_line_is_refused(line: str) -> None:
    with pytest.raises(PlanError):
        decode(line)


@given(st.one_of(st.lists(actions, max_size=40), repetitive()), st.integers(0, 3))
@settings(deadline=None, max_examples=300)
def test_any_list_of_actions_comes_back(listed: list[Action], rank: int) -> None:
    assert list(decode(encode(listed, rank=rank), rank=rank)) == listed


@given(patterns, st.integers(1, 9), rises)
@settings(deadline=None, max_examples=100)
def test_repetition_is_not_written_out(body: list[Action], times: int, rise: tuple[int, int, int, int]) -> None:
    """A body takes as many words as it has actions, however often it comes again."""
    listed = [raised(action, i, rise) for i in range(times) for action in body]
    assert len(encode(listed).split()) <= len(body)


def test_what_goes_on_for_ever_is_in_brackets() -> None:
    listed = steps("F0.0@0 B0.0@0 U0.0 F0.1@1 B0.1@0 U0.1 B0.2@1")
    line = encode(listed, steady=Steady(3, 6, Steps(1, 1, 1, 1)))
    assert line == "F0.0@0 B0.0@0 U0.0 [F0.1@1 B0.1@0 U0.1]v1 B0.2@1"
    longer = "F0.0@0 B0.0@0 U0.0 F0.1@1 B0.1@0 U0.1 F0.2@2 B0.2@1 U0.2 B0.3@2"
    assert " ".join(map(str, decode(line, times=2))) == longer


def test_what_is_evicted_is_kept_by_a_rank_some_way_off() -> None:
    """Two replicas lend to ranks three further on: one line."""
    orders = {r: [parse_action(f"F0.{r}"), parse_action(f"E0.{r}>{r + 3}")] for r in (0, 1)}
    (line,) = encode_orders(orders)
    assert (line.ranks, line.first, line.actions) == ((0, 1), (0, 1), "F0.0 E0.0>+3")
    assert line.expand(1) == tuple(orders[1])


@given(st.dictionaries(st.integers(0, 9), st.lists(actions, max_size=12), max_size=4))
@settings(deadline=None, max_examples=100)
def test_any_orders_of_ranks_come_back(orders: dict[int, list[Action]]) -> None:
    lines = encode_orders(orders)
    assert {rank: list(line.expand(rank)) for line in lines for rank in line.ranks} == orders


def test_replicas_that_take_turns_share_a_line() -> None:
    (line,) = encode_orders({4: steps("F0.0 B0.0 F0.2 B0.2 S0"), 5: steps("F0.1 B0.1 F0.3 B0.3 S0")})
    assert (line.ranks, line.first, line.step, line.actions) == ((4, 5), (0, 1), 2, "(F0.0 B0.0)*2 S0")

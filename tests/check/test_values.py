"""Any number in the file, multiplied, negated or made zero: a check finds it, or the number is listed here."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.errors import PlanError
from planner.plans import loads, seal, to_document
from tests.check.plans import loaded, planned

FAST = ("replicas", "pipeline", "unequal replicas", "tied stages", "zero 3", "gpipe", "zb-h1", "interleaved",
        "pipedream-2bw by name", "orders of one's own", "parallax")  # fmt: skip

NOT_FOUND = frozenset((
    ("options", "schedules"), ("options", "zero"), ("options", "max_stages"), ("options", "dropout"),
    ("options", "assume_dropout"), ("options", "fused_attention"), ("options", "overlap"), ("options", "recompute"),
))  # fmt: skip
"""Options that need not change the answer, where the plan keeps to them all the same."""

Path = tuple[str | int, ...]


def numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all numbers and truth values of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from numbers(item, (*path, key))
    if isinstance(value, (int, float)) and path[0] != "version":
        yield path


@functools.cache
def sections(kind: str) -> dict[tuple[str, ...], list[Path]]:
    """Paths by their names, so that long lists do not outweigh the rest."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for path in numbers(to_document(planned(kind))):
        found.setdefault(tuple(str(p) for p in path if isinstance(p, str)), []).append(path)
    return found


@pytest.mark.parametrize("kind", FAST)
@given(data=st.data())
@settings(deadline=None, max_examples=12, derandomize=True)
def test_a_changed_number_is_found(kind: str, data: st.DataObject) -> None:
    own = sections(kind)
    path = data.draw(st.sampled_from(own[data.draw(st.sampled_from(sorted(own)))]))
    document = copy.deepcopy(to_document(planned(kind)))
    at: Any = document
    for part in path[:-1]:
        at = at[part]
    before = at[path[-1]]
    at[path[-1]] = data.draw(st.sampled_from([not before] if isinstance(before, bool) else [2 * before, -before, 0]))
    if at[path[-1]] == before or path[:2] in NOT_FOUND:
        return
    try:
        plan = seal(loads(json.dumps(document)))
    except PlanError:
        return
    assert check_plan(plan).findings or check_plan(plan, *loaded(kind), search_s=60).findings, path

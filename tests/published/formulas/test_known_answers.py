"""Every case of the reference answers, by name, through `import planner`: all of its figures, none left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.published.formulas.answers import ANSWER
from tests.shared_data import ROOT, shared_path

NOTES = {("Piper", "note"), ("AutoDDL", "note"), ("HetPipe", "boundaries"), ("HetPipe", "order")}
"""Remarks of the reference, and plans of which several are as good (their figures are compared)."""


def cases() -> Iterator[Any]:
    path = ROOT / "reference" / "known_answers.json"
    groups = json.loads(path.read_text()) if path.exists() else {}
    for system, entries in groups.items():
        for number, case in enumerate(entries):
            yield pytest.param(system, case, id=f"{system}-{number}-{case['name']}")


ROUNDED = {("PipelinedBackprop", "eta1"): 1e-4, ("Piper", "tps"): 5e-6}
"""Relative tolerance of figures that the reference gives with few digits."""


def figures(system: str, expected: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(expected, dict):
        for key, value in expected.items():
            if (system, key) not in NOTES:
                yield from figures(system, value, (*where, key))
    else:
        yield where, expected


def same(found: Any, expected: Any, tolerance: float) -> bool:
    if callable(found):
        return all(
            found(1.0, ranks) == pytest.approx(eval(expected.replace("2(", "2*("), {"P": ranks}))  # a formula in P
            for ranks in (2, 3, 8, 64)
        )
    if expected is None or isinstance(expected, str):
        return bool(found == expected)
    if isinstance(expected, list):
        return list(found) == pytest.approx(expected, rel=tolerance, abs=1e-9)
    return bool(found == pytest.approx(expected, rel=tolerance))


@pytest.mark.parametrize(("system", "case"), list(cases()))
def test_known_answer(system: str, case: dict[str, Any]) -> None:
    found = ANSWER[system](case["name"], case["input"])
    wrong = []
    for where, expected in figures(system, case["expect"]):
        value: Any = found
        for key in where:
            value = value.get(key, "not computed")
        if not same(value, expected, ROUNDED.get((system, where[-1]), 1e-6)):
            wrong.append((where, value, expected))
    assert not wrong


def test_every_system_is_answered() -> None:
    assert set(json.loads(shared_path("reference/known_answers.json").read_text())) == set(ANSWER)

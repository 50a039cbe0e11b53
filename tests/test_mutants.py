"""Changes that a trial of the tests makes: each is one expression of one line, and the file still compiles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import drawn, main, mutants

SOURCE = '''"""Docstrings, annotations and f-strings stay: 1 < 2."""

PRICE: Annotated[int, 7] = 3


def known(a: "int | 5", b=1.5) -> Literal[4]:
    """Less than 3."""
    total = min(a, b) if a < b and not b else sum(a[1:]) - b
    return range(total), f"{a + b}", -b, "text"
'''


def test_changes_of_a_file() -> None:
    found = mutants(Path("known.py"), SOURCE)
    assert {(m.line, m.old, m.new) for m in found} == {
        (3, "3", "4"),
        (6, "1.5", "2.5"),
        (8, "min(a, b)", "max(a, b)"),
        (8, "a < b and (not b)", "a < b or not b"),
        (8, "a < b and (not b)", "a < b"),
        (8, "a < b", "a <= b"),
        (8, "not b", "b"),
        (8, "sum(a[1:]) - b", "sum(a[1:]) + b"),
        (8, "sum(a[1:]) - b", "sum(a[1:])"),
        (8, "sum(a[1:])", "max(a[1:])"),
        (8, "a[1:]", "a[:]"),
        (8, "1", "2"),
        (9, "range(total)", "range(total - 1)"),
        (9, "-b", "b"),
    }
    for mutant in found:
        changed = [
            k for k, (a, b) in enumerate(zip(SOURCE.splitlines(), mutant.source.splitlines(), strict=True), 1) if a != b
        ]
        assert changed == [mutant.line], mutant
        ast.parse(mutant.source)


def test_the_same_seed_draws_the_same_lines() -> None:
    every = mutants(Path("known.py"), SOURCE)
    assert drawn(every, 3, seed=1) == drawn(every, 3, seed=1)
    assert [m.line for m in drawn(every, 99, seed=1)] == [3, 6, 8, 9]
    assert len({tuple(drawn(every, 4, seed)) for seed in range(20)}) > 1


def test_a_trial_says_what_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sum that begins with 1 instead of 0 is no longer 3, but still more than 2."""
    test = tmp_path / "test_it.py"
    line = Path(__file__).parents[1].joinpath("planner/sums.py").read_text().splitlines().index(
        "def float_sum(values: Iterable[float], start: float = 0) -> float:"
    ) + 1  # fmt: skip
    for expected, said in (("== 3", "1 of 1 caught"), ("> 2", "survivor: planner/sums.py:")):
        test.write_text(f"from planner.sums import float_sum\ndef test_it(): assert float_sum([1, 2]) {expected}\n")
        assert main(["sums", "--at", f"planner/sums.py:{line}", "--tests", str(test)]) == 0
        assert said in capsys.readouterr().out
    test.write_text("def test_it(): assert False\n")
    assert main(["sums", "--tests", str(test)]) == 1
    assert "fail without any change" in capsys.readouterr().out

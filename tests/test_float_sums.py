"""Sums of floats are the same on every version of Python, and nothing can add floats in another way unseen."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest

from planner.sums import float_sum

ROOT = Path(__file__).parents[1]

UNSTABLE = {"statistics": {"fmean", "mean", "stdev", "correlation", "linear_regression"}, "math": {"sumprod"}}
"""Functions of the library that add floats and were changed between versions of Python, or are not in all of them."""


@pytest.mark.parametrize(
    ("values", "added"),
    [
        ([1e16, 1.0, 1.0, -1e16], 0.0),  # each 1 is lost in 1e16, whose neighbours are 2 apart; exact would be 2
        ([1.0, 1.0, 1e16, -1e16], 2.0),  # from the left: 2 reaches 1e16 whole
        ([0.1] * 10, 0.9999999999999999),
        ([math.inf, 1.0], math.inf),
        ([1, 2], 3),
        ([], 0),
    ],
)
def test_floats_are_added_from_left_to_right(values: list[float], added: float) -> None:
    assert float_sum(values) == added
    assert float_sum(iter(values)) == added


def test_a_sum_begins_with_its_start() -> None:
    assert float_sum([1.0, 1.0], 1e16) == 1e16
    assert float_sum([], 0.5) == 0.5
    assert math.isnan(float_sum([math.inf, -math.inf]))


def _passed_on(source: str) -> list[int]:
    """Lines where `sum` is passed on instead of called, or a function of `UNSTABLE` is used."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "sum" and id(node) not in called:
            lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            lines += [node.lineno] * (node.attr in UNSTABLE.get(node.value.id, ()))
        elif isinstance(node, ast.ImportFrom):
            lines += [node.lineno for name in node.names if name.name in UNSTABLE.get(node.module or "", ())]
    return lines


def test_sum_is_not_passed_on() -> None:
    """The check of types looks at calls; `map(sum, rows)` would pass it."""
    assert _passed_on("x = sum(a)\ny = map(sum, rows)\nfrom statistics import median, fmean\nmath.sumprod(a, b)") == [
        3,
        2,
        4,
    ]
    found = {
        str(path.relative_to(ROOT)): lines
        for top in ("planner", "cli", "models")
        for path in sorted((ROOT / top).rglob("*.py"))
        if (lines := _passed_on(path.read_text(encoding="utf-8")))
    }
    assert found == {}


SNIPPET = """
from typing import Any
from planner.sums import float_sum

def adds(counts: list[int], seconds: list[float], rows: list[Any], of: dict[str, float], texts: list[str]) -> None:
    sum(counts) + sum(len(t) for t in texts) + sum(t == "" for t in texts) + sum((1, 2))
    float_sum(seconds) + float_sum(s for s in of.values())
    sum(seconds)
    sum(s for s in of.values())
    sum(map(float, counts))
    sum(rows)
    sum(counts, 0.0)
    sum([1, 0.5])
    sum((1, seconds[0]))
    sum(n if n else 0.5 for n in counts)
"""


def test_types_tell_sums_of_floats(tmp_path: Path) -> None:
    """`make check` refuses the builtin `sum` of floats, of what may be floats, and from a float on."""
    pytest.importorskip("mypy")
    (tmp_path / "adds.py").write_text(SNIPPET)
    config = f"[mypy]\nplugins = {ROOT / 'benchmarks' / 'float_sums.py'}\nfollow_imports = silent\n"
    (tmp_path / "mypy.ini").write_text(config)
    command = ["-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "adds.py"]
    run = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    refused = [int(line.split(":")[1]) for line in run.stdout.splitlines() if line.endswith("[float-sum]")]
    assert refused == list(range(8, 16)), run.stdout + run.stderr


PLANNED = """
import builtins

def compensated(values, /, start=0):
    '''Neumaier's sum, as Python 3.12 and later add floats.'''
    total, lost = start, 0.0
    for value in values:
        if type(total) is float and type(value) in (float, int):
            added = total + value
            lost += (total - added) + value if abs(total) >= abs(value) else (value - added) + total
            total = added
        else:
            total = total + value
    return total + lost if type(total) is float and lost and abs(lost) < float("inf") else total

def plain(values, /, start=0):
    '''From left to right, as Python 3.11 adds floats.'''
    total = start
    for value in values:
        total = total + value
    return total

builtins.sum = {adding}
assert (sum([0.1] * 10) == 1.0) == ("{adding}" == "compensated")

import hashlib, json, planner

cluster = planner.load_cluster("dgx-a100")
for model, dims in (("gpt2", {{"seq": 128}}), ("resnet50", None)):
    plan = planner.plan(planner.load_graph(model, dims=dims), cluster, planner.Job(global_batch=64))
    print(hashlib.sha256(json.dumps(planner.plans.to_document(plan), sort_keys=True).encode()).hexdigest())
"""


def test_plans_do_not_hang_on_how_the_builtin_adds() -> None:
    """Both ways in which versions of Python add floats give the same plan, runners-up and last digits included."""
    digests = [
        subprocess.run(
            [sys.executable, "-c", PLANNED.format(adding=adding)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for adding in ("plain", "compensated")
    ]  # fmt: skip
    assert len(digests[0].split()) == 2
    assert digests[0] == digests[1]

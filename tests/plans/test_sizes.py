"""What a plan file claims is held against what can be before anything is written out to it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlanError
from planner.plans import dumps, loads
from tests.cli.plan_files import run, written
from tests.plans.sample import make_plan


def edited(path: str, literal: str) -> str:
    """The text of a plan with a JSON literal at a path."""
    document = json.loads(dumps(make_plan()))
    target: Any = document
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        target = target[part]
    target[last] = "@literal@"
    return json.dumps(document).replace('"@literal@"', literal)


@pytest.mark.parametrize(
    ("path", "literal", "message"),
    [
        ("world_size", "100000000", r"world_size: is 100000000 .*1,048,576"),
        ("world_size", "0", "world_size: is 0"),
        ("hardware.device_count", "100000000", "device_count: is 100000000"),
        ("micro_batches.count", "1000000000000", "micro_batches.count: is 1000000000000"),
        ("schedule.iterations", "1000000000", "schedule.iterations: is 1000000000"),
        ("alternatives.0.replicas", "[]", r"alternatives\[0\].replicas: has 0 entries, starts has 2"),
        ("schedule.orders.0.first", "[0, 1, 2]", r"orders\[0\].first: has 3 entries, ranks has 1"),
        ("world_size", "9" * 5000, "a number of 5000 characters is beyond what can be read"),
        ("world_size", "9223372036854775808", "9223372036854775808 is beyond"),
        ("predictions.iteration_s", "1e400", "1e400 is beyond"),
        ("predictions.iteration_s", "-Infinity", "-Infinity is not JSON"),
    ],
)
def test_sizes_and_numbers_that_cannot_be(path: str, literal: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        loads(edited(path, literal), name="p.json")
    assert str(caught.value).startswith("p.json:")


def test_a_number_is_found_by_line_and_column() -> None:
    text = dumps(make_plan())
    line = next(i for i, content in enumerate(text.splitlines(), 1) if '"world_size"' in content)
    column = text.splitlines()[line - 1].index(": ") + 3
    start = text.index('"world_size": ') + len('"world_size": ')
    changed = text[:start] + "9" * 4301 + text[text.index(",", start) :]
    with pytest.raises(PlanError) as caught:
        loads(changed, name="p.json")
    assert caught.value.problem.where == f"p.json:{line}:{column}"


def test_a_world_of_a_hundred_million_ranks_takes_no_memory() -> None:
    text = edited("world_size", "100000000")
    tracemalloc.start()
    with pytest.raises(PlanError):
        loads(text)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 50_000_000


@pytest.mark.parametrize("command", ["check", "explain", "simulate"])
def test_commands_refuse_such_plans(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(make_plan(), tmp_path)
    path.write_text(edited("world_size", "9" * 5000))
    assert run(command, path) == 7
    assert capsys.readouterr().err.count("\n") == 1

"""Orders of one's own from files: read, checked, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.schedules import Action, ActionKind, Pipeline, get, orders_json, read_orders
from planner.schedules.orders_file import parse_action
from planner.simulate import StageTimes, measure_orders

CSV = """worker,action
0,F0.0
1,F1.0
1,B1.0
0,B0.0
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_of_actions(tmp_path: Path) -> None:
    work = read_orders(written(tmp_path / "own.csv", CSV))
    assert [" ".join(map(str, lane)) for lane in work.lanes] == ["F0.0 B0.0", "F1.0 B1.0"]
    assert measure_orders(work, StageTimes.of([1.0, 1.0], [2.0, 2.0])).makespan_s == 6


def test_csv_of_columns(tmp_path: Path) -> None:
    text = "worker, kind, stage, micro_batch, version, paired\n0,forward,0,0,0,\n0,U,0,,,\n0,B,0,0,0,\n"
    work = read_orders(written(tmp_path / "own.csv", text))
    assert [str(a) for a in work.lanes[0]] == ["F0.0@0", "U0", "B0.0@0"]


@pytest.mark.parametrize(
    "name",
    ["1f1b", "seq1f1b:splits=3", "dualpipe", "bpipe", "pipedream", "bapipe-fbp", "chimera:over=halve", "hetpipe"],
)
def test_orders_of_every_kind_come_back(name: str, tmp_path: Path) -> None:
    work = get(name).work(Pipeline((1,) * 4, 8))
    assert read_orders(written(tmp_path / "own.json", orders_json(work))) == work


@pytest.mark.parametrize("word", ["F2.5", "+B1.4@3", "E0.2>3", "F0.3/1", "S0", "U3.7", "SA0.1/0", "RG2.2"])
def test_actions_come_back(word: str) -> None:
    assert str(parse_action(word)) == word


@pytest.mark.parametrize("word", ["X0.1", "F", "F0", "F0.x", "F0.1/", "0.1", "F-1.0"])
def test_words_that_are_no_action(word: str) -> None:
    with pytest.raises(PlanError):
        parse_action(word)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("worker,action\n0,F0.0\n0,B0\n", 3, "B needs a micro-batch"),
        ("worker,action\n0,F0.0\nx,B0.0\n", 3, "cannot read worker 'x'"),
        ("worker,action\n0,F0.0\n0,B0.1\n", 3, "B0.1 needs its forward"),
        ("worker,action\n0,B0.0\n0,F0.0\n", 2, "does not come after its forward"),
        ("worker,action\n0,F0.0\n0,F0.0\n0,B0.0\n", 3, "scheduled more than once"),
        ("worker,action\n0,F0.0\n0,B0.0@1\n", 3, "reads version 1"),
        ("worker,task\n0,F0.0\n", 1, "unknown column 'task'"),
        ("worker,kind\n0,F\n", 1, "columns are missing"),
        ("worker,kind,stage,micro_batch\n0,forwards,0,0\n", 2, "unknown kind 'forwards'"),
        (
            "worker,action\n0,F0.0\n0,F0.1\n0,B0.0\n0,B0.1\n1,F1.0\n1,B1.0\n1,B1.1\n1,F1.1\n",
            8,
            "come after its forward",
        ),
    ],
)
def test_csv_errors_name_the_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", text)
    with pytest.raises(PlanError, match=message) as caught:
        read_orders(path)
    assert caught.value.problem.where == f"{path}:{line}"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{\n"lanes": [\n"F0.0 B0.0",\n"F1.0 B1.0 Q1"\n]}', 4, "cannot read action 'Q1'"),
        ('{\n"lanes": [\n"F0.0 B0.0",\n"B1.0 F1.0"\n]}', 4, "does not come after its forward"),
        ('{"lanes": ["F0.0 B0.0"],\n"part": 2}', 2, "unknown setting 'part'"),
        ('{"lanes": ["F0.0 B0.0"],\n"parts": 0}', 2, "parts is 0"),
        ('{"lane": []}', 1, "no lanes"),
        ('{"lanes": [7]}', 1, "neither a text nor a list"),
    ],
)
def test_json_errors_name_the_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "own.json", text)
    with pytest.raises(PlanError, match=message) as caught:
        read_orders(path)
    assert caught.value.problem.where == f"{path}:{line}"


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path / "own.json", '{"lanes": [\n"F0.0"\n"B0.0"]}')
    with pytest.raises(PlanError, match="no JSON") as caught:
        read_orders(path)
    assert caught.value.problem.where == f"{path}:3:1"


def test_deadlock_in_a_file_shows_the_cycle(tmp_path: Path) -> None:
    text = '{"lanes": ["F0.0 B0.0 F0.1 B0.1",\n "F1.0 F1.1 B1.0 B1.1"]}'
    with pytest.raises(PlanError, match=r"worker 0 at B0\.0 waits for B1\.0; worker 1 at F1\.1 waits for F0\.1"):
        read_orders(written(tmp_path / "own.json", text))


def test_missing_file_and_missing_worker(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read orders"):
        read_orders(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="worker 0 has no actions"):
        read_orders(written(tmp_path / "own.csv", CSV.replace("0,", "2,")))


def test_unchecked_orders_are_read_as_they_are(tmp_path: Path) -> None:
    work = read_orders(written(tmp_path / "own.json", '{"lanes": ["B0.0"]}'), check=False)
    assert work.lanes == ((Action(ActionKind.BACKWARD, 0, 0),),)

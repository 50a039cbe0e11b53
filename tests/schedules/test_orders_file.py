"""Orders of one's own from files: read, checked, and errors that name the line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.play import StageTimes, measure_orders
from planner.schedules import Pipeline, get, parse_action, read_orders

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


@pytest.mark.parametrize(
    "name",
    ["1f1b", "seq1f1b:splits=3", "dualpipe", "bpipe", "pipedream", "bapipe-fbp", "chimera:over=halve", "hetpipe"],
)
def test_orders_of_every_kind_come_back(name: str, tmp_path: Path) -> None:
    work = get(name).work(Pipeline((1,) * 4, 8))
    document = {f.name: getattr(work, f.name) for f in dataclasses.fields(work) if getattr(work, f.name) != f.default}
    document["lanes"] = [" ".join(map(str, lane)) for lane in work.lanes]
    assert read_orders(written(tmp_path / "own.json", json.dumps(document))) == work


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
        ("worker,action\n0,F0.0\n0\n", 3, "the action is missing"),
        ("worker,action\n0,F0.0,F0.1\n", 2, "more cells than the 2 columns"),
        ("worker,task\n0,F0.0\n", 1, "unknown column 'task'"),
        ("worker,lane\n0,0\n", 1, "columns are missing"),
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
        ('{"lanes": ["F0.0 B0.0"],\n"part": 2}', "2:9", "unknown key 'part'"),
        ('{"lanes": ["F0.0 B0.0"],\n"parts": 0}', 2, "parts below 1: 0"),
        ('{"lane": []}', 1, "no lanes"),
        ('{"lanes": [7]}', "1:12", r"lanes\[0\]: input should be a valid array"),
        ('{\n"lanes": []\n}', 2, "no lanes"),
        ('{\n"lanes": [\n"F0.0 B0.0",\n""\n]}', 4, "lane 1 has no actions"),
        ('{\n"lanes": [\n"F0.0 B0.0",\n"F2.0 B2.0"\n]}', 4, "stage 1 has no actions, but F2.0 is there"),
        ('{\n"lanes": [\n"F0.0 B0.0 F0.2 B0.2"\n]}', 3, "micro-batch 1 has no actions, but F0.2 is there"),
        ('{\n"lanes": [\n"F0.0 B0.0 F0.900000000000 B0.900000000000"\n]}', 3, "micro-batch 1 has no actions"),
        ('{\n"lanes": [\n"F0.0 SA0.0 B0.0",\n"F1.0 B1.0"\n]}', 3, "SA0.0: stage 1 never receives it"),
        ('{\n"lanes": [\n"F0.0 B0.0",\n"RA1.0 F1.0 B1.0"\n]}', 4, "RA1.0: stage 0 never sends it"),
        ('{\n"lanes": [\n"F0.0 B0.0",\n"F1.0 SA1.0 B1.0"\n]}', 4, "SA1.0: no stage receives it"),
        ('{\n"lanes": [\n"F0.0 E0.0>9 L0.0 B0.0",\n"F1.0 B1.0"\n]}', 3, "E0.0 evicts to worker 9 of 2"),
        ('{\n"lanes": [\n"F0.0 E0.0>0 L0.0 B0.0",\n"F1.0 B1.0"\n]}', 3, "E0.0 evicts to the worker itself"),
        ('{\n"lanes": [\n"F0.0 B0.0 E0.0>1 L0.0",\n"F1.0 B1.0"\n]}', 3, "E0.0 comes after its backward"),
        ('{\n"lanes": [\n"F0.0 B0.0 W0.0"\n]}', 3, "W0.0 is a part of the whole backward"),
        ('{\n"lanes": [\n"F0.0 B0.0 S1",\n"F1.0 B1.0"\n]}', 3, "S1 is of a stage of which worker 0 computes nothing"),
        ('{\n"lanes": [\n"F0.0 B0.0 S0 F0.1 B0.1 U0"\n]}', 3, "S0 is exchanged before B0.1"),
        ('{\n"lanes": [\n"F0.0 B0.0 U0 S0"\n]}', 3, "U0 updates the weights before S0"),
        (
            '{\n"lanes": [\n"F0.0 B0.0 U0.0 F0.1 B0.1 U0.1",\n"F1.0 B1.0 F1.1 B1.1"\n]}',
            4,
            "no update of stage 1 comes after B1.1: its gradient is dropped",
        ),
        ('{"lanes": ["F0.0 B0.0"],\n"versions": [1, 1]}', 2, "1 stages, but versions for 2"),
        ('{"lanes": ["F0.0 B0.0", "F1.0 B1.0"],\n"limits": [1]}', 2, "2 stages, but limits for 1"),
        ('{"lanes": ["F0.0 B0.0"],\n"limits": [0]}', 2, r"limits below 1: \(0,\)"),
        ('{"lanes": ["F0.0 B0.0"],\n"workers": [0, 0]}', 2, "1 lanes, but workers for 2"),
        ('{"lanes": ["F0.0 B0.0"],\n"streaming": true}', 2, "streaming is only for shared workers"),
        ('{"lanes": ["F0.0 B0.0"],\n"parts": true}', "2:10", "parts: input should be a valid integer"),
        ('{"lanes": ["F0.0 B0.0"],\n"workers": [-1]}', 2, "workers below 0"),
        ('{"lanes": ["F0.0 B0.0"],\n"parts": 1,\n"parts": 2}', "3:10", "'parts' appears twice"),
    ],
)
def test_json_errors_name_the_line(text: str, line: int | str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "own.json", text)
    with pytest.raises(PlanError, match=message) as caught:
        read_orders(path)
    assert caught.value.problem.where == f"{path}:{line}"


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path / "own.json", '{"lanes": [\n"F0.0"\n"B0.0"]}')
    with pytest.raises(PlanError, match="not JSON") as caught:
        read_orders(path)
    assert caught.value.problem.where == f"{path}:3:1"


def test_deadlock_in_a_file_shows_the_cycle(tmp_path: Path) -> None:
    text = '{"lanes": ["F0.0 B0.0 F0.1 B0.1",\n "F1.0 F1.1 B1.0 B1.1"]}'
    with pytest.raises(PlanError, match=r"worker 0 at B0\.0 waits for B1\.0; worker 1 at F1\.1 waits for F0\.1"):
        read_orders(written(tmp_path / "own.json", text))


def test_exchanges_in_different_orders_show_whom_each_waits_for(tmp_path: Path) -> None:
    text = '{"lanes": ["F0.0 B0.0 F1.1 B1.1 S0 S1",\n "F1.0 B1.0 F0.1 B0.1 S1 S0"]}'
    cycle = "worker 0 at S0 waits for S0 of worker 1; worker 1 at S1 waits for S1 of worker 0"
    with pytest.raises(PlanError, match=cycle):
        read_orders(written(tmp_path / "own.json", text))


def test_a_mark_of_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV, encoding="utf-8-sig")
    assert len(read_orders(path).lanes) == 2


def test_missing_file_and_missing_worker(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read: No such file"):
        read_orders(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="worker 0 has no actions"):
        read_orders(written(tmp_path / "own.csv", CSV.replace("0,", "2,")))

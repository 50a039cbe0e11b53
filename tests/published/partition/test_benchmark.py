"""The partition benchmark: its cases, its own peer protocol and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.partition_cases import all_cases
from benchmarks.partition_measure import build, deepened, measure
from benchmarks.partition_peer import run_peer
from benchmarks.partition_tables import tables
from tests.published.partition.instances import PIPEDREAM, operator_graph, written
from tests.shared_data import shared_path

ROOT = Path(__file__).resolve().parents[3]


def _case(path: Path) -> dict[str, Any]:
    return {"table": "contiguous", "label": "small", "kind": "max-load", "path": str(path), "contiguous": True,
            "limit_s": 20.0}  # fmt: skip


def test_a_case_is_measured(tmp_path: Path) -> None:
    row = measure(_case(written(operator_graph(), tmp_path / "small.json")))
    assert (row["objective"], row["bound"], row["gap"], row["proven"]) == (5.5, 5.5, 0.0, True)
    assert (row["nodes"], row["ideals"]) == (4, 5)
    assert row["seconds"] >= 0
    assert row["megabytes"] > 10


def test_a_case_without_plan_says_so(tmp_path: Path) -> None:
    path = written(operator_graph(maxCPUs=0, maxSizePerFPGA=90), tmp_path / "small.json")
    row = measure(_case(path))
    assert row["objective"] is None
    assert row["proven"]
    assert "none exists" in tables([{**_case(path), **row}])


PEER = """
import json, sys
graph = json.load(sys.stdin)
ids = [node["id"] for node in graph["nodes"]]
print(json.dumps({"fpgas": [{"nodes": ids[:1]}, {"nodes": ids[1:]}], "cpus": [{"nodes": []}], "maxLoad": 8.5}))
"""


def test_a_peers_split_is_judged_here(tmp_path: Path) -> None:
    """One node against three: 3 + 3 + 2 ms and a transfer of 0.5 ms, over the memory of 250 unless there is more."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    case = _case(written(operator_graph(maxSizePerFPGA=1000), tmp_path / "small.json"))
    found = run_peer(f"{sys.executable} {script}", case, 60.0)
    assert (found["objective"], found["judged"], found["finished"]) == (8.5, 8.5, True)
    assert found["megabytes"] > 1
    tight = _case(written(operator_graph(), tmp_path / "tight.json"))
    assert run_peer(f"{sys.executable} {script}", tight, 60.0)["judged"] is None


def test_a_peer_gets_what_its_command_asks_for(tmp_path: Path) -> None:
    case = _case(written(operator_graph(), tmp_path / "small.json")) | {"devices": 3}
    command = f"{sys.executable} -c 'import sys; print(*sys.argv); print(\"TPS: 1.25\")' {{instance}} {{devices}}"
    assert run_peer(command, case, 60.0)["objective"] == 1.25


def test_a_peer_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    case = _case(written(operator_graph(), tmp_path / "small.json"))
    found = run_peer(f"{sys.executable} -c 'while True: pass'", case, 0.3)
    assert (found["finished"], found["objective"]) == (False, None)


def test_tables_compare_with_what_was_recorded() -> None:
    row = {
        "table": "pipedream", "label": "vgg", "unit": "s", "nodes": 40, "ideals": 41, "objective": 0.05, "bound": 0.05,
        "gap": 0.0, "proven": True, "seconds": 0.2, "cpu_s": 0.1, "megabytes": 96.0,
        "recorded": {"pipe_s": 0.06, "dp_s": 2.5},
    }  # fmt: skip
    text = tables([row])
    assert "| vgg | 40 | 41 | 50 | optimal | 0.2 | 0.1 | 96 | 60 | +20.0% | 25x |" in text
    assert "1 of 1 proven; 1 of 1 no worse than recorded; recorded CPU time over ours: 25 to 25" in text


def test_the_program_writes_its_document(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    for name in ("operator_graphs/LayerGraphs", "pipedream"):
        (folder / name).mkdir(parents=True)
    written(operator_graph(), folder / "operator_graphs/LayerGraphs/small.json")
    written(PIPEDREAM, folder / "pipedream/small.graph.txt")
    row = {"profile": "small", "n": [4], "b": [1e9], "comm": 1, "mem": 0, "straight": 0, "fewer": 0, "pipe_s": 0.05}
    peers = {"operator_graphs": {}, "piper_bert32a100": [], "pipedream": [row]}
    (folder / "peers.json").write_text(json.dumps(peers))
    out, rows = tmp_path / "out.md", tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.partition", str(folder), "-o", str(out), "--results", str(rows)]
    subprocess.run([*command, "--only", "^(contiguous|pipedream)"], check=True, cwd=ROOT, capture_output=True)
    text = out.read_text()
    assert "| small (layers) | 4 | 5 | 5.5 | optimal |" in text
    assert "small, 4 at 1 GB/s" in text
    again = tmp_path / "again.md"
    command = [sys.executable, "-m", "benchmarks.partition", "--render", "--results", str(rows), "-o", str(again)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert again.read_text() == text


def test_every_shared_case_can_be_built() -> None:
    folder = shared_path("instances")
    cases = all_cases(folder)
    assert {case["table"] for case in cases} >= {"contiguous", "scattered", "piper", "pipedream", "placed", "iteration"}
    seen: set[str] = set()
    for case in cases:
        if case["table"] not in seen:
            seen.add(case["table"])
            assert build(case).unit in ("s", "ms")


@pytest.mark.parametrize("more", [0, 1, 3])
def test_deeper_piper_instances_stay_whole(more: int) -> None:
    from planner.published.readers import piper_from_document

    document = json.loads(shared_path("instances/piper/bert32a100.json").read_text())
    deeper = deepened(document, more)
    file = piper_from_document(deeper)
    assert len(file.nodes) == 37 + more
    assert len(file.edges) == 67 + more
    assert not [note for note in file.notes if note.code.startswith("sync")]

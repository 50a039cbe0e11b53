"""Piper's TMPC JSON: what is read, what is said, and every kind of bad file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelError
from planner.published.readers import piper_from_document, read_piper, sniff_piper
from tests.shared_data import shared_path


def _choice(**changes: Any) -> dict[str, Any]:
    return {
        "id": "vanilla", "timePerSample": 0.5, "parameterSize": 100.0, "memoryUsageA": 7.0, "memoryUsageB": 11.0,
        "syncTimeFw": {}, "syncTimeBw": {},
    } | changes  # fmt: skip


def _document() -> dict[str, Any]:
    """Node 7 -> node 3."""
    return {
        "maxDevices": 8, "maxMemoryPerDevice": 1e9, "bandwidth": 2.5e10, "mbsInBatch": 480,
        "nodes": [
            {"id": 7, "name": "first", "TMPCs": {"1": [_choice(syncTimeBw={"3": 1.0})]}},
            {"id": 3, "name": "second", "TMPCs": {"1": [_choice(syncTimeFw={"7": 2.0})], "2": [_choice(id="half")]}},
        ],
        "edges": [{"sourceId": 7, "destId": 3, "communicationCost": 42.0}],
    }  # fmt: skip


def test_fields_as_the_file_has_them() -> None:
    file = piper_from_document(_document())
    assert (file.devices, file.memory_bytes, file.batch, file.bandwidth_bytes_per_s) == (8, 1e9, 480, 2.5e10)
    assert file.edges == ((7, 3, 42.0),)
    first, second = file.nodes
    assert (first.id, first.name, tuple(first.choices)) == (7, "first", (1,))
    assert tuple(second.choices) == (1, 2)
    choice = second.choices[1][0]
    assert (choice.time_s, choice.weight_bytes, choice.activation_bytes, choice.fixed_bytes) == (0.5, 100, 7, 11)
    assert choice.input_sync_bytes == {7: 2.0}
    assert first.choices[1][0].output_sync_bytes == {3: 1.0}


def test_absent_syncs_count_as_nothing_and_are_said() -> None:
    file = piper_from_document(_document())
    assert [(n.code, n.where) for n in file.notes] == [("sync-absent", "node 3")]  # degree 2 names no neighbour


def test_the_batch_by_its_other_name() -> None:
    document = _document()
    document["maxBatchSize"] = document.pop("mbsInBatch")
    assert piper_from_document(document).batch == 480


def test_syncs_keyed_as_the_format_describes_them_are_turned() -> None:
    document = _document()
    document["nodes"][0]["TMPCs"]["1"] = [_choice(syncTimeFw={"3": 1.0})]
    document["nodes"][1]["TMPCs"] = {"1": [_choice(syncTimeBw={"7": 2.0})]}
    file = piper_from_document(document)
    assert [n.code for n in file.notes] == ["sync-turned"]
    assert file.nodes[0].choices[1][0].output_sync_bytes == {3: 1.0}
    assert file.nodes[1].choices[1][0].input_sync_bytes == {7: 2.0}


def test_syncs_with_strangers_are_left_out_and_said() -> None:
    document = _document()
    document["nodes"][0]["TMPCs"]["1"][0]["syncTimeFw"] = {"9": 5.0}
    assert "sync-stray" in {n.code for n in piper_from_document(document).notes}


def test_times_that_look_like_milliseconds_are_said() -> None:
    document = _document()
    document["nodes"][0]["TMPCs"]["1"][0]["timePerSample"] = 25.7
    (note,) = [n for n in piper_from_document(document).notes if n.code == "time-unit"]
    assert "25.7" in note.message


def test_an_empty_degree_is_an_absent_one() -> None:
    document = _document()
    document["nodes"][1]["TMPCs"]["2"] = []
    assert tuple(piper_from_document(document).nodes[1].choices) == (1,)


def _broken(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(_document())
    place: Any = document
    *steps, last = path.split("/")
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("maxDevices", None, "maxDevices: is missing"),
        ("maxDevices", 0, "maxDevices: should be greater than or equal to 1, not 0"),
        ("maxDevices", 2.5, "maxDevices: should be a multiple of 1, not 2.5"),
        ("bandwidth", 0, "bandwidth: should be greater than 0, not 0"),
        ("bandwidth", "25e9", "bandwidth: should be a valid number, not '25e9'"),
        ("maxMemoryPerDevice", -1, "maxMemoryPerDevice: should be greater than or equal to 0, not -1"),
        ("mbsInBatch", 0, "mbsInBatch: should be greater than or equal to 1"),
        ("nodes", [], "nodes: Tuple should have at least 1 item"),
        ("nodes", None, "nodes: is missing"),
        ("nodes/0/id", "7", "nodes[0].id: should be a valid integer, not '7'"),
        ("nodes/1/id", 7, "another node has"),
        ("nodes/0/TMPCs", {}, "nodes[0].TMPCs: Dictionary should have at least 1 item"),
        ("nodes/0/TMPCs", {"1": []}, "no choice at any tensor degree"),
        ("nodes/0/TMPCs", {"0": [_choice()]}, "greater than or equal to 1, not '0'"),
        ("nodes/0/TMPCs", {"two": [_choice()]}, "nodes[0].TMPCs.two"),
        ("nodes/0/TMPCs/1/0/timePerSample", None, "nodes[0].TMPCs.1[0].timePerSample: is missing"),
        ("nodes/0/TMPCs/1/0/memoryUsageA", float("nan"), "memoryUsageA: should be a finite number"),
        ("nodes/0/TMPCs/1/0/syncTimeBw", {"x": 1.0}, "syncTimeBw.x"),
        ("edges/0/destId", 4, "names node 4"),
        ("edges/0/destId", 7, "to itself"),
        ("edges/0/communicationCost", -1.0, "communicationCost: should be greater than or equal to 0, not -1"),
    ],
)
def test_every_fault_is_named_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        piper_from_document(_broken(path, value), "x.json")
    assert any(message in str(problem) for problem in caught.value.problems)
    assert str(caught.value).startswith("x.json: ")


def test_all_faults_at_once() -> None:
    document = _broken("bandwidth", 0)
    document["maxDevices"] = "many"
    document["edges"][0]["sourceId"] = "99"
    with pytest.raises(ModelError) as caught:
        piper_from_document(document)
    assert len(caught.value.problems) == 3


def test_a_cycle() -> None:
    document = _document()
    document["edges"].append({"sourceId": 3, "destId": 7, "communicationCost": 1.0})
    with pytest.raises(ModelError, match="cycle"):
        piper_from_document(document)


def test_files_that_are_not_instances(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        read_piper(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"maxDevices": 8,')
    with pytest.raises(ModelError, match="not JSON"):
        read_piper(broken)
    broken.write_text("[]")
    with pytest.raises(ModelError, match="should be an object"):
        read_piper(broken)


def test_a_file_is_told_by_its_head() -> None:
    assert sniff_piper(json.dumps(_document()).encode())
    assert not sniff_piper(b'{"maxFPGAs": 2, "nodes": []}')


def test_the_published_instance() -> None:
    path = shared_path("instances/piper/bert32a100.json")
    file = read_piper(path)
    assert (len(file.nodes), len(file.edges), file.batch, file.notes) == (37, 67, 1920, ())
    layer = next(node for node in file.nodes if node.id == 3)
    assert {t: len(choices) for t, choices in layer.choices.items()} == {1: 2, 2: 2, 4: 2, 8: 2}
    assert layer.choices[1][1].time_s == 0.040685
    assert layer.choices[2][0].input_sync_bytes == {1: 31457280.0, 4: 16777216.0}

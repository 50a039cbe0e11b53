"""A configuration as JSON: exact both ways, strict to read, in agreement with the plan that carries it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Degrees, load_graph
from planner.errors import JobError, PlanError
from planner.plans import (
    Fault,
    Plan,
    configuration_document,
    dump_configuration,
    dumps,
    load_configuration,
    loads,
    parse_configuration,
    seal,
    validate,
)
from planner.plans.figures import IDLE_CONVENTION
from planner.plans.model import blocks_as_said, compress
from planner.play import Transfers
from planner.space import Configuration, StageChoice
from tests.plans.sample import decision, make_plan

VERSION1 = Path(__file__).parent / "version1.json"
counts = st.integers(1, 1 << 20)

stages = st.builds(
    StageChoice,
    start=st.integers(0, 4000), stop=st.integers(1, 4000), replicas=counts, recompute=st.booleans(), ranks=counts,
    sharding=st.integers(0, 9),
)  # fmt: skip
configurations = st.builds(
    Configuration,
    stages=st.lists(stages, min_size=1, max_size=6).map(tuple),
    copies=counts, micro_batch=counts, micro_batches=counts, schedule=st.text(max_size=20), zero=st.integers(0, 3),
    slice_devices=st.integers(0, 4096), adjacent=st.booleans(),
    devices=st.lists(st.integers(0, 4096), max_size=8).map(tuple), whole_stages=st.booleans(),
    transfers=st.sampled_from(Transfers), exchange=st.text(max_size=20),
)  # fmt: skip
degrees = st.builds(
    Degrees,
    tensor=counts, pipeline=counts, data=st.integers(0, 64), chunks=counts, micro_batch=counts,
    schedule=st.text(max_size=20), zero=st.integers(0, 3), recompute=st.booleans(),
    starts=st.lists(st.integers(1, 99) | st.text(max_size=9), max_size=6).map(tuple), adjacent=st.booleans(),
)  # fmt: skip


@given(configurations | degrees)
@settings(deadline=None)
def test_what_is_written_is_read_again(configuration: Configuration | Degrees) -> None:
    assert parse_configuration(dump_configuration(configuration)) == configuration
    assert json.loads(dump_configuration(configuration)) == configuration_document(configuration)


def test_what_has_its_default_is_left_out() -> None:
    assert configuration_document(Degrees(tensor=8, zero=1)) == {
        "format": "shardplan-configuration", "version": 1, "degrees": {"tensor": 8, "zero": 1},
    }  # fmt: skip


def file_of(**fields: Any) -> str:
    return json.dumps({"format": "shardplan-configuration", "version": 1, **fields}, indent=1)


ONE = {"stages": [{"start": 0, "stop": 6, "replicas": 1}], "copies": 1, "micro_batch": 1, "micro_batches": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (file_of(), "in full or by its degrees"),
        (file_of(degrees={}, configuration={**ONE, "schedule": "1f1b"}), "in full or by its degrees"),
        (file_of(degrees={"tensr": 8}), "tensor"),
        (file_of(degrees={"tensor": "8"}), "degrees.tensor"),
        (file_of(configuration=ONE), "missing key 'configuration.schedule'"),
        ("{}", "not a configuration file"),
        (file_of().replace('"version": 1', '"version": 9'), "version 9"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_configuration(text, name="own.json")
    assert words in str(error.value)
    assert "own.json" in str(error.value)


def test_every_mistake_is_told_at_once_with_its_place() -> None:
    with pytest.raises(PlanError) as error:
        parse_configuration(file_of(degrees={"tensor": "8", "zero": 0.5}), name="own.json")
    assert [problem.where for problem in error.value.problems] == ["own.json:5:13", "own.json:6:11"]


def test_stages_may_name_their_blocks(tmp_path: Path) -> None:
    graph = load_graph("gpt2", dims={"seq": 64})
    named = [
        {"start": "transformer.wte", "stop": "transformer.h.6[1/2]", "replicas": 2},
        {"start": "transformer.h.6[1/2]", "stop": 27, "replicas": 2},
    ]
    path = tmp_path / "own.json"
    path.write_text(file_of(configuration={**ONE, "stages": named, "schedule": "1f1b"}))
    found = load_configuration(path, graph)
    assert isinstance(found, Configuration)
    # the two embeddings, then two blocks a layer: layer 6 begins at block 2 + 2 * 6
    assert [(stage.start, stage.stop) for stage in found.stages] == [(0, 14), (14, 27)]
    path.write_text(path.read_text().replace("transformer.wte", "transformer.wto"))
    with pytest.raises(JobError, match=r"transformer\.wte"):
        load_configuration(path, graph)
    with pytest.raises(PlanError, match="integer"):
        load_configuration(path)


def test_a_plan_file_is_a_configuration_file(tmp_path: Path) -> None:
    plan = make_plan()
    path = tmp_path / "own.plan.json"
    path.write_text(dumps(plan))
    assert load_configuration(path) == plan


def edited(plan: Plan, path: tuple[Any, ...], value: Any) -> Plan:
    document = json.loads(dumps(plan))
    target = document["configuration"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return seal(loads(json.dumps(document)))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("copies",), 1, "configuration has 4 micro-batches of 1 in 1 copies, micro_batches is 8 of 1"),
        (("micro_batch",), 3, "configuration has 8 micro-batches of 3 in 2 copies, micro_batches is 8 of 1"),
        (("micro_batches",), 8, "configuration has 16 micro-batches of 1 in 2 copies, micro_batches is 8 of 1"),
        (("schedule",), "gpipe", 'schedule.name: "1f1b" in the file, "gpipe" worked out anew'),
        (("zero",), 1, "stages[0].zero: 0 in the file, 1 worked out anew"),
        (("transfers",), "overlapped", 'schedule.transfers: nothing in the file, "overlapped" worked out anew'),
        (("exchange",), "byteps", "configuration.exchange is byteps, exchange.scheme is "),
        (("stages", 1, "start"), 2, "configuration.stages[1] is blocks [2, 6], sharding 0; stages[1] is [3, 6]"),
        (("stages", 0, "stop"), 2, "configuration.stages[0] is blocks [0, 2], sharding 0; stages[0] is [0, 3]"),
        (("stages", 0, "recompute"), True, "stages[0].recompute: false in the file, true worked out anew"),
        (("stages", 0, "ranks"), 2, "configuration.stages[0] has replicas 2, ranks 2"),
        (("stages", 0, "replicas"), 4, "configuration.stages[0] has replicas 4, ranks 1"),
        (
            ("stages", 1, "sharding"),
            1,
            "sharding 1; stages[1] is [3, 6] of 0 shardings",
        ),
        (("stages",), [], "configuration.stages has 0 entries, stages has 2"),
        (("adjacent",), True, "stages[0].replicas["),
        (("slice_devices",), 4, "stages[0].replicas["),
        (("devices",), [0, 1, 2, 3, 5, 4], "stages[0].replicas["),
        (("devices",), [0, 1, 2], "devices"),
    ],
)
def test_a_configuration_that_disagrees_is_found(path: tuple[Any, ...], value: Any, words: str) -> None:
    plan = make_plan(chosen=decision((2, 1), (0, 3), copies=2, micro_batches=4))
    assert validate(plan) == []
    found = [f.message for f in validate(edited(plan, path, value))]
    assert any(words in message for message in found), found


def test_a_file_of_version_1_is_read_as_one_of_version_2() -> None:
    now = make_plan(chosen=decision((2, 1), (0, 3), micro_batches=8))
    then = dataclasses.replace(now.options, schedules=("1f1b", "gpipe"), zero=(0, 1))  # all that was weighed then
    blocks = compress(blocks_as_said(now.block_table, ()))  # that name no structures
    now = seal(dataclasses.replace(now, options=then, headline=None, blocks=blocks, minor=0))
    assert json.loads(VERSION1.read_text())["version"] == 1
    read = loads(VERSION1.read_text())
    said = read.predictions  # of before minor version 8, where exchanges and transfers count as bubble
    assert (said.bubble_fraction, said.bubble_convention) == (0.967, IDLE_CONVENTION)
    bubble = {"bubble_fraction": 0.967, "bubble_convention": IDLE_CONVENTION}
    now = seal(dataclasses.replace(now, predictions=dataclasses.replace(now.predictions, **bubble)))
    assert read == now
    assert validate(read) == []


def test_a_changed_file_of_version_1_keeps_a_wrong_digest() -> None:
    text = VERSION1.read_text().replace('"bound_s": 0.4', '"bound_s": 0.3')
    assert Fault.DIGEST in {finding.fault for finding in validate(loads(text))}


def test_a_file_of_version_1_has_no_configuration() -> None:
    document = {**json.loads(VERSION1.read_text()), "configuration": {}}
    with pytest.raises(PlanError, match="unknown key 'configuration'"):
        loads(json.dumps(document))


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"adjacent": True}, {"slice_devices": 5}])
def test_where_stages_stand_is_read_off_a_file_of_version_1(copies: int, extra: dict[str, Any]) -> None:
    chosen = dataclasses.replace(decision((2, 1), (0, 3), copies=copies, micro_batches=4), **extra)
    if copies == 1 and chosen.adjacent:
        chosen = dataclasses.replace(chosen, adjacent=False)  # one copy has no neighbours
    plan = make_plan(chosen=chosen, devices=16)
    document = {**json.loads(dumps(plan)), "version": 1}
    del document["configuration"]
    assert loads(json.dumps(document)).configuration == plan.configuration

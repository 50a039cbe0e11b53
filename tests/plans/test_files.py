"""Plans as files: canonical, strict, and precise about what is wrong where."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.documents import WIDTH, pretty
from planner.errors import OutputError, PlanError
from planner.json_text import positions
from planner.plans import Plan, dumps, json_schema, loads, read, with_simulation, write
from tests.plans.sample import decision, language_model, make_plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.integers(1, 6))
    count = draw(st.integers(1, min(3, layers)))
    starts = tuple(range(count))
    replicas = tuple(draw(st.sampled_from([1, 2])) for _ in starts)
    chosen = decision(
        replicas,
        starts,
        layers + 2,
        copies=draw(st.sampled_from([1, 2])),
        micro_batches=2 * draw(st.integers(1, 8)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        recompute=draw(st.booleans()),
        zero=draw(st.sampled_from([0, 1])),
    )
    return make_plan(language_model(layers), chosen, devices=16)


@given(plans())
@settings(deadline=None, max_examples=40)
def test_a_plan_comes_back_from_its_text_and_gives_the_same_text(plan: Plan) -> None:
    text = dumps(plan)
    assert loads(text) == plan
    assert dumps(loads(text)) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=30,
)


@given(json_values)
@settings(deadline=None, max_examples=100)
def test_pretty_text_is_the_same_json(value: Any) -> None:
    assert json.loads(pretty(value)) == value


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path}.union(*(paths_of(item, (*path, key)) for key, item in items))


@given(json_values)
@settings(deadline=None, max_examples=100)
def test_every_value_of_a_json_text_has_a_position(value: Any) -> None:
    assert set(positions(pretty(value))) == paths_of(value)


def test_positions_are_lines_and_columns_from_one() -> None:
    text = '{\n  "a": [1, {"b": "x\\n,}"}],\n  "c": null\n}'
    assert positions(text) == {
        (): (1, 1),
        ("a",): (2, 8),
        ("a", 0): (2, 9),
        ("a", 1): (2, 12),
        ("a", 1, "b"): (2, 18),
        ("c",): (3, 8),
    }


def test_the_digest_can_be_recomputed_with_any_json_tool() -> None:
    document = json.loads(dumps(make_plan()))
    del document["provenance"]
    said = document.pop("digest")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(canonical.encode()).hexdigest() == said


def test_lines_stay_within_the_width() -> None:
    long = dumps(make_plan(language_model(60), decision((1,), (0,), 62)))
    assert max(len(line) for line in long.splitlines() if '"space"' not in line) <= WIDTH


def test_a_plan_of_126_layers_stays_readable() -> None:
    plan = make_plan(language_model(126), decision((1,) * 8, tuple(range(0, 128, 16)), 128, micro_batches=64))
    text = dumps(plan)
    assert len(text.splitlines()) < 450
    assert "F0.0-7 (B0.0 F0.8)*56 B0.56-63 S0 U0" in text
    assert [b.name for b in plan.stage_blocks(7)] == [*(f"layers.{i}" for i in range(111, 126)), "head"]


def test_the_file_follows_its_published_schema() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(dumps(make_plan())), schema)


def test_every_key_of_the_schema_is_explained() -> None:
    schema = json_schema()
    entries = {"Plan": schema, **schema["$defs"]}
    assert all(entry.get("description") for entry in entries.values())
    for name in ("Plan", "Stage", "Boundary", "RankOrder", "Predictions", "StagePrediction", "Job", "MicroBatches"):
        missing = [key for key, value in entries[name]["properties"].items() if "description" not in value]
        assert not missing, f"{name}: {missing}"


def edited(**changes: Any) -> str:
    document = json.loads(dumps(make_plan()))
    for path, value in changes.items():
        target: Any = document
        *parents, last = (int(p) if p.isdigit() else p for p in path.split("__"))
        for part in parents:
            target = target[part]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return pretty(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        (dumps(make_plan())[:500], "not JSON"),
        ("[1, 2]", "not a plan file"),
        ('{"a": 1}', "not a plan file"),
        ('{"format": "shardplan-plan", "version": 7}', "schema version 7"),
        ('{"format": "shardplan-plan", "version": 1, "version": 1}', "'version' appears twice"),
        (edited(world_size=...), "missing key 'world_size'"),
        (edited(world_size=1.5), "world_size"),
        (edited(world_size="3"), "world_size"),
        (edited(stages__0__recompute=1), "stages[0].recompute"),
        (edited(predictions__iteration_s=None), "predictions.iteration_s"),
        (edited(requires=["flying"]), "requires[0]"),
        (edited(stages__1__blocks=[1, 2, 3]), "stages[1].blocks"),
        (edited(predictions__stages__0__memory__wieghts_bytes=1), "unknown key 'predictions.stages[0].memory.wieghts"),
    ],
)
def test_a_malformed_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=r".") as caught:
        loads(text, name="my.plan.json")
    assert message in str(caught.value)
    assert caught.value.problem.where.startswith("my.plan.json")


def test_not_a_number_is_refused() -> None:
    with pytest.raises(PlanError, match="NaN is not JSON"):
        loads(dumps(make_plan()).replace('"iteration_s": 0.5', '"iteration_s": NaN'))


def test_all_errors_are_told_at_once_with_line_and_column() -> None:
    text = edited(stages__0__indx=0, stages__0__index=..., predictions__bottleneck="2")
    with pytest.raises(PlanError) as caught:
        loads(text, name="p.json")
    told = {problem.message: problem for problem in caught.value.problems}
    rows = text.splitlines()
    line = next(i for i, row in enumerate(rows, 1) if '"indx"' in row)
    column = rows[line - 1].index('"indx": ') + len('"indx": ') + 1
    assert told["unknown key 'stages[0].indx'"].where == f"p.json:{line}:{column}"
    assert told["unknown key 'stages[0].indx'"].hint == "did you mean 'index'?"
    assert "missing key 'stages[0].index'" in told
    assert "predictions.bottleneck: input should be a valid integer" in told


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    plan = make_plan()
    write(plan, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == plan
    with pytest.raises(OutputError):
        write(plan, tmp_path / "missing" / "a.json")
    with pytest.raises(PlanError, match="cannot read"):
        read(tmp_path / "b.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        read(tmp_path / "binary")


def test_a_simulated_time_is_added_and_sealed() -> None:
    plan = with_simulation(make_plan(), 0.123456789123)
    assert plan.predictions.simulated_iteration_s == 0.123456789
    assert plan.digest != make_plan().digest
    before = make_plan().predictions  # its bound is of 0.4 s
    kept = dataclasses.replace(plan.predictions, simulated_iteration_s=None, bound_s=before.bound_s, gap=before.gap)
    assert kept == before
    assert (plan.predictions.bound_s, plan.predictions.gap) == (0.123456789, 0.0)

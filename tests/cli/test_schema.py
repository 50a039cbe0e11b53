"""`shardplan schema` as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from planner.plans import dumps
from tests.cli.plan_files import run
from tests.plans.sample import make_plan

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_of_plans_accepts_a_plan_and_refuses_another_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "plan") == 0
    schema = json.loads(capsys.readouterr().out)
    document = json.loads(dumps(make_plan()))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, schema)


@pytest.mark.parametrize("kind", ["configuration", "degrees"])
def test_the_schema_of_configurations_accepts_those_of_the_page(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "configuration") == 0
    schema = json.loads(capsys.readouterr().out)
    (text,) = re.findall(rf"```json {kind}\n(.*?)```", (DOCS / "plan.md").read_text(), re.DOTALL)
    document = json.loads(text)
    jsonschema.validate(document, schema)
    document[kind]["extra"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def test_the_schema_of_hardware_profiles_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "hardware") == 0
    jsonschema.Draft7Validator.check_schema(json.loads(capsys.readouterr().out))


def test_another_subject_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "weather") == 2

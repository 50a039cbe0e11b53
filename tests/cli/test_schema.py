"""`shardplan schema` as a user calls it."""

from __future__ import annotations

import json

import jsonschema
import pytest

from planner.plan import dumps
from tests.cli.plan_files import run
from tests.plan.sample import make_plan


def test_the_schema_of_plans_accepts_a_plan_and_refuses_another_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "plan") == 0
    schema = json.loads(capsys.readouterr().out)
    document = json.loads(dumps(make_plan()))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, schema)


def test_the_schema_of_hardware_profiles_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "hardware") == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


def test_another_subject_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema", "weather") == 2

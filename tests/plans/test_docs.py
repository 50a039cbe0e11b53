"""The page about the plan file shows a real file, and what it tells readers to do works.

Run with `UPDATE_DOCS=1` to write the example and the schema anew.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from planner import Configuration, load_graph
from planner.plans import RULES, Plan, Requirement, Sharding, dumps, json_schema, parse_configuration
from planner.plans.documents import adapter
from tests.plans.sample import decision, language_model, make_plan
from tests.plans.sharded_sample import mixture

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"(<!-- example: [^\n]* -->\n```json\n)(.*?)(```\n<!-- end of example -->)", re.DOTALL)
RULES_TABLE = re.compile(r"(<!-- rules: [^\n]* -->\n)(.*?)(<!-- end of rules -->)", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def example() -> Plan:
    return make_plan(chosen=decision((2, 1), (0, 3), micro_batches=8))


def rules_table() -> str:
    rows = "".join(f"| `{rule}` | {severity} | {meaning} |\n" for rule, (severity, meaning) in RULES.items())
    return f"\n| rule | severity | says that |\n|---|---|---|\n{rows}\n"


@pytest.fixture(scope="module", autouse=True)
def _update() -> None:
    if not os.environ.get("UPDATE_DOCS"):
        return
    page = DOCS / "plan.md"
    page.write_text(EXAMPLE.sub(lambda m: m[1] + dumps(example()) + m[3], page.read_text()))
    page = DOCS / "diff.md"
    page.write_text(RULES_TABLE.sub(lambda m: m[1] + rules_table() + m[3], page.read_text()))
    (DOCS / "plan.schema.json").write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")


def test_the_example_is_current() -> None:
    match = EXAMPLE.search((DOCS / "plan.md").read_text())
    assert match is not None
    assert match[2] == dumps(example()), "run: UPDATE_DOCS=1 pytest tests/plans/test_docs.py"


def test_the_rules_are_listed() -> None:
    match = RULES_TABLE.search((DOCS / "diff.md").read_text())
    assert match is not None
    assert match[2] == rules_table(), "run: UPDATE_DOCS=1 pytest tests/plans/test_docs.py"


def test_the_published_schema_is_current() -> None:
    published = json.loads((DOCS / "plan.schema.json").read_text())
    assert published == json_schema(), "run: UPDATE_DOCS=1 pytest tests/plans/test_docs.py"


def test_the_snippets_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(language_model(9), decision((2, 1), (0, 3), 11, micro_batches=8))
    (tmp_path / "model.plan.json").write_text(dumps(plan))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in PYTHON.findall((DOCS / "plan.md").read_text()):
        exec(snippet, names)
    expanded = [(block["name"], tuple(block["nodes"])) for block in names["expand"](names["plan"]["blocks"])]
    assert expanded == [(block.name, block.nodes) for block in plan.block_table]
    assert len(names["plan"]["blocks"]) == 3


def test_the_snippet_about_groups_finds_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mixture().plan
    (tmp_path / "model.plan.json").write_text(dumps(plan))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in PYTHON.findall((DOCS / "plan.md").read_text()):
        exec(snippet, names)
    document = json.loads(dumps(plan))
    found = list(names["layouts"](document))
    assert {block for _, block, _, _ in found} == set(range(len(plan.block_table)))
    for stage, _, tensor, place in found:
        known = plan.layout_of(tensor, stage)
        assert known is not None
        assert (known.value, known.gradient) == (place["value"], place.get("gradient", ""))


def test_the_excerpt_of_a_sharding_is_one() -> None:
    (excerpt,) = re.findall(r"```json shardings\n(.*?)```", (DOCS / "plan.md").read_text(), re.DOTALL)
    sharding = adapter(Sharding).validate_json(excerpt, strict=True)
    assert sharding.ranks == 8
    assert [number for number, _ in sharding.blocks[0].members()] == list(range(2, 14))


@pytest.mark.parametrize("kind", ["configuration", "degrees"])
def test_the_configuration_files_are_ones(kind: str) -> None:
    (text,) = re.findall(rf"```json {kind}\n(.*?)```", (DOCS / "plan.md").read_text(), re.DOTALL)
    found = parse_configuration(text, load_graph("gpt2", dims={"seq": 64}))
    assert isinstance(found, Configuration) == (kind == "configuration")


def test_every_requirement_is_on_the_page() -> None:
    page = (DOCS / "plan.md").read_text()
    assert [r for r in Requirement if f"`{r}`" not in page] == []

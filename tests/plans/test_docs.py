"""The page about the plan file shows a real file, and what it tells readers to do works.

Run with `UPDATE_DOCS=1` to write the example anew.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import Configuration, load_graph
from planner.documents import adapter
from planner.plans import Plan, Requirement, Sharding, dumps, parse_configuration, write
from tests.plans import fixed_batch
from tests.plans.sample import decision, make_plan
from tests.plans.sharded_sample import mixture
from tests.runtime import cases

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"(<!-- example: [^\n]* -->\n```json\n)(.*?)(```\n<!-- end of example -->)", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def example() -> Plan:
    return make_plan(chosen=decision((2, 1), (0, 3), micro_batches=8))


@pytest.fixture(scope="module", autouse=True)
def _update() -> None:
    if not os.environ.get("UPDATE_DOCS"):
        return
    page = DOCS / "plan.md"
    page.write_text(EXAMPLE.sub(lambda m: m[1] + dumps(example()) + m[3], page.read_text()))


def test_the_example_is_current() -> None:
    match = EXAMPLE.search((DOCS / "plan.md").read_text())
    assert match is not None
    assert match[2] == dumps(example()), "run: UPDATE_DOCS=1 pytest tests/plans/test_docs.py"


def reader() -> dict[str, Any]:
    """The page's reader of plan files, by name of its functions."""
    (snippet,) = PYTHON.findall((DOCS / "plan.md").read_text())
    names: dict[str, Any] = {}
    exec(snippet, names)
    return names


EVERYTHING = {requirement.value for requirement in Requirement}
CASES = [cases.Case("", "gpt", 4, {"pipeline": 4, "schedule": name}) for name in planner.schedules.names()]
CASES += [
    cases.Case("unequal replicas", "gpt", 3, batch=6, stages=((0.5, 2), (1.0, 1))),
    cases.Case("groups", "gpt, wide", 4, {"tensor": 2, "pipeline": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name or case.degrees["schedule"])
def test_the_reader_reads_what_this_program_reads(case: cases.Case, tmp_path: Path) -> None:
    plan, names = cases.plan(case), reader()
    write(plan, tmp_path / "plan.json")
    found = names["read"](tmp_path / "plan.json", EVERYTHING)
    blocks = [(block["name"], tuple(block["nodes"])) for block in names["expand"](found["blocks"])]
    assert blocks == [(block.name, block.nodes) for block in plan.block_table]
    for times in (1, 3):
        for rank in range(plan.world_size):
            lanes = [
                [(k.value, stage, m, part, version, peer, paired) for k, stage, m, part, version, peer, paired in lane]
                for lane in plan.lanes(rank, times)
            ]
            read = [
                [tuple(-1 if n is None else n for n in word) for word in lane]
                for lane in names["orders"](found, rank, times)
            ]
            assert read == lanes
    for stage in plan.stages:
        operators, weights = names["program"](found, stage.index)
        assert tuple(operators) == plan.stage_nodes(stage.index)
        assert weights == {p.name: p.owner for p in plan.stage_parameters(stage.index)}
        received, sent = names["tensors"](found, stage.index)
        assert {tensor for _, tensor in received} == {b.tensor for b in plan.boundaries if stage.index in b.to_stages}
        assert {tensor for _, tensor in sent} == {b.tensor for b in plan.boundaries if stage.index == b.from_stage}
        for m in range(plan.micro_batches.count):
            assert tuple(names["group"](found, stage.index, m)) == plan.ranks_for(stage.index, m)


def test_the_reader_refuses_what_a_backend_cannot_do(tmp_path: Path) -> None:
    plan, names = cases.plan(cases.Case("", "gpt", 4, {"pipeline": 4, "schedule": "zb-h1"})), reader()
    write(plan, tmp_path / "plan.json")
    with pytest.raises(ValueError, match="needs tied_parameters, split_backward"):
        names["read"](tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"world_size": 4', '"world_size": 5'))
    with pytest.raises(ValueError, match="changed after it was written"):
        names["read"](tmp_path / "plan.json", EVERYTHING)


def test_the_reader_finds_every_layout() -> None:
    plan, names = mixture().plan, reader()
    found = list(names["layouts"](json.loads(dumps(plan))))
    assert {block for _, block, _, _ in found} == set(range(len(plan.block_table)))
    for stage, _, tensor, place in found:
        known = plan.layout_of(tensor, stage)
        assert known is not None
        assert (known.value, known.gradient) == (place["value"], place.get("gradient", ""))
        sharding = plan.sharding_of(stage)
        assert sharding is not None
        assert len(names["parts"](place["value"])) == len(sharding.axes)
        assert "".join(names["parts"](place["value"])) == place["value"]


def test_the_reader_finds_what_changes_in_the_model_file(tmp_path: Path) -> None:
    plan = fixed_batch.plan_of(fixed_batch.model_file(tmp_path / "fixed.onnx"), 4)
    values, identities = reader()["constants"](json.loads(dumps(plan)))
    assert {key: tuple(value) for key, value in values.items()} == plan.model.batch_constants.operands
    assert tuple(identities) == plan.model.identities == ("alike0", "alike1")


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

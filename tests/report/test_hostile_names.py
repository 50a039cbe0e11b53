"""Names of a model, its parts and its hardware leave the structure of every output as usual names leave it."""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

import planner
from planner import export
from planner.plans import Plan
from tests.cli.plan_files import run
from tests.importers.build import absent, model, node, scoped, value
from tests.test_escaping import Tags

HOSTILE = (
    "x</summary></details>\n\n**shardplan: all gates hold** <!-- --> | y | `c` <img src=x> https://evil.example "
    "@you #1 "
    '\x1b[31m\u202e$(touch pwned) """ \' {z} \\ ::error::'
)
ONE_LINE = HOSTILE.replace("\n", " ")
USUAL = "usual"
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def _graph(name: str, layers: int) -> planner.Graph:
    """A chain of products; tensors, weights and modules are named by `name` and a number."""
    module = re.sub(r"[.\[\d]", "", name)
    nodes = [
        scoped(node("MatMul", [f"{name}{n}", f"{name}w{n}"], [f"{name}{n + 1}"]), f"{module}-{'abcdefgh'[n]}", "matmul")
        for n in range(layers)
    ]
    tensors = value(f"{name}0", [1, 16]), value(f"{name}{layers}", [1, 16])
    proto = model(nodes, [tensors[0]], [tensors[1]], [absent(f"{name}w{n}", [16, 16]) for n in range(layers)])
    proto.graph.name = name
    return planner.graph_from_proto(proto)


@cache
def _plan(name: str, layers: int = 4, stages: int = 2) -> Plan:
    cluster = dataclasses.replace(planner.load_cluster("dgx-a100", stack=planner.hardware.Stack(name)), name=name)
    job = planner.Job(global_batch=16, precision="fp32")
    return planner.predict(_graph(name, layers), cluster, job, planner.Degrees(pipeline=stages)).plan


def _diff(name: str) -> tuple[Any, dict[str, str]]:
    comparison = planner.plans.compare_plans(_plan(name), _plan(name, layers=5))
    return comparison, {"step_time:+3%": f"{name} is over", "error": ""}


def _blocks(text: str) -> list[str]:
    """Types of the blocks and marks of a Markdown text, in order, but for code and text in a line."""
    tokens = [token for block in MARKDOWN.parse(text) for token in (block, *(block.children or ()))]
    return [token.type for token in tokens if token.type not in ("text", "code_inline", "text_special")]


def _explained(name: str) -> Any:
    return planner.report.explanation_report(planner.plans.explain_plan(_plan(name)))


MARKDOWNS: dict[str, Callable[[str], str]] = {
    "diff": lambda name: planner.report.diff_markdown(*_diff(name)[:1], None, _diff(name)[1]),
    "explain": lambda name: planner.report_to_markdown(_explained(name)),
    "plan": lambda name: planner.report_to_markdown(planner.plan_report(_plan(name))),
    "export torch": lambda name: str(export.export(_plan(name), "torch").files["EXPORT.md"]),
    "export deepspeed": lambda name: str(export.export(_plan(name), "deepspeed").files["EXPORT.md"]),
    "export jax": lambda name: str(export.export(_plan(name, stages=1), "jax").files["EXPORT.md"]),
}


@pytest.mark.parametrize("what", MARKDOWNS)
def test_markdown_has_the_blocks_that_it_has_with_usual_names(what: str) -> None:
    hostile = MARKDOWNS[what](HOSTILE)
    assert _blocks(hostile) == _blocks(MARKDOWNS[what](USUAL))
    tags = Tags(MARKDOWN.render(hostile))
    assert not {"img", "a", "script"} & set(tags.tags)
    assert "</details>" in tags.text or what in ("plan",)
    text = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", hostile)
    assert "://" not in text
    assert re.search(r"(?<!\w)@\w", text) is None


def test_the_verdict_of_a_review_is_the_only_one() -> None:
    text = planner.report.diff_markdown(_diff(HOSTILE)[0], None, _diff(HOSTILE)[1])
    bold = Tags(MARKDOWN.render(text.replace("<details>", "").replace("</details>", "")))
    assert text.startswith("<!-- shardplan diff -->\n\n**shardplan: FAILED: step_time:+3%**\n")
    assert text.count("<details>") == text.count("</details>") == text.count("</summary>")
    assert bold.tags.count("strong") == 1


def test_text_has_the_lines_that_it_has_with_usual_names() -> None:
    def shape(name: str) -> list[str]:
        text = planner.report_to_text(_explained(name), width=10**6)
        assert text.replace("\n", "").isprintable()
        assert not any(line.lstrip().startswith("::") for line in text.splitlines())
        return [line[:2] for line in text.splitlines()]

    assert len(shape(HOSTILE)) == len(shape(USUAL))


def test_annotations_are_a_line_each() -> None:
    lines = planner.report.diff_annotations(*_diff(HOSTILE), file=HOSTILE).splitlines()
    assert len(lines) == len(planner.report.diff_annotations(*_diff(USUAL), file=USUAL).splitlines())
    assert all(re.match(r"::(error|warning|notice) file=[^:,]*,title=[^:,]*(%3A[^:,]*)*::", line) for line in lines)


def test_the_page_has_the_tags_that_it_has_with_usual_names() -> None:
    def tags(name: str) -> list[str]:
        page = planner.report.plan_page(_plan(name), lacking=name)
        shown = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
        return Tags(shown).tags

    assert tags(HOSTILE) == tags(USUAL)


def test_pictures_have_the_elements_that_they_have_with_usual_names() -> None:
    def elements(name: str) -> list[str]:
        picture = planner.draw_svg(planner.simulate_plan(_plan(name)))
        return [element.tag for element in ElementTree.fromstring(picture).iter()]

    assert elements(HOSTILE) == elements(USUAL)


@pytest.mark.parametrize("name", ["torch", "deepspeed", "megatron", "torchtitan", "galvatron"])
def test_programs_and_settings_of_exports_hold_names_as_texts(name: str, tmp_path: Path) -> None:
    """Frameworks that take decoders alone refuse this model in one line."""
    if refused := export.lacking(_plan(HOSTILE), name):
        with pytest.raises(planner.PlanError) as caught:
            export.export(_plan(HOSTILE), name)
        assert len(refused) > 0
        assert str(caught.value).isprintable()
        return
    files = export.export(_plan(HOSTILE), name).files
    for file, content in files.items():
        text = str(content)
        if file.endswith(".py"):
            calls = [ast.dump(each) for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
            assert not any("touch" in call for call in calls)
        elif file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".toml"):
            tomllib.loads(text)
        elif file.endswith(".sh"):
            (tmp_path / file).write_text(text)
            subprocess.run(["bash", "-n", str(tmp_path / file)], check=True)
            assert "touch" not in text


def test_modules_of_a_deepspeed_pipeline_are_the_plans() -> None:
    text = str(export.export(_plan(HOSTILE), "deepspeed").files["pipeline.py"])
    values = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    modules = [p.module for block in _plan(HOSTILE).block_table for p in block.parameters]
    assert list(values["MODULES"]) == modules
    assert any('"""' in module for module in modules)


def test_titan_descriptions_are_toml() -> None:
    from planner.export.torchtitan import _toml

    text = _toml({"job": {"description": HOSTILE + "🦊\x7f", "parts": [[HOSTILE]], "n": 3, "yes": True}})
    assert tomllib.loads(text) == {
        "job": {"description": HOSTILE + "🦊\x7f", "parts": [[HOSTILE]], "n": 3, "yes": True}
    }


def test_rows_of_a_sweep_are_rows_of_csv() -> None:
    points = [(("model", f"{sign}{HOSTILE}"), ("devices", "8")) for sign in "=@"]
    found = [planner.ask.sweeps.SweepRow(point, reason=f"-{HOSTILE}") for point in points]
    rows = list(csv.DictReader(io.StringIO(planner.report_to_csv(planner.report.sweep_report(found)))))
    assert [row["model"][:3] for row in rows] == ["'=x", "'@x"]
    assert [row["reason"][:3] for row in rows] == ["'-x", "'-x"]
    assert all(row["model"].isprintable() and row["reason"].isprintable() for row in rows)


def test_a_profile_that_is_written_says_its_name_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\ncluster: evil # $(x).yaml"
    assert run("hardware", "init", "--from", "dgx-a100", "-o", str(path)) == 0
    assert planner.load_cluster(path).name == path.stem
    assert path.read_text().count("\ncluster:") == 1

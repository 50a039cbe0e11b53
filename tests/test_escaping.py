"""Any text in any format is read back as that text and nothing else."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import subprocess
import tomllib
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from ruamel.yaml import YAML

from planner import escaping
from planner.errors import Problem

PIECES = (
    "<b>", "</summary></details>", "<!--", "-->", "<img src=x onerror=y>", "&lt;", "&#60;", "|", "`", "``", "*", "**",
    "~~", "[a](http://b)", "![", "<https://c>", "https://d.e", "www.f.g", "@me", "#12", "GH-3", ":tada:", "$x$", "# ",
    "+", "1. ", "> ", "===", "---", "\n", "\r", "\t", "    ", "\\", '"', "'", '"""', "$(id)", ";", "{x}", "%0A",
    "##[group]", "=1+1", "@SUM", ",", "\x00", "\x1b[31m", "\x9b", "\x7f", "\u202e", "\u2028", "\u200b", "\ud800", "é",
    "a", "b_c", " ", "__init__", "layers.0", "_", "- ", "::error::", "🦊",
)  # fmt: skip
TEXT = st.one_of(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.text(max_size=30))
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


class Tags(HTMLParser):
    """What a browser would see: start and end tags, comments, and the text between them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_comment(self, data: str) -> None:
        self.tags.append("!--")

    def handle_decl(self, decl: str) -> None:
        self.tags.append("!")

    def handle_pi(self, data: str) -> None:
        self.tags.append("?")

    def handle_data(self, data: str) -> None:
        self.text += data


def spaced(text: str) -> str:
    """A text without what Markdown and HTML do not keep: runs of spaces, and the spaces without width that part."""
    return " ".join(text.replace("\u200b", "").split())


@given(TEXT)
def test_a_visible_line_has_one_line_and_nothing_that_moves_a_cursor(text: str) -> None:
    shown = escaping.visible(text)
    assert shown.isprintable()
    assert escaping.visible(shown) == shown
    if text.isprintable():
        assert shown == text
    assert str(Problem(text)).isprintable()


@given(TEXT)
@example("::stop-commands::x")
@example("  ##[error]x")
def test_no_line_is_a_command_of_a_runner(text: str) -> None:
    assert not escaping.terminal_line(text).lstrip().startswith(("::", "##["))


@given(TEXT)
def test_a_source_line_keeps_its_columns(text: str) -> None:
    shown = escaping.source_line(text)
    assert len(shown) == len(text)
    assert shown.replace("\t", "").isprintable()


@given(TEXT)
@example("1) x")
@example("a *b*")
@example("#")
def test_markdown_is_text_in_a_paragraph_a_heading_and_a_list(text: str) -> None:
    escaped, shown = escaping.markdown(text), spaced(escaping.visible(text))
    for source, tags in ((f"a\n\n{escaped}\n\nb", "p"), (f"## {escaped}", "h2"), (f"- {escaped}\n- c", "li")):
        seen = Tags(MARKDOWN.render(source))
        assert spaced(seen.text) == spaced({"p": f"a {shown} b", "h2": shown, "li": f"{shown} c"}[tags])
        assert set(seen.tags) <= {tags, "ul"}


@given(TEXT, TEXT)
def test_a_table_of_markdown_keeps_its_cells(first: str, second: str) -> None:
    code = escaping.markdown_prose(escaping.markdown_code(second), in_table=True)
    seen = Tags(MARKDOWN.render(f"| a | b |\n|---|---|\n| {escaping.markdown(first)} | {code} |\n"))
    assert seen.tags == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td", "code"]
    shown = f"a b {escaping.visible(first)} {escaping.visible(second)}"
    assert spaced(seen.text) == spaced(shown)


@given(TEXT)
def test_nobody_is_mentioned_and_nothing_is_linked(text: str) -> None:
    """GitHub looks for these in what is shown, whatever was escaped."""
    shown = Tags(MARKDOWN.render(f"x {escaping.markdown(text)}")).text
    source = escaping.markdown(text)
    assert re.search(r"@me|@SUM|#12|\bGH-3|:tada:", shown) is None
    assert "://" not in source
    assert re.search(r"\bwww\.", source) is None


@given(TEXT, TEXT)
def test_code_spans_of_our_own_stay_and_hold_any_name(first: str, second: str) -> None:
    sentence = f"Give {escaping.markdown_code(first)} to `--model`, and {escaping.prose_name(second)}"
    seen = Tags(MARKDOWN.render(escaping.markdown_prose(sentence)))
    assert seen.tags == ["p", "code", "code", *(["code"] if "`" in second else [])]
    assert spaced(seen.text) == spaced(f"Give {escaping.visible(first)} to --model, and {escaping.visible(second)}")


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_a_code_block_ends_where_it_ends(lines: list[str]) -> None:
    seen = Tags(MARKDOWN.render(escaping.markdown_block(lines) + "\n\nb"))
    assert seen.tags == ["pre", "code", "p"]
    assert seen.text.split("\n")[: len(lines)] == list(map(escaping.visible, lines))


@given(TEXT)
def test_html_and_svg_have_no_tag_of_it(text: str) -> None:
    source = f"<p title=\"{escaping.html(text)}\" class='{escaping.html(text)}'>{escaping.html(text)}</p>"
    seen, element = Tags(source), ElementTree.fromstring(source)
    assert seen.tags == ["p"]
    assert seen.text == (element.text or "") == element.get("title") == element.get("class") == escaping.visible(text)


@given(TEXT)
def test_json_in_a_script_ends_nothing(text: str) -> None:
    source = escaping.script_json({"name": text, "rows": [text, 1, None]})
    assert "<" not in source
    lines = "\n".join(map(escaping.visible, text.split("\n")))
    assert json.loads(source) == {"name": lines, "rows": [lines, 1, None]}


@given(TEXT)
def test_json_on_a_terminal_has_the_same_values(text: str) -> None:
    source = json.dumps({"name": text}, indent=1, ensure_ascii=False)
    shown = escaping.json_text(source)
    assert json.loads(shown) == {"name": text}
    assert shown.replace("\n", "").isprintable()


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_rows_of_csv_are_read_as_the_same_cells(cells: list[str]) -> None:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow(map(escaping.csv_cell, [*cells, 1.5, -3, None]))
    (row,) = csv.reader(io.StringIO(stream.getvalue()))
    assert row[-3:] == ["1.5", "-3", ""]
    for cell, read in zip(cells, row, strict=False):
        assert read.removeprefix("'") == escaping.visible(cell).removeprefix("'")
        assert read.lstrip()[:1] not in ("=", "+", "-", "@") or math.isfinite(float(read))


@pytest.mark.parametrize("text", ["=1+1", "+A1", "-A1", "@SUM(A1)", "  =x", "\t=x"])
def test_a_name_is_no_formula(text: str) -> None:
    assert str(escaping.csv_cell(text)).startswith(("'", "\\t"))


@given(TEXT)
def test_a_quoted_text_is_the_same_in_python_toml_and_yaml(text: str) -> None:
    source = escaping.quoted(text)
    whole = "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    assert ast.literal_eval(source) == whole
    assert tomllib.loads(f"name = {source}")["name"] == whole
    assert YAML(typ="safe", pure=True).load(f"name: {source}")["name"] == whole
    assert source.isprintable()


@given(TEXT)
@example("yes")
@example("null")
@example("1e3")
@example("a: b")
@example("a #b")
@example("megatron-2025")
def test_a_string_of_yaml_is_a_string(text: str) -> None:
    whole = "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    for version in ((1, 1), (1, 2)):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        assert reader.load(f"name: {escaping.yaml(text)}\n") == {"name": whole}


def test_usual_names_stay_plain() -> None:
    for name in ("megatron-2025", "h100-sxm-80gb", "fitted to 5 measured runs"):
        assert escaping.yaml(name) == escaping.prose_name(name) == escaping.shell(name).strip("'") == name
    assert escaping.markdown("model.layers.0-7.self_attn (2 of 3), 12 -> 16") == (
        "model.layers.0-7.self_attn (2 of 3), 12 -> 16"
    )


@pytest.mark.parametrize(
    "text", ["$(touch x)", "`id`", "a b", "'", '"$HOME"', "a\nb", "-n", "*", ";ls", "\\", "!x", "~"]
)
def test_a_word_of_a_shell_is_one_word(text: str) -> None:
    run = subprocess.run(
        ["bash", "-c", f"printf '%s|' {escaping.shell('a', text)}"], capture_output=True, check=True, text=True
    )
    assert run.stdout == f"a|{text}|"


@given(TEXT, TEXT)
def test_a_workflow_command_is_one_line_with_its_attributes(file: str, message: str) -> None:
    line = escaping.workflow_command("error", message, file=file, title="gate")
    assert line.isprintable()
    head, _, said = line.removeprefix("::").partition("::")
    attributes = dict(part.split("=", 1) for part in head.removeprefix("error ").split(","))
    decoded = {key: _decoded(value) for key, value in attributes.items()}
    assert decoded == ({"file": escaping.visible(file)} if file else {}) | {"title": "gate"}
    assert _decoded(said) == escaping.visible(message)


def _decoded(text: str) -> str:
    for code, character in (("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text

"""Text that others wrote (names in models, profiles and plans, paths, revisions) in the formats that we write.

A name may hold anything: line breaks, escape sequences of terminals, letters that turn the direction of reading, HTML,
Markdown, quotes. Each format has one function here, and every writer of the format calls it. The result is one line
that the format reads as this text and as nothing else; characters that cannot be seen are shown by their codes.

>>> print(visible("a\\nb\\x1b[31m"))
a\\nb\\x1b[31m
>>> print(markdown("x</summary> | **ok**"))
x&lt;/summary> \\| \\*\\*ok\\*\\*
>>> csv_cell("=SUM(A1)")
"'=SUM(A1)"
>>> quoted('say "x"')
'"say \\\\"x\\\\""'
"""

from __future__ import annotations

import json
import re
import shlex
from html import escape
from typing import Any


def visible(text: str) -> str:
    """One line of plain text; characters that are not printable are written as in a Python literal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def terminal_line(text: str) -> str:
    """A line of output that no runner of CI takes for a command: where it begins with `::` or `##[`, as such commands
    do, it begins with the code of that character instead."""
    shown = visible(text)
    content = shown.lstrip()
    if not content.startswith(("::", "##[")):
        return shown
    return f"{shown[: -len(content)]}\\x{ord(content[0]):02x}{content[1:]}"


def source_line(text: str) -> str:
    """A line of a file below an error: its characters keep their columns, those that cannot be seen become a mark."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


_NO_WIDTH = "&#8203;"
_MARKUP = re.compile(
    r"(?P<escaped>[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|#(?!\w)|&(?=#?\w+;))"
    r"|(?P<entity><|:(?=//)|(?<=\bwww)\.|(?<=\bmailto):|(?<=\bxmpp):)"
    r"|(?P<parted>[@#](?=\w)|(?<=\bGH)-(?=\d)|:(?=[\w+-]*[a-z+-][\w+-]*:))",
    re.IGNORECASE,
)
"""Characters that begin or end inline markup of GitHub's Markdown (math is `$`), and those that begin a tag, an
address, a mention, a reference or an emoji. An underscore between letters is none of them."""
_BLOCK = re.compile(r"(\d{1,9}(?=[.)](?:\s|$)))?([-+=>.)])")
"""A list item, quotation or underline at the start of a line."""
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def markdown(text: str) -> str:
    """Text in a paragraph, heading, list item or table cell of Markdown, GitHub's included.

    A space without width parts mentions and references, since GitHub looks for them in what is shown.
    """
    return _block(_inline(visible(text).strip()))


def markdown_code(text: str) -> str:
    """Text as a code span of Markdown."""
    shown = visible(text) or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def prose_name(text: str) -> str:
    """A name inside a sentence for `markdown_prose`: a code span where it would begin or end one, else as it is."""
    return markdown_code(text) if "`" in text else text


def markdown_prose(text: str, *, in_table: bool = False) -> str:
    """Our own sentences in Markdown: code spans stay, all else is text.

    Names in them are written by `prose_name` or `markdown_code`.

    Args:
        text: the sentences.
        in_table: true in a cell, where `|` in a code span needs a backslash.
    """
    pieces, at, shown = list[str](), 0, visible(text).strip()
    for span in _CODE_SPAN.finditer(shown):
        pieces += [_inline(shown[at : span.start()]), span[0].replace("|", r"\|") if in_table else span[0]]
        at = span.end()
    return _block("".join([*pieces, _inline(shown[at:])]))


def markdown_block(lines: list[str]) -> str:
    """Lines as a code block of Markdown."""
    shown = [visible(line) for line in lines]
    fence = "`" * max(3, 1 + max((len(run) for line in shown for run in re.findall("`+", line)), default=0))
    return "\n".join([fence, *shown, fence])


def _inline(text: str) -> str:
    return _MARKUP.sub(_unmarked, text)


def _unmarked(found: re.Match[str]) -> str:
    character = found[0]
    if found["parted"]:
        return character + _NO_WIDTH
    if found["escaped"]:
        return f"\\{character}"
    return "&lt;" if character == "<" else f"&#{ord(character)};"


def _block(text: str) -> str:
    """A line that begins no block of Markdown."""
    start = _BLOCK.match(text)
    return text if start is None else f"{start[1] or ''}\\{text[start.start(2) :]}"


def html(text: str) -> str:
    """Text in HTML, SVG and other XML: between tags and in attributes with either quote."""
    return escape(visible(text))


def script_json(value: Any) -> str:  # noqa: ANN401
    """JSON inside a script element of HTML, whose texts are shown on the page; tables in them keep their lines."""
    return json.dumps(_visible_texts(value)).replace("<", "\\u003c")


def _visible_texts(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return "\n".join(map(visible, value.split("\n")))
    if isinstance(value, dict):
        return {key: _visible_texts(entry) for key, entry in value.items()}
    return [_visible_texts(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def json_text(text: str) -> str:
    """JSON text for a terminal: the same values, with the codes of characters that are not printable."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def csv_cell(value: Any) -> Any:  # noqa: ANN401
    """A value for a CSV writer: a text that spreadsheets would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    shown = visible(value)
    return f"'{shown}" if shown.lstrip().startswith(("=", "+", "-", "@")) and not _is_number(shown) else shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def quoted(text: str) -> str:
    """A string literal as Python, TOML and YAML read it."""
    return '"' + "".join(map(_literal, text)) + '"'


def _literal(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    if 0xD800 <= code < 0xE000:  # half a character, which TOML and YAML cannot say
        return "\N{REPLACEMENT CHARACTER}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_PLAIN_YAML = re.compile(r"[A-Za-z][\w.+-]*(?: [\w.+-]+)*", re.ASCII)
_YAML_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def yaml(text: str) -> str:
    """A string of YAML: plain where that is one to every reader, else quoted."""
    return text if _PLAIN_YAML.fullmatch(text) and text.lower() not in _YAML_WORDS else quoted(text)


def shell(*words: str) -> str:
    """Words of a command of a POSIX shell."""
    return shlex.join(words)


def workflow_command(level: str, text: str, **attributes: str) -> str:
    """A workflow command of GitHub Actions (`::error file=..::text`) with the attributes that have a value."""
    written = ",".join(f"{key}={_percent(value, ':,')}" for key, value in attributes.items() if value)
    return f"::{level} {written}::{_percent(text)}"


def _percent(text: str, further: str = "") -> str:
    shown = visible(text)
    for character in "%" + further:
        shown = shown.replace(character, f"%{ord(character):02X}")
    return shown

"""Mutations of JSON documents and of text."""

from __future__ import annotations

import json
import random
from typing import Any

NUMBERS = (
    "-1", "0", "1", "2", "3", "7", "0.5", "-0.0", "1e-320", "1e308", "-1e308", "1e400", "100000000", "4294967296",
    str(2**63), str(10**30), "9" * 400, "9" * 5000, "-" + "9" * 5000, "NaN", "Infinity", "-Infinity",
)  # fmt: skip
OTHERS = ("null", "true", "false", '""', '"x"', '"0"', '"F0.0"', '"(F0.0)*1000000000"', '"x{0+1i}"', '"\\u0000"',
          '"\\ud800"', "[]", "{}", "[0]", '["x"]', "[[]]", '{"x": 1}', '"' + "9" * 400 + '"')  # fmt: skip
PIECES = ("", " ", "\n", "\t", ":", "-", "- ", "{", "}", "[", "]", ",", "#", "%", "&a ", "*a", "!!int ", "!x ", "|",
          ">", "'", '"', "---\n", "...\n", "%YAML 1.5\n---\n", "%YAML 1.1\n---\n", "%TAG ! x\n---\n", "? ",
          "<<: ", "@", "`", "\x00", "\x85", "\u2028", "\ufeff", "é", ".inf", "-.inf", ".nan", "1e308", "1e400", "0x10",
          "0o17", "1_000",
          "9" * 400, "9" * 5000, "-1", "0", "1.5", "~", "null", "yes", "1:30:00", "2001-01-01", "inf", "nan",
          "[" * 200, "- " * 200, "&a [*a]", "1e999999999 GB", "100000000")  # fmt: skip


def mutate_json(text: str, rng: random.Random) -> str:
    """Change values of a JSON document, or one time in ten its text."""
    if rng.random() < 0.1:
        return mutate_text(text, rng)
    document = json.loads(text)
    literals: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(document, rng, literals)
    changed = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    for number, literal in enumerate(literals):
        changed = changed.replace(f'"@literal {number}@"', literal)
    return changed


def _change(document: Any, rng: random.Random, literals: list[str]) -> None:
    places = _places(document)
    if not places:
        return
    by_key: dict[str, list[tuple[Any, Any]]] = {}
    for owner, key in places:
        by_key.setdefault(str(key) if isinstance(owner, dict) else "[]", []).append((owner, key))
    # Half of the time by key: those of long lists would else be all that is ever changed.
    owner, key = rng.choice(by_key[rng.choice(sorted(by_key))] if rng.random() < 0.5 else places)
    action = rng.random()
    if action < 0.15:
        del owner[key]
    elif action < 0.25:
        other, place = rng.choice(places)
        owner[key] = json.loads(json.dumps(other[place]))
    elif action < 0.35 and isinstance(owner, list):
        owner.insert(key, json.loads(json.dumps(rng.choice(owner))))
    elif action < 0.4 and isinstance(owner, dict):
        owner[rng.choice(["x", "", "0", str(key) + "_", "9" * 400])] = owner[key]
    elif action < 0.5 and isinstance(owner[key], str) and owner[key]:
        owner[key] = mutate_text(owner[key], rng)
    elif action < 0.65 and isinstance(owner[key], int | float):
        owner[key] = rng.choice([owner[key] + 1, owner[key] - 1, -owner[key], owner[key] * 2, owner[key] * 10**6])
    else:
        numeric = isinstance(owner[key], int | float) and rng.random() < 0.7
        literals.append(rng.choice(NUMBERS if numeric else NUMBERS + OTHERS))
        owner[key] = f"@literal {len(literals) - 1}@"


def _places(value: Any) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key, item in items:
        found += [(value, key), *_places(item)]
    return found


def mutate_text(text: str, rng: random.Random) -> str:
    """Cut, repeat, move or replace a piece of a text: of characters, of a word, or of whole lines."""
    for _ in range(rng.choice((1, 1, 2))):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 1, 1, 2, 5, 40)))
        words = _words(text)
        action = rng.randrange(8)
        if action < 3 and words:
            start, stop = rng.choice(words)
            piece = rng.choice([*PIECES, *NUMBERS, text[slice(*rng.choice(words))]])
        elif action < 5:
            lines = text.splitlines(keepends=True) or [""]
            at = rng.randrange(len(lines))
            other = lines[rng.randrange(len(lines))]
            change = rng.randrange(4)
            lines[at] = ("", lines[at] * 2, other, " " * rng.randrange(1, 5) + lines[at])[change]
            text = "".join(lines)
            continue
        elif action == 5:
            piece = ""
            stop = len(text) if rng.random() < 0.2 else stop
        else:
            piece = rng.choice(PIECES)
        text = text[:start] + piece + text[stop:]
    return text


def _words(text: str) -> list[tuple[int, int]]:
    found, start = [], None
    for i, char in enumerate([*text, " "]):
        if char.isalnum() or char in "._-":
            start = i if start is None else start
        elif start is not None:
            found.append((start, i))
            start = None
    return found

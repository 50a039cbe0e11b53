"""Remedies in the messages of the package, found in its source: texts that name an option or a command."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("planner", "cli", "models")
RAISERS = frozenset(
    {
        "ShardplanError",
        "UsageError",
        "ModelError",
        "HardwareError",
        "JobError",
        "InfeasibleError",
        "PlanError",
        "RunError",
        "OutputError",
        "ModelBuildError",
        "Problem",
        "BadParameter",
        "ClickException",
        "Gap",
        "damaged",
        "finding",
        "refuse",
        "wrong",
        "Door",
        "Note",
        "warn",
        "info",
    }
)
"""Functions and classes whose arguments are texts for users."""
NAMES_SOMETHING = re.compile(r"(?<![\w-])--[a-z][a-z-]+|`shardplan |pip install ")
"""What a remedy that can be followed names: an option, a command, a package."""
PLACE = re.compile(r"--[a-z-]+")
"""An option alone is the place of an error."""


@dataclass(frozen=True)
class Remedy:
    """A text that names an option or a command, with `{}` where a value stands, and the file that it is in."""

    text: str
    file: str


@functools.cache
def remedies() -> tuple[Remedy, ...]:
    """All remedies of the package, each text once a file."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
                if NAMES_SOMETHING.search(text) and not PLACE.fullmatch(text):
                    found[text, str(path.relative_to(ROOT))] = None
    return tuple(Remedy(*each) for each in found)


def _texts(module: ast.Module) -> Iterator[str]:
    """Texts of the calls that raise or note something."""
    for function in (each for each in ast.walk(module) if isinstance(each, ast.FunctionDef)):
        calls = [each for each in ast.walk(function) if isinstance(each, ast.Call) and _name(each.func) in RAISERS]
        assigned = _assigned(function) if calls else {}
        for call in calls:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                yield from _templates(argument, assigned)


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """By name of a variable of a function: what it is set to."""
    values: dict[str, list[ast.expr]] = {}
    for each in ast.walk(function):
        if not isinstance(each, ast.Assign):
            continue
        target, value = each.targets[0], each.value
        if isinstance(target, ast.Name):
            values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for name, part in zip(target.elts, value.elts, strict=False):
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(part)
    return values


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _templates(node: ast.expr, assigned: dict[str, list[ast.expr]], depth: int = 3) -> list[str]:
    """The texts that an expression may be, with `{}` for what is filled in."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_templates(node.body, assigned, depth), *_templates(node.orelse, assigned, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_templates(node.left, assigned, depth), *_templates(node.right, assigned, depth)]
    if isinstance(node, ast.Name) and depth:
        return [text for value in assigned.get(node.id, []) for text in _templates(value, assigned, depth - 1)]
    return []

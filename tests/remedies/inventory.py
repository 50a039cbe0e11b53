"""Remedies in the messages of the package, found in its source: texts that name an option or a command."""

from __future__ import annotations

import ast
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
    functions = [each for each in ast.walk(module) if isinstance(each, ast.FunctionDef)]
    assigned: dict[int, dict[str, list[ast.expr]]] = {}
    for function in functions:
        own: dict[str, list[ast.expr]] = {}
        for each in ast.walk(function):
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                own.setdefault(each.targets[0].id, []).append(each.value)
            elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Tuple | ast.List):
                names = [target.id for target in each.targets[0].elts if isinstance(target, ast.Name)]
                values = each.value.elts if isinstance(each.value, ast.Tuple) else []
                for name, value in zip(names, values, strict=False):
                    own.setdefault(name, []).append(value)
        for each in ast.walk(function):
            assigned.setdefault(id(each), own)
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and _name(call.func) in RAISERS:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                yield from _templates(argument, assigned.get(id(call), {}))


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
